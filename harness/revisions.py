"""Points of a repository's history."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit: its full and its short name, when it was committed (``2026-08-12``), and its first line."""

    commit: str
    short: str
    date: str
    subject: str
