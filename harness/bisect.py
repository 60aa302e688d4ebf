"""Finds the revision that broke a rule, or the one that mended it.

Which of the two is looked for follows from the ends. What breaks the rule in one
revision is run first in the next, so that most steps are short. Where both ends
break the rule, but not in the same way, the search follows what breaks the one and
not the other. A streaming client may have been born broken, and then only its
mending can be found.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

from harness import events, revisions
from harness.events import Progress, Tell, ignore
from harness.judged import ABSENT, Broken, First, Row, Said, judge, only_here, still_broken
from harness.known import Known
from harness.options import Options
from harness.revisions import Revision
from harness.targets import CannotJudge
from harness.verdict import INVALID, UNKNOWN, VALID
from harness.work import Work

FIRST_BAD, FIRST_GOOD = "first-bad", "first-good"


@dataclass(frozen=True, slots=True)
class Bisection:
    """What a bisection found.

    ``found``: the first revision on the other side, ``before`` the last one on the side of ``old``. ``found`` is
    None while there are ``candidates`` left: it was interrupted, or they cannot be judged. ``skipped``: revisions
    that could not be judged, with the reason. ``broken`` breaks the rule at ``bad``, on the one side of the boundary;
    ``holds`` is the screen of the same schedule on the other. ``steps``: revisions that were run. ``follows``:
    both ends break the rule, and the verdicts are those on ``broken`` alone.
    """

    row: Row
    direction: str
    old: Revision
    new: Revision
    revisions: int
    found: Revision | None
    before: Revision
    candidates: tuple[Revision, ...]
    steps: int
    skipped: tuple[tuple[Revision, str], ...]
    bad: Revision
    broken: Broken
    holds: tuple[str, ...]
    duration_s: float
    complete: bool = True
    follows: bool = False


def bisect(
    where: Path, line: Sequence[Revision], row: Row, options: Options, known: Known, tell: Tell = ignore
) -> Bisection:
    """Searches ``line``, from the old end to the new one. Ctrl-C gives what is known so far.

    Raises CannotJudge when an end cannot be judged or both are alike, KeyboardInterrupt before both ends are
    known, and HarnessFault.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rolloutcheck-") as folder:
        job = _Bisect(where, line, row, options, known, tell, folder)
        job.ends()
        complete = True
        try:
            job.search()
        except KeyboardInterrupt:
            complete = False
    return job.result(time.monotonic() - begin, complete)


class _Bisect:
    """The search. Places count along the line from the old end."""

    def __init__(
        self, where: Path, line: Sequence[Revision], row: Row, options: Options, known: Known, tell: Tell, folder: str
    ) -> None:
        self.where, self.line, self.row, self.options = where, line, row, options
        self.known, self.tell, self.folder = known, tell, folder
        self.said: dict[int, Said] = {}
        self.ran: set[int] = set()
        self.follow: Work | None = None
        """The one counterexample that is followed, where both ends break the rule."""

    # one revision

    def at(self, place: int) -> Said:
        """What is said of the revision there, found out now."""
        said = self.said[place] = self._judged(place) if self.follow is None else self._replayed(place, self.follow)
        reason = f"   {said.reason}" if said.verdict in (UNKNOWN, ABSENT) else ""
        self.tell(events.Said(f"{said.verdict:<9}{self.line[place]}{reason}"))
        return said

    def _judged(self, place: int) -> Said:
        tree = revisions.tree(self.where, self.line[place])
        judged = self.known.judged(tree)
        if judged is None:
            self.ran.add(place)
            judged = judge(self.where, self.options, self.folder, self.line[place], self._first())
            if not judged.complete:
                raise KeyboardInterrupt
            self.known.add(tree, judged)
        return judged.rows[self.row]

    def _first(self) -> First:
        """What is known to break the rule somewhere."""
        works = (said.broken.work for said in self.said.values() if said.broken is not None)
        return tuple(dict.fromkeys((self.row[0], work) for work in works))

    def _replayed(self, place: int, wanted: Work) -> Said:
        self.ran.add(place)
        replayed = still_broken(self.where, self.options, self.folder, self.line[place], [(self.row, wanted)])
        return replayed.said[0]

    # the search

    def ends(self) -> None:
        """Judges both ends, and decides what to follow. Raises CannotJudge."""
        old, new = self.at(0), self.at(len(self.line) - 1)
        for name, said, revision in (("--old", old, self.line[0]), ("--new", new, self.line[-1])):
            if said.verdict in (UNKNOWN, ABSENT):
                raise CannotJudge(f"{name} {revision.short}: {said.reason}")
        if old.verdict != new.verdict:
            return
        if old.broken is None or new.broken is None:
            raise self._alike("valid")
        last = len(self.line) - 1
        for bad, good, name in ((last, 0, "--old"), (0, last, "--new")):
            if self._follows(bad, good, (new.broken.work, old.broken.work)):
                line = f"both ends break {self.row[0]}; following what breaks one of them and not {name}"
                self.tell(events.Said(line))
                return
        raise self._alike(f"broken, on [{new.broken.work}]")

    def _follows(self, bad: int, good: int, first: Sequence[Work]) -> bool:
        """Looks for what breaks the one end and not the other, and from then on judges by that alone."""
        ends = self.line[bad], self.line[good]
        broken = only_here(self.where, self.options, self.folder, *ends, self.row, first)
        if broken is None:
            return False
        said = {place: self._replayed(place, broken.work) for place in (bad, good)}
        if (said[bad].verdict, said[good].verdict) != (INVALID, VALID):
            return False  # one of them does so only sometimes
        self.follow, self.said = broken.work, {good: Said(VALID), bad: Said(INVALID, "", broken)}
        return True

    def _alike(self, how: str) -> CannotJudge:
        return CannotJudge(f"both ends are alike: in {self.row[1]} {self.row[0]} is {how}")

    @property
    def direction(self) -> str:
        return FIRST_BAD if self.said[0].verdict == VALID else FIRST_GOOD

    def between(self) -> tuple[int, int]:
        """The last place that is known to be as the old end, before the first that is as the new one."""
        as_new = self.said[len(self.line) - 1].verdict
        other = min(p for p, said in self.said.items() if said.verdict == as_new)
        return max(p for p, said in self.said.items() if p < other and said.verdict in (VALID, INVALID)), other

    def search(self) -> None:
        """Halves what lies between, until nothing does and the boundary has been looked at twice."""
        while True:
            low, high = self.between()
            left = [place for place in range(low + 1, high) if place not in self.said]
            if left:
                self.tell(Progress("bisect", "revisions", len(self.said), len(self.said) + ceil(log2(len(left) + 1))))
                self.at(self._middle(left, low, high))
            elif not self._moves(low, high):
                return

    def _middle(self, left: Sequence[int], low: int, high: int) -> int:
        """The one nearest to the middle; farther off the more of those there cannot be judged."""
        nearest = sorted(left, key=lambda place: abs(2 * place - low - high))
        skipped = sum(low < place < high for place in self.said)
        return nearest[min(skipped**2, len(nearest) - 1)]

    def _moves(self, low: int, high: int) -> bool:
        """Runs what breaks the one side on the other. If it fails there, that side is broken too; search on."""
        good, bad = (low, high) if self.said[low].verdict == VALID else (high, low)
        broken = self.said[bad].broken
        assert broken is not None
        if self.said[good].holds:
            return False
        said = self._replayed(good, broken.work)
        if said.verdict in (INVALID, UNKNOWN) and good in (0, len(self.line) - 1):
            raise (
                self._alike(f"broken, on [{broken.work}]")
                if said.verdict == INVALID
                else CannotJudge(f"{'--old' if good == 0 else '--new'} {self.line[good].short}: {said.reason}")
            )
        moved = said.verdict in (INVALID, UNKNOWN)
        self.said[good] = said if moved else Said(VALID, holds=said.holds or (said.reason,))
        return moved

    # what came of it

    def result(self, duration_s: float, complete: bool) -> Bisection:
        low, high = self.between()
        good, bad = (low, high) if self.said[low].verdict == VALID else (high, low)
        broken = self.said[bad].broken
        assert broken is not None
        unclear = high - low > 1
        return Bisection(
            self.row,
            self.direction,
            self.line[0],
            self.line[-1],
            len(self.line),
            None if unclear else self.line[high],
            self.line[low],
            tuple(self.line[low + 1 : high + 1]) if unclear else (),
            len(self.ran),
            tuple((self.line[p], s.reason) for p, s in sorted(self.said.items()) if s.verdict in (UNKNOWN, ABSENT)),
            self.line[bad],
            broken.named(self.line[bad]),
            self.said[good].holds,
            duration_s,
            complete,
            self.follow is not None,
        )
