"""What the bytes of a real server tell a client: the counterpart of what `harness.engines.sglang` writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from json import loads
from math import isnan
from typing import Any

from harness.engines.sglang import Place
from harness.history import Delivered, Faulted

_COUNT, _ENTRIES, _GOES_ON = b'"completion_tokens":', b'"output_token_logprobs":[[', b'"finish_reason":null'
"""As the server writes them; in a text they would have a backslash before each quotation mark."""

MOST_IDS = 1 << 31
"""More than any vocabulary has."""

Told = tuple[Delivered | Faulted, ...]


class Unheard(Exception):
    """What answers is no SGLang: what its client was told cannot be known."""


class Hearing:
    """One request's answer while it comes. ``count``: tokens so far; ``finished``: its terminal event has come."""

    def __init__(self, place: Place, *, stream: bool = False, weights: bool = False) -> None:
        """``stream``: one was asked for. ``weights``: the history tells which weights chose each token."""
        self.place, self.stream, self.weights = place, stream, weights
        self.count = 0
        self.finished = False

    def event(self, data: bytes) -> Told:
        """A whole event of a stream; ``[DONE]`` tells nothing. Raises Unheard.

        An input that is too long by less than the server could tell at first is refused by an abort with
        the refusal's code (0.5.23 `input_ctx_minus6_max5_stream`).
        """
        added = self._added(data)
        if added is not None:
            return (self._delivered(*added, {}),)
        body = _object(data.strip().removeprefix(b"data:"))
        if body is None:
            return ()
        if "error" in body:
            self.finished = True
            error = body["error"] if isinstance(body["error"], dict) else {"message": body["error"]}
            code = error.get("code")
            return (
                self.place.fault("error-event", code if type(code) is int else None, str(error.get("message", ""))),
            )
        finish = _finish(body.get("meta_info"))
        code = finish.get("status_code")
        if type(code) is int and 400 <= code < 500:  # a token comes with it that answers nothing
            self.finished = True
            return (self.place.fault("error-event", code, str(finish.get("message", ""))),)
        return (self._tokens(body),)

    def plain(self, status: int, data: bytes) -> Told:
        """A whole plain answer. Raises Unheard."""
        body = _object(data)
        self.finished = True
        if status < 400 and status != 200:
            raise Unheard(f"HTTP {status}")
        if status != 200:
            return (self.place.fault("http", status, _message(body, data)),)
        if body is None:
            raise Unheard(f"an answer begins with {data[:40]!r}")
        told = self._tokens(body)
        if self.stream or told.finish is None:
            raise Unheard("a whole answer where a stream was asked for" if self.stream else "an answer without an end")
        return (told,)

    def _tokens(self, body: Mapping[str, Any]) -> Delivered:
        try:
            return self._read(body)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Unheard(f"an answer has {', '.join(map(str, body))[:80]}") from error

    def _read(self, body: Mapping[str, Any]) -> Delivered:
        """Ids and logprobs come from one list where there is one: 0.5.9 loses ids when events pile up.

        A cumulative event repeats everything, which its count tells from one that adds.
        """
        meta = body["meta_info"]
        entries = meta.get("output_token_logprobs")
        ids = [int(e[1]) for e in entries] if entries else [int(i) for i in body.get("output_ids") or ()]
        probs = [float(e[0]) for e in entries] if entries else [0.0] * len(ids)
        total = int(meta.get("completion_tokens", len(ids)))
        if entries == [] and _finish(meta).get("type") == "abort":
            ids, total = [], self.count  # of a refusal that came too late: a token that answers nothing
        if total < 0 or not _sound(ids, probs):
            raise ValueError
        known = self.count if len(ids) == total else 0
        return self._delivered(ids[known:], probs[known:], total, meta)

    def _added(self, data: bytes) -> tuple[list[int], list[float], int] | None:
        """What an event in mid-stream adds, read off its tail; None where it has to be read in full.

        An event repeats the whole answer: to read all of each takes longer than the server takes for a long one.
        """
        counted, start = data.rfind(_COUNT), data.find(_ENTRIES)
        if counted < 0 or start < 0 or _GOES_ON not in data or self.weights:
            return None
        if b'"' in data[start + len(_ENTRIES) : data.find(b"]", start)]:
            return None  # texts beside the ids (`return_text_in_logprobs`) may hold what looks like the end of a list
        with suppress(ValueError):  # a server that writes otherwise is read in full
            total = int(data[counted + len(_COUNT) :].partition(b",")[0].partition(b"}")[0])
            first = end = data.find(b"]]", start)
            for _ in range(total - self.count):
                first = data.rindex(b"[", start + len(_ENTRIES) - 1, first)
            entries = loads(b"[" + data[first : end + 1] + b"]") if first < end else []
            ids, probs = [e[1] for e in entries], [e[0] for e in entries]
            return (ids, probs, total) if total >= 0 and _sound(ids, probs) else None
        return None

    def _delivered(self, ids: list[int], probs: list[float], total: int, meta: Mapping[str, Any]) -> Delivered:
        before, self.count = self.count, max(total, self.count)
        finish = _finish(meta)
        self.finished = self.finished or bool(finish)
        place = self.place
        return Delivered(
            place.attempt,
            place.sample,
            place.number,
            tuple(ids),
            tuple(probs),
            finish.get("type"),
            finish.get("status_code"),
            False,
            _versions(meta, before, len(ids)) if self.weights else (),
        )


def _sound(ids: Sequence[Any], probs: Sequence[Any]) -> bool:
    return all(type(i) is int and 0 <= i < MOST_IDS for i in ids) and all(
        isinstance(p, float | int) and not isnan(p) for p in probs
    )


def _finish(meta: Any) -> Mapping[str, Any]:
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict | None):
        raise Unheard(f"an answer has the finish_reason {str(finish)[:40]!r}")
    return finish or {}


def _versions(meta: Mapping[str, Any], before: int, count: int) -> tuple[str, ...]:
    """The weights of each new token: by its span where they are told, else those of the event."""
    spans = meta.get("weight_versions") or ()
    named = {i: str(s["version"]) for s in spans for i in range(s["start"], s["end"])}
    return tuple(named.get(i, str(meta.get("weight_version", ""))) for i in range(before, before + count))


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        body = loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _message(body: Mapping[str, Any] | None, data: bytes) -> str:
    """The text of an error in any of the three shapes (spec/sglang.md#errors)."""
    error = (body or {}).get("error", (body or {}).get("message"))
    if isinstance(error, dict):
        error = error.get("message")
    return str(error) if error else data.decode("utf-8", "replace")[:300]


async def events(segments: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream, each with the blank line that ends it; then what is left over, if anything is."""
    buffer = bytearray()
    async for segment in segments:
        start = max(len(buffer) - 1, 0)
        buffer += segment
        while (end := buffer.find(b"\n\n", start)) >= 0:
            yield bytes(buffer[: end + 2])
            del buffer[: end + 2]
            start = 0
    if buffer:
        yield bytes(buffer)
