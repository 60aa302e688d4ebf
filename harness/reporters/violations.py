"""The violations of a report: each one's screen, the file it is stored in and the command that replays it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import replay
from harness.check import Report
from harness.reporters import failure
from harness.verdict import Result


@dataclass(frozen=True, slots=True)
class Violation:
    """``lines`` is the screen without the replay command; ``file`` and ``replay`` are empty if it is not stored."""

    result: Result
    target: str
    revision: str
    seed: int
    lines: tuple[str, ...]
    file: str = ""
    replay: str = ""

    @property
    def summary(self) -> str:
        return "\n".join(self.lines)


Violations = dict[int, Violation]
"""By their place in the report's results."""


def of(report: Report) -> Violations:
    """Every violation of a report, not stored yet."""
    return {
        place: Violation(
            result,
            report.ready.name.partition("@")[0],
            report.options.target.revision,
            report.options.seed,
            tuple(
                failure.lines(
                    result.rule,
                    report.ready.name,
                    result.mode,
                    result.engine,
                    result.counterexample.finding,
                    result.counterexample.history,
                    faulty_engine=result.faulty_engine,
                )
            ),
        )
        for place, result in enumerate(report.results)
        if result.counterexample is not None
    }


def store(
    violations: Violations, directory: Path, arguments: Sequence[str], say: Callable[[str], object]
) -> Violations:
    """Writes the failure files. A folder that cannot be written is said once, and loses nothing else."""
    stored = dict(violations)
    for place, v in violations.items():
        try:
            file = replay.write(directory, v.result, v.target, v.revision, v.summary, v.seed)
        except OSError as error:
            say(f"cannot write {directory}: {error.strerror}; violations are not stored")
            break
        command = shlex.join(["rolloutcheck", "replay", str(file), *arguments])
        stored[place] = replace(v, file=str(file), replay=command)
    return stored


def grouped(violations: Violations) -> list[list[Violation]]:
    """Those of one rule together, on a faulty engine and elsewhere apart."""
    groups: dict[tuple[str, bool], list[Violation]] = {}
    for v in violations.values():
        groups.setdefault((v.result.rule, v.result.faulty_engine), []).append(v)
    return list(groups.values())


def screen(group: Sequence[Violation]) -> list[str]:
    """The first violation of a group on one screen, and where else the rule is broken."""
    first, *rest = group
    *body, why = first.lines
    if rest:
        others = (v.result for v in rest)
        body.append("  also     " + ", ".join(dict.fromkeys(f"{r.mode} {r.engine}" for r in others)))
    if first.replay:
        body.append(f"  replay   {first.replay}")
    return [*body, why]


def screens(violations: Violations) -> Iterator[list[str]]:
    """One screen a rule."""
    yield from map(screen, grouped(violations))
