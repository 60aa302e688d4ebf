"""The engine while it serves a loop: many requests at once, weights that change, and an abort of them all.

What it answers is `harness.engines.sglang`'s; here is only what takes time.
Nothing moves by itself: whoever drives it lets the engine bring tokens, breaks
connections and updates weights, and decides which messages between client and
engine stay on their way, so that every race has its turn and can be had again.
Messages that arrive in one moment wake their tasks in the order they arrive in.

Sources: an abort is asynchronous and hits requests that are there, not those on
their way (THUDM/slime#2056; 0.5.23 `abort_all`); a request whose client has left
goes on for 3 s when plain and ends at once as a stream (0.5.23 `disconnect_plain`,
`disconnect_stream`); the weights change under a running request, and both
versions are told (0.5.23 `weight_version_mid`, `weight_version_abort`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from json import dumps, loads
from typing import Any

from harness.calls import CURRENT, NOBODY
from harness.engines import requested
from harness.engines.sglang import ABORTED, IN_QUEUE, Answer, Engine, Part, Place, Reply
from harness.history import Faulted
from harness.rollouts import Aborting, Event, Updated
from harness.scenario import Scenario
from harness.schedule import Schedule

ORPHAN_S = 3.0
FIRST_TOKENS, TOKENS = range(65, 91), range(97, 123)
"""An answer's first token tells it from its siblings; the others tell their position."""

MAX_REQUESTS = 2_000
"""Requests of one scenario after which none is answered any more."""


class Live:
    """A reply whose body is still being made. See `Reply` for the fields."""

    stream = True
    status = 200
    parts: tuple[Part, ...] = ()

    def __init__(self) -> None:
        self.ending = "end"
        self.lost: Faulted | None = None
        self.inbox: deque[Part] = deque()
        self.closed = False
        self.wake: asyncio.Future[None] | None = None

    def arrive(self, parts: tuple[Part, ...], *, closed: bool = False, lost: Faulted | None = None) -> None:
        """Parts of the body reach the client, and perhaps its end; ``lost``: the connection is broken."""
        self.inbox += parts
        self.closed = self.closed or closed
        if lost is not None:
            self.ending, self.lost = "drop", lost
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class Generation:
    """A request that runs: what it will have, how much of it is there, and by which weights."""

    def __init__(
        self, engine: Engine, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, place: Place, version: str
    ) -> None:
        self.engine, self.body, self.ids, self.answer, self.place = engine, body, ids, answer, place
        self.done = self.sent = 0
        self.versions: list[tuple[str, int]] = []
        self.version = version

    @property
    def left(self) -> int:
        """Tokens until its natural end."""
        return len(self.answer.ids) - self.done

    def so_far(self) -> tuple[tuple[str, int], ...]:
        return (*self.versions, (self.version, len(self.answer.ids) + 1))

    def updated(self, version: str) -> None:
        if self.done > (self.versions[-1][1] if self.versions else 0):
            self.versions.append((self.version, self.done))
        self.version = version

    def ended(self, finish: dict[str, Any] | None) -> Answer:
        """The answer as it stands: with its natural end, or cut off for ``finish``."""
        versions = self.so_far()
        if finish is None:
            return replace(self.answer, versions=versions)
        whole = self.left == 0  # an abort on the last step hides the end
        matched = self.answer.matched if whole else None
        ids, probs = self.answer.ids[: self.done], self.answer.logprobs[: self.done]
        return replace(self.answer, ids=ids, logprobs=probs, finish=finish, matched=matched, versions=versions)


class Asked(Generation):
    """A request of a scenario, and who waits for it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.live = Live() if self.body.get("stream") is True else None
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()


class Serving:
    """The session of a scenario (see `harness.engines.Session`). ``record`` takes the events."""

    broken = ""

    def __init__(
        self,
        scenario: Scenario,
        tokenizer: Any,
        prompts: tuple[tuple[int, ...], ...],
        record: Callable[[Event], None],
        url: str,
        *,
        incremental: bool,
    ) -> None:
        """``prompts``: those that requests may begin with, as ids, none the beginning of another."""
        self.scenario, self.tokenizer, self.record, self.url = scenario, tokenizer, record, url
        self.incremental = incremental
        self.running: list[Asked] = []
        self.on_the_way: list[tuple[object, Callable[[], None]]] = []
        """Messages that have not arrived, each with its connection: those of one connection keep their order."""
        self.held = self.requests = self.aborts = 0
        self.weights = 0
        self._answers: dict[tuple[int, ...], list[Engine]] = {}
        self._prompts = prompts
        self._count = 0
        self._doomed: dict[int, int] = {}
        """By sample: how many of its requests are still to be broken."""
        self._orphans: list[asyncio.TimerHandle] = []

    @property
    def version(self) -> str:
        return str(self.weights)

    # what whoever drives it may do

    def bring(self, which: int, count: int) -> None:
        """``count`` tokens of a request that runs, or as many as are left; with the last one it ends."""
        if not self.running:
            return
        generation = self.running[which % len(self.running)]
        generation.done += min(count, generation.left)
        if generation.left == 0:
            self._end(generation, None)
        elif generation.live is not None and generation.sent < generation.done:
            answer = replace(generation.answer, versions=generation.so_far())
            span = (generation.sent, generation.done)
            part = generation.engine.event(generation.body, generation.ids, answer, span, generation.place)
            generation.sent = generation.done
            self._post(generation, partial(generation.live.arrive, (part,)))

    def abort(self, which: int) -> None:
        """One request that runs, for a reason of the engine's own."""
        if self.running:
            self._abort(self.running[which % len(self.running)])

    def kill(self, which: int, count: int = 1) -> None:
        """Breaks the connection of a request that runs, and of the next ``count`` - 1 that its sample sends."""
        if not self.running:
            return
        generation = self.running[which % len(self.running)]
        self.running.remove(generation)
        self._doomed[generation.place.sample] = max(count - 1, 0)
        lost = generation.place.fault("drop-inside" if generation.sent else "drop-before")
        if generation.live is not None:
            self._post(generation, partial(generation.live.arrive, (), closed=True, lost=lost))
        else:
            self._reply(generation, Reply(None, False, ending="drop", lost=lost))

    def update(self) -> None:
        """New weights, under the requests that run."""
        self.weights += 1
        for generation in self.running:
            generation.updated(self.version)
        self.record(Updated(self.version))

    def hold(self, count: int) -> None:
        self.held += count

    def let(self, which: int, count: int) -> None:
        """``count`` messages that are on their way arrive, in one moment, from the ``which``-th on."""
        for _ in range(min(count, len(self.on_the_way))):
            connection, _ = self.on_the_way[which % len(self.on_the_way)]
            first = next(i for i, (other, _) in enumerate(self.on_the_way) if other is connection)
            self.on_the_way.pop(first)[1]()

    def let_all(self) -> None:
        self.let(0, len(self.on_the_way))

    def runs(self) -> tuple[int, ...]:
        """The samples whose requests run."""
        return tuple(generation.place.sample for generation in self.running)

    # what a front asks of a session

    async def answer(self, path: str, body: bytes) -> Any:
        place = Place(0, NOBODY, 0)
        if path == "/generate":
            call = CURRENT.get()
            if call is not None:
                place = Place(call.attempt, call.sample, call.requests)
                call.requests += 1
        await self._travel()
        if path != "/generate":
            reply = self._other(path, body)
            await self._travel()
            return reply
        return await self._generate(place, body)

    async def send(self, reply: Any, gone: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
        """The body as it arrives. A client that leaves a stream ends its request."""
        if isinstance(reply, Reply):
            for part in reply.parts:
                self._tell(part)
                yield part.data
        else:
            try:
                while True:
                    while reply.inbox:
                        part = reply.inbox.popleft()
                        self._tell(part)
                        yield part.data
                    if reply.closed:
                        break
                    reply.wake = asyncio.get_running_loop().create_future()
                    await reply.wake
            finally:
                self.running = [g for g in self.running if g.live is not reply]
        self.ended(reply)

    def ended(self, reply: Any) -> None:
        if reply.lost is not None:
            self.record(reply.lost)

    def left(self, task: asyncio.Task[None]) -> None:
        task.cancel()

    # inside

    async def _generate(self, place: Place, body: bytes) -> Any:
        try:
            payload = loads(body)
        except ValueError:
            payload = None
        self.record(requested(place, payload))
        self.requests += 1
        if self.requests > MAX_REQUESTS or self._breaks(place.sample):
            return Reply(None, False, ending="drop", lost=place.fault("drop-before"))
        engine = self._engine(payload)
        admitted = engine.admit(payload, place)
        if isinstance(admitted, Reply):
            await self._travel()
            return admitted
        generation = Asked(engine, payload, *admitted, place, self.version)
        self.running.append(generation)
        if generation.left == 0:
            self._end(generation, None)
        if generation.live is not None:
            return generation.live
        try:
            return await generation.reply
        except asyncio.CancelledError:  # the client has left; the engine notices later
            self._orphans.append(asyncio.get_running_loop().call_later(ORPHAN_S, self._forget, generation))
            raise

    def _breaks(self, sample: int) -> bool:
        left = self._doomed.get(sample, 0)
        self._doomed[sample] = max(left - 1, 0)
        return left > 0

    def close(self) -> None:
        for timer in self._orphans:
            timer.cancel()

    def _forget(self, generation: Asked) -> None:
        if generation in self.running:
            self.running.remove(generation)

    def _engine(self, body: Any) -> Engine:
        """The answer that the input continues, or a new one. Their first tokens tell them apart."""
        ids = body.get("input_ids") if isinstance(body, dict) else None
        ids = tuple(ids) if isinstance(ids, list) and all(type(i) is int for i in ids) else ()
        prompt = next((p for p in self._prompts if ids[: len(p)] == p), ids)
        answers = self._answers.setdefault(prompt, [])
        rest = ids[len(prompt) :]
        if rest:
            for engine in answers:
                if engine.response_ids(1) == rest[:1]:
                    return engine
        number = self._count
        self._count += 1
        first = FIRST_TOKENS[len(answers) % len(FIRST_TOKENS)]
        script = (first, *TOKENS)
        schedule = Schedule(
            prompt=self.tokenizer.decode(list(prompt)) or "?",
            budget=self.scenario.budget,
            script=script,
            natural=self.scenario.length(number),
        )
        engine = Engine(schedule, self.tokenizer, incremental=self.incremental, weights=True)
        if not rest:
            answers.append(engine)
        return engine

    def _abort(self, generation: Asked) -> None:
        if self.scenario.late:
            generation.done += min(1, generation.left)
        if generation.done:
            self._end(generation, ABORTED)
        else:
            self._end(generation, IN_QUEUE)

    def _end(self, generation: Asked, finish: dict[str, Any] | None) -> None:
        self.running.remove(generation)
        answer, engine = generation.ended(finish), generation.engine
        if generation.live is not None:
            parts = engine.last(generation.body, generation.ids, answer, generation.sent, generation.place)
            self._post(generation, partial(generation.live.arrive, parts, closed=True))
        else:
            self._reply(generation, engine.whole(generation.body, generation.ids, answer, generation.place))

    def _reply(self, generation: Asked, reply: Reply) -> None:
        def arrive() -> None:
            if not generation.reply.done():
                generation.reply.set_result(reply)

        self._post(generation, arrive)

    def _tell(self, part: Part) -> None:
        for event in part.tells:
            self.record(event)

    def _post(self, connection: object, arrive: Callable[[], None]) -> None:
        """A message sets out: it arrives at once, or stays on its way, as behind one of its connection that does."""
        if self.held or any(other is connection for other, _ in self.on_the_way):
            self.held = max(self.held - 1, 0)
            self.on_the_way.append((connection, arrive))
        else:
            arrive()

    async def _travel(self) -> None:
        if not self.held:
            return
        arrived = asyncio.get_running_loop().create_future()
        self._post(arrived, lambda: None if arrived.done() else arrived.set_result(None))
        await arrived

    def _other(self, path: str, body: bytes) -> Reply:
        name = path.partition("?")[0]
        if name == "/abort_request":
            self._abort_request(body)
        loads_ = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        answers: dict[str, Any] = {
            "/abort_request": "",
            "/health": "",
            "/workers": {"workers": [{"url": self.url}]},
            "/list_workers": {"urls": [self.url]},
            "/v1/loads": {"version": "0.5.23", "loads": [loads_]},
            "/get_model_info": {"model_path": "mock", "is_generation": True, "weight_version": self.version},
        }
        if name not in answers:
            return Reply(404, False, (Part(b'{"detail":"Not Found"}'),))
        value = answers[name]
        return Reply(200, False, (Part(dumps(value).encode() if value else b""),))

    def _abort_request(self, body: bytes) -> None:
        """All requests that are there, or those whose id begins with ``rid`` (0.5.23 `abort_rid_prefix`)."""
        try:
            asked = loads(body)
        except ValueError:
            return
        if not isinstance(asked, dict):
            return
        if asked.get("abort_all") is True:
            hit = list(self.running)
            self.aborts += 1
            self.record(Aborting(len(hit)))
        else:
            rid = asked.get("rid") or None
            hit = [g for g in self.running if rid and str(g.body.get("rid", "")).startswith(str(rid))]
        for generation in hit:
            self._abort(generation)
