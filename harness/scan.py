"""Judges every revision of a history: where each rule held, where it was broken, where nothing can be said.

Each client is checked once, however many revisions share it, on as many cores as
there are. Every counterexample is then run on every other client, so that no
boundary stands where it does because a draw had luck, and so that a rule that is
broken in another way from some revision on has a boundary there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from harness import pool, revisions
from harness.events import Progress, Tell, ignore
from harness.judged import ABSENT, Broken, First, Judged, Replayed, Row, Said, judge, rows, still_broken
from harness.known import Known
from harness.options import Options
from harness.revisions import Revision, Tree
from harness.verdict import INVALID, UNKNOWN
from harness.work import Work

INTERRUPTED = Said(UNKNOWN, "interrupted before it was judged")
Task = tuple[Row, Work]


@dataclass(frozen=True, slots=True)
class Range:
    """Revisions ``begin`` to ``end`` (both included, from the oldest) that share a verdict and what breaks them.

    ``verdict``: valid, invalid, unknown, or absent where the client has no such mode.
    """

    begin: int
    end: int
    verdict: str
    reason: str = ""
    broken: tuple[Broken, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    """A timeline. ``rows``: the ranges of each rule and mode, which together are all ``revisions``, oldest first.

    Of revisions in a row with the same client only the oldest is there; ``commits`` counts all that were looked at.
    """

    options: Options
    revisions: tuple[Revision, ...]
    commits: int
    rows: dict[Row, tuple[Range, ...]]
    duration_s: float
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Column:
    """A revision whose client is not the one before's. ``judged`` None: it was not judged yet."""

    revision: Revision
    tree: Tree
    judged: Judged | None


def scan(where: Path, history: Sequence[Revision], options: Options, known: Known, tell: Tell = ignore) -> Scan:
    """Judges the revisions, oldest first. Ctrl-C gives what is known so far. Raises CannotJudge or HarnessFault."""
    begin = time.monotonic()
    job = _Scan(where, history, options, known, tell)
    try:
        with tempfile.TemporaryDirectory(prefix="rolloutcheck-") as folder:
            job.read()
            job.judge(folder)
            while job.replay(folder):
                job.judge(folder)
        return job.result(begin, complete=True)
    except KeyboardInterrupt:
        return job.result(begin, complete=False)


def with_broken(found: Scan, change: Callable[[Row, Revision, Broken], Broken]) -> Scan:
    """The scan with each counterexample changed: its rule and mode, the first revision of its range, and it."""

    def changed(row: Row, one: Range) -> Range:
        return replace(one, broken=tuple(change(row, found.revisions[one.begin], broken) for broken in one.broken))

    return replace(found, rows={row: tuple(changed(row, one) for one in ranges) for row, ranges in found.rows.items()})


class _Scan:
    """The work of one scan: the clients first, then the boundaries between them."""

    def __init__(self, where: Path, history: Sequence[Revision], options: Options, known: Known, tell: Tell) -> None:
        self.where, self.history, self.options, self.known, self.tell = where, history, options, known, tell
        self.rows, self.jobs = rows(options), options.jobs or pool.cores()
        self.trees: list[Tree] = []
        self.broken: dict[tuple[str, Work], None] = {}
        """What is known to break some client: run first on the next, it need not be shrunk again."""

    def read(self) -> None:
        for number, revision in enumerate(self.history):
            self.tell(Progress("scan", "reading trees", number, len(self.history)))
            self.trees.append(revisions.tree(self.where, revision))

    # each client once

    def judge(self, folder: str) -> None:
        """Checks every client that is not known, and waits for all of them."""
        work = partial(judge, self.where, self.options, folder)
        busy: set[int] = set()
        with closing(pool.spread(work, self._unknown(busy), self.jobs)) as results:
            for index, judged in results:
                busy.discard(index)
                self.known.add(self.trees[index], judged)
                said = judged.rows.items()
                self.broken |= {(row[0], one.broken.work): None for row, one in said if one.broken is not None}

    def _unknown(self, busy: set[int]) -> Iterator[tuple[int, tuple[Revision, First]]]:
        """Revisions to judge, asked for one by one as processes become free.

        They are taken from several stretches of the history in turn, if possible none from one that is
        ``busy``: a revision's neighbour often has its client, and is known when the revision is.
        """
        total = len(self.history)
        size = max(-(-total // (4 * self.jobs)), 1)
        left = [list(range(begin, min(begin + size, total)))[::-1] for begin in range(0, total, size)]
        while any(left):
            self.tell(Progress("scan", "revisions", total - sum(map(len, left)), total))
            working = {index // size for index in busy}
            stretch = min((s for s in left if s), key=lambda s: (s[-1] // size in working, -len(s)))
            index = stretch.pop()
            if self.known.judged(self.trees[index]) is None:
                busy.add(index)
                yield index, (self.history[index], tuple(self.broken))

    def columns(self) -> list[Column]:
        """A column each time the client changes. Each revision that was not judged is one."""
        columns: list[Column] = []
        for revision, tree in zip(self.history, self.trees, strict=False):
            judged = self.known.judged(tree)
            if judged is None or not columns or judged is not columns[-1].judged:
                columns.append(Column(revision, tree, judged))
        return columns

    # every counterexample on every client

    def replay(self, folder: str) -> bool:
        """Runs every counterexample on every client that is not known to break on it.

        Returns whether some client asked for more modules than when it was judged: then what was taken for the
        same client may be another.
        """
        columns = self.columns()
        faults = [(row, broken.work) for row in self.rows for broken in _faults(row, columns)]
        tasks = {place: self._left(column, faults) for place, column in enumerate(columns)}
        given = ((place, (columns[place].revision, left)) for place, left in tasks.items() if left)
        work = partial(still_broken, self.where, self.options, folder)
        total, wider = sum(map(bool, tasks.values())), False
        self.tell(Progress("scan", "counterexamples", 0, total))
        with closing(pool.spread(work, given, self.jobs)) as results:
            for done, (place, replayed) in enumerate(results):
                self.tell(Progress("scan", "counterexamples", done + 1, total))
                wider |= self._keep(columns[place], tasks[place], replayed)
        return wider

    def _keep(self, column: Column, tasks: Sequence[Task], replayed: Replayed) -> bool:
        """Keeps what a replay showed. Returns whether it asked for more modules."""
        assert column.judged is not None
        wider = self.known.widen(column.tree, column.judged, replayed.modules)
        judged = self.known.judged(column.tree)
        assert judged is not None
        for (row, wanted), said in zip(tasks, replayed.said, strict=True):
            self.known.add_replay(column.tree, judged, row, wanted, said)
        return wider

    def _left(self, column: Column, faults: Sequence[Task]) -> list[Task]:
        """What is to be run on a client; a mode that is not there runs nothing."""
        assert column.judged is not None
        there = (task for task in faults if column.judged.rows[task[0]].verdict != ABSENT)
        return [task for task in there if self._replayed(column, *task) is None]

    def _replayed(self, column: Column, row: Row, wanted: Work) -> Said | None:
        """What a counterexample shows of a client, if that is known."""
        assert column.judged is not None
        own = column.judged.rows[row]
        if own.broken is not None and own.broken.work == wanted:
            return own
        return self.known.replay(column.tree, column.judged, row, wanted)

    # the timeline

    def result(self, begin: float, *, complete: bool) -> Scan:
        """What is known. ``begin``: when the work did, in monotonic seconds."""
        columns = self.columns()
        found = tuple(column.revision for column in columns)
        said = {row: tuple(_ranges(self.line(row, columns), found)) for row in self.rows}
        return Scan(self.options, found, len(self.history), said, time.monotonic() - begin, complete)

    def line(self, row: Row, columns: Sequence[Column]) -> list[tuple[Said, tuple[Broken, ...]]]:
        """What is said of the row in each column, and everything that breaks it there."""
        faults = _faults(row, columns)
        return [self._cell(column, row, faults) for column in columns]

    def _cell(self, column: Column, row: Row, faults: Sequence[Broken]) -> tuple[Said, tuple[Broken, ...]]:
        if column.judged is None:
            return INTERRUPTED, ()
        said = column.judged.rows[row]
        if said.verdict == ABSENT:
            return said, ()
        shown = [s for s in (self._replayed(column, row, fault.work) for fault in faults) if s is not None]
        broken = tuple(s.broken for s in shown if s.broken is not None)
        doubt = next((s for s in shown if s.verdict == UNKNOWN), said)
        return Said(INVALID) if broken else doubt, broken


def _faults(row: Row, columns: Sequence[Column]) -> list[Broken]:
    """The row's counterexamples, each once, oldest first."""
    said = (column.judged.rows[row] for column in columns if column.judged is not None)
    faults: dict[Work, Broken] = {}
    for one in said:
        if one.broken is not None:
            faults.setdefault(one.broken.work, one.broken)
    return list(faults.values())


def _ranges(line: Sequence[tuple[Said, tuple[Broken, ...]]], revisions: Sequence[Revision]) -> Iterator[Range]:
    begin = 0
    for (said, _), group in groupby(line, key=lambda cell: (cell[0], [broken.work for broken in cell[1]])):
        cells = list(group)
        broken = tuple(one.named(revisions[begin]) for one in cells[0][1])
        yield Range(begin, begin + len(cells) - 1, said.verdict, said.reason, broken)
        begin += len(cells)
