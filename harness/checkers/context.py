"""CONTEXT: input and max_new_tokens together never exceed C, and neither do prompt and response."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement


def check(case: Case) -> Judgement:
    trace, limit, judged = case.trace, case.trace.context, False
    if limit is None or trace.prompt > limit:
        return None
    for sample, turn in trace.all_turns:
        for exchange in turn.exchanges:
            judged = True
            ids = exchange.request.input_ids
            length = len(ids) if ids is not None else trace.prompt + trace.kept_at(turn, exchange)
            if exchange.asked is not None and length + exchange.asked > limit:
                return Finding(turn.index, f"input {length} + {exchange.asked} > context {limit}", sample)
        after = turn.after
        if after is not None and after.response_length > turn.entry.response_length:
            total = trace.prompt + after.response_length
            if total > limit:
                return Finding(turn.index, f"prompt and response {total} > context {limit}", sample)
    return HOLDS if judged else None
