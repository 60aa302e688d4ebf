"""Each checker on histories by hand: where a rule holds, where it is broken, where there is nothing to judge.

What `Where two answers are right` in spec/README.md allows is here too, item by
item: a false alarm is the worst fault of a checker.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkers import HOLDS, RULE_IDS
from harness.history import ABORTED, COMPLETED, FAILED, PENDING, PLAIN, STREAM, TRUNCATED, SampleView
from harness.schedule import Attempt
from tests.unit.histories import EOS, NEW, PROMPT, Ask, Life, attempts, judge, probability, problem, text, view

TOO_LONG = "The input (10 tokens) is longer than the model's context length (10 tokens)."


@pytest.mark.parametrize("rule", RULE_IDS)
def test_a_run_without_calls_is_judged_by_no_rule(rule: str) -> None:
    assert judge(rule, Life(budget=2)) is None


@pytest.mark.parametrize("rule", RULE_IDS)
def test_a_plain_and_faultless_run_breaks_no_rule(rule: str) -> None:
    life = Life(budget=2).call(Ask(2, (5, 6), "length"), after=view((5, 6), TRUNCATED))
    assert judge(rule, life, baseline=life) in (HOLDS, None)


# BUDGET


def test_BUDGET_holds_where_what_is_left_is_asked() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    assert judge("BUDGET", life.call(Ask(1, (6,), "length"), after=view((5, 6), TRUNCATED))) is HOLDS


def test_BUDGET_is_broken_by_asking_for_more_than_is_left() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    assert problem("BUDGET", life.call(Ask(2, (6,), "length"), after=view((5, 6), TRUNCATED))) == "may ask at most 1"


def test_BUDGET_is_broken_by_keeping_more_than_it() -> None:
    life = Life(budget=2).call(Ask(2, (5, 6, 7), "length"), after=view((5, 6, 7), TRUNCATED))
    assert problem("BUDGET", life) == "total 3 > budget 2"


def test_BUDGET_is_broken_without_a_limit() -> None:
    life = Life(budget=2).call(Ask(params={"max_new_tokens": None}), after=view((5,)))
    assert "without a limit" in problem("BUDGET", life)
    assert problem("BUDGET", Life(budget=2).call(Ask())) == "may ask at most 2"  # the engine's own maximum, 128


def test_BUDGET_lets_an_overfull_sample_from_a_buffer_be() -> None:
    life = Life(budget=2, start=view((5, 6, 7)), preload=3).call(after=view((5, 6, 7), TRUNCATED))
    assert judge("BUDGET", life) is None
    life = Life(budget=2, start=view((5, 6, 7)), preload=3).call(Ask(-1, fault="http", code=400), raises="Refused")
    assert judge("BUDGET", life) is HOLDS


def test_BUDGET_is_whole_again_after_a_restart() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    assert judge("BUDGET", life.call(Ask(2, (5, 6), "length", kept=()), after=view((5, 6), TRUNCATED))) is HOLDS


def test_BUDGET_allows_clipping_item_10() -> None:
    life = Life(budget=2, attempts=attempts("over-deliver")).call(
        Ask(2, (5, 6, 7), "length"), after=view((5, 6), TRUNCATED)
    )
    assert judge("BUDGET", life) is HOLDS


def test_BUDGET_is_what_the_caller_asked_for_at_first_item_11() -> None:
    life = Life(budget=4, samples=2).call(Ask(4, (5, 6, 7), "abort"), after=view((5, 6, 7)))
    life.call(Ask(1, (8,), "length"), after=view((5, 6, 7, 8), TRUNCATED), left={"max_new_tokens": 1})
    life.call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED), sample=1, given={"max_new_tokens": 1})
    assert judge("BUDGET", life) is HOLDS


# MAXIMAL


def test_MAXIMAL_holds_with_and_without_a_context() -> None:
    assert judge("MAXIMAL", Life(budget=8).call(Ask(8, (5,), "abort"), after=view((5,)))) is HOLDS
    life = Life(budget=8, context=10).call(Ask(7, (5,), "abort"), after=view((5,)))
    assert judge("MAXIMAL", life) is HOLDS


def test_MAXIMAL_is_broken_by_charging_the_prompt() -> None:
    assert problem("MAXIMAL", Life(budget=8).call(Ask(5, (5,), "abort"), after=view((5,)))) == "may ask 8"
    assert problem("MAXIMAL", Life(budget=30, context=20).call(Ask(14), after=NEW)) == "may ask 17"


def test_MAXIMAL_says_nothing_where_nothing_is_asked() -> None:
    assert judge("MAXIMAL", Life(budget=8).call(flag=True, after=view((), ABORTED))) is None  # item 9
    assert judge("MAXIMAL", Life(budget=0).call(after=view((), TRUNCATED))) is None


def test_MAXIMAL_says_nothing_in_the_reserve_item_7() -> None:
    assert judge("MAXIMAL", Life(budget=8, context=9).call(Ask(1, fault="http", code=400))) is None


def test_MAXIMAL_allows_one_less_where_0_5_9_refuses_the_sum_item_7() -> None:
    old = Life(budget=9, context=12, sglang="0.5.9").call(Ask(8))
    assert judge("MAXIMAL", old) is HOLDS
    assert problem("MAXIMAL", Life(budget=9, context=12).call(Ask(8))) == "may ask 9"
    assert problem("MAXIMAL", Life(budget=9, context=13, sglang="0.5.9").call(Ask(8))) == "may ask 9"


def test_MAXIMAL_counts_from_the_prompt_after_a_restart() -> None:
    life = Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,)))
    assert judge("MAXIMAL", life.call(Ask(4, (5, 6, 7, 8), "length", kept=()))) is HOLDS


# CONTEXT


def test_CONTEXT_holds_up_to_the_limit() -> None:
    life = Life(budget=8, context=10).call(Ask(7, (5, 6, 7, 8), "abort"), after=view((5, 6, 7, 8)))
    assert judge("CONTEXT", life.call(Ask(3, (9,), "stop"), after=view((5, 6, 7, 8, 9), COMPLETED))) is HOLDS


def test_CONTEXT_is_broken_by_a_request_that_does_not_fit() -> None:
    life = Life(budget=8, context=10).call(Ask(7, (5, 6, 7, 8), "abort"), after=view((5, 6, 7, 8)))
    assert problem("CONTEXT", life.call(Ask(4))) == "input 7 + 4 > context 10"


def test_CONTEXT_is_broken_by_a_sample_that_does_not_fit() -> None:
    life = Life(budget=8, context=4).call(Ask(1, (5, 6), "length"), after=view((5, 6), TRUNCATED))
    assert problem("CONTEXT", life) == "prompt and response 5 > context 4"


def test_CONTEXT_says_nothing_where_it_is_unknown_or_the_prompt_is_longer() -> None:
    assert judge("CONTEXT", Life(budget=8).call(Ask(800))) is None
    assert judge("CONTEXT", Life(budget=8, context=2).call(Ask(8, fault="http", code=400))) is None


def test_CONTEXT_says_nothing_of_what_a_buffer_brought() -> None:
    life = Life(budget=9, context=5, preload=4, start=view((5, 6, 7, 8))).call(after=view((5, 6, 7, 8), TRUNCATED))
    assert judge("CONTEXT", life) is None


# EXHAUSTED


def full() -> Life:
    return Life(budget=2).call(Ask(2, (5, 6), "abort"), after=view((5, 6)))


def test_EXHAUSTED_holds_where_the_sample_ends_untouched() -> None:
    assert judge("EXHAUSTED", full().call(after=view((5, 6), TRUNCATED))) is HOLDS


def test_EXHAUSTED_is_broken_by_a_request_an_exception_a_status_or_a_change() -> None:
    assert problem("EXHAUSTED", full().call(Ask(0, (), "length"))) == "no room is left, yet asks 0"
    assert problem("EXHAUSTED", full().call(raises="AssertionError")) == "no room is left, yet raises AssertionError"
    assert problem("EXHAUSTED", full().call()) == "no room is left, yet the status is aborted"
    assert "tokens change" in problem("EXHAUSTED", full().call(after=view((5,), TRUNCATED)))
    assert "text" in problem("EXHAUSTED", full().call(after=view((5, 6), TRUNCATED, response="")))


def test_EXHAUSTED_covers_the_context() -> None:
    life = Life(budget=8, context=4, start=view((5,)), preload=1)
    assert problem("EXHAUSTED", life.call()) == "no room is left, yet the status is aborted"


def test_EXHAUSTED_says_nothing_of_a_finished_sample_or_one_with_room() -> None:
    life = Life(budget=2).call(Ask(2, (5, 6), "length"), after=view((5, 6), TRUNCATED))
    assert judge("EXHAUSTED", life.call()) is None  # also item 2: TRUNCATED at once
    assert judge("EXHAUSTED", Life(budget=2).call()) is None


def test_EXHAUSTED_says_nothing_in_the_reserve_while_there_is_room_item_7() -> None:
    life = Life(budget=8, context=9).call(after=view((), TRUNCATED))
    assert judge("EXHAUSTED", life) is None


def test_EXHAUSTED_allows_aborted_under_the_flag_item_9() -> None:
    assert judge("EXHAUSTED", full().call(flag=True)) is HOLDS
    assert judge("EXHAUSTED", full().call(flag=True, after=view((5, 6), TRUNCATED))) is HOLDS
    assert "asks 0" in problem("EXHAUSTED", full().call(Ask(0), flag=True))


def test_EXHAUSTED_takes_absent_and_empty_for_the_same_item_5() -> None:
    life = Life(budget=0, start=NEW).call(after=view((), TRUNCATED))
    assert judge("EXHAUSTED", life) is HOLDS


# PREFIX


def test_PREFIX_holds_where_all_is_sent_and_kept() -> None:
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))
    assert judge("PREFIX", life.call(Ask(2, (7,), "stop"), after=view((5, 6, 7), COMPLETED))) is HOLDS


def test_PREFIX_is_broken_by_another_input() -> None:
    def life() -> Life:
        return Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))

    assert problem("PREFIX", life().call(Ask(2, kept=(56,)))) == "the input has 1 response ids, not the 2 kept"
    assert problem("PREFIX", life().call(Ask(2, kept=(5,)))) == "the input has 1 response ids, not the 2 kept"
    assert problem("PREFIX", life().call(Ask(2, text="p5 6 "))) == "the request carries text, not the ids"
    assert problem("PREFIX", life().call(Ask(2, ids=(1, 23, 5, 6)))) == "the input does not begin with the 3 prompt ids"


def test_PREFIX_is_broken_by_other_kept_tokens_or_logprobs() -> None:
    def life() -> Life:
        return Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))

    assert "kept tokens change" in problem("PREFIX", life().call(Ask(2, (7,), "stop"), after=view((5, 8, 7))))
    other = view((5, 6, 7), logprobs=(0.0, 0.0, probability(2)))
    assert "logprobs" in problem("PREFIX", life().call(Ask(2, (7,), "stop"), after=other))
    assert "prompt ids" in problem("PREFIX", life().call(Ask(2), after=view((5, 6), tokens=(9, 2, 3, 5, 6))))


def test_PREFIX_is_broken_by_tokens_of_two_requests() -> None:
    drop = Ask(4, (5, 6), fault="drop-inside")
    life = Life(mode=STREAM, budget=4).call(drop, Ask(4, (5, 6, 7, 8), "length"), after=view((5, 6, 5, 6)))
    assert "no request brought together" in problem("PREFIX", life)


def test_PREFIX_allows_a_prefix_of_what_came() -> None:
    life = Life(mode=STREAM, budget=4).call(Ask(4, (5, 6), fault="close", each=True), after=view((5,)))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_is_broken_by_a_part_of_what_came_together() -> None:
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5,)))
    assert "keeps 1 of 2 tokens" in problem("PREFIX", life)
    life = Life(mode=STREAM, budget=4).call(Ask(4, (5, 6), fault="close"), after=view((5,)))
    assert "keeps 1 of 2 tokens" in problem("PREFIX", life)


def test_PREFIX_allows_a_last_stop_token_to_be_dropped_item_6() -> None:
    life = Life(budget=4).call(Ask(4, (5, EOS), "stop"), after=view((5,), COMPLETED))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_is_broken_by_missing_images() -> None:
    life = Life(budget=4, images=1).call(Ask(4, (5, 6), "length"), after=view((5, 6)))
    assert "0 of 1 images" in problem("PREFIX", life)


def test_PREFIX_allows_a_restart_that_drops_all() -> None:
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))
    assert judge("PREFIX", life.call(Ask(4, (5, 6, 7), "stop", kept=()), after=view((5, 6, 7), COMPLETED))) is HOLDS
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view(()))
    assert judge("PREFIX", life.call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED))) is HOLDS


def test_PREFIX_is_broken_by_half_a_restart() -> None:
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))
    assert problem("PREFIX", life.call(Ask(2, (5, 6), "length", kept=()), after=view((5, 6, 5, 6), TRUNCATED)))


def test_PREFIX_allows_going_on_inside_one_call() -> None:
    """What a request goes on from may have come in the same call."""
    drop = Ask(4, (5, 6), fault="drop-inside")
    life = Life(mode=STREAM, budget=4).call(drop, Ask(2, (7, 8), "length", kept=(5, 6)), after=view((5, 6, 7, 8)))
    assert judge("PREFIX", life) is HOLDS
    life = Life(mode=STREAM, budget=5).call(Ask(5, (5,), "abort"), after=view((5,)))
    drop = Ask(4, (6,), fault="drop-inside")
    life.call(drop, Ask(3, (7, 8, 9), "length", kept=(5, 6)), after=view((5, 6, 7, 8, 9), TRUNCATED))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_allows_images_as_text_at_the_start() -> None:
    life = Life(budget=4, images=1).call(Ask(4, (5,), "stop", text="p", images=1), after=view((5,), COMPLETED))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_allows_dropping_the_stop_token_item_6() -> None:
    life = Life(budget=4).call(Ask(4, (5, EOS), "stop"), after=view((5,), COMPLETED))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_leaves_tokens_as_they_were_after_a_refusal_item_8() -> None:
    life = Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,)))
    assert judge("PREFIX", life.call(Ask(3, fault="http", code=400), after=view((5,), FAILED))) is HOLDS


# RESUME-EQ


def resumed(after: SampleView | None = None, **schedule: Any) -> Life:
    life = Life(budget=4, attempts=attempts("abort"), **schedule).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))
    end = view((5, 6, 7, 8), TRUNCATED) if after is None else after
    return life.call(Ask(2, (7, 8), "length"), after=end)


def at_once() -> Life:
    return Life(budget=4).call(Ask(4, (5, 6, 7, 8), "length"), after=view((5, 6, 7, 8), TRUNCATED))


def test_RESUME_EQ_holds_where_both_end_alike() -> None:
    assert judge("RESUME-EQ", resumed(), baseline=at_once()) is HOLDS


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (view((5, 6, 8), TRUNCATED), "response_length"),
        (view((5, 6, 7, 9), TRUNCATED), "tokens"),
        (view((5, 6, 7, 8), COMPLETED), "status"),
        (view((5, 6), ABORTED), "response_length"),
        (view((5, 6, 7, 8), TRUNCATED, logprobs=(-1.0, -2.0)), "logprobs"),
        (view((5, 6, 7, 8), TRUNCATED, response="7 8 "), "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_RESUME_EQ_is_broken_by_any_difference(after: SampleView, said: str) -> None:
    assert said in problem("RESUME-EQ", resumed(after), baseline=at_once())


def test_RESUME_EQ_says_nothing_without_a_pair() -> None:
    assert judge("RESUME-EQ", resumed()) is None
    assert judge("RESUME-EQ", at_once(), baseline=at_once()) is None


def test_RESUME_EQ_says_nothing_where_it_ends() -> None:
    minimum = Life(budget=4, min_new_tokens=1, attempts=attempts("abort")).call(Ask(4, (5,), "stop"), after=view((5,)))
    assert judge("RESUME-EQ", minimum, baseline=at_once()) is None
    never = Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,)))
    assert judge("RESUME-EQ", resumed(view((5, 6))), baseline=never) is None
    assert judge("RESUME-EQ", resumed(view((5, 6), FAILED)), baseline=at_once()) is None
    assert judge("RESUME-EQ", resumed(context=9), baseline=at_once()) is None  # item 7, the engine's reserve


def test_RESUME_EQ_does_not_compare_what_follows_a_stop_token_item_1() -> None:
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5, EOS), "abort"), after=view((5, EOS)))
    life.call(Ask(2, (48, 49), "length"), after=view((5, EOS, 48, 49), TRUNCATED))
    once = Life(budget=4).call(Ask(4, (5, EOS), "stop"), after=view((5, EOS), COMPLETED))
    assert judge("RESUME-EQ", life, baseline=once) is None


def test_RESUME_EQ_takes_absent_masks_for_ones_item_5() -> None:
    life = resumed(view((5, 6, 7, 8), TRUNCATED, loss_mask=None))
    assert judge("RESUME-EQ", life, baseline=at_once()) is HOLDS


def test_RESUME_EQ_compares_texts_without_regard_to_half_characters_item_6() -> None:
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))
    after = view((5, 6, 7, 8), TRUNCATED, response="a\ufffd\ufffdb")
    life.call(Ask(2, (7, 8), "length"), after=after, decoded=("aéb",), torn=("a\ufffd\ufffdb",))
    once = Life(budget=4).call(
        Ask(4, (5, 6, 7, 8), "length"), after=view((5, 6, 7, 8), TRUNCATED, response="aéb"), decoded=("aéb",)
    )
    assert judge("RESUME-EQ", life, baseline=once) is HOLDS


def test_RESUME_EQ_does_not_judge_the_values_of_a_mask() -> None:
    """Its statement names tokens, logprobs, length, text and status; see also [ALIGN]."""
    life = resumed(view((5, 6, 7, 8), TRUNCATED, loss_mask=(0, 0, 1, 1)))
    assert judge("RESUME-EQ", life, baseline=at_once()) is HOLDS


# MODE-EQ


def streamed(after: SampleView | None = None, *, kinds: tuple[str, ...] = (), mode: str = STREAM) -> Life:
    end = view((5, 6, 7, 8), TRUNCATED) if after is None else after
    life = Life(mode=mode, budget=4, attempts=attempts(*kinds))
    return life.call(Ask(4, (5, 6, 7, 8), "length"), after=end)


def test_MODE_EQ_holds_where_the_samples_are_alike() -> None:
    assert judge("MODE-EQ", streamed(), streamed(mode=PLAIN)) is HOLDS


def test_MODE_EQ_is_broken_by_any_difference() -> None:
    assert "response_length" in problem("MODE-EQ", streamed(view((5, 6, 7), TRUNCATED)), streamed(mode=PLAIN))
    assert "status" in problem("MODE-EQ", streamed(view((5, 6, 7, 8), COMPLETED)), streamed(mode=PLAIN))


def test_MODE_EQ_says_nothing_without_another_mode() -> None:
    assert judge("MODE-EQ", streamed()) is None
    assert judge("MODE-EQ", streamed(mode=PLAIN), streamed()) is None  # the streams are compared with plain


def test_MODE_EQ_compares_the_final_sample_where_the_transport_fails_item_3() -> None:
    plain = Life(budget=4, attempts=attempts("drop-inside")).call(
        Ask(4, fault="drop-inside"), Ask(4, (5, 6, 7, 8), "length"), after=view((5, 6, 7, 8), TRUNCATED)
    )
    stream = Life(mode=STREAM, budget=4, attempts=attempts("drop-inside"))
    stream.call(Ask(4, (5, 6), fault="drop-inside"), after=view((5, 6)))
    stream.call(Ask(2, (7, 8), "length"), after=view((5, 6, 7, 8), TRUNCATED))
    assert judge("MODE-EQ", stream, plain) is HOLDS
    stream.call(after=view((5, 6, 7), TRUNCATED))
    assert "response_length" in problem("MODE-EQ", stream, plain)


def test_MODE_EQ_compares_every_attempt_where_the_engine_interrupts() -> None:
    plain = streamed(view((5, 6)), kinds=("abort",), mode=PLAIN).call(Ask(2), after=view((5, 6, 7), TRUNCATED))
    stream = streamed(view((5,)), kinds=("abort",)).call(Ask(2), after=view((5, 6, 7), TRUNCATED))
    assert "response_length" in problem("MODE-EQ", stream, plain)


def test_MODE_EQ_does_not_compare_what_follows_a_stop_token_item_1() -> None:
    kinds = ("close", "abort")
    plain = Life(budget=4, attempts=attempts(*kinds)).call(Ask(4, fault="drop-before"), raises="Transient")
    plain.call(Ask(4, (5, EOS), "abort"), after=view((5, EOS)))
    plain.call(Ask(2, (48, 49), "length"), after=view((5, EOS, 48, 49), TRUNCATED))
    stream = Life(mode=STREAM, budget=4, attempts=attempts(*kinds)).call(Ask(4, (5,), fault="close"), after=view((5,)))
    stream.call(Ask(3, (EOS,), "stop"), after=view((5, EOS), COMPLETED)).call()
    assert judge("MODE-EQ", stream, plain) is None


# STATUS


@pytest.mark.parametrize(("finish", "status"), [("length", TRUNCATED), ("stop", COMPLETED), ("abort", ABORTED)])
def test_STATUS_holds_where_it_is_what_the_engine_said(finish: str, status: str) -> None:
    """`length` is length also with fewer tokens than asked."""
    assert judge("STATUS", Life(budget=4).call(Ask(4, (5,), finish), after=view((5,), status))) is HOLDS
    for other in {TRUNCATED, COMPLETED, ABORTED, PENDING, FAILED} - {status}:
        life = Life(budget=4).call(Ask(4, (5,), finish), after=view((5,), other))
        assert problem("STATUS", life) == f"finish_reason {finish}, status {other}"


def test_STATUS_is_broken_by_completing_what_has_no_end() -> None:
    for status in (PENDING, COMPLETED, TRUNCATED):
        life = Life(mode=STREAM, budget=4).call(Ask(4, (5,), fault="close"), after=view((5,), status))
        assert problem("STATUS", life) == f"no terminal event, status {status}"
    life = Life(mode=STREAM, budget=4).call(Ask(4, (5,), fault="close"), after=view((5,), ABORTED))
    assert judge("STATUS", life) is HOLDS


def test_STATUS_is_broken_by_raising_on_an_answer() -> None:
    life = Life(budget=4).call(Ask(4, (), "abort"), raises="KeyError", after=view((), PENDING))
    assert problem("STATUS", life) == "finish_reason abort, yet raises KeyError"


def test_STATUS_does_not_judge_under_an_exception() -> None:
    life = Life(budget=4).call(Ask(4, fault="http", code=500), raises="Transient")
    assert judge("STATUS", life) is HOLDS


def test_STATUS_does_not_judge_a_full_stream_without_end() -> None:
    life = Life(mode=STREAM, budget=2).call(Ask(2, (5, 6), fault="close"), after=view((5, 6), TRUNCATED))
    assert judge("STATUS", life) is HOLDS


def test_STATUS_is_absorbing() -> None:
    def life() -> Life:
        return Life(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED))

    assert judge("STATUS", life().call()) is HOLDS
    assert judge("STATUS", life().call(raises="AssertionError")) is HOLDS
    assert problem("STATUS", life().call(Ask(3))) == "asks again for a sample that is completed"
    assert problem("STATUS", life().call(after=view((5,), TRUNCATED))) == "changes a sample that is completed"


def test_STATUS_allows_both_on_the_last_step_items_1_and_2() -> None:
    for status in (ABORTED, COMPLETED):
        life = Life(budget=4).call(Ask(4, (5, EOS), "abort"), after=view((5, EOS), status))
        assert judge("STATUS", life) is HOLDS
    for status in (ABORTED, TRUNCATED):
        life = Life(budget=2).call(Ask(2, (5, 6), "abort"), after=view((5, 6), status))
        assert judge("STATUS", life) is HOLDS
    assert problem("STATUS", Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,), TRUNCATED)))


def test_STATUS_allows_both_for_a_lost_request_item_4() -> None:
    life = Life(mode=STREAM, budget=2).call(Ask(2, fault="close"), after=view((), ABORTED))
    assert judge("STATUS", life) is HOLDS
    life = Life(mode=STREAM, budget=2).call(Ask(2, fault="close"), Ask(2, (5,), "stop"), after=view((5,), COMPLETED))
    assert judge("STATUS", life) is HOLDS


def test_STATUS_allows_what_a_refusal_means_item_8() -> None:
    for status in (FAILED, ABORTED):
        life = Life(budget=2).call(Ask(2, fault="http", code=400, message="no"), after=view((), status))
        assert judge("STATUS", life) is HOLDS
    long = Ask(2, fault="http", code=400, message=TOO_LONG)
    assert judge("STATUS", Life(budget=2).call(long, after=view((), TRUNCATED))) is HOLDS  # item 7 as well
    short = Ask(2, fault="http", code=400, message="no")
    assert problem("STATUS", Life(budget=2).call(short, after=view((), TRUNCATED)))
    busy = Ask(2, (), "abort", status_code=503)
    assert judge("STATUS", Life(mode=STREAM, budget=2).call(busy, raises="Transient", after=NEW)) is HOLDS


def test_STATUS_allows_both_under_the_flag_item_9() -> None:
    for kept, status in (((5, 6), TRUNCATED), ((5,), ABORTED)):
        life = Life(mode=STREAM, budget=2).call(Ask(2, (5, 6), "length"), flag=True, after=view(kept, status))
        assert judge("STATUS", life) is HOLDS


def test_STATUS_allows_both_for_more_than_asked_item_10() -> None:
    for status in (TRUNCATED, COMPLETED, ABORTED):
        life = Life(budget=2, attempts=(Attempt("over-deliver", 1),))
        life.call(Ask(2, (5, 6, EOS), "stop"), after=view((5, 6), status))
        assert judge("STATUS", life) is HOLDS


def test_STATUS_says_nothing_where_the_engine_was_not_asked() -> None:
    assert judge("STATUS", Life(budget=2).call(flag=True, after=view((), ABORTED))) is None


# ALIGN


def test_ALIGN_holds_where_all_lengths_agree() -> None:
    life = Life(budget=8).call(Ask(8, (5, 6), "abort"), after=view((5, 6), arrays={"experts": 2}))
    assert judge("ALIGN", life) is HOLDS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_mask": (1, 1)}, "loss mask 2"),
        ({"logprobs": (-1.0, -2.0)}, "logprobs 2"),
        ({"logprobs": None}, "no logprobs"),
        ({"response_length": 2}, "tokens hold 3"),
        ({"tokens": (*PROMPT, 5)}, "tokens hold 1"),
        ({"arrays": {"experts": 4}}, "experts 4"),
        ({"tokens": ()}, "tokens hold 0"),
    ],
)
def test_ALIGN_is_broken_by_any_length(change: dict[str, object], said: str) -> None:
    life = Life(budget=8).call(Ask(8, (5, 6, 7), "abort"), after=view((5, 6, 7), **change))
    assert said in problem("ALIGN", life)


def test_ALIGN_judges_failed_attempts_too() -> None:
    life = Life(budget=8).call(Ask(8, fault="http", code=500), raises="Transient", after=view((), logprobs=(-1.0,)))
    assert said_of(life) == "response_length 0, logprobs 1"


def said_of(life: Life) -> str:
    return problem("ALIGN", life)


def test_ALIGN_says_nothing_without_an_end() -> None:
    assert judge("ALIGN", Life(budget=8).call(Ask(8), halts="hang")) is None


def test_ALIGN_allows_absent_arrays_item_5() -> None:
    assert judge("ALIGN", Life(budget=8).call(Ask(8, fault="http", code=400), raises="Refused")) is HOLDS
    empty = view((), loss_mask=None, logprobs=None)
    assert judge("ALIGN", Life(budget=8).call(Ask(8, (), "abort"), after=empty)) is HOLDS
    assert judge("ALIGN", Life(budget=8).call(Ask(8, (5,), "abort"), after=view((5,), loss_mask=None))) is HOLDS


def test_ALIGN_does_not_ask_for_logprobs_that_nobody_asked_for() -> None:
    ask = Ask(8, (5,), "stop", asks_logprobs=False)
    assert judge("ALIGN", Life(budget=8).call(ask, after=view((5,), COMPLETED, logprobs=None))) is HOLDS
    bare = view((5,), COMPLETED, logprobs=None, has_logprobs=False)
    assert judge("ALIGN", Life(budget=8).call(Ask(8, (5,), "stop"), after=bare)) is HOLDS


def test_ALIGN_does_not_judge_the_values_of_a_mask() -> None:
    life = Life(budget=8).call(Ask(8, (5, 6), "abort"), after=view((5, 6), loss_mask=(0, 0)))
    assert judge("ALIGN", life) is HOLDS


def test_ALIGN_allows_dropping_the_stop_token_item_6() -> None:
    life = Life(budget=4).call(Ask(4, (5, EOS), "stop"), after=view((5,), COMPLETED))
    assert judge("ALIGN", life) is HOLDS


# TEXT


def test_TEXT_holds_where_it_is_what_the_tokens_say() -> None:
    assert judge("TEXT", Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6)))) is HOLDS


def test_TEXT_is_broken_by_another_text() -> None:
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6), response="6 "))
    assert problem("TEXT", life) == "the text is '6 ', its tokens say '5 6 '"


def test_TEXT_is_broken_by_a_text_without_tokens() -> None:
    """No tokens at all means r = 0 (item 5), so there is no text either. THUDM/slime#92"""
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((), tokens=(), response="5 6 "), decoded=("",))
    assert problem("TEXT", life)


def test_TEXT_says_nothing_without_a_request_or_with_unclear_tokens() -> None:
    assert judge("TEXT", Life(budget=4, start=view((5,), response="x"), preload=1).call()) is None
    life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=view((5, 6), response_length=1))
    assert judge("TEXT", life) is None  # ALIGN's to say


def test_TEXT_allows_stop_tokens_and_special_tokens_either_way_item_6() -> None:
    for shown in ("5 ", "5 <eos>"):
        after = view((5, EOS), COMPLETED, response=shown)
        life = Life(budget=4).call(Ask(4, (5, EOS), "stop"), after=after, decoded=("5 <eos>", "5 "))
        assert judge("TEXT", life) is HOLDS


def test_TEXT_ignores_half_characters_at_a_seam_item_6() -> None:
    for joined in ("a\ufffd\ufffdb", "a\ufffdb", "ab", "aéb"):
        after = view((5, 6), response=joined)
        life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=after, decoded=("aéb",), torn=("a\ufffd\ufffdb",))
        assert judge("TEXT", life) is HOLDS
    for other in ("\ufffdb", "\ufffd\ufffd\ufffd\ufffd"):
        after = view((5, 6), response=other)
        life = Life(budget=4).call(Ask(4, (5, 6), "abort"), after=after, decoded=("aéb",), torn=("a\ufffd\ufffdb",))
        assert problem("TEXT", life)


def test_TEXT_is_broken_by_half_characters_that_no_seam_explains() -> None:
    """U+FFFD is no wildcard: a character that one request brought whole must be there."""
    life = Life(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), response="a\ufffdb"), decoded=("aéb",))
    assert problem("TEXT", life)


# NO-ALIAS


def test_NO_ALIAS_holds_where_nothing_of_the_callers_changes() -> None:
    life = Life(budget=4, samples=2).call(Ask(4, (5,), "abort"), after=view((5,)))
    life.call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED), sample=1, attempt=0)
    assert judge("NO-ALIAS", life) is HOLDS


def test_NO_ALIAS_is_broken_by_what_it_writes() -> None:
    def call(**given: Any) -> str:
        return problem("NO-ALIAS", Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,)), **given))

    assert call(left={"max_new_tokens": 3}) == "the caller's max_new_tokens was 4, is 3"
    assert call(left={}) == "the caller's max_new_tokens was 4, is None"
    assert call(left={"max_new_tokens": 4, "n": None}) == "the caller's n was None, is None"
    assert call(writes=("rollout_max_response_len",)) == "sets args.rollout_max_response_len"
    life = Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,), prompt="p5 "))
    assert problem("NO-ALIAS", life) == "changes the prompt"


def test_NO_ALIAS_is_broken_by_changing_a_sibling() -> None:
    life = Life(budget=4, samples=2).call(Ask(4, (5,), "abort"), after=view((5,)))
    life.call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED), sample=1, attempt=0, others=(view((6,)),))
    assert problem("NO-ALIAS", life) == "changes a sibling sample"


def test_NO_ALIAS_is_judged_after_an_exception_too() -> None:
    life = Life(budget=4).call(Ask(4, fault="http", code=400), raises="Refused", left={"max_new_tokens": 1})
    assert problem("NO-ALIAS", life)
    assert judge("NO-ALIAS", Life(budget=4).call(Ask(4), halts="hang")) is None


# RETRY


def test_RETRY_holds_where_transient_faults_are_retried() -> None:
    busy = Ask(4, fault="http", code=503)
    life = Life(budget=4).call(busy, busy, Ask(4, (5,), "stop"), after=view((5,), COMPLETED))
    assert judge("RETRY", life) is HOLDS


@pytest.mark.parametrize("code", [400, 404, 422])
def test_RETRY_is_broken_by_asking_again_for_what_was_refused(code: int) -> None:
    no = Ask(4, fault="http", code=code)
    assert problem("RETRY", Life(budget=4).call(no, no, raises="Refused")).startswith(f"HTTP {code} is asked again")
    no = Ask(4, fault="error-event", code=code)
    assert problem("RETRY", Life(mode=STREAM, budget=4).call(no, no, no, raises="Refused"))


def test_RETRY_allows_another_request_after_a_refusal() -> None:
    no, less = Ask(4, fault="http", code=400), Ask(3, (5,), "stop")
    assert judge("RETRY", Life(budget=4).call(no, less, after=view((5,), COMPLETED))) is HOLDS
    life = Life(budget=4).call(no, raises="Refused").call(no, raises="Refused")  # two calls are the caller's affair
    assert judge("RETRY", life) is HOLDS


def test_RETRY_takes_429_for_transient_item_8() -> None:
    busy = Ask(4, fault="http", code=429)
    assert judge("RETRY", Life(budget=4).call(busy, Ask(4, (5,), "stop"), after=view((5,), COMPLETED))) is HOLDS


def test_RETRY_allows_a_lost_request_to_be_sent_again_or_not_item_4() -> None:
    lost = Ask(4, fault="drop-before")
    assert judge("RETRY", Life(budget=4).call(lost, raises="Transient")) is HOLDS
    assert judge("RETRY", Life(budget=4).call(lost, Ask(4, (5,), "stop"), after=view((5,), COMPLETED))) is HOLDS
    empty = Ask(4, fault="close")
    assert judge("RETRY", Life(mode=STREAM, budget=4).call(empty, empty, after=view(()))) is HOLDS


def test_RETRY_is_broken_by_a_storm() -> None:
    life = Life(budget=4).call(Ask(4, fault="http", code=503), halts="storm")
    assert problem("RETRY", life) == "it goes on and on"


def test_RETRY_is_broken_by_retrying_in_one_mode_only() -> None:
    busy, kinds = Ask(4, fault="http", code=503), (Attempt("http", code=503),)
    plain = Life(budget=4, attempts=kinds).call(busy, Ask(4, (5,), "stop"), after=view((5,), COMPLETED))
    stream = Life(mode=STREAM, budget=4, attempts=kinds).call(busy, raises="Transient")
    assert problem("RETRY", stream, plain) == "1 requests here, 2 in mode plain"
    assert judge("RETRY", stream) is HOLDS


def test_RETRY_asks_for_likeness_before_the_first_event_only() -> None:
    kinds = attempts("drop-inside")
    plain = Life(budget=4, attempts=kinds).call(
        Ask(4, fault="drop-inside"), Ask(4, (5,), "stop"), after=view((5,), COMPLETED)
    )
    stream = Life(mode=STREAM, budget=4, attempts=kinds).call(Ask(4, (5,), fault="drop-inside"), after=view((5,)))
    assert judge("RETRY", stream, plain) is HOLDS


def test_RETRY_says_nothing_where_nothing_fails() -> None:
    assert judge("RETRY", Life(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED))) is None


# PARAMS


def test_PARAMS_holds_where_all_reaches_the_wire() -> None:
    given = {"stop": ["x"], "sampling_seed": 7, "min_new_tokens": 4}
    life = Life(budget=8, min_new_tokens=4).call(
        Ask(8, (5, 6, 7), "abort", params=given), after=view((5, 6, 7)), given=given
    )
    life.call(Ask(5, (8,), "stop", params={**given, "min_new_tokens": 1}), given=given)
    assert judge("PARAMS", life) is HOLDS


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({"sampling_seed": 7}, "stop is ['x']"),
        ({"stop": ["x"]}, "sampling_seed is 7"),
        ({"stop": ["y"], "sampling_seed": 7}, "stop is ['x']"),
        ({"stop": ["x"], "sampling_seed": 7, "min_new_tokens": 9}, "min_new_tokens 9 with max_new_tokens 8"),
        ({"stop": ["x"], "sampling_seed": 7, "min_new_tokens": 2}, "0 remain of the minimum 0, sends 2"),
    ],
)
def test_PARAMS_is_broken_by_what_is_dropped_or_changed(wire: dict[str, object], said: str) -> None:
    life = Life(budget=8).call(Ask(8, params=wire), given={"stop": ["x"], "sampling_seed": 7})
    assert said in problem("PARAMS", life)


def test_PARAMS_is_broken_by_the_whole_minimum_again() -> None:
    life = Life(budget=8, min_new_tokens=4).call(
        Ask(8, (5, 6), "abort", params={"min_new_tokens": 4}), after=view((5, 6))
    )
    life.call(Ask(6, params={"min_new_tokens": 4}))
    assert problem("PARAMS", life) == "2 remain of the minimum 4, sends 4"


def test_PARAMS_is_broken_without_a_maximum() -> None:
    assert problem("PARAMS", Life(budget=8).call(Ask())) == "max_new_tokens does not reach the wire"


def test_PARAMS_allows_what_means_the_same() -> None:
    life = Life(budget=8).call(Ask(8, params={"stop": "x"}), given={"stop": ["x"], "seed": None})
    assert judge("PARAMS", life) is HOLDS
    life = Life(budget=8).call(Ask(8, params={"min_new_tokens": 0, "top_k": 5}))  # what was not given is not judged
    assert judge("PARAMS", life) is HOLDS


def test_PARAMS_sends_the_whole_minimum_after_a_restart() -> None:
    life = Life(budget=8, min_new_tokens=4).call(
        Ask(8, (5, 6), "abort", params={"min_new_tokens": 4}), after=view((5, 6))
    )
    assert judge("PARAMS", life.call(Ask(8, kept=(), params={"min_new_tokens": 4}))) is HOLDS


def test_PARAMS_says_nothing_where_nothing_is_asked() -> None:
    assert judge("PARAMS", Life(budget=0).call(after=view((), TRUNCATED))) is None


def test_the_text_of_a_view_is_that_of_its_tokens() -> None:
    assert view((5, 6)).response == text((5, 6)) == "5 6 "
