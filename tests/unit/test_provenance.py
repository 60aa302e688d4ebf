"""[PROVENANCE] on histories by hand: one that holds, and one for every way to break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checkers import HOLDS, Finding
from harness.history import ABORTED, COMPLETED, Delivered, Requested
from harness.rollouts import Event, Member
from tests.unit.histories import PROMPT, view
from tests.unit.loop_histories import BUDGET, began, call, ended, finding, judge, member, problem

THREE = view((5, 6, 7), COMPLETED)
TWO = view((5, 6), ABORTED)
FIRST = call(0, ids=(5, 6), finish="abort", versions=("1", "1"))
SECOND = call(0, 1, before=TWO, ids=(7,), versions=("2",))


def kept(*spans: tuple[str, int], **other: Any) -> Member:
    return member(0, THREE, spans=spans, **other)


def test_PROVENANCE_holds_where_the_spans_are_the_engine_s() -> None:
    assert judge("PROVENANCE", began(), FIRST, SECOND, ended(((kept(("1", 2), ("2", 1)),),))) is HOLDS


def test_PROVENANCE_is_judged_in_the_buffer_too() -> None:
    waits = member(0, TWO, spans=(("1", 1),))
    said = "its weight spans hold 1 tokens of 2"
    assert finding("PROVENANCE", began(), FIRST, ended(buffer=((waits,),))) == Finding(0, said, 0, 1)


def test_PROVENANCE_does_not_ask_for_spans_without_tokens() -> None:
    assert judge("PROVENANCE", began(), FIRST, SECOND, ended(((kept(("1", 2), ("3", 0), ("2", 1)),),))) is HOLDS


def test_PROVENANCE_forgets_what_a_call_that_begins_again_had() -> None:
    again = call(0, 1, before=TWO, ids=(7, 8, 9), versions=("2", "2", "2"), after=THREE)
    again[1] = replace(again[1], input_ids=PROMPT)  # type: ignore[type-var]
    assert judge("PROVENANCE", began(), FIRST, again, ended(((kept(("2", 3)),),))) is HOLDS


@pytest.mark.parametrize("count", [2, 4])
def test_PROVENANCE_is_broken_by_spans_of_another_length(count: int) -> None:
    said = f"its weight spans hold {count} tokens of 3"
    assert problem("PROVENANCE", began(), FIRST, SECOND, ended(((kept(("1", count)),),))) == (0, said)


@pytest.mark.parametrize(
    ("spans", "shown"),
    [((("1", 3),), "1: 3"), ((("1", 1), ("2", 2)), "1: 1, 2: 2"), ((("2", 1), ("1", 2)), "2: 1, 1: 2")],
)
def test_PROVENANCE_is_broken_by_other_weights_than_served(spans: tuple[tuple[str, int], ...], shown: str) -> None:
    said = f"its weight spans are {shown}, but the engine's were 1: 2, 2: 1"
    assert problem("PROVENANCE", began(), FIRST, SECOND, ended(((kept(*spans),),))) == (0, said)


def test_PROVENANCE_says_none_where_the_client_has_no_spans_for_no_tokens() -> None:
    empty = member(0, view((), ABORTED), spans=())
    nothing = call(0, ids=(), finish="abort")
    assert judge("PROVENANCE", began(), nothing, ended(buffer=((empty,),))) is HOLDS


def test_PROVENANCE_asks_only_for_the_sum_where_the_engine_s_word_is_not_known() -> None:
    silent = call(0, ids=(5, 6, 7))
    assert judge("PROVENANCE", began(), silent, ended(((kept(("9", 3)),),))) is HOLDS
    assert judge("PROVENANCE", began(), ended(((kept(("9", 3)),),))) is HOLDS


def test_PROVENANCE_does_not_count_tokens_that_were_not_kept() -> None:
    fewer = call(0, ids=(5, 6, 7), finish="abort", after=TWO, versions=("1", "2", "2"))
    two = member(0, TWO, spans=(("1", 1), ("2", 1)))
    assert judge("PROVENANCE", began(), fewer, ended(buffer=((two,),))) is HOLDS


def test_PROVENANCE_forgets_the_tokens_of_a_sample_that_begins_again() -> None:
    again = call(0, 1, ids=(5, 6, 7), versions=("2",) * 3)
    assert judge("PROVENANCE", began(), FIRST, again, ended(((kept(("2", 3)),),))) is HOLDS


def test_PROVENANCE_forgets_what_a_resumed_sample_no_longer_has() -> None:
    one = view((5,), ABORTED)
    again = call(0, 1, before=one, ids=(6, 7), versions=("2", "2"))
    assert judge("PROVENANCE", began(), FIRST, again, ended(((kept(("1", 1), ("2", 2)),),))) is HOLDS


def test_PROVENANCE_takes_the_last_request_of_a_call() -> None:
    called, asked, _, returned = call(0, ids=(5, 6, 7))
    lost = Delivered(0, 0, 0, (5,), (-1.0,), None, None, False, ("1",))
    retried = Requested(0, 0, 1, False, PROMPT, None, 0, {"max_new_tokens": BUDGET}, True)
    told = Delivered(0, 0, 1, (5, 6), (-1.0,) * 2, None, None, False, ("2", "2"))
    last = Delivered(0, 0, 1, (7,), (-1.0,), "stop", None, False, ("3",))
    events: list[Event] = [called, asked, lost, retried, told, last, returned]
    assert judge("PROVENANCE", began(), events, ended(((kept(("2", 2), ("3", 1)),),))) is HOLDS


def test_PROVENANCE_counts_what_is_kept_of_a_call_that_raises() -> None:
    first = call(0, ids=(5, 6), finish="abort", versions=("1", "1"), raises="OSError")
    assert judge("PROVENANCE", began(), first, SECOND, ended(((kept(("1", 2), ("2", 1)),),))) is HOLDS
    said = "its weight spans are 2: 3, but the engine's were 1: 2, 2: 1"
    assert problem("PROVENANCE", began(), first, SECOND, ended(((kept(("2", 3)),),))) == (0, said)


def test_PROVENANCE_keeps_samples_apart() -> None:
    other = call(1, ids=(5, 6, 7), versions=("7",) * 3)
    both = ((kept(("1", 2), ("2", 1)),), (member(1, THREE, spans=(("7", 3),)),))
    assert judge("PROVENANCE", began(), FIRST, other, SECOND, ended(both)) is HOLDS


# Clients that only list versions


def test_PROVENANCE_holds_where_versions_are_listed_in_order() -> None:
    assert judge("PROVENANCE", began(), ended(((member(0, versions=("1", "2", "2", "10")),),))) is HOLDS


def test_PROVENANCE_is_broken_by_versions_out_of_order() -> None:
    told = began(), call(4), ended(((member(4, versions=("1", "10", "9")),),))
    assert problem("PROVENANCE", *told) == (4, "lists the weights 9 after 10")


@pytest.mark.parametrize("versions", [("1", "default", "2"), ("default", "3"), ("b", "a"), ("", "1")])
def test_PROVENANCE_does_not_ask_after_the_order_of_names(versions: tuple[str, ...]) -> None:
    assert judge("PROVENANCE", began(), ended(((member(0, versions=versions),),))) is HOLDS


def test_PROVENANCE_looks_past_names_for_the_order() -> None:
    told = began(), call(4), ended(((member(4, versions=("10", "default", "9")),),))
    assert problem("PROVENANCE", *told) == (4, "lists the weights 9 after 10")


def test_PROVENANCE_prefers_the_spans() -> None:
    assert judge("PROVENANCE", began(), ended(((kept(("9", 3), versions=("2", "1")),),))) is HOLDS


# Nothing to judge


@pytest.mark.parametrize("fanned", [member(0), member(0, THREE, THREE, spans=()), member(0, THREE, THREE, versions=())])
def test_PROVENANCE_is_not_judged_without_records_or_of_several_samples(fanned: Member) -> None:
    assert judge("PROVENANCE", began(), ended(((fanned,),))) is None
