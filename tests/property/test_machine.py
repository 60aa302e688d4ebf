"""The state machine over the rollout loop: the reference keeps every rule, and faulty loops are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from harness.checkers import ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import MODES, PLAIN, STREAM
from harness.machine import NAMES, Broken, machine
from harness.scenario import STEPS, from_json
from harness.scenario_strategies import MAX_STEPS, STEP
from harness.stage import Stage
from harness.targets.reference_loop import ReferenceLoop
from reference_impl.rollout import DataSource, Rollout


def play(stage: Stage, mode: str, runs: int, *phases: Phase, judged: tuple[str, ...] = ROLLOUT_RULE_IDS) -> None:
    config = settings(
        max_examples=runs,
        stateful_step_count=MAX_STEPS,
        database=None,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, *phases),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(machine(stage, mode, judged), settings=config)


@pytest.fixture
def reference() -> Iterator[Stage]:
    with closing(Stage(ReferenceLoop())) as stage:
        yield stage


@pytest.mark.parametrize("mode", MODES)
def test_the_reference_keeps_every_rule(reference: Stage, mode: str) -> None:
    play(reference, mode, 50)


def test_every_kind_of_step_is_a_rule() -> None:
    assert STEPS.keys() == STEP.keys() == NAMES.keys()


class LosesItsBuffer(DataSource):
    def load(self, path: Any) -> None:
        super().load(path)
        self.buffer.clear()


class TrustsTheEngine(Rollout):
    """Looks at nothing when a group comes back: also a half answer is handed over."""

    async def _run(self, group: Any) -> bool:
        for place in range(len(group)):
            await self._member(group, place)
        return not self.aborting


@pytest.mark.parametrize(
    ("target", "mode", "words"),
    [
        (lambda: ReferenceLoop("faulty", source=LosesItsBuffer), PLAIN, "and is not when it is loaded"),
        (lambda: ReferenceLoop("faulty", TrustsTheEngine), STREAM, "is handed to training aborted"),
    ],
    ids=["buffer", "aborted"],
)
def test_GROUP_is_seen_broken_and_its_scenario_replays_it(target: Any, mode: str, words: str) -> None:
    with closing(Stage(target())) as stage:
        with pytest.raises(Broken, match=words) as caught:
            play(stage, mode, 100, Phase.shrink, judged=("GROUP",))
        scenario = from_json(json.loads(str(caught.value).partition(": {")[2].join(("{", ""))))
        finding = rollout_checker("GROUP")(RolloutCase(mode, stage.run(scenario, mode)))
    assert isinstance(finding, Finding) and words in finding.message
    assert len(scenario.steps) <= 3, "Hypothesis has shrunk it"
