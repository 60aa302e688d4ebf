"""Histories of loops through JSON, and what says by its key what it is."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from harness import rollouts, work
from harness.history import (
    ABORTED,
    COMPLETED,
    PLAIN,
    STREAM,
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
from harness.rollouts import (
    Aborting,
    Began,
    Broke,
    Ended,
    Event,
    Left,
    Member,
    Restarted,
    RolloutHistory,
    Stopped,
    Straggled,
    Stuck,
    Taken,
    Updated,
)
from harness.scenario import Scenario, Step
from harness.schedule import Schedule, ScheduleError
from tests.unit.histories import view

ONE = view((5, 6), ABORTED)
FULL = Member(0, (ONE, view((5,), COMPLETED)), True, ("0", "1"), (("0", 1), ("1", 2)))
BARE = Member(1, (SampleView(),))
GROUPS = ((FULL, BARE), (BARE,), ())
LEFT = Left((3, 4), ("generate in post",), (1, 8))
EVENTS: tuple[Event, ...] = (
    Began(1, 4),
    Taken(1, ((0, 1), (2,), ())),
    Called(0, 1, {"max_new_tokens": 4}, ONE),
    Requested(0, 1, 0, True, (1, 2), None, 0, {"max_new_tokens": 4}, True),
    Delivered(0, 1, 0, (5, 6), (-1.0, -2.0), "abort", None, False, ("0", "1")),
    Faulted(0, 1, 0, "drop-before", 503, "gone"),
    Flagged(0, 1, None),
    Returned(0, 1, ONE, {}),
    Raised(0, 1, "OSError", "no", ONE, {}),
    Aborting(3),
    Updated("1"),
    Straggled(1, 2),
    Ended(1, GROUPS, (), LEFT),
    Ended(2, (), GROUPS, Left()),
    Broke(1, "KeyError", "'x'", True, GROUPS),
    Stuck(1, "it waits", ("a", "b")),
    Restarted(GROUPS, ()),
    Restarted((), GROUPS),
    Stopped(GROUPS, LEFT),
    Halted(0, 0, "hang", "no end"),
)
HISTORY = RolloutHistory(
    Scenario(budget=2, steps=(Step("tokens", 1, 2),)), STREAM, 99, {0: (1, 2, 3), 1: (), -1: (7,)}, EVENTS
)


def through_json(history: RolloutHistory) -> RolloutHistory:
    return rollouts.from_json(json.loads(json.dumps(rollouts.to_json(history))))


def test_every_event_and_every_field() -> None:
    named = {type(event).__name__ for event in EVENTS}
    assert named == {kind.__name__ for kind in rollouts.Event.__args__}
    assert through_json(HISTORY) == HISTORY


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_is_read_back_holds_no_list(event: Event) -> None:
    (read,) = through_json(RolloutHistory(Scenario(), PLAIN, 0, {}, (event,))).events
    assert hash(str(read)) and "[" not in str(read)
    assert [type(getattr(read, f.name)) for f in fields(read)] == [type(getattr(event, f.name)) for f in fields(event)]


@pytest.mark.parametrize("event", [["Exploded", 1], ["Left", [], [], None]])
def test_an_unknown_event_is_refused(event: Any) -> None:
    data = rollouts.to_json(HISTORY) | {"events": [event]}
    with pytest.raises(KeyError):
        rollouts.from_json(data)


def test_an_event_with_too_few_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        rollouts.from_json(rollouts.to_json(HISTORY) | {"events": [["Began", 0]]})


# Schedules and scenarios alike


@pytest.mark.parametrize(
    ("wanted", "key", "level"), [(Schedule(), "schedule", "sample"), (Scenario(), "scenario", "rollout")]
)
def test_work_says_by_its_key_what_it_is(wanted: work.Work, key: str, level: str) -> None:
    data = work.to_json(wanted)
    assert list(data) == [key]
    assert work.from_json({**data, "fault": "x"}) == wanted
    assert work.level(wanted) == level


def test_work_is_one_or_the_other() -> None:
    with pytest.raises(ScheduleError, match=r"^it holds neither a schedule nor a scenario$"):
        work.from_json({"history": {}})


@pytest.mark.parametrize(
    ("run", "key"), [(History(Schedule(), PLAIN, (1,), 2, (Flagged(0, 0, 1),)), "history"), (HISTORY, "rollouts")]
)
def test_a_run_says_by_its_key_what_it_is(run: work.Run, key: str) -> None:
    data = work.run_to_json(run)
    assert list(data) == [key]
    assert work.run_from_json(json.loads(json.dumps(data))) == run
