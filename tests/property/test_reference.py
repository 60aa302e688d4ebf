"""The contract as properties: whatever interrupts the reference, every rule holds, in every mode, on every front.

Sync tests over our own runner: one loop and one HTTP client serve all examples, and no state of
an event loop is shared behind Hypothesis's back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from harness.checkers import RULE_IDS, Case, Finding, checker
from harness.engines import FRONTS
from harness.history import MODES
from harness.runner import Runner
from harness.schedule import Schedule
from harness.strategies import schedules
from harness.targets.function import reference

EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=FRONTS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(reference(), request.param)
    yield made
    made.close()


def broken(runner: Runner, schedule: Schedule) -> list[tuple[str, str, Finding]]:
    """Every rule that the reference breaks on a schedule, with the mode."""
    if not all(runner.can_run(schedule, mode) for mode in MODES):
        return []
    histories = {mode: runner.run(schedule, mode) for mode in MODES}
    found = []
    for mode in MODES:
        case = Case(mode, histories, runner.run(schedule.uninterrupted(), mode))
        for rule in RULE_IDS:
            finding = checker(rule)(case)
            if isinstance(finding, Finding):
                found.append((rule, mode, finding))
    return found


@EXAMPLES
@given(schedule=schedules())
def test_the_reference_keeps_every_rule(runner: Runner, schedule: Schedule) -> None:
    assert broken(runner, schedule) == []


@EXAMPLES
@given(schedule=schedules(faulty=True))
def test_the_reference_keeps_every_rule_on_a_faulty_engine(runner: Runner, schedule: Schedule) -> None:
    assert broken(runner, schedule) == []
