"""A Hypothesis state machine over a rollout loop: steps are its rules, the rules of the contract its invariants.

It plays the steps of `harness.scenario_strategies` one by one on a stage and
judges what each has brought, so a failure names the step that broke a rule.
Hypothesis shrinks it; the scenario in the message replays it exactly, on any
target. A check draws whole scenarios instead, which costs a fifth.

    TestMyLoop = machine(Stage(MyLoop()), "stream").TestCase
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from hypothesis import reject
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.checkers import LOOP_RULE_IDS, ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import Raised, Returned
from harness.rollouts import Broke, Ended, Restarted, RolloutHistory, Stopped, Straggled, Stuck
from harness.scenario import Scenario, Step, to_json
from harness.scenario_strategies import SETTINGS, STEP, WEIGHTS
from harness.stage import Stage
from harness.targets import CannotJudge

NAMES = {
    "tokens": "deliver",
    "rollout": "submit",
    "end": "finish",
    "hold": "hold_messages",
    "pass": "let_messages_pass",
    "wait": "wait_for_a_timer",
    "kill": "kill_a_connection",
    "abort": "abort",
    "update": "update_weights",
    "restart": "save_and_load",
    "budget": "lower_the_budget",
    "stop": "shut_down",
}
"""What each kind of step is called as a rule. A rollout that is submitted resumes what was aborted before."""

_OF_A_CALL = (Returned, Raised)
_OF_THE_LOOP = (Ended, Restarted, Stopped, Straggled, Stuck, Broke)
"""The events that the verdict on a sample, or on the loop, can change with."""


class Broken(AssertionError):
    """A rule is broken. The message is the finding and the scenario."""


class RolloutMachine(RuleBasedStateMachine):
    """See the module. Make one with `machine`."""

    stage: ClassVar[Stage]
    mode: ClassVar[str]
    judged: ClassVar[tuple[str, ...]]

    _began = False
    _seen = 0

    @initialize(settings=SETTINGS)
    def begin(self, settings: dict[str, Any]) -> None:
        try:
            self.stage.begin(Scenario(**settings), self.mode)
        except CannotJudge as error:
            if not error.not_applicable:
                raise
            reject()
        self._began = True

    @invariant()
    def every_rule_holds(self) -> None:
        if self._began:
            self._judge(self.stage.so_far())

    def teardown(self) -> None:
        if self._began:
            self._judge(self.stage.end())

    def _judge(self, history: RolloutHistory) -> None:
        """Judges what happened since the last time. Raises Broken."""
        new, self._seen = history.events[self._seen :], len(history.events)
        touched = frozenset(e.sample for e in new if isinstance(e, _OF_A_CALL))
        of_the_loop = any(isinstance(event, _OF_THE_LOOP) for event in new)
        case = RolloutCase(self.mode, history, touched)
        for name in self.judged:
            if not (of_the_loop if name in LOOP_RULE_IDS else touched):
                continue
            finding = _CHECKERS[name](case)
            if isinstance(finding, Finding):
                scenario = json.dumps(to_json(history.scenario))
                raise Broken(f"{name}: sample {finding.sample + 1}: {finding.message}: {scenario}")


_CHECKERS = {name: rollout_checker(name) for name in ROLLOUT_RULE_IDS}


def _rules() -> dict[str, Any]:
    """A rule for each kind of step, and more for those that are drawn more often: Hypothesis takes all alike."""
    made: dict[str, Any] = {}
    for kind, name in NAMES.items():
        for number in range(1, WEIGHTS.get(kind, 1) + 1):

            def play(self: RolloutMachine, step: Step) -> None:
                self.stage.do(step)

            play.__name__ = name if number == 1 else f"{name}_{number}"
            made[play.__name__] = rule(step=STEP[kind])(play)
    return made


def machine(stage: Stage, mode: str, judged: tuple[str, ...] = ROLLOUT_RULE_IDS) -> type[RolloutMachine]:
    """A machine on a stage, which serves all its runs, in one mode."""
    return type("Rollouts", (RolloutMachine,), {"stage": stage, "mode": mode, "judged": judged, **_rules()})
