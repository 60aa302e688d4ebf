"""Verdicts: what a check found about each rule, in each mode, on each engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.checkers import Finding
from harness.work import SAMPLE, Run, Work

VALID, INVALID, UNKNOWN = "valid", "invalid", "unknown"
CONFORMS, VIOLATES, USAGE, FAULT, CANNOT, INTERRUPTED = 0, 1, 2, 3, 125, 130
"""Exit statuses, as `git bisect run` understands them; 3 is a fault of the harness itself."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The smallest schedule or scenario found that breaks a rule, and the history that shows it.

    ``others``: what the target does with it in its other modes, whether they break the rule or not.
    """

    schedule: Work
    finding: Finding
    history: Run
    others: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A rule's verdict in one mode on one engine. ``schedules`` put it to the test.

    ``kinds``: how many of them held each kind of interruption, or step.

    ``on``: judged on single samples or on whole rollouts (`harness.work.LEVELS`).

    ``faulty_engine``: judged on an engine that breaks its own contract; counts as SHOULD.
    """

    rule: str
    level: str
    mode: str
    engine: str
    verdict: str
    schedules: int
    reason: str = ""
    counterexample: Counterexample | None = None
    faulty_engine: bool = False
    on: str = SAMPLE
    kinds: tuple[tuple[str, int], ...] = ()

    def gates(self, strict: bool) -> bool:
        return strict or (self.level == "MUST" and not self.faulty_engine)


def gating(results: Sequence[Result], *, strict: bool) -> list[Result]:
    """The verdicts that decide the status. Where only SHOULD rules were asked for, they gate."""
    return [r for r in results if r.gates(strict)] or [r for r in results if not r.faulty_engine]


def exit_status(results: Sequence[Result], *, strict: bool) -> int:
    """0, 1 or 125: among the verdicts that gate, invalid beats unknown beats valid."""
    verdicts = {r.verdict for r in gating(results, strict=strict)}
    if INVALID in verdicts:
        return VIOLATES
    return CANNOT if UNKNOWN in verdicts or not verdicts else CONFORMS
