"""Judges one revision of a client: by a check, by what broke another revision, or against another revision."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path

from harness import again, corpus
from harness.check import FLAKY, Report, check
from harness.isolation import Worker
from harness.options import PROFILES, SCENARIOS, Options
from harness.replay import Failure
from harness.reporters import failure
from harness.revisions import Revision
from harness.search import Search, rules
from harness.shrink import shrink
from harness.targets import CannotJudge
from harness.targets.checkout import checkout
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Result
from harness.work import ROLLOUT, Work, level

Modules = tuple[str, ...] | None
"""What a client asked for; None: that is not known, so it may be anything."""

ABSENT = "absent"
"""Beside valid, invalid and unknown: the client has no such mode, or is not there at all."""

_WORST = (INVALID, UNKNOWN, VALID, ABSENT)
Row = tuple[str, str]
"""A rule and a mode."""

First = tuple[tuple[str, Work], ...]
"""Rules, and what broke them elsewhere."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What breaks a rule: the smallest schedule or scenario, its screen, and the command that replays it."""

    work: Work
    lines: tuple[str, ...]
    file: str = ""
    replay: str = ""

    def named(self, revision: Revision) -> Broken:
        """As seen at a revision, where the client is the same as at the one it was found at."""
        head, *rest = self.lines
        return replace(self, lines=(re.sub(r"slime@\w+", f"slime@{revision.short}", head), *rest))


@dataclass(frozen=True, slots=True)
class Said:
    """What is said of one rule in one mode. ``verdict``: valid, invalid, unknown or absent.

    Of a replay: ``holds`` is its screen where it did not fail; absent means that it shows nothing there.
    """

    verdict: str
    reason: str = ""
    broken: Broken | None = None
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known of a client. ``modules`` are those it asked for (`harness.revisions.client`)."""

    rows: dict[Row, Said]
    modules: Modules = None
    complete: bool = True


def judge(where: Path, options: Options, folder: str, revision: Revision, first: First) -> Judged:
    """Checks a revision, its tree for that time in ``folder``. What cannot be judged is said in its rows.

    ``first`` is run before anything else.
    """
    try:
        with _within(folder), checkout(where, revision.commit, folder=folder) as tree:
            target = TargetSpec("slime", str(tree.root), tree.revision)
            given = replace(options, target=target, first=first, jobs=None)  # the jobs are the revisions
            levels = [_level(replace(given, levels=(on,)), revision) for on in options.levels if rules(options, on)]
    except CannotJudge as error:
        return _nothing(options, revision, error)
    return reduce(_worse, levels)


@contextmanager
def _within(folder: str) -> Iterator[None]:
    """Temporary files lie in the folder: whoever made it removes it, even if this process is killed."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _level(options: Options, revision: Revision) -> Judged:
    """What is said on one level: a loop that is not there says nothing of single samples."""
    try:
        report = check(options)
    except CannotJudge as error:
        return _nothing(options, revision, error)
    found = {row: replace(said, reason=_anywhere(said.reason, revision)) for row, said in _rows(report).items()}
    return Judged(found, report.modules, report.complete)


def _nothing(options: Options, revision: Revision, error: CannotJudge) -> Judged:
    said = Said(ABSENT if error.not_applicable else UNKNOWN, _anywhere(str(error), revision))
    return Judged(dict.fromkeys(rows(options), said))


def _worse(one: Judged, two: Judged) -> Judged:
    """The worst of two levels, row by row."""
    both = {
        row: min((j.rows[row] for j in (one, two) if row in j.rows), key=lambda said: _WORST.index(said.verdict))
        for row in one.rows | two.rows
    }
    return Judged(both, union((one.modules, two.modules)), one.complete and two.complete)


def _anywhere(reason: str, revision: Revision) -> str:
    """A reason that is the same for the revisions that share it."""
    return reason.replace(f"slime@{revision.short}", "slime").replace(f" at {revision.short}", "")


def rows(options: Options) -> list[Row]:
    """The rules and modes that are asked for."""
    import spec

    wanted = {rule for on in options.levels for rule in rules(options, on)}
    asked = [(rule, mode) for rule in spec.RULES if rule in wanted for mode in options.modes or ()]
    return [(rule, mode) for rule, mode in asked if mode in spec.RULES[rule].modes]


def _rows(report: Report) -> dict[Row, Said]:
    """The worst verdict of each rule and mode on a conforming engine."""
    found: dict[Row, Said] = {}
    for row in rows(report.options):
        results = [r for r in report.results if (r.rule, r.mode) == row and not r.faulty_engine]
        if results:
            worst = min(results, key=lambda r: _WORST.index(r.verdict))
            found[row] = Said(worst.verdict, worst.reason, _broken(report, worst))
        elif row[1] not in report.ready.modes:
            found[row] = Said(ABSENT, report.ready.absent.get(row[1], f"it has no {row[1]} mode"))
        else:
            found[row] = Said(ABSENT, "it has no other mode to compare with")
    return found


def _broken(report: Report, result: Result) -> Broken | None:
    example = result.counterexample
    if example is None:
        return None
    lines = failure.lines(result.rule, report.ready.name, result.mode, result.engine, example.finding, example.history)
    return Broken(example.schedule, tuple(lines))


def only_here(
    where: Path, options: Options, folder: str, here: Revision, there: Revision, row: Row, first: Sequence[Work]
) -> Broken | None:
    """The smallest that was found to break a rule at one revision and not at another. Raises CannotJudge.

    ``first``, then the corpus, then what a check draws.
    """
    with ExitStack() as stack:
        searches = [stack.enter_context(_search(where, options, folder, revision)) for revision in (here, there)]
        key = (*row, False)

        def differs(wanted: Work) -> bool:
            return searches[0].breaks(key, wanted) is not None and searches[1].breaks(key, wanted) is None

        on = options.levels[0]
        known = (entry.work for entry in corpus.load() if level(entry.work) == on)
        found = next(filter(differs, chain(first, known, _drawn(options, on))), None)
        if found is None:
            return None
        found = shrink(found, differs)
        finding, run = searches[0].breaks(key, found), searches[0].history(found, row[1])
        if finding is None or isinstance(run, CannotJudge):
            return None
        name = searches[0].worker.ready.name
        return Broken(found, tuple(failure.lines(row[0], name, row[1], options.engines[0], finding, run)))


@contextmanager
def _search(where: Path, options: Options, folder: str, revision: Revision) -> Iterator[Search]:
    """A search on a revision, for as long as the context lasts."""
    on, engine = options.levels[0], options.engines[0]
    with checkout(where, revision.commit, folder=folder) as tree:
        target = TargetSpec("slime", str(tree.root), tree.revision)
        with Worker(target, engine, options.tokenizer, run_limit_s=options.run_limit_s, level=on) as worker:
            yield Search(worker, options.modes or (), options, engine, on)


def _drawn(options: Options, on: str) -> Iterable[Work]:
    if on == ROLLOUT:
        from harness import scenario_strategies

        return scenario_strategies.drawn(SCENARIOS[options.profile], options.seed)
    from harness import strategies

    return strategies.drawn(PROFILES[options.profile], options.seed)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What stored violations show of a revision, in their order, and the modules that the client asked for."""

    said: tuple[Said, ...]
    modules: Modules


def still_broken(
    where: Path, options: Options, folder: str, revision: Revision, stored: Sequence[tuple[Row, Work]]
) -> Replayed:
    """Runs stored violations on a revision. What fails is run again in a fresh process, as in a check."""
    failures = [Failure(rule, mode, options.engines[0], wanted) for (rule, mode), wanted in stored]
    asked: list[Modules] = []
    try:
        with _within(folder), checkout(where, revision.commit, folder=folder) as tree:
            target = TargetSpec("slime", str(tree.root), tree.revision)
            once = _answers(target, failures, options, asked)
            failed = any(a.answer == again.STILL_FAILS for a in once)
            twice = _answers(target, failures, options, asked) if failed else once
    except CannotJudge as error:
        verdict = ABSENT if error.not_applicable else UNKNOWN
        return Replayed((Said(verdict, _anywhere(str(error), revision)),) * len(stored), None)
    said = tuple(_said(one, two, wanted) for one, two, (_, wanted) in zip(once, twice, stored, strict=True))
    return Replayed(said, union(asked))


def _answers(
    target: TargetSpec, failures: Sequence[Failure], options: Options, asked: list[Modules]
) -> list[again.Answer]:
    files = [(Path(), failure) for failure in failures]
    return again.run(
        target,
        files,
        mode=None,
        engine=None,
        tokenizer=options.tokenizer,
        limit_s=options.run_limit_s,
        asked=asked.append,
    )


def union(modules: Iterable[Modules]) -> Modules:
    """All of them; None, for all that there are, if some are not known."""
    found: set[str] = set()
    for some in modules:
        if some is None:
            return None
        found.update(some)
    return tuple(sorted(found))


def _said(one: again.Answer, two: again.Answer, wanted: Work) -> Said:
    stopped = next((answer for answer in (one, two) if answer.stopped), None)
    if stopped is not None:
        return Said(UNKNOWN, f"on [{wanted}]: {stopped.reason}")
    if one.answer != two.answer:
        return Said(UNKNOWN, f"{FLAKY}: [{wanted}] fails, and in a fresh process it does not")
    if one.answer == again.STILL_FAILS:
        return Said(INVALID, one.reason, Broken(wanted, one.lines))
    return Said(VALID, holds=one.lines) if one.answer == again.FIXED else Said(ABSENT, one.reason)
