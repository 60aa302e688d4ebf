"""RETRY: a deterministic 4xx is not retried; transient faults are, a bounded number of times, alike in all modes.

That a retry appends once and starts from clean state shows in PREFIX and ALIGN.
"""

from __future__ import annotations

from itertools import pairwise

from harness.checkers import HOLDS, Case, Finding, Judgement, halt
from harness.checkers.trace import Exchange, Trace, Turn

BEFORE_ANY_EVENT = ("http", "drop-before")


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        for one, two in pairwise(turn.exchanges):
            if one.fault is not None and one.refused and _same(one, two):
                again = len(turn.exchanges) - 1
                times = f" {again} times" if again > 1 else ""
                return Finding(turn.index, f"HTTP {one.fault.code} is asked again{times}", sample)
        judged = judged or any(e.fault is not None for e in turn.exchanges)
    stop = halt(trace.history)
    if stop is not None and stop.kind == "storm":
        return Finding(stop.attempt, stop.message, stop.sample)
    if stop is None and case.compared is not None:
        finding = _alike(trace, case.compared)
        if finding is not None:
            return finding
    return HOLDS if judged else None


def _same(one: Exchange, two: Exchange) -> bool:
    return one.request.input_ids == two.request.input_ids and one.request.params == two.request.params


def _alike(trace: Trace, other: Trace) -> Finding | None:
    """The first call that meets a fault before any event, from equal states, in both modes."""
    for mine, theirs in zip(trace.turns, other.turns, strict=False):
        if _state(mine) != _state(theirs):
            return None
        here, there = len(mine.exchanges), len(theirs.exchanges)
        if mine.plan.kind in BEFORE_ANY_EVENT and here and there and here != there:
            return Finding(mine.index, f"{here} requests here, {there} in mode {other.history.mode}")
    return None


def _state(turn: Turn) -> tuple[object, ...]:
    return (turn.index, turn.entry.tokens, turn.entry.response_length, turn.live)
