"""Budget arithmetic: pure functions over token counts.

Signs as in spec/README.md: B the response budget, C the context limit (None:
unknown), P prompt tokens, r response tokens kept so far, m the tokens an
attempt may ask for. THUDM/slime#2260 is what happens without `allowance`.

Proved for all integers, from this file (tests/proof/test_budget.py, docs/proof.md):

    Let r tokens be kept of a budget B, and m = allowance(B, C, P, r). An attempt keeps k tokens with
    0 <= k <= clip(g, m), whatever number g >= 0 the engine delivers. Then

    BUDGET     r <= B implies r + k <= B;  r > B implies k = 0        (so by induction: no attempts exceed B)
    CONTEXT    P + r <= C implies P + r + k <= C
    MAXIMAL    r + m' > B or P + r + m' > C for every m' > m, unless nothing may be asked
    EXHAUSTED  m = 0 exactly when min(B - r, C - P - r) <= 0
    PARAMS     0 <= remaining_minimum(n, r, m) <= m, and it is n - r wherever that fits

The same with C unknown.
"""

from __future__ import annotations


def allowance(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """m = min(B - r, C - P - r), never below 0. 0: the sample is exhausted and nothing may be asked."""
    room = budget - kept
    if context is not None:
        room = min(room, context - prompt - kept)
    return max(room, 0)


def remaining_minimum(minimum: int, kept: int, ask: int) -> int:
    """min_new_tokens for an attempt: what is left of the sample's minimum, within 0 and the ask.

    The engine counts it per request, so a resumed attempt that sent the whole
    minimum again would force tokens (verl#6857), or get HTTP 400 when it exceeds the ask.
    """
    return max(0, min(minimum - kept, ask))


def clip(tokens: int, ask: int) -> int:
    """How many of the delivered tokens may be kept: an engine that sends more than asked is not obeyed."""
    return min(tokens, ask)
