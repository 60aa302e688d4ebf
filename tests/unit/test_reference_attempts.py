"""One attempt of the reference, against the engine: what is asked, how often, and what is left on the sample."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.history import ABORTED, PENDING, PLAIN, STREAM, TRUNCATED, History, Raised, Requested, Returned, SampleView
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.targets.function import reference
from reference_impl import client
from reference_impl.generate import _whole, pairs

BOTH = pytest.mark.parametrize("mode", [PLAIN, STREAM])


def run(schedule: Schedule, mode: str) -> History:
    runner = Runner(reference())
    try:
        return runner.run(schedule, mode)
    finally:
        runner.close()


def first(history: History) -> tuple[list[Any], Returned | Raised]:
    """What the first call asked for, request by request, and how it ended."""
    asked = [e.params["max_new_tokens"] for e in history.events if isinstance(e, Requested) and e.attempt == 0]
    return asked, next(e for e in history.events if isinstance(e, Returned | Raised))


def attempt(mode: str, kind: str = "run", *, budget: int = 3, context: int | None = None, **plan: Any) -> Any:
    return first(run(Schedule(prompt="zz", budget=budget, context=context, attempts=(Attempt(kind, **plan),)), mode))


def left(view: SampleView) -> tuple[int, str]:
    return view.response_length, view.status


@BOTH
def test_an_input_that_the_engine_finds_too_long_ends_the_sample(mode: str) -> None:
    """Six below the context the engine refuses, whatever is asked."""
    asked, end = attempt(mode, context=8)
    assert (asked, left(end.view)) == ([3], (0, TRUNCATED))


@BOTH
def test_nothing_is_asked_where_nothing_is_left(mode: str) -> None:
    for numbers in ({"budget": 0}, {"context": 2}):
        asked, end = attempt(mode, **numbers)
        assert (asked, left(end.view)) == ([], (0, TRUNCATED))


@BOTH
def test_nothing_is_asked_under_the_flag(mode: str) -> None:
    asked, end = attempt(mode, "flag")
    assert (asked, left(end.view)) == ([], (0, ABORTED))


def test_the_flag_ends_a_stream_with_what_it_has_brought() -> None:
    asked, end = attempt(STREAM, "flag", budget=9, after=2)
    assert (asked, end.view.status) == ([9], ABORTED)
    assert 0 < end.view.response_length <= 2


FAULTS: dict[str, dict[str, Any]] = {
    "no answer": {"kind": "drop-before"},
    "503": {"kind": "http", "code": 503},
    "429": {"kind": "http", "code": 429},
    "queue": {"kind": "queue-full"},
}


@BOTH
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_may_pass_is_asked_again_and_not_for_ever(mode: str, fault: dict[str, Any]) -> None:
    asked, end = attempt(mode, **fault, times=client.RETRIES)
    assert (asked, left(end.view)) == ([3] * (client.RETRIES + 1), (3, TRUNCATED))
    asked, end = attempt(mode, **fault, times=client.RETRIES + 1)
    assert isinstance(end, Raised)
    assert (asked, end.error, left(end.view)) == ([3] * (client.RETRIES + 1), "Transient", (0, PENDING))


@BOTH
def test_a_refusal_is_the_last_word(mode: str) -> None:
    asked, end = attempt(mode, "http", code=400, times=9)
    assert isinstance(end, Raised)
    assert (asked, end.error, left(end.view)) == ([3], "Refused", (0, PENDING))


@BOTH
def test_more_than_was_asked_for_is_cut(mode: str) -> None:
    asked, end = attempt(mode, "over-deliver", after=2)
    assert (asked, left(end.view)) == ([3], (3, TRUNCATED))


@BOTH
def test_an_answer_without_an_end_can_be_resumed(mode: str) -> None:
    _, end = attempt(mode, "missing", field="finish_reason")
    assert left(end.view) == (3, ABORTED)


def test_a_reply_that_is_no_object_is_malformed() -> None:
    class Response:
        def __init__(self, value: Any) -> None:
            self.value = value

        async def json(self, content_type: str | None) -> Any:
            assert content_type is None  # whatever it is called
            return self.value

    response: Any = Response({"text": ""})
    assert asyncio.run(_whole(response)) == {"text": ""}
    response.value = ["x" * 100]
    with pytest.raises(client.MalformedReply, match=r"^the reply is no object: \['x{78}$"):
        asyncio.run(_whole(response))


@pytest.mark.parametrize("event", [{}, {"meta_info": None}, {"output_ids": [], "meta_info": {"completion_tokens": 0}}])
def test_an_event_that_brings_nothing_brings_no_pairs(event: dict[str, Any]) -> None:
    assert pairs(event) == ([], [])
