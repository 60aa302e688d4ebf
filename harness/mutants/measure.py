"""Runs mutants as the search of a check would, and counts the schedules until each is found.

Counted are drawn schedules only: a check runs the regression corpus before
them, which holds a schedule for most of these faults, but a new fault is not in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

from harness import pool, scenario_strategies, strategies
from harness.inline import Inline
from harness.mutants import load
from harness.mutants.parts import Mutant
from harness.options import PROFILES, ROLLOUT_ENGINE, SCENARIOS, Options, faulty_count
from harness.search import Search
from harness.targets.spec import TargetSpec
from harness.work import ROLLOUT, Work


@dataclass(frozen=True, slots=True)
class Measured:
    """For each seed, the schedules it took until the mutant's rule had found it in each of its modes; None: missed."""

    mutant: Mutant
    schedules: tuple[int | None, ...]

    @property
    def found(self) -> tuple[int, ...]:
        return tuple(n for n in self.schedules if n is not None)

    @property
    def detected(self) -> bool:
        """In every seed."""
        return bool(self.schedules) and None not in self.schedules

    @property
    def median(self) -> float | None:
        return statistics.median(self.found) if self.found else None

    @property
    def worst(self) -> int | None:
        return max(self.found, default=None)


def detect(mutant: Mutant, schedules: Iterable[Work]) -> dict[str, tuple[int, Work]]:
    """For each mode in which the mutant's own rule finds it: the number of the schedule, from 1, and the schedule."""
    target = TargetSpec("mutant", function=mutant.id)
    found: dict[str, tuple[int, Work]] = {}
    with closing(Inline(target, level=mutant.level)) as worker:
        modes = tuple(dict.fromkeys((*worker.ready.modes, *mutant.modes)))
        search = Search(worker, modes, Options(target, rules=(mutant.rule,)), ROLLOUT_ENGINE, mutant.level)
        for number, schedule in enumerate(schedules, 1):
            for mode in mutant.modes:
                key = (mutant.rule, mode, mutant.faulty_engine)
                if mode not in found and search.breaks(key, schedule) is not None:
                    found[mode] = (number, schedule)
            if len(found) == len(mutant.modes):
                break
    return found


def measure(
    ids: Iterable[str],
    seeds: int = 20,
    profile: str = "ci",
    jobs: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measured]:
    """Each mutant on the schedules that a check with the profile draws, for seeds 0 to ``seeds`` - 1."""
    wanted = tuple(ids)
    found: dict[int, dict[str, int | None]] = {}
    tasks = ((seed, (wanted, seed, profile)) for seed in range(seeds))
    for seed, numbers in pool.spread(of_seed, tasks, jobs):
        found[seed] = numbers
        tell(len(found), seeds)
    mutants = load()
    return [Measured(mutants[i], tuple(found[seed][i] for seed in range(seeds))) for i in wanted]


def of_seed(ids: tuple[str, ...], seed: int, profile: str) -> dict[str, int | None]:
    """One seed's number for each mutant."""
    numbers: dict[str, int | None] = {}
    for mutant in (load()[i] for i in ids):
        found = detect(mutant, drawn(mutant, profile, seed))
        whole = len(found) == len(mutant.modes)
        numbers[mutant.id] = max(number for number, _ in found.values()) if whole else None
    return numbers


def drawn(mutant: Mutant, profile: str, seed: int) -> tuple[Work, ...]:
    """What a check with the profile draws for clients of this kind."""
    return _draw(mutant.level, mutant.faulty_engine, profile, seed)


@lru_cache(maxsize=3)
def _draw(level: str, faulty: bool, profile: str, seed: int) -> tuple[Work, ...]:
    if level == ROLLOUT:
        return tuple(scenario_strategies.drawn(SCENARIOS[profile], seed))
    return tuple(strategies.drawn(faulty_count(profile) if faulty else PROFILES[profile], seed, faulty=faulty))
