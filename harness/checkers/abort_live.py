"""ABORT-LIVE: after an abort the loop is at rest: nothing runs or waits, no permit is held, no task is left."""

from __future__ import annotations

from dataclasses import replace

from harness.checkers import HOLDS, Judgement, RolloutCase
from harness.rollouts import Broke, Ended, Left, Stopped, Straggled, Stuck


def check(case: RolloutCase) -> Judgement:
    judged = False
    for event in case.history.events:
        problem, sample = None, None
        if isinstance(event, Straggled):
            problem, sample = "its request came after the abort, and nothing aborts it", event.sample
        elif isinstance(event, Stuck):
            problem = f"rollout {event.rollout} does not end: {event.why}" + _named(event.tasks)
        elif isinstance(event, Broke) and case.aborting(event) and not event.passed_on and case.lost(event):
            problem, sample = f"is lost: the abort raises {event.error}: {event.message}", case.lost(event)[0]
        elif isinstance(event, Ended | Stopped):
            judged = True
            # Tasks of a loop that goes on may have nothing to do with the engine: a reward that is computed, say.
            left = event.left if isinstance(event, Stopped) else replace(event.left, tasks=())
            problem, sample = _left(left)
        if problem is not None:
            return case.finding(event, problem, sample)
    return HOLDS if judged else None


def _left(left: Left) -> tuple[str | None, int | None]:
    if left.running:
        return "its request still runs", left.running[0]
    if left.tasks:
        tasks = "a task still runs" if len(left.tasks) == 1 else f"{len(left.tasks)} tasks still run"
        return tasks + _named(left.tasks), None
    if left.permits is not None and left.permits[0] != left.permits[1]:
        free, every = left.permits
        return f"{every - free} of {every} permits are not back", None
    return None, None


def _named(tasks: tuple[str, ...]) -> str:
    return ": " + ", ".join(tasks[:4]) + (", ..." if len(tasks) > 4 else "") if tasks else ""
