"""The virtual loop: no real time passes, nothing hangs, nothing is left behind that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.loop import LAST_WAIT_S, MAX_STEPS, MAX_VIRTUAL_S, Deadlock, Exceeded, Halt, VirtualLoop

SOON_S = 30.0
"""Real seconds that nothing here may take, on a busy machine too; it stands against hours of virtual time."""


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    began = time.monotonic()
    yield made
    made.close()
    assert time.monotonic() - began < SOON_S


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_sleeps_take_no_real_time(loop: VirtualLoop) -> None:
    async def main() -> float:
        began = loop.time()
        for _ in range(60):
            await asyncio.sleep(60)
        return loop.time() - began

    assert loop.run(main()) == pytest.approx(3600)


def test_timers_fire_in_their_order(loop: VirtualLoop) -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def wait(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(*(wait(s) for s in (300, 1, 20)))
        return order

    assert loop.run(main()) == [1, 20, 300]


def test_timeouts_are_virtual(loop: VirtualLoop) -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), 1000)
        return loop.time()

    assert loop.run(main()) >= 1000


def test_each_run_begins_at_zero(loop: VirtualLoop) -> None:
    async def main() -> float:
        began = loop.time()
        await asyncio.sleep(MAX_VIRTUAL_S * 0.9)
        return began

    assert [loop.run(main()) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_deadlock_is_seen_at_once(loop: VirtualLoop) -> None:
    with pytest.raises(Deadlock, match="can never happen"):
        loop.run(forever())


def test_two_tasks_that_wait_for_each_other(loop: VirtualLoop) -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            await first.wait()
            second.set()

        async def two() -> None:
            await second.wait()
            first.set()

        await asyncio.gather(one(), two())

    with pytest.raises(Deadlock):
        loop.run(main())


def test_a_busy_loop_is_bounded(loop: VirtualLoop) -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Exceeded, match="steps"):
        loop.run(main())
    assert loop._virtual.steps <= MAX_STEPS + 1


def test_endless_sleeping_is_bounded(loop: VirtualLoop) -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1000)

    with pytest.raises(Exceeded, match="virtual seconds"):
        loop.run(main())


def test_no_client_catches_a_halt_by_accident() -> None:
    assert not issubclass(Halt, Exception)


def test_what_the_coroutine_raises_passes_through(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        loop.run(main())


def test_a_loop_goes_on_after_a_deadlock(loop: VirtualLoop) -> None:
    async def main() -> str:
        await asyncio.sleep(5)
        return "fine"

    for _ in range(3):
        with pytest.raises(Deadlock):
            loop.run(forever())
        assert loop.run(main()) == "fine"


def test_leftover_tasks_are_cancelled(loop: VirtualLoop) -> None:
    left: list[asyncio.Task[None]] = []

    async def main() -> None:
        left.extend(asyncio.create_task(t) for t in (forever(), asyncio.sleep(10**6)))
        await asyncio.sleep(0)

    loop.run(main())
    assert [t.cancelled() for t in left] == [True, True]
    assert not asyncio.all_tasks(loop)


def test_leftover_tasks_clean_up(loop: VirtualLoop) -> None:
    """A cancelled task may still await: its finally clause runs to the end."""
    done: list[str] = []

    async def tidy() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.5)
            done.append("tidied")

    async def main() -> None:
        asyncio.create_task(tidy())  # noqa: RUF006
        await asyncio.sleep(0)

    loop.run(main())
    assert done == ["tidied"]


def test_a_task_that_ignores_cancellation_is_left_behind(loop: VirtualLoop) -> None:
    tasks: list[asyncio.Task[None]] = []
    stop = False

    async def stubborn() -> None:
        while not stop:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main() -> str:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(3)
        return "main is done"

    assert loop.run(main()) == "main is done"
    assert not tasks[0].done()
    assert loop.run(asyncio.sleep(1, "the next run works")) == "the next run works"
    stop = True
    loop.run(asyncio.sleep(5))
    assert tasks[0].done()


def test_a_task_that_ignores_cancellation_and_spins_is_left_behind(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.loop.MAX_STEPS", 200)
    stop, cancelled = False, 0

    async def stubborn() -> None:
        nonlocal cancelled
        while not stop:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                cancelled += 1

    async def main() -> str:
        loop.create_task(stubborn())
        await asyncio.sleep(0)
        return "main is done"

    assert loop.run(main()) == "main is done"
    assert cancelled == 3
    stop = True
    loop.run(asyncio.sleep(5))


def test_a_main_that_ignores_cancellation_and_hangs(loop: VirtualLoop) -> None:
    async def main() -> None:
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                continue

    with pytest.raises(Deadlock):
        loop.run(main())
    assert loop.run(asyncio.sleep(1, "fine")) == "fine"


def test_threads_work(loop: VirtualLoop) -> None:
    """The answer of a thread is waited for in real time; the clock stands still meanwhile."""
    go = threading.Event()

    async def main() -> tuple[str, float]:
        task = asyncio.ensure_future(asyncio.to_thread(go.wait, 5))
        loop.call_soon(go.set)
        done = await task
        return f"done {done}", loop.time()

    answer, now = loop.run(main())
    assert answer == "done True"
    assert now < 1


def test_a_thread_that_raises(loop: VirtualLoop) -> None:
    async def main() -> Any:
        return await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        loop.run(main())


def test_what_a_stray_task_raises_is_not_reported(loop: VirtualLoop, capsys: pytest.CaptureFixture[str]) -> None:
    async def fails() -> None:
        raise RuntimeError("nobody asks")

    async def main() -> None:
        asyncio.create_task(fails())  # noqa: RUF006
        await asyncio.sleep(1)

    loop.run(main())
    assert capsys.readouterr().err == ""


def test_a_run_in_parts_keeps_its_tasks_and_its_clock(loop: VirtualLoop) -> None:
    ticks: list[float] = []

    async def ticking() -> None:
        while True:
            await asyncio.sleep(2)
            ticks.append(loop.time())

    async def begin() -> None:
        tasks.append(loop.create_task(ticking()))
        await asyncio.sleep(3)

    tasks: list[asyncio.Task[None]] = []
    began = loop.time()
    loop.resume(begin())
    loop.resume(asyncio.sleep(2))
    assert [tick - began for tick in ticks] == pytest.approx([2, 4])
    loop.sweep()
    assert tasks[0].cancelled()


def test_when_nothing_is_ready_time_stands_still_until_it_is_set_forward(loop: VirtualLoop) -> None:
    async def main() -> None:
        began = loop.time()
        assert await loop.idle() is None
        sleeping = loop.create_task(asyncio.sleep(5))
        assert await loop.idle() == pytest.approx(5)
        loop.jump(4)
        assert await loop.idle() == pytest.approx(1) and not sleeping.done()
        loop.jump(1)
        await loop.idle()
        assert sleeping.done() and loop.time() - began == pytest.approx(5)

    loop.run(main())


def test_who_waited_until_nothing_is_ready_is_told_nothing_once_the_run_is_over(loop: VirtualLoop) -> None:
    """Nor does it spoil the next run."""

    async def stubborn() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main() -> None:
        loop.create_task(stubborn())
        await asyncio.sleep(0)
        loop.idle().cancel()

    loop.run(main())
    loop.run(asyncio.sleep(1))


@pytest.fixture
def with_sockets() -> Iterator[VirtualLoop]:
    made = VirtualLoop(sockets=True)
    yield made
    made.close()


def test_with_sockets_the_kernel_has_the_last_word_before_a_deadlock(
    with_sockets: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAST_WAIT_S, "sockets", 0.02)
    with pytest.raises(Deadlock, match="can never happen"):
        with_sockets.run(forever())


def test_with_sockets_a_sleep_takes_no_real_time_either(with_sockets: VirtualLoop) -> None:
    began = time.monotonic()
    with_sockets.run(asyncio.sleep(3600))
    assert with_sockets.time() >= 3600 and time.monotonic() - began < SOON_S


def test_with_sockets_bytes_that_are_there_win_against_a_timeout(with_sockets: VirtualLoop) -> None:
    async def main(ours: socket.socket) -> tuple[bytes, float]:
        data = await asyncio.wait_for(with_sockets.sock_recv(ours, 9), 5)
        return data, with_sockets.time()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with_sockets.call_later(0.01, theirs.send, b"here")
        assert with_sockets.run(main(ours)) == (b"here", pytest.approx(0.01))


def test_with_sockets_a_connection_is_served() -> None:
    """Client and server on one virtual loop: bytes on their way win against a timeout of virtual hours."""
    made = VirtualLoop(sockets=True)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    async def main() -> bytes:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"hello\n")
        answer = await asyncio.wait_for(reader.readline(), 3600)
        writer.close()
        server.close()
        return answer

    try:
        assert made.run(main()) == b"hello\n"
    finally:
        made.close()


# While a server outside is at work


def test_time_is_real_as_long_as_a_server_is_at_work(loop: VirtualLoop) -> None:
    async def main() -> tuple[float, float, float]:
        began, real = loop.time(), time.monotonic()
        with loop.outside():
            await asyncio.sleep(0.05)
            took = time.monotonic() - real
        inside = loop.time() - began
        await asyncio.sleep(3600)
        return took, inside, loop.time() - began

    took, inside, whole = loop.run(main())
    assert took >= 0.045 and 0.05 <= inside <= took + 0.05
    assert whole >= 3600


def test_blocks_may_lie_in_each_other_and_end_whatever_happens(loop: VirtualLoop) -> None:
    async def main() -> float:
        with contextlib.suppress(ZeroDivisionError), loop.outside():
            with loop.outside():
                pass
            real = time.monotonic()
            await asyncio.sleep(0.03)
            took = time.monotonic() - real
            raise ZeroDivisionError
        await asyncio.sleep(3600)  # virtual again
        return took

    assert loop.run(main()) >= 0.025


def test_a_task_that_is_cancelled_leaves_no_block_open(loop: VirtualLoop) -> None:
    async def outside() -> None:
        with loop.outside():
            await asyncio.sleep(3600)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(asyncio.create_task(outside()).cancel)
        await asyncio.sleep(7200)

    loop.run(main())
    task: list[Any] = []

    async def leaves() -> None:
        task.append(asyncio.create_task(outside()))
        await asyncio.sleep(0)

    loop.run(leaves())  # what a run leaves behind is swept
    assert task[0].cancelled()
    loop.run(asyncio.sleep(7200))


def test_what_comes_from_outside_is_waited_for(loop: VirtualLoop) -> None:
    """Without a timer the loop would be at its end."""

    async def main() -> bytes:
        near, far = socket.socketpair()
        near.setblocking(False)
        threading.Timer(0.03, far.send, (b"x",)).start()
        with near, far, loop.outside():
            return await loop.sock_recv(near, 1)

    assert loop.run(main()) == b"x"
