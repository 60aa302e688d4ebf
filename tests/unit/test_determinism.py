"""Whether an engine says the same twice, seen from what it was sent and what came back."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkers.determinism import differs, disturbed, incomparable
from harness.checkers.trace import Trace
from harness.schedule import Attempt
from tests.unit.histories import PROMPT, Ask, Life, view


def trace(*asks: Ask) -> Trace:
    life = Life(budget=9)
    for ask in asks:
        life.call(ask, after=view(ask.got))
    return Trace(life.history)


def said(position: int) -> str:
    return f"the engine is not deterministic: after the same {position} tokens it went on in two ways"


def test_without_anything_to_compare() -> None:
    assert differs() is None
    assert differs(None, trace(Ask(4, (5, 6)))) is None
    assert differs(trace(Ask(4, (), fault="http", code=500)), trace(Ask(4, (5, 6)))) is None


def test_the_same_twice() -> None:
    assert differs(trace(Ask(4, (5, 6, 7))), trace(Ask(4, (5, 6, 7)))) is None
    assert differs(trace(Ask(4, (5, 6))), trace(Ask(9, (5, 6, 7)))) is None  # one had less to say


@pytest.mark.parametrize(("other", "position"), [((9, 6, 7), 3), ((5, 9, 7), 4), ((5, 6, 9), 5)])
def test_after_the_same_input_it_goes_on_otherwise(other: tuple[int, ...], position: int) -> None:
    one, two = trace(Ask(4, (5, 6, 7))), trace(Ask(4, other))
    assert differs(one, two) == differs(two, one) == differs(None, one, two) == said(position)
    assert differs(trace(Ask(4, (5, 6, 7)), Ask(4, other, ids=PROMPT))) == said(position)  # in one run


def resumed(got: tuple[int, ...], *kept: int, **more: Any) -> Ask:
    return Ask(4, got, ids=(*PROMPT, *kept), **more)


def probabilities(*given: float) -> dict[str, Any]:
    return {"logprobs": given}


def test_where_a_request_goes_on_with_what_another_was_told() -> None:
    whole = trace(Ask(4, (5, 6, 7, 8), **probabilities(-1, -2, -3, -4)))
    assert differs(whole, trace(resumed((7, 8), 5, 6, **probabilities(-3, -4)))) is None
    assert differs(whole, trace(resumed((7, 9), 5, 6, **probabilities(-3, -4)))) == said(6)
    assert differs(trace(resumed((9,), 5, 6, **probabilities(-3))), whole) == said(5)


def test_inputs_that_have_no_common_beginning() -> None:
    whole = trace(Ask(4, (5, 6, 7, 8)))
    assert differs(whole, trace(resumed((1, 2), 5, 9))) is None  # a client that changed a token has itself to blame
    assert differs(whole, trace(Ask(4, (1, 2), ids=(7, 7)))) is None
    assert differs(whole, trace(resumed((1, 2), 5, 6, 7, 8, 9))) is None  # or that added one


def test_logprobs_may_be_rounded_and_no_more() -> None:
    whole = trace(Ask(4, (5, 6), **probabilities(-1, -2)))
    assert differs(whole, trace(Ask(4, (5, 6), **probabilities(-1, -2.03)))) is None
    assert differs(whole, trace(Ask(4, (5, 6), **probabilities(-1, -2.04)))) == said(3)
    assert differs(whole, trace(resumed((6,), 5, **probabilities(-2.04)))) == said(4)


def test_a_client_that_asks_for_no_logprobs_is_not_covered_by_that() -> None:
    whole = trace(Ask(4, (5, 6), **probabilities(-1, -2)))
    assert differs(whole, trace(Ask(4, (5, 6), asks_logprobs=False, **probabilities(0, 0)))) is None
    assert differs(whole, trace(Ask(4, (5, 9), asks_logprobs=False, **probabilities(0, 0)))) == said(4)


def test_other_parameters_choose_other_tokens() -> None:
    """A client that loses one of them is to blame for what comes of it."""
    one = trace(Ask(4, (5, 6), params={"temperature": 0.0}))
    assert differs(one, trace(Ask(4, (5, 9)))) is None
    assert differs(one, trace(Ask(4, (5, 9), params={"temperature": 1.0}))) is None
    assert differs(one, trace(Ask(3, (5, 9), params={"temperature": 0.0}))) == said(4)


def test_a_minimum_counts_from_where_a_request_begins() -> None:
    least: dict[str, Any] = {"params": {"min_new_tokens": 2}}
    one = trace(Ask(4, (5, 6, 7), **least))
    assert differs(one, trace(Ask(4, (5, 9), **least))) == said(4)
    assert differs(one, trace(resumed((9,), 5, **least))) is None


def test_text_is_an_input_as_well() -> None:
    one = trace(Ask(4, (5, 6), text="p"))
    assert differs(one, trace(Ask(4, (5, 9), text="p"))) == said(1)
    assert differs(one, trace(Ask(4, (5, 9), text="q"))) is None
    assert differs(one, trace(Ask(4, (5, 9)))) is None


# Others on the server


def planned(kind: str, *asks: Ask) -> Trace:
    life = Life(budget=9, attempts=(Attempt(kind, after=1),))
    for ask in asks:
        life.call(ask, after=view(ask.got))
    return Trace(life.history)


@pytest.mark.parametrize("kind", ["run", "delay"])
@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (Ask(4, (5,), "abort"), "abort"),
        (Ask(4, (), "abort", status_code=503), "abort"),
        (Ask(4, (5,), fault="close"), "close"),
        (Ask(4, (), fault="http", code=503), "http"),
        (Ask(4, (), fault="http", code=429), "http"),
    ],
)
def test_an_answer_that_was_to_come_to_its_end_and_did_not(kind: str, ask: Ask, what: str) -> None:
    said = f"call 1: {what} by somebody else, or by the server itself"
    assert disturbed(planned(kind, ask)) == incomparable(None, trace(Ask(4, (5, 6))), planned(kind, ask)) == said


@pytest.mark.parametrize(
    "found",
    [
        planned("abort-request", Ask(4, (5,), "abort")),
        planned("close", Ask(4, (5,), fault="close")),
        planned("run", Ask(4, (5,), "stop")),
        planned("run", Ask(4, (), fault="http", code=400)),
        planned("run", Ask(4, (), fault="error-event", code=400)),
    ],
    ids=["planned", "cut", "ended", "refused", "refused late"],
)
def test_what_the_check_causes_or_the_server_always_does_is_no_disturbance(found: Trace) -> None:
    assert disturbed(found) is None and incomparable(found) is None


def test_a_request_that_is_sent_again_may_be_disturbed_too() -> None:
    """The schedule's fault comes once."""
    life = Life(budget=9, attempts=(Attempt("http", code=503),))
    life.call(Ask(4, (), fault="http", code=503), Ask(4, (5,), "abort"), after=view((5,)))
    assert disturbed(Trace(life.history)) == "call 1: abort by somebody else, or by the server itself"


def test_a_resumed_call_may_be_disturbed_too() -> None:
    found = planned("abort-request", Ask(4, (5,), "abort"), Ask(3, (), "abort"))
    assert disturbed(found) == "call 2: abort by somebody else, or by the server itself"


def test_undisturbed_runs_are_compared_by_what_the_engine_said() -> None:
    assert incomparable(trace(Ask(4, (5, 6))), trace(Ask(4, (5, 9)))) == said(4)
