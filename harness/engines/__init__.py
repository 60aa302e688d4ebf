"""Engines: one sans-IO SGLang core (`sglang`) behind several fronts, and a proxy in front of a real server.

A front carries a `Reply` to the client: `inproc` (httpx and aiohttp, no
socket), `loopback` (a real HTTP server), `mocked` (aioresponses), `proxy` (what
a running SGLang replies). All record through one `Session`, so a history does
not depend on the front.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from json import dumps, loads
from typing import Any, Protocol

from harness.engines.sglang import DELAY_S, Engine, Part, Place, Reply
from harness.history import Event, Flagged, Requested
from harness.schedule import Attempt

HOST = "127.0.0.1"
NOBODY = 1
"""The port of fronts without a socket: a client that gets past them must not meet a server that really runs."""
TICK_S = 0.001
MAX_REQUESTS = 200
"""Requests of one attempt after which the engine answers no more: a client that goes on has no bound."""


class Session:
    """One run's engine side: answers requests and records what the client was told.

    ``raise_flag`` raises the client's abort flag. ``overrun`` is called once
    when an attempt sends more than `MAX_REQUESTS` requests.
    """

    def __init__(
        self,
        engine: Engine,
        record: Callable[[Event], None],
        raise_flag: Callable[[], None],
        overrun: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.record, self.raise_flag, self.overrun = engine, record, raise_flag, overrun
        self.split = engine.schedule.split
        self.begin(0, 0, Attempt())

    def begin(self, attempt: int, sample: int, plan: Attempt) -> None:
        self._attempt, self._sample, self._plan, self._number = attempt, sample, plan, 0

    @property
    def here(self) -> Place:
        """Where the next request stands."""
        return Place(self._attempt, self._sample, self._number)

    def open(self, path: str, body: bytes) -> Reply:
        """The reply to a request; records it. Paths other than /generate get small fixed answers."""
        if path != "/generate":
            return _other(path)
        place, payload = self.enter(body)
        if self._number > MAX_REQUESTS:
            return self.overran(place)
        return self.engine.answer(payload, self._plan, place)

    def enter(self, body: bytes) -> tuple[Place, Any]:
        """Records that a /generate request came in. Gives its place and its content, None if that is no JSON."""
        place = self.here
        self._number += 1
        try:
            payload = loads(body)
        except ValueError:
            payload = None
        self.record(requested(place, payload))
        return place, payload

    def overran(self, place: Place) -> Reply:
        """What a client is told that asks without end: nothing."""
        self.overrun()
        return Reply(None, False, ending="drop", lost=place.fault("drop-before"))

    def met(self, place: Place) -> Attempt:
        """The interruption that a request meets."""
        return self._plan if place.number < self._plan.times else Attempt()

    async def answer(self, path: str, body: bytes) -> Reply:
        """As `open`; what serves many requests at once may take its time (`harness.engines.serving`)."""
        return self.open(path, body)

    def left(self, task: asyncio.Task[None]) -> None:
        """The client has left the connection that ``task`` replies on."""

    async def send(self, reply: Reply, gone: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
        """The body in network segments. What the client is told is recorded as it is handed over.

        Ends early once the client is ``gone``. After the abort flag, and before a
        broken connection, the client gets the loop until it is idle (one tick of
        virtual time), so it sees every event that was sent before.
        """
        for data, parts in _segments(reply.parts, self.split):
            if gone():
                return
            if parts and parts[0].late:
                await asyncio.sleep(DELAY_S)
            for part in parts:
                self.told(part)
            if data:
                yield data
            if self.split or (parts and parts[-1].flag):
                await asyncio.sleep(TICK_S if parts and parts[-1].flag else 0)
        self.ended(reply)
        if reply.ending == "drop" and reply.parts:
            await asyncio.sleep(TICK_S)

    def told(self, part: Part) -> None:
        for event in part.tells:
            self.record(event)
        if part.flag:
            self.record(Flagged(self._attempt, self._sample, self._number - 1))
            self.raise_flag()

    def ended(self, reply: Reply) -> None:
        if reply.lost is not None:
            self.record(reply.lost)


class Served(Protocol):
    """What the front without sockets asks of whoever answers: a `Session`, or `harness.engines.serving.Serving`."""

    async def answer(self, path: str, body: bytes) -> Any: ...

    def send(self, reply: Any, gone: Callable[[], bool] = ...) -> AsyncIterator[bytes]: ...

    def ended(self, reply: Any) -> None: ...

    def left(self, task: asyncio.Task[None]) -> None: ...


class Front(Protocol):
    """Carries a session's replies to the client. Started and stopped on the loop it serves."""

    name: str
    host: str
    port: int
    cannot: frozenset[str]
    """Kinds of interruption that it cannot carry; schedules with them are left out."""
    sockets: bool
    greedy: bool
    """Its tokens are a model's: only when it is not sampled do they depend on those before them alone."""

    @property
    def broken(self) -> str:
        """Why the engine can be asked no more: what was recorded is no history of the client's. Empty: it can."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def attach(self, session: Session | None) -> None: ...


def front(name: str) -> Front:
    """The front called ``name``: "inproc", "loopback", "aioresponses" or a server's URL. Raises KeyError."""
    if is_url(name):
        from harness.engines.proxy import ProxyFront

        return ProxyFront(name)
    if name == "inproc":
        from harness.engines.inproc import InprocFront

        return InprocFront()
    if name == "loopback":
        from harness.engines.loopback import LoopbackFront

        return LoopbackFront()
    if name == "aioresponses":
        from harness.engines.mocked import AioresponsesFront

        return AioresponsesFront()
    raise KeyError(name)


FRONTS = ("inproc", "loopback", "aioresponses")


def is_url(name: str) -> bool:
    """Whether an engine's name is the address of a server that runs."""
    return name.startswith(("http://", "https://"))


def as_sent(kind: str | None, body: bytes) -> bytes:
    """The body, or none where its Content-Type says that it is not JSON: SGLang 0.5.23 refuses it unread.

    Whether one without a Content-Type is read depends on the version of FastAPI beside it, so it is taken.
    """
    return body if not kind or is_json(kind) else b""


def is_json(kind: str) -> bool:
    """Whether a body of this Content-Type is read as JSON."""
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def content_type(reply: Reply) -> str:
    return "text/event-stream; charset=utf-8" if reply.stream else "application/json"


CUT_WITHIN = 24
"""Bytes of an event that are cut: its ``data:``, and where its text begins."""


def _segments(parts: Sequence[Part], split: int) -> list[tuple[bytes, list[Part]]]:
    """The network segments of a body, each with the parts that are whole once it has arrived.

    Unsplit, the first part comes alone and the rest at once: a client must neither
    wait for more than an event nor take a segment for an event. Split, the head of
    each part is cut every ``split`` bytes, and its tail shares a segment with the
    head of the next. A part that raises the flag ends its segment, one that comes late begins its own.
    """
    made: list[tuple[bytes, list[Part]]] = []
    data, whole = bytearray(), list[Part]()

    def flush() -> None:
        nonlocal data, whole
        made.append((bytes(data), whole))
        data, whole = bytearray(), []

    for number, part in enumerate(parts):
        if part.late and (data or whole):
            flush()
        start = 0
        for cut in range(split, min(len(part.data), max(CUT_WITHIN, split) + 1), split) if split else ():
            data += part.data[start:cut]
            flush()
            start = cut
        data += part.data[start:]
        whole.append(part)
        if part.flag or (number == 0 and not split):
            flush()
    if data or whole:
        flush()
    return made


def requested(place: Place, payload: Any) -> Requested:
    """The request as the history tells it, whatever it is."""
    body = payload if isinstance(payload, dict) else {}
    ids, params, images = body.get("input_ids"), body.get("sampling_params"), body.get("image_data")
    return Requested(
        place.attempt,
        place.sample,
        place.number,
        body.get("stream") is True,
        tuple(ids) if isinstance(ids, list) and all(type(i) is int for i in ids) else None,
        body.get("text") if isinstance(body.get("text"), str) else None,
        len(images) if isinstance(images, list) else int(bool(images)),
        params if isinstance(params, dict) else {},
        body.get("return_logprob") is True,
    )


_OTHER: dict[str, Any] = {
    "/workers": {"workers": []},
    "/list_workers": {"urls": []},
    "/v1/loads": {"loads": []},
    "/get_model_info": {"model_path": "mock", "is_generation": True, "weight_version": "default"},
    "/abort_request": "",
    "/health": "",
}


def _other(path: str) -> Reply:
    value = _OTHER.get(path.partition("?")[0])
    if value is None:
        return Reply(404, False, (Part(b'{"detail":"Not Found"}'),))
    return Reply(200, False, (Part(dumps(value).encode() if value else b""),))
