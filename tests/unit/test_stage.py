"""The stage: what becomes of each step, and of loops that raise, hang, leave or never come to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest

from harness import loop as virtual
from harness import stage as module
from harness import tokenizer
from harness.checkers import LOOP_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import INCREMENTAL, PLAIN, STREAM, Called, Faulted, Flagged, Halted, Raised, Requested, Returned
from harness.rollouts import (
    Aborting,
    Began,
    Broke,
    Ended,
    Left,
    Restarted,
    RolloutHistory,
    Stopped,
    Straggled,
    Stuck,
    Taken,
    Updated,
)
from harness.scenario import Scenario, Step
from harness.stage import Stage
from harness.targets import CannotJudge, LoopEnvironment, Watch
from harness.targets.reference_loop import ReferenceLoop
from reference_impl.generate import generate
from reference_impl.rollout import Rollout, RolloutError

Body = Callable[[ReferenceLoop, int], Awaitable[Any]]
VOCABULARY = tokenizer.load()


def loop(
    rollout: Body | None = None, restart: Body | None = None, stop: Body | None = None, **attributes: Any
) -> ReferenceLoop:
    """The reference's loop with some of its methods replaced."""

    made: Any = ReferenceLoop("client")
    if rollout is not None:
        made.rollout = lambda number: rollout(made, number)
    if restart is not None:
        made.restart = lambda budget: restart(made, budget)
    if stop is not None:
        made.stop = lambda: stop(made, 0)
    for name, value in attributes.items():
        setattr(made, name, value)
    loop: ReferenceLoop = made
    return loop


def run(target: ReferenceLoop, *steps: Step, mode: str = PLAIN, **scenario: Any) -> RolloutHistory:
    with closing(Stage(target, VOCABULARY)) as made:
        return made.run(Scenario(steps=steps, **{"budget": 2, **scenario}), mode)


def told(history: RolloutHistory, *kinds: type) -> list[Any]:
    return [event for event in history.events if isinstance(event, kinds)]


def names(history: RolloutHistory) -> list[str]:
    """The events of the loop, by name."""
    calls = (Called, Requested, Returned, Raised, Flagged, Taken)
    return [
        type(event).__name__
        for event in history.events
        if not isinstance(event, calls) and type(event).__name__ != "Delivered"
    ]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage(ReferenceLoop())
    yield made
    made.close()


def played(stage: Stage, *steps: Step, mode: str = PLAIN, **scenario: Any) -> RolloutHistory:
    return stage.run(Scenario(steps=steps, **{"budget": 2, **scenario}), mode)


# Steps


def test_without_steps_one_rollout_runs_to_its_end(stage: Stage) -> None:
    history = played(stage)
    assert names(history) == ["Began", "Ended", "Stopped"]
    assert (history.scenario, history.mode, history.eos) == (Scenario(budget=2), PLAIN, VOCABULARY.eos_token_id)
    assert dict(history.prompts) == {0: (97,)}
    assert told(history, Began, Taken) == [Began(1, 2), Taken(1, ((0,),))]
    (end,) = told(history, Ended)
    assert [m.views[0].response for g in end.groups for m in g] == ["Aa"] and end.left == Left((), (), (8, 8))
    assert all(m.scored and m.versions == ("0",) and m.spans == (("0", 2),) for g in end.groups for m in g)


def test_what_is_in_flight_is_aborted(stage: Stage) -> None:
    history = played(stage, over=3)
    assert names(history) == ["Began", "Aborting", "Ended", "Stopped"]
    assert told(history, Aborting) == [Aborting(2)]
    (end,) = told(history, Ended)
    assert [[m.sample for m in g] for g in end.groups] == [[0]] and [m.sample for g in end.buffer for m in g] == [1, 2]


@pytest.mark.parametrize("mode", [PLAIN, STREAM, INCREMENTAL])
def test_the_same_scenario_gives_the_same_history(stage: Stage, mode: str) -> None:
    steps = [Step("hold", 0, 3), Step("tokens", 1), Step("wait"), Step("rollout"), Step("restart"), Step("kill")]
    first, again = (played(stage, *steps, mode=mode, over=2, members=2) for _ in range(2))
    assert first == again
    assert {event.stream for event in told(first, Requested)} == {mode != PLAIN}


def test_a_scenario_is_played_step_by_step_as_well(stage: Stage) -> None:
    steps = (Step("tokens"), Step("rollout"))
    stage.begin(Scenario(budget=2), PLAIN)
    seen = []
    for step in steps:
        stage.do(step)
        seen.append(len(stage.so_far().events))
    assert seen[0] < seen[1]
    assert stage.end().events == played(stage, *steps).events


@pytest.mark.parametrize("kind", ["hold", "update"])
def test_some_steps_need_no_rollout(stage: Stage, kind: str) -> None:
    stage.begin(Scenario(budget=2), PLAIN)
    stage.do(Step(kind))
    assert not told(stage.so_far(), Began)
    stage.end()


@pytest.mark.parametrize("kind", ["rollout", "tokens", "end", "restart", "stop"])
def test_the_first_rollout_begins_with_the_first_step_that_needs_one(stage: Stage, kind: str) -> None:
    history = played(stage, Step(kind))
    assert len(told(history, Began)) == 1


def test_a_rollout_after_another(stage: Stage) -> None:
    history = played(stage, Step("rollout"), Step("rollout"), Step("end"), Step("end"), Step("rollout"))
    assert [b.rollout for b in told(history, Began)] == [1, 2, 3]
    assert [e.rollout for e in told(history, Ended)] == [1, 2, 3]


def test_tokens_weights_and_an_abort_of_the_engine_s_own(stage: Stage) -> None:
    history = played(stage, Step("tokens"), Step("update"), Step("abort"), mode=STREAM)
    assert told(history, Updated) == [Updated("1")]
    assert [c.view.status for c in told(history, Called)] == ["pending", "aborted"]
    (end,) = told(history, Ended)
    assert end.groups[0][0].spans == (("0", 1), ("1", 1))


def test_a_broken_connection(stage: Stage) -> None:
    history = played(stage, Step("kill"))
    assert [f.kind for f in told(history, Faulted)] == ["drop-before"]
    assert len(told(history, Requested)) == 2 and len(told(history, Ended)) == 1


def test_a_message_that_is_held_and_passes(stage: Stage) -> None:
    stage.begin(Scenario(budget=2), PLAIN)
    asked = []
    for step in (Step("hold"), Step("rollout"), Step("pass")):
        stage.do(step)
        asked.append(len(told(stage.so_far(), Requested)))
    assert asked == [0, 0, 1]
    stage.end()


def test_a_wait_is_for_the_next_timer() -> None:
    woke: list[float] = []

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        for seconds in (1, 3):
            await asyncio.sleep(seconds)
            woke.append(asyncio.get_running_loop().time())
        return await target.loop.rollout()

    with closing(Stage(loop(rollout), VOCABULARY)) as made:
        made.begin(Scenario(budget=2), PLAIN)
        made.do(Step("rollout"))
        assert woke == []
        began = made.loop.time()
        for count in (1, 2, 2):  # where there is no timer nothing happens
            made.do(Step("wait"))
            assert len(woke) == count
        assert [time - began for time in woke] == pytest.approx([1, 4])
        made.end()


def test_a_restart_saves_what_waits_and_goes_on_with_it(stage: Stage) -> None:
    history = played(stage, Step("tokens", 1), Step("budget", 0, 3), Step("rollout"), over=2)
    (back,) = told(history, Restarted)
    assert back.before == back.after and [m.sample for g in back.after for m in g] == [1]
    assert told(history, Began) == [Began(1, 2), Began(2, 3)]
    assert [c.params["max_new_tokens"] for c in told(history, Called)] == [2, 2, 3, 3]


def test_a_restart_keeps_the_budget_and_a_later_one_that_of_the_one_before(stage: Stage) -> None:
    history = played(stage, Step("restart"), Step("budget", 0, 3), Step("restart"), Step("rollout"))
    assert [b.budget for b in told(history, Began)] == [2, 3]


def test_a_stop_in_the_middle_puts_everything_into_the_buffer(stage: Stage) -> None:
    history = played(stage, Step("tokens"), Step("stop"), Step("rollout"))
    assert names(history)[:4] == ["Began", "Aborting", "Stopped", "Began"]
    first, last = told(history, Stopped)
    assert [m.views[0].response for g in first.buffer for m in g] == ["A"] and last.buffer == ()
    assert [e.rollout for e in told(history, Ended)] == [2]


def test_a_loop_that_cannot_be_stopped_ends_its_rollout_first() -> None:
    history = run(loop(stoppable=False), Step("tokens"), Step("stop"))
    assert names(history) == ["Began", "Ended", "Stopped", "Stopped"]


def test_a_rollout_that_ends_while_it_is_stopped_counts() -> None:
    async def stop(target: ReferenceLoop, _: int) -> None:
        await asyncio.sleep(1)

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        await asyncio.sleep(0.5)
        return []

    assert names(run(loop(rollout, stop=stop), Step("stop"))) == ["Began", "Ended", "Stopped", "Stopped"]


def test_a_fully_asynchronous_loop_is_not_at_rest_between_rollouts(stage: Stage) -> None:
    history = played(stage, Step("tokens", 1), Step("rollout"), spanning=True, over=2)
    assert [e.left for e in told(history, Ended)] == [Left(), Left()]
    assert told(history, Stopped)[0].left == Left((), (), (8, 8))
    assert names(history) == ["Began", "Ended", "Began", "Ended", "Stopped"], "at its end nothing is in flight"


def spans(body: Callable[[ReferenceLoop], Coroutine[Any, Any, None]]) -> Body:
    """A rollout that is over at once and leaves a task that goes on."""

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        target.kept = asyncio.create_task(body(target))  # type: ignore[attr-defined]
        return []

    return rollout


async def asks(target: ReferenceLoop) -> None:
    (group,) = target._source.get_samples(1)
    await target._generate(target._args, group[0], {"max_new_tokens": 2})


def test_what_a_spanning_loop_has_begun_ends_before_it_is_stopped() -> None:
    """Messages arrive, requests run to their end, timers pass, in this order."""

    async def goes_on(target: ReferenceLoop) -> None:
        await asks(target)
        await asyncio.sleep(2 * module.REST_S)
        await asks(target)

    history = run(loop(spans(goes_on)), Step("hold"), Step("end"), spanning=True)
    kinds = [type(event) for event in history.events]
    assert kinds.index(Ended) < kinds.index(Requested) and kinds[-2:] == [Returned, Stopped]
    assert [(r.sample, r.view.response) for r in told(history, Returned)] == [(0, "Aa"), (1, "Aa")]


def test_a_spanning_loop_that_only_polls_is_stopped_after_a_while() -> None:
    since: list[float] = []

    async def polls(target: ReferenceLoop) -> None:
        while True:
            since.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1)

    history = run(loop(spans(polls), stop=nothing), spanning=True)
    assert names(history) == ["Began", "Ended", "Stopped"]
    assert module.REST_S <= since[-1] - since[0] <= 2 * module.REST_S + 2


def test_a_spanning_loop_that_always_begins_another_group_is_stopped_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def always(target: ReferenceLoop) -> None:
        while True:
            await asks(target)

    monkeypatch.setattr(module, "QUIET_ROUNDS", 10)
    history = run(loop(spans(always)), spanning=True)
    assert len(told(history, Returned)) == 10 and names(history) == ["Began", "Ended", "Stopped"]


def test_lists_of_samples_are_one_member(stage: Stage) -> None:
    (end,) = told(played(stage, fan_out=True), Ended)
    assert [len(m.views) for g in end.groups for m in g] == [1]
    assert all(isinstance(e.view.response_length, int) for e in told(played(stage, fan_out=True), Returned))


# Loops that cannot take part


def test_a_loop_that_lacks_something_says_so_and_the_next_scenario_runs() -> None:
    class Lacks(ReferenceLoop):
        def reset(self, env: LoopEnvironment, watch: Watch) -> None:
            if env.scenario.spanning:
                raise CannotJudge("client has no such thing", not_applicable=True)
            super().reset(env, watch)

    with closing(Stage(Lacks(), VOCABULARY)) as made:
        with pytest.raises(CannotJudge, match=r"^client has no such thing$"):
            made.run(Scenario(spanning=True), PLAIN)
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


def test_a_loop_that_cannot_be_set_up_says_so_and_the_next_scenario_runs() -> None:
    class Fails(ReferenceLoop):
        def reset(self, env: LoopEnvironment, watch: Watch) -> None:
            if env.scenario.spanning:
                raise KeyError("x\ny")
            if env.scenario.mask:
                raise OSError("no luck\nat all")
            super().reset(env, watch)

    with closing(Stage(Fails("client"), VOCABULARY)) as made:
        with pytest.raises(CannotJudge, match=r"^client: its loop cannot be set up: KeyError: 'x\\ny'$") as error:
            made.run(Scenario(spanning=True), PLAIN)
        assert isinstance(error.value.__cause__, KeyError) and not error.value.not_applicable
        with pytest.raises(CannotJudge, match=r"^client: its loop cannot be set up: OSError: no luck$"):
            made.run(Scenario(mask=True), PLAIN)
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


def test_a_sample_that_cannot_be_looked_at_halts_the_run() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise CannotJudge("no such field")

    history = run(loop(rollout))
    assert history.events[-1] == Halted(0, 0, "view", "no such field")


# Loops that raise


def test_what_generate_raised_is_passed_on() -> None:
    async def fails(args: Any, sample: Any, params: Any) -> Any:
        raise OSError("no luck")

    history = run(loop(generates={False: fails}), Step("rollout"), Step("tokens"))
    assert {(r.error, r.message) for r in told(history, Raised)} == {("OSError", "no luck")}
    broke = history.events[-1]
    assert isinstance(broke, Broke) and (broke.rollout, broke.error, broke.passed_on) == (1, "RolloutError", True)
    assert [m.sample for g in broke.buffer for m in g] == [0]


def test_a_folder_of_this_run_is_no_part_of_what_is_raised() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise OSError("no such file: '/some/where-81/state.pt' or /else/where")

    assert run(loop(rollout)).events[-1] == Broke(1, "OSError", "no such file: 'state.pt' or where", False, ())


@pytest.mark.parametrize("cause", [False, True])
def test_what_the_loop_itself_raises_is_not(cause: bool) -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise KeyError("x") from (ValueError("y") if cause else None)

    assert run(loop(rollout)).events[-1] == Broke(1, "KeyError", "'x'", False, ())


def test_generate_s_own_error_may_be_raised_as_it_is() -> None:
    async def fails(args: Any, sample: Any, params: Any) -> Any:
        raise OSError("no luck")

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        (group,) = target._source.get_samples(1)
        await target._generate(None, group[0], {"max_new_tokens": 2, "stop": ["x"], "top_k": None})

    history = run(loop(rollout, generates={False: fails}))
    assert history.events[-1] == Broke(1, "OSError", "no luck", True, ())
    assert [dict(c.params) for c in told(history, Called)] == [{"max_new_tokens": 2, "stop": "['x']", "top_k": None}]


def test_a_rollout_that_is_cancelled_has_raised() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise asyncio.CancelledError

    assert run(loop(rollout)).events[-1] == Broke(1, "CancelledError", "cancelled", False, ())


async def nothing(target: ReferenceLoop, number: int) -> Any:
    return []


async def no_luck(target: ReferenceLoop, number: int) -> Any:
    raise RolloutError("no luck")


async def forever(target: ReferenceLoop, number: int) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("target", "steps"),
    [(lambda: loop(nothing, restart=no_luck), (Step("restart"),)), (lambda: loop(nothing, stop=no_luck), ())],
    ids=["restart", "stop"],
)
def test_a_restart_or_a_stop_that_raises(target: Callable[[], ReferenceLoop], steps: tuple[Step, ...]) -> None:
    history = run(target(), *steps)
    assert history.events[-1] == Broke(1, "RolloutError", "no luck", False, ())


def test_after_a_loop_has_raised_nothing_more_is_asked_of_it() -> None:
    history = run(loop(no_luck), Step("end"), Step("rollout"), Step("restart"), Step("stop"))
    assert names(history) == ["Began", "Broke"]


@pytest.mark.parametrize("step", ["end", "rollout", "restart", "stop"])
def test_a_rollout_that_raises_where_it_is_brought_to_its_end(step: str) -> None:
    assert names(run(loop(no_luck, stoppable=False), Step(step))) == ["Began", "Broke"]


def test_a_rollout_that_raises_because_it_is_stopped_has_done_right(stage: Stage) -> None:
    assert names(played(stage, Step("stop"))) == ["Began", "Aborting", "Stopped", "Stopped"]


def test_a_process_that_leaves_is_told() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise SystemExit(3)

    history = run(loop(rollout), Step("tokens"), Step("rollout"))
    assert history.events[-1] == Halted(0, 0, "exit", "the loop left its process")
    assert names(history) == ["Began", "Halted"]


# Loops that do not come to rest


def test_a_loop_that_waits_for_ever_is_stuck_and_its_tasks_are_named() -> None:
    async def member(event: asyncio.Event) -> None:
        await event.wait()

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(member(asyncio.Event()))
            group.create_task(asyncio.Semaphore(0).acquire())  # type: ignore[arg-type]

    history = run(loop(rollout), Step("tokens"))
    stuck = history.events[-1]
    assert isinstance(stuck, Stuck)
    assert (stuck.rollout, stuck.why) == (1, "it waits for something that can never happen")
    assert [name.rpartition(".<locals>.")[2] for name in stuck.tasks] == ["Semaphore.acquire", "member in Event.wait"]


def test_a_loop_that_only_ever_polls_is_stuck() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        while True:  # noqa: ASYNC110 - the fault
            await asyncio.sleep(1)

    assert run(loop(rollout)).events[-1] == Stuck(1, "it waits for something that can never happen", ())


def test_a_loop_that_never_waits_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "MAX_STEPS", 300)

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        while True:  # noqa: ASYNC110 - the fault
            await asyncio.sleep(0)

    (stuck,) = told(run(loop(rollout), Step("tokens"), Step("end")), Stuck)
    assert (stuck.why, stuck.tasks) == ("no end after 301 steps and 0 virtual seconds", ())


def test_a_loop_without_bound_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUNDS", 20)

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        while True:
            target._source.get_samples(1)
            await asyncio.sleep(1)

    assert run(loop(rollout)).events[-1] == Stuck(1, "no end after 20 rounds", ())


@pytest.mark.parametrize(
    ("target", "steps", "waiting"),
    [
        (lambda: loop(nothing, restart=forever), (Step("restart"),), 1),
        (lambda: loop(nothing, stop=forever), (), 1),
        (lambda: loop(forever, stop=nothing), (Step("stop"),), 0),
        (lambda: loop(forever, stoppable=False), (Step("stop"),), 0),
        (lambda: loop(forever), (Step("end"),), 0),
        (lambda: loop(forever), (Step("restart"),), 0),
    ],
    ids=["restart", "stop", "stopped rollout", "rollout before a stop", "rollout", "rollout before a restart"],
)
def test_whatever_does_not_end_is_stuck(
    target: Callable[[], ReferenceLoop], steps: tuple[Step, ...], waiting: int
) -> None:
    history = run(target(), *steps)
    stuck = history.events[-1]
    assert isinstance(stuck, Stuck) and stuck.why == "it waits for something that can never happen"
    assert len(stuck.tasks) == waiting and len(told(history, Stuck)) == 1


def test_tasks_that_a_loop_leaves_are_named_when_it_has_ended() -> None:
    left: list[asyncio.Task[None]] = []

    async def poll(seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        left.extend(asyncio.create_task(poll(seconds)) for seconds in (5, 50))
        return []

    (end,) = told(run(loop(rollout), Step("end")), Ended)
    assert [name.rpartition(".<locals>.")[2] for name in end.left.tasks] == ["poll in sleep"]


def test_messages_on_their_way_arrive_before_a_loop_is_at_rest() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        (group,) = target._source.get_samples(1)
        task = asyncio.create_task(target._generate(target._args, group[0], {"max_new_tokens": 2}))
        kept.append(task)
        return []

    kept: list[Any] = []
    history = run(loop(rollout), Step("hold"), Step("end"))
    assert len(told(history, Requested)) == 1
    (end,) = told(history, Ended)
    assert end.left.running == (0,) and len(end.left.tasks) == 1


def test_a_request_that_nobody_aborts_is_told_and_brought_to_its_end() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        target._flag.set()
        (group,) = target._source.get_samples(1)
        sending = asyncio.create_task(generate(Unflagged(target._args), group[0], {"max_new_tokens": 2}))
        await sending
        target._flag.clear()
        return [group]

    class Unflagged:
        """The loop's args for a client that does not see its flag."""

        rollout_abort = None

        def __init__(self, args: Any) -> None:
            self._args = args

        def __getattr__(self, name: str) -> Any:
            return getattr(self._args, name)

    history = run(loop(rollout))
    assert told(history, Straggled) == [Straggled(1, -1)] and len(told(history, Ended)) == 1


def test_a_flag_that_is_up_is_told_of_every_call() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        groups = target._source.get_samples(2)
        params = {"max_new_tokens": 2}
        first = asyncio.create_task(target._generate(target._args, groups[0][0], params))
        await asyncio.sleep(1)
        target._flag.set()
        await target._generate(target._args, groups[1][0], params)
        target._flag.clear()
        await first
        return []

    history = run(loop(rollout), Step("wait"))
    assert told(history, Flagged)[:2] == [Flagged(0, 0, 0), Flagged(0, 1, None)]


def test_what_is_cancelled_afterwards_is_no_part_of_the_history() -> None:
    seen: list[str] = []

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        (group,) = target._source.get_samples(1)
        try:
            await target._generate(target._args, group[0], {"max_new_tokens": 2})
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    stage = Stage(loop(rollout), VOCABULARY)
    stage.begin(Scenario(budget=2), PLAIN)
    stage.do(Step("rollout"))
    play = stage._play
    assert play is not None
    stage.close()  # in the middle of it
    assert seen == ["cancelled"] and not [e for e in play.events if isinstance(e, Raised)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_task_that_will_not_be_cancelled_spoils_no_other_scenario(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "MAX_STEPS", 3000)

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def rollout(target: ReferenceLoop, number: int) -> Any:
        if number == 1 and not target.named:  # type: ignore[attr-defined]
            target.named = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
            if leaves:
                raise SystemExit
            while True:  # noqa: ASYNC110 - the fault
                await asyncio.sleep(0)
        return []

    with closing(Stage(loop(rollout, named=None), VOCABULARY)) as made:
        first = made.run(Scenario(budget=2), PLAIN)
        assert isinstance(first.events[-1], Halted if leaves else Stuck)
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


def test_a_client_that_does_not_close_does_not_keep_the_stage() -> None:
    class Hangs(ReferenceLoop):
        async def close(self) -> None:
            await asyncio.Event().wait()

    made = Stage(Hangs(), VOCABULARY)
    made.close()
    assert made.loop.is_closed()


def test_the_reference_s_parts_break_no_rule_of_loops(stage: Stage) -> None:
    """[ABORT-LIVE] [GROUP] [PROVENANCE] on every kind of step at once."""
    kinds = (
        *("tokens", "hold", "tokens", "abort", "pass", "wait", "kill", "update", "rollout", "tokens"),
        *("restart", "rollout", "budget", "rollout", "stop", "end"),
    )
    for mode in (PLAIN, STREAM):
        history = played(stage, *(Step(kind, 1, 2) for kind in kinds), mode=mode, members=2, over=2, mask=True)
        case = RolloutCase(mode, history)
        assert [f for f in (rollout_checker(rule)(case) for rule in LOOP_RULE_IDS) if isinstance(f, Finding)] == []


def test_a_rollout_of_the_reference_is_one_of_its_own_class(stage: Stage) -> None:
    assert isinstance(stage.target.loop, Rollout)  # type: ignore[attr-defined]
