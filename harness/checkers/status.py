"""STATUS: the status says what the engine said, and terminal statuses never change again."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Exchange, Trace, Turn, response_ids
from harness.history import ABORTED, COMPLETED, FAILED, PENDING, TERMINAL, TRUNCATED, Raised, SampleView

MEANING = {"length": TRUNCATED, "stop": COMPLETED, "abort": ABORTED}


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    left: dict[int, str] = {}  # by sample: its status after the call before
    for sample, turn in trace.all_turns:
        before = left.get(sample)
        if before in TERMINAL and turn.entry.status != before:
            return Finding(turn.index, f"was {before}, and comes back {turn.entry.status}", sample)
        if turn.after is None:
            continue
        left[sample] = turn.after.status
        if turn.live:
            if turn.last is None:
                problem = _unasked(trace, turn)
                if problem is None:
                    continue  # nothing was said: EXHAUSTED's or the flag's affair
            else:
                problem = _spoken(trace, turn, turn.last, turn.after)
        else:
            problem = _absorbed(turn, turn.after)
        judged = True
        if problem:
            return Finding(turn.index, problem, sample)
    return HOLDS if judged else None


def _unasked(trace: Trace, turn: Turn) -> str | None:
    """A sample with room left may not end without a word of the engine, but in its reserve below C (item 7)."""
    view, kept = turn.returned, turn.entry.response_length
    room = trace.room(kept)
    if trace.schedule.samples > 1:
        return None  # a dict that a sibling has lowered is told by NO-ALIAS
    if view is None or view.status not in TERMINAL or room <= 0 or turn.flagged or trace.in_reserve(kept):
        return None
    return f"{view.status} unasked, though {room} tokens may be had"


def _absorbed(turn: Turn, after: SampleView) -> str | None:
    """A finished sample may be handed back or refused, but nothing is asked and nothing changes."""
    if turn.exchanges:
        return f"asks again for a sample that is {turn.entry.status}"
    if after.status != turn.entry.status or after.tokens != turn.entry.tokens:
        return f"changes a sample that is {turn.entry.status}"
    return None


def _spoken(trace: Trace, turn: Turn, last: Exchange, after: SampleView) -> str | None:
    if last.finish is not None and last.status_code is None:
        allowed = _allowed(trace, turn, last, after)
        if after.status in allowed:
            return None
        if isinstance(turn.outcome, Raised):
            if last.fault is not None or turn.plan.kind == "drop-after" or _faulty(turn):
                return None
            if trace.in_reserve(trace.kept_at(turn, last)):  # item 7: an abort there may bring what is no answer
                return None
            if turn.flagged:  # item 9: the end need not have been read, and a client may raise without one
                return None
            return f"finish_reason {last.finish}, yet raises {turn.outcome.error}"
        return f"finish_reason {last.finish}, status {after.status}"
    if isinstance(turn.outcome, Raised):
        return None
    if after.status in (PENDING, COMPLETED):
        return f"no terminal event, status {after.status}"
    if after.status == TRUNCATED and not _full(trace, after) and not _too_long(last):
        return "no terminal event, status truncated"
    return None


def _allowed(trace: Trace, turn: Turn, last: Exchange, after: SampleView) -> set[str]:
    assert last.finish is not None
    allowed = {MEANING.get(last.finish, ABORTED)}
    kept = response_ids(after)
    on_stop = (trace.history.eos,) in (kept[-1:], last.ids[-1:])  # item 6: the client may have dropped it
    if last.finish == "abort":  # items 1 and 2
        allowed |= {COMPLETED} if on_stop else set()
        allowed |= {TRUNCATED} if _full(trace, after) else set()
    if last.finish == "length" and on_stop:  # 0.5.9 says length for a stop token at the budget
        allowed.add(COMPLETED)
    partial = len(kept) < trace.kept_at(turn, last) + len(last.ids)
    if turn.flagged and partial:  # item 9: the terminal event need not have been read
        allowed.add(ABORTED)
    if _faulty(turn):  # items 10 and the faulty engine: the answer may be refused as a whole
        allowed |= {TRUNCATED, FAILED, ABORTED}
    return allowed


def _faulty(turn: Turn) -> bool:
    return turn.plan.kind in ("missing", "over-deliver", "lost-ids")


def _full(trace: Trace, view: SampleView) -> bool:
    return trace.room(view.response_length) <= 0


def _too_long(last: Exchange) -> bool:
    fault = last.fault
    return fault is not None and ("context length" in fault.message or "maximum allowed length" in fault.message)
