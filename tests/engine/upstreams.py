"""Servers to put behind the proxy: our own mock, and small ones that do what it never does.

Each has a loop of its own in a thread, for time on the harness's loop is virtual.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from harness import tokenizer
from harness.engines import HOST
from harness.engines.live import Options
from harness.engines.standalone import Server
from harness.server import SAID

T = TypeVar("T")
FAST = Options(context=256, rate=2000.0)
SLOW = Options(context=256, rate=100.0, length=1_000_000)
"""Its answers end only where they are told to, and long after a test has looked at them."""

VOCABULARY = tokenizer.load()


class Thread:
    """A loop that runs in a thread, until `end`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def end(self) -> None:
        self.call(self._sweep())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()

    async def _sweep(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Mock:
    """The stand-alone mock. ``seen`` are the bodies of its requests, ``aborts`` the ids it was told to abort."""

    def __init__(self, options: Options, *, moody: bool = False) -> None:
        """``moody``: it goes on otherwise each time it is asked."""
        self.thread, self.seen, self.aborts = Thread(), list[Any](), list[str]()
        self.server = self.thread.call(_made(options))
        scheduler, seeds = self.server.scheduler, itertools.count(1)
        accept, abort = scheduler.accept, scheduler.abort

        async def accepts(body: Any, stream: Any) -> Any:
            self.seen.append(body)
            if moody:
                scheduler._speaker.seed = next(seeds)
            return await accept(body, stream)

        def aborts(rid: str) -> None:
            self.aborts.append(rid)
            abort(rid)

        scheduler.accept, scheduler.abort = accepts, aborts  # type: ignore[method-assign]
        self.thread.call(self.server.start())
        self.url = self.server.url

    @property
    def running(self) -> list[str]:
        """The ids of the requests that are there."""
        return [job.rid for job in self.server.scheduler._here()]

    def wait(self, until: Callable[[], bool]) -> bool:
        """Whether it comes true before long."""

        async def look() -> bool:
            for _ in range(2000):
                if until():
                    return True
                await asyncio.sleep(0.005)
            return False

        return self.thread.call(look())

    def die(self) -> None:
        """Breaks every connection, and takes no more."""

        async def now() -> None:
            self.server._listener.close()
            for connection in self.server._web.connections:
                if connection.transport is not None:
                    connection.transport.abort()

        self.thread.call(now())

    def end(self) -> None:
        with suppress(Exception):
            self.thread.call(self.server.stop())
        self.thread.end()


async def _made(options: Options) -> Server:
    return Server(options, tokenizer=VOCABULARY)


@contextmanager
def mock(options: Options = FAST, *, moody: bool = False) -> Iterator[Mock]:
    made = Mock(options, moody=moody)
    try:
        yield made
    finally:
        made.end()


# Servers by hand

Say = Callable[[bytes], Awaitable[None]]
"""Sends bytes as they are."""

Talk = Callable[[Any, Say], Awaitable[None]]
"""Answers the request with this body."""


def http(body: Any = b"", status: int = 200, kind: str = "application/json", length: int | None = None) -> bytes:
    """A whole HTTP answer; ``length``: the one it promises."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(ids: list[int], total: int, finish: str | None = None, **meta: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + json.dumps(answer(ids, total, finish, **meta)).encode() + b"\n\n"


def answer(ids: list[int], total: int | None = None, finish: str | None = None, **meta: Any) -> dict[str, Any]:
    """An answer as SGLang gives it."""
    reason = None if finish is None else {"type": finish}
    given = {"id": "r", "finish_reason": reason, "completion_tokens": len(ids) if total is None else total}
    given["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
    return {"text": VOCABULARY.decode(ids), "output_ids": ids, "meta_info": given | meta}


INFO = {"version": "0.5.23", "max_req_input_len": 250}


async def spoken(body: Any, say: Say) -> None:
    """The answer to a plain request: as many tokens as are asked for."""
    await say(http(answer([97] * body["sampling_params"]["max_new_tokens"], finish="length")))


async def silence(body: Any, say: Say) -> None:
    """Never comes to an end."""
    await asyncio.get_running_loop().create_future()


class Stub:
    """A server that is SGLang but for what ``paths`` say; "rid" is what the requests of clients are answered.

    ``asked`` are the paths that it was asked, in order.
    """

    def __init__(self, paths: dict[str, bytes | Talk]) -> None:
        tokens = list(VOCABULARY.encode(SAID, add_special_tokens=False))
        known: dict[str, bytes | Talk] = {
            "/get_server_info": http(INFO),
            "/tokenize": http({"tokens": tokens}),
            "/generate": spoken,
            "/abort_request": http(),
        }
        self.paths, self.asked = {**known, **paths}, list[str]()
        self.heads, self.bodies = list[str](), list[bytes]()
        self.thread = Thread()
        self._listener = self.thread.call(self._listen())
        self.url = f"http://{HOST}:{self._listener.sockets[0].getsockname()[1]}"

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._talk, HOST, 0)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            path = head.split(" ")[1]
            self.asked.append(path)
            self.heads.append(head)
            if path == "/generate":
                self.bodies.append(body)
            judged = path == "/generate" and b'"rid"' in body and "rid" in self.paths
            answers = self.paths["rid" if judged else path] if path in self.paths else http(b"{}", 404)
            await (say(answers) if isinstance(answers, bytes) else answers(json.loads(body) if body else None, say))
        writer.close()

    def end(self) -> None:
        self.thread.loop.call_soon_threadsafe(self._listener.close)
        self.thread.end()


@contextmanager
def stub(paths: dict[str, bytes | Talk] | None = None) -> Iterator[Stub]:
    made = Stub(paths or {})
    try:
        yield made
    finally:
        made.end()


@contextmanager
def nobody() -> Iterator[str]:
    """The URL of a port at which nothing listens, and nothing will."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        yield f"http://{HOST}:{held.getsockname()[1]}"
