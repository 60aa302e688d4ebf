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
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from json import JSONEncoder
from typing import Any

from harness.engines import gate
from harness.history import Delivered, Faulted
from harness.schedule import FAULTY_ENGINE, Attempt, Schedule

ENCODE = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `dumps` would make one a call

RESERVE = 6  # 0.5.23 and 0.5.9 refuse input >= context - 6 (`input_ctx_minus6_max5`)
STOP_MARGIN = 2  # new tokens <= context - input - 2 (0.5.23 `exact_total`: 10 + 246 at 256 gave 244)
PHANTOM = 0  # or any other: it is chosen after an input of one token
DEFAULT_MAX_NEW = 128  # `max_omitted`
ABORTED: dict[str, Any] = {
    "type": "abort",
    "message": "Aborted",
    "status_code": None,
    "err_type": None,
}  # `abort_all`, running
IN_QUEUE: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}  # `abort_all`, waiting
QUEUE_FULL: dict[str, Any] = {
    "type": "abort",
    "status_code": 503,
    "message": "The request queue is full.",
}  # `queue_full`, a stream
UNLIMITED = 1 << 30
LATE = ("abort-late", "abort-request")
"""One more decode step runs before these aborts are heard (0.5.23p `stream_abort_running`)."""

DELAY_S = 0.2
MOST = 1_000_000
"""Tokens of an answer that fills no memory."""
FAR = 1 << 15
"""Tokens among which a stop string is looked for: a client may ask for any number of them."""
RUN = Attempt()
HOLE = "\0hole"
"""Stands where an event's changing parts go (`Engine.frame`); a ``rid`` that is the same would not be cut out right."""

FORCE = 100.0
"""A logit bias that leaves nothing else to be said; the recorded cases that choose a token do so with it."""

Tokens = Callable[[int, bool], tuple[int, ...]]
"""Gives the first tokens of an answer; ``True``: the last of them is the stop token."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes a client can only use whole: an SSE event or a plain body.

    ``tells`` is what the client has been told once all of them arrived;
    ``flag`` raises the client's abort flag at that moment. ``late``: they come
    `DELAY_S` after those before them.
    """

    data: bytes
    tells: tuple[Delivered | Faulted, ...] = ()
    flag: bool = False
    late: bool = False


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

    def __init__(self, status: int, message: Any, *, bare: bool = False, late: bool = False) -> None:
        """``late``: not the gate says so but the scheduler, once the request has become one."""
        super().__init__(str(message))
        self.status, self.message, self.bare, self.late = status, str(message), bare, late


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens a request is given: ``ids`` in order, and why they end. ``mute``: the reply does not say why.

    ``versions`` are the weights that chose them, each with the token it ends before.
    ``retractions``: how often it had to make room for others on its way.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: dict[str, Any] | None
    matched: int | str | None
    faulty: bool
    mute: bool = False
    versions: tuple[tuple[str, int], ...] = (("default", UNLIMITED),)
    retractions: int = 0

    @property
    def queued(self) -> bool:
        """Aborted in the queue, where it was first or had to go back to, or before it."""
        return self.finish in (IN_QUEUE, QUEUE_FULL)

    def version(self, token: int) -> str:
        """The weights that chose a token, or would choose it."""
        return next((name for name, end in self.versions if token < end), self.versions[-1][0])


def logprob(position: int, token: int) -> float:
    """The log probability of ``token`` at ``position`` of prompt + response; exact in JSON."""
    return -((position * 37 + token * 11) % 97 + 1) / 16


class Engine:
    """The engine of one run. Immutable; ``incremental`` is ``--incremental-streaming-output``."""

    def __init__(
        self,
        schedule: Schedule,
        tokenizer: Any,
        *,
        incremental: bool = False,
        weights: bool = False,
        pool: int | None = None,
    ) -> None:
        """``weights``: the history tells which weights chose each token. ``pool``: tokens the KV cache holds."""
        self.schedule, self.tokenizer, self.incremental, self.weights = schedule, tokenizer, incremental, weights
        self.pool = pool
        self.prompt_ids = tuple(tokenizer.encode(schedule.prompt, add_special_tokens=False))
        self.eos: int = tokenizer.eos_token_id
        self.old = schedule.sglang == "0.5.9"

    def response_ids(self, count: int) -> tuple[int, ...]:
        """The first ``count`` response tokens as scripted."""
        script = self.schedule.script
        return (script * (count // len(script) + 1))[:count]

    def answer(self, body: Any, attempt: Attempt, place: Place) -> Reply:
        """What the server sends for this request, met by the attempt's interruption."""
        fault = attempt if place.number < attempt.times else RUN
        admitted = self.admit(body, place, fault)
        if isinstance(admitted, Reply):
            return admitted
        return (self._stream if body.get("stream") is True else self.whole)(body, *admitted, place, fault)

    # one request at a time, as its tokens come (`harness.engines.serving`, `harness.engines.live`)

    def admit(self, body: Any, place: Place, fault: Attempt = RUN) -> tuple[tuple[int, ...], Answer] | Reply:
        """The input's ids and the answer the request will have if only ``fault`` interrupts it, or its refusal."""
        stream = isinstance(body, dict) and body.get("stream") is True
        if fault.kind == "drop-before" or (fault.kind == "close" and not stream):
            return Reply(None, stream, ending="drop", lost=place.fault("drop-before"))
        if fault.kind == "http":
            return self._http_error(fault.code or 500, place)
        try:
            ids, want, minimum = self._admit(body)
            answer = self._generate(ids, want, minimum, fault, body)
        except Refusal as refusal:
            if refusal.late and stream and not self.old:
                return self._phantom(body, refusal, place)
            return self.refuse(refusal, stream, place)
        return self.queue_full(body, place) if fault.kind == "queue-full" else (ids, answer)

    def event(
        self,
        body: dict[str, Any],
        ids: tuple[int, ...],
        answer: Answer,
        span: tuple[int, int],
        place: Place,
        fault: Attempt = RUN,
    ) -> Part:
        """A stream's event with the tokens of ``span``; without a word of the end, even of the last token's."""
        return self._part(body, ids, answer, span, place, fault, last=False)

    def frame(
        self, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, upto: int, place: Place
    ) -> tuple[bytes, ...]:
        """An event cut at its text, its ids, their number and, where they are asked for, its logprobs and their number.

        For whoever tells one event after the other, each with much that was in the one before.
        """
        meta = self._meta(body, place, RUN, len(ids), answer, upto, last=False)
        event = self._shape(body, ids, {**meta, "completion_tokens": HOLE}, HOLE, HOLE, HOLE, HOLE)
        return tuple((f"data: {ENCODE(event)}\n\n").encode().split(ENCODE(HOLE).encode()))

    def last(
        self,
        body: dict[str, Any],
        ids: tuple[int, ...],
        answer: Answer,
        sent: int,
        place: Place,
        fault: Attempt = RUN,
    ) -> tuple[Part, ...]:
        """How a stream ends: its last event with the tokens since ``sent``, then [DONE]."""
        return (self._part(body, ids, answer, (sent, len(answer.ids)), place, fault, last=True), DONE)

    def whole(
        self, body: dict[str, Any], ids: tuple[int, ...], answer: Answer, place: Place, fault: Attempt = RUN
    ) -> Reply:
        """A plain reply with the whole answer."""
        return self._plain(body, ids, answer, fault, place)

    def spans(self, answer: Answer, fault: Attempt) -> list[tuple[int, int]]:
        """Token ranges of a stream's events, cut where the fault strikes."""
        total = len(answer.ids)
        chunks, marks = self.schedule.chunks, {total}
        if fault.after and fault.kind != "over-deliver":
            marks.add(min(fault.after, total))
        spans, done, index = [], 0, 0
        while done < total:
            upto = min([done + chunks[index % len(chunks)], *(m for m in marks if m > done)])
            spans.append((done, upto))
            done, index = upto, index + 1
        aborted = (answer.finish or {}).get("type") == "abort"
        if not spans or (aborted and fault.kind not in LATE):
            spans.append((total, total))  # an abort's last event need not bring a token
        return spans

    def broken(self, part: Part, first: int, place: Place, fault: Attempt) -> Reply | None:
        """How the stream ends instead of ``part``, whose first token is ``first``, if the fault strikes there."""
        if fault.after != first:
            return None
        if fault.kind == "error-event":
            return Reply(200, True, (self.error_event(fault.code, place), DONE))
        if fault.kind == "close":
            return Reply(200, True, lost=place.fault("close"))
        if fault.kind == "drop-inside":
            cut = min(fault.at, len(part.data) - 1)
            return Reply(200, True, (Part(part.data[:cut]),), "drop", place.fault("drop-inside"))
        return None

    # the request gate

    def _admit(self, body: Any) -> tuple[tuple[int, ...], int, int]:
        """Input ids, tokens that may be generated and the minimum; raises Refusal as the server does."""
        wrong = gate.violation(body)
        if wrong is not None:  # `unknown_param`; 0.5.9 answers 500 to that
            raise Refusal(500 if self.old and wrong.startswith("unknown field") else 400, wrong, bare=True)
        params = body.get("sampling_params") or {}
        if isinstance(params, list):  # of a batch; 0.5.23 does not get over it where there is one input
            raise Refusal(500, "Internal Server Error", bare=True)
        ids = self._input(body)
        want = params.get("max_new_tokens", DEFAULT_MAX_NEW)
        if want is not None and want < 0:
            raise Refusal(400, f"max_new_tokens must be at least 0, got {want}.")
        minimum = params.get("min_new_tokens", 0) or 0
        if want is not None and not 0 <= minimum <= want:
            raise Refusal(400, f"min_new_tokens must be in [0, max_new_tokens({want})], got {minimum}.")
        return ids, self._room(len(ids), want), minimum

    def _input(self, body: dict[str, Any]) -> tuple[int, ...]:
        ids, text = body.get("input_ids"), body.get("text")
        if isinstance(ids[0] if ids else text, list):
            raise Refusal(400, "the mock answers no batch", bare=True)
        if ids is None:
            if text is None:
                raise Refusal(400, "Either text, input_ids or input_embeds should be provided.")
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
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
                f"{want} tokens for the completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit.",
            )
        limit = min(limit, self.pool or limit)
        if length >= limit - RESERVE:
            raise Refusal(
                400,
                f"Input length ({length} tokens) exceeds the maximum allowed length ({limit - RESERVE} tokens). "
                "Use a shorter input or enable --allow-auto-truncate.",
                late=True,
            )
        return min(UNLIMITED if want is None else want, limit - length - STOP_MARGIN)

    # generation

    def _generate(self, ids: tuple[int, ...], room: int, minimum: int, fault: Attempt, body: dict[str, Any]) -> Answer:
        params = body.get("sampling_params") or {}
        stop_at, tokens = self._says(ids, room, minimum, params)
        token = next((_token(one) for one, bias in (params.get("logit_bias") or {}).items() if bias >= FORCE), None)
        if token is not None:
            stop_at, tokens = self._biased(token, minimum, params, tokens)
        word, before = self._stop_string(tokens, min(room, stop_at), params)
        stop_at = min(stop_at, before)
        count = min(room, stop_at + 1)
        stopped = stop_at < count
        finish: dict[str, Any] = {"type": "length", "length": count}
        if stopped and not (self.old and count == room):
            # A stop token exactly at the budget is "stop"; 0.5.9 says "length" (`stop_id_at_budget1`).
            finish = {"type": "stop", "matched": self.eos}
        if fault.kind in ("abort", *LATE, "abort-retracted", "abort-queued"):
            late = fault.kind in LATE
            cut = 0 if fault.kind == "abort-queued" else fault.after + late
            if cut <= count:  # the engine tests abort before stop and length
                count, stopped = cut, stopped and cut > stop_at
                finish = IN_QUEUE if fault.kind in ("abort-queued", "abort-retracted") else ABORTED
        if fault.kind == "over-deliver" and not stopped:
            count, stopped = count + fault.after, False
            finish = {"type": "length", "length": count}
        if count > MOST:
            raise Refusal(400, "the schedule never stops and the request sets no limit")
        said = tokens(count, stopped and word is None)
        matched = (said[-1] if word is None else word) if stopped and finish["type"] != "length" else None
        if finish["type"] == "stop":
            finish = {**finish, "matched": matched}
        probs = tuple(logprob(len(ids) + i, t) for i, t in enumerate(said))
        mute = fault.kind == "missing" and fault.field in ("finish_reason", "meta_info")
        return Answer(said, probs, finish, matched, fault.kind in FAULTY_ENGINE, mute)

    def _says(self, ids: tuple[int, ...], room: int, minimum: int, params: dict[str, Any]) -> tuple[int, Tokens]:
        """How many tokens come before the stop token, and what gives the first ones (``True``: it is the last)."""
        start = len(ids) - len(self.prompt_ids)
        faithful = start >= 0 and ids == self.prompt_ids + self.response_ids(start)
        natural = self.schedule.natural
        stop_at = UNLIMITED
        if natural is not None:
            # Stop tokens are masked until the minimum is reached (`stop_id_min_new`).
            stop_at = max(natural - max(start, 0), minimum, 0)

        def tokens(count: int, stopped: bool) -> tuple[int, ...]:
            said = self._tokens(ids, start, count, faithful)
            return (*said[:-1], self.eos) if stopped else said

        return stop_at, tokens

    def _biased(self, token: int, minimum: int, params: dict[str, Any], other: Tokens) -> tuple[int, Tokens]:
        """As `_says`, where nothing but ``token`` is said; a stop token is masked until the minimum is reached.

        `eos_first`, `stop_id_before_budget`, `stop_id_min_new`, `ignore_eos_and_stop_id`.
        """
        stops = () if params.get("ignore_eos") else (self.eos, *(params.get("stop_token_ids") or ()))
        masked = minimum if token in stops else 0

        def tokens(count: int, stopped: bool) -> tuple[int, ...]:
            return (*other(min(count, masked), False), *[token] * (count - masked))

        return masked if token in stops else UNLIMITED, tokens

    def _stop_string(self, tokens: Tokens, most: int, params: dict[str, Any]) -> tuple[str | None, int]:
        """The stop string that ends the answer, and the tokens before the one that completes it (`stopstr_trim`)."""
        stops = _stop_strings(params)
        if not stops:
            return None, UNLIMITED
        said = tokens(min(most, FAR), False)

        def there(count: int) -> str | None:
            text = decode(self.tokenizer, self.prompt_ids, said[:count], params.get("skip_special_tokens") is not False)
            return next((stop for stop in stops if stop in text), None)

        if there(len(said)) is None:
            return None, UNLIMITED
        first = bisect_left(range(1, len(said) + 1), True, key=lambda count: there(count) is not None)
        return there(first + 1), first

    def _tokens(self, ids: Sequence[int], start: int, count: int, faithful: bool) -> tuple[int, ...]:
        if faithful:
            return self.response_ids(start + count)[start:]
        # Digits, chosen by the unexpected input: unlike any script, and the same every time.
        seed = zlib.crc32(",".join(map(str, ids)).encode())
        return tuple(48 + (seed + 7 * i) % 10 for i in range(count))

    # what goes on the wire

    def _meta(
        self,
        body: dict[str, Any],
        place: Place,
        fault: Attempt,
        prompt: int,
        result: Answer,
        upto: int,
        *,
        last: bool,
    ) -> dict[str, Any]:
        """What an event says of the request. ``last``: also how it ended."""
        meta: dict[str, Any] = {
            # `plain_logprob_rid`; without one the server makes one up
            "id": body.get("rid") or f"{place.attempt}-{place.sample}-{place.number}",
            "finish_reason": None,
            "weight_version": result.version(upto),
            "completion_tokens": upto,
        }
        if not (last and result.queued):  # an abort in the queue lacks these (`abort_all`, waiting requests)
            meta["prompt_tokens"], meta["cached_tokens"], meta["cached_tokens_details"] = prompt, 0, None
            if not self.old:
                meta["reasoning_tokens"], meta["dp_rank"] = 0, None
            meta["total_retractions" if self.old else "num_retractions"] = result.retractions + int(
                fault.kind == "retract" and upto >= fault.after
            )
        if last:
            meta["finish_reason"] = result.finish
            if not self.old:
                meta["weight_versions"] = _spans(result)
        return meta

    def _event(
        self,
        body: dict[str, Any],
        ids: tuple[int, ...],
        meta: dict[str, Any],
        result: Answer,
        span: tuple[int, int],
        fault: Attempt,
    ) -> bytes:
        """One JSON body: everything up to span[1], or what is new since span[0] where the server sends deltas."""
        first, last = span
        delta_ids = first if self.incremental else 0
        # An abort from the queue tells everything once more, and of the ids the last (`pause_retract_then_abort_all`).
        again = self.incremental and result.queued and meta["finish_reason"] is not None
        # 0.5.9 --stream-output makes only output_ids a delta (`stream_logprob`).
        delta_rest = 0 if self.old or again else delta_ids
        params = body.get("sampling_params") or {}
        said = list(result.ids[delta_ids:last])
        if fault.kind == "lost-ids" and len(said) > 0:
            said = said[:-1]
        if again and first == last:
            said = list(result.ids[-1:])
        text = self._text(result, last, params)[len(self._text(result, delta_rest, params)) if delta_rest else 0 :]
        event = self._shape(body, ids, meta, text, said, triples(result, delta_rest, last), last)
        if fault.kind == "missing":
            event.pop(fault.field, None)
            meta.pop(fault.field, None)
        return ENCODE(event).encode()

    def _shape(
        self,
        body: dict[str, Any],
        given: tuple[int, ...],
        meta: dict[str, Any],
        text: str,
        ids: Any,
        logprobs: Any,
        upto: Any,
    ) -> dict[str, Any]:
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = self._input_logprobs(body, given)
            meta["output_token_logprobs"] = logprobs
            if not self.old:  # counts from the start, also where the logprobs are deltas (0.5.23i `stream_logprob`)
                meta["output_token_logprobs_length"] = upto
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _input_logprobs(self, body: dict[str, Any], ids: tuple[int, ...]) -> list[list[Any]]:
        """From ``logprob_start_len`` on (`plain_logprob_start0`); else none, in 0.5.9 the last (`plain_logprob`)."""
        start = body.get("logprob_start_len")
        if not isinstance(start, int) or start < 0:
            start = len(ids) - 1 if self.old else len(ids)
        return [[None if i == start else logprob(i, token), token, None] for i, token in enumerate(ids[start:], start)]

    def _text(self, result: Answer, upto: int, params: dict[str, Any]) -> str:
        """The text so far. In mid-stream an unfinished character is held back (`stream_logprob`)."""
        ids = result.ids[:upto]
        ended = upto == len(result.ids)
        word = result.matched if isinstance(result.matched, str) else None
        trimmed = ended and result.matched is not None and not params.get("no_stop_trim")
        if trimmed and word is None:
            ids = ids[:-1]  # stop ids stay in output_ids and leave the text (`stop_id_before_budget`)
        text = decode(self.tokenizer, self.prompt_ids, ids, params.get("skip_special_tokens") is not False)
        if trimmed and word is not None:
            return text[: text.find(word)]
        return text if ended else _held_back(text.rstrip("\ufffd"), _stop_strings(params))

    def _plain(self, body: dict[str, Any], ids: tuple[int, ...], result: Answer, fault: Attempt, place: Place) -> Reply:
        if fault.kind == "error-event":
            return self._http_error(fault.code or 500, place)
        meta = self._meta(body, place, fault, len(ids), result, len(result.ids), last=True)
        data = self._event(body, ids, meta, result, (0, len(result.ids)), fault)
        told = (self._told(place, result, 0, len(result.ids), last=True),)
        if fault.kind == "drop-inside":
            cut = min(fault.at, len(data) - 1)
            return Reply(200, False, (Part(data[:cut]),), "drop", place.fault("drop-inside"))
        flag = fault.kind == "flag" and 0 < fault.after <= len(result.ids)
        parts = (Part(b"", (), True),) if flag else ()
        whole = Part(data, told, late=fault.kind == "delay")
        return Reply(200, False, (*parts, whole), "drop" if fault.kind == "drop-after" else "end")

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

    def _part(
        self,
        body: dict[str, Any],
        ids: tuple[int, ...],
        result: Answer,
        span: tuple[int, int],
        place: Place,
        fault: Attempt,
        *,
        last: bool,
    ) -> Part:
        meta = self._meta(body, place, fault, len(ids), result, span[1], last=last)
        data = b"data: " + self._event(body, ids, meta, result, span, fault) + b"\n\n"
        return Part(data, (self._told(place, result, *span, last=last),))

    def _stream(
        self, body: dict[str, Any], ids: tuple[int, ...], result: Answer, place: Place, fault: Attempt
    ) -> Reply:
        spans, parts = self.spans(result, fault), list[Part]()
        for first, upto in spans:
            part = self._part(body, ids, result, (first, upto), place, fault, last=(first, upto) == spans[-1])
            broken = self.broken(part, first, place, fault)
            if broken is not None:
                return replace(broken, parts=(*parts, *broken.parts))
            flag = fault.kind == "flag" and 0 < fault.after == upto and first < upto
            late = fault.kind == "delay" and fault.after == first
            parts.append(replace(part, flag=flag, late=late) if flag or late else part)
        return Reply(200, True, (*parts, DONE), "drop" if fault.kind == "drop-after" else "end")

    # errors

    def refuse(self, refusal: Refusal, stream: bool, place: Place) -> Reply:
        told = place.fault("http", refusal.status, refusal.message)
        if stream and not refusal.bare:  # the gate's errors come as an event in a 200 stream
            event = self.error_event(refusal.status, place, refusal.message)
            return Reply(200, True, (event, DONE))
        if refusal.status == 500:
            return Reply(500, False, (Part(b"Internal Server Error", (told,)),))
        error: Any = refusal.message if refusal.bare else {"message": refusal.message}
        return Reply(refusal.status, False, (Part(_json({"error": error}), (told,)),))

    def _phantom(self, body: dict[str, Any], refusal: Refusal, place: Place) -> Reply:
        """A stream refused late: an abort, and a token that answers nothing (`input_ctx_minus6_max5_stream`)."""
        finish = {"type": "abort", "message": refusal.message, "status_code": 400, "err_type": "BadRequestError"}
        answer = Answer((PHANTOM,), (0.0,), finish, None, False)
        meta = self._meta(body, place, RUN, 1, answer, 1, last=True)
        if body.get("return_logprob"):
            meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
        event = {"text": self.tokenizer.decode([PHANTOM]), "output_ids": [PHANTOM], "meta_info": meta}
        told = place.fault("error-event", refusal.status, refusal.message)
        return Reply(200, True, (Part(b"data: " + _json(event) + b"\n\n", (told,)), DONE))

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

    def error_event(self, code: int | None, place: Place, message: str = "Internal error.") -> Part:
        error: dict[str, Any] = {"message": message}
        if code is not None and not self.old:  # 0.5.9 sends the message only
            error |= {"type": "invalid_request_error", "code": code, "retryable": code >= 500}
        told = place.fault("error-event", error.get("code"), message)
        return Part(b"data: " + _json({"error": error}) + b"\n\n", (told,))

    def queue_full(self, body: dict[str, Any], place: Place) -> Reply:
        if body.get("stream") is not True:  # `queue_full`: a third error shape
            message = QUEUE_FULL["message"]
            data = {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
            return Reply(503, False, (Part(_json(data), (place.fault("http", 503, message),)),))
        return Reply(200, True, self.last(body, (), Answer((), (), QUEUE_FULL, None, False), 0, place))


def triples(answer: Answer, first: int, last: int) -> list[tuple[float, int, None]]:
    """``output_token_logprobs`` of some tokens (`plain_logprob`)."""
    return [(p, t, None) for p, t in zip(answer.logprobs[first:last], answer.ids[first:last], strict=True)]


def _spans(result: Answer) -> list[dict[str, Any]]:
    """``weight_versions`` as 0.5.23 writes them: an answer without tokens still has a span (`running_abort`)."""
    spans: list[dict[str, Any]] = []
    start, total = 0, len(result.ids)
    for name, end in result.versions:
        if start < min(end, total) or (not spans and start == total):
            spans.append({"version": name, "start": start, "end": min(end, total)})
            start = min(end, total)
    return spans


def _token(key: str) -> int:
    """A token of ``logit_bias``. Raises Refusal (by hand)."""
    try:
        return int(key)
    except ValueError as error:
        raise Refusal(400, error) from error


def _stop_strings(params: dict[str, Any]) -> tuple[str, ...]:
    stop = params.get("stop")
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _held_back(text: str, stops: tuple[str, ...]) -> str:
    """Text in mid-stream without an end that may yet become a stop string (`stopstr_trim_stream`)."""
    ends = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(ends, default=0)]


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
    return ENCODE(value).encode()


DONE = Part(b"data: [DONE]\n\n")
