"""A finding to the letter: the call, the sample and the message, for everything a checker can say.

The message stands beside an attempt on one screen, so a wrong call or number misleads whoever reads it. Wherever a
rule looks at siblings too, the broken call here is the sibling's, and not the first.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkers import Finding
from harness.history import ABORTED, COMPLETED, FAILED, PLAIN, STREAM, TRUNCATED
from harness.schedule import Attempt
from tests.unit.histories import NEW, PROMPT, Ask, Life, attempts, judge, probability, view


def second(**schedule: Any) -> Life:
    """Two samples, of which the first was called once and asked nothing, because the flag was up."""
    return Life(samples=2, **schedule).call(flag=True, after=view(()))


def resumed(got: tuple[int, ...] = (5, 6), **schedule: Any) -> Life:
    """As `second`, and the sibling was aborted once: its next call is call 2."""
    asked = schedule["budget"]
    return second(**schedule).call(Ask(asked, got, "abort"), after=view(got), sample=1)


def buffered(kept: tuple[int, ...], **schedule: Any) -> Life:
    """One sample that a buffer brought."""
    return Life(start=view(kept), preload=len(kept), **schedule)


LOGPROBS = "the logprobs are not those that were delivered"
FINDINGS = [
    ("BUDGET", resumed((5,), budget=3).call(Ask(3), sample=1), Finding(2, "may ask at most 2", 1)),
    ("BUDGET", resumed((5,), budget=2).call(Ask(2), sample=1), Finding(2, "may ask at most 1", 1)),
    ("BUDGET", resumed(budget=2).call(Ask(1), sample=1), Finding(2, "may ask nothing", 1)),
    (
        "BUDGET",
        resumed((5,), budget=2).call(Ask(params={"max_new_tokens": None}), sample=1),
        Finding(2, "asks without a limit; 1 are left of 2", 1),
    ),
    (
        "BUDGET",
        buffered((5, 6, 7), budget=2).call(Ask(params={"max_new_tokens": None})),
        Finding(0, "asks without a limit; 0 are left of 2"),
    ),
    (
        "BUDGET",
        second(budget=2).call(Ask(2, (5, 6, 7), "length"), after=view((5, 6, 7), TRUNCATED), sample=1),
        Finding(1, "total 3 > budget 2", 1),
    ),
    ("BUDGET", buffered((5, 6, 7), budget=2).call(after=view((5, 6, 7, 8))), Finding(0, "total 4 > budget 2")),
    ("MAXIMAL", second(budget=8).call(Ask(5), sample=1), Finding(1, "may ask 8", 1)),
    ("MAXIMAL", second(budget=1).call(Ask(0), sample=1), Finding(1, "may ask 1", 1)),
    ("CONTEXT", second(budget=8, context=10).call(Ask(8), sample=1), Finding(1, "input 3 + 8 > context 10", 1)),
    ("CONTEXT", second(budget=8, context=3).call(Ask(1), sample=1), Finding(1, "input 3 + 1 > context 3", 1)),
    (
        "CONTEXT",
        second(budget=8, context=10).call(Ask(7, (5, 6), "abort"), after=view((5, 6)), sample=1).call(Ask(6), sample=1),
        Finding(2, "input 5 + 6 > context 10", 1),
    ),
    (
        "CONTEXT",
        Life(budget=8, context=10, images=1).call(Ask(8, text="p", images=1)),
        Finding(0, "input 3 + 8 > context 10"),
    ),
    ("CONTEXT", buffered((5,), budget=8, context=10).call(Ask(7, text="q")), Finding(0, "input 4 + 7 > context 10")),
    (
        "CONTEXT",
        second(budget=8, context=4).call(Ask(1, (5, 6), "length"), after=view((5, 6), TRUNCATED), sample=1),
        Finding(1, "prompt and response 5 > context 4", 1),
    ),
    ("EXHAUSTED", resumed(budget=2).call(Ask(0), sample=1), Finding(2, "no room is left, yet asks 0", 1)),
    (
        "EXHAUSTED",
        resumed(budget=2).call(raises="Refused", sample=1),
        Finding(2, "no room is left, yet raises Refused", 1),
    ),
    ("EXHAUSTED", resumed(budget=2).call(sample=1), Finding(2, "no room is left, yet the status is aborted", 1)),
    (
        "EXHAUSTED",
        resumed(budget=2).call(flag=True, after=view((5, 6), COMPLETED), sample=1),
        Finding(2, "no room is left, yet the status is completed", 1),
    ),
    (
        "EXHAUSTED",
        resumed(budget=2).call(after=view((5, 7), TRUNCATED), sample=1),
        Finding(2, "no room is left, yet the tokens change", 1),
    ),
    (
        # The ids are the same where there are none to speak of; the length says that they were more.
        "EXHAUSTED",
        resumed(budget=2).call(after=view((5, 6), TRUNCATED, response_length=9), sample=1),
        Finding(2, "no room is left, yet the tokens change", 1),
    ),
    (
        "EXHAUSTED",
        Life(budget=0).call(after=view((), TRUNCATED, response_length=9)),
        Finding(0, "no room is left, yet the tokens change"),
    ),
    (
        "EXHAUSTED",
        resumed(budget=2).call(after=view((5, 6), TRUNCATED, response="5"), sample=1),
        Finding(2, "no room is left, yet the text or the logprobs change", 1),
    ),
    (
        "EXHAUSTED",
        resumed(budget=2).call(after=view((5, 6), TRUNCATED, logprobs=None), sample=1),
        Finding(2, "no room is left, yet the text or the logprobs change", 1),
    ),
    (
        "PREFIX",
        second(budget=4, images=2).call(Ask(4, images=1), sample=1),
        Finding(1, "the request carries 1 of 2 images", 1),
    ),
    (
        "PREFIX",
        second(budget=4).call(Ask(4, text="p"), sample=1),
        Finding(1, "the request carries text, not the ids", 1),
    ),
    (
        "PREFIX",
        Life(budget=4, images=1).call(Ask(4, text="q", images=1)),
        Finding(0, "the request carries text, not the ids"),
    ),
    (
        "PREFIX",
        second(budget=4).call(Ask(4, ids=(1, 2)), sample=1),
        Finding(1, "the input does not begin with the 3 prompt ids", 1),
    ),
    (
        "PREFIX",
        resumed(budget=4).call(Ask(2, kept=(5,)), sample=1),
        Finding(2, "the input has 1 response ids, not the 2 kept", 1),
    ),
    (
        # What came in this call counts only from where the sample was at its start.
        "PREFIX",
        resumed(budget=6).call(Ask(4, (7,), fault="drop-inside"), Ask(3, kept=(8, 6, 7)), sample=1),
        Finding(2, "the input has 3 response ids, not the 2 kept", 1),
    ),
    (
        "PREFIX",
        second(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), tokens=(9, 2, 3, 5)), sample=1),
        Finding(1, "the prompt ids on the sample change", 1),
    ),
    (
        "PREFIX",
        second(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), logprobs=(0.0, 0.0)), sample=1),
        Finding(1, LOGPROBS, 1),
    ),
    ("PREFIX", resumed(budget=4).call(after=view((5, 6), logprobs=(0.0, 0.0)), sample=1), Finding(2, LOGPROBS, 1)),
    (
        "PREFIX",
        resumed(budget=4).call(Ask(2, (7,), "stop"), after=view((5, 8, 7)), sample=1),
        Finding(2, "the 2 kept tokens change", 1),
    ),
    (
        "PREFIX",
        resumed(budget=4).call(Ask(4, (7,), "stop", kept=()), after=view((5, 6, 7)), sample=1),
        Finding(2, "the request leaves out what stays on the sample (2 tokens)", 1),
    ),
    (
        "PREFIX",
        resumed(budget=4).call(Ask(2, (7,), "stop"), after=view((5, 6, 8)), sample=1),
        Finding(2, "keeps 3 tokens that no request brought together", 1),
    ),
    (
        "PREFIX",
        second(budget=4).call(Ask(4, (5, 6, 7), "abort"), after=view((5,)), sample=1),
        Finding(1, "keeps 1 of 3 tokens, which did not come apart there", 1),
    ),
    (
        "PREFIX",
        resumed(budget=8).call(Ask(6, (7, 8, 9), "abort"), after=view((5, 6, 7, 8)), sample=1),
        Finding(2, "keeps 2 of 3 tokens, which did not come apart there", 1),
    ),
    (
        "STATUS",
        second(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), ABORTED), sample=1),
        Finding(1, "finish_reason stop, status aborted", 1),
    ),
    (
        "STATUS",
        second(budget=4).call(Ask(4, (5,), "tool_calls"), after=view((5,), COMPLETED), sample=1),
        Finding(1, "finish_reason tool_calls, status completed", 1),
    ),
    (
        "STATUS",
        second(budget=4).call(Ask(4, (), "abort"), raises="KeyError", after=view((), FAILED), sample=1),
        Finding(1, "finish_reason abort, yet raises KeyError", 1),
    ),
    (
        "STATUS",
        second(budget=4).call(Ask(4, (5,), fault="close"), after=view((5,), COMPLETED), sample=1),
        Finding(1, "no terminal event, status completed", 1),
    ),
    (
        "STATUS",
        second(budget=4).call(Ask(4, (5,), fault="close"), after=view((5,), TRUNCATED), sample=1),
        Finding(1, "no terminal event, status truncated", 1),
    ),
    (
        "STATUS",
        second(budget=4)
        .call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED), sample=1)
        .call(Ask(3, (6,), "stop"), after=view((5, 6), COMPLETED), sample=1),
        Finding(2, "asks again for a sample that is completed", 1),
    ),
    (
        "STATUS",
        second(budget=4)
        .call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED), sample=1)
        .call(after=view((6,), COMPLETED), sample=1),
        Finding(2, "changes a sample that is completed", 1),
    ),
    (
        "STATUS",
        Life(budget=4).call(flag=True, after=view(())).call(after=view((), TRUNCATED)),
        Finding(1, "truncated unasked, though 4 tokens may be had"),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), response_length=3), sample=1),
        Finding(1, "response_length 3, but tokens hold 2 after the prompt", 1),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), tokens=()), sample=1),
        Finding(1, "response_length 2, but tokens hold 0 after the prompt", 1),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), loss_mask=(1,)), sample=1),
        Finding(1, "response_length 2, loss mask 1", 1),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), logprobs=None), sample=1),
        Finding(1, "response_length 2, no logprobs", 1),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), logprobs=(-1.0,)), sample=1),
        Finding(1, "response_length 2, logprobs 1", 1),
    ),
    (
        "ALIGN",
        second(budget=8).call(Ask(8, (5, 6), "stop"), after=view((5, 6), arrays={"a": 2, "b": 1}), sample=1),
        Finding(1, "response_length 2, b 1", 1),
    ),
    (
        "TEXT",
        second(budget=4).call(Ask(4, (5, 6), "stop"), after=view((5, 6), response="6 "), sample=1),
        Finding(1, "the text is '6 ', its tokens say '5 6 '", 1),
    ),
    (
        # From eight characters before the two part, twenty of each.
        "TEXT",
        Life(budget=4).call(
            Ask(4, (5,), "stop"),
            after=view((5,), response="0123456789abcdefghijklmnopqrstuvwxyz"),
            decoded=("0123456789Abcdefghijklmnopqrstuvwxyz", "never looked at"),
        ),
        Finding(0, "the text is ...'23456789abcdefghijkl', its tokens say ...'23456789Abcdefghijkl'"),
    ),
    (
        "TEXT",
        Life(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), response="01234567x"), decoded=("01234567y",)),
        Finding(0, "the text is '01234567x', its tokens say '01234567y'"),
    ),
    (
        # The text ends early: where it ends is where they part.
        "TEXT",
        Life(budget=4).call(Ask(4, (5,), "stop"), after=view((5,), response="0123456789"), decoded=("0123456789ab",)),
        Finding(0, "the text is ...'23456789', its tokens say ...'23456789ab'"),
    ),
    (
        "NO-ALIAS",
        second(budget=4).call(Ask(4), left={"max_new_tokens": 1}, sample=1),
        Finding(1, "the caller's max_new_tokens was 4, is 1", 1),
    ),
    ("NO-ALIAS", second(budget=4).call(Ask(4), writes=("a", "b"), sample=1), Finding(1, "sets args.a", 1)),
    ("NO-ALIAS", second(budget=4).call(after=view((), prompt="q"), sample=1), Finding(1, "changes the prompt", 1)),
    (
        "NO-ALIAS",
        second(budget=4).call(Ask(4), others=(view((9,)),), sample=1),
        Finding(1, "changes a sibling sample", 1),
    ),
    (
        "RETRY",
        second(budget=4).call(*[Ask(4, fault="http", code=400)] * 2, raises="Refused", sample=1),
        Finding(1, "HTTP 400 is asked again", 1),
    ),
    (
        "RETRY",
        second(budget=4).call(*[Ask(4, fault="http", code=422)] * 3, raises="Refused", sample=1),
        Finding(1, "HTTP 422 is asked again 2 times", 1),
    ),
    ("RETRY", second(budget=4).call(Ask(4), halts="storm", sample=1), Finding(1, "it goes on and on", 1)),
    (
        "PARAMS",
        second(budget=8).call(Ask(8, params={"stop": "y"}), given={"stop": ["x"]}, sample=1),
        Finding(1, "stop is ['x'], on the wire 'y'", 1),
    ),
    (
        "PARAMS",
        second(budget=8).call(Ask(8), given={"stop_token_ids": [7]}, sample=1),
        Finding(1, "stop_token_ids is [7], on the wire None", 1),
    ),
    (
        "PARAMS",
        second(budget=8).call(Ask(8, params={"sampling_seed": 8}), given={"sampling_seed": 7}, sample=1),
        Finding(1, "sampling_seed is 7, on the wire 8", 1),
    ),
    ("PARAMS", second(budget=8).call(Ask(), sample=1), Finding(1, "max_new_tokens does not reach the wire", 1)),
    (
        "PARAMS",
        second(budget=8).call(Ask(8, params={"min_new_tokens": 9}), sample=1),
        Finding(1, "min_new_tokens 9 with max_new_tokens 8", 1),
    ),
    (
        "PARAMS",
        second(budget=8).call(Ask(8, params={"min_new_tokens": -1}), sample=1),
        Finding(1, "min_new_tokens -1 with max_new_tokens 8", 1),
    ),
    (
        "PARAMS",
        second(budget=8).call(Ask(8, params={"min_new_tokens": "4"}), sample=1),
        Finding(1, "min_new_tokens 4 with max_new_tokens 8", 1),
    ),
    (
        "PARAMS",
        second(budget=8).call(Ask(-1, params={"min_new_tokens": 1}), sample=1),
        Finding(1, "min_new_tokens 1 with max_new_tokens -1", 1),
    ),
    (
        "PARAMS",
        resumed(budget=8, min_new_tokens=4).call(Ask(6, params={"min_new_tokens": 4}), sample=1),
        Finding(1, "4 remain of the minimum 4, sends 0", 1),
    ),
    (
        "PARAMS",
        buffered((5,), budget=8, min_new_tokens=4).call(Ask(2, params={"min_new_tokens": 1})),
        Finding(0, "3 remain of the minimum 4, sends 1"),
    ),
]


@pytest.mark.parametrize(
    ("rule", "life", "expected"), FINDINGS, ids=[f"{rule} {finding.message}" for rule, _, finding in FINDINGS]
)
def test_a_finding_names_the_call_the_sample_and_what_is_wrong(rule: str, life: Life, expected: Finding) -> None:
    assert judge(rule, life) == expected


END = view((5, 6, 7, 8), TRUNCATED)
COMPARED = [
    (view((5, 6, 7), TRUNCATED), END, "response_length 4, here 3"),
    (view((5, 6, 7, 9), TRUNCATED), END, "tokens [1, 2, 3, 5, 6, 7, 8], here [1, 2, 3, 5, 6, 7, 9]"),
    # 40 characters are shown whole, 41 are not.
    (
        view((10, 11, 12, 13, 14, 15, 16, 17), TRUNCATED),
        view((9, 11, 12, 13, 14, 15, 16, 17), TRUNCATED),
        "tokens [1, 2, 3, 9, 11, 12, 13, 14, 15, 16, 17], here [1, 2, 3, 10, 11, 12, 13, 14, 15, 16,...",
    ),
    (view((5, 6, 7, 8), COMPLETED), END, "status truncated, here completed"),
    (view((5, 6, 7, 8), TRUNCATED, logprobs=None), END, "other logprobs"),
    (view((5, 6, 7, 8), TRUNCATED, logprobs=(0.0,) * 4), END, "other logprobs"),
    (
        view((5, 6, 7, 8), TRUNCATED, response="0123456789abcdefghijk!"),
        view((5, 6, 7, 8), TRUNCATED, response="0123456789abcdefghijk"),
        "text '0123456789abcdefghij', here '0123456789abcdefghij'",
    ),
    (view((5, 6, 7, 8), TRUNCATED, response="!"), END, "text '5 6 7 8 ', here '!'"),
]


@pytest.mark.parametrize(("after", "expected", "said"), COMPARED, ids=[said for _, _, said in COMPARED])
def test_a_difference_says_what_was_expected_and_what_is_here(after: Any, expected: Any, said: str) -> None:
    """[RESUME-EQ] of the run that nothing interrupted, [MODE-EQ] of the attempt in the other mode."""
    once = Life(budget=4).call(Ask(4, (5, 6, 7, 8), "length"), after=expected)
    again = Life(budget=4, attempts=attempts("abort")).call(Ask(4, (5,), "abort"), after=view((5,)))
    again.call(Ask(3, (6, 7, 8), "length"), after=after)
    assert judge("RESUME-EQ", again, baseline=once) == Finding(None, f"uninterrupted: {said}")
    plain = Life(budget=4).call(flag=True, after=NEW).call(Ask(4, (5, 6, 7, 8), "length"), after=expected)
    stream = Life(mode=STREAM, budget=4).call(flag=True, after=NEW).call(Ask(4, (5, 6, 7, 8), "length"), after=after)
    assert judge("MODE-EQ", stream, plain) == Finding(1, f"mode plain: {said}")


def test_MODE_EQ_names_no_call_where_the_runs_are_not_equally_long() -> None:
    plain = Life(budget=4).call(after=NEW).call(after=NEW)
    stream = Life(mode=STREAM, budget=4).call(after=NEW)
    assert judge("MODE-EQ", stream, plain) == Finding(None, "mode plain: 2 calls, here 1")


def test_MODE_EQ_names_no_call_where_the_final_samples_differ() -> None:
    plain = Life(budget=4, attempts=attempts("close")).call(Ask(4, (5,), "stop"), after=view((5,), COMPLETED))
    stream = Life(mode=STREAM, budget=4, attempts=attempts("close"))
    stream.call(Ask(4, (6,), "stop"), after=view((6,), COMPLETED))
    assert judge("MODE-EQ", stream, plain) == Finding(None, "mode plain: tokens [1, 2, 3, 5], here [1, 2, 3, 6]")


def test_RETRY_names_the_call_that_differs_between_the_modes() -> None:
    busy, kinds = Ask(4, fault="http", code=503), (Attempt(), Attempt("http", code=503))
    lives = [Life(mode=mode, budget=4, attempts=kinds).call(flag=True, after=NEW) for mode in (PLAIN, STREAM)]
    lives[0].call(busy, busy, Ask(4, (5,), "stop"), after=view((5,), COMPLETED))
    lives[1].call(busy, raises="Transient")
    assert judge("RETRY", lives[1], lives[0]) == Finding(1, "1 requests here, 3 in mode plain")


def test_the_views_here_have_what_the_engine_delivers() -> None:
    assert view((5, 6)).logprobs == (probability(0), probability(1))
    assert view((5, 6)).tokens == (*PROMPT, 5, 6)
