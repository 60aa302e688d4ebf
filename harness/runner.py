"""Runs a schedule on a target in one mode and gives the history.

The runner plays the caller: it makes the sample, passes the parameters, sends
the sample through a buffer, raises the abort flag, and calls generate again
until the sample is finished. It judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from json import dumps, loads
from typing import Any

from harness import engines
from harness.engines import Session, sglang
from harness.engines.sglang import Engine, logprob
from harness.history import (
    INCREMENTAL,
    PLAIN,
    TERMINAL,
    Called,
    Event,
    Flagged,
    Halted,
    History,
    Raised,
    Requested,
    Returned,
    SampleView,
)
from harness.loop import Halt, VirtualLoop
from harness.schedule import Attempt, Schedule
from harness.server import NoServer, fitting
from harness.targets import CannotJudge, Environment, Start, Target

EXTRA_CALLS = 3
"""Uninterrupted calls after the schedule's attempts: enough for a client that answers an error first."""


class Runner:
    """One target behind one front, on one loop; serves many runs. Close it when done."""

    def __init__(self, target: Target, front: str = "inproc", tokenizer: Any = None) -> None:
        if tokenizer is None:
            from harness import tokenizer as tokenizers

            tokenizer = tokenizers.load()
        self.target, self.tokenizer = target, tokenizer
        self.front = engines.front(front)
        self.loop = VirtualLoop(sockets=self.front.sockets)
        self.lacks = ""
        """The kind of stream that the server does not have."""
        try:
            if engines.is_url(front):
                self.lacks = fitting(front, tokenizer).lacks
            self.loop.run(self.front.start())
        except NoServer as error:
            self.loop.close()
            raise CannotJudge(str(error)) from error

    def can_run(self, schedule: Schedule, mode: str) -> bool:
        """Whether the front can carry every interruption of the schedule."""
        return not self.front.cannot & set(schedule.kinds)

    def run(self, schedule: Schedule, mode: str) -> History:
        """The history of ``schedule`` in ``mode``. Raises CannotJudge when the target cannot take part."""
        if mode == self.lacks:
            raise CannotJudge(f"the server at {self.front.name} has no {mode} mode")
        engine = Engine(schedule, self.tokenizer, incremental=mode == INCREMENTAL)
        life = _Life(self, engine, schedule, mode)
        try:
            self.loop.run(life.live(), life.end)
        except Halt as halt:
            life.events.append(Halted(*life.place, "hang", str(halt)))
        finally:
            self.front.attach(None)
        if self.front.broken:
            raise CannotJudge(self.front.broken)
        return History(schedule, mode, engine.prompt_ids, engine.eos, tuple(life.events))

    def close(self) -> None:
        """Ends the front, the target's clients and the loop."""
        for ending in (self.target.close(), self.front.stop()):
            with suppress(Halt):  # a client may hold its connections for ever
                self.loop.run(ending)
        self.loop.close()


class _Life:
    """One run while it goes on."""

    def __init__(self, runner: Runner, engine: Engine, schedule: Schedule, mode: str) -> None:
        self.runner, self.engine, self.schedule, self.mode = runner, engine, schedule, mode
        self.target = runner.target
        self.events: list[Event] = []
        self.session = Session(engine, self.record, self._raise_flag, self._overrun)
        self.place = (0, 0)
        self.stormed = self.over = False
        self._task: Any = None

    def record(self, event: Event) -> None:
        if not self.over:
            self.events.append(event)

    def end(self) -> None:
        """From here on nothing is recorded: what a stray or cancelled task still does is not this run's."""
        self.over = True

    def halted(self, kind: str, message: str) -> None:
        self.record(Halted(*self.place, kind, message))

    def _raise_flag(self) -> None:
        if not self.over:
            self.target.set_abort(True)

    def _overrun(self) -> None:
        self.stormed = True
        self._task.cancel()

    async def live(self) -> None:
        self._task = asyncio.current_task()
        runner, schedule = self.runner, self.schedule
        runner.front.attach(self.session)
        environment = Environment(
            runner.front.host, runner.front.port, runner.tokenizer, schedule.budget, schedule.context
        )
        with judgeable(self.target.name, "a sample cannot be made"):
            self.target.reset(environment)
            samples = [self.target.new_sample(self._start()) for _ in range(schedule.samples)]
            views = [self.target.view(s) for s in samples]
        shared = self._params() if schedule.samples > 1 else None
        probed = False
        for index, plan in enumerate((*schedule.attempts, *(Attempt(),) * EXTRA_CALLS, Attempt())):
            for number in range(schedule.samples):
                finished = views[number].status in TERMINAL
                if finished and (number > 0 or probed):
                    continue
                probed = probed or finished  # one call on a finished sample: terminal statuses are absorbing
                before = views[number]
                if not await self._attempt(index, number, plan, samples, views, shared):
                    return
                if index >= len(schedule.attempts) and views[number] == before and not finished:
                    return  # nothing interrupted it and nothing changed: it never will
            if probed and all(v.status in TERMINAL for v in views):
                return

    def _start(self) -> Start:
        schedule, prompt = self.schedule, self.engine.prompt_ids
        images = schedule.images
        if not schedule.preload:
            return Start(schedule.prompt, images=images)
        ids = self.engine.response_ids(schedule.preload)
        return Start(
            schedule.prompt,
            (*prompt, *ids),
            len(ids),
            self.runner.tokenizer.decode(ids, skip_special_tokens=schedule.skip_special_tokens),
            tuple(logprob(len(prompt) + i, t) for i, t in enumerate(ids)),
            images,
        )

    def _params(self) -> dict[str, Any]:
        """The caller's sampling parameters: those slime passes, and what the schedule adds."""
        schedule = self.schedule
        params: dict[str, Any] = {
            "temperature": 0.0 if self.runner.front.greedy else 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": schedule.budget,
            "stop": list(schedule.stop) or None,
            "stop_token_ids": None,
            "skip_special_tokens": schedule.skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if self.runner.front.greedy and schedule.natural is None:
            params["ignore_eos"] = True  # else most answers would be over before they are interrupted
        if schedule.min_new_tokens:
            params["min_new_tokens"] = schedule.min_new_tokens
        if schedule.seed is not None:
            params["sampling_seed"] = schedule.seed
        return params

    async def _attempt(
        self,
        index: int,
        number: int,
        plan: Attempt,
        samples: list[Any],
        views: list[SampleView],
        shared: dict[str, Any] | None,
    ) -> bool:
        """One call. Returns False when the run cannot go on."""
        self.place = place = (index, number)
        params = shared if shared is not None else self._params()
        if plan.round_trip:
            with judgeable(self.target.name, "the sample does not survive JSON"):
                samples[number] = self.target.round_trip(samples[number])
                views[number] = self.target.view(samples[number])
        self.session.begin(index, number, plan)
        self.record(Called(index, number, _copy(params), views[number]))
        if plan.kind == "flag" and plan.after == 0:
            self.record(Flagged(index, number, None))
            self._raise_flag()
        error: BaseException | None = None
        try:
            result = await self.target.generate(samples[number], params, stream=self.mode != PLAIN)
            samples[number] = result
        except (KeyboardInterrupt, Halt, CannotJudge):
            raise
        except BaseException as caught:  # SystemExit and CancelledError too: targets are other people's code
            if self.over:  # the loop is cancelling what the run left behind
                raise
            error = caught
        self.target.set_abort(False)
        if self.stormed:
            self.halted("storm", f"more than {engines.MAX_REQUESTS} requests in one attempt")
            return False
        try:
            views[number] = view = self.target.view(samples[number])
            if not all(type(t) is int for t in view.tokens):
                raise TypeError("a token is no int")
            others = tuple(self.target.view(s) for i, s in enumerate(samples) if i != number)
            decoded, torn = self._texts(view, number)
        except Exception as broken:
            self.halted("view", f"the sample cannot be read: {type(broken).__name__}: {broken}"[:300])
            return False
        writes = self.target.writes()
        if error is None:
            self.record(Returned(*place, view, _copy(params), decoded, others, writes, torn))
        else:
            name, text = type(error).__name__, str(error)[:300]
            self.record(Raised(*place, name, text, view, _copy(params), decoded, others, writes, torn))
        return True

    def _texts(self, view: SampleView, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """``decoded`` and ``torn`` of the response: see `Returned`."""
        length, tokenizer = view.response_length, self.runner.tokenizer
        if not 0 < length <= len(view.tokens):
            return ("",), ()
        cut = len(view.tokens) - length
        prompt, ids = view.tokens[:cut], view.tokens[cut:]
        answers = [ids, ids[:-1]] if ids[-1] == self.engine.eos else [ids]
        texts = [sglang.decode(tokenizer, (), a, skip) for a in answers for skip in (False, True)]
        if not getattr(tokenizer, "concatenative", False):
            texts += [sglang.decode(tokenizer, prompt, a, skip) for a in answers for skip in (False, True)]
        seams = self._seams(number, length)
        joined = [
            "".join(sglang.decode(tokenizer, (), a[i:j], skip) for i, j in pairwise((0, *seams, length)))
            for a in answers
            for skip in (False, True)
        ]
        # Bytes that are no character on their own may also be held back by the engine when it is interrupted.
        torn = joined if seams and "\ufffd" in joined[0] else []
        return tuple(dict.fromkeys(texts)), tuple(dict.fromkeys(torn))

    def _seams(self, number: int, length: int) -> list[int]:
        """Response lengths at which a request of this sample went on."""
        prompt, found = len(self.engine.prompt_ids), set()
        for event in self.events:
            if event.sample == number and isinstance(event, Requested) and event.input_ids is not None:
                found.add(len(event.input_ids) - prompt)
            elif event.sample == number and isinstance(event, Called):
                found.add(event.view.response_length)
        return sorted(i for i in found if 0 < i < length)


@contextmanager
def judgeable(name: str, problem: str) -> Iterator[None]:
    """What the client's own code raises in here makes the run one that cannot be judged."""
    try:
        yield
    except CannotJudge:
        raise
    except Exception as error:
        what = f"{name}: {problem}: {type(error).__name__}: {error}"
        raise CannotJudge(what.split("\n")[0][:300]) from error  # its message is one line


def _copy(params: Mapping[str, Any]) -> dict[str, Any]:
    """By value; what JSON does not know becomes its repr."""
    if all(v is None or isinstance(v, (int, float, str)) for v in params.values()):
        return dict(params)
    copied: dict[str, Any] = loads(dumps(params, default=repr))
    return copied
