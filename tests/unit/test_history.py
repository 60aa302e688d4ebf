"""A history is data: it goes through JSON and comes back the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import history
from harness.history import (
    MODES,
    PLAIN,
    Called,
    Delivered,
    Faulted,
    Flagged,
    Halted,
    History,
    Raised,
    Requested,
    Returned,
    SampleView,
)
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.strategies import schedules
from harness.targets.function import FunctionTarget, reference


def through_json(one: History) -> History:
    return history.from_json(json.loads(json.dumps(history.to_json(one), allow_nan=False)))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner(reference())
    yield made
    made.close()


class TestRoundTrip:
    @settings(max_examples=150, deadline=None)
    @given(schedule=schedules() | schedules(faulty=True), mode=st.sampled_from(MODES))
    def test_what_a_run_gives(self, runner: Runner, schedule: Schedule, mode: str) -> None:
        run = runner.run(schedule, mode)
        assert through_json(run) == run

    def test_every_event_and_every_field(self) -> None:
        """Fields away from their defaults, so that none can be dropped unseen."""
        view = SampleView(
            (1, 2, 3), 2, "é日\n", (1, 0), (-0.5, -1.25), "aborted", "prompt", {"teacher_log_probs": 2}, False
        )
        bare = SampleView()
        params = {"max_new_tokens": 3, "stop": ["x"], "stop_token_ids": None, "temperature": 1.0}
        events = (
            Called(1, 2, params, view),
            Requested(1, 2, 3, True, (1, 2), None, 1, params, True),
            Requested(1, 2, 4, False, None, "text", 0, {}, False),
            Delivered(1, 2, 3, (4, 5), (-0.25, -0.75), "abort", 503, True),
            Delivered(1, 2, 3, (), (), None),
            Faulted(1, 2, 3, "http", 503, "busy"),
            Flagged(1, 2, None),
            Flagged(1, 2, 3),
            Returned(1, 2, view, params, ("a", "b"), (bare, view), ("rollout_abort",)),
            Raised(1, 2, "ValueError", "no", view, params, ("a",), (view,), ("x",)),
            Halted(1, 2, "hang", "it waits"),
        )
        assert {type(e).__name__ for e in events} == history.EVENTS.keys()
        one = History(Schedule(attempts=(Attempt("abort", after=1),)), PLAIN, (1, 2), 271, events)
        assert through_json(one) == one

    def test_what_is_read_back_is_as_immutable(self) -> None:
        one = History(Schedule(), PLAIN, (1,), 2, (Delivered(0, 0, 0, (1,), (-1.0,)),))
        (event,) = through_json(one).events
        assert isinstance(event, Delivered)
        assert isinstance(event.ids, tuple)
        with pytest.raises(AttributeError):
            event.ids = ()  # type: ignore[misc]

    def test_logprobs_are_exact(self) -> None:
        one = History(Schedule(), PLAIN, (1,), 2, (Delivered(0, 0, 0, (1, 2), (0.1 + 0.2, -1e-300)),))
        assert through_json(one) == one

    def test_an_unknown_event_is_refused(self) -> None:
        data = history.to_json(History(Schedule(), PLAIN, (), 0, ()))
        with pytest.raises(KeyError):
            history.from_json(data | {"events": [["Exploded", 0]]})

    def test_an_event_with_too_few_fields_is_refused(self) -> None:
        data = history.to_json(History(Schedule(), PLAIN, (), 0, ()))
        with pytest.raises(ValueError, match="shorter"):
            history.from_json(data | {"events": [["Flagged", 0]]})


def test_events_hold_values_not_references(runner: Runner) -> None:
    """A client that changes its payload, its params and its sample afterwards changes no event."""
    seen: list[Any] = []

    async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        seen.append((sample, params))
        sample.tokens = [1, 2]
        sample.response_length = 1
        sample.loss_mask = [1]
        sample.rollout_log_probs = [-1.0]
        sample.status = type(sample).Status.TRUNCATED
        return sample

    runner.target, before = FunctionTarget("keeps", generate, generate), runner.target
    try:
        run = runner.run(Schedule(stop=("x",)), PLAIN)
    finally:
        runner.target = before
    expected = json.dumps(history.to_json(run))
    for sample, params in seen:
        sample.tokens.append(9)
        sample.loss_mask.clear()
        params["stop"].append("y")
        params["max_new_tokens"] = 0
    assert json.dumps(history.to_json(run)) == expected
