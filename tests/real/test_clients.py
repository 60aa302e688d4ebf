"""Clients against the real server, through the proxy: the reference, and slime where a checkout is given.

The verdicts are those of the same checkers that judge on the mock. A client's fault shows on a real server, and a
right client is accused of nothing that only the server or the proxy does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.check import Report, check
from harness.history import Faulted, History, Requested, Returned, SampleView
from harness.isolation import Worker
from harness.options import LEVEL_SETS, Options
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.targets.checkout import checkout
from harness.targets.function import reference
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, VALID, exit_status
from tests.real.server import INCREMENTAL, SMALL, Server, other_flags

CHECKOUT = os.environ.get("ROLLOUTCHECK_SLIME", "")
LOST, RESTORED = "1eed24931", "26e859afc"
needs_slime = pytest.mark.skipif(not CHECKOUT, reason="ROLLOUTCHECK_SLIME names no slime checkout")


def judged(server: Server, level: str = "sample", rules: tuple[str, ...] = ()) -> Report:
    """The reference by the quick profile."""
    levels = LEVEL_SETS[level]
    return check(Options(TargetSpec("reference"), engines=(server.url,), profile="quick", levels=levels, rules=rules))


def verdicts(report: Report) -> dict[tuple[str, str], tuple[str, str]]:
    return {(r.rule, r.mode): (r.verdict, r.reason) for r in report.results}


def conforms(report: Report, modes: set[str]) -> None:
    assert {mode for _, mode in verdicts(report)} == modes
    wrong = {row: said for row, said in verdicts(report).items() if said[0] != VALID}
    assert (wrong, exit_status(list(report.results), strict=True)) == ({}, 0)


def test_the_reference_conforms(real: Server) -> None:
    """Every rule on single samples, plain and streaming, at the default context."""
    conforms(judged(real), {"plain", "stream"})


def test_the_loop_of_the_reference_conforms(real: Server) -> None:
    """Every rule on whole rollouts: groups, aborts of what runs, the buffer, restarts."""
    conforms(judged(real, "rollout"), {"plain", "stream"})


@other_flags(*SMALL)
def test_the_reference_conforms_where_the_context_is_small(other: Server) -> None:
    conforms(judged(other), {"plain", "stream"})


@other_flags(*INCREMENTAL)
def test_the_reference_conforms_on_increments(other: Server) -> None:
    conforms(judged(other), {"plain", "incremental"})


@other_flags(*SMALL)
@pytest.mark.parametrize("mode", ["plain", "stream"])
def test_near_the_limit_the_reference_ends_truncated(other: Server, mode: str) -> None:
    """Within 6 tokens of C the server refuses, at input + max = C it gives two fewer: one request, nothing lost.

    [RETRY] [STATUS] [CONTEXT] spec/sglang.md#limits
    """
    context = other.context
    runner = Runner(reference(), other.url)
    try:
        for room in range(1, 12):
            run = runner.run(Schedule(prompt="x" * (context - room), budget=64, context=context), mode)
            asked = [e for e in run.events if isinstance(e, Requested)]
            assert [e.params["max_new_tokens"] for e in asked] == [room]
            ended = last(run)
            assert ended.status in ("truncated", "completed")
            assert ended.response_length <= max(room - 2, 0)
            refused = [e for e in run.events if isinstance(e, Faulted)]
            assert len(refused) == (room <= 6)
            if not refused and ended.status == "truncated":
                assert ended.response_length == room - 2
    finally:
        runner.close()


def last(run: History) -> SampleView:
    return next(e.view for e in reversed(run.events) if isinstance(e, Returned))


# slime

ISSUE = Schedule(prompt="hello", budget=230, attempts=(Attempt("abort-request", after=40),))
"""Issue #2260 in a context of 256: 5 + 40 + 230 tokens are more than the model takes."""


def slime(revision: str, server: Server, level: str = "sample") -> Report:
    with checkout(Path(CHECKOUT), revision) as tree:
        target = TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        options = Options(target, engines=(server.url,), profile="quick", rules=("BUDGET",), levels=LEVEL_SETS[level])
        return check(options)


@needs_slime
@pytest.mark.parametrize("level", ["sample", "rollout"])
def test_the_revision_that_lost_the_subtraction(real: Server, level: str) -> None:
    """[BUDGET] THUDM/slime#2260 on a real server: a resumed answer asks for the whole budget again."""
    (result,) = slime(LOST, real, level).results
    assert result.verdict == INVALID, result.reason
    assert result.counterexample is not None


@needs_slime
@pytest.mark.parametrize("level", ["sample", "rollout"])
def test_the_revision_that_restored_it(real: Server, level: str) -> None:
    """[BUDGET] by 26e859afc, plain and streaming."""
    assert {r.mode: r.verdict for r in slime(RESTORED, real, level).results} == {"plain": VALID, "stream": VALID}


@needs_slime
@other_flags(*SMALL)
@pytest.mark.parametrize(("revision", "requests"), [(LOST, 60), (RESTORED, 1)])
def test_the_real_400_of_the_issue(other: Server, revision: str, requests: int) -> None:
    """[RETRY] [CONTEXT] What users saw: the resumed answer is refused by the server, sixty times."""
    with checkout(Path(CHECKOUT), revision) as tree:
        target = TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        with Worker(target, other.url) as worker:
            run = worker.run(ISSUE, "plain")
    assert isinstance(run, History)
    resumed = [e for e in run.events if isinstance(e, Requested) and e.attempt == 1]
    refused = [e for e in run.events if isinstance(e, Faulted) and e.attempt == 1]
    assert len(resumed) == requests
    assert len(refused) == (requests if revision == LOST else 0)
    assert all(
        e.code == 400 and e.message.startswith("Requested token count exceeds the model's maximum context length")
        for e in refused
    )
