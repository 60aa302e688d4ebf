"""A report, or a timeline, as one HTML file that needs nothing else: no network, no script.

The templates lay out; what they are given is plain data from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import spec
from harness.adapt import BECOMES
from harness.check import Report
from harness.engines import is_url
from harness.history import MODES
from harness.judged import ABSENT
from harness.reporters import picture, verdicts
from harness.reporters.picture import Picture
from harness.reporters.plain import clean
from harness.reporters.violations import Violation, Violations, grouped, screen
from harness.revisions import Revision
from harness.scan import Range, Scan
from harness.scenario import STEPS
from harness.schedule import FAULTY_ENGINE, KINDS
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result
from harness.work import ROLLOUT, Work

if TYPE_CHECKING:
    from jinja2 import Environment

K = TypeVar("K")
V = TypeVar("V")

SIGNS = {VALID: "✓", INVALID: "✗", UNKNOWN: "?"}
"""Beside the word, so that colour never stands alone."""


def page(report: Report, violations: Violations, *, strict: bool = False) -> str:
    """The report as a page."""
    groups = grouped(violations)
    places = verdicts.by_place(report.results)
    return _render(
        "page.html",
        report=report,
        outcome=verdicts.outcome(report, strict=strict),
        facts=verdicts.facts(report),
        covered=verdicts.covered(report),
        unknowns=verdicts.unknowns(report.results),
        tables={place: verdicts.table(results) for place, results in places.items()},
        anchors={(verdicts.place(v.result), v.result.rule): _anchor(group) for group in groups for v in group},
        violations=[_told(group) for group in groups],
        coverage={place: coverage(place, results) for place, results in places.items()},
        rules=[spec.RULES[rule] for rule in dict.fromkeys(r.rule for r in report.results)],
    )


def scan_page(scan: Scan) -> str:
    """A timeline as a page: commit by rule."""
    months = [(month, len(list(days))) for month, days in groupby(scan.revisions, lambda r: r.date[:7])]
    steady = [row for row, ranges in scan.rows.items() if len(ranges) == 1 and ranges[0].verdict == VALID]
    return _render(
        "scan.html",
        scan=scan,
        target=scan.options.target.kind,
        signs=SIGNS | {ABSENT: "–"},
        months=months,
        steady=steady,
        broken=[(rule, mode, r) for (rule, mode), ranges in scan.rows.items() for r in ranges if r.broken],
        said=partial(_stretch, scan.revisions),
        rules=[spec.RULES[rule] for rule in dict.fromkeys(rule for rule, _ in scan.rows)],
    )


def _render(template: str, **data: Any) -> str:
    return clean(_environment().get_template(template).render({"signs": SIGNS} | data))


def _environment() -> Environment:
    """Made here, and not at the top: only who asks for a page waits for Jinja."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("harness.reporters"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# violations


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, drawn once for all the ``modes`` in which it is the same. ``broken``: the rule is, in these modes."""

    drawn: Picture
    modes: tuple[str, ...]
    broken: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A rule broken by one schedule. ``more``: the other schedules that break it, in other modes or engines."""

    id: str
    lines: tuple[str, ...]
    replay: str
    figures: tuple[Figure, ...]
    more: tuple[Told, ...] = ()


def _anchor(group: Sequence[Violation]) -> str:
    first = group[0].result
    where = "-faulty-engine" if first.faulty_engine else "-rollouts" if first.on == ROLLOUT else ""
    return f"broken-{first.rule}{where}"


def _told(group: Sequence[Violation]) -> Told:
    """A group of `violations.grouped`, each schedule told once."""
    schedules: list[tuple[Work, list[Violation]]] = []
    for v in group:
        _put(schedules, _example(v).schedule, v)
    told = []
    for number, (_, alike) in enumerate(schedules):
        first = alike[0]
        shown = screen(alike if number else group)
        lines = (line.removeprefix("  ") for line in shown if line != f"  replay   {first.replay}")
        examples = {v.result.mode: _example(v) for v in reversed(alike)}  # of several engines the first
        id_ = _anchor(group) + (f"-{number + 1}" if number else "")
        told.append(Told(id_, tuple(lines), first.replay, tuple(figures(first.result.rule, examples))))
    return replace(told[0], more=tuple(told[1:]))


def _example(violation: Violation) -> Counterexample:
    assert violation.result.counterexample is not None
    return violation.result.counterexample


def figures(rule: str, examples: Mapping[str, Counterexample]) -> Iterator[Figure]:
    """What one schedule does in every mode: those in which it breaks the rule first. ``examples`` are by mode.

    All have one axis, so that they can be compared.
    """
    others = {run.mode: run for example in examples.values() for run in example.others}
    drawn = [(picture.of(e.history, rule, e.finding), True, mode) for mode, e in sorted(examples.items(), key=_by_mode)]
    drawn += [(picture.of(run), False, mode) for mode, run in others.items() if mode not in examples]
    extent = max(one.extent for one, _, _ in drawn)
    alike: list[tuple[tuple[Picture, bool], list[str]]] = []
    for one, broken, mode in drawn:
        _put(alike, (replace(one, extent=extent), broken), mode)
    for (one, broken), modes in alike:
        yield Figure(one, tuple(modes), broken)


def _by_mode(item: tuple[str, object]) -> int:
    return MODES.index(item[0])


def _put(groups: list[tuple[K, list[V]]], key: K, value: V) -> None:
    """Adds to the group of the key, which need not be hashable."""
    for known, values in groups:
        if known == key:
            values.append(value)
            return
    groups.append((key, [value]))


# coverage


@dataclass(frozen=True, slots=True)
class Coverage:
    """Rule by kind of interruption. ``kinds`` maps each to what it is; ``rows`` have a count for each."""

    kinds: dict[str, str]
    rows: dict[str, tuple[int, ...]]
    never: tuple[str, ...]


def coverage(place: str, results: Sequence[Result]) -> Coverage:
    """How many schedules that put a rule to the test held each kind, over all modes and engines."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.rule, Counter()).update(dict(result.kinds))
    seen = {kind for count in counts.values() for kind in count}
    server = any(is_url(result.engine) for result in results)
    kinds = {kind: said for kind, said in _kinds(place).items() if kind in seen or _expected(place, kind, server)}
    rows = {rule: tuple(count[kind] for kind in kinds) for rule, count in counts.items()}
    return Coverage(kinds, rows, tuple(kind for kind in kinds if kind not in seen))


def _kinds(place: str) -> dict[str, str]:
    return STEPS if place == verdicts.ROLLOUTS else KINDS


def _expected(place: str, kind: str, server: bool) -> bool:
    """Of a faulty engine its faults are expected, and nothing else; elsewhere everything else.

    What only a mock can be made to do is not expected of a server, nor the other way round.
    """
    if kind in (BECOMES if server else BECOMES.values()):
        return False
    return (kind in FAULTY_ENGINE) == (place == verdicts.FAULTY)


# timelines


def _stretch(revisions: Sequence[Revision], span: Range) -> str:
    """A range in words: "a1b2c3d (2025-08-12) to d4e5f6a (2025-09-01), 7 revisions"."""
    first, last = revisions[span.begin], revisions[span.end]
    if span.begin == span.end:
        return f"{first.short} ({first.date})"
    return f"{first.short} ({first.date}) to {last.short} ({last.date}), {span.end - span.begin + 1} revisions"
