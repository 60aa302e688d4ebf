"""Whether the mock behaves like the server: the same requests to both, and their answers field by field.

What a model says is not compared, only how much of it there is; nor is what depends on
the moment. Everything else is: a field that one side lacks, a type, a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from harness.engines.live import Options
from harness.engines.standalone import MODEL, POOL, serving
from harness.events import Tell, ignore
from harness.loop import VirtualLoop
from harness.probes import Probed, probe
from harness.record import Recording, recording
from harness.schedule import VERSIONS
from harness.server import Server, describe
from harness.wire import Exchange

AGREES, ON_PURPOSE, DIFFERS = "agrees", "on purpose", "differs"
RATE = 100.0
"""Tokens a second of the mock, in virtual time: slow enough for what happens to a request to happen in its middle."""
SHOWN = 60
"""So many letters of a text in which the two differ."""
LACKS = "nothing"
"""Stands for a field that one side does not have."""

SAID = {
    "text": "another model",
    "output_ids": "another model; how many there are is compared",
    "output_token_logprobs": "another model; how many there are is compared",
    "input_token_logprobs": "another model; whether there are any is compared",
    "matched": "another tokenizer; whether it is a token or a string is compared",
    "cached_tokens": "the mock caches nothing",
    "cached_tokens_details": "the mock caches nothing",
}
"""Fields whose values are not compared, each with the reason."""

_EITHER = "either as if it ran or as if it waited, whichever it was at that moment"
_PILED = "what piled up is merged with the last event, which tells it once more"
_MEMORY = "the mock has a number; a real server can have it from its memory"

PURPOSE: tuple[tuple[str, str, str], ...] = (
    *(
        ("abort_immediate", f"body.meta_info.finish_reason.{x}", _EITHER)
        for x in ("message", "status_code", "err_type")
    ),
    *(("abort_immediate", f"body.meta_info.{x}", _EITHER) for x in ("cached_tokens*", "completion_tokens", "dp_rank")),
    *(
        ("abort_immediate", f"body.meta_info.{x}", _EITHER)
        for x in ("*_retractions", "prompt_tokens", "reasoning_tokens")
    ),
    *(("abort_immediate", x, _EITHER) for x in ("body.meta_info.output_token_logprobs*", "body.output_ids")),
    (
        "GET_get_server_info",
        "body.context_length",
        "the mock is told its limit; a real server can have it from the model",
    ),
    ("pause_retract_then_abort_all", "last.meta_info.output_token_logprobs", _PILED),
    ("GET_*", "*max_running_requests", _MEMORY),
    ("disconnect_*", "*max_running_requests", _MEMORY),
    ("GET_get_load", "*", "the mock says what a client looks at"),
)
"""Where the mock differs on purpose: behaviour, field and reason; both names as of `fnmatch`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of an answer in which the mock is unlike the server. ``reason``: why, if that is on purpose."""

    part: str
    field: str
    mock: Any
    real: Any
    reason: str = ""

    def __str__(self) -> str:
        where = f"{self.part}: " if self.part else ""
        mock, real = _where_they_part(self.mock, self.real)
        return f"{where}{self.field} is {mock}, and {real} on the server"


def _where_they_part(mock: Any, real: Any) -> tuple[str, str]:
    """Both in words; of long texts the place at which they become different."""
    if not (isinstance(mock, str) and isinstance(real, str)) or max(len(mock), len(real)) <= SHOWN:
        return repr(mock), repr(real)
    unlike = (place for place, (one, other) in enumerate(zip(mock, real, strict=False)) if one != other)
    start = max(next(unlike, min(len(mock), len(real))) - SHOWN // 2, 0)
    one, other = (
        "..." * (start > 0) + text[start : start + SHOWN] + "..." * (len(text) > start + SHOWN) for text in (mock, real)
    )
    return repr(one), repr(other)


@dataclass(frozen=True, slots=True)
class Row:
    """A behaviour and in what the mock differs from the server."""

    behaviour: str
    differences: tuple[Difference, ...]

    @property
    def verdict(self) -> str:
        if any(not one.reason for one in self.differences):
            return DIFFERS
        return ON_PURPOSE if self.differences else AGREES

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.reason for one in self.differences if one.reason))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A server's recording, and the mock beside it. ``skipped``: behaviours that were not asked about, and why."""

    real: Recording
    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...]


def matrix(url: str, *, disruptive: bool = False, only: Sequence[str] = (), tell: Tell = ignore) -> Matrix:
    """Asks the server at ``url``, and the mock the same; about a minute. Raises `harness.server.NoServer`.

    ``only``: some behaviours.
    ``disruptive``: also what pauses, flushes, renames the weights or aborts all, which nobody else's requests survive.
    """
    probed = asyncio.run(probe(describe(url), disruptive=disruptive, only=only, tell=tell))
    real = recording(probed)
    return Matrix(real, compare(mocked(real), real), probed.skipped)


def mocked(real: Recording) -> Recording:
    """The mock with a server's version and options, asked about the same behaviours in virtual time."""
    options = Options(
        sglang=real.sglang if real.sglang in VERSIONS else VERSIONS[0],
        context=real.context,
        incremental=real.incremental,
        rate=RATE,
        max_queued=real.queue,
        pool=real.pool,
    )
    options = options if real.running is None else replace(options, max_running=real.running)
    loop = VirtualLoop(sockets=True)
    try:
        probed: Probed = loop.run(_mocked(options, real.behaviours))
    finally:
        loop.close()
    return recording(probed)


async def _mocked(options: Options, behaviours: tuple[str, ...]) -> Probed:
    async with serving(options) as url:
        server = Server(
            url,
            options.sglang,
            options.context,
            options.pool or POOL,
            options.incremental,
            False,
            options.max_running,
            options.max_queued,
            MODEL,
        )
        return await probe(server, disruptive=True, only=behaviours)


def compare(mock: Recording, real: Recording) -> tuple[Row, ...]:
    """Every behaviour that the server was asked about."""
    ours = dict(_keyed(mock))
    found: dict[str, list[Difference]] = {name: [] for name in real.behaviours}
    for key, theirs in _keyed(real):
        found[theirs.behaviour] += (
            differences(ours[key], theirs) if key in ours else [Difference(theirs.part, "the exchange", LACKS, "there")]
        )
    return tuple(Row(name, tuple(_explained(name, one) for one in some)) for name, some in found.items())


def _keyed(one: Recording) -> Iterator[tuple[tuple[str, str, int], Exchange]]:
    """Each exchange with its behaviour, its part, and the how manieth of that part it is."""
    seen: dict[tuple[str, str], int] = {}
    for exchange in one.exchanges:
        part = (exchange.behaviour, exchange.part)
        seen[part] = seen.get(part, -1) + 1
        yield (*part, seen[part]), exchange


def _explained(behaviour: str, one: Difference) -> Difference:
    for name, field, reason in PURPOSE:
        if fnmatchcase(behaviour, name) and fnmatchcase(one.field, field):
            return replace(one, reason=reason)
    return one


def differences(mock: Exchange, real: Exchange) -> list[Difference]:
    """In what two answers to one request differ. Where the requests differ, so may what they decide."""
    asked = frozenset(name for name in _ASKED if _asked(mock, name) != _asked(real, name))
    events = min(mock.of, real.of)
    ours, theirs = dict(_facts(mock, events, asked)), dict(_facts(real, events, asked))
    return [
        Difference(real.part, name, ours.get(name, LACKS), theirs.get(name, LACKS))
        for name in sorted({*ours, *theirs})
        if ours.get(name, LACKS) != theirs.get(name, LACKS)
    ]


_ASKED = {"max_new_tokens": ("completion_tokens", "length"), "return_logprob": (), "prompt": ("prompt_tokens",)}
"""What an older recording may have asked otherwise, and the numbers that follow from it."""


def _asked(one: Exchange, name: str) -> Any:
    request = one.request or {}
    if name == "prompt":
        return request.get("input_ids", request.get("text"))
    return (request.get("sampling_params") or {}).get(name) if name == "max_new_tokens" else request.get(name, False)


def _facts(one: Exchange, events: int, asked: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What is compared of an answer, by the field's name. ``events``: the fewest that one of the two streams has."""
    yield "status", one.status
    yield "ended while", one.during
    if one.events is not None or isinstance(one.body, dict | list):  # HTTP libraries name one for an empty body too
        yield "content type", one.kind
    if one.events is None:
        yield from _leaves(one.body, "body", asked, exact=True, whole=True)
        return
    yield "[DONE]", one.done
    if not one.events:
        yield "events", 0
        return
    if events > 1:
        yield from _leaves(one.events[0], "first", asked, exact=False, whole=True)
    if events > 2:
        yield from _leaves(one.events[1], "next", asked, exact=False, whole=True)
    yield from _leaves(one.events[-1], "last", asked, exact=True, whole=events > 1)


def _leaves(value: Any, where: str, asked: frozenset[str], *, exact: bool, whole: bool) -> Iterator[tuple[str, Any]]:
    """An answer's fields by their dotted names, as they are compared.

    ``exact``: how many tokens there are, too. ``whole``: how its lists grow can be told.
    """
    meta = value.get("meta_info") if isinstance(value, dict) else None
    total = meta.get("completion_tokens") if isinstance(meta, dict) else None
    aborted = isinstance(meta, dict) and (meta.get("finish_reason") or {}).get("type") == "abort"
    loose = {number for name in asked for number in _ASKED[name]}
    for field, leaf in _flat(value, where):
        name = field.rpartition(".")[2]
        if "logprob" in name and "return_logprob" in asked:
            continue
        yield field, _comparable(name, leaf, total, exact=exact and not aborted and name not in loose, whole=whole)


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and "n" not in value and not where.endswith("_details"):
        for name, inner in value.items():
            yield from _flat(inner, f"{where}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        if "version" in value[0]:
            yield where, [span["version"] for span in value]
        else:
            yield from _flat(value[0], where)
    else:
        yield where, value


def _comparable(name: str, value: Any, total: Any, *, exact: bool, whole: bool) -> Any:
    """What is compared of a field: its value, its type, or how much of it there is beside the tokens so far."""
    if name in ("completion_tokens", "length"):
        return value if exact else "some" if value else "none"
    if name == "output_token_logprobs_length":
        value, name = [None] * value, "output_token_logprobs"
    if isinstance(value, list) or (isinstance(value, dict) and "n" in value):
        if name not in SAID:
            return value
        count = value["n"] if isinstance(value, dict) else len(value)
        if not whole or name == "input_token_logprobs":
            return "some" if count else "none"
        return "none" if not count else "as many as tokens" if count == total else "others"
    if name == "prompt_tokens":
        return value if exact else "some"
    if name in SAID:
        return "details" if name.endswith("_details") else type(value).__name__
    return value
