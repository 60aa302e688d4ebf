"""Connections at their edges: requests in pieces, clients that leave, and requests when no run is in progress."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import httpx
import pytest
from aiohttp import web

from harness import tokenizer
from harness.engines import FRONTS, Session, front
from harness.engines.inproc import MemoryTransport, _take, join
from harness.engines.sglang import Engine
from harness.engines.web import cut
from harness.history import PLAIN, STREAM, Delivered, Event, Flagged, History, Requested, Returned
from harness.loop import Deadlock, VirtualLoop
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.targets.function import FunctionTarget, Generate

SOCKETLESS = ("inproc", "aioresponses")


def of(kind: type[Any], history: History) -> list[Any]:
    return [event for event in history.events if isinstance(event, kind)]


def run(client: Generate, name: str, schedule: Schedule, mode: str = PLAIN) -> History:
    runner = Runner(FunctionTarget("client", client, client), name)
    try:
        return runner.run(schedule, mode)
    finally:
        runner.close()


def url(args: Any) -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


# Requests in pieces

WHOLE = b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;name=value\r\nbod\r\n1\r\ny\r\n0\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [WHOLE, CHUNKED], ids=["length", "chunked"])
def test_a_request_is_taken_when_it_is_whole_and_not_before(request_bytes: bytes) -> None:
    for end in range(len(request_bytes)):
        buffer = bytearray(request_bytes[:end])
        assert _take(buffer) is None
        assert buffer == request_bytes[:end]
    buffer = bytearray(request_bytes + b"GET /next")
    assert _take(buffer) == ("/generate", b"body")
    assert buffer == b"GET /next"


def test_a_request_without_a_length_has_no_body() -> None:
    assert _take(bytearray(b"GET /health?a=b HTTP/1.1\r\nHost: h\r\n\r\n")) == ("/health?a=b", b"")


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("name", FRONTS)
def test_a_body_that_is_no_JSON_is_refused_and_recorded(name: str) -> None:
    seen: list[int] = []

    async def sends(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session, session.post(url(args), data=b"not JSON", headers=JSON) as reply:
            seen.append(reply.status)
        return sample

    asked = of(Requested, run(sends, name, Schedule()))
    assert set(seen) == {400}
    assert [(e.input_ids, e.text, e.params) for e in asked[:1]] == [(None, None, {})]


@pytest.mark.parametrize("name", ["inproc", "loopback"])
def test_a_body_that_is_sent_in_chunks_is_read(name: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"input_ids": [97], '
        yield b'"sampling_params": {"max_new_tokens": 7}}'

    async def sends(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session, session.post(url(args), data=pieces(), headers=JSON) as reply:
            assert reply.status == 200
        return sample

    assert of(Requested, run(sends, name, Schedule()))[0].params == {"max_new_tokens": 7}


# No run


@contextmanager
def started(name: str) -> Iterator[tuple[Any, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    """A front that no run is attached to, and a way to run something on its loop."""
    made = front(name)
    loop = VirtualLoop(sockets=made.sockets)
    loop.run(made.start())
    try:
        yield made, loop.run
    finally:
        loop.run(made.stop())
        loop.close()


async def by_aiohttp(address: str) -> int:
    async with aiohttp.ClientSession() as session, session.post(address, json={}) as reply:
        return reply.status


async def by_httpx(address: str) -> int:
    async with httpx.AsyncClient() as client:
        return (await client.post(address, json={})).status_code


@pytest.mark.parametrize("name", SOCKETLESS)
def test_without_a_run_nobody_answers_aiohttp(name: str) -> None:
    with started(name) as (made, on_loop), pytest.raises(aiohttp.ServerDisconnectedError):
        on_loop(by_aiohttp(f"http://{made.host}:{made.port}/generate"))


def test_without_a_run_nobody_answers_httpx() -> None:
    with started("inproc") as (made, on_loop), pytest.raises(httpx.ConnectError, match="no run is in progress"):
        on_loop(by_httpx(f"http://{made.host}:{made.port}/generate"))


@pytest.mark.parametrize("ask", [by_aiohttp, by_httpx])
def test_without_a_run_the_server_is_not_available(ask: Callable[[str], Coroutine[Any, Any, int]]) -> None:
    with started("loopback") as (made, on_loop):
        assert on_loop(ask(f"http://{made.host}:{made.port}/generate")) == 503


# Clients that leave

LONG = Schedule(budget=400, split=8)


async def leaves(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    """Reads one event, and goes."""
    payload = {"input_ids": [97], "sampling_params": {"max_new_tokens": 400}, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(url(args), json=payload) as reply:
        await reply.content.readuntil(b"\n\n")
        reply.close()
    sample.status = type(sample).Status.TRUNCATED
    return sample


@pytest.mark.parametrize("name", ["inproc", "loopback"])
def test_a_client_that_leaves_a_split_stream_is_told_no_more(name: str) -> None:
    history = run(leaves, name, LONG, STREAM)
    assert 0 < len(of(Delivered, history)) < 400
    assert of(Returned, history)[0].view.status == "truncated"


def test_a_response_that_finds_its_client_gone_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The connection may break between two looks at it: then it is the write that fails."""
    caplog.set_level(logging.DEBUG)
    written: list[bytes] = []
    real = web.StreamResponse.write

    async def once(self: web.StreamResponse, data: Any) -> None:
        if written:
            raise ConnectionResetError("Cannot write to closing transport")
        written.append(bytes(data))
        await real(self, data)

    async def reads(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        payload = {"input_ids": [97], "sampling_params": {"max_new_tokens": 3}, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url(args), json=payload) as reply:
            async for _ in reply.content.iter_any():
                pass
        sample.status = type(sample).Status.TRUNCATED
        return sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web.StreamResponse, "write", once)
        history = run(reads, "loopback", Schedule(budget=3), STREAM)
    assert len([e for e in of(Delivered, history) if e.attempt == 0]) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_connection_that_is_gone_cannot_becut() -> None:
    closed: list[bool] = []
    for transport in (None, SimpleNamespace(close=lambda: closed.append(True))):
        cut(cast(web.BaseRequest, SimpleNamespace(transport=transport)))
    assert closed == [True]


# Memory


class End(asyncio.Protocol):
    """One end, and what happened to it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.seen.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.seen.append(error)


def connected(use: Callable[[Any, Any], None]) -> tuple[list[Any], list[Any]]:
    """What two ends saw after ``use`` of the transports of both."""

    async def main() -> tuple[list[Any], list[Any]]:
        client, server = End(), End()
        join(client, server, asyncio.get_running_loop())
        use(client.transport, server.transport)
        await asyncio.sleep(1)
        return client.seen, server.seen

    loop = VirtualLoop()
    try:
        seen: tuple[list[Any], list[Any]] = loop.run(main())
    finally:
        loop.close()
    return seen


@pytest.mark.parametrize("how", ["close", "abort"])
def test_an_end_that_closes_closes_the_other_once(how: str) -> None:
    def use(client: MemoryTransport, server: MemoryTransport) -> None:
        client.write(b"before")
        client.writelines([b"a", b"b"])
        for _ in range(2):
            getattr(client, how)()
        client.write(b"after")
        assert client.is_closing() and not server.is_closing()

    assert connected(use) == ([None], [b"before", b"ab", None])


def test_both_ends_may_close_at_once() -> None:
    def use(client: MemoryTransport, server: MemoryTransport) -> None:
        client.close()
        server.close()

    assert connected(use) == ([None], [None])


def test_what_arrives_at_a_closed_end_is_lost() -> None:
    def use(client: MemoryTransport, server: MemoryTransport) -> None:
        client.write(b"late")
        server.close()

    assert connected(use) == ([None], [None])


def test_nothing_is_ever_held_back() -> None:
    def use(client: MemoryTransport, server: MemoryTransport) -> None:
        client.write(b"")
        client.pause_reading()
        server.write(b"comes all the same")
        client.resume_reading()
        assert client.get_write_buffer_size() == 0

    assert connected(use) == ([b"comes all the same"], [])


# After the run


def test_what_a_run_leaves_behind_is_not_recorded() -> None:
    """A task that, when it is cancelled, asks once more: its request, what it is told and its flag are nobody's."""
    statuses: list[int] = []
    schedule = Schedule(budget=4, attempts=(Attempt("flag", after=1),) * 2)  # the second call is the last

    async def ask(args: Any) -> None:
        payload = {"input_ids": [97], "sampling_params": {"max_new_tokens": 4}, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url(args), json=payload) as reply:
            await reply.read()
            statuses.append(reply.status)

    async def lingers(args: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await ask(args)

    left: list[asyncio.Task[None]] = []

    async def client(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        left.append(asyncio.create_task(lingers(args)))
        await asyncio.sleep(0)
        sample.status = type(sample).Status.TRUNCATED
        return sample

    raised: list[bool] = []
    target = FunctionTarget("client", client, client)
    target.set_abort = raised.append  # type: ignore[method-assign]
    runner = Runner(target)
    history = runner.run(schedule, STREAM)
    runner.close()
    assert raised == [False, False]  # it is lowered after each call
    assert statuses and set(statuses) == {200}
    assert of(Requested, history) == of(Delivered, history) == of(Flagged, history) == []


def test_a_flag_is_raised_when_the_part_that_carries_it_is_told() -> None:
    events: list[Event] = []
    raised: list[int] = []
    engine = Engine(Schedule(budget=2), tokenizer.load())
    session = Session(engine, events.append, lambda: raised.append(len(events)))
    session.begin(1, 0, Attempt("flag", after=1))
    reply = session.open("/generate", b'{"input_ids": [97], "stream": true, "sampling_params": {"max_new_tokens": 2}}')

    async def drain() -> None:
        async for _ in session.send(reply):
            pass

    loop = VirtualLoop()
    loop.run(drain())
    loop.close()
    assert [type(e) for e in events] == [Requested, Delivered, Flagged, Delivered]
    assert raised == [3]


def test_a_wait_on_a_socket_of_one_s_own_names_the_other_engine() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = VirtualLoop()
    try:
        with ours, theirs, pytest.raises(Deadlock, match=r"waits on a socket.*try --engine loopback"):
            loop.run(loop.sock_recv(ours, 1))
    finally:
        loop.close()
