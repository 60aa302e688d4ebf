"""The real thing: what the check says of THUDM/slime at the revisions around issue #2260.

Needs a checkout, which is never part of this repository: set ROLLOUTCHECK_SLIME to its folder
(a working tree or a bare repository with the history). A small client with the same fault is
tested in tests/regressions without it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest

from harness.check import Report, check
from harness.options import Options
from harness.targets.checkout import checkout
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, VALID, Result

CHECKOUT = os.environ.get("ROLLOUTCHECK_SLIME", "")

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="ROLLOUTCHECK_SLIME names no slime checkout")

LOST, STREAMING, RESTORED, NEWEST = "1eed24931", "35e8767f9", "26e859afc", "624b824a8"


@lru_cache(maxsize=8)
def report(revision: str, profile: str = "ci") -> Report:
    with checkout(Path(CHECKOUT), revision) as tree:
        target = TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        return check(Options(target=target, rules=("BUDGET",), profile=profile))


def result(revision: str, mode: str, *, profile: str = "ci") -> Result:
    found = [r for r in report(revision, profile).results if r.mode == mode and not r.faulty_engine]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("revision", "mode", "verdict"),
    [
        (LOST, "plain", INVALID),
        (STREAMING, "plain", INVALID),
        (STREAMING, "stream", INVALID),
        (RESTORED, "plain", VALID),
        (RESTORED, "stream", VALID),
        (NEWEST, "plain", VALID),
        (NEWEST, "stream", VALID),
    ],
)
def test_budget_at_the_revisions_of_the_issue(revision: str, mode: str, verdict: str) -> None:
    """[BUDGET] THUDM/slime#2260: lost in 1eed24931, wrong in streaming from its first commit, restored by 26e859afc."""
    assert result(revision, mode).verdict == verdict


@pytest.mark.parametrize(("revision", "mode"), [(LOST, "plain"), (STREAMING, "stream")])
def test_the_counterexample_has_two_attempts(revision: str, mode: str) -> None:
    """[BUDGET] An abort, and a resumed attempt that asks for the whole budget again."""
    example = result(revision, mode).counterexample
    assert example is not None
    assert example.schedule.kinds == ("abort",)
    assert example.finding.attempt == 1


def test_the_quick_profile_suffices() -> None:
    """[BUDGET] What gates a change must find the fault of the issue with few schedules."""
    assert result(LOST, "plain", profile="quick").verdict == INVALID
    assert result(RESTORED, "plain", profile="quick").verdict == VALID
