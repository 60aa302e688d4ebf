"""Histories of loops by hand: rollouts of small groups, told event by event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.checkers import Finding, Judgement, RolloutCase, rollout_checker
from harness.history import COMPLETED, PLAIN, Called, Delivered, Raised, Requested, Returned, SampleView
from harness.rollouts import Began, Broke, Ended, Event, Group, Left, Member, RolloutHistory, Stopped, Taken
from harness.scenario import Scenario
from tests.unit.histories import EOS, NEW, PROMPT, view

BUDGET = 4
Told = Event | Iterable[Event]


def history(*told: Told, mode: str = PLAIN, **scenario: Any) -> RolloutHistory:
    """Events in a row; keyword arguments are the scenario's."""
    events: list[Event] = []
    for one in told:
        events += one if isinstance(one, list) else [one]  # type: ignore[list-item]
    prompts = {event.sample: PROMPT for event in events if isinstance(event, Called)}
    return RolloutHistory(Scenario(**{"budget": BUDGET, **scenario}), mode, EOS, prompts, tuple(events))


def judge(rule: str, *told: Told, **scenario: Any) -> Judgement:
    one = history(*told, **scenario)
    return rollout_checker(rule)(RolloutCase(one.mode, one))


def finding(rule: str, *told: Told, **scenario: Any) -> Finding:
    """What is found; fails where there is nothing."""
    found = judge(rule, *told, **scenario)
    assert isinstance(found, Finding), f"{rule} says {found}"
    return found


def problem(rule: str, *told: Told, **scenario: Any) -> tuple[int, str]:
    """The sample of the finding and what is wrong with it."""
    found = finding(rule, *told, **scenario)
    return found.sample, found.message


def call(
    sample: int = 0,
    attempt: int = 0,
    *,
    before: SampleView = NEW,
    asked: int = BUDGET,
    ids: tuple[int, ...] = (5,),
    finish: str = "stop",
    after: SampleView | None = None,
    versions: tuple[str, ...] = (),
    raises: str = "",
) -> list[Event]:
    """A call of generate that asks once, and keeps what it is given."""
    params = {"max_new_tokens": BUDGET}
    kept = before.tokens[len(PROMPT) :]
    place = (attempt, sample)
    after = view((*kept, *ids), COMPLETED if finish == "stop" else "aborted") if after is None else after
    return [
        Called(*place, params, before),
        Requested(*place, 0, False, PROMPT + kept, None, 0, {"max_new_tokens": asked}, True),
        Delivered(*place, 0, ids, (-1.0,) * len(ids), finish, None, False, versions),
        Raised(*place, raises, "", after, params) if raises else Returned(*place, after, params),
    ]


def member(sample: int, *views: SampleView, **other: Any) -> Member:
    return Member(sample, views or (view((5,), COMPLETED),), **other)


def groups(*samples: tuple[int, ...]) -> tuple[Group, ...]:
    """Groups of finished members."""
    return tuple(tuple(member(sample) for sample in group) for group in samples)


def taken(*samples: tuple[int, ...], rollout: int = 1) -> Taken:
    return Taken(rollout, samples)


def began(rollout: int = 1, budget: int = BUDGET) -> Began:
    return Began(rollout, budget)


def ended(
    trained: tuple[Group, ...] = (), buffer: tuple[Group, ...] = (), *, rollout: int = 1, left: Left | None = None
) -> Ended:
    return Ended(rollout, trained, buffer, left or Left())


def stopped(buffer: tuple[Group, ...] = (), left: Left | None = None) -> Stopped:
    return Stopped(buffer, left or Left())


def broke(passed_on: bool = False, buffer: tuple[Group, ...] = (), rollout: int = 1) -> Broke:
    return Broke(rollout, "KeyError", "'x'", passed_on, buffer)
