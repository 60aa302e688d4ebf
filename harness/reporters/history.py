"""Bisections and scans: for a person at a terminal, and as JSON (``spec/schemas/bisect`` and ``scan``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from harness.bisect import FIRST_BAD, Bisection
from harness.judged import Broken
from harness.reporters.calls import count
from harness.reporters.plain import clean
from harness.reporters.terminal import STYLE
from harness.revisions import Revision
from harness.scan import Range, Scan
from harness.verdict import INVALID, VALID
from harness.version import version
from harness.work import to_json


def show_bisection(console: Console, found: Bisection) -> None:
    """The revision, and what the same schedule does on either side of it."""
    for style, line in _bisection(found):
        _print(console, line, style)


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(clean(line), style=style, markup=False, highlight=False, soft_wrap=True)


def _bisection(b: Bisection) -> Iterator[tuple[str, str]]:
    rule, mode = b.row
    head = f"{rule}   {mode}   {b.old.short} .. {b.new.short}"
    yield "bold", f"{head}   {b.revisions} revisions, {b.steps} run   {b.duration_s:.1f} s"
    what = b.direction.replace("-", " ")
    if b.found is not None:
        yield "bold", f"{what}: {b.found}"
    else:
        yield "bold", f"{what}: one of the {count(len(b.candidates), 'revision')} after {b.before.short}"
        for revision in b.candidates[:20]:
            yield "", f"  {revision}"
        if len(b.candidates) > 20:
            yield "", f"  ... {len(b.candidates) - 20} more"
    if b.follows:
        yield "", f"both ends break {rule}; this is where [{b.broken.work}] changed"
    for reason, revisions in _reasons(b).items():
        yield STYLE["unknown"], f"skipped {', '.join(r.short for r in revisions)}: {reason}"
    yield "", ""
    *body, why = b.broken.lines
    yield STYLE[INVALID], body[0]
    for line in body[1:]:
        yield "", line
    if b.broken.replay:
        yield "", f"  replay   {b.broken.replay}"
    yield "", why
    if b.holds:
        yield "", ""
        yield STYLE[VALID], b.holds[0]
        for line in b.holds[1:]:
            yield "", line


def _reasons(b: Bisection) -> dict[str, list[Revision]]:
    reasons: dict[str, list[Revision]] = {}
    for revision, reason in b.skipped:
        reasons.setdefault(reason, []).append(revision)
    return reasons


def bisection(b: Bisection) -> dict[str, Any]:
    """As in spec/schemas/bisect.schema.json."""
    good, bad = (VALID, INVALID) if b.direction == FIRST_BAD else (INVALID, VALID)
    return {
        "tool": "rolloutcheck",
        "version": version(),
        "rule": b.row[0],
        "mode": b.row[1],
        "direction": b.direction,
        "revision": None if b.found is None else b.found.short,
        "commit": None if b.found is None else b.found.commit,
        "date": None if b.found is None else b.found.date,
        "subject": None if b.found is None else b.found.subject,
        "candidates": [revision.short for revision in b.candidates],
        "old": {"revision": b.old.short, "verdict": good},
        "new": {"revision": b.new.short, "verdict": bad},
        "before": b.before.short,
        "revisions": b.revisions,
        "steps": b.steps,
        "skipped": [{"revision": revision.short, "reason": reason} for revision, reason in b.skipped],
        "counterexample": _counterexample(b.broken),
        "holds": "\n".join(b.holds),
        "follows": b.follows,
        "complete": b.complete,
        "duration_s": round(b.duration_s, 3),
    }


def _counterexample(broken: Broken) -> dict[str, Any]:
    return {**to_json(broken.work), "summary": "\n".join(broken.lines), "replay": broken.replay}


def show_scan(console: Console, found: Scan) -> None:
    """A block a rule and mode, a line each time its verdict changes."""
    options = found.options
    if not found.revisions:
        _print(console, "no revision")
        return
    first, last = found.revisions[0], found.revisions[-1]
    head = (
        f"slime   {first.short} {first.date} .. {last.short} {last.date}   "
        f"{count(len(found.revisions), 'client')} in {count(found.commits, 'revision')}   "
        f"profile {options.profile}   seed {options.seed}   {found.duration_s:.1f} s"
    )
    _print(console, head, "bold")
    for (rule, mode), ranges in found.rows.items():
        console.print()
        _print(console, f"{rule} {mode}", "bold")
        for one in ranges:
            _show_range(console, found, one)


def _show_range(console: Console, found: Scan, one: Range) -> None:
    begin = found.revisions[one.begin]
    size = one.end - one.begin + 1
    line = f"  {begin.date} {begin.short}   {one.verdict:<7}  {size:>4}   {begin.subject}"
    style = STYLE.get(one.verdict, "dim")
    _print(console, line, style)
    said = [one.reason] if one.reason else []
    said += [f"[{broken.work}]" + (f"   {broken.file}" if broken.file else "") for broken in one.broken]
    for text in said:
        _print(console, f"      {text}")


def scan(found: Scan) -> dict[str, Any]:
    """As in spec/schemas/scan.schema.json."""
    rules: dict[str, dict[str, list[Any]]] = {}
    for (rule, mode), ranges in found.rows.items():
        rules.setdefault(rule, {})[mode] = [_range(found, one) for one in ranges]
    return {
        "tool": "rolloutcheck",
        "version": version(),
        "target": "slime",
        "profile": found.options.profile,
        "seed": found.options.seed,
        "levels": list(found.options.levels),
        "commits": found.commits,
        "revisions": [
            {"revision": r.short, "commit": r.commit, "date": r.date, "subject": r.subject} for r in found.revisions
        ],
        "rules": rules,
        "complete": found.complete,
        "duration_s": round(found.duration_s, 3),
    }


def _range(found: Scan, one: Range) -> dict[str, Any]:
    return {
        "from": found.revisions[one.begin].short,
        "to": found.revisions[one.end].short,
        "verdict": one.verdict,
        "revisions": one.end - one.begin + 1,
        "reason": one.reason,
        "counterexamples": [_counterexample(broken) for broken in one.broken],
    }
