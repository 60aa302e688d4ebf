"""The report for a GitHub workflow: annotations on the run, and the summary of the job."""

import re
from collections.abc import Iterator, Sequence

from harness.check import Report
from harness.reporters import verdicts
from harness.reporters.calls import count
from harness.reporters.plain import clean, cut
from harness.reporters.violations import Violation, Violations, grouped, screen
from harness.verdict import Result, gating

MAX_ERRORS = MAX_WARNINGS = 10
"""GitHub shows no more of a step."""

MAX_MESSAGE = 4_000
MAX_BLOCK = 20_000
MAX_SUMMARY = 1_000_000
"""Bytes. GitHub refuses a summary of more than 1 MiB, all of it."""

SIGNS = {"valid": "✅", "invalid": "❌", "unknown": "❔"}


# annotations


def annotations(report: Report, violations: Violations, *, strict: bool) -> list[str]:
    """Workflow commands, a line each: an error where the status is decided, a warning elsewhere."""
    gates = gating(report.results, strict=strict)
    told: dict[bool, list[str]] = {True: [], False: []}
    for group in grouped(violations):
        told[group[0].result in gates].append(_command(_title(group), "\n".join(screen(group))))
    for gate, found in told.items():
        found += [_command("cannot be judged", line) for line in _unknown(report, gates, gate)]
    return [*_some("error", told[True], MAX_ERRORS), *_some("warning", told[False], MAX_WARNINGS)]


def _unknown(report: Report, gates: list[Result], gate: bool) -> list[str]:
    return verdicts.unknowns(r for r in report.results if (r in gates) == gate)


def _title(group: Sequence[Violation]) -> str:
    first = group[0].result
    modes = ", ".join(dict.fromkeys(v.result.mode for v in group))
    return f"{first.rule} violated in {modes}" + (" on a faulty engine" if first.faulty_engine else "")


def _command(title: str, message: str) -> str:
    """A workflow command without its name."""
    return f" title={_property(clean(title))}::{_data(cut(clean(message), MAX_MESSAGE))}"


def _some(name: str, told: Sequence[str], limit: int) -> Iterator[str]:
    """All of them, or what fits, the last of which says how many do not."""
    left = len(told) - limit + 1 if len(told) > limit else 0
    yield from (f"::{name}{one}" for one in told[: len(told) - left])
    if left:
        yield f"::{name}{_command('more', f'{left} more: see the summary of the job')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# the summary


def summary(report: Report, violations: Violations, *, strict: bool = False) -> str:
    """Markdown for $GITHUB_STEP_SUMMARY. What does not fit is left out, and it says so."""
    parts = [_head(report, strict=strict)]
    size = len(parts[0].encode())
    rest = [*_tables(report), *_violations(violations), *_unknowns(report.results)]
    for number, part in enumerate(rest):
        size += len(part.encode()) + 1
        if size > MAX_SUMMARY:
            parts.append(f"{count(len(rest) - number, 'part')} of this summary did not fit.\n")
            break
        parts.append(part)
    return "\n".join(parts)


def _head(report: Report, *, strict: bool) -> str:
    outcome = verdicts.outcome(report, strict=strict)
    sign = SIGNS[{"conforms": "valid", "violates": "invalid"}.get(outcome, "unknown")]
    facts = ", ".join(f"{name} {_code(value)}" for name, value in verdicts.facts(report).items())
    lines = [f"## {sign} rolloutcheck: {_code(report.ready.name)} {outcome}", "", facts]
    lines += ["", verdicts.covered(report)] if report.covered is not None else []
    lines += ["", "Interrupted: the verdicts are what was known by then."] if not report.complete else []
    for reason, runs in report.skipped:
        lines += ["", f"{count(runs, 'run')} left out: {_code(reason)}"]
    return "\n".join(lines) + "\n"


def _tables(report: Report) -> Iterator[str]:
    for place, results in verdicts.by_place(report.results).items():
        table = verdicts.table(results)
        lines = [f"### {place}", ""]
        lines += [_row("rule", "level", *table.modes), _row("---", "---", *("---" for _ in table.modes))]
        for row in table.rows:
            cells = ("" if cell is None else f"{SIGNS[cell.verdict]} {cell}" for cell in row.cells)
            lines.append(_row(row.rule, row.level, *cells))
        yield "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _violations(violations: Violations) -> Iterator[str]:
    for group in grouped(violations):
        yield f"### {_title(group)}\n\n{_block(chr(10).join(screen(group)))}\n"


def _unknowns(results: Sequence[Result]) -> Iterator[str]:
    lines = verdicts.unknowns(results)
    if lines:
        yield f"### Unknown\n\n{_block(chr(10).join(lines))}\n"


def _code(text: str) -> str:
    """A code span that its own backticks do not end."""
    shown = cut(clean(text).replace("\n", " "), MAX_MESSAGE)
    fence = "`" * (_longest(shown) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _block(text: str) -> str:
    """A code block that its own fences do not end."""
    shown = cut(clean(text), MAX_BLOCK)
    fence = "`" * max(_longest(shown) + 1, 3)
    return f"{fence}text\n{shown}\n{fence}"


def _longest(text: str) -> int:
    """How many backticks stand in a row, at most."""
    return max(map(len, re.findall("`+", text)), default=0)
