"""The picture of a counterexample in numbers."""

from __future__ import annotations

import pytest

from harness.checkers import Finding
from harness.history import COMPLETED, TRUNCATED
from harness.reporters import picture
from harness.reporters.picture import FIRST, LAST, Lane, Mark, Picture, Section
from harness.rollouts import Aborting, Updated
from harness.work import Run
from tests.unit import loop_histories as loops
from tests.unit.histories import Ask, Life, attempts, view
from tests.unit.loop_histories import began, call, ended, groups, member, stopped, taken


def rows(run: Run, rule: str = "", finding: Finding | None = None) -> tuple[Lane | Mark, ...]:
    (section,) = picture.of(run, rule, finding).sections
    return section.rows


def test_the_fault_of_slime() -> None:
    """The second attempt begins at what is kept and asks past the budget, into the end of the context."""
    life = Life(budget=24576, context=40960)
    life.call(Ask(24576, (7,) * 19201, "abort"), after=view((7,) * 19201))
    life.call(*[Ask(24576, fault="http", code=400)] * 60, raises="HTTPStatusError")
    said = "aborted with 19201"
    wrong = "may ask at most 5375"
    assert picture.of(life.history, "BUDGET", Finding(1, wrong)) == Picture(
        "prompt 3, budget 24576, context 40960",
        19201 + 24576,
        (
            Section(
                "",
                24576,
                40957,
                (
                    Lane("attempt 1", 0, 24576, 19201, "abort", 1, 19201, said),
                    Lane("attempt 2", 19201, 24576, 0, "HTTP 400", 60, 19201, f"{said}, raises HTTPStatusError", wrong),
                ),
            ),
        ),
    )


def test_a_call_that_asks_nothing_and_one_with_the_flag_up() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), flag=True, after=view((5,))).call(flag=True)
    assert rows(life.history) == (
        Lane("attempt 1", 0, 2, 1, "abort, abort flag", 1, 1, "aborted with 1"),
        Lane("attempt 2", 1, 0, 0, "abort flag", 0, 1, "aborted with 1"),
    )


def test_what_the_engine_did_wrong_is_said() -> None:
    life = Life(budget=2, attempts=attempts("over-deliver")).call(Ask(2, (5, 6, 7), "length"), flag=True)
    assert rows(life.history)[0] == Lane(
        "attempt 1", 0, 2, 3, "length, abort flag (over-deliver)", 1, 0, "pending with 0"
    )


def test_the_requests_of_a_call_that_differ_are_told_apart() -> None:
    ask = Ask(2, (5,), fault="drop-inside")
    life = Life(budget=2).call(ask, ask, Ask(1, (6,), "length", kept=(5,)), after=view((5, 6), TRUNCATED))
    assert rows(life.history, "BUDGET", Finding(0, "no")) == (
        Lane("attempt 1", 0, 2, 1, "drop-inside", 2),
        Lane("then", 1, 1, 1, "length", 1, 2, "truncated with 2", "no"),
    )


def test_samples_that_share_a_dict_are_told_apart() -> None:
    life = Life(budget=2, samples=2)
    life.call(Ask(2, (5,), "abort"), after=view((5,))).call(Ask(2, (5, 6), "length"), sample=1, attempt=0)
    first, second = rows(life.history, "MAXIMAL", Finding(0, "no", 1))
    assert (first.label, first.wrong) == ("attempt 1, sample 1", "")  # type: ignore[union-attr]
    assert (second.label, second.wrong) == ("attempt 1, sample 2", "no")  # type: ignore[union-attr]


def test_what_was_kept_before_the_first_call_is_its_start() -> None:
    life = Life(budget=4, preload=3, start=view((5, 6, 7))).call(Ask(1, (8,), "length"), after=view((5, 6, 7, 8)))
    assert rows(life.history)[0] == Lane("attempt 1", 3, 1, 1, "length", 1, 4, "aborted with 4")


def test_a_call_that_had_no_end() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "length"), halts="hang")
    assert rows(life.history)[0] == Lane("attempt 1", 0, 2, 1, "length", 1, None, "hang: it goes on and on")


@pytest.mark.parametrize("finding", [Finding(None, "other tokens"), Finding(None, "other tokens", sample=1)])
def test_what_is_wrong_with_the_whole_run_stands_at_no_lane(finding: Finding) -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    drawn = picture.of(life.history, "RESUME-EQ", finding)
    assert drawn.wrong == "other tokens"
    assert not any(row.wrong for row in drawn.sections[0].rows)


UNLIMITED = Ask(params={"max_new_tokens": None})
EXTENTS = {
    "the budget": (Life(budget=24576).call(Ask(5, (1,) * 5, "stop")), 24576),
    "what is asked past it": (Life(budget=4).call(Ask(4, (1, 2, 3), "abort"), after=view((1, 2, 3))).call(Ask(4)), 7),
    "what is asked much further is beyond the axis": (Life(budget=4).call(Ask(2**32 - 1)), 6),
    "so is a request without limit": (Life(budget=5).call(UNLIMITED), 8),
    "what was got": (Life(budget=2).call(Ask(2, (1,) * 9, "length")), 9),
    "what is on the sample": (Life(budget=2).call(after=view((1,) * 9)), 9),
    "the context": (Life(budget=4, context=10).call(Ask(4)), 7),
    "a context far away is beyond the axis": (Life(budget=4, context=1000).call(Ask(4)), 4),
    "nothing at all": (Life(budget=0).call(), 1),
    "less than nothing": (Life(budget=0).call(Ask(-1)), 1),
}


@pytest.mark.parametrize(("life", "extent"), EXTENTS.values(), ids=EXTENTS)
def test_the_axis_ends_with(life: Life, extent: int) -> None:
    assert picture.of(life.history).extent == extent


@pytest.mark.parametrize(("tokens", "share"), [(-1, 0.0), (0, 0.0), (1, 33.33), (3, 100.0), (4, 100.0)])
def test_a_place_on_the_axis(tokens: int, share: float) -> None:
    assert Picture("", 3, ()).share(tokens) == share


@pytest.mark.parametrize(("budget", "room", "limit"), [(4, None, 4), (4, 6, 4), (4, 2, 2), (4, -3, 0)])
def test_nothing_may_be_asked_past_budget_and_context(budget: int, room: int | None, limit: int) -> None:
    assert Section("", budget, room, ()).limit == limit


@pytest.mark.parametrize(
    ("lane", "over"),
    [
        (Lane("", 0, 4, 0, ""), None),
        (Lane("", 2, 2, 2, ""), None),
        (Lane("", 2, 4, 0, ""), (4, 6)),
        (Lane("", 5, 1, 0, ""), (5, 6)),
        (Lane("", 0, 2, 5, ""), (4, 5)),
        (Lane("", 2, None, 0, ""), (4, 8)),
        (Lane("", 0, 99, 0, ""), (4, 8)),
        (Lane("", 5, 0, 0, "", 0), None),
    ],
)
def test_what_is_past_the_limit(lane: Lane, over: tuple[int, int] | None) -> None:
    section = Section("", 4, None, (lane,))
    assert Picture("", 8, (section,)).past(section, lane) == over


def test_of_many_rows_the_first_the_last_and_what_is_wrong_are_kept() -> None:
    life = Life(budget=2)
    for _ in range(60):
        life.call(Ask(2, (), "abort"))
    kept = rows(life.history, "BUDGET", Finding(30, "no"))
    labels = [row.label if isinstance(row, Lane) else row.said for row in kept]
    assert len(kept) == FIRST + LAST + 2
    assert labels[FIRST - 1 : FIRST + 3] == ["attempt 8", "... 33 rows more", "attempt 31", "attempt 43"]
    few = Life(budget=2)
    for _ in range(FIRST + LAST + 1):
        few.call(Ask(2, (), "abort"))
    assert len(rows(few.history)) == FIRST + LAST + 1


# whole rollouts

ONE = view((5,))


def test_whole_rollouts_by_rollout() -> None:
    run = loops.history(
        [Updated("1"), began(), taken((0,), (1,)), *call(0), Aborting(1), *call(1, finish="abort")],
        [ended(groups((0,)), ((member(1, ONE),),)), began(2, 3), *call(1, 1, before=ONE, asked=4, ids=(6,))],
        [stopped()],
        over=2,
    )
    drawn = picture.of(run, "BUDGET", Finding(1, "may ask at most 2", 1, 2))
    assert drawn == Picture(
        "budget 4, 1 group of 1 a rollout, taken 2 at a time",
        5,
        (
            Section("", 4, None, (Mark("weights 1"),)),
            Section(
                "rollout 1",
                4,
                None,
                (
                    Lane("sample 1", 0, 4, 1, "stop", 1, 1, "completed with 1"),
                    Mark("abort of 1 request"),
                    Lane("sample 2", 0, 4, 1, "abort", 1, 1, "aborted with 1"),
                    Mark("trains on 1; buffer 2"),
                ),
            ),
            Section(
                "rollout 2",
                3,
                None,
                (
                    Lane("sample 2", 1, 4, 1, "stop", 1, 2, "completed with 2", "may ask at most 2"),
                    Mark("shut down"),
                ),
            ),
        ),
    )


@pytest.mark.parametrize(("sample", "said"), [(-1, "is lost"), (1, "sample 2: is lost")])
def test_what_is_wrong_with_a_loop_stands_at_the_end_of_its_rollout(sample: int, said: str) -> None:
    run = loops.history(began(), call(1), began(2), began(3), call(1, 1))
    drawn = picture.of(run, "GROUP", Finding(0, "is lost", sample, 2))
    assert [section.title for section in drawn.sections] == ["rollout 1", "rollout 2", "rollout 3"]
    assert drawn.sections[1].rows == (Mark("", said),)
    assert not any(row.wrong for i in (0, 2) for row in drawn.sections[i].rows)


def test_what_is_wrong_in_no_call_of_a_loop_is_so_of_the_whole_run() -> None:
    run = loops.history(began(), call(0, after=view((5,), COMPLETED)))
    assert picture.of(run, "STATUS", Finding(None, "no", 0, 1)).wrong == "no"
    assert picture.of(run, "GROUP", Finding(None, "no", 0, 1)).wrong == ""
