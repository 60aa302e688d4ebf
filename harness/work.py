"""What is run and what comes of it, for one sample and for whole rollouts alike.

A `Work` is a `Schedule` or a `Scenario`, a `Run` the history of one. In JSON each
says by its key which it is, so that a failure file or a worker can hold either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import history, rollouts, scenario, schedule
from harness.history import History
from harness.rollouts import RolloutHistory
from harness.scenario import Scenario
from harness.schedule import Schedule, ScheduleError

SAMPLE, ROLLOUT = "sample", "rollout"
LEVELS = (SAMPLE, ROLLOUT)
"""What a rule is judged on."""

Work = Schedule | Scenario
Run = History | RolloutHistory


def level(work: Work) -> str:
    return ROLLOUT if isinstance(work, Scenario) else SAMPLE


def to_json(work: Work) -> dict[str, Any]:
    """``{"schedule": ...}`` or ``{"scenario": ...}``."""
    if isinstance(work, Scenario):
        return {"scenario": scenario.to_json(work)}
    return {"schedule": schedule.to_json(work)}


def from_json(data: Mapping[str, Any]) -> Work:
    """The schedule or scenario that the data holds; other keys are not looked at. Raises ScheduleError."""
    if "scenario" in data:
        return scenario.from_json(data["scenario"])
    if "schedule" in data:
        return schedule.from_json(data["schedule"])
    raise ScheduleError("it holds neither a schedule nor a scenario")


def run_to_json(run: Run) -> dict[str, Any]:
    """``{"history": ...}`` or ``{"rollouts": ...}``."""
    if isinstance(run, RolloutHistory):
        return {"rollouts": rollouts.to_json(run)}
    return {"history": history.to_json(run)}


def run_from_json(data: Mapping[str, Any]) -> Run:
    """The inverse of `run_to_json`."""
    if "rollouts" in data:
        return rollouts.from_json(data["rollouts"])
    return history.from_json(data["history"])
