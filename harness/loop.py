"""An event loop whose clock is virtual: a sleep takes no time, and a deadlock is seen at once.

When nothing is ready the clock jumps to the next timer. When there is no timer
either, nothing can ever happen again: `Deadlock`. A retry storm of 60 sleeps
takes half a millisecond, and a run gives the same history every time.

With ``sockets=True`` (the loopback front: client and server on this very
loop) the kernel is asked first, and a jump of more than `GRACE` virtual
seconds is preceded by a short real wait, so that bytes on their way win
against a client's timeout. While a real server has to answer (`VirtualLoop.outside`)
time is real.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

MAX_STEPS = 200_000
MAX_VIRTUAL_S = 100_000.0
GRACE_S, REAL_WAIT_S = 0.05, 0.0005
LAST_WAIT_S = {"threads": 5.0, "sockets": 0.2}  # before a deadlock is declared


class Halt(BaseException):
    """The loop cannot or may not go on. A BaseException, so that no client catches it by accident."""


class Deadlock(Halt):
    """Nothing is ready and nothing is scheduled."""


class Exceeded(Halt):
    """The run used up its steps or its virtual time."""


class _VirtualSelector(selectors.BaseSelector):
    """Wraps the real selector; ``select`` advances the clock instead of waiting."""

    def __init__(self, *, sockets: bool) -> None:
        self._real = selectors.DefaultSelector()
        self.sockets = sockets
        self.now = 0.0
        self.steps = 0
        self.threads = False
        self.jobs = 0  # that threads have and have not done
        self.outside = 0  # that a real server has and has not answered
        self.watcher: Callable[[float | None], None] | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        self.steps += 1
        if self.steps > MAX_STEPS or self.now > MAX_VIRTUAL_S:
            raise Exceeded(f"no end after {self.steps} steps and {self.now:.0f} virtual seconds")
        if self.outside and timeout != 0:
            return self._wait(timeout)
        if self.watcher is not None and timeout != 0:
            ready = self._real.select(LAST_WAIT_S["threads"]) if self.jobs else []
            if ready:
                return ready
            tell, self.watcher = self.watcher, None
            tell(timeout)
            return []
        if self.sockets or self.threads:
            ready = self._real.select(0)
            if not ready and timeout is None:
                ready = self._real.select(LAST_WAIT_S["threads" if self.threads else "sockets"])
            elif not ready and timeout is not None and timeout > GRACE_S:
                ready = self._real.select(REAL_WAIT_S)
            if ready:
                return ready
        if timeout is None:
            if not self.sockets and len(self._real.get_map()) > 1:  # more than the loop's own pipe
                raise Deadlock("it waits on a socket, which this engine has none of (try --engine loopback)")
            raise Deadlock("it waits for something that can never happen")
        self.now += max(timeout, 0.0)
        return []

    def _wait(self, timeout: float | None) -> list[Any]:
        before = time.monotonic()
        ready = self._real.select(timeout)
        self.now += time.monotonic() - before
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> Any:
        return self._real.unregister(fileobj)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. One loop serves many runs; `run` bounds each."""

    def __init__(self, *, sockets: bool = False) -> None:
        self._virtual = _VirtualSelector(sockets=sockets)
        super().__init__(self._virtual)
        self.set_exception_handler(lambda loop, context: None)  # a target's stray task is not our news

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        self._virtual.threads = True  # a thread's answer arrives through the self-pipe
        self._virtual.jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _: Any) -> None:
        self._virtual.jobs -= 1

    @contextmanager
    def outside(self) -> Iterator[None]:
        """As long as one of these blocks is open the clock is a real one: a server outside is at work."""
        self._virtual.outside += 1
        try:
            yield
        finally:
            self._virtual.outside -= 1

    def run(self, main: Coroutine[Any, Any, Any], ended: Callable[[], None] = lambda: None) -> Any:
        """Runs ``main`` to its end within the bounds, then cancels what it left behind.

        ``ended`` is called in between: what happens from then on is no part of the run.
        Raises `Deadlock` or `Exceeded`; whatever ``main`` raises passes through.
        """
        self._virtual.steps, self._virtual.now = 0, 0.0
        task = self.create_task(main)
        try:
            return self.run_until_complete(task)
        finally:
            ended()
            self.sweep()

    def resume(self, part: Coroutine[Any, Any, Any]) -> Any:
        """Runs a part of a run: the clock goes on, and what it leaves behind stays until `sweep`."""
        self._virtual.steps = 0
        return self.run_until_complete(self.create_task(part))

    def idle(self) -> asyncio.Future[float | None]:
        """Done as soon as nothing is ready any more: the seconds to the next timer, None without one.

        Time stands still until then, and until `jump`.
        """
        done: asyncio.Future[float | None] = self.create_future()
        self._virtual.watcher = done.set_result
        return done

    def restart_clock(self) -> None:
        """Sets the clock to 0."""
        self._virtual.now = 0.0

    def jump(self, seconds: float) -> None:
        """Sets the clock forward."""
        self._virtual.now += seconds

    def sweep(self) -> None:
        """Cancels what a run has left behind."""
        self._virtual.watcher = None  # whoever waited for it is cancelled too
        for _ in range(3):  # a task may need more than one cancel; one that ignores three is left
            left = [t for t in asyncio.all_tasks(self) if not t.done() and not _serves(t)]
            if not left:
                return
            for task in left:
                task.cancel()
            self._virtual.steps, self._virtual.now = 0, 0.0
            try:
                self.run_until_complete(asyncio.wait(left, timeout=1))
            except Halt:
                continue


def _serves(task: asyncio.Task[Any]) -> bool:
    """The server side of a kept-alive connection outlives a run."""
    return getattr(task.get_coro(), "__qualname__", "") == "RequestHandler.start"
