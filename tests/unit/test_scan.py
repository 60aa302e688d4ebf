"""Scans of made-up histories: ranges, boundaries, what is known from before, and an interrupt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import scan as module
from harness.events import Event, Progress
from harness.history import PLAIN
from harness.judged import Broken, Replayed, Said
from harness.known import Known
from harness.options import Options
from harness.revisions import Revision
from harness.scan import Range, Scan, scan, with_broken
from harness.targets.spec import TargetSpec
from tests.unit.judgings import ROW, History, pretend, work

OPTIONS = Options(TargetSpec("slime"), modes=(PLAIN,), rules=("BUDGET",), lenient=True, jobs=2)
HERE = Path()


def run(history: History, known: Known | None = None, said: list[Event] | None = None) -> Scan:
    tell = (lambda event: None) if said is None else said.append
    return scan(HERE, history.line, OPTIONS, known or Known(None, OPTIONS, "test"), tell)


def ranges(found: Scan) -> list[tuple[str, int, int, str]]:
    """Verdict, from, to, and the faults that break it there (or the reason)."""

    def letters(one: Range) -> str:
        return "".join(b.work.prompt for b in one.broken if not hasattr(b.work, "steps")) or one.reason  # type: ignore[union-attr]

    return [(one.verdict, one.begin, one.end, letters(one)) for one in found.rows[ROW]]


def test_ranges_are_the_whole_history(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["-", "-", "", "", "a", "a", "?", "a", ""])
    found = run(history)
    assert ranges(found) == [
        ("absent", 0, 1, "because -"),
        ("valid", 2, 3, ""),
        ("invalid", 4, 5, "a"),
        ("unknown", 6, 6, "because ?"),
        ("invalid", 7, 7, "a"),
        ("valid", 8, 8, ""),
    ]
    assert found.revisions == tuple(history.line) and (found.commits, found.complete) == (9, True)
    assert found.rows[ROW][2].broken[0].lines[0] == "BUDGET violated   slime@000000004   plain   inproc"


def test_a_rule_that_is_broken_in_another_way_has_a_boundary_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an old and small fault hides when the next one came in."""
    found = run(pretend(monkeypatch, ["a", "a", "b", "b", "ab", "ab", ""]))
    assert [(begin, letters) for _, begin, _, letters in ranges(found)] == [(0, "a"), (2, "b"), (4, "ab"), (6, "")]


def test_luck_moves_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", "a", "a", "a", "a", "a", ""], unlucky={1, 2, 4, 5})
    assert ranges(run(history)) == [("valid", 0, 0, ""), ("invalid", 1, 5, "a"), ("valid", 6, 6, "")]
    assert (0, "a") in history.replayed and (3, "a") not in history.replayed  # not where it was found


def test_nothing_is_replayed_where_there_is_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["-", "a", "?"])
    run(history)
    assert history.replayed == [(2, "a")]


def test_what_is_flaky_is_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["a", ""])
    plain = history.still_broken

    def flaky(*given: Any) -> Replayed:
        return replace(plain(*given), said=(Said("unknown", "flaky: it fails, and then not"),))

    monkeypatch.setattr(module, "still_broken", flaky)
    assert ranges(run(history)) == [("invalid", 0, 0, "a"), ("unknown", 1, 1, "flaky: it fails, and then not")]


def test_a_client_that_asks_for_more_when_it_is_replayed_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a schedule alone imports was not looked at when the two were taken for one client."""
    history = pretend(monkeypatch, ["a", "", "b", ""], lazy={1: ("slime.lazy",)})
    same = {"slime/a": "right"}
    trees = [{"slime/a": "wrong"}, {**same, "slime/lazy": "1"}, {**same, "slime/lazy": "2"}, {"slime/a": "other"}]
    monkeypatch.setattr(module.revisions, "tree", lambda where, revision: trees[history.place(revision)])
    found = run(history)
    assert sorted(history.searched) == [0, 1, 2, 3]
    assert [one[0] for one in ranges(found)] == ["invalid", "valid", "invalid", "valid"]


def test_a_client_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["x"] * 3 + ["y"] * 40 + ["x"] * 7)

    def tree(where: Path, revision: Revision) -> dict[str, str]:
        return {"slime/a": history.clients[history.place(revision)]}

    monkeypatch.setattr(module.revisions, "tree", tree)
    found = run(history)
    assert len(history.searched) == 2 and found.commits == 50
    assert [history.place(revision) for revision in found.revisions] == [0, 3, 43]
    assert ranges(found) == [("invalid", 0, 0, "x"), ("invalid", 1, 1, "y"), ("invalid", 2, 2, "x")]


def test_neighbours_are_not_judged_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are under way in two processes; those of one stretch, which may share their client, never are."""
    history = pretend(monkeypatch, [""] * 80)
    order: list[int] = []

    def spread(work: Any, tasks: Iterable[tuple[int, tuple[Any, ...]]], jobs: int) -> Iterator[tuple[int, Any]]:
        waiting: list[tuple[int, tuple[Any, ...]]] = []
        for name, given in tasks:
            order.append(name)
            waiting.append((name, given))
            assert len({index // 10 for index, _ in waiting}) == len(waiting)
            if len(waiting) > jobs:
                first, arguments = waiting.pop(0)
                yield first, work(*arguments)
        for name, given in waiting:
            yield name, work(*given)

    monkeypatch.setattr(module.pool, "spread", spread)
    run(history)
    assert sorted(order) == list(range(80))


def test_the_next_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = pretend(monkeypatch, ["", "a", "", "a", "", "", "?"])
    judge, asked = history.judge, 0

    def interrupted(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise KeyboardInterrupt
        return judge(*given)

    monkeypatch.setattr(module, "judge", interrupted)
    found = run(history, Known(tmp_path, OPTIONS, "scan"))
    assert not found.complete and found.revisions == tuple(history.line)
    waiting = [one for one in found.rows[ROW] if one.reason == "interrupted before it was judged"]
    assert sum(one.end - one.begin + 1 for one in waiting) == 4
    assert len(history.searched) == 3
    whole = run(history, Known(tmp_path, OPTIONS, "scan"))
    assert whole.complete and len(history.searched) == 7
    replayed = len(history.replayed)
    assert run(history, Known(tmp_path, OPTIONS, "scan")).rows == whole.rows
    assert (len(history.searched), len(history.replayed)) == (8, replayed)  # unknown is asked again


def test_an_interrupt_while_trees_are_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    history = pretend(monkeypatch, ["", ""])

    def tree(where: Path, revision: Revision) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.revisions, "tree", tree)
    found = run(history)
    assert (found.complete, found.revisions, found.rows[ROW]) == (False, (), ())


def test_progress_counts_to_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Event] = []
    run(pretend(monkeypatch, ["", "a", "a", ""]), said=said)
    counts = [(event.phase, event.done, event.total) for event in said if isinstance(event, Progress)]
    assert counts[:4] == [("reading trees", i, 4) for i in range(4)]
    assert [c for c in counts if c[0] == "revisions"] == [("revisions", i, 4) for i in range(4)]
    assert [c for c in counts if c[0] == "counterexamples"] == [("counterexamples", i, 2) for i in range(3)]


def test_each_counterexample_can_be_given_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(pretend(monkeypatch, ["", "a"]))

    def keep(row: tuple[str, str], revision: Revision, broken: Broken) -> Broken:
        return Broken(broken.work, broken.lines, f"{row[0]}-{revision.short}.json", "replay it")

    (kept,) = with_broken(found, keep).rows[ROW][1].broken
    assert (kept.work, kept.file, kept.replay) == (work("a"), "BUDGET-000000001.json", "replay it")
