"""Judges every revision of a history: where each rule held, where it was broken, where nothing can be said."""

from __future__ import annotations

from dataclasses import dataclass

from harness.options import Options
from harness.revisions import Revision
from harness.work import Work


@dataclass(frozen=True, slots=True)
class Broken:
    """What breaks a rule in a range: the smallest schedule or scenario, its screen, and the command that replays it."""

    work: Work
    lines: tuple[str, ...]
    replay: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """Revisions ``begin`` to ``end`` (both included, counted from the oldest) that share a verdict."""

    begin: int
    end: int
    verdict: str
    reason: str = ""
    broken: Broken | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """A timeline. ``rows``: the ranges of each (rule, mode), which together are all ``revisions``, oldest first."""

    target: str
    options: Options
    revisions: tuple[Revision, ...]
    rows: dict[tuple[str, str], tuple[Range, ...]]
    duration_s: float
    complete: bool = True
