"""Bisection on made-up histories: both directions, what cannot be judged, luck, and going on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness import bisect as module
from harness.bisect import FIRST_BAD, FIRST_GOOD, Bisection, bisect
from harness.events import Event, Progress, Said
from harness.history import PLAIN
from harness.judged import Judged, Replayed
from harness.judged import Said as JudgedSaid
from harness.known import Known
from harness.options import UNTIL_BROKEN, Options
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from tests.unit.judgings import ROW, History, broken, pretend, work

OPTIONS = Options(TargetSpec("slime"), modes=(PLAIN,), rules=("BUDGET",), depth=UNTIL_BROKEN)
HERE = Path()


def search(history: History, known: Known | None = None, said: list[Event] | None = None) -> Bisection:
    tell = (lambda event: None) if said is None else said.append
    return bisect(HERE, history.line, ROW, OPTIONS, known or Known(None, OPTIONS, "test"), tell)


def refusal(history: History) -> str:
    with pytest.raises(CannotJudge) as caught:
        search(history)
    return str(caught.value)


@pytest.mark.parametrize("boundary", range(1, 12))
def test_the_first_bad_one(boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, [""] * boundary + ["a"] * (12 - boundary))
    found = search(history)
    assert (found.direction, found.found, found.before) == (
        FIRST_BAD,
        history.line[boundary],
        history.line[boundary - 1],
    )
    assert found.bad == history.line[boundary] and found.broken.work == work("a")
    assert found.broken.lines[0] == f"BUDGET violated   slime@{boundary:09}   plain   inproc"
    assert found.holds == (f"BUDGET holds   slime@{boundary - 1:09}", "  calls")
    assert found.steps == len(history.searched) <= 6 and not found.candidates and found.complete and not found.follows


@pytest.mark.parametrize("boundary", range(1, 12))
def test_the_first_good_one(boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streaming client that was born broken has no good ancestor."""
    history = pretend(monkeypatch, ["a"] * boundary + [""] * (12 - boundary))
    found = search(history)
    assert (found.direction, found.found, found.bad) == (FIRST_GOOD, history.line[boundary], history.line[boundary - 1])
    assert found.holds[0] == f"BUDGET holds   slime@{boundary:09}"


def test_neighbours_need_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(pretend(monkeypatch, ["", "a"]))
    assert found.found is not None and (found.steps, found.revisions) == (2, 2)


def test_what_was_found_before_is_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, [""] * 3 + ["a"] * 6)
    search(history)
    assert history.first[:3] == [(), (), (("BUDGET", work("a")),)]


def test_what_cannot_be_judged_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "", "", "?", "-", "?", "a", "a", "?", "a", "a"])
    found = search(history)
    assert found.found is None
    assert found.before == history.line[2] and found.candidates == tuple(history.line[3:7])
    assert [(r.subject, reason) for r, reason in found.skipped] == [
        ("s3", "because ?"),
        ("s4", "because -"),
        ("s5", "because ?"),
    ]


def test_what_is_skipped_elsewhere_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "", "", "a", "?", "?", "?", "a", "a"])
    assert search(history).found == history.line[3]


def test_a_long_stretch_that_cannot_be_judged_is_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, [""] * 60 + ["?"] * 80 + ["a"] * 60)
    history.clients[30:31] = ["a"]  # and the boundary lies elsewhere
    history.clients[31:60] = ["a"] * 29
    found = search(history)
    assert found.found == history.line[30]
    assert len([i for i in history.searched if 60 <= i < 140]) < 10


def test_luck_does_not_move_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that found nothing is made good by the neighbour's counterexample."""
    history = pretend(monkeypatch, ["", "", "a", "a", "a", "a", "a", "a", "a"])
    monkeypatch.setattr(history, "judge", blind(history, 2, 3, 4))
    monkeypatch.setattr(module, "judge", history.judge)
    assert search(history).found == history.line[2]


def test_luck_does_not_move_it_the_other_way_either(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["a", "a", "a", "a", "a", "a", "", "", ""])
    monkeypatch.setattr(module, "judge", blind(history, 4, 5))
    found = search(history)
    assert (found.direction, found.found) == (FIRST_GOOD, history.line[6])


def blind(history: History, *places: int):  # type: ignore[no-untyped-def]
    """A search that never sees a fault at these places."""
    judge = history.judge

    def see(where: Path, options: Options, folder: str, revision, first):  # type: ignore[no-untyped-def]
        if history.place(revision) not in places:
            return judge(where, options, folder, revision, first)
        history.clients, kept = ["" for _ in history.clients], history.clients
        try:
            return judge(where, options, folder, revision, first)
        finally:
            history.clients = kept

    return see


def test_an_end_that_was_only_lucky_is_said_to_be_like_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["a", "a", "a"])
    monkeypatch.setattr(module, "judge", blind(history, 0))
    assert refusal(history) == "both ends are alike: in plain BUDGET is broken, on [prompt 'a', budget 1: run]"


@pytest.mark.parametrize(
    ("clients", "direction", "place"),
    [
        (["b", "b", "b", "a", "a"], FIRST_BAD, 3),  # one fault is gone and another has come
        (["b", "b", "ab", "ab", "ab"], FIRST_BAD, 2),
        (["ba", "ba", "a", "a", "a"], FIRST_GOOD, 2),
    ],
)
def test_where_both_ends_are_broken_a_fault_is_followed(
    clients: Sequence[str], direction: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = pretend(monkeypatch, clients)
    said: list[Event] = []
    found = search(history, said=said)
    assert (found.direction, found.found, found.follows) == (direction, history.line[place], True)
    assert any(isinstance(e, Said) and e.line.startswith("both ends break BUDGET; following") for e in said)


def test_a_difference_that_does_not_last_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["a", "a", "a"])
    monkeypatch.setattr(module, "only_here", lambda *_: broken("a", history.line[0]))
    assert refusal(history) == "both ends are alike: in plain BUDGET is broken, on [prompt 'a', budget 1: run]"


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        (["", "a", ""], "both ends are alike: in plain BUDGET is valid"),
        (["a", "", "a"], "both ends are alike: in plain BUDGET is broken, on [prompt 'a', budget 1: run]"),
        (["?", "", "a"], "--old 000000000: because ?"),
        (["", "", "-"], "--new 000000002: because -"),
    ],
)
def test_ends_that_do_not_frame_anything(clients: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(pretend(monkeypatch, clients)) == said


def test_a_good_side_that_cannot_run_the_counterexample_stays_good(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "a"])
    cannot = Replayed((JudgedSaid("absent", "why"),), ())
    monkeypatch.setattr(module, "still_broken", lambda *_: cannot)
    found = search(history)
    assert found.found == history.line[1] and found.holds == ("why",)


def test_a_good_side_that_hangs_on_the_counterexample_is_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "", "", "a"])
    hangs = Replayed((JudgedSaid("unknown", "it hangs"),), None)
    monkeypatch.setattr(module, "still_broken", lambda *_: hangs)
    assert refusal(history) == "--old 000000000: it hangs"
    answers = iter([hangs, Replayed((JudgedSaid("valid", holds=("screen",)),), ())])
    monkeypatch.setattr(module, "still_broken", lambda *_: next(answers))
    found = search(history)
    assert found.found is None and found.candidates == tuple(history.line[2:4]) and found.holds == ("screen",)
    assert [(revision.subject, reason) for revision, reason in found.skipped] == [("s2", "it hangs")]


def test_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Event] = []
    search(pretend(monkeypatch, ["", "", "?", "a", "a"]), said=said)
    lines = [event.line for event in said if isinstance(event, Said)]
    assert lines[0] == "valid    000000000 2026-01-01 s0"
    assert "unknown  000000002 2026-01-01 s2   because ?" in lines
    counts = [(event.done, event.total) for event in said if isinstance(event, Progress)]
    assert counts[0] == (2, 4) and all(done <= total for done, total in counts)


def test_an_interrupt_gives_what_is_known_and_the_next_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    history = pretend(monkeypatch, [""] * 7 + ["a"] * 9)
    judge, asked = history.judge, 0

    def interrupted(*given) -> Judged:  # type: ignore[no-untyped-def]
        nonlocal asked
        asked += 1
        return replace(judge(*given), complete=asked != 4)

    monkeypatch.setattr(module, "judge", interrupted)
    found = search(history, Known(tmp_path, OPTIONS, "bisect"))
    assert (found.complete, found.found, len(found.candidates)) == (False, None, 7)
    history.searched.clear()
    known = Known(tmp_path, OPTIONS, "bisect")
    found = search(history, known)
    assert found.found == history.line[7] and not {0, 15} & set(history.searched)
    assert list(tmp_path.iterdir())
    known.forget()
    assert not list(tmp_path.iterdir())


def test_an_interrupt_before_the_ends_are_known_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "a"])
    judge = history.judge
    monkeypatch.setattr(module, "judge", lambda *given: replace(judge(*given), complete=False))
    with pytest.raises(KeyboardInterrupt):
        search(history)
