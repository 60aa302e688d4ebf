"""What happened when a loop ran a scenario: an append-only list of events, by value.

The calls of generate in it are told with the events of `harness.history`:
``sample`` is then the sample's index as the data source gave it, ``attempt`` the
number of its call in the whole scenario. Around them stand the loop's own events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness import scenario as scenarios
from harness.history import (
    EVENTS,
    Called,
    Delivered,
    Faulted,
    Flagged,
    Halted,
    Raised,
    Requested,
    Returned,
    SampleView,
    from_values,
    to_values,
    view_from_values,
)
from harness.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Member:
    """One place in a group. ``views``: its sample, or the samples that it was fanned out into.

    ``scored``: it has a reward. ``versions`` are the weights the client lists for
    it, ``spans`` its (weights, tokens); None where the client keeps none.
    """

    sample: int
    views: tuple[SampleView, ...]
    scored: bool = False
    versions: tuple[str, ...] | None = None
    spans: tuple[tuple[str, int], ...] | None = None


Group = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """What there still is of a loop that should be at rest.

    ``running`` are the samples of requests in the engine, ``tasks`` the tasks it
    left by name, ``permits`` (free, all) where the loop has some.
    """

    running: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    permits: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """A rollout is called, with this budget."""

    rollout: int
    budget: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The loop took groups from its data source; ``groups`` are the samples' indices."""

    rollout: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Aborting:
    """The engine was told to abort all requests; so many ran."""

    requests: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The engine has new weights."""

    version: str


@dataclass(frozen=True, slots=True)
class Straggled:
    """While the loop was aborting, nothing was left to wait for but this sample's request, which nobody aborts."""

    rollout: int
    sample: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout came back with ``groups`` for training; ``buffer`` is what its data source keeps for later."""

    rollout: int
    groups: tuple[Group, ...]
    buffer: tuple[Group, ...]
    left: Left


@dataclass(frozen=True, slots=True)
class Broke:
    """A rollout raised. ``passed_on``: a call of generate had raised this. ``buffer`` is as in `Ended`."""

    rollout: int
    error: str
    message: str
    passed_on: bool
    buffer: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rollout can never end, or does not within the bound. ``tasks`` are those that wait, by name."""

    rollout: int
    why: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restarted:
    """The buffer was saved and loaded by a new process: ``before`` and ``after``."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop was shut down."""

    buffer: tuple[Group, ...]
    left: Left


CallEvent = Called | Requested | Delivered | Faulted | Flagged | Returned | Raised
LoopEvent = Began | Taken | Aborting | Updated | Straggled | Ended | Broke | Stuck | Restarted | Stopped
Event = CallEvent | LoopEvent | Halted


@dataclass(frozen=True)
class RolloutHistory:
    """One run of a scenario on a loop, in one mode. ``prompts`` maps samples to their prompt's ids."""

    scenario: Scenario
    mode: str
    eos: int
    prompts: Mapping[int, tuple[int, ...]]
    events: tuple[Event, ...]


_LOOP: dict[str, Any] = {
    c.__name__: c for c in (Began, Taken, Aborting, Updated, Straggled, Ended, Broke, Stuck, Restarted, Stopped)
}
_GROUPS = ("buffer", "before", "after")


def to_json(history: RolloutHistory) -> dict[str, Any]:
    """The history as JSON data, lists for tuples."""
    return {
        "scenario": scenarios.to_json(history.scenario),
        "mode": history.mode,
        "eos": history.eos,
        "prompts": [[sample, ids] for sample, ids in history.prompts.items()],
        "events": [_values(e) if type(e).__name__ in _LOOP else to_values(e) for e in history.events],
    }


def from_json(data: Mapping[str, Any]) -> RolloutHistory:
    """The inverse of `to_json`, for data this module wrote."""
    return RolloutHistory(
        scenarios.from_json(data["scenario"]),
        data["mode"],
        data["eos"],
        {sample: tuple(ids) for sample, ids in data["prompts"]},
        tuple(from_values(*e) if e[0] in EVENTS else _event(*e) for e in data["events"]),
    )


def _values(value: Any) -> Any:
    if isinstance(value, SampleView):
        return [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, Member | Left):
        return [_values(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, tuple):
        return [_values(v) for v in value]
    if type(value).__name__ in _LOOP:
        return [type(value).__name__, *(_values(getattr(value, f.name)) for f in fields(value))]
    return value


def _event(name: str, *values: Any) -> LoopEvent:
    kind = _LOOP[name]
    given = dict(zip((f.name for f in fields(kind)), values, strict=True))
    for key, value in given.items():
        if key in _GROUPS or (key == "groups" and kind is Ended):
            given[key] = tuple(tuple(map(_member, group)) for group in value)
        elif key == "left":
            running, tasks, permits = value
            given[key] = Left(tuple(running), tuple(tasks), None if permits is None else tuple(permits))
        elif isinstance(value, list):
            given[key] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    event: LoopEvent = kind(**given)
    return event


def _member(values: Any) -> Member:
    sample, views, scored, versions, spans = values
    seen = tuple(view_from_values(view) for view in views)
    return Member(
        sample,
        seen,
        scored,
        None if versions is None else tuple(versions),
        None if spans is None else tuple((version, count) for version, count in spans),
    )
