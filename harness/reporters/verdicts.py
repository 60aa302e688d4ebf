"""The verdicts of a report as tables of plain values; each form draws them in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.check import INTERRUPTED, Report
from harness.history import MODES
from harness.verdict import CANNOT, CONFORMS, INVALID, UNKNOWN, VALID, VIOLATES, Result, exit_status, gating
from harness.work import ROLLOUT

SAMPLES, FAULTY, ROLLOUTS = (
    "On single samples",
    "On an engine that breaks its own contract (counts as SHOULD)",
    "Over whole rollouts",
)
"""The tables of a report, in order."""

OUTCOMES = {CONFORMS: "conforms", VIOLATES: "violates", CANNOT: "cannot be judged"}

_ORDER = (INVALID, UNKNOWN, VALID)


@dataclass(frozen=True, slots=True)
class Cell:
    """The worst verdict over the engines, and how many schedules put the rule to the test."""

    verdict: str
    schedules: int

    def __str__(self) -> str:
        return f"{self.verdict} {self.schedules}" if self.schedules else self.verdict


@dataclass(frozen=True, slots=True)
class Row:
    """A rule. ``cells`` are in the order of the table's modes; None where it was not judged."""

    rule: str
    level: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rule by mode."""

    modes: tuple[str, ...]
    rows: tuple[Row, ...]


def place(result: Result) -> str:
    """Which of the tables a verdict stands in."""
    return FAULTY if result.faulty_engine else ROLLOUTS if result.on == ROLLOUT else SAMPLES


def by_place(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The verdicts of each table, those without any left out."""
    places: dict[str, list[Result]] = {SAMPLES: [], FAULTY: [], ROLLOUTS: []}
    for result in results:
        places[place(result)].append(result)
    return {name: found for name, found in places.items() if found}


def table(results: Iterable[Result]) -> Table:
    """Verdicts of one place, each rule in a row."""
    rules: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        rules.setdefault(result.rule, {}).setdefault(result.mode, []).append(result)
    modes = tuple(m for m in MODES if any(m in cells for cells in rules.values()))
    rows = (Row(rule, _level(cells), tuple(_cell(cells.get(m, [])) for m in modes)) for rule, cells in rules.items())
    return Table(modes, tuple(rows))


def _level(cells: dict[str, list[Result]]) -> str:
    return next(iter(cells.values()))[0].level


def _cell(results: Sequence[Result]) -> Cell | None:
    if not results:
        return None
    verdict = min((r.verdict for r in results), key=_ORDER.index)
    return Cell(verdict, sum(r.schedules for r in results))


def outcome(report: Report, *, strict: bool) -> str:
    """What the exit status says, in words."""
    if not report.complete:
        return INTERRUPTED
    return OUTCOMES[exit_status(report.results, strict=strict)]


def closing(report: Report, *, strict: bool) -> str:
    """The outcome, and the rules that it comes from: ``violates: BUDGET, CONTEXT``."""
    said = outcome(report, strict=strict)
    wanted = {"violates": INVALID, "conforms": None}.get(said, UNKNOWN)
    names = [r.rule for r in gating(report.results, strict=strict) if r.verdict == wanted]
    return f"{said}: {', '.join(dict.fromkeys(names))}" if names else said


def engines(report: Report) -> str:
    """The engines; of a server that ran already also what it is, for what a client may have there depends on it."""
    said = {server.url: f" (SGLang {server.version}, context {server.context})" for server in report.servers}
    return ", ".join(engine + said.get(engine, "") for engine in report.options.engines)


def facts(report: Report) -> dict[str, str]:
    """What was checked, and how; what there is nothing to say of is left out."""
    options = report.options
    said = {
        "target": report.ready.name.partition("@")[0],
        "revision": options.target.revision,
        "engine": engines(report),
        "profile": options.profile,
        "seed": str(options.seed),
        "duration": f"{report.duration_s:.1f} s",
    }
    return {name: value for name, value in said.items() if value}


def covered(report: Report) -> str:
    """How much of spread work was done, in a line; empty where the work was not spread."""
    if report.covered is None:
        return ""
    done, of = report.covered.schedules, report.covered.of
    share = f"{done / of:.0%}" if done < of else "all"
    size = report.options.scope
    what = f"of the scope of size {size}" if size is not None else "drawn"
    return f"{done:,} of {of:,} schedules {what}, {share}"


def unknowns(results: Iterable[Result]) -> list[str]:
    """One line a reason, with the rules and modes it leaves unknown."""
    by_reason: dict[str, list[Result]] = {}
    for result in results:
        if result.verdict == UNKNOWN:
            by_reason.setdefault(result.reason, []).append(result)
    return [
        "unknown: what was not finished: interrupted"
        if reason == INTERRUPTED
        else f"unknown: {', '.join(dict.fromkeys(f'{r.rule} {r.mode}' for r in group))}: {reason}"
        for reason, group in by_reason.items()
    ]
