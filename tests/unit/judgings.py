"""A history made up: what each revision's client does, without a repository or a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import bisect, revisions, scan
from harness.history import PLAIN
from harness.judged import Broken, First, Judged, Replayed, Row, Said
from harness.options import Options
from harness.revisions import Revision, Tree
from harness.schedule import Schedule
from harness.verdict import INVALID, UNKNOWN, VALID
from harness.work import Work

ROW: Row = ("BUDGET", PLAIN)


def work(fault: str) -> Schedule:
    """A schedule that only the clients with this fault fail."""
    return Schedule(prompt=fault)


def broken(fault: str, revision: Revision) -> Broken:
    return Broken(work(fault), (f"BUDGET violated   slime@{revision.short}   plain   inproc", "  why      spec"))


@dataclass
class History:
    """``clients``: a word a revision. Each letter is a fault, "" is none, "?" and "-" cannot be judged.

    ``unlucky``: places where a search finds nothing, and a stored schedule still fails.
    """

    clients: list[str]
    unlucky: set[int] = field(default_factory=set)
    lazy: dict[int, tuple[str, ...]] = field(default_factory=dict)
    shows_nothing: str = "absent"
    searched: list[int] = field(default_factory=list)
    replayed: list[tuple[int, str]] = field(default_factory=list)
    first: list[First] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = [Revision(f"{i:09}" + "f" * 31, f"{i:09}", "2026-01-01", f"s{i}") for i in range(len(self.clients))]

    def place(self, revision: Revision) -> int:
        return self.line.index(revision)

    def tree(self, where: Path, revision: Revision) -> Tree:
        return {"slime/a": self.clients[self.place(revision)] + str(revision.commit)}

    def judge(self, where: Path, options: Options, folder: str, revision: Revision, first: First) -> Judged:
        place = self.place(revision)
        client = self.clients[place]
        self.searched.append(place)
        self.first.append(first)
        said = Said(VALID)
        if client in ("?", "-"):
            said = Said({"?": UNKNOWN, "-": "absent"}[client], f"because {client}")
        elif client and (place not in self.unlucky or any(("BUDGET", work(fault)) in first for fault in client)):
            said = Said(INVALID, "", broken(client[0], revision))
        return Judged({ROW: said}, ("slime.a",))

    def still_broken(
        self, where: Path, options: Options, folder: str, revision: Revision, stored: Sequence[tuple[Row, Work]]
    ) -> Replayed:
        place, found = self.place(revision), []
        for _, wanted in stored:
            assert isinstance(wanted, Schedule)
            self.replayed.append((place, wanted.prompt))
            if self.clients[place] in ("?", "-"):
                found.append(Said(self.shows_nothing, "because"))
            elif wanted.prompt in self.clients[place]:
                found.append(Said(INVALID, "", broken(wanted.prompt, revision)))
            else:
                found.append(Said(VALID, holds=(f"BUDGET holds   slime@{revision.short}", "  calls")))
        return Replayed(tuple(found), ("slime.a", *self.lazy.get(place, ())))

    def only_here(
        self, where: Path, options: Options, folder: str, here: Revision, there: Revision, row: Row, first: object
    ) -> Broken | None:
        """The first fault of the one that the other has not."""
        faults = (fault for fault in self.clients[self.place(here)] if fault not in self.clients[self.place(there)])
        return next((broken(fault, here) for fault in faults), None)


def pretend(monkeypatch: pytest.MonkeyPatch, clients: Sequence[str], **given: Any) -> History:
    """The modules judge this history, in this process."""
    history = History(list(clients), **given)
    monkeypatch.setattr(revisions, "tree", history.tree)
    for module in (bisect, scan):
        monkeypatch.setattr(module, "judge", history.judge)
        monkeypatch.setattr(module, "still_broken", history.still_broken)
    monkeypatch.setattr(bisect, "only_here", history.only_here)
    monkeypatch.setattr(scan.pool, "spread", lambda work, tasks, jobs: ((name, work(*given)) for name, given in tasks))
    return history
