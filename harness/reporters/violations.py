"""The violations of a report: each one's screen, the file it is stored in and the command that replays it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import replay
from harness.check import Report
from harness.engines import is_url
from harness.replay import Failure
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

    @property
    def failure(self) -> Failure:
        r = self.result
        assert r.counterexample is not None
        schedule = r.counterexample.schedule
        return Failure(r.rule, r.mode, r.engine, schedule, self.target, self.revision, self.summary)


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


class Shelf:
    """The folder of failure files. One that cannot be written is said once, and loses nothing else."""

    def __init__(self, directory: Path, say: Callable[[str], object]) -> None:
        self.directory, self.say, self.open = directory, say, True

    def put(self, failure: Failure, seed: int, arguments: Sequence[str]) -> tuple[str, str]:
        """The file and the command that replays it, with the ``arguments`` that name the target; or two empty texts."""
        if not self.open:
            return "", ""
        try:
            file = replay.write(self.directory, failure, seed)
        except OSError as error:
            self.say(f"cannot write {self.directory}: {error.strerror}; violations are not stored")
            self.open = False
            return "", ""
        on = ("--engine", failure.engine) if is_url(failure.engine) else ()
        return str(file), shlex.join(["rolloutcheck", "replay", str(file), *arguments, *on])


def store(violations: Violations, shelf: Shelf, arguments: Sequence[str]) -> Violations:
    """The violations, each with its file and its command."""
    stored = {}
    for place, v in violations.items():
        file, command = shelf.put(v.failure, v.seed, arguments)
        stored[place] = replace(v, file=file, replay=command)
    return stored


def grouped(violations: Violations) -> list[list[Violation]]:
    """Those of one rule together, apart on a faulty engine and on whole rollouts. What gates comes first."""
    groups: dict[tuple[str, bool, str], list[Violation]] = {}
    for v in violations.values():
        groups.setdefault((v.result.rule, v.result.faulty_engine, v.result.on), []).append(v)
    return sorted(groups.values(), key=lambda group: not group[0].result.gates(False))


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
