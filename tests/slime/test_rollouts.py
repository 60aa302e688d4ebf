"""Whole rollouts of THUDM/slime's own loop, at the revisions around issue #2260 and at the newest one known.

Needs a checkout: see tests/slime/test_revisions.py.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from harness.check import Report, check
from harness.options import Options
from harness.reporters import failure
from harness.targets.checkout import checkout
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, VALID, Result
from harness.work import ROLLOUT
from tests.slime.test_revisions import CHECKOUT, LOST, NEWEST, pytestmark

__all__ = ["pytestmark"]
BEFORE_THE_FIX = "a6272da0d"


@lru_cache(maxsize=8)
def report(revision: str, *rules: str) -> Report:
    with checkout(Path(CHECKOUT), revision) as tree:
        target = TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        return check(Options(target=target, rules=rules, profile="quick", levels=(ROLLOUT,)))


def result(revision: str, rule: str, mode: str) -> Result:
    (found,) = [r for r in report(revision, rule).results if r.mode == mode]
    return found


@pytest.mark.parametrize(
    ("revision", "mode", "verdict"),
    [
        (LOST, "plain", INVALID),
        (BEFORE_THE_FIX, "plain", INVALID),
        (BEFORE_THE_FIX, "stream", INVALID),
        (NEWEST, "plain", VALID),
        (NEWEST, "stream", VALID),
    ],
)
def test_budget_over_whole_rollouts(revision: str, mode: str, verdict: str) -> None:
    """[BUDGET] An aborted group is taken up again by the next rollout, and exceeds the budget or does not."""
    assert result(revision, "BUDGET", mode).verdict == verdict


def test_the_report_says_in_which_rollout_of_which_sample() -> None:
    """[BUDGET]"""
    example = result(LOST, "BUDGET", "plain").counterexample
    assert example is not None
    *_, wrong, why = failure.lines("BUDGET", "slime", "plain", "inproc", example.finding, example.history)
    assert wrong.startswith("    sample 2 ") and wrong.endswith("<- rollout 2: may ask at most 1")
    assert why.startswith("  why ")


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize("rule", ["ABORT-LIVE", "GROUP"])
def test_what_is_known_of_the_newest_revision(rule: str, mode: str) -> None:
    """[ABORT-LIVE, GROUP] Explained where they were found; a change here is news."""
    assert result(NEWEST, rule, mode).verdict == INVALID


MACHINE = """
import sys
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from harness.machine import machine
from harness.stage import Stage
from harness.targets import slime_loop

root, revision, mode, rule = sys.argv[1:]
config = settings(max_examples=150, stateful_step_count=20, database=None, deadline=None, derandomize=True,
                  phases=[Phase.generate], suppress_health_check=list(HealthCheck))
run_state_machine_as_test(machine(Stage(slime_loop.load(root, revision)), mode, (rule,)), settings=config)
"""


@pytest.mark.parametrize(
    ("revision", "mode", "rule", "said"),
    [
        (NEWEST, "plain", "BUDGET", ""),
        (NEWEST, "stream", "BUDGET", ""),
        (NEWEST, "plain", "GROUP", "Broken: GROUP: sample "),
        (BEFORE_THE_FIX, "stream", "BUDGET", "Broken: BUDGET: sample "),
    ],
)
def test_the_state_machine_on_slime_s_loop(revision: str, mode: str, rule: str, said: str) -> None:
    """The machine that plays the reference plays slime, in a process of its own."""
    with checkout(Path(CHECKOUT), revision) as tree:
        done = subprocess.run(
            [sys.executable, "-c", MACHINE, str(tree.root), revision, mode, rule],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert (done.returncode, said in done.stderr) == (int(bool(said)), True), done.stderr[-2000:]
