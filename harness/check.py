"""The main job: search for schedules on which a target breaks a rule, and shrink what is found.

For every engine front: the regression corpus first, then drawn schedules on a
conforming engine, then some on a faulty one. Each schedule runs in every mode;
every checker judges every run. What fails is shrunk, run again in a fresh
process, and only then called invalid.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain

import spec
from harness import corpus
from harness.checkers import RULE_IDS, Case, Finding, Judgement, checker, halt
from harness.history import INCREMENTAL, PLAIN, STREAM, TERMINAL, Halted, History, Raised, Requested
from harness.isolation import RUN_LIMIT_S, Ready, Worker
from harness.schedule import Schedule
from harness.shrink import shrink, size
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result

PROFILES = {"quick": 30, "ci": 300, "deep": 20_000}
"""Schedules drawn on a conforming engine; a quarter as many again on a faulty one."""

QUICK_BUDGET = 1_000
"""Corpus entries with larger budgets (an issue's own numbers) cost a second and are left to the longer profiles."""

CONFIRMATIONS = 2
"""Times a counterexample must fail again in a fresh process: a client may fail every other time."""

LOOKAHEAD = 4
INTERRUPTED = "interrupted"

MODE_SETS = {"plain": (PLAIN,), "stream": (STREAM,), "incremental": (INCREMENTAL,), "both": (PLAIN, STREAM)}
COMPARES_MODES = ("MODE-EQ", "RETRY")


@dataclass(frozen=True, slots=True)
class Options:
    """What to check. ``modes`` None: all that the target has. ``rules`` empty: all."""

    target: TargetSpec
    engines: tuple[str, ...] = ("inproc",)
    modes: tuple[str, ...] | None = None
    rules: tuple[str, ...] = ()
    profile: str = "ci"
    seed: int = 0
    tokenizer: str | None = None
    run_limit_s: float = RUN_LIMIT_S


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the work stands; ``total`` counts schedules of this phase."""

    engine: str
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a check found."""

    ready: Ready
    options: Options
    results: tuple[Result, ...]
    duration_s: float
    complete: bool = True


def check(options: Options, tell: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Checks the target. Raises CannotJudge or HarnessFault; Ctrl-C gives what is known so far."""
    begin, ready, complete = time.monotonic(), Ready("", (), {}, ()), True
    results: list[Result] = []
    for engine in options.engines:
        try:
            with closing(Worker(options.target, engine, options.tokenizer, run_limit_s=options.run_limit_s)) as worker:
                worker.launch()
                import_module("harness.strategies")  # Hypothesis takes as long to import as most targets
                ready = worker.wait()
                search = _Search(worker, _modes(ready, options.modes), options, engine, tell)
                try:
                    search.run()
                except KeyboardInterrupt:
                    complete = False
                results += search.results(complete)
        except CannotJudge as error:
            if engine == options.engines[-1] and not results:
                raise
            results += _nothing(options, engine, str(error))
        if not complete:
            break
    return Report(ready, options, tuple(results), time.monotonic() - begin, complete)


def faulty_count(profile: str) -> int:
    """Schedules drawn on a faulty engine."""
    return max(PROFILES[profile] // 4, 10)


def _nothing(options: Options, engine: str, reason: str) -> Iterator[Result]:
    """An engine on which the target cannot be judged leaves every rule unknown there."""
    for rule in options.rules or RULE_IDS:
        mode = (options.modes or spec.RULES[rule].modes)[0]
        yield Result(rule, spec.RULES[rule].level, mode, engine, UNKNOWN, 0, f"engine {engine}: {reason}")


def _modes(ready: Ready, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The modes to run. Raises CannotJudge when one that was asked for is absent."""
    has = (*ready.modes, *((INCREMENTAL,) if STREAM in ready.modes else ()))
    if wanted is None:
        return has
    for mode in wanted:
        if mode not in has:
            base = STREAM if mode == INCREMENTAL else mode
            reason = ready.absent.get(base, f"{ready.name} has no {base} mode")
            raise CannotJudge(reason, not_applicable=True)
    return wanted


@dataclass(slots=True)
class _Tally:
    """One rule in one mode on one kind of engine, while schedules run."""

    judged: int = 0
    broken: Schedule | None = None
    reasons: list[str] = field(default_factory=list)


_Key = tuple[str, str, bool]


class _Search:
    """The work on one front."""

    def __init__(
        self, worker: Worker, modes: tuple[str, ...], options: Options, engine: str, tell: Callable[[Progress], None]
    ) -> None:
        from harness.engines import front

        self.worker, self.modes, self.options, self.engine, self.tell = worker, modes, options, engine, tell
        self.cannot = front(engine).cannot
        self.rules = options.rules or RULE_IDS
        self.checkers = {rule: checker(rule) for rule in self.rules}
        self.tallies: dict[_Key, _Tally] = {
            (rule, mode, faulty): _Tally()
            for rule in self.rules
            for mode in modes
            for faulty in (False, True)
            if applies(rule, mode, modes)
        }
        self.found: dict[_Key, Counterexample] = {}
        self.flaky: dict[_Key, str] = {}
        self._histories: dict[tuple[Schedule, str], History | CannotJudge] = {}

    def run(self) -> None:
        known = [
            e.schedule for e in corpus.load() if self.options.profile != "quick" or e.schedule.budget <= QUICK_BUDGET
        ]
        self._observe_all("corpus", known, len(known))
        if not any(
            isinstance(e, Requested) for h in self._histories.values() if isinstance(h, History) for e in h.events
        ):
            raise CannotJudge(self._silent())
        self._explore("drawn", faulty=False)
        self._explore("faulty engine", faulty=True)
        if any(tally.broken is not None for tally in self.tallies.values()):
            fresh = self.worker.twin()
            fresh.launch()  # loads while this one shrinks
            with closing(fresh):
                self._shrink()
                self._confirm(fresh)

    def _silent(self) -> str:
        """Why no request came in, for one line."""
        name = self.worker.ready.name
        for run in self._histories.values():
            if isinstance(run, CannotJudge) and not run.not_applicable:
                return str(run)
        events = [e for run in self._histories.values() if isinstance(run, History) for e in run.events]
        raised = (
            f": {e.error}: {e.message}" for e in events if isinstance(e, Raised) and e.view.status not in TERMINAL
        )
        halted = (f": {e.kind}: {e.message}" for e in events if isinstance(e, Halted))
        said = next(chain(raised, halted), "")
        return f"no request of {name} reached the engine {self.engine}{said}"

    # running and judging

    def _history(self, schedule: Schedule, mode: str) -> History | CannotJudge:
        key = (schedule, mode)
        if key not in self._histories:
            if len(self._histories) > 20_000:
                self._histories.clear()
            try:
                self._histories[key] = self.worker.run(schedule, mode)
            except CannotJudge as error:
                self._histories[key] = error
        return self._histories[key]

    def _cases(
        self, schedule: Schedule, modes: tuple[str, ...], *, baseline: bool
    ) -> Iterator[tuple[str, Case | CannotJudge]]:
        """A mode's case for each mode, or why there is none. ``baseline``: with the uninterrupted run."""
        runs = {mode: self._history(schedule, mode) for mode in modes}
        good = {mode: run for mode, run in runs.items() if isinstance(run, History)}
        for mode, run in runs.items():
            if isinstance(run, CannotJudge):
                yield mode, run
                continue
            unbroken = self._history(schedule.uninterrupted(), mode) if baseline and schedule.attempts else None
            yield mode, Case(mode, good, unbroken if isinstance(unbroken, History) else None)

    def _observe(self, schedule: Schedule) -> None:
        """Runs a schedule in every mode and lets every checker judge it."""
        if self.cannot & set(schedule.kinds):
            return
        for mode, case in self._cases(schedule, self.modes, baseline=self._baseline(schedule)):
            for rule in self.rules:
                tally = self.tallies.get((rule, mode, schedule.faulty_engine))
                if tally is None:
                    continue
                if isinstance(case, CannotJudge):
                    if not case.not_applicable:
                        tally.reasons.append(str(case))
                    continue
                judgement = self.judge(rule, case)
                if isinstance(judgement, str):
                    tally.reasons.append(judgement)
                elif judgement is not None:
                    tally.judged += 1
                if isinstance(judgement, Finding):
                    self._broken(rule, mode, schedule)

    def _broken(self, rule: str, mode: str, schedule: Schedule) -> None:
        """Notes a schedule that breaks a rule. One that also does without the engine's faults is noted without."""
        clean = schedule.on_conforming_engine()
        if schedule.faulty_engine and self._breaks((rule, mode, False), clean) is not None:
            schedule = clean
        tally = self.tallies[rule, mode, schedule.faulty_engine]
        if tally.broken is None or size(schedule) < size(tally.broken):
            tally.broken = schedule

    def judge(self, rule: str, case: Case) -> Judgement | str:
        """What the rule's checker says of one case, or in words why that is unknown."""
        try:
            judgement = self.checkers[rule](case)
        except Exception as crash:
            return f"the checker of {rule} crashed: {type(crash).__name__}: {crash}"[:300]
        stopped = halt(case.history)
        if not isinstance(judgement, Finding) and stopped is not None and stopped.kind != "storm":
            return f"call {stopped.attempt + 1}: {stopped.kind}: {stopped.message}"
        return judgement

    # searching

    def _explore(self, phase: str, *, faulty: bool) -> None:
        from harness.strategies import drawn

        count = faulty_count(self.options.profile) if faulty else PROFILES[self.options.profile]
        self._observe_all(phase, drawn(count, self.options.seed, faulty=faulty), count)

    def _observe_all(self, phase: str, schedules: Iterable[Schedule], total: int) -> None:
        """Observes schedule after schedule; the worker is a few ahead of the checkers."""
        waiting: deque[Schedule] = deque()
        done = 0

        def observe() -> None:
            nonlocal done
            self.tell(Progress(self.engine, phase, done, total))
            self._observe(waiting.popleft())
            done += 1

        for schedule in schedules:
            self._send_ahead(schedule)
            waiting.append(schedule)
            if len(waiting) > LOOKAHEAD:
                observe()
        while waiting:
            observe()

    def _send_ahead(self, schedule: Schedule) -> None:
        if self.cannot & set(schedule.kinds):
            return
        for run in (schedule, *((schedule.uninterrupted(),) if self._baseline(schedule) else ())):
            for mode in self.modes:
                if (run, mode) not in self._histories:
                    self.worker.ahead(run, mode)

    def _baseline(self, schedule: Schedule) -> bool:
        return "RESUME-EQ" in self.rules and bool(schedule.attempts)

    def _breaks(self, key: _Key, schedule: Schedule) -> Finding | None:
        """The finding of a rule on a schedule, if it is broken there."""
        rule, mode, faulty = key
        if self.cannot & set(schedule.kinds) or schedule.faulty_engine != faulty:
            return None
        modes = tuple(dict.fromkeys((self.modes[0], mode))) if rule in COMPARES_MODES else (mode,)
        for ran, case in self._cases(schedule, modes, baseline=rule == "RESUME-EQ"):
            if ran == mode and isinstance(case, Case):
                judgement = self.judge(rule, case)
                return judgement if isinstance(judgement, Finding) else None
        return None

    def _is_broken(self, key: _Key, schedule: Schedule) -> bool:
        return self._breaks(key, schedule) is not None

    def _shrink(self) -> None:
        """Finds each failing rule's smallest schedule; one that fails in several modes serves them all."""
        failing = [key for key, tally in self.tallies.items() if tally.broken is not None and not self._known(key)]
        failing.sort(key=lambda key: key[1] == PLAIN)  # streams first: they retry least, and run fastest
        for number, key in enumerate(failing):
            self.tell(Progress(self.engine, "shrinking", number, len(failing)))
            schedule = self.tallies[key].broken
            assert schedule is not None
            smallest = self._same_fault(key, schedule) or shrink(schedule, partial(self._is_broken, key))
            finding, run = self._breaks(key, smallest), self._history(smallest, key[1])
            if finding is not None and isinstance(run, History):
                self.found[key] = Counterexample(smallest, finding, run)
            else:
                self.flaky[key] = f"flaky: it failed once on [{schedule}] and then did not"

    def _same_fault(self, key: _Key, schedule: Schedule) -> Schedule | None:
        """What the rule was shrunk to in another mode, if it says the same there, here, and here of ``schedule``."""
        mine = self._breaks(key, schedule)
        for (rule, _, faulty), known in self.found.items():
            if mine is not None and (rule, faulty) == (key[0], key[2]):
                here = self._breaks(key, known.schedule)
                if here is not None and _kind(mine) == _kind(here) == _kind(known.finding):
                    return known.schedule
        return None

    def _known(self, key: _Key) -> bool:
        """On a faulty engine nothing is said of a rule that is broken on a conforming one."""
        rule, mode, faulty = key
        return faulty and self.tallies[rule, mode, False].broken is not None

    def _confirm(self, fresh: Worker) -> None:
        """Runs every counterexample again in a fresh process: what does not fail again is flaky, not invalid."""
        fresh.wait()
        self.worker.close()
        self.worker = fresh
        for key, example in list(self.found.items()):
            for _ in range(CONFIRMATIONS):
                self._histories.clear()
                if not self._is_broken(key, example.schedule):
                    del self.found[key]
                    self.flaky[key] = f"flaky: [{example.schedule}] fails, and in a fresh process it does not"
                    break

    # verdicts

    def results(self, complete: bool) -> Iterator[Result]:
        for key, tally in self.tallies.items():
            rule, mode, faulty = key
            if self._known(key):
                continue
            level = spec.RULES[rule].level if not faulty else "SHOULD"
            verdict, reason = VALID, ""
            if key in self.found:
                verdict, reason = INVALID, self.found[key].finding.message
            elif key in self.flaky:
                verdict, reason = UNKNOWN, self.flaky[key]
            elif tally.broken is not None:
                verdict, reason = UNKNOWN, f"interrupted before it was confirmed on [{tally.broken}]"
            elif tally.reasons:
                runs = f" ({len(tally.reasons)} runs)" if len(tally.reasons) > 1 else ""
                verdict, reason = UNKNOWN, tally.reasons[0] + runs
            elif not complete:
                verdict, reason = UNKNOWN, INTERRUPTED
            elif not tally.judged:
                if faulty:
                    continue  # most rules are not touched by the few faults of an engine
                verdict, reason = UNKNOWN, "no schedule put it to the test"
            yield Result(rule, level, mode, self.engine, verdict, tally.judged, reason, self.found.get(key), faulty)


def applies(rule: str, mode: str, modes: tuple[str, ...]) -> bool:
    """Whether a rule can be judged in a mode, given the modes that are run; MODE-EQ needs one to compare with."""
    if mode not in spec.RULES[rule].modes:
        return False
    return rule != "MODE-EQ" or modes.index(mode) > 0


def _kind(finding: Finding) -> str:
    """The finding without its numbers and texts: two of one kind have one cause, as far as can be seen."""
    return re.sub(r"\d+|'[^']*'|\[[^]]*\]", "#", finding.message)
