"""Rules of single samples, judged on every sample of whole rollouts.

A sample's calls are taken out of the loop's history and judged like those of a
schedule. B is the budget that the rollout was called with, not what the loop
passed on to generate: a loop may not share or shrink it (verl#5430).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.checkers import HOLDS, Case, Checker, Finding, Judgement, RolloutCase
from harness.history import Called, Delivered, Event, Faulted, Flagged, History, Raised, Requested, Returned
from harness.rollouts import Began, Restarted, RolloutHistory
from harness.schedule import Schedule

_CALL = (Called, Requested, Delivered, Faulted, Flagged, Returned, Raised)


@dataclass(frozen=True, slots=True)
class Life:
    """One sample's calls under one budget. ``first`` is the number of the first of them."""

    sample: int
    first: int
    history: History


def check(rule: Checker, case: RolloutCase) -> Judgement:
    """What a rule of single samples says of all of them; the first finding counts."""
    judged = False
    for life in case.lives:
        judgement = rule(Case(case.mode, {case.mode: life.history}))
        if isinstance(judgement, Finding):
            attempt = None if judgement.attempt is None else judgement.attempt + life.first
            return Finding(attempt, judgement.message, life.sample, case.rollout_of(life.sample, attempt))
        judged = judged or judgement is HOLDS
    return HOLDS if judged else None


def lives(history: RolloutHistory, samples: frozenset[int] | None = None) -> Iterator[Life]:
    """Every sample's calls, or those of ``samples``.

    A new life begins where the budget changes or another process does not know the sample.
    """
    budget, events = history.scenario.budget, dict[int, list[Event]]()
    budgets: dict[int, int] = {}
    for event in history.events:
        if isinstance(event, Began):
            budget = event.budget
        elif isinstance(event, Restarted):
            known = {member.sample for group in event.after for member in group}
            for sample in [s for s in events if s not in known]:
                yield _life(history, sample, budgets.pop(sample), events.pop(sample))
        elif isinstance(event, _CALL) and (samples is None or event.sample in samples):
            if isinstance(event, Called) and budgets.get(event.sample, budget) != budget:
                yield _life(history, event.sample, budgets[event.sample], events.pop(event.sample))
            if isinstance(event, Called):
                budgets[event.sample] = budget
            if event.sample in budgets:
                events.setdefault(event.sample, []).append(event)
    for sample, own in events.items():
        yield _life(history, sample, budgets[sample], own)


def _life(history: RolloutHistory, sample: int, budget: int, events: list[Event]) -> Life:
    first = events[0].attempt
    renumbered = tuple(replace(e, attempt=e.attempt - first, sample=0) for e in events)
    schedule = Schedule(budget=budget)
    own = History(schedule, history.mode, history.prompts.get(sample, ()), history.eos, renumbered)
    return Life(sample, first, own)
