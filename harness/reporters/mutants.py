"""The table of mutants: on the terminal, as JSON and for docs/mutants.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.mutants import not_planted, quirks
from harness.mutants.measure import Measured
from harness.mutants.parts import Mutant
from harness.work import ROLLOUT


def data(measured: Sequence[Measured]) -> dict[str, Any]:
    """As in spec/schemas/mutants.schema.json."""
    return {
        "mutants": [
            {
                "id": m.mutant.id,
                "fault": m.mutant.fault,
                "reports": list(m.mutant.reports),
                "rule": m.mutant.rule,
                "modes": list(m.mutant.modes),
                "faulty_engine": m.mutant.faulty_engine,
                "detected": m.detected,
                "seeds": len(m.schedules),
                "median_schedules": m.median,
                "worst_schedules": m.worst,
            }
            for m in measured
        ],
        "quirks": [{"report": report, "modelled_as": kind} for report, kind in quirks().items()],
        "not_planted": [{"report": report, "reason": reason} for report, reason in not_planted().items()],
    }


def listing(out: Console, mutants: Sequence[Mutant]) -> None:
    """Without running them."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("mutant", "rule", "fault"):
        table.add_column(heading, overflow="fold")
    for mutant in mutants:
        table.add_row(mutant.id, mutant.rule, mutant.fault)
    out.print(table)


def show(out: Console, measured: Sequence[Measured]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("mutant", "rule", "detected"):
        table.add_column(heading, overflow="fold")
    for heading in ("median", "worst"):
        table.add_column(heading, justify="right")
    for m in measured:
        style = "" if m.detected else "bold red"
        table.add_row(m.mutant.id, m.mutant.rule, _detected(m), _number(m.median), _number(m.worst), style=style)
    out.print(table)
    out.print(summary(measured), highlight=False)


def summary(measured: Sequence[Measured]) -> str:
    """One line: how many were found, and how soon."""
    medians = [m.median for m in measured if m.median is not None]
    found = sum(m.detected for m in measured)
    said = f"{found} of {len(measured)} mutants found in every seed"
    return f"{said}; median {_number(statistics.median(medians))} schedules" if medians else said


def markdown(measured: Sequence[Measured], command: str, profile: str, versions: str) -> str:
    """docs/mutants.md."""
    lines = [
        "# Planted faults",
        "",
        "Small faulty clients and loops, each the reference with one part replaced",
        f"([harness/mutants](../harness/mutants)), most after public reports. {summary(measured)},",
        f"in {len(measured[0].schedules)} seeds of the profile `{profile}`. Counted are drawn schedules, or scenarios",
        "for a loop (rollout), until the mutant's own rule has found it in each of its modes; the regression corpus,",
        "which a check runs first and which holds a schedule for most of these faults, is left out.",
        "Letters as in [spec/README.md](../spec/README.md#terms); (faulty engine): seen only where the engine breaks",
        "its own contract.",
        "",
        f"Made by `{command}` ({versions}).",
        "",
        "| mutant | fault | rule | modes | found | median schedules | worst | reports |",
        "| --- | --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for m in measured:
        mutant = m.mutant
        engine = " (faulty engine)" if mutant.faulty_engine else " (rollout)" if mutant.level == ROLLOUT else ""
        cells = (
            f"`{mutant.id}`",
            mutant.fault,
            f"[{mutant.rule}](../spec/README.md#{mutant.rule})",
            ", ".join(mutant.modes) + engine,
            _detected(m),
            _number(m.median),
            _number(m.worst),
            ", ".join(map(_link, mutant.reports)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Faults of the engine, in every drawn set", "", "| report | modelled as |", "| --- | --- |"]
    lines += [f"| {_link(report)} | {kind} |" for report, kind in quirks().items()]
    lines += ["", "## Not planted", "", "| report | reason |", "| --- | --- |"]
    lines += [f"| {_link(report)} | {reason} |" for report, reason in not_planted().items()]
    return "\n".join(lines) + "\n"


def _detected(m: Measured) -> str:
    return f"{len(m.found)} of {len(m.schedules)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _link(report: str) -> str:
    name, sign, number = report.partition("#")
    if sign:
        return f"[{report}](https://github.com/{name}/issues/{number})"
    name, _, commit = report.partition("@")
    return f"[{report}](https://github.com/{name}/commit/{commit})"
