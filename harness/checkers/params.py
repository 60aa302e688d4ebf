"""PARAMS: stop, seed, minimum and maximum reach the wire; the minimum is what remains of it and fits the maximum."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Exchange

PASSED_ON = ("stop", "stop_token_ids", "sampling_seed")


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        for exchange in turn.exchanges:
            judged = True
            kept = trace.kept_at(turn, exchange)
            problem = _problem(exchange, turn.params, trace.schedule.min_new_tokens, kept)
            if problem:
                return Finding(turn.index, problem, sample)
    return HOLDS if judged else None


def _problem(exchange: Exchange, given: object, minimum: int, kept: int) -> str | None:
    wire = exchange.request.params
    assert hasattr(given, "get")
    for name in PASSED_ON:
        value = given.get(name)
        if value is not None and _plain(wire.get(name)) != _plain(value):
            return f"{name} is {value!r}, on the wire {wire.get(name)!r}"
    if "max_new_tokens" not in wire:
        return "max_new_tokens does not reach the wire"
    sent = wire.get("min_new_tokens") or 0
    asked = exchange.asked
    if not isinstance(sent, int) or (asked is not None and not 0 <= sent <= max(asked, 0)):
        return f"min_new_tokens {sent} with max_new_tokens {asked}"
    left = max(0, minimum - kept)
    if asked is not None and sent != min(left, max(asked, 0)):
        return f"{left} remain of the minimum {minimum}, sends {sent}"
    return None


def _plain(value: object) -> object:
    """One stop string and a list of it mean the same."""
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
