"""Benchmarks: how much of a bare Hypothesis draw's speed is left, and how soon the known fault is found.

``python -m benchmarks.bench`` prints ratios of rates measured in one run, interleaved, the best of three
repetitions. Ratios travel between machines, rates do not; on a busy machine trust the column of CPU time.
``--detect`` counts the schedules that the search needs to find a client that forgets to subtract what it has
(THUDM/slime#2260), for 20 seeds. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.checkers import RULE_IDS, Case, Finding, checker
from harness.history import MODES, PLAIN
from harness.runner import Runner
from harness.schedule import Schedule
from harness.strategies import schedules
from harness.targets import Target
from harness.targets.function import FunctionTarget, reference
from reference_impl.generate import generate
from reference_impl.generate_streaming import generate_streaming

REPETITIONS, SEEDS, GOAL = 3, 20, 50
TARGETS = {"inproc": 0.5, "loopback": 0.35, "aioresponses": None}
Property = Callable[[Schedule], None]
Rate = tuple[float, float]


def drive(examples: int, number: int, property_: Property) -> None:
    """Runs ``property_`` on as many drawn schedules, the same ones for the same ``number``."""

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def search(schedule: Schedule) -> None:
        property_(schedule)

    search()


def rate(examples: int, number: int, property_: Property) -> Rate:
    """Schedules a second of wall clock, and of this process's CPU time."""
    counted = 0

    def count(schedule: Schedule) -> None:
        nonlocal counted
        counted += 1
        property_(schedule)

    began, used = time.perf_counter(), time.process_time()
    drive(examples, number, count)
    return counted / (time.perf_counter() - began), counted / (time.process_time() - used)


def judged(runner: Runner, mode: str, *, baseline: bool) -> Property:
    """One run and all checkers; ``baseline``: also the run that RESUME-EQ compares with."""
    checks = [checker(rule) for rule in RULE_IDS]

    def run(schedule: Schedule) -> None:
        if not runner.can_run(schedule, mode):
            return
        plain = runner.run(schedule.uninterrupted(), mode) if baseline else None
        case = Case(mode, {mode: runner.run(schedule, mode)}, plain)
        for check in checks:
            if isinstance(check(case), Finding):
                raise AssertionError(f"{check.__module__} on {schedule}")

    return run


def bare(schedule: Schedule) -> None:
    """Only the draw."""


def measure(examples: int) -> None:
    best: dict[str, Rate] = {}
    rows = [(front, mode, False) for front in TARGETS for mode in MODES]
    rows += [("inproc", PLAIN, True)]
    for repetition in range(REPETITIONS):
        _keep(best, "draw", rate(examples, repetition, bare))
        for front, mode, baseline in rows:
            runner = Runner(reference(), front)  # fronts patch the client libraries: one at a time
            try:
                found = rate(examples, repetition, judged(runner, mode, baseline=baseline))
            finally:
                runner.close()
            _keep(best, _label(front, mode, baseline), found)
    draw, draw_cpu = best["draw"]
    print(f"{'':34} {'schedules/s':>11} {'ratio':>6} {'of CPU':>6} {'target':>7}")
    print(f"{'bare draw':34} {draw:11.0f} {1:6.2f} {1:6.2f}")
    for front, mode, baseline in rows:
        label = _label(front, mode, baseline)
        wall, cpu = best[label]
        goal = None if baseline else TARGETS[front]
        wanted = f">= {goal}" if goal is not None else ""
        print(f"{label:34} {wall:11.0f} {wall / draw:6.2f} {cpu / draw_cpu:6.2f} {wanted:>7}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    loaded = "with" if "transformers" in sys.modules else "without"
    print(f"peak memory {peak:.0f} MiB, {loaded} transformers")


def _label(front: str, mode: str, baseline: bool) -> str:
    return f"{front} {mode}" + (" + baseline run" if baseline else "")


def _keep(best: dict[str, Rate], label: str, found: Rate) -> None:
    wall, cpu = best.get(label, (0.0, 0.0))
    best[label] = max(wall, found[0]), max(cpu, found[1])


# detection


def forgetful() -> Target:
    """The reference, but the budget is asked for whole at every attempt. THUDM/slime#2260"""

    def forgets(function: Any) -> Any:
        async def call(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            whole = {**params, "max_new_tokens": params["max_new_tokens"] + sample.response_length}
            return await function(args, sample, whole)

        return call

    return FunctionTarget("forgetful", forgets(generate), forgets(generate_streaming))


class Found(Exception):
    """The search is over."""


def detect(examples: int) -> None:
    check = checker("BUDGET")
    needed: list[int | None] = []
    runner = Runner(forgetful())
    try:
        for number in range(SEEDS):
            needed.append(_first(runner, examples, number, lambda case: isinstance(check(case), Finding)))
    finally:
        runner.close()
    hits = [n for n in needed if n is not None]
    print("schedules until BUDGET finds THUDM/slime#2260, by seed:")
    print("  " + " ".join("-" if n is None else str(n) for n in needed))
    if hits:
        print(f"  median {statistics.median(hits):.0f}, worst {max(hits)}, missed {needed.count(None)}")
    within = sum(n <= GOAL for n in hits)
    print(f"  within {GOAL}: {within} of {SEEDS} (goal {SEEDS - 1})")


def _first(runner: Runner, examples: int, number: int, finds: Callable[[Case], bool]) -> int | None:
    """How many schedules the search draws until one shows the fault; None: not within ``examples``."""
    counted, first = 0, None
    mode = MODES[number % len(MODES)]

    def look(schedule: Schedule) -> None:
        nonlocal counted, first
        counted += 1
        if finds(Case(mode, {mode: runner.run(schedule, mode)})):
            first = counted if first is None else first  # Hypothesis runs what it found once more
            raise Found

    try:
        drive(examples, number, look)
    except Found:
        return first
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300, metavar="N", help="schedules a measurement (default 300)")
    parser.add_argument("--detect", action="store_true", help="count schedules until the known fault is found")
    given_ = parser.parse_args()
    if given_.examples < 1:
        parser.error("--examples must be at least 1")
    if given_.detect:
        detect(given_.examples)
    else:
        measure(given_.examples)


if __name__ == "__main__":
    main()
