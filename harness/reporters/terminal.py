"""The report for a person at a terminal: a table of rules, then each violation on one screen.

Plain text where standard output is no terminal; ``NO_COLOR`` is honoured (both by rich).
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.check import Report
from harness.reporters import verdicts
from harness.reporters.calls import count
from harness.reporters.violations import Violations, screens
from harness.verdict import INVALID, UNKNOWN, VALID, Result

STYLE = {VALID: "green", INVALID: "bold red", UNKNOWN: "yellow"}


def table(results: Iterable[Result]) -> Table:
    """Rule by mode; a cell is the worst verdict over the engines, and how many schedules put it to the test."""
    found = verdicts.table(results)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("rule", no_wrap=True)
    made.add_column("level")
    for mode in found.modes:
        made.add_column(mode, no_wrap=True)
    for row in found.rows:
        made.add_row(row.rule, row.level, *map(_cell, row.cells))
    return made


def _cell(cell: verdicts.Cell | None) -> Text:
    return Text("-", style="dim") if cell is None else Text(str(cell), style=STYLE[cell.verdict])


def show(console: Console, report: Report, violations: Violations, *, strict: bool = False) -> None:
    """Everything a person needs."""
    name, options = report.ready.name, report.options
    how = f"profile {options.profile}   seed {options.seed}   {report.duration_s:.1f} s"
    head = f"{name}   engine {verdicts.engines(report)}   {how}"
    console.print(head, style="bold", markup=False, highlight=False, soft_wrap=True)
    if report.covered is not None:
        console.print(verdicts.covered(report), markup=False, highlight=False)
    for place, results in verdicts.by_place(report.results).items():
        if place != verdicts.SAMPLES:
            console.print(f"{place}:", style="bold")
        console.print(table(results))
    for reason, runs in report.skipped:
        console.print(f"{count(runs, 'run')} left out: {reason}", markup=False, highlight=False, soft_wrap=True)
    for reason in verdicts.unknowns(report.results):
        console.print(reason, style=STYLE[UNKNOWN], markup=False, highlight=False, soft_wrap=True)
    for lines in screens(violations):
        console.print()
        console.print(lines[0], style=STYLE[INVALID], markup=False, highlight=False, soft_wrap=True)
        for line in lines[1:]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.complete:
        console.print()
        console.print(verdicts.closing(report, strict=strict), style="bold", markup=False, highlight=False)
