"""Where a checker begins and ends to judge: one condition at a time, on both sides of its boundary."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkers import HOLDS, Case, Finding, _traces, checker, halt
from harness.checkers.resume_eq import TOLERANCE, close
from harness.checkers.trace import Exchange, Trace, response_ids
from harness.history import (
    ABORTED,
    COMPLETED,
    FAILED,
    INCREMENTAL,
    PENDING,
    PLAIN,
    STREAM,
    TRUNCATED,
    Called,
    Delivered,
    Event,
    Faulted,
    Flagged,
    Halted,
    History,
    Requested,
    Returned,
    SampleView,
)
from harness.schedule import Attempt, Schedule
from tests.unit.histories import EOS, NEW, PROMPT, Ask, Life, attempts, judge, probability, problem, view


def buffered(kept: tuple[int, ...], **schedule: Any) -> Life:
    return Life(start=view(kept), preload=len(kept), **schedule)


TWELVE = tuple(range(5, 17))


@pytest.mark.parametrize(
    ("rule", "life"),
    [
        ("MAXIMAL", Life(budget=8).call(Ask(params={"max_new_tokens": None}), Ask(5))),
        ("MAXIMAL", buffered(TWELVE, budget=20, context=20).call(Ask(1), Ask(3, kept=()))),  # the first in the reserve
        ("EXHAUSTED", Life(budget=0).call(halts="hang").call()),
        ("EXHAUSTED", Life(budget=1).call(Ask(1, (5,), "abort"), after=view((5,))).call()),
        ("STATUS", Life(budget=4).call(halts="hang").call(Ask(4, (5,), "stop"), after=view((5,)))),
        ("STATUS", Life(budget=4).call(flag=True).call(Ask(4, (5,), "stop"), after=view((5,)))),
        ("ALIGN", Life(budget=4).call(halts="hang").call(after=view((), loss_mask=(1,)))),
        ("TEXT", Life(budget=4).call(flag=True).call(Ask(4, (5,), "stop"), after=view((5,), response="6 "))),
        ("TEXT", Life(budget=4).call(Ask(4), halts="hang").call(Ask(4, (5,)), after=view((5,), response="6 "))),
        (
            "TEXT",
            Life(budget=4)
            .call(Ask(4, (5,), "abort"), after=view((5,), response_length=2))
            .call(Ask(3, (6,)), after=view((5, 6), response="6 ")),
        ),
    ],
)
def test_what_is_not_judged_hides_nothing_behind_it(rule: str, life: Life) -> None:
    assert problem(rule, life)


def test_MAXIMAL_says_nothing_of_a_request_for_which_no_room_was() -> None:
    assert judge("MAXIMAL", buffered((5, 6), budget=2).call(Ask(-1))) is None
    assert judge("MAXIMAL", Life(budget=2).call(Ask(params={"max_new_tokens": None}))) is None


def test_CONTEXT_holds_at_the_limit_itself() -> None:
    life = Life(budget=8, context=5).call(Ask(2, (5, 6), "length"), after=view((5, 6), TRUNCATED))
    assert judge("CONTEXT", life) is HOLDS


def test_CONTEXT_leaves_a_request_without_a_limit_to_BUDGET() -> None:
    assert judge("CONTEXT", Life(budget=8, context=10).call(Ask(params={"max_new_tokens": None}))) is HOLDS


def test_CONTEXT_counts_the_input_that_was_sent() -> None:
    """Also where it is none that the rules know: that is for PREFIX to say."""
    assert judge("CONTEXT", buffered((5, 6), budget=8, context=10).call(Ask(6, kept=(5,)))) is HOLDS


def test_EXHAUSTED_says_nothing_while_one_token_may_be_had() -> None:
    assert judge("EXHAUSTED", Life(budget=1).call()) is None


def test_MAXIMAL_counts_the_kept_tokens_where_0_5_9_refuses_the_sum_item_7() -> None:
    def life(asked: int) -> Life:
        return buffered((5,), budget=9, context=12, sglang="0.5.9").call(Ask(asked))

    assert judge("MAXIMAL", life(7)) is HOLDS
    assert problem("MAXIMAL", life(6)) == "may ask 8"


# PREFIX


def test_PREFIX_counts_each_way_to_a_sample_once() -> None:
    """Sixty tries that bring nothing, then an answer: the ways it may have come must not double sixty times."""
    tries = [Ask(2, fault="drop-before")] * 60
    assert judge("PREFIX", Life(budget=2).call(*tries, Ask(2, (5, 6), "length"), after=view((5, 6)))) is HOLDS
    said = "the logprobs are not those that were delivered"
    wrong = view((5, 6), logprobs=(-9.0, -9.0))
    assert problem("PREFIX", Life(budget=2).call(*tries, Ask(2, (5, 6), "length"), after=wrong)) == said


def test_PREFIX_is_judged_where_tokens_are_kept_even_without_a_request() -> None:
    assert judge("PREFIX", buffered((5,), budget=4).call()) is HOLDS
    assert judge("PREFIX", Life(budget=4).call(flag=True)) is None
    life = Life(budget=4).call(Ask(4), halts="hang")
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_leaves_lengths_that_disagree_to_ALIGN() -> None:
    life = Life(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), response_length=2))
    assert judge("PREFIX", life) is HOLDS
    for logprobs in (None, (0.0,), (0.0,) * 3):
        life = buffered((5, 6), budget=4).call(after=view((5, 6), logprobs=logprobs))
        assert judge("PREFIX", life) is HOLDS
        life = Life(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), logprobs=logprobs))
        assert judge("PREFIX", life) is HOLDS


def test_PREFIX_says_nothing_of_logprobs_that_the_buffer_did_not_bring() -> None:
    bare = view((5,), logprobs=None)
    life = Life(budget=4, start=bare, preload=1).call(after=view((5,), logprobs=(-7.0,)))
    assert judge("PREFIX", life) is HOLDS
    life = Life(budget=4, start=bare, preload=1).call(Ask(3, (6,), "stop"), after=view((5, 6), logprobs=(-7.0, -8.0)))
    assert judge("PREFIX", life) is HOLDS
    # A restart brings all of them.
    life = Life(budget=4, start=bare, preload=1).call(
        Ask(4, (5, 6), "stop", kept=()), after=view((5, 6), logprobs=(-7.0, -8.0))
    )
    assert "logprobs" in problem("PREFIX", life)


def test_PREFIX_goes_on_from_the_sample_after_a_restart_that_brought_nothing() -> None:
    life = buffered((5, 6), budget=4).call(
        Ask(4, kept=(), fault="drop-before"), Ask(2, (7,), "stop"), after=view((5, 6, 7))
    )
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_cuts_what_goes_beyond_the_room() -> None:
    """A sample that is full, by its budget or by its context, may hold a part of what came together."""
    assert judge("PREFIX", Life(budget=1).call(Ask(1, (5, 6), "stop"), after=view((5,), TRUNCATED))) is HOLDS
    life = Life(budget=9, context=4).call(Ask(1, (5, 6), "stop"), after=view((5,), TRUNCATED))
    assert judge("PREFIX", life) is HOLDS
    life = Life(budget=2).call(Ask(2, (5, 6), "stop"), after=view((5,), TRUNCATED))
    assert "keeps 1 of 2 tokens" in problem("PREFIX", life)


@pytest.mark.parametrize("kind", ["missing", "over-deliver", "lost-ids"])
def test_PREFIX_allows_a_part_on_a_faulty_engine(kind: str) -> None:
    life = Life(budget=4, attempts=attempts(kind)).call(Ask(4, (5, 6), "stop"), after=view((5,)))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_allows_only_the_stop_token_to_be_dropped() -> None:
    for got in ((5, EOS, EOS), (5, EOS, 6), (5, 6, EOS)):
        assert "keeps 1 of 3" in problem("PREFIX", Life(budget=4).call(Ask(4, got, "stop"), after=view((5,))))


def test_PREFIX_allows_the_kept_tokens_with_what_came_in_the_same_call_as_input() -> None:
    stream = Life(mode=STREAM, budget=9, start=view((5,)), preload=1)
    drop = Ask(8, (6, 7), fault="drop-inside", each=True)
    stream.call(drop, Ask(7, (8,), "stop", kept=(5, 6)), after=view((5, 6, 8), COMPLETED))
    assert judge("PREFIX", stream) is HOLDS


def test_PREFIX_takes_the_logprobs_from_the_request_that_brought_the_tokens() -> None:
    """The second request brought the same tokens with other logprobs; either pair is right, a mixture is not."""
    one, two = Ask(4, (5, 6), fault="drop-inside"), Ask(4, (5, 6), "stop", logprobs=(-3.0, -4.0))
    for logprobs in ((-1.0, -2.0), (-3.0, -4.0)):
        life = Life(mode=STREAM, budget=4).call(one, two, after=view((5, 6), logprobs=logprobs))
        assert judge("PREFIX", life) is HOLDS
    life = Life(mode=STREAM, budget=4).call(one, two, after=view((5, 6), logprobs=(-1.0, -4.0)))
    assert problem("PREFIX", life) == "the logprobs are not those that were delivered"


def test_PREFIX_follows_three_requests_that_go_on_from_each_other() -> None:
    """Each sends all that came before it in the call, not only what the first brought."""
    drops = Ask(4, (5,), fault="drop-inside"), Ask(3, (6,), fault="drop-inside", kept=(5,))
    life = Life(mode=STREAM, budget=4).call(*drops, Ask(2, (7,), "stop", kept=(5, 6)), after=view((5, 6, 7)))
    assert judge("PREFIX", life) is HOLDS


def test_PREFIX_is_broken_by_an_input_that_holds_the_kept_tokens_twice() -> None:
    """A restart inside a call brought them again; sent behind themselves they are no input that anybody was given."""
    again = Ask(9, (5, 6, 7), fault="drop-inside", kept=())
    life = Life(mode=STREAM, budget=9, start=view((5, 6)), preload=2).call(again, Ask(5, kept=(5, 6, 5, 6)))
    assert problem("PREFIX", life) == "the input has 4 response ids, not the 2 kept"


# RESUME-EQ


def once(**schedule: Any) -> Life:
    return Life(budget=4, **schedule).call(Ask(4, (5, 6), "stop"), after=view((5, 6), COMPLETED))


def twice(end: str = "wrong", **schedule: Any) -> Life:
    """Interrupted and resumed; "wrong" ends otherwise than `once`."""
    life = Life(budget=4, **{"attempts": attempts("abort")} | schedule).call(Ask(4, (5,), "abort"), after=view((5,)))
    return life.call(Ask(3, (6,), "stop"), after=view((5, 6) if end == "right" else (5, 7), COMPLETED))


def test_RESUME_EQ_judges_both_ways() -> None:
    assert judge("RESUME-EQ", twice("right"), baseline=once()) is HOLDS
    assert problem("RESUME-EQ", twice(), baseline=once())


@pytest.mark.parametrize(
    ("life", "baseline"),
    [
        (twice(attempts=()), once()),
        (twice(min_new_tokens=1), once()),
        (twice(attempts=attempts("lost-ids")), once()),
        (twice(samples=2), once()),
        (twice().call(halts="hang"), once()),
        (twice(), once().call(halts="hang")),
        (twice(context=10), once()),
        (twice(), once(context=9)),
        (Life(budget=4, attempts=attempts("abort")), once()),
        (twice(), Life(budget=4)),
        (twice(), Life(budget=4).call(Ask(4, (5,), "abort"), after=view((5,)))),
        (twice().call(Ask(2), after=view((5,), FAILED)), once()),
    ],
    ids=[
        *("no interruption", "a minimum", "lost ids", "siblings", "the run halts", "the baseline halts"),
        *("the run near C", "the baseline near C", "no call", "no call in the baseline"),
        *("the baseline has no end", "given up"),
    ],
)
def test_RESUME_EQ_says_nothing_where_there_is_nothing_to_compare(life: Life, baseline: Life) -> None:
    assert judge("RESUME-EQ", life, baseline=baseline) is None


@pytest.mark.parametrize(("other", "rounded"), [(TOLERANCE, True), (-TOLERANCE, True), (1 / 16, False), (-0.04, False)])
def test_RESUME_EQ_knows_that_logprobs_are_rounded(other: float, rounded: bool) -> None:
    """A model computes those of a prompt and of a step in another order; the mock's are sixteenths."""
    good = once().history.events[-1].view.logprobs  # type: ignore[union-attr]
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5,), "abort"), after=view((5,)))
    now = view((5, 6), COMPLETED, logprobs=(good[0], good[1] + other))
    assert (judge("RESUME-EQ", life.call(Ask(3, (6,), "stop"), after=now), baseline=once()) is HOLDS) is rounded
    assert close(good, now.logprobs or ()) is rounded is close(now.logprobs or (), good)


def test_logprobs_that_are_not_as_many_or_no_numbers_are_not_close() -> None:
    assert close((), ()) and not close((1.0,), ()) and not close((1.0,), (1.0, 2.0))
    infinite = float("-inf")
    assert close((infinite,), (infinite,)) and not close((infinite,), (0.0,)) and not close((float("nan"),), (0.0,))


def test_RESUME_EQ_judges_just_above_the_reserve() -> None:
    assert problem("RESUME-EQ", twice(context=11), baseline=once(context=10))


def test_a_text_is_compared_only_where_no_character_was_torn_in_either() -> None:
    """[RESUME-EQ] [MODE-EQ]"""
    for torn_here, torn_there in ((("a\ufffd",), ()), ((), ("a\ufffd",))):
        after = view((5, 6), COMPLETED, response="x")
        one = Life(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), COMPLETED), torn=torn_there)
        two = Life(mode=STREAM, budget=4).call(Ask(4, (5, 6), "stop"), after=after, torn=torn_here)
        assert judge("MODE-EQ", two, one) is HOLDS
    one = Life(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), COMPLETED))
    two = Life(mode=STREAM, budget=4).call(Ask(4, (5, 6), "stop"), after=after)
    assert problem("MODE-EQ", two, one)


@pytest.mark.parametrize("finish", ["abort", None])
def test_RESUME_EQ_does_not_judge_behind_a_stop_token(finish: str | None) -> None:
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (EOS,), finish), after=view((EOS,)))
    assert judge("RESUME-EQ", life.call(Ask(3, (6,), "stop"), after=view((EOS, 6), COMPLETED)), baseline=once()) is None


def test_RESUME_EQ_does_not_judge_an_abort_that_landed_on_the_stop_token() -> None:
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5, EOS), "abort"), after=view((5, EOS), COMPLETED))
    assert judge("RESUME-EQ", life, baseline=once()) is None


def test_RESUME_EQ_judges_where_a_stop_token_ended_the_answer() -> None:
    """Also a stop token inside: it is the last one of a request that counts."""
    for got, finish in (((5, EOS), "stop"), ((5, EOS), "length"), ((EOS, 5), "abort")):
        life = Life(budget=4, attempts=attempts("abort"))
        life.call(Ask(4, got, finish), after=view(got, COMPLETED))
        assert problem("RESUME-EQ", life, baseline=once())
    # A finished sample, handed back with its stop token at the end, was not resumed; nor was one that asked nothing.
    life = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5, EOS), "stop"), after=view((5, EOS), COMPLETED))
    assert problem("RESUME-EQ", life.call(Ask(2)), baseline=once())
    life = buffered((5, EOS), budget=4, attempts=attempts("flag")).call(after=view((5, EOS), COMPLETED))
    assert problem("RESUME-EQ", life, baseline=once())


def test_RESUME_EQ_does_not_judge_a_sample_that_was_resumed_behind_a_stop_token() -> None:
    life = buffered((5, EOS), budget=4, attempts=attempts("abort")).call(Ask(2, (6,), "stop"), after=view((5, EOS, 6)))
    assert judge("RESUME-EQ", life, baseline=once()) is None


# MODE-EQ


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"min_new_tokens": 1}, {}),
        ({"samples": 2}, {}),
        ({"context": 9}, {}),
        ({}, {"context": 9}),
    ],
)
def test_MODE_EQ_says_nothing_where_the_modes_may_differ(here: dict[str, Any], there: dict[str, Any]) -> None:
    def life(mode: str, last: int, **schedule: Any) -> Life:
        made = Life(mode=mode, budget=4, attempts=attempts("close"), **schedule)
        return made.call(Ask(4, (5, last), "stop"), after=view((5, last), COMPLETED))

    assert judge("MODE-EQ", life(STREAM, 6, **here), life(PLAIN, 7, **there)) is None
    assert problem("MODE-EQ", life(STREAM, 6), life(PLAIN, 7))
    assert problem("MODE-EQ", life(STREAM, 6, context=10), life(PLAIN, 7, context=10))


def ended(mode: str, *, kinds: tuple[str, ...] = (), **call: Any) -> Life:
    given: dict[str, Any] = {"after": view((5, 6) if mode == PLAIN else (5, 7), COMPLETED)}
    return Life(mode=mode, budget=4, attempts=attempts(*kinds)).call(Ask(4, (5, 6), "stop"), **given | call)


@pytest.mark.parametrize("kinds", [(), ("close",)], ids=["each attempt", "the final sample"])
def test_MODE_EQ_says_nothing_of_a_run_that_halts_in_either_mode(kinds: tuple[str, ...]) -> None:
    assert problem("MODE-EQ", ended(STREAM, kinds=kinds), ended(PLAIN, kinds=kinds))
    assert judge("MODE-EQ", ended(STREAM, kinds=kinds, halts="hang"), ended(PLAIN, kinds=kinds)) is None
    assert judge("MODE-EQ", ended(STREAM, kinds=kinds), ended(PLAIN, kinds=kinds, halts="hang")) is None
    # Nor of what was different before it halted.
    assert judge("MODE-EQ", ended(STREAM, kinds=kinds).call(halts="hang"), ended(PLAIN, kinds=kinds)) is None
    assert judge("MODE-EQ", ended(STREAM, kinds=kinds), ended(PLAIN, kinds=kinds).call(halts="hang")) is None


@pytest.mark.parametrize("failed", [PLAIN, STREAM])
def test_MODE_EQ_says_nothing_of_a_sample_given_up_in_either_mode(failed: str) -> None:
    lives = [
        ended(mode, kinds=("close",), **({"after": view((), FAILED)} if mode == failed else {}))
        for mode in (STREAM, PLAIN)
    ]
    assert judge("MODE-EQ", *lives) is None


@pytest.mark.parametrize("stopped", [PLAIN, STREAM])
def test_MODE_EQ_says_nothing_behind_a_stop_token_in_either_mode(stopped: str) -> None:
    def life(mode: str) -> Life:
        made = Life(mode=mode, budget=4, attempts=attempts("close"))
        got = (EOS,) if mode == stopped else (5,)
        return made.call(Ask(4, got, "abort"), after=view(got))

    assert judge("MODE-EQ", life(STREAM), life(PLAIN)) is None


@pytest.mark.parametrize("empty", [PLAIN, STREAM])
def test_MODE_EQ_says_nothing_where_a_mode_was_not_called(empty: str) -> None:
    lives = [
        Life(mode=m, budget=4, attempts=attempts("close")) if m == empty else ended(m, kinds=("close",))
        for m in (STREAM, PLAIN)
    ]
    assert judge("MODE-EQ", *lives) is None


def test_MODE_EQ_stops_at_a_call_without_an_end_in_either_mode() -> None:
    """What comes behind it began from states that nobody knows."""
    for hanging in (PLAIN, STREAM):
        lives = [
            Life(mode=m, budget=4)
            .call(halts="hang" if m == hanging else "")
            .call(after=view((5,) if m == PLAIN else ()))
            for m in (STREAM, PLAIN)
        ]
        assert judge("MODE-EQ", *lives) is None


def test_MODE_EQ_compares_incremental_with_stream_where_there_is_no_plain() -> None:
    assert problem("MODE-EQ", ended(INCREMENTAL, after=view((9,))), ended(STREAM)) == (
        "mode stream: response_length 2, here 1"
    )
    assert "mode plain" in problem("MODE-EQ", ended(INCREMENTAL), ended(STREAM), ended(PLAIN))


# STATUS


def test_STATUS_is_broken_by_ending_without_having_asked() -> None:
    for status in (TRUNCATED, COMPLETED):
        life = buffered((5,), budget=2).call(after=view((5,), status))
        assert problem("STATUS", life) == f"{status} unasked, though 1 tokens may be had"


@pytest.mark.parametrize(
    "life",
    [
        buffered((5, 6), budget=2).call(after=view((5, 6), TRUNCATED)),
        Life(budget=2).call(after=view((), ABORTED)),
        Life(budget=2).call(raises="Refused", after=view((), TRUNCATED)),
        Life(budget=2, samples=2).call(after=view((), TRUNCATED)),
        Life(budget=2).call(flag=True, after=view((), TRUNCATED)),
        Life(budget=2, context=9).call(after=view((), TRUNCATED)),
    ],
    ids=["full", "not ended", "raised", "siblings", "flagged", "in the reserve"],
)
def test_STATUS_leaves_other_ends_without_a_request_alone(life: Life) -> None:
    assert judge("STATUS", life) is None


def test_STATUS_is_judged_just_above_the_reserve() -> None:
    assert problem("STATUS", Life(budget=2, context=10).call(after=view((), TRUNCATED)))
    life = buffered((5,), budget=2, context=10).call(after=view((5,), TRUNCATED))
    assert judge("STATUS", life) is None


@pytest.mark.parametrize(
    "life",
    [
        Life(budget=4).call(Ask(4, (5,), "stop", fault="drop-after"), raises="Transient", after=NEW),
        Life(budget=4, attempts=attempts("drop-after")).call(Ask(4, (5,), "stop"), raises="Transient", after=NEW),
        Life(budget=4, attempts=attempts("missing")).call(Ask(4, (5,), "stop"), raises="MalformedReply", after=NEW),
    ],
    ids=["a fault behind the end", "dropped behind the end", "a faulty engine"],
)
def test_STATUS_allows_an_exception_where_the_answer_may_not_have_arrived(life: Life) -> None:
    assert judge("STATUS", life) is HOLDS


def test_STATUS_allows_an_exception_for_an_abort_in_the_reserve() -> None:
    """item 7: a token may come with it that answers nothing."""
    life = Life(budget=2, context=9).call(Ask(2, (5,), "abort"), raises="MalformedReply", after=NEW)
    assert judge("STATUS", life) is HOLDS
    life = Life(budget=2, context=10).call(Ask(2, (5,), "abort"), raises="MalformedReply", after=NEW)
    assert problem("STATUS", life) == "finish_reason abort, yet raises MalformedReply"


def test_STATUS_takes_an_abort_with_a_status_code_for_no_answer() -> None:
    busy = Ask(4, (), "abort", status_code=503)
    life = Life(mode=STREAM, budget=4).call(busy, after=view((), COMPLETED))
    assert problem("STATUS", life) == "no terminal event, status completed"


def test_STATUS_takes_a_finish_reason_that_it_does_not_know_for_an_abort() -> None:
    assert judge("STATUS", Life(budget=4).call(Ask(4, (5,), "tool_calls"), after=view((5,)))) is HOLDS


def test_STATUS_allows_completed_for_a_stop_token_at_the_budget() -> None:
    life = Life(budget=2).call(Ask(2, (5, EOS), "length"), after=view((5, EOS), COMPLETED))
    assert judge("STATUS", life) is HOLDS
    life = Life(budget=2).call(Ask(2, (EOS, 5), "length"), after=view((EOS, 5), COMPLETED))
    assert problem("STATUS", life) == "finish_reason length, status completed"
    life = Life(budget=2).call(Ask(2, (5, EOS), "stop"), after=view((5, EOS), ABORTED))
    assert problem("STATUS", life) == "finish_reason stop, status aborted"


def test_STATUS_allows_aborted_under_the_flag_only_where_the_end_was_not_read() -> None:
    def life(kept: tuple[int, ...], *, flag: bool) -> Life:
        made = Life(mode=STREAM, budget=4, start=view((5,)), preload=1)
        return made.call(Ask(3, (6, 7), "stop", each=True), flag=flag, after=view(kept))

    assert judge("STATUS", life((5, 6), flag=True)) is HOLDS
    assert problem("STATUS", life((5, 6, 7), flag=True)) == "finish_reason stop, status aborted"
    assert problem("STATUS", life((5, 6), flag=False)) == "finish_reason stop, status aborted"


@pytest.mark.parametrize("kind", ["missing", "over-deliver", "lost-ids"])
@pytest.mark.parametrize("status", [TRUNCATED, FAILED, ABORTED])
def test_STATUS_lets_the_answer_of_a_faulty_engine_be_refused(kind: str, status: str) -> None:
    life = Life(budget=4, attempts=attempts(kind)).call(Ask(4, (5,), "stop"), after=view((5,), status))
    assert judge("STATUS", life) is HOLDS
    life = Life(budget=4, attempts=attempts(kind)).call(Ask(4, (5,), "stop"), after=view((5,), PENDING))
    assert problem("STATUS", life) == "finish_reason stop, status pending"


@pytest.mark.parametrize(
    ("message", "holds"),
    [
        ("exceeds the model's maximum context length of 256", True),
        ("exceeds the maximum allowed length (250 tokens).", True),
        ("maximum", False),
        ("", False),
    ],
)
def test_STATUS_allows_truncated_where_the_engine_says_too_long(message: str, holds: bool) -> None:
    life = Life(budget=4).call(Ask(4, fault="http", code=400, message=message), after=view((), TRUNCATED))
    assert (judge("STATUS", life) is HOLDS) is holds


def test_STATUS_needs_words_of_the_engine_to_truncate() -> None:
    """A request that was neither answered nor refused."""
    assert problem("STATUS", Life(budget=4).call(Ask(4), after=view((), TRUNCATED)))


def test_STATUS_allows_an_exception_under_the_flag_where_the_end_was_not_read() -> None:
    life = Life(budget=4).call(Ask(4, (5,), "stop"), flag=True, raises="Cancelled", after=view((), PENDING))
    assert judge("STATUS", life) is HOLDS


def came_back(left: str, entry: str, *, sample: int = 0, between: str = "") -> Life:
    """A sample that a call left with one status, and that the next call on it is given with another."""
    life = Life(budget=4, samples=2).call(Ask(4, (5,), "abort"), after=view((5,), ABORTED), sample=1 - sample)
    life.views[sample] = view((5,), left)
    life.call(flag=True, sample=sample)
    if between:
        life.call(halts=between, sample=sample)
    life.views[sample] = view((5,), entry)
    return life.call(flag=True, sample=sample)


@pytest.mark.parametrize("status", [COMPLETED, TRUNCATED])
@pytest.mark.parametrize("sample", [0, 1])
def test_STATUS_is_broken_by_an_end_that_is_forgotten_between_calls(status: str, sample: int) -> None:
    life = came_back(status, ABORTED, sample=sample)
    assert judge("STATUS", life) == Finding(2, f"was {status}, and comes back aborted", sample)
    life = came_back(status, PENDING, sample=sample, between="hang")
    assert judge("STATUS", life) == Finding(3, f"was {status}, and comes back pending", sample)
    assert judge("STATUS", came_back(status, status, sample=sample)) is HOLDS


def test_STATUS_lets_a_status_that_is_no_end_change_between_calls() -> None:
    assert judge("STATUS", came_back(ABORTED, PENDING)) is HOLDS
    assert judge("STATUS", came_back(FAILED, COMPLETED)) is HOLDS


# ALIGN


def test_ALIGN_asks_for_logprobs_if_the_last_requests_did() -> None:
    bare = view((5,), logprobs=None)
    unasked, asked = Ask(8, (5,), "abort", asks_logprobs=False), Ask(8, (5,), "abort")
    assert judge("ALIGN", Life(budget=8).call(unasked, after=bare).call(after=bare)) is HOLDS
    assert judge("ALIGN", Life(budget=8).call(unasked, asked, after=bare)) is HOLDS
    assert judge("ALIGN", Life(budget=8).call(asked, unasked, after=bare)) is HOLDS
    assert judge("ALIGN", Life(budget=8).call(unasked, after=view((5,))).call(after=bare)) is HOLDS
    assert problem("ALIGN", Life(budget=8).call(asked, after=view((5,))).call(after=bare))
    assert problem("ALIGN", Life(budget=8).call(unasked, after=bare).call(asked, after=bare))


def test_ALIGN_asks_for_logprobs_if_the_buffer_brought_them() -> None:
    bare = view((5,), logprobs=None)
    assert judge("ALIGN", Life(budget=8, start=bare, preload=1).call(after=bare)) is HOLDS
    assert problem("ALIGN", buffered((5,), budget=8).call(after=bare)) == "response_length 1, no logprobs"


def test_ALIGN_keeps_what_the_requests_of_each_sample_asked_for_apart() -> None:
    bare = view((5,), logprobs=None)
    life = Life(budget=8, samples=2).call(Ask(8, (5,), "abort", asks_logprobs=False), after=bare)
    life.call(Ask(8, (5,), "abort"), after=view((5,)), sample=1)
    assert judge("ALIGN", life.call(after=bare)) is HOLDS
    assert problem("ALIGN", life.call(after=bare, sample=1))


# TEXT


def test_TEXT_lets_only_the_end_of_an_unfinished_character_be_missing() -> None:
    def life(text: str, decoded: str, torn: tuple[str, ...] = ()) -> Life:
        return Life(budget=4).call(Ask(4, (5,)), after=view((5,), response=text), decoded=(decoded,), torn=torn)

    assert judge("TEXT", life("a", "a\ufffd\ufffd")) is HOLDS
    assert problem("TEXT", life("a", "\ufffda"))
    assert problem("TEXT", life("a", "aXX"))
    assert problem("TEXT", life("a", "a "))


def test_TEXT_lets_any_character_stand_where_one_was_torn() -> None:
    def life(text: str, *torn: str) -> Life:
        return Life(budget=4).call(Ask(4, (5,)), after=view((5,), response=text), decoded=("-",), torn=torn)

    assert judge("TEXT", life("a\n", "a\ufffd")) is HOLDS
    assert judge("TEXT", life("a.b\n", "zz", "a.b\ufffd")) is HOLDS
    assert problem("TEXT", life("axb", "a.b\ufffd"))  # what was not torn is no pattern
    assert problem("TEXT", life("axx", "a\ufffd"))


def test_TEXT_says_nothing_of_a_sample_whose_tokens_are_gone() -> None:
    life = Life(budget=4).call(Ask(4, (5,)), after=view((5,), tokens=(), response="x"))
    assert judge("TEXT", life) is None


# NO-ALIAS


def test_NO_ALIAS_compares_as_many_siblings_as_are_known() -> None:
    """Before every sample was called once, what the others hold is not known yet."""
    life = Life(budget=4, samples=3).call(Ask(4, (5,)), after=view((5,)))
    assert judge("NO-ALIAS", life.call(sample=1, others=(view((6,)), NEW))) is HOLDS


def test_NO_ALIAS_names_the_first_parameter_that_changed() -> None:
    life = Life(budget=4).call(given={"b": 1, "a": 1}, left={"max_new_tokens": 4, "a": 2})
    assert problem("NO-ALIAS", life) == "the caller's a was 1, is 2"
    life = Life(budget=4).call(given={"n": None}, left={"max_new_tokens": 4})
    assert problem("NO-ALIAS", life) == "the caller's n was None, is None"


# RETRY


def test_RETRY_is_broken_only_by_the_same_request_again() -> None:
    no = Ask(4, fault="http", code=400)
    for other in (Ask(4, kept=(5,), fault="http", code=400), Ask(3, fault="http", code=400)):
        assert judge("RETRY", Life(budget=4).call(no, other, raises="Refused")) is HOLDS


def test_RETRY_is_judged_wherever_a_request_meets_a_fault() -> None:
    lost = Ask(4, fault="close")
    life = Life(budget=4).call(lost, after=view(())).call(Ask(4, (5,), "stop"), after=view((5,)))
    assert judge("RETRY", life) is HOLDS


def faced(mode: str, requests: int, *, entry: SampleView = NEW, kind: str = "http") -> Life:
    """One call that meets a fault before any event, and makes so many requests."""
    life = Life(mode=mode, budget=4, start=entry, attempts=(Attempt(kind, code=503),))
    return life.call(*[Ask(4, fault=kind, code=503)] * requests, after=view((), ABORTED))


@pytest.mark.parametrize("kind", ["http", "drop-before"])
def test_RETRY_counts_requests_in_both_modes(kind: str) -> None:
    assert problem("RETRY", faced(STREAM, 1, kind=kind), faced(PLAIN, 2, kind=kind)).startswith("1 requests here, 2")
    assert judge("RETRY", faced(STREAM, 2, kind=kind), faced(PLAIN, 2, kind=kind)) is HOLDS


def test_RETRY_does_not_compare_a_mode_that_asked_nothing() -> None:
    assert judge("RETRY", faced(STREAM, 0), faced(PLAIN, 2)) is None
    assert judge("RETRY", faced(STREAM, 2), faced(PLAIN, 0)) is HOLDS


@pytest.mark.parametrize(
    "entry",
    [view((), PENDING), view((5,)), view((), COMPLETED, tokens=()), view((), response_length=1, tokens=())],
    ids=["tokens", "more tokens", "finished", "length"],
)
def test_RETRY_does_not_compare_calls_that_began_otherwise(entry: SampleView) -> None:
    assert judge("RETRY", faced(STREAM, 1, entry=entry), faced(PLAIN, 2)) is HOLDS


def test_RETRY_compares_runs_of_different_length_as_far_as_both_go() -> None:
    lives = faced(STREAM, 2), faced(PLAIN, 2)
    lives[1].call()
    assert judge("RETRY", *lives) is HOLDS
    lives[0].call().call()
    assert judge("RETRY", *lives) is HOLDS


def test_RETRY_does_not_compare_behind_a_storm_or_a_hang() -> None:
    hang = Life(mode=STREAM, budget=4, attempts=attempts("drop-before"))
    hang.call(Ask(4, fault="drop-before"), halts="hang")
    assert judge("RETRY", hang, faced(PLAIN, 2, kind="drop-before")) is HOLDS


# PARAMS


def test_PARAMS_takes_a_tuple_for_a_list() -> None:
    life = Life(budget=8).call(Ask(8, params={"stop": ["x", "y"]}), given={"stop": ("x", "y")})
    assert judge("PARAMS", life) is HOLDS
    life = Life(budget=8).call(Ask(8, params={"stop": ["x"]}), given={"stop": ("y",)})
    assert problem("PARAMS", life)


def test_PARAMS_leaves_the_minimum_alone_where_there_is_no_maximum() -> None:
    life = Life(budget=8, min_new_tokens=4).call(Ask(params={"max_new_tokens": None, "min_new_tokens": 1}))
    assert judge("PARAMS", life) is HOLDS


def test_PARAMS_lets_the_minimum_be_all_that_is_asked() -> None:
    life = Life(budget=2, min_new_tokens=4).call(Ask(2, params={"min_new_tokens": 2}))
    assert judge("PARAMS", life) is HOLDS
    life = Life(budget=2, min_new_tokens=4).call(Ask(-1, params={"min_new_tokens": 0}))
    assert judge("PARAMS", life) is HOLDS
    assert judge("PARAMS", buffered((5, 6), budget=8, min_new_tokens=1).call(Ask(6))) is HOLDS


# What the checkers are given


def test_a_checker_is_found_by_its_rule_s_name() -> None:
    assert checker("NO-ALIAS").__module__ == "harness.checkers.no_alias"


def test_a_run_breaks_off_only_where_its_last_event_says_so() -> None:
    life = Life(budget=4).call(halts="exit")
    assert halt(life.history) == Halted(0, 0, "exit", "it goes on and on")
    assert halt(life.call().history) is None
    assert halt(Life(budget=4).history) is None


@pytest.mark.parametrize(
    ("mode", "ran", "compared"),
    [
        (PLAIN, (PLAIN, STREAM, INCREMENTAL), None),
        (STREAM, (PLAIN, STREAM), PLAIN),
        (INCREMENTAL, (PLAIN, STREAM, INCREMENTAL), PLAIN),
        (INCREMENTAL, (STREAM, INCREMENTAL), STREAM),
        (INCREMENTAL, (INCREMENTAL,), None),
    ],
)
def test_a_mode_is_compared_with_the_first_before_it(mode: str, ran: tuple[str, ...], compared: str | None) -> None:
    case = Case(mode, {m: Life(mode=m, budget=1).history for m in ran})
    assert (case.compared.history.mode if case.compared else None) == compared
    assert case.history.mode == case.trace.history.mode == mode
    assert case.baseline is None
    assert Case(mode, {}, Life(budget=7).history).baseline.budget == 7  # type: ignore[union-attr]


def test_traces_are_made_once_and_forgotten_together() -> None:
    """A check looks at one history from many sides; a long search must not keep them all."""
    _traces.clear()
    histories = [Life(budget=1).history for _ in range(257)]
    traces = [Case(PLAIN, {PLAIN: h}).trace for h in histories[:256]]
    assert [id(Case(PLAIN, {}, h).baseline) for h in histories[:256]] == [id(t) for t in traces]
    assert Case(STREAM, {PLAIN: histories[7], STREAM: histories[8]}).compared is traces[7]
    assert [t.history for t in traces] == histories[:256]
    assert len(_traces) == 256
    assert Case(PLAIN, {PLAIN: histories[256]}).trace.history is histories[256]
    assert len(_traces) == 1


# The trace


def traced(*events: Event, **schedule: Any) -> Trace:
    return Trace(History(Schedule(**schedule), PLAIN, PROMPT, EOS, events))


def request(attempt: int, sample: int, number: int, ids: tuple[int, ...] | None = PROMPT) -> Requested:
    return Requested(attempt, sample, number, False, ids, None, 0, {"max_new_tokens": 2}, True)


def test_a_trace_groups_the_events_of_a_call() -> None:
    """Requests in the order of their numbers, each with its own deliveries and its own fault."""
    called, other = Called(1, 0, {"a": 1}, NEW), Called(0, 1, {}, NEW)
    end = Returned(1, 0, view((5,)), {})
    trace = traced(
        other,
        Flagged(0, 1, None),
        Returned(0, 1, view((9,)), {}),
        called,
        request(0, 0, 0),  # of a call before: nobody waits for it any more
        request(1, 1, 0),
        request(1, 0, 1, (*PROMPT, 5)),
        request(1, 0, 0),
        Delivered(1, 0, 1, (7,), (-7.0,), "stop", 200),
        Delivered(1, 0, 0, (5,), (-5.0,)),
        Delivered(1, 0, 0, (6, 8), (-6.0, -8.0), "abort", 503),
        Faulted(1, 0, 1, "drop-after"),
        end,
        Delivered(1, 0, 1, (1,), (-1.0,)),  # to nobody
        samples=2,
        attempts=attempts("run", "abort"),
    )
    assert trace.turns == trace.by_sample[0]
    assert [(n, t.index) for n, t in trace.all_turns] == [(0, 1), (1, 0)]
    (turn,) = trace.turns
    assert (turn.plan.kind, turn.entry, turn.params, turn.flagged) == ("abort", NEW, {"a": 1}, False)
    assert (turn.outcome, turn.siblings) == (end, (view((9,)),))
    assert turn.exchanges == (
        Exchange(request(1, 0, 0), (5, 6, 8), (-5.0, -6.0, -8.0), "abort", 503, None, (1, 3)),
        Exchange(request(1, 0, 1, (*PROMPT, 5)), (7,), (-7.0,), "stop", 200, Faulted(1, 0, 1, "drop-after"), (1,)),
    )
    assert turn.last == turn.exchanges[1]
    sibling = trace.by_sample[1][0]
    assert (sibling.flagged, sibling.siblings, sibling.last, sibling.exchanges) == (True, (), None, ())


def test_a_call_behind_the_last_attempt_of_the_schedule_has_no_plan() -> None:
    turns = traced(Called(1, 0, {}, NEW), attempts=attempts("abort")).turns
    assert [t.plan for t in turns] == [Attempt()]
    assert [t.outcome for t in turns] == [None]


def test_siblings_are_known_as_their_last_call_left_them() -> None:
    life = Life(budget=4, samples=3).call(after=view((5,)), sample=2).call(after=view((6,)), sample=1)
    life.call(after=view((7,)), sample=2).call(halts="hang", sample=1).call()
    assert Trace(life.history).turns[-1].siblings == (view((6,)), view((7,)))


@pytest.mark.parametrize(
    ("budget", "context", "kept", "room"), [(4, None, 1, 3), (4, 9, 1, 3), (4, 6, 1, 2), (1, 3, 2, -2)]
)
def test_the_room_of_a_trace(budget: int, context: int | None, kept: int, room: int) -> None:
    assert traced(budget=budget, context=context).room(kept) == room


@pytest.mark.parametrize(
    ("context", "kept", "inside"), [(None, 99, False), (11, 1, False), (10, 1, True), (9, 1, True)]
)
def test_the_reserve_of_the_engine(context: int | None, kept: int, inside: bool) -> None:
    """SGLang refuses an input of C - 6 tokens or more."""
    assert traced(context=context).in_reserve(kept) is inside


def test_a_run_comes_near_the_limit_by_a_sample_or_by_a_request() -> None:
    assert not Trace(Life(budget=9, context=11).call(Ask(8, kept=(5,))).history).near_limit()
    assert Trace(Life(budget=9, context=11).call(Ask(8, kept=(5, 6))).history).near_limit()
    assert Trace(buffered((5, 6), budget=9, context=11).call().history).near_limit()


@pytest.mark.parametrize(
    ("ask", "kept"),
    [
        (Ask(2), 2),
        (Ask(4, kept=()), 0),
        (Ask(1, kept=(5, 6, 7)), 3),
        (Ask(1, kept=(5,)), 2),
        (Ask(1, kept=(6, 5)), 2),
        (Ask(1, kept=(7, 8, 9)), 2),
        (Ask(1, ids=(9, 2, 3)), 2),
        (Ask(1, ids=(1, 2)), 2),
        (Ask(4, text="p"), 0),
        (Ask(2, text="p"), 2),
        (Ask(4, text="q"), 2),
    ],
)
def test_what_a_request_went_on_from(ask: Ask, kept: int) -> None:
    """By its own input where that is the prompt, alone or with all that was kept; else by the sample."""
    trace = Trace(buffered((5, 6), budget=4).call(ask).history)
    (turn,) = trace.turns
    assert trace.kept_at(turn, turn.exchanges[0]) == kept


@pytest.mark.parametrize(("length", "ids"), [(0, ()), (-1, ()), (1, (6,)), (2, (5, 6)), (5, (*PROMPT, 5, 6)), (6, ())])
def test_the_response_is_the_tail_of_the_tokens(length: int, ids: tuple[int, ...]) -> None:
    assert response_ids(view((5, 6), response_length=length)) == ids


@pytest.mark.parametrize(
    ("value", "asked"), [(5, 5), (0, 0), (-1, -1), (None, None), (True, None), ("5", None), (5.0, None)]
)
def test_the_limit_of_a_request_is_an_integer_or_none(value: object, asked: int | None) -> None:
    (turn,) = Trace(Life(budget=4).call(Ask(params={"max_new_tokens": value})).history).turns
    assert turn.exchanges[0].asked == asked


def test_without_a_limit_on_the_wire_the_engine_takes_its_own() -> None:
    (turn,) = Trace(Life(budget=4).call(Ask()).history).turns
    assert turn.exchanges[0].asked == 128


@pytest.mark.parametrize(
    ("code", "refused"),
    [(None, False), (399, False), (400, True), (428, True), (429, False), (430, True), (499, True), (500, False)],
)
def test_a_refusal_is_every_4xx_but_429(code: int | None, refused: bool) -> None:
    (turn,) = Trace(Life(budget=4).call(Ask(4, fault="http", code=code)).history).turns
    assert turn.exchanges[0].refused is refused
    (turn,) = Trace(Life(budget=4).call(Ask(4)).history).turns
    assert turn.exchanges[0].refused is False


def test_a_finding_is_of_the_sample_under_test_unless_it_says_so() -> None:
    assert Finding(1, "x") == Finding(1, "x", 0)


def test_probabilities_differ_by_position() -> None:
    assert probability(0) != probability(1)
