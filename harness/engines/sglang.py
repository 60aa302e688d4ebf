"""SGLang's /generate as a pure function of a schedule: no sockets, no clock, no state.

`answer` takes a request body and says what the server would send, as bytes cut
into the events a client can tell apart. The fronts in this package carry the
bytes. Shapes, limits and error texts follow exchanges recorded with SGLang
0.5.23 and 0.5.9; spec/sglang.md lists each with the case it was seen in.

The next token depends on the token prefix alone: while the input is the prompt
followed by the schedule's script, the script goes on; after any other input
the engine says something else, so a client that lost or re-tokenised a token
cannot go unseen (RESUME-EQ).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import JSONEncoder
from typing import Any

from harness.history import Delivered, Faulted
from harness.schedule import FAULTY_ENGINE, Attempt, Schedule

_ENCODE = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `dumps` would make one a call

RESERVE = 6  # 0.5.23 and 0.5.9 refuse input >= context - 6 (`input_ctx_minus6_max5`)
STOP_MARGIN = 2  # new tokens <= context - input - 2 (0.5.23 `exact_total`: 10 + 246 at 256 gave 244)
DEFAULT_MAX_NEW = 128  # `max_omitted`
UNLIMITED = 1 << 30

SAMPLING_KEYS = frozenset(
    [
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "custom_params",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
    ]
)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes a client can only use whole: an SSE event or a plain body.

    ``tells`` is what the client has been told once all of them arrived;
    ``flag`` raises the client's abort flag at that moment.
    """

    data: bytes
    tells: tuple[Delivered | Faulted, ...] = ()
    flag: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer. ``ending``: "end" closes the message properly, "drop" breaks the connection.

    ``status`` None: the connection breaks before any answer.
    """

    status: int | None
    stream: bool
    parts: tuple[Part, ...] = ()
    ending: str = "end"
    lost: Faulted | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run a request stands; copied into the events it causes."""

    attempt: int
    sample: int
    number: int

    def fault(self, kind: str, code: int | None = None, message: str = "") -> Faulted:
        return Faulted(self.attempt, self.sample, self.number, kind, code, message)


class Refusal(Exception):
    """The request gate says no: an HTTP status and an error body."""

    def __init__(self, status: int, message: Any, *, bare: bool = False) -> None:
        super().__init__(str(message))
        self.status, self.message, self.bare = status, str(message), bare


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens a request is given: ``ids`` in order, and why they end. ``mute``: the reply does not say why.

    ``versions`` are the weights that chose them, each with the token it ends before.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: dict[str, Any] | None
    matched: int | None
    faulty: bool
    mute: bool = False
    versions: tuple[tuple[str, int], ...] = (("default", UNLIMITED),)

    def version(self, token: int) -> str:
        """The weights that chose a token, or would choose it."""
        return next((name for name, end in self.versions if token < end), self.versions[-1][0])


def logprob(position: int, token: int) -> float:
    """The log probability of ``token`` at ``position`` of prompt + response; exact in JSON."""
    return -((position * 37 + token * 11) % 97 + 1) / 16


class Engine:
    """The engine of one run. Immutable; ``incremental`` is ``--incremental-streaming-output``."""

    def __init__(self, schedule: Schedule, tokenizer: Any, *, incremental: bool = False, weights: bool = False) -> None:
        """``weights``: the history tells which weights chose each token."""
        self.schedule, self.tokenizer, self.incremental, self.weights = schedule, tokenizer, incremental, weights
        self.prompt_ids = tuple(tokenizer.encode(schedule.prompt, add_special_tokens=False))
        self.eos: int = tokenizer.eos_token_id
        self.old = schedule.sglang == "0.5.9"

    def response_ids(self, count: int) -> tuple[int, ...]:
        """The first ``count`` response tokens as scripted."""
        script = self.schedule.script
        return (script * (count // len(script) + 1))[:count]

    def answer(self, body: Any, attempt: Attempt, place: Place) -> Reply:
        """What the server sends for this request, met by the attempt's interruption."""
        stream = isinstance(body, dict) and body.get("stream") is True
        fault = attempt if place.number < attempt.times else Attempt()
        if fault.kind == "drop-before" or (fault.kind == "close" and not stream):
            return Reply(None, stream, ending="drop", lost=place.fault("drop-before"))
        if fault.kind == "http":
            return self._http_error(fault.code or 500, place)
        try:
            ids, want, minimum = self._admit(body)
            result = self._generate(ids, want, minimum, fault)
        except Refusal as refusal:
            return self._refuse(refusal, stream, place)
        if fault.kind == "queue-full":
            return self._queue_full(body, stream, place, len(ids))
        if stream:
            return self._stream(body, ids, result, fault, place)
        return self._plain(body, ids, result, fault, place)

    # one request at a time, as its tokens come (`harness.engines.serving`)

    def admit(self, body: Any, place: Place) -> tuple[tuple[int, ...], Answer] | Reply:
        """The input's ids and the answer the request will have if nothing interrupts it, or its refusal."""
        try:
            ids, want, minimum = self._admit(body)
            return ids, self._generate(ids, want, minimum, Attempt())
        except Refusal as refusal:
            return self._refuse(refusal, isinstance(body, dict) and body.get("stream") is True, place)

    def event(
        self, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, span: tuple[int, int], place: Place
    ) -> Part:
        """A stream's event with the tokens of ``span``; without a word of the end, even of the last token's."""
        open_ended = replace(answer, finish=None)
        meta = self._meta(place, Attempt(), len(ids), open_ended, span[1])
        data = b"data: " + self._event(body, meta, open_ended, span, Attempt()) + b"\n\n"
        return Part(data, (self._told(place, answer, *span, last=False),))

    def last(
        self, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, sent: int, place: Place
    ) -> tuple[Part, ...]:
        """How a stream ends: its last event with the tokens since ``sent``, then [DONE]."""
        total = len(answer.ids)
        meta = self._last(self._meta(place, Attempt(), len(ids), answer, total), answer)
        data = b"data: " + self._event(body, meta, answer, (sent, total), Attempt()) + b"\n\n"
        return (Part(data, (self._told(place, answer, sent, total, last=True),)), _DONE)

    def whole(self, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, place: Place) -> Reply:
        """A plain reply with the whole answer."""
        return self._plain(body, ids, answer, Attempt(), place)

    # the request gate

    def _admit(self, body: Any) -> tuple[tuple[int, ...], int, int]:
        """Input ids, tokens that may be generated and the minimum; raises Refusal as the server does."""
        if not isinstance(body, dict):
            raise Refusal(400, "invalid request body", bare=True)
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise Refusal(400, "sampling_params must be an object", bare=True)
        unknown = sorted(set(params) - SAMPLING_KEYS)
        if unknown:  # `unknown_param`: 400 with the field's name; 0.5.9 answers 500
            raise Refusal(500 if self.old else 400, f"unknown field `{unknown[0]}`", bare=True)
        ids = self._input(body)
        want = params.get("max_new_tokens", DEFAULT_MAX_NEW)
        if want is not None and (not isinstance(want, int) or isinstance(want, bool)):
            raise Refusal(400, f"invalid type for max_new_tokens: {want!r}, expected i64", bare=True)
        if want is not None and want < 0:
            raise Refusal(400, f"max_new_tokens must be at least 0, got {want}.")
        minimum = params.get("min_new_tokens", 0) or 0
        if want is not None and not 0 <= minimum <= want:
            raise Refusal(400, f"min_new_tokens must be in [0, max_new_tokens({want})], got {minimum}.")
        return ids, self._room(len(ids), want), minimum

    def _input(self, body: dict[str, Any]) -> tuple[int, ...]:
        ids = body.get("input_ids")
        if ids is None:
            text = body.get("text")
            if not isinstance(text, str):
                raise Refusal(400, "Either text, input_ids or input_embeds should be provided.")
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise Refusal(400, "input_ids must be a list of integers", bare=True)
        if not ids:
            raise Refusal(400, "input_ids cannot be empty.")
        return tuple(ids)

    def _room(self, length: int, want: int | None) -> int:
        """How many tokens may be generated; raises Refusal near and over the context limit."""
        limit = self.schedule.context
        if limit is None:
            return UNLIMITED if want is None else want
        if length >= limit:
            raise Refusal(
                400, f"The input ({length} tokens) is longer than the model's context length ({limit} tokens)."
            )
        total = length + (want or 0)
        if total > limit or (self.old and total == limit):
            raise Refusal(
                400,
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
                f"You requested a total of {total} tokens: {length} tokens from the input messages and "
                f"{want} tokens for the completion.",
            )
        if length >= limit - RESERVE:
            raise Refusal(
                400,
                f"Input length ({length} tokens) exceeds the maximum allowed length ({limit - RESERVE} tokens). "
                "Use a shorter input or enable --allow-auto-truncate.",
            )
        return min(UNLIMITED if want is None else want, limit - length - STOP_MARGIN)

    # generation

    def _generate(self, ids: tuple[int, ...], room: int, minimum: int, fault: Attempt) -> Answer:
        start = len(ids) - len(self.prompt_ids)
        faithful = start >= 0 and ids == self.prompt_ids + self.response_ids(start)
        natural = self.schedule.natural
        stop_at = UNLIMITED  # tokens before the stop token, of this request
        if natural is not None:
            # Stop tokens are masked until the minimum is reached (`stop_id_min_new`).
            stop_at = max(natural - max(start, 0), minimum, 0)
        count = min(room, stop_at + 1)
        stopped = stop_at < count
        finish: dict[str, Any] = {"type": "length", "length": count}
        if stopped and not (self.old and count == room):
            # A stop token exactly at the budget is "stop"; 0.5.9 says "length" (`stop_id_at_budget1`).
            finish = {"type": "stop", "matched": self.eos}
        if fault.kind in ("abort", "abort-late", "abort-retracted", "abort-queued"):
            late = fault.kind == "abort-late"
            cut = 0 if fault.kind == "abort-queued" else fault.after + late
            if cut <= count:  # the engine tests abort before stop and length
                count, stopped = cut, stopped and cut > stop_at
                queued = fault.kind in ("abort-queued", "abort-retracted")
                finish = {"type": "abort", "message": "Abort in waiting queue" if queued else "Aborted"}
                if not queued:
                    finish |= {"status_code": None, "err_type": None}
        if fault.kind == "over-deliver" and not stopped:
            count, stopped = count + fault.after, False
            finish = {"type": "length", "length": count}
        if count > 1_000_000:
            raise Refusal(400, "the schedule never stops and the request sets no limit")
        tokens = self._tokens(ids, start, count, faithful)
        if stopped:
            tokens = (*tokens[: count - 1], self.eos)
        probs = tuple(logprob(len(ids) + i, t) for i, t in enumerate(tokens))
        matched = self.eos if stopped and finish["type"] != "length" else None
        mute = fault.kind == "missing" and fault.field in ("finish_reason", "meta_info")
        return Answer(tokens, probs, finish, matched, fault.kind in FAULTY_ENGINE, mute)

    def _tokens(self, ids: Sequence[int], start: int, count: int, faithful: bool) -> tuple[int, ...]:
        if faithful:
            return self.response_ids(start + count)[start:]
        # Digits, chosen by the unexpected input: unlike any script, and the same every time.
        seed = zlib.crc32(",".join(map(str, ids)).encode())
        return tuple(48 + (seed + 7 * i) % 10 for i in range(count))

    # what goes on the wire

    def _meta(self, place: Place, fault: Attempt, prompt: int, result: Answer, upto: int) -> dict[str, Any]:
        done = result.finish is not None and upto == len(result.ids)
        queued = done and (result.finish or {}).get("message") == "Abort in waiting queue"
        meta: dict[str, Any] = {
            "id": f"{place.attempt}-{place.sample}-{place.number}",
            "finish_reason": None,
            "weight_version": result.version(upto),
            "completion_tokens": upto,
        }
        if not queued:  # an abort in the queue lacks these (`abort_all`, waiting requests)
            meta["prompt_tokens"], meta["cached_tokens"] = prompt, 0
            meta["total_retractions" if self.old else "num_retractions"] = int(
                fault.kind == "retract" and upto >= fault.after
            )
        return meta

    def _last(self, meta: dict[str, Any], result: Answer) -> dict[str, Any]:
        """What only a plain reply and a stream's last event say."""
        meta["finish_reason"] = result.finish
        if not self.old:
            meta["weight_versions"] = _spans(result)
        return meta

    def _event(
        self, body: dict[str, Any], meta: dict[str, Any], result: Answer, span: tuple[int, int], fault: Attempt
    ) -> bytes:
        """One JSON body: everything up to span[1], or what is new since span[0] where the server sends deltas."""
        first, last = span
        delta_ids = first if self.incremental else 0
        # 0.5.9 --stream-output makes only output_ids a delta (`stream_logprob`).
        delta_rest = 0 if self.old else delta_ids
        params = body.get("sampling_params") or {}
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [p, t, None] for p, t in zip(result.logprobs[delta_rest:last], result.ids[delta_rest:last], strict=True)
            ]
        ids = list(result.ids[delta_ids:last])
        if fault.kind == "lost-ids" and len(ids) > 0:
            ids = ids[:-1]
        if self.old and self.incremental and first == last and fault.kind == "abort-retracted":
            ids = list(result.ids[-1:])  # 0.5.9 says the last id once more (`pause_retract_then_abort_all`)
        event: dict[str, Any] = {
            "text": self._text(result, last, params)[
                len(self._text(result, delta_rest, params)) if delta_rest else 0 :
            ],
            "output_ids": ids,
            "meta_info": meta,
        }
        if fault.kind == "missing":
            event.pop(fault.field, None)
            meta.pop(fault.field, None)
        return _ENCODE(event).encode()

    def _text(self, result: Answer, upto: int, params: dict[str, Any]) -> str:
        """The text so far. In mid-stream an unfinished character is held back (`stream_logprob`)."""
        ids = result.ids[:upto]
        ended = upto == len(result.ids)
        if ended and result.matched is not None and ids and not params.get("no_stop_trim"):
            ids = ids[:-1]  # stop ids stay in output_ids and leave the text (`stop_id_before_budget`)
        text = decode(self.tokenizer, self.prompt_ids, ids, params.get("skip_special_tokens", True))
        return text if ended else text.rstrip("\ufffd")

    def _plain(self, body: dict[str, Any], ids: tuple[int, ...], result: Answer, fault: Attempt, place: Place) -> Reply:
        if fault.kind == "error-event":
            return self._http_error(fault.code or 500, place)
        meta = self._last(self._meta(place, fault, len(ids), result, len(result.ids)), result)
        data = self._event(body, meta, result, (0, len(result.ids)), fault)
        told = (self._told(place, result, 0, len(result.ids), last=True),)
        if fault.kind == "drop-inside":
            cut = min(fault.at, len(data) - 1)
            return Reply(200, False, (Part(data[:cut]),), "drop", place.fault("drop-inside"))
        flag = fault.kind == "flag" and 0 < fault.after <= len(result.ids)
        parts = (Part(b"", (), True),) if flag else ()
        return Reply(200, False, (*parts, Part(data, told)), "drop" if fault.kind == "drop-after" else "end")

    def _told(self, place: Place, result: Answer, first: int, upto: int, *, last: bool) -> Delivered:
        finish = {} if result.mute else result.finish or {}
        return Delivered(
            place.attempt,
            place.sample,
            place.number,
            result.ids[first:upto],
            result.logprobs[first:upto],
            finish.get("type") if last else None,
            finish.get("status_code") if last else None,
            result.faulty,
            tuple(result.version(i) for i in range(first, upto)) if self.weights else (),
        )

    def _spans(self, total: int, fault: Attempt) -> list[tuple[int, int]]:
        """Token ranges of the stream's events, cut where the fault strikes."""
        chunks, marks = self.schedule.chunks, {total}
        if fault.after and fault.kind != "over-deliver":
            marks.add(min(fault.after, total))
        spans, done, index = [], 0, 0
        while done < total:
            upto = min([done + chunks[index % len(chunks)], *(m for m in marks if m > done)])
            spans.append((done, upto))
            done, index = upto, index + 1
        return spans

    def _stream(
        self, body: dict[str, Any], ids: tuple[int, ...], result: Answer, fault: Attempt, place: Place
    ) -> Reply:
        total = len(result.ids)
        spans = self._spans(total, fault)
        aborted = (result.finish or {}).get("type") == "abort"
        if not spans or (aborted and fault.kind != "abort-late"):
            spans.append((total, total))  # an abort's last event need not bring a token
        parts: list[Part] = []
        for first, upto in spans:
            last = (first, upto) == spans[-1]
            struck = fault.after == first if fault.kind in ("drop-inside", "close", "error-event") else False
            if struck and fault.kind == "error-event":
                parts.append(self._error_event(fault.code, place))
                return Reply(200, True, (*parts, _DONE))
            if struck and fault.kind == "close":
                return Reply(200, True, tuple(parts), lost=place.fault("close"))
            meta = self._meta(place, fault, len(ids), result, upto)
            if last:
                self._last(meta, result)
            data = b"data: " + self._event(body, meta, result, (first, upto), fault) + b"\n\n"
            if struck:
                cut = min(fault.at, len(data) - 1)
                return Reply(200, True, (*parts, Part(data[:cut])), "drop", place.fault("drop-inside"))
            flag = fault.kind == "flag" and 0 < fault.after == upto and first < upto
            parts.append(Part(data, (self._told(place, result, first, upto, last=last),), flag))
        return Reply(200, True, (*parts, _DONE), "drop" if fault.kind == "drop-after" else "end")

    # errors

    def _refuse(self, refusal: Refusal, stream: bool, place: Place) -> Reply:
        told = place.fault("http", refusal.status, refusal.message)
        if stream and not refusal.bare:  # the gate's errors come as an event in a 200 stream
            event = self._error_event(refusal.status, place, refusal.message)
            return Reply(200, True, (event, _DONE))
        if refusal.status == 500:
            return Reply(500, False, (Part(b"Internal Server Error", (told,)),))
        error: Any = refusal.message if refusal.bare else {"message": refusal.message}
        return Reply(refusal.status, False, (Part(_json({"error": error}), (told,)),))

    def _http_error(self, code: int, place: Place) -> Reply:
        message = {400: "Bad request.", 429: "Too many requests.", 503: "Service unavailable."}.get(code)
        told = (place.fault("http", code, message or "Internal Server Error"),)
        if message is None:  # `unknown_param` on 0.5.9: plain text
            return Reply(code, False, (Part(b"Internal Server Error", told),))
        if code == 400:
            return Reply(code, False, (Part(_json({"error": {"message": message}}), told),))
        # The shape of `queue_full`; a 429 was never recorded and is taken to look alike.
        body = {"object": "error", "message": message, "type": str(code), "param": None, "code": code}
        return Reply(code, False, (Part(_json(body), told),))

    def _error_event(self, code: int | None, place: Place, message: str = "Internal error.") -> Part:
        error: dict[str, Any] = {"message": message}
        if code is not None and not self.old:  # 0.5.9 sends the message only
            error |= {"type": "invalid_request_error", "code": code, "retryable": code >= 500}
        told = place.fault("error-event", error.get("code"), message)
        return Part(b"data: " + _json({"error": error}) + b"\n\n", (told,))

    def _queue_full(self, body: dict[str, Any], stream: bool, place: Place, prompt: int) -> Reply:
        message = "The request queue is full."
        if not stream:  # `queue_full`: a third error shape
            data = {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
            return Reply(503, False, (Part(_json(data), (place.fault("http", 503, message),)),))
        finish = {"type": "abort", "status_code": 503, "message": message}
        result = Answer((), (), finish, None, False)
        meta = self._last(self._meta(place, Attempt(), prompt, result, 0), result)
        for name in ("prompt_tokens", "cached_tokens", "num_retractions", "total_retractions"):
            meta.pop(name, None)
        data_ = b"data: " + self._event(body, meta, result, (0, 0), Attempt()) + b"\n\n"
        return Reply(200, True, (Part(data_, (self._told(place, result, 0, 0, last=True),)), _DONE))


def _spans(result: Answer) -> list[dict[str, Any]]:
    """``weight_versions`` as 0.5.23 writes them: an answer without tokens still has a span (`running_abort`)."""
    spans: list[dict[str, Any]] = []
    start, total = 0, len(result.ids)
    for name, end in result.versions:
        if start < min(end, total) or (not spans and start == total):
            spans.append({"version": name, "start": start, "end": min(end, total)})
            start = min(end, total)
    return spans


def decode(tokenizer: Any, before: Sequence[int], ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of ``ids`` where ``before`` came first.

    The server decodes with a few ids of context, so that a tokenizer which
    marks words by leading spaces (SentencePiece) does not lose one.
    """
    if not ids:
        return ""
    if before and not getattr(tokenizer, "concatenative", False):
        context = list(before[-5:])
        whole: str = tokenizer.decode([*context, *ids], skip_special_tokens=skip_special_tokens)
        start: str = tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        if whole.startswith(start):
            return whole[len(start) :]
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return text


def _json(value: Any) -> bytes:
    return _ENCODE(value).encode()


_DONE = Part(b"data: [DONE]\n\n")
