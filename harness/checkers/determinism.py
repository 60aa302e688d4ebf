"""Whether two runs on a server can be compared: nobody else interrupted them, and the engine said the same.

What a client is to blame for never shows here: only what it sent, word for word, and what came back are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from harness.checkers.resume_eq import close
from harness.checkers.trace import Exchange, Trace

COMPARING = ("RESUME-EQ", "MODE-EQ", "RETRY")
"""The rules that compare runs. RETRY compares how often a client asks."""

UNINTERRUPTED = ("run", "delay")
"""Kinds of attempt that are to come to their end."""


def incomparable(*traces: Trace | None) -> str | None:
    """Why the runs cannot be compared; None if they can."""
    for trace in traces:
        said = None if trace is None else disturbed(trace)
        if said is not None:
            return said
    return differs(*traces)


def disturbed(trace: Trace) -> str | None:
    """Where an answer was cut short, though nothing was to interrupt it: by somebody else, or by the server itself.

    A refusal is none of these: the same request is refused again.
    """
    for _, turn in trace.all_turns:
        for exchange in turn.exchanges:
            if turn.plan.kind not in UNINTERRUPTED and exchange.request.number < turn.plan.times:
                continue
            cut = exchange.finish == "abort" or exchange.fault is not None
            if cut and not exchange.refused:
                what = "abort" if exchange.fault is None else exchange.fault.kind
                return f"call {turn.index + 1}: {what} by somebody else, or by the server itself"
    return None


def differs(*traces: Trace | None) -> str | None:
    """Where the engine went on in two ways after the same tokens; None if it did not."""
    told = [exchange for trace in traces if trace is not None for exchange in _exchanges(trace)]
    for one, two in combinations(told, 2):
        position = _parting(one, two)
        if position is not None:
            return f"the engine is not deterministic: after the same {position} tokens it went on in two ways"
    return None


def _exchanges(trace: Trace) -> Iterator[Exchange]:
    for _, turn in trace.all_turns:
        yield from (e for e in turn.exchanges if e.ids)


def _choosing(exchange: Exchange) -> dict[str, Any]:
    """The parameters by which tokens are chosen."""
    return {name: value for name, value in exchange.request.params.items() if name != "max_new_tokens"}


def _parting(one: Exchange, two: Exchange) -> int | None:
    """How many tokens were alike before the two went apart; None if they did not, or had no common beginning."""
    first, second = one.request.input_ids or (), two.request.input_ids or ()
    if len(first) > len(second):
        return _parting(two, one)
    params = _choosing(one)
    if params != _choosing(two) or one.request.text != two.request.text:
        return None
    if "min_new_tokens" in params and first != second:
        return None  # it counts from where a request begins
    skip = len(second) - len(first)
    if first != second[: len(first)] or one.ids[:skip] != second[len(first) :]:
        return None
    ids = list(zip(one.ids[skip:], two.ids, strict=False))
    apart = next((i for i, (a, b) in enumerate(ids) if a != b), None)
    both = one.request.logprobs and two.request.logprobs
    if apart is None and both and not close(one.logprobs[skip:][: len(ids)], two.logprobs[: len(ids)]):
        apart = 0
    return None if apart is None else len(second) + apart
