"""How many whole rollouts of the reference are run and judged a second: as a ratio to what draws them.

``python benchmarks/rollouts.py`` prints, for the Hypothesis state machine of up to 20 steps and for drawn
scenarios, runs a second of one process, the ratio to the same draw without a loop, and the rate of two processes.
Rates are the best of three repetitions; on a busy machine trust the column of CPU time. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.checkers import ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import PLAIN, STREAM
from harness.machine import RolloutMachine, machine
from harness.scenario_strategies import MAX_STEPS, SETTINGS, part
from harness.stage import Stage
from harness.targets.reference_loop import ReferenceLoop

REPETITIONS, PROCESSES = 3, 2
Rate = tuple[float, float]


def timed(work: Callable[[int], Any], runs: int) -> Rate:
    """Runs a second of wall clock and of CPU time, the best of some repetitions."""
    best = (0.0, 0.0)
    for _ in range(REPETITIONS):
        began, used = time.perf_counter(), time.process_time()
        work(runs)
        wall, cpu = runs / (time.perf_counter() - began), runs / (time.process_time() - used)
        best = max(best[0], wall), max(best[1], cpu)
    return best


def drive(machine_class: type[RolloutMachine], runs: int) -> None:
    config = settings(
        max_examples=runs,
        stateful_step_count=MAX_STEPS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_class, settings=config)


def bare_machine() -> type[RolloutMachine]:
    """The machine's steps, and nobody who plays them."""

    class Bare(machine(SimpleNamespace(do=lambda step: None), PLAIN)):  # type: ignore[misc]
        @initialize(settings=SETTINGS)
        def begin(self, settings: dict[str, Any]) -> None: ...

    return Bare


def of_machine(mode: str, runs: int) -> Rate:
    with closing(Stage(ReferenceLoop())) as stage:
        return timed(lambda count: drive(machine(stage, mode), count), runs)


def of_scenarios(mode: str, runs: int) -> Rate:
    checks = [rollout_checker(rule) for rule in ROLLOUT_RULE_IDS]
    with closing(Stage(ReferenceLoop())) as stage:

        def work(count: int) -> None:
            for scenario in drawn(count):
                case = RolloutCase(mode, stage.run(scenario, mode))
                if any(isinstance(check(case), Finding) for check in checks):
                    raise AssertionError(str(scenario))

        return timed(work, runs)


def drawn(count: int) -> list[Any]:
    found: list[Any] = []
    number = 0
    while len(found) < count:
        found += part(number, 0)
        number += 1
    return found[:count]


def measure(runs: int) -> None:
    rows: list[tuple[str, Callable[[str, int], Rate], Rate]] = [
        (f"state machine, {MAX_STEPS} steps", of_machine, timed(lambda count: drive(bare_machine(), count), runs)),
        ("drawn scenarios", of_scenarios, timed(drawn, runs)),
    ]
    print(f"{'':34} {'runs/s':>7} {'ratio':>6} {'of CPU':>6} {f'{PROCESSES} processes':>12}")
    with get_context("spawn").Pool(PROCESSES) as pool:
        for label, work, bare in rows:
            print(f"{label + ', bare':34} {bare[0]:7.0f} {1:6.2f} {1:6.2f}")
            for mode in (PLAIN, STREAM):
                wall, cpu = work(mode, runs)
                both = sum(rate for rate, _ in pool.starmap(work, [(mode, runs)] * PROCESSES))
                print(f"{label + ' ' + mode:34} {wall:7.0f} {wall / bare[0]:6.2f} {cpu / bare[1]:6.2f} {both:12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="runs a measurement (default 200)")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    measure(given.runs)


if __name__ == "__main__":
    main()
