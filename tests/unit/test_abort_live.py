"""[ABORT-LIVE] on histories by hand: one that holds, and one for every way to break it."""

from __future__ import annotations

import pytest

from harness.checkers import HOLDS, Finding
from harness.history import Flagged
from harness.rollouts import Aborting, Ended, Event, Left, Restarted, Straggled, Stuck
from tests.unit.loop_histories import began, broke, call, ended, finding, groups, judge, problem, stopped, taken

REST = Left((), (), (8, 8))


@pytest.mark.parametrize("end", [ended(groups((0,)), left=REST), stopped(left=REST), ended(), stopped()])
def test_ABORT_LIVE_holds_where_nothing_is_left(end: object) -> None:
    assert judge("ABORT-LIVE", began(), call(0), Aborting(1), end) is HOLDS  # type: ignore[arg-type]


def test_ABORT_LIVE_is_not_judged_before_a_rollout_has_ended() -> None:
    assert judge("ABORT-LIVE", began(), call(0)) is None


def test_ABORT_LIVE_is_broken_by_a_request_that_nobody_aborts() -> None:
    found = finding("ABORT-LIVE", began(), call(3, 2), Aborting(0), Straggled(1, 3), ended())
    assert found == Finding(2, "its request came after the abort, and nothing aborts it", 3, 1)


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ((), ""),
        (("a",), ": a"),
        (("a", "b", "c", "d"), ": a, b, c, d"),
        (("a", "b", "c", "d", "e"), ": a, b, c, d, ..."),
    ],
)
def test_ABORT_LIVE_is_broken_by_a_rollout_without_end(tasks: tuple[str, ...], named: str) -> None:
    said = f"rollout 1 does not end: it waits{named}"
    assert finding("ABORT-LIVE", began(), Stuck(1, "it waits", tasks)) == Finding(None, said, -1, 1)


def test_ABORT_LIVE_is_broken_by_an_abort_that_raises_and_loses_samples() -> None:
    said = "is lost: the abort raises KeyError: 'x'"
    told = [began(2), taken((4,), (3,), (2,))]
    there = groups((2,))
    assert problem("ABORT-LIVE", told, Aborting(1), broke(buffer=there, rollout=2)) == (3, said)
    assert problem("ABORT-LIVE", told, Flagged(0, 0, None), call(0), broke(buffer=there, rollout=2)) == (3, said)


@pytest.mark.parametrize(
    "told",
    [
        [taken((1,)), Aborting(1), broke(buffer=groups((1,)))],
        [taken((1,), (2,)), ended(groups((1,)), groups((2,))), began(2), Aborting(1), broke(buffer=groups((2,)))],
        [taken((1,), (2,)), Restarted(groups((2,)), groups((2,))), Aborting(1), broke(buffer=groups((2,)))],
    ],
    ids=["in the buffer", "trained on", "not known to this process"],
)
def test_ABORT_LIVE_lets_an_abort_raise_that_loses_nothing(told: list[Event]) -> None:
    assert judge("ABORT-LIVE", began(), told) is (HOLDS if any(isinstance(e, Ended) for e in told) else None)


def test_ABORT_LIVE_takes_the_samples_of_a_new_process_for_its_own() -> None:
    told = [began(), taken((1,), (2,)), Restarted(groups((2,)), groups((2,))), began(2), Aborting(1)]
    assert problem("ABORT-LIVE", told, broke(rollout=2)) == (2, "is lost: the abort raises KeyError: 'x'")


@pytest.mark.parametrize(
    "told",
    [
        [began(), taken((0,)), broke()],
        [began(), taken((0,)), Aborting(1), broke(passed_on=True)],
        [began(), taken((0,)), Aborting(1), began(2), broke(rollout=2)],
        [began(), taken((0,)), broke(), Aborting(1)],
    ],
    ids=["before an abort", "generate raised it", "the rollout before was aborted", "aborted later"],
)
def test_ABORT_LIVE_does_not_judge_what_raises_outside_an_abort(told: list[object]) -> None:
    assert judge("ABORT-LIVE", told) is None  # type: ignore[arg-type]


LEFT = [
    (Left((4, 5)), 4, "its request still runs"),
    (Left((), ("a",)), -1, "a task still runs: a"),
    (Left((), ("a", "b")), -1, "2 tasks still run: a, b"),
    (Left((), (), (5, 8)), -1, "3 of 8 permits are not back"),
    (Left((), (), (9, 8)), -1, "-1 of 8 permits are not back"),
]


@pytest.mark.parametrize(("left", "sample", "said"), LEFT)
def test_ABORT_LIVE_is_broken_by_what_is_left(left: Left, sample: int, said: str) -> None:
    assert problem("ABORT-LIVE", began(), stopped(left=left)) == (sample, said)
    if left.tasks:  # they may compute a reward
        assert judge("ABORT-LIVE", began(), ended(left=left)) is HOLDS
    else:
        assert problem("ABORT-LIVE", began(), ended(left=left)) == (sample, said)


def test_ABORT_LIVE_tells_the_first_of_several() -> None:
    everything = Left((4,), ("a",), (5, 8))
    assert problem("ABORT-LIVE", began(), ended(left=everything))[1] == "its request still runs"
    assert problem("ABORT-LIVE", began(), stopped(left=Left((), ("a",), (5, 8))))[1] == "a task still runs: a"
