"""MAXIMAL: every request asks for all that the sample may still have, min(B - r, C - P - r)."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        for exchange in turn.exchanges:
            kept = trace.kept_at(turn, exchange)
            room, length = trace.room(kept), trace.prompt + kept
            if trace.in_reserve(kept):
                continue  # item 7: how much is asked in the engine's reserve is not judged
            if exchange.asked is None or room <= 0:
                continue
            judged = True
            fits = room
            if trace.schedule.sglang == "0.5.9" and trace.context == length + room:
                fits = room - 1  # item 7: 0.5.9 refuses input + m = C
            if exchange.asked < fits:
                return Finding(turn.index, f"may ask {room}", sample)
    return HOLDS if judged else None
