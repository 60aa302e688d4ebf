"""What happened when a target ran a schedule: an append-only list of events.

Every verdict is derived from a `History` and from nothing else. Events hold
values, never references into the target's objects: a payload's ``input_ids``
may be the sample's own list and grow later (THUDM/slime does this).

Token ids are ints, log probabilities are natural logarithms, lengths count
tokens. ``sample`` is 0 for the sample under test; 1 and above are siblings
that share its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from harness.schedule import Schedule
from harness.schedule import from_json as schedule_from_json
from harness.schedule import to_json as schedule_to_json

PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED = "pending", "completed", "truncated", "aborted", "failed"
STATUSES = (PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED)
TERMINAL = frozenset({COMPLETED, TRUNCATED})

PLAIN, STREAM, INCREMENTAL = "plain", "stream", "incremental"
MODES = (PLAIN, STREAM, INCREMENTAL)


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sample at one moment, in the terms of the contract and by value.

    ``tokens`` is prompt and response together, or empty before the first request.
    ``arrays`` holds the lengths of any other per-token list the sample carries.
    """

    tokens: tuple[int, ...] = ()
    response_length: int = 0
    response: str = ""
    loss_mask: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    status: str = PENDING
    prompt: str = ""
    arrays: Mapping[str, int] = field(default_factory=dict)
    has_logprobs: bool = True
    """False for a client whose samples have no place for logprobs."""


@dataclass(frozen=True, slots=True)
class Called:
    """The harness calls the target's generate function."""

    attempt: int
    sample: int
    params: Mapping[str, Any]
    view: SampleView


@dataclass(frozen=True, slots=True)
class Requested:
    """The engine received a /generate request; ``number`` counts within the attempt from 0."""

    attempt: int
    sample: int
    number: int
    stream: bool
    input_ids: tuple[int, ...] | None
    text: str | None
    images: int
    params: Mapping[str, Any]
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    """An event of a stream, or a whole plain reply, was handed to the client complete.

    ``ids`` and ``logprobs`` are what this event adds to the request's response;
    ``finish`` is the finish_reason type, or None while the stream goes on.
    ``versions`` are the weights that chose each id; empty where there is one for all.
    """

    attempt: int
    sample: int
    number: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None
    status_code: int | None = None
    faulty: bool = False
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Faulted:
    """The request ended in something else than its own terminal event."""

    attempt: int
    sample: int
    number: int
    kind: str
    code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Flagged:
    """The client's abort flag was set; ``number`` is None before any request."""

    attempt: int
    sample: int
    number: int | None


@dataclass(frozen=True, slots=True)
class Returned:
    """The call came back. ``params`` is the caller's dict as the call left it.

    ``decoded`` are the texts the response ids may have (special tokens shown or
    not, a last stop token cut), ``torn`` the same joined from what each request
    brought, where that holds a part of a character; ``others`` are the
    siblings, ``writes`` the fields of args it set.
    """

    attempt: int
    sample: int
    view: SampleView
    params: Mapping[str, Any]
    decoded: tuple[str, ...] = ("",)
    others: tuple[SampleView, ...] = ()
    writes: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised. ``error`` is the exception's type name."""

    attempt: int
    sample: int
    error: str
    message: str
    view: SampleView
    params: Mapping[str, Any]
    decoded: tuple[str, ...] = ("",)
    others: tuple[SampleView, ...] = ()
    writes: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Halted:
    """The call could not be brought to an end: ``kind`` is "hang", "exit", "storm" or "view"."""

    attempt: int
    sample: int
    kind: str
    message: str


Event = Called | Requested | Delivered | Faulted | Flagged | Returned | Raised | Halted


@dataclass(frozen=True)
class History:
    """One run: a schedule on a target, in one mode. ``events`` are in the order they happened.

    ``prompt_ids`` is what the prompt's text encodes to, ``eos`` the engine's stop token.
    """

    schedule: Schedule
    mode: str
    prompt_ids: tuple[int, ...]
    eos: int
    events: tuple[Event, ...]


EVENTS: dict[str, Any] = {
    c.__name__: c for c in (Called, Requested, Delivered, Faulted, Flagged, Returned, Raised, Halted)
}
"""The events of a call, by name."""

_NAMES = {name: tuple(f.name for f in fields(c)) for name, c in EVENTS.items()}
_VIEW = tuple(f.name for f in fields(SampleView))


def to_json(history: History) -> dict[str, Any]:
    """The history as JSON data, lists for tuples."""
    return {
        "schedule": schedule_to_json(history.schedule),
        "mode": history.mode,
        "prompt_ids": history.prompt_ids,
        "eos": history.eos,
        "events": [to_values(e) for e in history.events],
    }


def from_json(data: Mapping[str, Any]) -> History:
    """The inverse of `to_json`, for data this module wrote."""
    return History(
        schedule_from_json(data["schedule"]),
        data["mode"],
        tuple(data["prompt_ids"]),
        data["eos"],
        tuple(from_values(*e) for e in data["events"]),
    )


def to_values(event: Any) -> list[Any]:
    """An event as its name and the values of its fields."""
    name = type(event).__name__
    return [name, *(_values(getattr(event, f)) for f in _NAMES[name])]


def _values(value: Any) -> Any:
    if isinstance(value, SampleView):
        return [getattr(value, n) for n in _VIEW]
    if isinstance(value, tuple) and value and isinstance(value[0], SampleView):
        return [_values(v) for v in value]
    return value


def from_values(name: str, *values: Any) -> Event:
    """The inverse of `to_values`."""
    given = dict(zip(_NAMES[name], values, strict=True))
    for key, raw in given.items():
        if key == "view":
            given[key] = view_from_values(raw)
        elif key == "others":
            given[key] = tuple(view_from_values(v) for v in raw)
        elif isinstance(raw, list):
            given[key] = tuple(raw)
    event: Event = EVENTS[name](**given)
    return event


def view_from_values(values: Any) -> SampleView:
    """A sample's view from the values of its fields."""
    given: Any = [tuple(v) if isinstance(v, list) else v for v in values]
    return SampleView(*given)
