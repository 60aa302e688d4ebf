"""Requests to a server over real HTTP, and what came back: the hands of `harness.probes`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from harness.server import NoServer, Server

PATIENCE_S = 60.0
"""Seconds a server may take for an answer of some hundred tokens before it counts as dead."""
BEGUN = 3
"""Events after which a stream surely runs."""
EVERY_S = 0.1
SHOWN = 200
"""Letters of an answer in an error."""


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Where the answers of the server at ``url`` are read. Raises NoServer for what is not built as they are."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = one_line(f"{type(error).__name__}: {error}")
        raise NoServer(f"the server at {url} answers as no SGLang does: {said}") from error


def one_line(text: str) -> str:
    """As much of a text as can be shown in an error."""
    return " ".join(text.split())[:SHOWN]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. ``part``: which of its behaviour's requests; ``during``: what held when it ended.

    ``status`` None: the connection broke before an answer. A stream has ``events``, without [DONE], which is ``done``;
    where a recording keeps some of them only, there were ``of``.
    """

    behaviour: str
    part: str
    method: str
    path: str
    request: Any
    status: int | None = None
    kind: str | None = None
    body: Any = None
    events: tuple[Any, ...] | None = None
    of: int = 0
    done: bool = False
    during: str = ""


class Missed(Exception):
    """What a behaviour is about did not come about: a request ended before anything could happen to it."""


class Asked:
    """A request on its way. ``task`` gives its exchange."""

    def __init__(self, rid: str = "") -> None:
        self.rid = rid
        self.events: list[Any] = []
        self.news = asyncio.Event()
        self.task: asyncio.Task[Exchange]

    async def begun(self, events: int = BEGUN) -> None:
        """Until the stream has had so many events. Raises Missed if it has ended."""
        while len(self.events) < events and not self.task.done():
            await self.news.wait()
            self.news.clear()
        self.runs()

    def runs(self) -> None:
        """Raises Missed if it has ended."""
        if self.task.done():
            raise Missed

    async def leave(self) -> None:
        """Closes the connection."""
        self.task.cancel()
        await asyncio.wait({self.task})


class Wire:
    """A connection for each request: an error in a stream spoils the next one on its connection (0.5.23, by hand).

    ``prefix`` begins the id of every request, so that nothing else can be aborted.
    """

    def __init__(self, session: aiohttp.ClientSession, server: Server, prefix: str) -> None:
        self.session, self.server, self.prefix = session, server, prefix
        self.behaviour = self.during = ""
        self.exchanges: list[Exchange] = []
        self.last = False
        """Nothing is tried again."""
        self._open: set[Asked] = set()
        self._number = 0

    async def call(self, path: str, body: Any = None, part: str = "", method: str = "POST") -> Exchange:
        """Any request but those whose end something else decides."""
        exchange = await self._send(Exchange(self.behaviour, part, method, path, body), None)
        self.exchanges.append(exchange)
        return exchange

    async def get(self, path: str, part: str = "") -> Exchange:
        return await self.call(path, None, part, "GET")

    def start(self, part: str, body: dict[str, Any], rid: str = "") -> Asked:
        """A request to /generate that goes on while others are sent; recorded when it ends."""
        asked = Asked(self.rid(rid or part))
        exchange = Exchange(self.behaviour, part, "POST", "/generate", body | {"rid": asked.rid})

        def end(_: object) -> None:
            self._open.discard(asked)
            asked.news.set()

        asked.task = asyncio.ensure_future(self._send(exchange, asked))
        asked.task.add_done_callback(end)
        self._open.add(asked)
        return asked

    async def ended(self, *asked: Asked) -> None:
        """Until all have ended; records them in this order."""
        for one in asked:
            self.exchanges.append(await one.task)

    async def abort(self, rid: str, part: str = "abort") -> None:
        await self.call("/abort_request", {"rid": self.rid(rid)}, part)

    def rid(self, name: str) -> str:
        """An id that no other behaviour has: what a stream leaves behind aborts its id 2 s later (see `rid_reused`)."""
        return f"{self.prefix}{self._number}-{name}"

    async def until(self, holds: Callable[[int, int], bool], seconds: float = 5.0) -> None:
        """Until the numbers of running and waiting requests are so, or the time is over; they can be 0.5 s old."""
        for _ in range(round(seconds / EVERY_S)):
            if holds(*await self.load()):
                return
            await asyncio.sleep(EVERY_S)

    async def load(self) -> tuple[int, int]:
        """Running and waiting requests, of everybody."""
        found = await self._send(Exchange(self.behaviour, "", "GET", "/v1/loads?include=core", None), None)
        loads = found.body["loads"] if isinstance(found.body, dict) else []
        return sum(x["num_running_reqs"] for x in loads), sum(x.get("num_waiting_reqs", 0) for x in loads)

    async def behave(self, name: str, run: Callable[[Wire], Awaitable[None]]) -> None:
        """Runs a behaviour's script, and leaves nothing of it on the server. Raises Missed and NoServer."""
        self.behaviour, self.during = name, ""
        self._number += 1
        before = len(self.exchanges)
        try:
            await run(self)
        except Missed:
            del self.exchanges[before:]
            raise
        finally:
            await self.end(list(self._open))

    async def end(self, asked: Sequence[Asked]) -> None:
        """Aborts requests that nobody wants to know more of."""
        for one in asked:
            with contextlib.suppress(NoServer):
                await self._send(Exchange(self.behaviour, "", "POST", "/abort_request", {"rid": one.rid}), None)
            await one.leave()

    async def _send(self, exchange: Exchange, asked: Asked | None) -> Exchange:
        try:
            async with self.session.request(
                exchange.method, self.server.url + exchange.path, json=exchange.request
            ) as answer:
                return await self._answered(exchange, answer, asked)
        except TimeoutError as error:
            raise NoServer(f"{self.server.url} gave no answer in {PATIENCE_S:.0f} s ({exchange.behaviour})") from error
        except (aiohttp.ClientError, OSError) as error:
            if exchange.path != ALIVE:
                await self._send(Exchange(exchange.behaviour, "", "GET", ALIVE, None), None)
                return self._now(exchange)
            raise NoServer(f"the server at {self.server.url} died ({exchange.behaviour}): {error}") from error

    async def _answered(self, exchange: Exchange, answer: aiohttp.ClientResponse, asked: Asked | None) -> Exchange:
        kind = answer.headers.get("Content-Type")
        if not (kind or "").startswith("text/event-stream"):
            return self._now(exchange, status=answer.status, kind=kind, body=_value(_decoded(await answer.read())))
        asked = asked or Asked()
        rest, done = b"", False
        async for piece in answer.content.iter_any():
            *whole, rest = (rest + piece).split(b"\n\n")
            for line in whole:
                data = _decoded(line).removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                else:
                    asked.events.append(_value(data))
            asked.news.set()
        return self._now(
            exchange, status=answer.status, kind=kind, events=tuple(asked.events), of=len(asked.events), done=done
        )

    def _now(self, exchange: Exchange, **answer: Any) -> Exchange:
        return replace(exchange, during=self.during, **answer)


ALIVE = "/get_model_info"
"""Answers at once while the server lives; /health would generate a token."""


def _decoded(data: bytes) -> str:
    """SGLang speaks UTF-8, whatever a header says; what is none is kept as far as it can be."""
    return data.decode(errors="replace")


def _value(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
