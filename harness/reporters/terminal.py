"""The report for a person at a terminal: a table of rules, then each violation on one screen.

Plain text where standard output is no terminal; ``NO_COLOR`` is honoured (both by rich).
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.check import INTERRUPTED, Report
from harness.history import MODES
from harness.reporters.calls import count
from harness.reporters.violations import Violations, screens
from harness.verdict import INVALID, UNKNOWN, VALID, Result
from harness.work import ROLLOUT, SAMPLE

STYLE = {VALID: "green", INVALID: "bold red", UNKNOWN: "yellow"}
_ORDER = (INVALID, UNKNOWN, VALID)


def table(results: Iterable[Result]) -> Table:
    """Rule by mode; a cell is the worst verdict over the engines, and how many schedules put it to the test."""
    rows: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        rows.setdefault(result.rule, {}).setdefault(result.mode, []).append(result)
    modes = [m for m in MODES if any(m in cells for cells in rows.values())]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("rule", no_wrap=True)
    made.add_column("level")
    for mode in modes:
        made.add_column(mode, no_wrap=True)
    for rule, cells in rows.items():
        level = next(iter(cells.values()))[0].level
        made.add_row(rule, level, *(_cell(cells.get(mode, [])) for mode in modes))
    return made


def _cell(results: list[Result]) -> Text:
    if not results:
        return Text("-", style="dim")
    verdict = min((r.verdict for r in results), key=_ORDER.index)
    count = sum(r.schedules for r in results)
    return Text(f"{verdict} {count}" if count else verdict, style=STYLE[verdict])


def show(console: Console, report: Report, violations: Violations) -> None:
    """Everything a person needs."""
    name, options = report.ready.name, report.options
    samples = [r for r in report.results if r.on == SAMPLE]
    conforming = [r for r in samples if not r.faulty_engine]
    rollouts = [r for r in report.results if r.on == ROLLOUT]
    faulty = [r for r in report.results if r.faulty_engine]
    engines = ", ".join(options.engines)
    head = f"{name}   engine {engines}   profile {options.profile}   seed {options.seed}   {report.duration_s:.1f} s"
    console.print(head, style="bold", markup=False, highlight=False, soft_wrap=True)
    if report.covered is not None:
        covered = report.covered
        share = f"{covered.schedules / covered.of:.0%}" if covered.schedules < covered.of else "all"
        what = f"of the scope of size {options.scope}" if options.scope is not None else "drawn"
        line = f"{covered.schedules:,} of {covered.of:,} schedules {what}, {share}"
        console.print(line, markup=False, highlight=False)
    if conforming:
        console.print(table(conforming))
    if faulty:
        console.print("On an engine that breaks its own contract (counts as SHOULD):", style="bold")
        console.print(table(faulty))
    if rollouts:
        console.print("Over whole rollouts:", style="bold")
        console.print(table(rollouts))
    for reason, runs in report.skipped:
        console.print(f"{count(runs, 'run')} left out: {reason}", markup=False, highlight=False, soft_wrap=True)
    for reason in unknowns(report.results):
        console.print(reason, style=STYLE[UNKNOWN], markup=False, highlight=False, soft_wrap=True)
    for lines in screens(violations):
        console.print()
        console.print(lines[0], style=STYLE[INVALID], markup=False, highlight=False, soft_wrap=True)
        for line in lines[1:]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


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
