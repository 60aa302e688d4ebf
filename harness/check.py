"""The main job: search for schedules on which a target breaks a rule, and shrink what is found.

For every engine front: the regression corpus first, then drawn schedules on a
conforming engine, then some on a faulty one. Each schedule runs in every mode;
every checker judges every run. What fails is shrunk, run again in a fresh
process, and only then called invalid.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING

import spec
from harness import corpus
from harness.checkers import LOOP_RULE_IDS, Finding
from harness.engines import is_url
from harness.events import Progress, Tell, ignore
from harness.history import INCREMENTAL, PLAIN, STREAM, TERMINAL, Delivered, Faulted, Halted, Raised, Requested
from harness.isolation import Ready, Worker
from harness.options import PROFILES, QUICK_BUDGET, ROLLOUT_ENGINE, SCENARIOS, UNTIL_BROKEN, Options, faulty_count
from harness.search import Key, Search, rules
from harness.shrink import shrink
from harness.targets import CannotJudge
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result
from harness.work import ROLLOUT, SAMPLE, Run, Work, level

if TYPE_CHECKING:
    from harness.server import Server

CONFIRMATIONS = 2
"""Times a counterexample must fail again in a fresh process: a client may fail every other time."""

SERVER_TRIES = 4
"""Tries on a server, each of a few runs, of which one must fail again."""

INTERRUPTED = "interrupted"
FLAKY = "flaky"


@dataclass(frozen=True, slots=True)
class Covered:
    """How many schedules were run of how many there were to run, the corpus left out."""

    schedules: int
    of: int

    def __add__(self, other: Covered) -> Covered:
        return Covered(self.schedules + other.schedules, self.of + other.of)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a check found. ``covered``: where the work was spread."""

    ready: Ready
    options: Options
    results: tuple[Result, ...]
    duration_s: float
    complete: bool = True
    covered: Covered | None = None
    skipped: tuple[tuple[str, int], ...] = ()
    """Runs that do not apply to the target, by reason."""
    modules: tuple[str, ...] | None = None
    """The checkout's modules that the target asked for, there or not, where it could tell."""
    servers: tuple[Server, ...] = ()
    """The engines that ran already."""


def check(options: Options, tell: Tell = ignore) -> Report:
    """Checks the target. Raises CannotJudge or HarnessFault; Ctrl-C gives what is known so far."""
    begin, ready, complete = time.monotonic(), Ready("", (), {}, ()), True
    results: list[Result] = []
    covered: list[Covered] = []
    skipped: Counter[str] = Counter()
    modules: set[str] | None = set()
    servers: dict[str, Server] = {}
    places = _places(options)
    for number, (on, engine) in enumerate(places):
        if not complete:
            results += _nothing(options, on, engine, INTERRUPTED)
            continue
        try:
            server = _server(options, engine)
            servers |= {engine: server} if server is not None else {}
            with closing(_worker(options, on, engine)) as worker:
                worker.launch()
                import_module("harness.strategies")  # Hypothesis takes as long to import as most targets
                ready = worker.wait()
                job = _Check(worker, _modes(ready, options, on, server), options, engine, tell, server)
                try:
                    job.run(_until(options, begin, number, len(places)))
                except KeyboardInterrupt:
                    complete = False
                results += job.results(complete)
                covered += [job.covered] if job.covered is not None else []
                skipped += job.search.skipped
                modules = None if modules is None or job.modules is None else modules | job.modules
        except CannotJudge as error:
            if number == len(places) - 1 and not results:
                raise
            where = "whole rollouts" if on == ROLLOUT else f"engine {engine}"
            results += _nothing(options, on, engine, f"{where}: {error}")
            modules = None
    whole = reduce(Covered.__add__, covered) if covered else None
    asked = None if modules is None else tuple(sorted(modules))
    duration_s = time.monotonic() - begin
    left_out, ran = tuple(skipped.items()), tuple(servers.values())
    return Report(ready, options, tuple(results), duration_s, complete, whole, left_out, asked, ran)


def _places(options: Options) -> list[tuple[str, str]]:
    """The levels to judge on, each with an engine; a level without any rule that was asked for is left out."""
    loops = [engine for engine in options.engines if is_url(engine)] or [ROLLOUT_ENGINE]
    places = [(SAMPLE, engine) for engine in options.engines] + [(ROLLOUT, engine) for engine in loops]
    return [(on, engine) for on, engine in places if on in options.levels and rules(options, on)]


def _server(options: Options, engine: str) -> Server | None:
    """The server that runs at an engine's address. Raises CannotJudge."""
    if not is_url(engine):
        return None
    from harness import tokenizer
    from harness.server import NoServer, fitting

    try:
        return fitting(engine, tokenizer.load(options.tokenizer))
    except NoServer as error:
        raise CannotJudge(str(error)) from error


def _worker(options: Options, on: str, engine: str) -> Worker:
    return Worker(options.target, engine, options.tokenizer, run_limit_s=options.run_limit_s, level=on)


def _until(options: Options, begin: float, number: int, places: int) -> float | None:
    """When the ``number``-th place must come to its end: what is left of the time is shared equally."""
    if options.limit_s is None:
        return None
    now = time.monotonic()
    return now + max(begin + options.limit_s - now, 0) / (places - number)


def _nothing(options: Options, on: str, engine: str, reason: str) -> Iterator[Result]:
    """A place where the target is not judged leaves every rule unknown there."""
    for rule in rules(options, on):
        mode = (options.modes or spec.RULES[rule].modes)[0]
        yield Result(rule, spec.RULES[rule].level, mode, engine, UNKNOWN, 0, reason, on=on)


def _modes(ready: Ready, options: Options, on: str, server: Server | None = None) -> tuple[str, ...]:
    """The modes to run. Raises CannotJudge when one that was asked for is absent, or all are.

    To a loop the two kinds of stream are one, so it is run with the usual one unless the other is asked for.
    A server that runs has one of them.
    """
    has = (*ready.modes, *((INCREMENTAL,) if STREAM in ready.modes else ()))
    if server is not None:
        has = tuple(mode for mode in has if mode != server.lacks)
        if server.lacks in (options.modes or ()) and not options.lenient:
            other = INCREMENTAL if server.incremental else STREAM
            raise CannotJudge(f"the server at {server.url} has no {server.lacks} mode: give --mode {other}")
    if options.modes is None:
        return ready.modes if on == ROLLOUT else has
    there = tuple(mode for mode in options.modes if mode in has)
    if there == options.modes or (options.lenient and there):
        return there
    missing = next(mode for mode in options.modes if mode not in has)
    base = STREAM if missing == INCREMENTAL else missing
    reason = ready.absent.get(base, f"{ready.name} has no {base} mode")
    raise CannotJudge(reason, not_applicable=True)


class _Check:
    """The work on one front: the corpus, the search, and what becomes of what it found."""

    def __init__(
        self,
        worker: Worker,
        modes: tuple[str, ...],
        options: Options,
        engine: str,
        tell: Tell,
        server: Server | None = None,
    ) -> None:
        self.server = server
        self.search = Search(worker, modes, options, engine, worker.level)
        self.worker, self.options, self.engine, self.tell = worker, options, engine, tell
        self.covered: Covered | None = None
        self.found: dict[Key, Counterexample] = {}
        self.flaky: dict[Key, str] = {}
        self.modules: set[str] | None = None

    def run(self, until: float | None = None) -> None:
        """Searches, shrinks and confirms. ``until``: the monotonic time at which no new portion is begun."""
        for look in (self._stored, self._known_faults, partial(self._random, until)):
            look()
            if self.options.depth == UNTIL_BROKEN and self._all_broken():
                break
        asked = self.worker.modules()
        self.modules = None if asked is None else set(asked)
        if self._any_broken():
            fresh = self.worker.twin()
            fresh.launch()  # loads while this one shrinks
            with closing(fresh):
                self._shrink()
                self._confirm(fresh)

    def _silent(self) -> str:
        """Why no request came in, for one line."""
        name = self.worker.ready.name
        for run in self.search.histories.values():
            if isinstance(run, CannotJudge) and not run.not_applicable:
                return str(run)
        runs = self.search.histories.values()
        events = [e for run in runs if not isinstance(run, CannotJudge) for e in run.events]
        raised = (
            f": {e.error}: {e.message}" for e in events if isinstance(e, Raised) and e.view.status not in TERMINAL
        )
        halted = (f": {e.kind}: {e.message}" for e in events if isinstance(e, Halted))
        said = next(chain(raised, halted), "")
        return f"no request of {name} reached the engine {self.engine}{said}"

    def _unanswered(self, mode: str, events: Sequence[object]) -> str:
        """That the engine gave no token, for one line: such a client keeps most rules, and is of no use."""
        faults = Counter((e.code, e.message) for e in events if isinstance(e, Faulted))
        why = "".join(f": HTTP {code or 'none'}: {message}" for (code, message), _ in faults.most_common(1))
        return f"no {mode} request of {self.worker.ready.name} got a token from the engine {self.engine}{why}"[:300]

    # searching

    def _stored(self) -> None:
        stored = list(dict.fromkeys(w for _, w in self.options.first if level(w) == self.worker.level))
        if stored:
            self._observe("replay", stored, len(stored))

    def _known_faults(self) -> None:
        entries = (entry.work for entry in corpus.load() if level(entry.work) == self.worker.level)
        known = [w for w in entries if self.options.profile != "quick" or w.budget <= QUICK_BUDGET]
        self._observe("corpus", known, len(known))
        runs = [run for run in self.search.histories.values() if not isinstance(run, CannotJudge)]
        if not any(isinstance(e, Requested) for run in runs for e in run.events):
            raise CannotJudge(self._silent())
        for mode in self.search.modes if not self._any_broken() else ():
            events = [e for run in runs if run.mode == mode for e in run.events]
            asked = any(isinstance(e, Requested) for e in events)
            if asked and not any(isinstance(e, Delivered) and e.ids for e in events):
                raise CannotJudge(self._unanswered(mode, events))

    def _random(self, until: float | None) -> None:
        if self.options.spread:
            self._spread(until)
        elif self.worker.level == ROLLOUT:
            self._draw_scenarios(SCENARIOS[self.options.profile])
        else:
            self._draw("drawn", PROFILES[self.options.profile], faulty=False)
            if self.server is None:  # one that runs is not made to break its contract
                self._draw("faulty engine", faulty_count(self.options.profile), faulty=True)

    def _any_broken(self) -> bool:
        return any(tally.broken is not None for tally in self.search.tallies.values())

    def _all_broken(self) -> bool:
        """Whether each rule is broken in each mode; an engine's own faults do not count."""
        return all(t.broken is not None for (_, _, faulty), t in self.search.tallies.items() if not faulty)

    def _observe(self, phase: str, schedules: Iterable[Work], total: int) -> None:
        if self.server is not None:
            schedules = self._adapted(schedules, self.server)
        self.search.observe_all(schedules, lambda done: self.tell(Progress(self.engine, phase, done, total)))

    def _adapted(self, schedules: Iterable[Work], server: Server) -> Iterator[Work]:
        """Those that the server can take, as it can take them."""
        from harness import tokenizer
        from harness.adapt import adapt

        ids, cannot = tokenizer.load(self.options.tokenizer), self.search.cannot
        given = {stored for _, stored in self.options.first}
        for schedule in schedules:
            made = schedule if schedule in given else adapt(schedule, server, ids)
            if made is not None and not cannot & set(made.kinds):
                yield made

    def _draw(self, phase: str, count: int, *, faulty: bool) -> None:
        from harness.strategies import drawn

        self._observe(phase, drawn(count, self.options.seed, faulty=faulty), count)

    def _draw_scenarios(self, count: int) -> None:
        from harness.scenario_strategies import drawn

        self._observe("whole rollouts", drawn(count, self.options.seed), count)

    def _spread(self, until: float | None) -> None:
        """Has the portions run elsewhere, and adds up what they found."""
        from harness import pool

        plan = pool.plan(self.options, self.worker.level)
        self.covered = covered = Covered(0, plan.schedules)
        self.tell(Progress(self.engine, plan.name, 0, plan.schedules))
        with closing(pool.explore(self.options, self.engine, self.search.modes, plan, until)) as results:
            for count, found in results:
                self.search.add(found)
                self.covered = covered = Covered(covered.schedules + count, plan.schedules)
                self.tell(Progress(self.engine, plan.name, covered.schedules, plan.schedules))

    # what was found

    def _shrink(self) -> None:
        """Finds each failing rule's smallest schedule; one that fails in several modes serves them all."""
        failing = [
            key for key, tally in self.search.tallies.items() if tally.broken is not None and not self._known(key)
        ]
        failing.sort(key=lambda key: key[1] == PLAIN)  # streams first: they retry least, and run fastest
        for number, key in enumerate(failing):
            self.tell(Progress(self.engine, "shrinking", number, len(failing)))
            schedule = self.search.tallies[key].broken
            assert schedule is not None
            smallest = self._smallest(key, schedule)
            finding, run = self.search.breaks(key, smallest), self.search.history(smallest, key[1])
            if finding is not None and not isinstance(run, CannotJudge):
                self.found[key] = Counterexample(smallest, finding, run)
            else:
                self.flaky[key] = f"{FLAKY}: it failed once on [{schedule}] and then did not"

    def _smallest(self, key: Key, schedule: Work) -> Work:
        if (key[0], schedule) in self.options.first:  # it was shrunk when it was found
            return schedule
        return self._same_fault(key, schedule) or shrink(schedule, self._still(key, schedule))

    def _still(self, key: Key, schedule: Work) -> Callable[[Work], bool]:
        """What shrinking must keep: that the rule is broken; of a loop's own rules, that it is broken in that way.

        They have many clauses, and a small crash is not what a late request should shrink to.
        """
        if key[0] not in LOOP_RULE_IDS:
            return lambda simpler: self.search.breaks_steadily(key, simpler) is not None
        found = self.search.breaks(key, schedule)

        def same(simpler: Work) -> bool:
            now = self.search.breaks_steadily(key, simpler)
            return now is not None and found is not None and _kind(now) == _kind(found)

        return same

    def _same_fault(self, key: Key, schedule: Work) -> Work | None:
        """What the rule was shrunk to in another mode, if it says the same there, here, and here of ``schedule``."""
        mine = self.search.breaks(key, schedule)
        for (rule, _, faulty), known in self.found.items():
            if mine is not None and (rule, faulty) == (key[0], key[2]):
                here = self.search.breaks(key, known.schedule)
                if here is not None and _kind(mine) == _kind(here) == _kind(known.finding):
                    return known.schedule
        return None

    def _known(self, key: Key) -> bool:
        """On a faulty engine nothing is said of a rule that is broken on a conforming one."""
        rule, mode, faulty = key
        return faulty and self.search.tallies[rule, mode, False].broken is not None

    def _confirm(self, fresh: Worker) -> None:
        """Runs every counterexample again in a fresh process: what does not fail again is flaky, not invalid."""
        fresh.wait()
        self.worker.close()
        self.worker = self.search.worker = fresh
        for key, example in list(self.found.items()):
            if self._fails_again(key, example.schedule):
                self.found[key] = replace(example, others=tuple(self._in_other_modes(key[1], example.schedule)))
            else:
                del self.found[key]
                self.flaky[key] = f"{FLAKY}: [{example.schedule}] fails, and in a fresh process it does not"

    def _fails_again(self, key: Key, schedule: Work) -> bool:
        """In a fresh process, every time; on a server in one of so many tries, for when it aborts is its own affair."""
        tries = []
        for _ in range(CONFIRMATIONS if self.server is None else SERVER_TRIES):
            self.search.histories.clear()
            tries.append(self._is_broken(key, schedule))
            if tries[-1] == (self.server is not None):
                break
        return tries[-1]

    def _in_other_modes(self, mode: str, schedule: Work) -> Iterator[Run]:
        for other in self.search.modes:
            run = self.search.history(schedule, other)
            if other != mode and not isinstance(run, CannotJudge):
                yield run

    def _is_broken(self, key: Key, schedule: Work) -> bool:
        return self.search.breaks(key, schedule) is not None

    # verdicts

    def results(self, complete: bool) -> Iterator[Result]:
        for key, tally in self.search.tallies.items():
            rule, mode, faulty = key
            if self._known(key):
                continue
            must = spec.RULES[rule].level if not faulty else "SHOULD"
            verdict, reason = VALID, ""
            if key in self.found:
                verdict, reason = INVALID, self.found[key].finding.message
            elif key in self.flaky:
                verdict, reason = UNKNOWN, self.flaky[key]
            elif tally.broken is not None:
                verdict, reason = UNKNOWN, f"interrupted before it was confirmed on [{tally.broken}]"
            elif tally.unknown:
                runs = f" ({tally.unknown} runs)" if tally.unknown > 1 else ""
                verdict, reason = UNKNOWN, tally.reason + runs
            elif not complete:
                verdict, reason = UNKNOWN, INTERRUPTED
            elif self.covered is not None and not self.covered.schedules:
                verdict, reason = UNKNOWN, "the time was over before a schedule was run"
            elif not tally.judged:
                if faulty:
                    continue  # most rules are not touched by the few faults of an engine
                verdict, reason = UNKNOWN, "no schedule put it to the test"
            found, on = self.found.get(key), self.worker.level
            kinds = tuple(sorted(tally.kinds.items()))
            yield Result(rule, must, mode, self.engine, verdict, tally.judged, reason, found, faulty, on, kinds)


def _kind(finding: Finding) -> str:
    """The finding without its numbers and texts: two of one kind have one cause, as far as can be seen."""
    return re.sub(r"\d+|'[^']*'|\[[^]]*\]", "#", finding.message)
