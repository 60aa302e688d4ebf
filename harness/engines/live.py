"""The engine in real time: requests that run side by side, a queue, pauses, aborts and weights that change.

What is answered is `harness.engines.sglang`'s; here is when. One ticker brings
the tokens of every request that runs, for a timer each would cost more than the
tokens. Nothing here knows of HTTP: a stream is told to a `Stream`, a plain
request waits for its `Job.reply`.

Sources: an abort of a running request takes effect at its next decode step,
which still brings a token (0.5.23p `stream_abort_running`); one that waits ends
at once (0.5.23 `abort_all`); ``rid`` must be that of a request that is there,
and then hits those that begin with it too (0.5.23 `abort_rid_prefix`; that a
prefix alone does nothing was seen by hand); pauses are 0.5.23 `pause_abort`,
`pause_in_place`, `pause_in_place_then_abort_all`, `pause_retract` and
`pause_retract_then_abort_all`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

from harness.engines.serving import ORPHAN_S, Generation
from harness.engines.sglang import ABORTED, IN_QUEUE, QUEUE_FULL, RUN, Answer, Engine, Place, Refusal, Reply, Tokens
from harness.engines.telling import Telling
from harness.schedule import FAULTY_ENGINE, KINDS, VERSIONS, Attempt, Schedule

TICK_S = 0.005
"""How late a token may be told on purpose, for all that are due are told in one go."""
MIN_TICK_S, MAX_TICK_S = 0.001, 0.05
"""It is less at high rates, and more while nothing is due: then it is how long one that waits may miss its turn."""
LATE_ABORT_S = 2.0
"""Seconds between a stream's end and the abort that the server then sends for its id (source, 0.5.23)."""
TOLD_EVERY = 50
"""Tokens after which the scheduler tells what a plain request has so far (source, 0.5.23)."""
AT_ONCE = 64
"""Requests whose tokens are told before others may use the event loop."""
RANDOM_KINDS = tuple(kind for kind in KINDS if kind not in {"run", "flag", *FAULTY_ENGINE})
VOCABULARY = 4096
"""Ids that are looked at for words to say."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is served. ``rate``: tokens a second of each request; ``length``: the mean of an answer's length, in tokens.

    ``faults``: the share of requests that a random interruption meets. ``pool``: tokens the KV cache holds.
    """

    sglang: str = VERSIONS[0]
    context: int = 4096
    incremental: bool = False
    rate: float = 50.0
    length: int = 256
    max_running: int = 4096
    max_queued: int | None = None
    pool: int | None = None
    seed: int = 0
    faults: float = 0.0
    schedules: tuple[Schedule, ...] = ()


class Stream(Protocol):
    """A client that hears of its tokens as they come."""

    def behind(self) -> bool: ...

    def send(self, data: bytes) -> None: ...

    def end(self, ending: str) -> None: ...


class Speaker(Engine):
    """Answers any prompt: the next token follows from the tokens before it and the seed, as a model's would.

    So a resumed request goes on exactly where it was, whatever the server remembers.
    """

    def __init__(self, tokenizer: Any, options: Options, words: tuple[int, ...]) -> None:
        schedule = Schedule(context=options.context, sglang=options.sglang)
        super().__init__(schedule, tokenizer, incremental=options.incremental, pool=options.pool)
        self.seed, self.words, self.stop_below = options.seed, words, (1 << 32) // options.length

    def _says(self, ids: tuple[int, ...], room: int, minimum: int, params: dict[str, Any]) -> tuple[int, Tokens]:
        # `ignore_eos` ignores stop ids too (`ignore_eos_and_stop_id`).
        stops = frozenset(() if params.get("ignore_eos") else (self.eos, *(params.get("stop_token_ids") or ())))
        said = self._speak(ids, room, minimum, stops)

        def tokens(count: int, stopped: bool) -> tuple[int, ...]:
            return said[:count] if count <= len(said) else self._speak(ids, count, count, stops)

        return (len(said) - 1 if len(said) > minimum and said[-1] in stops else room), tokens

    def _speak(self, ids: tuple[int, ...], count: int, minimum: int, stops: frozenset[int]) -> tuple[int, ...]:
        """Up to ``count`` tokens, fewer if one of them stops; those that would before ``minimum`` are masked."""
        state = zlib.crc32("".join(f"{token}," for token in ids).encode(), self.seed)
        unmasked = [word for word in self.words if word not in stops] or self.words
        said: list[int] = []
        while len(said) < count:
            mixed = state * 0x9E3779B1 & 0xFFFFFFFF
            token = self.eos if mixed < self.stop_below else self.words[(mixed >> 8) % len(self.words)]
            stops_here = token in stops and len(said) >= minimum
            if token in stops and not stops_here:
                token = unmasked[(mixed >> 8) % len(unmasked)]
            said.append(token)
            if stops_here:
                break
            state = zlib.crc32(f"{token},".encode(), state)
        return tuple(said)


def words_of(tokenizer: Any) -> tuple[int, ...]:
    """Ids that are text of their own, in which nothing is special."""
    special = {tokenizer.eos_token_id, *getattr(tokenizer, "all_special_ids", ())}
    texts = ((i, tokenizer.decode([i], skip_special_tokens=True)) for i in range(min(tokenizer.vocab_size, VOCABULARY)))
    return tuple(i for i, text in texts if i not in special and text and text.isprintable() and "\ufffd" not in text)


class Script:
    """A schedule that a prompt has: its answer, and what meets the requests for it, one after the other."""

    def __init__(self, schedule: Schedule, tokenizer: Any, options: Options) -> None:
        known = schedule if schedule.context is not None else replace(schedule, context=options.context)
        self.engine = Engine(known, tokenizer, incremental=options.incremental, pool=options.pool)
        self.faults = deque(attempt for attempt in schedule.attempts for _ in range(attempt.times))


class Job(Generation):
    """A request that is here: it waits, or runs and has its next token at ``next_s``. ``rid`` names it."""

    def __init__(
        self,
        engine: Engine,
        body: dict[str, Any],
        ids: tuple[int, ...],
        answer: Answer,
        place: Place,
        version: str,
        stream: Stream | None,
        fault: Attempt | None,
    ) -> None:
        """``fault`` None: nothing is planned, and the events of a stream are cut as its tokens come."""
        super().__init__(engine, body, ids, answer, place, version)
        self.rid, self.stream, self.fault = str(body["rid"]), stream, fault or RUN
        self.spans = None if fault is None else deque(engine.spans(answer, fault))
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.telling = None
        stops = (body.get("sampling_params") or {}).get("stop")  # what may become one is held back (`Engine.event`)
        if (
            self.fault == RUN
            and stream is not None
            and stops is None
            and getattr(engine.tokenizer, "concatenative", False)
        ):
            self.telling = Telling(engine, body, ids, place)
        self.retractions = 0
        self._now: Answer | None = None
        self.aborted = False
        self.next_s = 0.0

    @property
    def size(self) -> int:
        """Tokens that it has in the KV cache."""
        return len(self.ids) + self.done

    def due(self) -> list[tuple[int, int, bool]]:
        """The token ranges of the events that may be told, each with whether it is the last."""
        if self.spans is None:
            return [(self.sent, self.done, self.left == 0)] if self.sent < self.done or self.left == 0 else []
        spans = []
        while self.spans and self.spans[0][1] <= self.done:
            spans.append((*self.spans.popleft(), not self.spans))
        return spans

    def now(self) -> Answer:
        """The answer as it looks from here; the same object as long as it does."""
        if self._now is None:
            self._now = replace(self.answer, versions=self.so_far(), retractions=self.retractions)
        return self._now

    def updated(self, version: str) -> None:
        super().updated(version)
        self._now = None

    def retracted(self) -> None:
        self.retractions += 1
        self._now = None

    def ended(self, finish: dict[str, Any] | None) -> Answer:
        return replace(super().ended(finish), retractions=self.retractions)


class Scheduler:
    """All requests that are here, and their time. `run` must run as a task."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.version = "default"
        self.running: dict[Job, None] = {}
        self.waiting: deque[Job] = deque()
        self.paused = self.frozen = False
        """Paused: new requests wait outside. Frozen: those inside stand still."""
        self._updating = 0
        self._open, self._busy, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._tick_s = max(MIN_TICK_S, min(TICK_S, 1 / options.rate))
        self._count = 0
        self._rids: set[str] = set()
        self._speaker = Speaker(tokenizer, options, words_of(tokenizer))
        self._scripts = [Script(schedule, tokenizer, options) for schedule in options.schedules]

    # requests

    async def accept(self, body: Any, stream: Stream | None) -> Reply | Job:
        """The job that a request has become, or what it is answered at once. While paused it waits."""
        place = Place(0, 0, self._count)
        self._count += 1
        given = body.get("rid") if isinstance(body, dict) else None
        rid = str(given or f"{place.number:032x}").encode(errors="replace").decode()
        if rid in self._rids:  # `dup_rid`
            if stream is not None:
                self._abort_later(rid)
            refusal = Refusal(400, f"Duplicate request ID detected: {rid}")
            return self._speaker.refuse(refusal, stream is not None, place)
        self._rids.add(rid)
        made: Reply | Job | None = None
        try:
            await self._open.wait()
            made = self._enter({**body, "rid": rid} if isinstance(body, dict) else body, stream, place)
            return made
        finally:
            if not isinstance(made, Job):
                self._rids.remove(rid)

    def leave(self, job: Job) -> None:
        """The client is gone: a stream ends now, a plain request is noticed later."""
        if job.stream is not None:
            self._forget(job)
        else:
            asyncio.get_running_loop().call_later(ORPHAN_S, self._forget, job)

    def abort(self, rid: str) -> None:
        """The request with this id and those that begin with it; nothing if there is none."""
        if rid in self._rids:
            self._abort([job for job in self._here() if job.rid.startswith(rid)])

    def abort_all(self) -> None:
        self._abort(self._here())

    # control

    async def pause(self, mode: str) -> None:
        """``abort`` comes back when nothing is left; ``in_place`` and ``retract`` at once."""
        self.paused = True
        self._gate()
        if mode == "abort":
            self.abort_all()
            await self._idle.wait()
            return
        self.frozen = True
        if mode == "retract":
            for job in tuple(self.running):
                self._retract(job)

    def resume(self) -> None:
        self.paused = self.frozen = False
        self._gate()
        now = asyncio.get_running_loop().time()
        for job in self.running:
            job.next_s = max(job.next_s, now)
        self._fill()

    async def update(self, version: str | None) -> None:
        """New weights from a disk: they wait for the requests that are here, unless paused (source, 0.5.23)."""
        if not self.paused:
            self._updating += 1
            self._gate()
            try:
                await self._idle.wait()
            finally:
                self._updating -= 1
                self._gate()
        if version is not None:
            self.rename(version)

    def rename(self, version: str) -> None:
        """The weights have another name from here on, in mid-request too (`weight_version_mid`)."""
        self.version = version
        for job in self._here():
            job.updated(version)

    async def flush(self, timeout_s: float) -> bool:
        """Whether the cache may be emptied, within the time: while nothing runs (`flush_busy`).

        Also while all that was here is retracted (`pause_retract`).
        """
        if self.frozen:
            return not self.running
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    # time

    async def run(self) -> None:
        """Brings tokens until it is cancelled."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            await self._busy.wait()
            earliest_s = min((job.next_s for job in self.running), default=0.0)
            now = loop.time()
            await asyncio.sleep(max(began_s + self._tick_s - now, min(earliest_s - now, MAX_TICK_S)))
            began_s = loop.time()
            for number, job in enumerate(tuple(self.running), 1):
                now = loop.time()
                if job in self.running and job.next_s <= now and not self.frozen:
                    self._step(job, 1 + int((now - job.next_s) * self.options.rate))
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
            if self.options.pool is not None:
                self._make_room(self.options.pool)
            self._fill()
            if self.frozen or not self.running:
                self._busy.clear()

    # inside

    def _enter(self, body: Any, stream: Stream | None, place: Place) -> Reply | Job:
        engine, fault = self._met_by(body, place)
        admitted = engine.admit(body, place, fault or RUN)
        if isinstance(admitted, Reply):
            return admitted
        if self._full():
            return engine.queue_full(body, place)
        job = Job(engine, body, *admitted, place, self.version, stream, fault)
        self.waiting.append(job)
        self._idle.clear()
        self._fill()
        return job

    def _met_by(self, body: Any, place: Place) -> tuple[Engine, Attempt | None]:
        """Who answers a request, and what befalls it."""
        script = self._script(body)
        if script is not None:
            planned = script.faults.popleft() if script.faults else RUN
            # The flag is the client's own: a server cannot raise it.
            return script.engine, RUN if planned.kind == "flag" else planned
        draw = random.Random(f"{self.options.seed} {place.number}")
        if draw.random() >= self.options.faults:
            return self._speaker, None
        admitted = self._speaker.admit(body, place)
        total = 0 if isinstance(admitted, Reply) else len(admitted[1].ids)
        return self._speaker, Attempt(
            draw.choice(RANDOM_KINDS), draw.randint(0, total), draw.randint(0, 200), draw.choice((429, 500, 503))
        )

    def _script(self, body: Any) -> Script | None:
        """The one whose prompt the input begins with; of several, the longest prompt's."""
        given = body if isinstance(body, dict) else {}
        ids, text = given.get("input_ids"), given.get("text")
        if ids is None and isinstance(text, str):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        start = tuple(ids) if isinstance(ids, list) else ()
        fits = [s for s in self._scripts if start[: len(s.engine.prompt_ids)] == s.engine.prompt_ids]
        return max(fits, key=lambda s: len(s.engine.prompt_ids), default=None)

    def _here(self) -> list[Job]:
        return [*self.running, *self.waiting]

    def _gate(self) -> None:
        if self.paused or self._updating:
            self._open.clear()
        else:
            self._open.set()

    def _fill(self) -> None:
        """Those that wait run, as far as there is room."""
        used = sum(job.size for job in self.running) if self.options.pool is not None else 0
        now = asyncio.get_running_loop().time()
        while self.waiting and not self.frozen and len(self.running) < self.options.max_running:
            used += self.waiting[0].size
            if self.running and used > (self.options.pool or used):
                break
            job = self.waiting.popleft()
            job.next_s = now + 1 / self.options.rate
            self.running[job] = None
        if self.running and not self.frozen:
            self._busy.set()

    def _make_room(self, pool: int) -> None:
        """Those with the fewest tokens wait again, until the others fit into the KV cache (source)."""
        while len(self.running) > 1 and sum(job.size for job in self.running) > pool:
            self._retract(min(self.running, key=lambda job: job.done))

    def _retract(self, job: Job) -> None:
        """It waits behind all others, or is refused like a new one if there is no room (0.5.23q `pause_retract`)."""
        del self.running[job]
        job.retracted()
        if self._full():
            self._end(job, QUEUE_FULL)
        else:
            self.waiting.append(job)

    def _abort_later(self, rid: str) -> None:
        """What every stream leaves behind, a refused one too: it meets whoever has the id by then (`rid_reused`)."""
        asyncio.get_running_loop().call_later(LATE_ABORT_S, self.abort, rid)

    def _full(self) -> bool:
        return self.options.max_queued is not None and len(self.waiting) >= self.options.max_queued

    def _abort(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job in self.running:
                job.aborted = True
            else:
                if job.stream is None:  # what was told last (source; 50 and 250 in `pause_retract_then_abort_all`)
                    job.done -= job.done % TOLD_EVERY
                self._end(job, IN_QUEUE)

    def _step(self, job: Job, count: int) -> None:
        """The next tokens of a request; with the last one it ends."""
        count = min(count, job.left) if not job.aborted else min(1, job.left)
        job.next_s += count / self.options.rate
        job.done += count
        if job.aborted:
            self._end(job, ABORTED)
        elif job.stream is None:
            if job.left == 0:
                self._end(job, None)
        elif job.left == 0 or not job.stream.behind():
            self._tell(job, job.stream)

    def _tell(self, job: Job, stream: Stream) -> None:
        for first, upto, last in job.due():
            job.sent = upto
            if job.telling is not None and not last:
                stream.send(job.telling.event(job.now(), (first, upto)))
                continue
            if last:
                self._forget(job)
                parts = job.engine.last(job.body, job.ids, job.ended(None), first, job.place, job.fault)
            else:
                parts = (job.engine.event(job.body, job.ids, job.now(), (first, upto), job.place, job.fault),)
            broken = job.engine.broken(parts[0], first, job.place, job.fault)
            if broken is not None:
                self._forget(job)
                parts = broken.parts
            for part in parts:
                stream.send(part.data)
            if broken is not None or last:
                ending = "drop" if job.fault.kind == "drop-after" else "end"
                stream.end(ending if broken is None else broken.ending)
                return

    def _end(self, job: Job, finish: dict[str, Any] | None) -> None:
        """The answer is told, with its natural end or cut off for ``finish``."""
        self._forget(job)
        answer = job.ended(finish)
        if job.stream is None:
            if not job.reply.done():
                reply = job.engine.whole(job.body, job.ids, answer, job.place, job.fault)
                job.reply.set_result(job.engine.queue_full(job.body, job.place) if finish is QUEUE_FULL else reply)
            return
        for part in job.engine.last(job.body, job.ids, answer, job.sent, job.place, job.fault):
            job.stream.send(part.data)
        job.stream.end("end")

    def _forget(self, job: Job) -> None:
        if job in self.running:
            del self.running[job]
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            return  # another may have its id by now
        self._rids.discard(job.rid)
        if job.stream is not None:
            self._abort_later(job.rid)
        if not self.running and not self.waiting:
            self._idle.set()
