"""Draws schedules and lets every checker judge a client on them: what the tests of this package share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache

from harness import scenario_strategies, strategies
from harness.checkers import ROLLOUT_RULE_IDS, RULE_IDS, Case, Finding, RolloutCase, checker, rollout_checker
from harness.checkers.resume_eq import comparable
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM
from harness.runner import Runner
from harness.scenario import Scenario
from harness.schedule import Schedule
from harness.stage import Stage
from harness.targets import LoopTarget
from harness.targets.function import FunctionTarget

CHECKERS = {rule: checker(rule) for rule in RULE_IDS}
ROLLOUT_CHECKERS = {rule: rollout_checker(rule) for rule in ROLLOUT_RULE_IDS}


@lru_cache(maxsize=16)
def drawn(seed: int, count: int, *, faulty: bool = False) -> tuple[Schedule, ...]:
    """``count`` schedules as a check draws them, the same for the same seed."""
    return tuple(strategies.drawn(count, seed, faulty=faulty))


def judge(
    runner: Runner, schedule: Schedule, modes: tuple[str, ...], rules: tuple[str, ...] = RULE_IDS
) -> Iterator[tuple[str, str, Finding]]:
    """Every finding of the rules on one schedule in some modes, as (mode, rule, finding)."""
    histories = {mode: runner.run(schedule, mode) for mode in modes}
    for mode in modes:
        wanted = "RESUME-EQ" in rules and comparable(schedule)
        case = Case(mode, histories, runner.run(schedule.uninterrupted(), mode) if wanted else None)
        for rule in rules:
            finding = CHECKERS[rule](case)
            if isinstance(finding, Finding):
                yield mode, rule, finding


def modes_of(target: FunctionTarget) -> tuple[str, ...]:
    """The modes a function target runs in; a streaming function meets both kinds of stream."""
    return tuple(m for m in (PLAIN, STREAM, INCREMENTAL) if (PLAIN if m == PLAIN else STREAM) in target.modes)


def findings(target: FunctionTarget, among: tuple[Schedule, ...]) -> list[str]:
    """What any rule says of the target on any of the schedules, one line each."""
    modes = modes_of(target)
    with closing(Runner(target)) as runner:
        return [
            f"{rule} in {mode}, call {finding.attempt}: {finding.message} | {schedule}"
            for schedule in among
            for mode, rule, finding in judge(runner, schedule, modes)
        ]


@lru_cache(maxsize=4)
def drawn_rollouts(seed: int, count: int) -> tuple[Scenario, ...]:
    """``count`` scenarios as a check draws them, the same for the same seed."""
    return tuple(scenario_strategies.drawn(count, seed))


def judge_rollouts(stage: Stage, scenario: Scenario) -> Iterator[tuple[str, str, Finding]]:
    """Every finding of the rules on one scenario in all modes, as (mode, rule, finding)."""
    for mode in MODES:
        case = RolloutCase(mode, stage.run(scenario, mode))
        for rule, check in ROLLOUT_CHECKERS.items():
            finding = check(case)
            if isinstance(finding, Finding):
                yield mode, rule, finding


def findings_on_rollouts(target: LoopTarget, among: tuple[Scenario, ...]) -> list[str]:
    """What any rule says of the loop on any of the scenarios, one line each."""
    with closing(Stage(target)) as stage:
        return [
            f"{rule} in {mode}, rollout {finding.rollout}: {finding.message} | {scenario}"
            for scenario in among
            for mode, rule, finding in judge_rollouts(stage, scenario)
        ]
