"""Allowance functions with one fault each, as somebody reported it: what the proof and the properties must refute.

In a module of their own, so that the properties can be run on them where z3 is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

Allowance = Callable[[int, int | None, int, int], int]


def forgets_the_subtraction(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """THUDM/slime#2260."""
    room = budget
    if context is not None:
        room = min(room, context - prompt - kept)
    return max(room, 0)


def charges_the_prompt(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """AReaL#699."""
    return max(budget - prompt - kept, 0)


def forgets_the_context(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """radixark/miles#487."""
    return max(budget - kept, 0)


def asks_for_less_than_nothing(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """vllm-project/vllm#36789: a negative allowance instead of none."""
    return budget - kept


FAULTS: tuple[tuple[Allowance, str], ...] = (
    (forgets_the_subtraction, "BUDGET"),
    (charges_the_prompt, "MAXIMAL"),
    (forgets_the_context, "CONTEXT"),
    (asks_for_less_than_nothing, "EXHAUSTED"),
)
"""Each with the rule that refutes it."""


def takes_the_rest_for_a_default(budget: int, context: int | None, prompt: int, kept: int) -> int:
    """Invented: right but for one number among all, where a resumed sample is taken for one without a budget."""
    room = budget - kept
    if kept > 0 and room == 40_000 + 961:  # a sum, because Hypothesis draws the numbers it reads in the source
        return budget
    if context is not None:
        room = min(room, context - prompt - kept)
    return max(room, 0)
