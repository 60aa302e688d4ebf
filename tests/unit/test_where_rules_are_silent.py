"""Histories that are cut short, odd or another rule's to judge: a rule says nothing there, or no more than it knows."""

from __future__ import annotations

from harness.checkers import HOLDS
from harness.checkers.trace import Trace
from harness.history import ABORTED, COMPLETED, FAILED, PLAIN, STREAM, TRUNCATED, Delivered, Returned
from tests.unit.histories import EOS, PROMPT, Ask, Life, attempts, judge, probability, problem, view


def unfinished(life: Life) -> Life:
    """Without the end of its last call, as where the process was ended."""
    life.events.pop()
    return life


def test_MAXIMAL_says_nothing_of_a_request_without_a_limit() -> None:
    assert judge("MAXIMAL", Life(budget=2).call(Ask(params={"max_new_tokens": None}), after=view((5,)))) is None


def test_MAXIMAL_takes_the_sample_s_word_for_an_input_that_it_does_not_know() -> None:
    life = Life(budget=3).call(Ask(3, (5,), "abort"), after=view((5,)))
    assert judge("MAXIMAL", life.call(Ask(2, (6,), "abort", ids=(9, 9)), after=view((5, 6)))) is HOLDS
    assert problem("MAXIMAL", life.call(Ask(0, (), "length", ids=(9, 9)), after=view((5, 6)))) == "may ask 1"


def test_MODE_EQ_says_nothing_of_what_was_given_up() -> None:
    def dropped(mode: str, status: str) -> Life:
        life = Life(mode=mode, budget=1, attempts=attempts("drop-before"))
        return life.call(Ask(1, fault="drop-before"), after=view((), status))

    assert judge("MODE-EQ", dropped(STREAM, FAILED), dropped(PLAIN, ABORTED)) is None
    assert judge("MODE-EQ", dropped(STREAM, ABORTED), dropped(PLAIN, FAILED)) is None
    assert judge("MODE-EQ", dropped(STREAM, ABORTED), unfinished(dropped(PLAIN, ABORTED))) is None
    assert judge("MODE-EQ", dropped(STREAM, ABORTED), dropped(PLAIN, ABORTED)) is HOLDS


def test_MODE_EQ_says_nothing_of_a_call_without_an_end() -> None:
    def one(mode: str) -> Life:
        return Life(mode=mode, budget=1).call(Ask(1, (5,), "length"), after=view((5,), TRUNCATED))

    assert judge("MODE-EQ", unfinished(one(STREAM)), one(PLAIN)) is None
    assert judge("MODE-EQ", one(STREAM), unfinished(one(PLAIN))) is None


def test_MODE_EQ_is_broken_by_another_number_of_calls() -> None:
    def calls(mode: str, number: int) -> Life:
        life = Life(mode=mode, budget=9)
        for _ in range(number):
            life.call(Ask(9, (), "abort"), after=view(()))
        return life

    assert problem("MODE-EQ", calls(STREAM, 2), calls(PLAIN, 1)) == "mode plain: 1 calls, here 2"
    assert judge("MODE-EQ", calls(STREAM, 2), calls(PLAIN, 2)) is HOLDS


def test_what_siblings_do_to_each_other_is_left_to_NO_ALIAS_and_MAXIMAL() -> None:
    def pair(mode: str, *response: int) -> Life:
        life = Life(mode=mode, budget=2, samples=2, attempts=attempts("run"))
        return life.call(Ask(2, response, "length"), after=view(response, TRUNCATED))

    assert judge("MODE-EQ", pair(STREAM, 5), pair(PLAIN, 5, 6)) is None
    assert judge("RESUME-EQ", pair(PLAIN, 5), baseline=pair(PLAIN, 5, 6)) is None
    life = Life(budget=2, samples=2).call(after=view((), TRUNCATED))
    assert judge("STATUS", life) is None


def test_MODE_EQ_leaves_a_minimum_to_one_request_where_the_transport_fails() -> None:
    def one(mode: str, response: tuple[int, ...]) -> Life:
        life = Life(mode=mode, budget=2, min_new_tokens=1, attempts=attempts("drop-before"))
        return life.call(Ask(2, response, "length"), after=view(response, TRUNCATED))

    assert judge("MODE-EQ", one(STREAM, (5,)), one(PLAIN, (5, 6))) is None


def test_RESUME_EQ_says_nothing_where_the_engine_loses_ids() -> None:
    def one(*response: int) -> Life:
        life = Life(budget=2, attempts=attempts("lost-ids"))
        return life.call(Ask(2, response, "length"), after=view(response, TRUNCATED))

    assert judge("RESUME-EQ", one(5), baseline=one(5, 6)) is None


def test_MAXIMAL_knows_a_prompt_sent_as_text() -> None:
    """As a restart when the whole budget is asked for, otherwise as a resumption that sends no ids."""
    life = Life(budget=3).call(Ask(3, (5,), "abort"), after=view((5,)))
    assert judge("MAXIMAL", life.call(Ask(3, (5, 6, 7), "length", text="p"), after=view((5, 6, 7), TRUNCATED))) is HOLDS
    life = Life(budget=3).call(Ask(3, (5,), "abort"), after=view((5,)))
    assert problem("MAXIMAL", life.call(Ask(1, (6,), "length", text="p"), after=view((5, 6)))) == "may ask 2"


def test_PREFIX_judges_the_request_of_a_call_that_hangs() -> None:
    assert judge("PREFIX", Life(budget=2).call(Ask(2), halts="hang")) is HOLDS
    assert "prompt ids" in problem("PREFIX", Life(budget=2).call(Ask(2, ids=(9,)), halts="hang"))


def test_PREFIX_leaves_lengths_that_disagree_to_ALIGN() -> None:
    cut = view((5,), TRUNCATED, tokens=(*PROMPT[:2], 5))
    for after in (cut, view((5,), TRUNCATED, logprobs=None), view((5,), TRUNCATED, logprobs=(-1.0, -2.0))):
        assert judge("PREFIX", Life(budget=1).call(Ask(1, (5,), "length"), after=after)) is HOLDS
    other = view((5,), TRUNCATED, tokens=(9, *PROMPT[1:], 5))
    assert problem("PREFIX", Life(budget=1).call(Ask(1, (5,), "length"), after=other)) == (
        "the prompt ids on the sample change"
    )


def test_PREFIX_knows_no_logprobs_of_a_sample_that_came_without() -> None:
    life = Life(budget=2, start=view((5,), logprobs=None), preload=1)
    assert judge("PREFIX", life.call(Ask(1, (6,), "length"), after=view((5, 6), TRUNCATED))) is HOLDS


def test_RETRY_compares_calls_from_equal_states_only() -> None:
    def two(mode: str, kept: tuple[int, ...], *tries: Ask) -> Life:
        life = Life(mode=mode, budget=3, attempts=attempts("abort", "http"))
        return life.call(Ask(3, kept, "abort"), after=view(kept)).call(*tries, raises="Transient")

    fault = Ask(2, fault="http", code=503)
    assert problem("RETRY", two(STREAM, (5,), fault, fault), two(PLAIN, (5,), fault)) == (
        "2 requests here, 1 in mode plain"
    )
    assert judge("RETRY", two(STREAM, (5,), fault, fault), two(PLAIN, (), fault)) is HOLDS


def test_STATUS_says_nothing_of_a_call_that_hangs() -> None:
    assert judge("STATUS", Life(budget=2).call(Ask(2, (5,), "length"), halts="hang")) is None


def test_STATUS_is_broken_by_an_end_that_nobody_asked_for() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    assert problem("STATUS", life.call(after=view((5,), TRUNCATED))) == "truncated unasked, though 1 tokens may be had"


def test_STATUS_allows_raising_where_the_connection_breaks_behind_the_answer() -> None:
    life = Life(budget=2, attempts=attempts("drop-after"))
    assert judge("STATUS", life.call(Ask(2, (5, 6), "length"), raises="ClientError")) is HOLDS
    life = Life(budget=2).call(Ask(2, (5, 6), "length"), raises="ClientError")
    assert problem("STATUS", life) == "finish_reason length, yet raises ClientError"


def test_STATUS_allows_raising_under_the_flag_item_9() -> None:
    """The end need not have been read."""
    life = Life(budget=2, attempts=attempts("flag"))
    assert judge("STATUS", life.call(Ask(2, (5, 6), "length"), flag=True, raises="Aborted")) is HOLDS


def test_STATUS_allows_both_where_a_stop_token_is_the_last_of_the_budget() -> None:
    for status in (TRUNCATED, COMPLETED):
        life = Life(budget=2).call(Ask(2, (5, EOS), "length"), after=view((5, EOS), status))
        assert judge("STATUS", life) is HOLDS
    life = Life(budget=2).call(Ask(2, (5, 6), "length"), after=view((5, 6), COMPLETED))
    assert problem("STATUS", life) == "finish_reason length, status completed"


def test_what_comes_after_a_call_s_end_or_for_another_call_is_none_of_its_turn() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    late = Delivered(0, 0, 0, (6,), (probability(1),), "length", None)
    life.events.append(late)  # a connection that was left brings it to nobody
    life.call(Ask(1, (7,), "length"), after=view((5, 7), TRUNCATED))
    end = life.events.pop()
    assert isinstance(end, Returned)
    life.events += [late, end]  # it belongs to the call before
    first, second = Trace(life.history).turns
    assert [e.ids for e in first.exchanges] == [(5,)]
    assert [e.ids for e in second.exchanges] == [(7,)]


def test_MODE_EQ_says_nothing_where_the_engine_loses_ids() -> None:
    def one(mode: str, *response: int) -> Life:
        life = Life(mode=mode, budget=2, attempts=attempts("lost-ids"))
        return life.call(Ask(2, response, "length"), after=view(response, TRUNCATED))

    assert judge("MODE-EQ", one(STREAM, 5), one(PLAIN, 5, 6)) is None


def test_ALIGN_leaves_logprobs_from_a_buffer_to_a_client_that_never_asks_for_any() -> None:
    """Arrays that were never asked for are not judged; one that the client writes is its own."""
    known = view((5,))

    def one(*asks: Ask, **after: object) -> Life:
        return Life(budget=3, start=known, preload=1).call(*asks, after=view((5, 6, 7), TRUNCATED, **after))

    never, once = Ask(2, (6, 7), "length", asks_logprobs=False), Ask(2, (6, 7), "length")
    assert judge("ALIGN", one(never, logprobs=known.logprobs)) is HOLDS
    assert problem("ALIGN", one(never, logprobs=(-1.0, -2.0))) == "response_length 3, logprobs 2"
    assert problem("ALIGN", one(once, logprobs=known.logprobs)) == "response_length 3, logprobs 1"
    earlier = Life(budget=3).call(Ask(3, (5,), "abort"), after=known)
    later = earlier.call(never, after=view((5, 6, 7), TRUNCATED, logprobs=known.logprobs))
    assert problem("ALIGN", later) == "response_length 3, logprobs 1"


def test_STATUS_knows_an_abort_on_the_stop_token_that_the_client_has_dropped() -> None:
    def one(*got: int) -> Life:
        return Life(budget=3).call(Ask(3, got, "abort"), after=view(got[:-1], "completed"))

    assert judge("STATUS", one(5, EOS)) is HOLDS
    assert problem("STATUS", one(5, 6)) == "finish_reason abort, status completed"
