"""ALIGN: tokens, response_length, loss mask, logprobs and every other per-token array agree after every attempt."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Trace
from harness.history import SampleView


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    asked: dict[int, bool] = {}  # by sample: whether its requests wanted logprobs so far
    ever: set[int] = set()  # samples one of whose requests wanted them
    for sample, turn in trace.all_turns:
        before = asked.get(sample, turn.entry.logprobs is not None)
        asked[sample] = all(e.request.logprobs for e in turn.exchanges) if turn.exchanges else before
        if any(e.request.logprobs for e in turn.exchanges):
            ever.add(sample)
        if turn.after is None:
            continue
        judged = True
        # A client that never asks for logprobs may leave those from a buffer as they are.
        left = sample not in ever and turn.after.logprobs == turn.entry.logprobs
        problem = _problem(trace, turn.after, asked[sample], left)
        if problem:
            return Finding(turn.index, problem, sample)
    return HOLDS if judged else None


def _problem(trace: Trace, view: SampleView, asked_logprobs: bool, left_logprobs: bool) -> str | None:
    r = view.response_length
    held = len(view.tokens) - trace.prompt if view.tokens else 0
    if held != r:
        return f"response_length {r}, but tokens hold {held} after the prompt"
    if view.loss_mask is not None and len(view.loss_mask) != r:
        return f"response_length {r}, loss mask {len(view.loss_mask)}"
    if view.logprobs is None:
        if r and asked_logprobs and view.has_logprobs:
            return f"response_length {r}, no logprobs"
    elif len(view.logprobs) != r and not left_logprobs:
        return f"response_length {r}, logprobs {len(view.logprobs)}"
    for name, length in view.arrays.items():
        if length != r:
            return f"response_length {r}, {name} {length}"
    return None
