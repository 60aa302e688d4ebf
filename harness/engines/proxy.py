"""A real server behind a proxy that records what passes, and interrupts it as the schedule says.

What the server sends reaches the client byte for byte. What the client sends reaches
the server with one thing added: a request without an id is given one (``rid``), by
which it alone can be aborted. On a server that others use too nothing else is
stopped, paused or flushed: an abort of everything becomes one of each request that
came through here and still runs.

Interruptions that a proxy can cause are caused: it aborts through /abort_request once
enough tokens have passed, cuts, delays, splits and merges what it forwards, leaves the
terminal event out, answers with an error in the server's stead. Schedules with those
that only an engine can cause are adapted first (`harness.adapt`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import cycle
from json import dumps
from typing import Any

import aiohttp
from aiohttp import web

from harness.engines import HOST, MAX_REQUESTS, Session
from harness.engines.hearing import Hearing, Unheard, events
from harness.engines.sglang import DONE, Part, Place, Reply
from harness.engines.upstream import Upstream, kept, named, outside, streams
from harness.engines.web import Handler, cut, deliver, left
from harness.schedule import KINDS, Attempt
from harness.server import describe, timed

CARRIED = frozenset(
    {"run", "abort-request", "delay", "flag", "close", "error-event", "queue-full", "http"}
    | {"drop-before", "drop-inside", "drop-after"}
)

ASKS = frozenset(
    {"/health", "/health_generate", "/ready", "/get_model_info", "/model_info", "/get_server_info", "/server_info"}
    | {"/v1/models", "/v1/loads", "/get_load", "/metrics"}
)
"""What may be asked of the server. Many of its orders are given by GET as well, `/flush_cache` among them."""


class ProxyFront:
    """See `harness.engines.Front`. ``name`` is the server's URL."""

    host = HOST
    cannot = frozenset(KINDS) - CARRIED
    sockets = True
    greedy = True

    def __init__(self, name: str) -> None:
        self.name, self.port = name, 0
        self._relay: Relay | None = None
        self._listener: asyncio.Server | None = None

    @property
    def broken(self) -> str:
        assert self._relay is not None
        return self._relay.broken

    def attach(self, session: Session | None) -> None:
        assert self._relay is not None
        if session is not None:
            self._relay.broken = ""
        self._relay.session = session
        if session is None and not self._relay.broken:
            self._relay.upstream.end_orphans()

    async def start(self) -> None:
        """Raises NoServer where there is none to judge on."""
        self._relay = Relay(Upstream(timed(describe(self.name))))
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(await self._relay.server(cancels=True), self.host, 0)
        self.port = self._relay.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._listener is not None and self._relay is not None
        self._listener.close()
        await self._relay.close()


class Relay(Handler):
    """Passes requests on to the server, and what it answers back to the client."""

    def __init__(self, upstream: Upstream) -> None:
        super().__init__()
        self.upstream, self.port, self.broken = upstream, 0, ""

    async def close(self) -> None:
        await super().close()
        await self.upstream.close()

    async def answer(self, session: Session, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path != "/generate":
            return await self._other(session, request, body)
        place, payload = session.enter(body)
        if place.number >= MAX_REQUESTS:
            return await deliver(session, request, session.overran(place))
        plan = session.met(place)
        if _instead(plan, stream=streams(payload)):
            return await deliver(session, request, session.engine.answer(payload, plan, place))
        rid, named_body = named(payload, body)
        hearing = Hearing(place, stream=streams(payload))
        self.upstream.begins(rid)
        try:
            with outside():
                if plan.kind == "abort-request" and (plan.after == 0 or not streams(payload)):
                    # How far a plain request has come cannot be seen; how fast the server is, is known.
                    self.upstream.abort_in(rid, self.upstream.server.until(plan.after) if plan.after else 0.0)
                coming = self.upstream.generate(payload, named_body, request.headers)
                return await self._pass_on(session, request, coming, hearing, plan, rid)
        except (aiohttp.ClientError, TimeoutError, Unheard) as error:
            return await self._fail(session, request, place, error)
        finally:
            self.upstream.ends(rid, heard=hearing.finished)

    async def _fail(
        self, session: Session, request: web.BaseRequest, place: Place, error: Exception
    ) -> web.StreamResponse:
        """The server does what none does that can be judged on: the run ends."""
        self.broken = self.upstream.gone(error)
        return await deliver(session, request, session.overran(place))

    async def _pass_on(
        self, session: Session, request: web.BaseRequest, coming: Any, hearing: Hearing, plan: Attempt, rid: str
    ) -> web.StreamResponse:
        """Raises aiohttp.ClientError or TimeoutError when the server fails, and Unheard."""
        async with coming as answer:
            headers = kept(answer.headers)
            if answer.content_type != "text/event-stream":
                reply = _plain(hearing, plan, answer.status, await answer.read())
                return await deliver(session, request, reply, headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            with suppress(ConnectionResetError):  # the client has left, and so does the proxy
                await response.prepare(request)
                async for reply in self._replies(session, hearing, plan, rid, events(answer.content.iter_any())):
                    async for piece in session.send(reply, lambda: left(request)):
                        await response.write(piece)
                    if reply.ending == "drop":
                        cut(request)
                    if left(request):
                        return response
                await response.write_eof()
            return response

    async def _replies(
        self, session: Session, hearing: Hearing, plan: Attempt, rid: str, coming: AsyncIterator[bytes]
    ) -> AsyncIterator[Reply]:
        """A stream as it is passed on, in pieces; the last one says how it ends."""
        sizes = cycle(session.engine.schedule.chunks)
        held: list[Part] = []
        first, size = 0, next(sizes)
        async for data in coming:
            before = hearing.count
            if _strikes(plan, hearing):
                yield _struck(plan, session, hearing.place, held, data)
                return
            told = hearing.event(data)
            reached = before < plan.after <= hearing.count
            if plan.kind == "abort-request" and reached:
                self.upstream.abort_in(rid, 0.0)
            late = plan.kind == "delay" and before <= plan.after < hearing.count
            if late and held:
                yield _piece(held)
                held = []
            held.append(Part(data, told, plan.kind == "flag" and reached, late))
            if hearing.count - first >= size or held[-1].flag or hearing.finished:
                yield _piece(held)
                held, first, size = [], hearing.count, next(sizes)
        lost = None if hearing.finished else hearing.place.fault("close")
        yield _piece(held, "drop" if plan.kind == "drop-after" else "end", lost)

    # everything that is not /generate

    async def _other(self, session: Session, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """The proxy is the router that names itself; of a server's own orders it passes on none but aborts."""
        url = f"http://{HOST}:{self.port}"
        if request.path == "/workers":
            return _json({"workers": [{"url": url}]})
        if request.path == "/list_workers":
            return _json({"urls": [url]})
        with outside():
            if request.path == "/abort_request":
                await self.upstream.abort(self.upstream.asked_to_abort(body))
                return web.Response()
            if request.method == "GET" and request.path in ASKS:
                try:
                    async with self.upstream.get(request.path_qs) as answer:
                        said, headers = await answer.read(), kept(answer.headers)
                        return web.Response(status=answer.status, body=said, headers=headers)
                except (aiohttp.ClientError, TimeoutError) as error:
                    return await self._fail(session, request, session.here, error)
        return web.Response(status=404)


def _instead(plan: Attempt, *, stream: bool) -> bool:
    """Whether the proxy answers in the server's stead."""
    return plan.kind in ("drop-before", "http", "queue-full") or (not stream and plan.kind in ("close", "error-event"))


def _plain(hearing: Hearing, plan: Attempt, status: int, data: bytes) -> Reply:
    """A plain answer as it is passed on."""
    told = hearing.plain(status, data)
    if plan.kind == "drop-inside":
        half = Part(data[: min(plan.at, len(data) - 1)])
        return Reply(status, False, (half,), "drop", hearing.place.fault("drop-inside"))
    flag = (Part(b"", (), True),) if plan.kind == "flag" and 0 < plan.after <= hearing.count else ()
    whole = Part(data, told, late=plan.kind == "delay")
    return Reply(status, False, (*flag, whole), "drop" if plan.kind == "drop-after" else "end")


def _strikes(plan: Attempt, hearing: Hearing) -> bool:
    """Whether the stream is cut here: it has brought ``after`` tokens, and not its end."""
    kinds = ("close", "error-event", "drop-inside")
    return plan.kind in kinds and hearing.count >= plan.after and not hearing.finished


def _struck(plan: Attempt, session: Session, place: Place, held: list[Part], data: bytes) -> Reply:
    """How a stream ends that is cut before the event in ``data``."""
    if plan.kind == "close":
        return _piece(held, lost=place.fault("close"))
    if plan.kind == "error-event":
        return _piece([*held, session.engine.error_event(plan.code, place), DONE])
    half = Part(data[: min(plan.at, len(data) - 1)])
    return _piece([*held, half], "drop", place.fault("drop-inside"))


def _piece(parts: Sequence[Part], ending: str = "end", lost: Any = None) -> Reply:
    """Events that go out together."""
    if not parts:
        return Reply(200, True, (), ending, lost)
    data, told = b"".join(p.data for p in parts), tuple(t for p in parts for t in p.tells)
    return Reply(200, True, (Part(data, told, parts[-1].flag, parts[0].late),), ending, lost)


def _json(value: Any) -> web.Response:
    return web.Response(body=dumps(value).encode(), content_type="application/json")
