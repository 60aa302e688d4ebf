"""A schedule: one sample's life, with everything that interrupts it.

Frozen, JSON-able, one line to read. A schedule says what the engine would
generate and what happens to each attempt; it says nothing about the client,
so the same schedule runs on every target, engine and mode. Its JSON form
(``spec/schemas/schedule.schema.json``) leaves out what has its default value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

KINDS: dict[str, str] = {
    "run": "nothing interrupts it",
    "abort": "the engine aborts after `after` tokens",
    "abort-late": "the engine aborts after `after` tokens; one more decode step still arrives",
    "abort-queued": "the engine aborts it while it waits in the queue",
    "abort-retracted": "retracted after `after` tokens, then aborted in the queue",
    "abort-request": "it is aborted through /abort_request once `after` tokens have come; more may follow",
    "retract": "retracted after `after` tokens and resumed by the engine itself",
    "delay": "what comes after `after` tokens comes late",
    "flag": "the client's abort flag is raised after `after` tokens (0: before the call)",
    "drop-before": "the connection is dropped before any answer",
    "drop-inside": "the connection is dropped `at` bytes into the event after `after` tokens",
    "drop-after": "the connection is dropped right after the body",
    "close": "the stream ends after `after` tokens without a terminal event",
    "error-event": "an error event ends the stream after `after` tokens; plain: HTTP `code`",
    "http": "the engine answers HTTP `code`",
    "queue-full": "the engine's queue is full: HTTP 503, in a stream an abort with status_code 503",
    "missing": "the reply lacks `field`",
    "over-deliver": "the engine delivers `after` tokens more than asked",
    "lost-ids": "the reply has logprobs for tokens whose ids it lacks",
}
"""Every kind of interruption. Sources: spec/sglang.md for the engine's, spec/README.md for the rest."""

FAULTY_ENGINE = frozenset({"missing", "over-deliver", "lost-ids"})
"""Kinds in which the engine breaks its own contract; verdicts on them count as SHOULD."""

TRANSPORT = frozenset(
    {"abort-request", "drop-before", "drop-inside", "drop-after", "close", "error-event", "http", "queue-full", "flag"}
)
"""Kinds that reach plain and streaming clients differently, so only final samples compare."""

FIELDS = ("output_token_logprobs", "output_ids", "text", "finish_reason", "meta_info", "weight_version")
VERSIONS = ("0.5.23", "0.5.9")
MAX_LENGTH, MAX_ATTEMPTS = 1_000_000, 64


class ScheduleError(ValueError):
    """The data is no schedule. The message is one line that names the field."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of generate and what befalls it.

    ``after`` counts tokens, ``at`` bytes, ``times`` the requests that meet the
    fault before the engine answers normally (a client may retry).
    ``round_trip`` sends the sample through to_dict, JSON and from_dict first.
    """

    kind: str = "run"
    after: int = 0
    at: int = 0
    code: int | None = None
    times: int = 1
    field: str = ""
    round_trip: bool = False

    def __str__(self) -> str:
        words = [self.kind]
        words += [f"after {self.after}"] if self.after else []
        words += [f"at byte {self.at}"] if self.at else []
        words += [str(self.code)] if self.code is not None else []
        words += [self.field] if self.field else []
        words += [f"x{self.times}"] if self.times != 1 else []
        return ("round trip, " if self.round_trip else "") + " ".join(words)


@dataclass(frozen=True, slots=True)
class Schedule:
    """See the module. Lengths count tokens; ``script`` is cycled to give the response's tokens.

    ``natural`` is how many tokens the engine generates before its stop token
    (None: it never stops). ``preload`` response tokens are on the sample at the
    start, as from a buffer. ``samples`` > 1 adds siblings that share one params dict.
    ``chunks`` is tokens per stream event, cycled; ``split`` bytes per network
    segment (0: a segment an event).
    """

    prompt: str = "a"
    budget: int = 1
    context: int | None = None
    script: tuple[int, ...] = (65,)
    natural: int | None = None
    preload: int = 0
    samples: int = 1
    images: int = 0
    min_new_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = False
    sglang: str = VERSIONS[0]
    chunks: tuple[int, ...] = (1,)
    split: int = 0
    attempts: tuple[Attempt, ...] = ()

    @property
    def faulty_engine(self) -> bool:
        return any(a.kind in FAULTY_ENGINE for a in self.attempts)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(a.kind for a in self.attempts)

    def token(self, position: int) -> int:
        """The response token at ``position``, when everything before it is as scripted."""
        return self.script[position % len(self.script)]

    def uninterrupted(self) -> Schedule:
        """The same sample with nothing that interrupts it: what RESUME-EQ compares with."""
        return replace(self, attempts=(), chunks=(1 << 20,), split=0)

    def in_one_piece(self) -> Schedule:
        """The same schedule, however its tokens come: for replies that are no stream."""
        return self if self.chunks == (1,) else replace(self, chunks=(1,))

    def on_conforming_engine(self) -> Schedule:
        """The same schedule with the engine's own faults left out."""
        clean = (replace(a, kind="run", after=0, field="") if a.kind in FAULTY_ENGINE else a for a in self.attempts)
        return replace(self, attempts=tuple(clean))

    def from_the_start(self) -> Schedule:
        """The same sample, its first tokens not from a buffer but from an attempt that was aborted."""
        if not self.preload:
            return self
        return replace(self, preload=0, attempts=(Attempt("abort", after=self.preload), *self.attempts))

    def __str__(self) -> str:
        """One line; what has its default value is left out."""
        words = [f"prompt {self.prompt!r}", f"budget {self.budget}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("prompt", "budget", "attempts") and value != f.default:
                words.append(f"{f.name} {list(value) if isinstance(value, tuple) else value}")
        return ", ".join(words) + ": " + ("; ".join(map(str, self.attempts)) or "run")


def to_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as JSON data: prompt, budget and script always, the rest where it is not the default."""

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    data = {
        f.name: plain(getattr(schedule, f.name))
        for f in fields(schedule)
        if f.name != "attempts" and (f.name in ("prompt", "budget", "script") or getattr(schedule, f.name) != f.default)
    }
    data["attempts"] = [
        {
            f.name: getattr(attempt, f.name)
            for f in fields(attempt)
            if f.name == "kind" or getattr(attempt, f.name) != f.default
        }
        for attempt in schedule.attempts
    ]
    return data


def from_json(data: Any) -> Schedule:
    """The schedule in JSON data. Raises ScheduleError; never executes anything."""
    body = read_object(data, Schedule, "schedule")
    for name in ("prompt", "budget", "script"):
        if name not in body:
            raise ScheduleError(f"schedule lacks {name!r}")
    _text(body, "prompt")
    for name in ("budget", "preload", "split", "min_new_tokens"):
        read_integer(body, name, 0, MAX_LENGTH)
    for name in ("context", "natural"):
        read_integer(body, name, 0, 2 * MAX_LENGTH, optional=True)
    read_integer(body, "seed", -(2**63), 2**63 - 1, optional=True)
    read_integer(body, "samples", 1, 3)
    read_integer(body, "images", 0, 2)
    _integers(body, "script", 0, 10_000_000)
    _integers(body, "chunks", 1, 1 << 20)
    if not all(isinstance(s, str) and s for s in _list(body, "stop")):
        raise ScheduleError("schedule.stop must hold non-empty strings")
    if body.get("sglang", VERSIONS[0]) not in list(VERSIONS):
        raise ScheduleError(f"schedule.sglang must be one of {', '.join(VERSIONS)}")
    if not isinstance(body.get("skip_special_tokens", False), bool):
        raise ScheduleError("schedule.skip_special_tokens must be true or false")
    attempts = _list(body, "attempts")
    if len(attempts) > MAX_ATTEMPTS:
        raise ScheduleError(f"schedule.attempts holds {len(attempts)}, at most {MAX_ATTEMPTS} are allowed")
    body["attempts"] = tuple(_attempt(a, i) for i, a in enumerate(attempts))
    body["stop"] = tuple(_list(body, "stop"))
    return Schedule(**body)


def _attempt(data: Any, index: int) -> Attempt:
    where = f"schedule.attempts[{index}]"
    body = read_object(data, Attempt, where)
    if not isinstance(body.get("kind"), str) or body["kind"] not in KINDS:
        raise ScheduleError(f"{where}.kind must be one of {', '.join(KINDS)}")
    for name in ("after", "at"):
        read_integer(body, name, 0, MAX_LENGTH, where=where)
    read_integer(body, "times", 1, MAX_LENGTH, where=where)
    read_integer(body, "code", 400, 599, optional=True, where=where)
    if body["kind"] == "http" and body.get("code") is None:
        raise ScheduleError(f"{where}.code is needed for kind http")
    if body["kind"] == "missing" and body.get("field") not in list(FIELDS):
        raise ScheduleError(f"{where}.field must be one of {', '.join(FIELDS)}")
    if not isinstance(body.get("field", ""), str) or not isinstance(body.get("round_trip", False), bool):
        raise ScheduleError(f"{where} has a field of the wrong type")
    return Attempt(**body)


def read_object(data: Any, cls: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass in JSON data. Raises ScheduleError."""
    if not isinstance(data, Mapping):
        raise ScheduleError(f"{where} must be an object, not {type(data).__name__}")
    unknown = sorted(set(data) - {f.name for f in fields(cls)}, key=str)
    if unknown:
        raise ScheduleError(f"{where} has an unknown field: {str(unknown[0])[:60]!r}")
    return dict(data)


def _text(body: dict[str, Any], name: str) -> None:
    if not isinstance(body[name], str) or not body[name]:
        raise ScheduleError(f"schedule.{name} must be a non-empty string")
    if not body[name].isprintable() and any("\ud800" <= c <= "\udfff" for c in body[name]):
        raise ScheduleError(f"schedule.{name} holds half a character")


def read_integer(
    body: dict[str, Any], name: str, low: int, high: int, *, optional: bool = False, where: str = "schedule"
) -> None:
    """Sees that a field, where it is given, is an integer between two limits. Raises ScheduleError."""
    value = body.get(name, low)
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ScheduleError(f"{where}.{name} must be an integer from {low} to {high}")


def _integers(body: dict[str, Any], name: str, low: int, high: int) -> None:
    if name not in body:
        return
    values = body[name]
    if not isinstance(values, list) or not values or len(values) > MAX_LENGTH:
        raise ScheduleError(f"schedule.{name} must be a non-empty list")
    if not all(isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values):
        raise ScheduleError(f"schedule.{name} must hold integers from {low} to {high}")
    body[name] = tuple(values)


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name, [])
    if not isinstance(value, list):
        raise ScheduleError(f"schedule.{name} must be a list")
    return value
