"""The state machine over a loop, its rules called one by one: no draw, the same every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis.errors import HypothesisDeprecationWarning, UnsatisfiedAssumption

from harness import tokenizer
from harness.checkers import ROLLOUT_RULE_IDS
from harness.history import PLAIN, STREAM
from harness.machine import NAMES, Broken, RolloutMachine, machine
from harness.rollouts import Ended, Restarted, Stopped
from harness.scenario import Scenario, Step, from_json, to_json
from harness.scenario_strategies import WEIGHTS
from harness.stage import Stage
from harness.targets import CannotJudge, LoopEnvironment, Watch
from harness.targets.reference_loop import ReferenceLoop
from reference_impl.rollout import DataSource

VOCABULARY = tokenizer.load()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with closing(Stage(ReferenceLoop(), VOCABULARY)) as made:
        yield made


def test_its_rules_are_the_steps_and_some_stand_there_more_often(stage: Stage) -> None:
    made = machine(stage, STREAM)
    rules = {name for name, value in vars(made).items() if callable(value)}
    assert rules >= set(NAMES.values()) and len(rules) == len(NAMES) + sum(n - 1 for n in WEIGHTS.values())
    assert {f"deliver_{n}" for n in range(2, 9)} <= rules and "deliver_9" not in rules
    assert (made.stage, made.mode, made.judged) == (stage, STREAM, ROLLOUT_RULE_IDS)


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_a_run_plays_steps_and_judges_after_each(stage: Stage, mode: str) -> None:
    made: Any = machine(stage, mode)()
    made.every_rule_holds()  # before it has begun
    made.begin(settings={"budget": 2, "over": 2})
    for name, step in (("deliver", Step("tokens")), ("save_and_load", Step("restart")), ("submit_2", Step("rollout"))):
        getattr(made, name)(step=step)
        made.every_rule_holds()
    history = stage.so_far()
    assert history.scenario == Scenario(2, over=2, steps=(Step("tokens"), Step("restart"), Step("rollout")))
    assert [type(e) for e in history.events if isinstance(e, Ended | Restarted | Stopped)] == [Ended, Restarted]
    made.teardown()


def test_a_run_that_has_not_begun_has_nothing_to_end(stage: Stage) -> None:
    machine(stage, PLAIN)().teardown()


class Lacks(ReferenceLoop):
    def reset(self, env: LoopEnvironment, watch: Watch) -> None:
        if env.scenario.spanning or env.scenario.mask:
            raise CannotJudge("client has no such thing", not_applicable=env.scenario.spanning)
        super().reset(env, watch)


def test_settings_that_a_loop_does_not_know_are_drawn_again_and_other_trouble_is_told() -> None:
    with closing(Stage(Lacks(), VOCABULARY)) as made:
        run: Any = machine(made, PLAIN)()
        outside = pytest.warns(HypothesisDeprecationWarning, match="outside a property-based test")
        with outside, pytest.raises(UnsatisfiedAssumption):
            run.begin(settings={"spanning": True})
        run.teardown()
        with pytest.raises(CannotJudge, match="no such thing"):
            machine(made, PLAIN)().begin(settings={"mask": True})  # type: ignore[attr-defined]


class LosesItsBuffer(DataSource):
    def load(self, path: Any) -> None:
        super().load(path)
        self.buffer.clear()


@pytest.fixture
def faulty() -> Iterator[Callable[..., RolloutMachine]]:
    with closing(Stage(ReferenceLoop("faulty", source=LosesItsBuffer), VOCABULARY)) as stage:

        def begun(*judged: str) -> RolloutMachine:
            made: Any = machine(stage, PLAIN, judged)()
            made.begin(settings={"budget": 1, "over": 2})
            run: RolloutMachine = made
            return run

        yield begun


def test_a_broken_rule_is_told_with_the_scenario_that_replays_it(faulty: Callable[..., Any]) -> None:
    run = faulty("BUDGET", "GROUP")
    run.save_and_load(step=Step("restart"))
    with pytest.raises(Broken) as caught:
        run.every_rule_holds()
    said, _, scenario = str(caught.value).partition(": {")
    assert said == "GROUP: sample 2: was in the buffer when it was saved, and is not when it is loaded"
    played = Scenario(1, over=2, steps=(Step("restart"),))
    assert from_json(json.loads("{" + scenario)) == played and "{" + scenario == json.dumps(to_json(played))
    run.every_rule_holds()  # what has been judged is not judged again


def test_only_the_rules_that_were_asked_for_are_judged(faulty: Callable[..., Any]) -> None:
    run = faulty("ABORT-LIVE", "BUDGET")
    run.save_and_load(step=Step("restart"))
    run.every_rule_holds()
    run.teardown()
