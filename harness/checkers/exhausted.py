"""EXHAUSTED: with no room left, a call ends TRUNCATED: no request, no exception, no other change."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Turn, response_ids
from harness.history import ABORTED, TRUNCATED, Raised, SampleView


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        if not turn.live or trace.room(turn.entry.response_length) > 0 or turn.after is None:
            continue
        judged = True
        problem = _problem(turn, turn.after)
        if problem:
            return Finding(turn.index, f"no room is left, {problem}", sample)
    return HOLDS if judged else None


def _problem(turn: Turn, after: SampleView) -> str | None:
    entry = turn.entry
    if turn.exchanges:
        return f"yet asks {turn.exchanges[0].asked}"
    if isinstance(turn.outcome, Raised):
        return f"yet raises {turn.outcome.error}"
    if after.status != TRUNCATED and not (turn.flagged and after.status == ABORTED):
        return f"yet the status is {after.status}"
    if response_ids(after) != response_ids(entry) or after.response_length != entry.response_length:
        return "yet the tokens change"
    if after.response != entry.response or (after.logprobs or ()) != (entry.logprobs or ()):
        return "yet the text or the logprobs change"
    return None
