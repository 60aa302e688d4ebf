"""MODE-EQ: plain replies and both kinds of stream give the same sample for the same engine.

Compared after every attempt where only the engine interrupts, by the final
sample where the transport does (spec/README.md, item 3).
"""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement, halt
from harness.checkers.resume_eq import difference, final, left_to_others, went_past_stop
from harness.checkers.trace import Trace
from harness.history import FAILED, Raised, Returned
from harness.schedule import TRANSPORT


def check(case: Case) -> Judgement:
    trace, other = case.trace, case.compared
    if other is None or halt(trace.history) or halt(other.history):
        return None
    if left_to_others(trace.schedule):
        return None
    name = f"mode {other.history.mode}"
    if not TRANSPORT & set(trace.schedule.kinds):
        return _every_attempt(trace, other, name)
    if trace.schedule.min_new_tokens or trace.near_limit() or other.near_limit():
        return None  # as RESUME-EQ: one mode resumes where the other begins again
    if went_past_stop(trace) or went_past_stop(other):
        return None
    after, expected = final(trace), final(other)
    if after is None or expected is None or FAILED in (after.view.status, expected.view.status):
        return None
    problem = difference(after, expected)
    return Finding(None, f"{name}: {problem}") if problem else HOLDS


def _every_attempt(trace: Trace, other: Trace, name: str) -> Judgement:
    for mine, theirs in zip(trace.turns, other.turns, strict=False):
        if not isinstance(mine.outcome, Returned | Raised) or not isinstance(theirs.outcome, Returned | Raised):
            return None
        problem = difference(mine.outcome, theirs.outcome)
        if problem:
            return Finding(mine.index, f"{name}: {problem}")
    if len(trace.turns) != len(other.turns):
        return Finding(None, f"{name}: {len(other.turns)} calls, here {len(trace.turns)}")
    return HOLDS
