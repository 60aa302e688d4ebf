"""Runs schedules on a target in every mode, lets every checker judge each run, and keeps count."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import spec
from harness import work
from harness.adapt import LOOPS_CANNOT
from harness.checkers import (
    ROLLOUT_RULE_IDS,
    RULE_IDS,
    Case,
    Finding,
    Judgement,
    RolloutCase,
    checker,
    halt,
    rollout_checker,
)
from harness.checkers.determinism import COMPARING, disturbed, incomparable
from harness.checkers.resume_eq import comparable
from harness.checkers.trace import Trace
from harness.history import PLAIN, History
from harness.isolation import Ready
from harness.options import Options
from harness.rollouts import RolloutHistory
from harness.scenario import Scenario
from harness.schedule import Schedule
from harness.shrink import size
from harness.targets import CannotJudge
from harness.work import ROLLOUT, SAMPLE, Run, Work

LOOKAHEAD = 4
RETRIES = 3
"""Times that a server is asked again, when a schedule does not break a rule on it as it did before."""

MAX_FAILED = 3
"""Runs in a row that a server may fail, each of them twice."""

STEADY = 4
"""Times in a row that a simpler schedule must break a rule on a server. Shrinking tries so many that it would
otherwise end at one that breaks it by luck, which then cannot be confirmed."""

MAX_HISTORIES = 20_000
COMPARES_MODES = ("MODE-EQ", "RETRY")

ROW = ("rule", "mode", "faulty", "judged", "broken", "unknown", "reason", "kinds")
"""What `to_json` writes of a tally."""

Key = tuple[str, str, bool]
"""Rule, mode, and whether the engine breaks its own contract."""


class Runs(Protocol):
    """What runs schedules: a `harness.isolation.Worker`, or a `harness.inline.Inline`."""

    ready: Ready

    def ahead(self, wanted: Work, mode: str) -> None: ...

    def run(self, wanted: Work, mode: str) -> Run: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Tally:
    """One rule in one mode on one kind of engine, while schedules run.

    ``judged`` schedules put it to the test, ``broken`` is the smallest that
    broke it; ``unknown`` runs could not be judged, ``reason`` is the first one's.
    ``kinds`` counts the schedules that put it to the test by what interrupts them.
    """

    judged: int = 0
    broken: Work | None = None
    unknown: int = 0
    reason: str = ""
    kinds: Counter[str] = field(default_factory=Counter)

    def judges(self, schedule: Work) -> None:
        self.judged += 1
        self.kinds.update(set(schedule.kinds))

    def cannot(self, reason: str, runs: int = 1) -> None:
        self.reason = self.reason or reason
        self.unknown += runs

    def breaks(self, schedule: Work) -> None:
        if self.broken is None or _rank(schedule) < _rank(self.broken):
            self.broken = schedule


def _rank(schedule: Work) -> tuple[bool, tuple[int, ...]]:
    """The smallest; where everybody's loop breaks, that goes before what only lists of samples break."""
    return isinstance(schedule, Scenario) and schedule.fan_out, size(schedule)


def to_json(tallies: dict[Key, Tally]) -> list[Any]:
    """The tallies that say something, as JSON data."""
    return [
        [*key, t.judged, None if t.broken is None else work.to_json(t.broken), t.unknown, t.reason, dict(t.kinds)]
        for key, t in tallies.items()
        if t != Tally()
    ]


class Search:
    """The runs of one target behind one front on one level, and what they showed."""

    def __init__(
        self, worker: Runs, modes: tuple[str, ...], options: Options, engine: str, level: str = SAMPLE
    ) -> None:
        from harness.engines import front

        self.worker, self.modes, self.options, self.engine = worker, modes, options, engine
        carrier = front(engine)
        self.greedy = carrier.greedy
        self.cannot = LOOPS_CANNOT if self.greedy and level == ROLLOUT else carrier.cannot
        self.level, self.rules = level, rules(options, level)
        make: Callable[[str], Any] = rollout_checker if level == ROLLOUT else checker
        self.checkers = {rule: make(rule) for rule in self.rules}
        self.tallies: dict[Key, Tally] = {}
        self.clear()
        self.histories: dict[tuple[Work, str], Run | CannotJudge] = {}
        self.failed = 0
        """Runs in a row that the server has failed."""
        self.skipped: Counter[str] = Counter()
        """Runs that do not apply to the target, by reason."""

    def clear(self) -> None:
        """Counts from nothing again."""
        self.tallies = {
            (rule, mode, faulty): Tally()
            for rule in self.rules
            for mode in self.modes
            for faulty in ((False, True) if self.level == SAMPLE and not self.greedy else (False,))
            if applies(rule, mode, self.modes)
        }

    def add(self, found: list[Any]) -> None:
        """Adds the tallies of another search, as `to_json` gives them."""
        for rule, mode, faulty, judged, broken, unknown, reason, kinds in found:
            tally = self.tallies[rule, mode, faulty]
            tally.judged += judged
            tally.kinds.update(kinds)
            if broken is not None:
                tally.breaks(work.from_json(broken))
            if unknown:
                tally.cannot(reason, unknown)

    # running

    def observe_all(self, among: Iterable[Work], tell: Callable[[int], None] = lambda done: None) -> int:
        """Observes schedule after schedule, the worker a few ahead of the checkers. Returns how many."""
        waiting: deque[Work] = deque()
        done = 0

        def observe() -> None:
            nonlocal done
            tell(done)
            self.observe(waiting.popleft())
            done += 1

        for schedule in among:
            self._send_ahead(schedule)
            waiting.append(schedule)
            if len(waiting) > LOOKAHEAD:
                observe()
        while waiting:
            observe()
        return done

    def _send_ahead(self, schedule: Work) -> None:
        if self.cannot & set(schedule.kinds):
            return
        for run in (schedule, *((schedule.uninterrupted(),) if self._baseline(schedule) else ())):
            for mode in self.modes:
                wanted = as_run(run, mode)
                if (wanted, mode) not in self.histories:
                    self.worker.ahead(wanted, mode)

    def _baseline(self, schedule: Work) -> bool:
        return "RESUME-EQ" in self.rules and isinstance(schedule, Schedule) and comparable(schedule)

    def history(self, schedule: Work, mode: str) -> Run | CannotJudge:
        """The run of a schedule, or why there is none. Raises CannotJudge where a server is gone."""
        wanted = as_run(schedule, mode)
        key = (wanted, mode)
        if key not in self.histories:
            if len(self.histories) > MAX_HISTORIES:
                self.histories.clear()
            self.histories[key] = self._on_the_server(wanted, mode) if self.greedy else self._run(wanted, mode)
        return self.histories[key]

    def _on_the_server(self, wanted: Work, mode: str) -> Run | CannotJudge:
        """A run that the server neither failed nor others disturbed, if there is one in a few tries."""
        run = self._run(wanted, mode)
        if isinstance(run, CannotJudge) and not run.not_applicable:
            self._see_that_it_is_there()
            run = self._run(wanted, mode)  # it was a hiccup
            self.failed += isinstance(run, CannotJudge)
            if isinstance(run, CannotJudge) and self.failed >= MAX_FAILED:
                raise run
        elif not isinstance(run, CannotJudge) and halt(run):
            self._see_that_it_is_there()
        if not isinstance(run, CannotJudge):
            self.failed = 0
        for _ in range(RETRIES):
            if not isinstance(run, History) or not disturbed(Trace(run)):
                break
            run = self._run(wanted, mode)
        return run

    def _run(self, wanted: Work, mode: str) -> Run | CannotJudge:
        try:
            return self.worker.run(wanted, mode)
        except CannotJudge as error:
            return error

    def _see_that_it_is_there(self) -> None:
        """A server that is gone answers no schedule more, and each as late as it can. Raises CannotJudge."""
        from harness.server import NoServer, describe

        try:
            describe(self.engine)
        except NoServer as error:
            raise CannotJudge(str(error)) from error

    def _cases(
        self, schedule: Work, modes: tuple[str, ...], *, baseline: bool
    ) -> Iterator[tuple[str, Case | RolloutCase | CannotJudge]]:
        """A mode's case for each mode, or why there is none. ``baseline``: with the uninterrupted run."""
        runs = {mode: self.history(schedule, mode) for mode in modes}
        good = {mode: run for mode, run in runs.items() if isinstance(run, History)}
        for mode, run in runs.items():
            if isinstance(run, CannotJudge):
                yield mode, run
                continue
            if isinstance(run, RolloutHistory):
                yield mode, RolloutCase(mode, run)
                continue
            unbroken = self.history(schedule.uninterrupted(), mode) if baseline else None
            yield mode, Case(mode, good, unbroken if isinstance(unbroken, History) else None)

    # judging

    def observe(self, schedule: Work) -> None:
        """Runs a schedule in every mode and lets every checker judge it."""
        if self.cannot & set(schedule.kinds):
            return
        for mode, case in self._cases(schedule, self.modes, baseline=self._baseline(schedule)):
            if isinstance(case, CannotJudge) and case.not_applicable:
                self.skipped[str(case)] += 1
            for rule in self.rules:
                tally = self.tallies.get((rule, mode, schedule.faulty_engine))
                if tally is None:
                    continue
                if isinstance(case, CannotJudge):
                    if not case.not_applicable:
                        tally.cannot(str(case))
                    continue
                judgement = self.judge(rule, case)
                if isinstance(judgement, str):
                    tally.cannot(judgement)
                elif judgement is not None:
                    tally.judges(schedule)
                if isinstance(judgement, Finding):
                    self._broken(rule, mode, schedule)

    def _broken(self, rule: str, mode: str, schedule: Work) -> None:
        """Notes a schedule that breaks a rule. One that also does without the engine's faults is noted without."""
        clean = schedule.on_conforming_engine()
        if schedule.faulty_engine and self.breaks((rule, mode, False), clean) is not None:
            schedule = clean
        self.tallies[rule, mode, schedule.faulty_engine].breaks(schedule)

    def judge(self, rule: str, case: Case | RolloutCase) -> Judgement | str:
        """What the rule's checker says of one case, or in words why that is unknown."""
        try:
            judgement: Judgement = self.checkers[rule](case)
        except Exception as crash:
            return f"the checker of {rule} crashed: {type(crash).__name__}: {crash}"[:300]
        if self.greedy and isinstance(judgement, Finding) and rule in COMPARING and isinstance(case, Case):
            unlike = incomparable(case.trace, case.baseline, case.compared)
            if unlike is not None:
                return unlike
        stopped = halt(case.history)
        if not isinstance(judgement, Finding) and stopped is not None and stopped.kind != "storm":
            return f"call {stopped.attempt + 1}: {stopped.kind}: {stopped.message}"
        return judgement

    def breaks(self, key: Key, schedule: Work) -> Finding | None:
        """The finding of a rule on a schedule, if it is broken there.

        On a server once is enough: when an abort is heard is not the client's doing, what it then asks is.
        """
        found = self._breaks(key, schedule)
        for _ in range(RETRIES if self.greedy else 0):
            if found is None and not self._unfit(key, schedule):
                self.forget(schedule)
                found = self._breaks(key, schedule)
        return found

    def breaks_steadily(self, key: Key, schedule: Work) -> Finding | None:
        """The finding of a rule on a schedule that breaks it every time, of which the mock needs to show one."""
        found = self._breaks(key, schedule)
        for _ in range(STEADY - 1 if self.greedy else 0):
            if found is not None:
                self.forget(schedule)
                found = self._breaks(key, schedule)
        return found

    def forget(self, schedule: Work) -> None:
        """The next run of it is another one."""
        for mode in self.modes:
            self.histories.pop((as_run(schedule, mode), mode), None)

    def _unfit(self, key: Key, schedule: Work) -> bool:
        """Whether the schedule cannot be run here, or not for the kind of engine that is meant."""
        return bool(self.cannot & set(schedule.kinds)) or schedule.faulty_engine != key[2]

    def _breaks(self, key: Key, schedule: Work) -> Finding | None:
        rule, mode, _ = key
        if self._unfit(key, schedule):
            return None
        modes = modes_for(rule, mode, self.modes[0])
        for ran, case in self._cases(schedule, modes, baseline=rule == "RESUME-EQ" and self._baseline(schedule)):
            if ran == mode and not isinstance(case, CannotJudge):
                judgement = self.judge(rule, case)
                return judgement if isinstance(judgement, Finding) else None
        return None


def rules(options: Options, level: str) -> tuple[str, ...]:
    """The rules to judge on a level: those asked for that can be judged there."""
    every = ROLLOUT_RULE_IDS if level == ROLLOUT else RULE_IDS
    return tuple(rule for rule in every if not options.rules or rule in options.rules)


def modes_for(rule: str, mode: str, first: str = PLAIN) -> tuple[str, ...]:
    """The modes to run a schedule in so that a rule can be judged in one of them."""
    return tuple(dict.fromkeys((first, mode))) if rule in COMPARES_MODES else (mode,)


def as_run(schedule: Work, mode: str) -> Work:
    """The schedule without what makes no difference in the mode: a plain reply has no events, and is run once."""
    return schedule.in_one_piece() if mode == PLAIN else schedule


def applies(rule: str, mode: str, modes: tuple[str, ...]) -> bool:
    """Whether a rule can be judged in a mode, given the modes that are run; MODE-EQ needs one to compare with."""
    if mode not in spec.RULES[rule].modes:
        return False
    return rule != "MODE-EQ" or modes.index(mode) > 0
