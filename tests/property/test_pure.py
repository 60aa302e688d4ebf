"""The pure parts as properties, with so few paths that symbolic execution can see them all.

Drawn by Hypothesis in the ordinary run; `tox -e crosshair` has CrossHair look for the values, and
wants every path seen. docs/proof.md says what either shows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness.schedule import MAX_LENGTH, Attempt, Schedule, from_json, to_json
from harness.shrink import size
from reference_impl import budget
from reference_impl.generate_streaming import Stream
from tests.proof.faults import FAULTS, Allowance, takes_the_rest_for_a_default

SYMBOLIC = settings().backend == "crosshair"
EXAMPLES = settings() if SYMBOLIC else settings(max_examples=200, deadline=None, derandomize=True)
UNTIL_REFUTED = settings(EXAMPLES, phases=[Phase.generate], max_examples=1000)

# Drawn numbers must be near each other to meet at a limit; a solver finds where they meet.
COUNTS = st.integers(0, None if SYMBOLIC else 9)
LENGTHS = st.integers(0, MAX_LENGTH)


def confirmed(check: Callable[[], None]) -> None:
    """Runs a property; under CrossHair it must also have seen every path, or it showed no more than drawing does."""
    if not SYMBOLIC:
        return check()
    from tests.proof.crosshair import Provider

    before = Provider.confirmed
    check()
    assert Provider.confirmed == before + 1, "CrossHair did not see every path"


# B, C, P and r of an attempt; what its engine delivers, or the sample's minimum.


def keeps_budget(ask: int, limit: int, context: int | None, prompt: int, kept: int, delivered: int) -> None:
    keeps = budget.clip(delivered, ask)
    assert kept + keeps <= limit if kept <= limit else keeps <= 0


def keeps_context(ask: int, limit: int, context: int | None, prompt: int, kept: int, delivered: int) -> None:
    if context is not None and prompt + kept <= context:
        assert prompt + kept + budget.clip(delivered, ask) <= context


def is_maximal(ask: int, limit: int, context: int | None, prompt: int, kept: int, delivered: int) -> None:
    if ask > 0:
        assert kept + ask + 1 > limit or (context is not None and prompt + kept + ask + 1 > context)


def is_nothing_when_exhausted(
    ask: int, limit: int, context: int | None, prompt: int, kept: int, delivered: int
) -> None:
    assert (ask == 0) == (kept >= limit or (context is not None and prompt + kept >= context))


def leaves_the_minimum(ask: int, limit: int, context: int | None, prompt: int, kept: int, minimum: int) -> None:
    if ask >= 0:
        left = budget.remaining_minimum(minimum, kept, ask)
        assert 0 <= left <= ask
        assert left == minimum - kept or not 0 <= minimum - kept <= ask


RULES: dict[str, Callable[[int, int, int | None, int, int, int], None]] = {
    "BUDGET": keeps_budget,
    "CONTEXT": keeps_context,
    "MAXIMAL": is_maximal,
    "EXHAUSTED": is_nothing_when_exhausted,
    "PARAMS": leaves_the_minimum,
}


def holds(rule: str, allowance: Allowance, *, known: bool = True, config: settings = EXAMPLES) -> None:
    """What an allowance function says keeps the rule, whatever the sizes; ``known``: C is."""

    @config
    @given(COUNTS, COUNTS if known else st.none(), COUNTS, COUNTS, COUNTS)
    def check(limit: int, context: int | None, prompt: int, kept: int, other: int) -> None:
        RULES[rule](allowance(limit, context, prompt, kept), limit, context, prompt, kept, other)

    check()


@pytest.mark.parametrize("known", [True, False], ids=["C known", "C unknown"])
@pytest.mark.parametrize("rule", RULES)
def test_the_arithmetic_keeps_the_rule(rule: str, known: bool) -> None:
    """[BUDGET] [CONTEXT] [MAXIMAL] [EXHAUSTED] [PARAMS]"""
    confirmed(lambda: holds(rule, budget.allowance, known=known))


@pytest.mark.parametrize(("fault", "rule"), FAULTS)
def test_a_planted_fault_is_refuted(fault: Allowance, rule: str) -> None:
    """[BUDGET] [CONTEXT] [MAXIMAL] [EXHAUSTED] The properties bite, whatever chooses the numbers."""
    with pytest.raises(AssertionError):
        holds(rule, fault, config=UNTIL_REFUTED)


@pytest.mark.skipif(not SYMBOLIC, reason="drawing does not find it; tox -e crosshair does")
def test_a_fault_at_one_number_of_all_is_refuted() -> None:
    """[BUDGET] What the symbolic run is for."""
    with pytest.raises(AssertionError):
        holds("BUDGET", takes_the_rest_for_a_default, config=UNTIL_REFUTED)


@pytest.mark.skipif(not SYMBOLIC, reason="about CrossHair")
def test_more_paths_than_were_seen_are_no_confirmation() -> None:
    @settings(max_examples=10)
    @given(COUNTS, COUNTS, COUNTS, COUNTS)
    def sixteen_paths(a: int, b: int, c: int, d: int) -> None:
        assert sum(1 for n in (a, b, c, d) if n > 5) <= 4

    with pytest.raises(AssertionError, match="every path"):
        confirmed(sixteen_paths)


def event(tokens: list[int], total: int) -> dict[str, Any]:
    """An engine's event; a token's log probability is its id, so that a mix-up shows."""
    return {"meta_info": {"output_token_logprobs": [[t, t, None] for t in tokens], "completion_tokens": total}}


@EXAMPLES
@given(COUNTS, COUNTS, COUNTS, st.integers(0, 3), st.integers(0, 3))
def cut_anywhere(first: int, second: int, third: int, one: int, two: int) -> None:
    tokens, whole, parts = [first, second, third], Stream(), Stream()
    ends = [0, min(one, two), max(one, two), 3]  # an event may bring nothing
    for start, end in pairwise(ends):
        whole.add(event(tokens[:end], end))
        parts.add(event(tokens[start:end], end))
    assert whole.tokens == parts.tokens == tokens
    assert whole.log_probs == parts.log_probs == tokens


def test_MODE_EQ_however_a_stream_is_cut() -> None:
    """Three tokens in three events: whether an event repeats what came before or not, the result is the same."""
    confirmed(cut_anywhere)


@EXAMPLES
@given(st.sampled_from(("abort", "drop-inside")), LENGTHS, LENGTHS, st.integers(1, MAX_LENGTH))
def attempt_is_read_back(kind: str, after: int, at: int, times: int) -> None:
    schedule = Schedule(attempts=(Attempt(kind, after=after, at=at, times=times),))
    assert from_json(to_json(schedule)) == schedule


@EXAMPLES
@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS)
def sizes_are_read_back(limit: int, context: int, preload: int, minimum: int) -> None:
    schedule = Schedule(budget=limit, context=context, preload=preload, min_new_tokens=minimum)
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize("check", [attempt_is_read_back, sizes_are_read_back], ids=["attempt", "sizes"])
def test_the_numbers_of_a_schedule_survive_json(check: Callable[[], None]) -> None:
    confirmed(check)


@EXAMPLES
@given(LENGTHS, st.integers(1, MAX_LENGTH))
def buffer_weighs_more(limit: int, preload: int) -> None:
    schedule = Schedule(budget=limit, preload=preload)
    assert size(schedule.from_the_start()) < size(schedule)


def test_a_sample_from_a_buffer_is_larger_than_one_that_was_aborted() -> None:
    """What `harness.shrink.size` promises, or a counterexample would start from tokens nobody explains."""
    confirmed(buffer_weighs_more)
