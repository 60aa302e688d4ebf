"""A real server while it serves a loop: what `harness.engines.serving` is for the mock.

Time stands still until whoever drives it lets the server bring tokens: then it is
real, as it is while requests are being aborted. What cannot be had of a server that
runs is left out of the scenario (`harness.adapt`): messages are never kept on their
way, and the weights stay as they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from json import dumps, loads
from typing import Any

import aiohttp

from harness.calls import CURRENT, NOBODY
from harness.engines import requested
from harness.engines.hearing import Hearing, Unheard, events
from harness.engines.serving import MAX_REQUESTS
from harness.engines.sglang import UNLIMITED, Part, Place, Reply
from harness.engines.upstream import Upstream, named, outside, streams
from harness.history import Faulted
from harness.rollouts import Aborting, Event

GONE_S = 5.0
"""The most seconds within which a request that was aborted ends."""


class Passing:
    """A request that the server has, and what has come of it. See `Reply` for those fields that are alike."""

    parts: tuple[Part, ...] = ()
    left = UNLIMITED

    def __init__(self, place: Place, rid: str, patience_s: float, *, stream: bool) -> None:
        self.place, self.rid, self.patience_s = place, rid, patience_s
        self.hearing = Hearing(place, stream=stream, weights=True)
        self.status: int | None = 200
        self.stream = True
        self.ending = "end"
        self.lost: Faulted | None = None
        self.inbox: deque[Part] = deque()
        self.begun = self.over = False
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def change(self) -> None:
        """Until something of it has come, or its end."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class Relayed:
    """The session of a scenario on a real server (see `harness.engines.serving.Serving`)."""

    on_the_way: tuple[()] = ()

    def __init__(self, upstream: Upstream, record: Callable[[Event], None], url: str) -> None:
        self.upstream, self.record, self.url = upstream, record, url
        self.running: list[Passing] = []
        self.aborts = self.requests = 0
        self.broken = ""
        """Why the server can be asked no more; empty while it can."""
        self._doomed: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # what whoever drives it may do

    def bring(self, which: int, count: int) -> None:
        """Time passes until a request that runs has ``count`` tokens more, or has ended."""
        if self.running:
            passing = self.running[which % len(self.running)]
            self._start(self._until([passing], passing.hearing.count + count))

    def abort(self, which: int) -> None:
        """One request that runs."""
        if self.running:
            passing = self.running[which % len(self.running)]
            self._start(self._until([passing], abort=True))

    def kill(self, which: int, count: int = 1) -> None:
        """Breaks the connection of a request that runs, and of the next ``count`` - 1 that its sample sends."""
        if self.running:
            passing = self.running[which % len(self.running)]
            self._doomed[passing.place.sample] = max(count - 1, 0)
            passing.lost = passing.place.fault("drop-inside" if passing.hearing.count else "drop-before")
            self._stop(passing)

    def runs(self) -> tuple[int, ...]:
        """The samples whose requests run."""
        return tuple(passing.place.sample for passing in self.running)

    def close(self) -> None:
        """The server stops what its clients have left."""
        for passing in list(self.running):
            self._stop(passing)

    # what a front asks of a session

    async def answer(self, path: str, body: bytes) -> Any:
        path = path.partition("?")[0]
        if path != "/generate":
            return await self._other(path, body)
        place = Place(0, NOBODY, 0)
        call = CURRENT.get()
        if call is not None:
            place = Place(call.attempt, call.sample, call.requests)
            call.requests += 1
        payload = None
        with suppress(ValueError):
            payload = loads(body)
        self.record(requested(place, payload))
        self.requests += 1
        if self.broken or self.requests > MAX_REQUESTS or self._breaks(place.sample):
            return Reply(None, False, ending="drop", lost=place.fault("drop-before"))
        rid, body = named(payload, body)
        passing = Passing(place, rid, self.upstream.patience(payload), stream=streams(payload))
        self.running.append(passing)
        self.upstream.begins(rid)
        passing.task = self._start(self._pump(passing, payload, body))
        try:
            while not (passing.begun if passing.stream else passing.over):
                await passing.change()
        except asyncio.CancelledError:
            self._stop(passing)
            raise
        return passing

    async def send(self, reply: Any, gone: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
        """The body as it comes. A client that leaves a stream ends its request."""
        if isinstance(reply, Passing):
            try:
                while reply.inbox or not reply.over:
                    while reply.inbox:
                        yield self._told(reply.inbox.popleft())
                    if not reply.over:
                        await reply.change()
            finally:
                self._stop(reply)
        else:
            for part in reply.parts:
                yield self._told(part)
        self.ended(reply)

    def ended(self, reply: Any) -> None:
        if reply.lost is not None:
            self.record(reply.lost)

    def left(self, task: asyncio.Task[None]) -> None:
        task.cancel()

    # inside

    async def _pump(self, passing: Passing, payload: Any, body: bytes) -> None:
        """Takes in what the server sends, as it comes."""
        try:
            async with self.upstream.generate(payload, body, {"Content-Type": "application/json"}) as answer:
                passing.status, passing.stream = answer.status, answer.content_type == "text/event-stream"
                passing.begun = True
                passing.changed()
                if not passing.stream:
                    data = await answer.read()
                    passing.inbox.append(Part(data, passing.hearing.plain(answer.status, data)))
                    passing.parts = tuple(passing.inbox)
                    return
                async for data in events(answer.content.iter_any()):
                    passing.inbox.append(Part(data, passing.hearing.event(data)))
                    passing.changed()
            self._over(passing)
            if not passing.hearing.finished:
                passing.lost = passing.place.fault("close")  # the server has ended it properly, and too early
        except (aiohttp.ClientError, TimeoutError, Unheard) as error:
            self._fails(passing, error)
        finally:
            self._over(passing)

    def _fails(self, passing: Passing, error: Exception) -> None:
        """The server does what none does that can be judged on: whatever else it has is not waited for."""
        self.broken = self.broken or self.upstream.gone(error)
        for one in {passing, *self.running}:
            one.lost = one.place.fault("drop-before")
            self._stop(one)

    def _over(self, passing: Passing) -> None:
        if not passing.over:
            passing.begun = passing.over = True
            if passing.lost is not None:
                passing.ending = "drop"
                passing.status = passing.status if passing.stream and passing.hearing.count else None
            self.running.remove(passing)
            self.upstream.ends(passing.rid, heard=passing.hearing.finished)
            passing.changed()

    def _stop(self, passing: Passing) -> None:
        assert passing.task is not None
        self._over(passing)
        passing.task.cancel()

    def _breaks(self, sample: int) -> bool:
        left = self._doomed.get(sample, 0)
        self._doomed[sample] = max(left - 1, 0)
        return left > 0

    def _told(self, part: Part) -> bytes:
        for event in part.tells:
            self.record(event)
        return part.data

    async def _other(self, path: str, body: bytes) -> Reply:
        if path == "/abort_request":
            asked = self.upstream.asked_to_abort(body)
            hit = [passing for passing in self.running if passing.rid in asked]
            if b"abort_all" in body:
                self.aborts += 1
                self.record(Aborting(len(hit)))
            await self._until(hit, abort=True)
        values: dict[str, Any] = {
            "/abort_request": "",
            "/health": "",
            "/workers": {"workers": [{"url": self.url}]},
            "/list_workers": {"urls": [self.url]},
            "/v1/loads": {"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]},
        }
        if path not in values:
            return Reply(404, False, (Part(b'{"detail":"Not Found"}'),))
        value = values[path]
        return Reply(200, False, (Part(dumps(value).encode() if value else b""),))

    async def _until(self, among: Sequence[Passing], count: int = UNLIMITED, *, abort: bool = False) -> None:
        """Lets time pass until requests have ended, or have brought so many tokens; not for ever."""
        with outside():
            for passing in among:
                if abort:
                    self.upstream.abort_in(passing.rid, 0.0)
            for passing in among:
                try:
                    while not passing.over and passing.hearing.count < count:
                        async with asyncio.timeout(GONE_S if abort else passing.patience_s):
                            await passing.change()
                except TimeoutError as error:
                    self._fails(passing, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
