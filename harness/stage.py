"""Runs a scenario on a loop in one mode and gives the history.

The stage plays everything around the loop: the trainer that asks for one rollout
after another, the engine's progress, broken connections, new weights, the
scheduler that decides which message arrives when. It judges nothing. A scenario
may also be played step by step (`begin`, `do`, `end`), as `harness.machine` does.

Between two steps the loop runs until nothing is ready. Time stands still
meanwhile: it passes only when the stage lets it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from harness.calls import CURRENT, Call
from harness.engines import is_url
from harness.engines.inproc import InprocFront
from harness.engines.serving import Serving
from harness.history import INCREMENTAL, PLAIN, Called, Flagged, Halted, Raised, Returned
from harness.loop import Halt, VirtualLoop
from harness.rollouts import (
    Aborting,
    Began,
    Broke,
    Ended,
    Event,
    Group,
    Left,
    Member,
    Restarted,
    RolloutHistory,
    Stopped,
    Straggled,
    Stuck,
    Taken,
)
from harness.runner import judgeable
from harness.scenario import Scenario, Step
from harness.targets import CannotJudge, LoopEnvironment, LoopTarget

PROMPTS = tuple(map(chr, range(ord("a"), ord("z") + 1)))
MAX_ROUNDS = 50_000
QUIET_ROUNDS = 40
IDLE_S = 1_000.0
"""Virtual time in which nothing new happens, after which a rollout is stuck."""

PATIENCE_S = 60.0
"""Virtual time in which a loop that aborts must deal with whatever runs."""

REST_S = 10.0
"""Virtual time in which a loop comes to rest once it has returned."""


class Stage:
    """One loop behind the front without sockets, on one event loop; serves many scenarios. Close it when done."""

    def __init__(self, target: LoopTarget, tokenizer: Any = None, engine: str = "inproc") -> None:
        """``engine``: the mock, or the address of a server that runs. Raises CannotJudge."""
        if tokenizer is None:
            from harness import tokenizer as tokenizers

            tokenizer = tokenizers.load()
        self.target, self.tokenizer = target, tokenizer
        self.front = InprocFront()
        self.loop = VirtualLoop(sockets=is_url(engine))
        self.loop.run(self.front.start())
        self.upstream: Any = None
        if is_url(engine):
            try:
                self.upstream = self.loop.run(_upstream(engine, tokenizer))
            except CannotJudge:
                self.loop.run(self.front.stop())
                self.loop.close()
                raise
        self.prompts = {text: tuple(tokenizer.encode(text, add_special_tokens=False)) for text in PROMPTS}
        self._play: _Play | None = None

    def run(self, scenario: Scenario, mode: str) -> RolloutHistory:
        """The history of ``scenario`` in ``mode``. Raises CannotJudge when the loop cannot take part."""
        self.begin(scenario, mode)
        for step in scenario.steps:
            self.do(step)
        return self.end()

    def begin(self, scenario: Scenario, mode: str) -> None:
        """Starts a scenario; its steps are not read. Raises CannotJudge."""
        self.loop.restart_clock()
        self._play = play = _Play(self, replace(scenario, steps=()), mode)
        self.front.attach(play.serving)
        self._resume(play.start())

    def do(self, step: Step) -> None:
        """Plays a step, until nothing is ready any more."""
        play = self._play
        assert play is not None
        play.scenario = replace(play.scenario, steps=(*play.scenario.steps, step))
        if not play.over:
            self._resume(play.step(step))

    def end(self) -> RolloutHistory:
        """Brings what still runs to its end, shuts the loop down and gives the history."""
        play = self._play
        assert play is not None
        if not play.over:
            self._resume(play.finish())
        history = self.so_far()
        broken = play.serving.broken if self.upstream is not None else ""
        self._leave()
        if broken:
            raise CannotJudge(broken)
        return history

    def so_far(self) -> RolloutHistory:
        """The history up to now; its scenario has the steps that were played."""
        play = self._play
        assert play is not None
        return RolloutHistory(play.scenario, play.mode, play.eos, dict(play.prompts), tuple(play.events))

    def close(self) -> None:
        """Ends the front, the target's clients and the loop."""
        if self._play is not None:
            self._leave()
        outward = () if self.upstream is None else (self.upstream.close(),)
        for ending in (self.target.close(), *outward, self.front.stop()):
            with suppress(Halt):
                self.loop.run(ending)
        self.loop.close()

    def _resume(self, part: Coroutine[Any, Any, None]) -> None:
        play = self._play
        assert play is not None
        try:
            self.loop.resume(part)
        except Halt as halt:
            play.stuck(str(halt))
        except SystemExit:
            play.halted("exit", "the loop left its process")
        except CannotJudge:
            self._leave()
            raise
        except Exception as error:  # other people's code: it may give or say anything
            play.halted("view", f"the loop cannot be read: {_words(error)}")

    def _leave(self) -> None:
        """What is cancelled from here on is no part of the scenario."""
        assert self._play is not None
        self._play.over = True
        self.front.attach(None)
        serving = self._play.serving
        serving.close()
        self.loop.sweep()
        if self.upstream is not None and not serving.broken:
            self.upstream.end_orphans()
        self._play = None


class _Play:
    """One scenario while it goes on."""

    def __init__(self, stage: Stage, scenario: Scenario, mode: str) -> None:
        self.stage, self.scenario, self.mode = stage, scenario, mode
        self.target, self.loop = stage.target, stage.loop
        self.events: list[Event] = []
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.eos: int = stage.tokenizer.eos_token_id
        url = f"http://{stage.front.host}:{stage.front.port}"
        self.serving = self._serving(url)
        self.over = self.flagged = False
        self.number, self.budget = 0, scenario.budget
        self.task: asyncio.Task[Any] | None = None
        self._calls: dict[int, int] = {}
        self._open: dict[int, Call] = {}
        self._raised: list[BaseException] = []
        self._aborts = self._news = 0
        self._saved: tuple[Group, ...] = ()

    def _serving(self, url: str) -> Any:
        """Whoever answers: the mock, or the way to a server."""
        stage = self.stage
        if stage.upstream is not None:
            from harness.engines.relayed import Relayed

            return Relayed(stage.upstream, self.record, url)
        prompts = tuple(stage.prompts.values())
        incremental = self.mode == INCREMENTAL
        return Serving(self.scenario, stage.tokenizer, prompts, self.record, url, incremental=incremental)

    # what happened

    def record(self, event: Event) -> None:
        if not self.over:
            self._see_flag()
            self.events.append(event)
            self._news += event != _IN_VAIN

    def _see_flag(self) -> None:
        """The client's flag is its own affair; it is looked at whenever something happens."""
        before, self.flagged = self.flagged, not self.over and self.target.aborting()
        if self.flagged and not before:
            self.events += [Flagged(c.attempt, c.sample, c.requests - 1) for c in self._open.values()]

    def stuck(self, why: str) -> None:
        self.record(Stuck(self.number, why, self._tasks()))
        self.over = True

    def halted(self, kind: str, message: str) -> None:
        self.over = True  # nothing more is asked of the loop, its flag neither
        self.events.append(Halted(0, 0, kind, message))

    # what the target tells (`harness.targets.Watch`)

    async def call(self, sample: Any, params: dict[str, Any], proceed: Callable[[], Awaitable[Any]]) -> Any:
        index = self.target.index(sample)
        call = Call(self._calls.get(index, 0), index)
        self._calls[index] = call.attempt + 1
        self.record(Called(call.attempt, index, _plain(params), self.target.view(sample)))
        if self.flagged:
            self.record(Flagged(call.attempt, index, None))
        self._open[index] = call
        token = CURRENT.set(call)
        try:
            result = await proceed()
        except BaseException as error:
            if not self.over:
                self._raised.append(error)
            view = self.target.view(sample)
            self.record(
                Raised(
                    call.attempt, index, type(error).__name__, _words(error, named=False)[:300], view, _plain(params)
                )
            )
            raise
        else:
            self.record(Returned(call.attempt, index, self.target.view(result), _plain(params)))
            return result
        finally:
            CURRENT.reset(token)
            self._open.pop(index, None)

    def saved(self) -> None:
        self._saved = self._groups(self.target.buffer())

    def taken(self, groups: Sequence[Sequence[Any]]) -> None:
        told = self._groups(groups)
        for group in told:
            for member in group:
                text = member.views[0].prompt
                self.prompts[member.sample] = self.stage.prompts.get(text, ())
        self.record(Taken(self.number, tuple(tuple(m.sample for m in group) for group in told)))

    # the steps

    async def start(self) -> None:
        stage = self.stage
        env = LoopEnvironment(
            stage.front.host, stage.front.port, stage.tokenizer, self.scenario, PROMPTS, self.mode != PLAIN
        )
        with judgeable(self.target.name, "its loop cannot be set up"):
            self.target.reset(env, self)

    async def step(self, step: Step) -> None:
        """Plays one step. Raises Halt when the loop does not come to rest."""
        serving, kind = self.serving, step.kind
        if self.number == 0 and kind not in ("hold", "update"):
            self._begin()
            await self.loop.idle()
            if kind == "rollout":
                return
        if kind == "tokens":
            serving.bring(step.which, step.count)
        elif kind == "hold":
            serving.hold(step.count)
        elif kind == "pass":
            serving.let(step.which, step.count)
        elif kind == "wait":
            self.loop.jump(await self.loop.idle() or 0)
        elif kind == "kill":
            serving.kill(step.which, step.count)
        elif kind == "abort":
            serving.abort(step.which)
        elif kind == "update":
            serving.update()
        elif kind == "stop":
            if not self.target.stoppable:
                await self._drain()
            if not self.over:
                await self._stop()
        else:
            await self._drain()
            if not self.over:
                await self._between(step)
        await self.loop.idle()

    async def _between(self, step: Step) -> None:
        if step.kind == "rollout":
            self._begin()
        if step.kind in ("rollout", "end"):
            return
        self.budget = step.count if step.kind == "budget" else self.budget
        self._aborts = self.serving.aborts
        restart = self.loop.create_task(self.target.restart(self.budget))
        await self._until(restart)
        if self.over or self._broken(restart):
            return
        self.record(Restarted(self._saved, self._groups(self.target.buffer())))

    async def finish(self) -> None:
        if self.number == 0:
            self._begin()
        await self._drain()
        if not self.over and self.scenario.spanning:
            await self._quiet()
        if not self.over:
            await self._stop()

    async def _quiet(self) -> None:
        """Until a loop that spans rollouts has nothing more to do on its own; some always begin another group."""
        idle, known = 0.0, -1
        for _ in range(QUIET_ROUNDS):
            timer = await self.loop.idle()
            idle = idle + (timer or 0) if len(self.events) == known else 0.0
            known = len(self.events)
            if self.serving.on_the_way:
                self.serving.let_all()
            elif self.serving.running:
                self.serving.bring(0, self.serving.running[0].left)
            elif timer is None or idle > REST_S:
                return
            else:
                self.loop.jump(timer)

    def _begin(self) -> None:
        self.number += 1
        self._aborts = self.serving.aborts
        self.record(Began(self.number, self.budget))
        self.task = self.loop.create_task(self.target.rollout(self.number))

    async def _stop(self) -> None:
        self._aborts = self.serving.aborts
        stopping = self.loop.create_task(self.target.stop())
        await self._until(stopping)
        if self.over or self._broken(stopping):
            return
        if self.task is not None:
            await self._until(self.task)
        if self.over:
            return
        if self.task is not None and not self.task.cancelled() and self.task.exception() is None:
            await self._ended()
        self.task = None
        left = await self._rest()
        self.record(Stopped(self._groups(self.target.buffer()), left))

    async def _drain(self) -> None:
        """Brings the present rollout to its end."""
        if self.task is None:
            return
        await self._until(self.task)
        if self.over:
            return
        if not self._broken(self.task):
            await self._ended()

    def _broken(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task of the loop's has raised: then nothing more is asked of it."""
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self._break(error)
        return error is not None

    def _break(self, error: BaseException) -> None:
        """The loop raised: nothing more is asked of it."""
        if isinstance(error, CannotJudge):
            self.halted("view", str(error)[:300])
            return
        passed_on = any(error is known or error.__cause__ is known for known in self._raised)
        buffer = self._groups(self.target.buffer())
        # A folder of this run is no part of what is wrong.
        message = re.sub(r"/\S*/", "", _words(error, named=False))[:300]
        self.record(Broke(self.number, type(error).__name__, message, passed_on, buffer))
        self.over = True

    async def _ended(self) -> None:
        assert self.task is not None
        groups = self._groups(self.task.result())
        self.task = None
        left = Left() if self.scenario.spanning else await self._rest()
        self.record(Ended(self.number, groups, self._groups(self.target.buffer()), left))

    # time

    async def _until(self, task: asyncio.Task[Any]) -> None:
        """Lets everything happen in the plainest order until ``task`` is done, within bounds."""
        idle, known, waited = 0.0, -1, 0.0
        for _ in range(MAX_ROUNDS):
            timer = await self.loop.idle()
            if task.done():
                return
            if self.serving.on_the_way:
                self.serving.let_all()
                continue
            aborting = self.serving.aborts > self._aborts or self.target.aborting()
            running = self.serving.running
            if running and (not aborting or timer is None or waited >= PATIENCE_S):
                if aborting:
                    self.record(Straggled(self.number, running[0].place.sample))
                self.serving.bring(0, running[0].left)
                waited = 0.0
                continue
            idle = idle + (timer or 0) if self._news == known else 0.0
            known = self._news
            if timer is None or idle > IDLE_S:
                self.stuck("it waits for something that can never happen")
                return
            waited += timer
            self.loop.jump(timer)
        self.stuck(f"no end after {MAX_ROUNDS} rounds")

    async def _rest(self) -> Left:
        """What is left once everything that needs no engine has happened."""
        waited = 0.0
        while True:
            timer = await self.loop.idle()
            if self.serving.on_the_way:
                self.serving.let_all()
            elif timer is not None and waited + timer <= REST_S:
                waited += timer
                self.loop.jump(timer)
            else:
                return Left(self.serving.runs(), self._tasks(), self.target.permits())

    def _tasks(self) -> tuple[str, ...]:
        """The tasks the loop has left, each by what it runs and what that waits in."""
        ours = {self.task, asyncio.current_task(self.loop) if self.loop.is_running() else None}
        names = (_named(task) for task in asyncio.all_tasks(self.loop) if task not in ours)
        return tuple(sorted(name for name in names if not name.startswith(_OURS)))

    # by value

    def _groups(self, groups: Sequence[Sequence[Any]]) -> tuple[Group, ...]:
        return tuple(tuple(self._member(member) for member in group) for group in groups)

    def _member(self, member: Any) -> Member:
        samples = member if isinstance(member, list | tuple) else [member]
        first, target = samples[0], self.target
        return Member(
            target.index(first),
            tuple(target.view(s) for s in samples),
            any(target.scored(s) for s in samples),
            target.versions(first),
            target.spans(first),
        )


_IN_VAIN = Aborting(0)
"""A loop may repeat its abort for ever: where nothing runs this is nothing new."""

_OURS = ("Connection._reply", "_Play.", "Relayed.", "Upstream.")
"""The engine's side of a connection in memory, and the stage itself: no tasks of the loop's."""


async def _upstream(url: str, tokenizer: Any) -> Any:
    """The way to the server. Raises CannotJudge."""
    from harness.engines.upstream import Upstream
    from harness.server import NoServer, fitting, timed

    try:
        return Upstream(timed(fitting(url, tokenizer)), timers=False)  # a loop's timers are not the server's
    except NoServer as error:
        raise CannotJudge(str(error)) from error


def _words(error: BaseException, *, named: bool = True) -> str:
    """What an exception says, as text that can be written down; it may have a mind of its own."""
    try:
        said = str(error)
    except Exception:
        said = "?"
    said = said.encode("utf-8", "replace").decode()
    return f"{type(error).__name__}: {said}" if named else said


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v if v is None or isinstance(v, (int, float, str)) else repr(v) for k, v in params.items()}


def _named(task: asyncio.Task[Any]) -> str:
    """``generate_group`` or ``generate_group in Semaphore.acquire``."""
    coroutine: Any = task.get_coro()
    outer = inner = getattr(coroutine, "__qualname__", "?")
    while (coroutine := getattr(coroutine, "cr_await", None)) is not None and hasattr(coroutine, "__qualname__"):
        inner = coroutine.__qualname__
    return outer if inner == outer else f"{outer} in {inner}"
