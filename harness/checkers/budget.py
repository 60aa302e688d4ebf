"""BUDGET: no attempt leaves more than B response tokens, and no request asks for more than B - r."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        for exchange in turn.exchanges:
            judged = True
            left = trace.budget - trace.kept_at(turn, exchange)
            if exchange.asked is None:
                return Finding(turn.index, f"asks without a limit; {max(left, 0)} are left of {trace.budget}", sample)
            if exchange.asked > left:
                may = f"may ask at most {left}" if left > 0 else "may ask nothing"
                return Finding(turn.index, may, sample)
        after = turn.after
        if after is not None and trace.budget < after.response_length > turn.entry.response_length:
            return Finding(turn.index, f"total {after.response_length} > budget {trace.budget}", sample)
    return HOLDS if judged else None
