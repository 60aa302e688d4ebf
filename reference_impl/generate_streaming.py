"""One streamed attempt: every event that arrives whole may be kept, whatever ends the stream.

Works with all three stream shapes of SGLang: cumulative (the default),
``--incremental-streaming-output`` (deltas, 0.5.23) and ``--stream-output``
(0.5.9: only output_ids is a delta). ``completion_tokens`` is cumulative in all
of them and tells an event that repeats everything from one that adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from reference_impl import client
from reference_impl.generate import Ask, aborted, keep, pairs, prepare
from reference_impl.sample import Sample, Status


class Stream:
    """What one request's stream has told so far; ``meta`` is the latest event's meta_info.

    Only a terminal event has ``weight_versions``. Until it comes ``meta`` has one of our
    own making: each token's version is that of the event which first brought it.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.meta: Mapping[str, Any] = {}
        self._spans: list[dict[str, Any]] = []

    @property
    def finish(self) -> Mapping[str, Any]:
        return self._end(self.meta)

    def _end(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        return meta.get("finish_reason") or {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one event in. Raises `client.MalformedReply` when it does not continue what came before.

        An abort may count a token that it does not bring: what SGLang 0.5.23 says when it was about to refuse
        an input as too long (`refused`), and was asked to abort it first.
        """
        tokens, log_probs = pairs(event)
        meta = event.get("meta_info") or {}
        known, total = len(self.tokens), meta.get("completion_tokens", len(tokens))
        if len(tokens) == total and tokens[:known] == self.tokens:
            self.tokens, self.log_probs = tokens, log_probs
        elif known + len(tokens) == total:
            self.tokens, self.log_probs = self.tokens + tokens, self.log_probs + log_probs
        elif tokens or self._end(meta).get("type") != "abort":
            raise client.MalformedReply(f"{known} tokens, then an event with {len(tokens)} makes {total}")
        if len(self.tokens) > known:
            version = meta.get("weight_version", "")
            self._spans.append({"version": version, "start": known, "end": len(self.tokens)})
        self.meta = {**meta, "weight_versions": meta.get("weight_versions") or self._spans} if meta else meta


async def generate_streaming(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Like `reference_impl.generate.generate`, by server-sent events.

    Returns with status ABORTED and every token received when the stream ends
    without a terminal event or the abort flag is raised. If the task is
    cancelled, the tokens are kept and the cancellation passes on.
    """
    ask = prepare(args, sample, sampling_params, stream=True)
    if ask is None:
        return sample
    try:
        await client.ask(args, ask.payload, lambda response: _consume(args, sample, ask, response))
    except client.InputTooLong:
        sample.status = Status.TRUNCATED
    return sample


async def _consume(args: Any, sample: Sample, ask: Ask, response: aiohttp.ClientResponse) -> None:
    """Reads to the end, or as far as the stream goes once a token is there.

    Before the first token every fault is raised, and the request may be made
    again from a clean state; after it the tokens count.
    """
    stream = Stream()
    try:
        async for event in client.events(response):
            if "error" in event:
                fault = event["error"] or {}
                raise client.error(fault.get("code"), str(fault.get("message", "")))
            refused(event)
            stream.add(event)
            if aborted(args) and not stream.finish:
                break
    except asyncio.CancelledError:
        if stream.tokens:
            _settle(args, sample, ask, stream)
        raise
    except (aiohttp.ClientError, client.EngineError, ValueError):
        if not (stream.tokens or stream.finish):
            raise
    if not stream.meta:
        raise client.Transient("the stream ended without an event")
    _settle(args, sample, ask, stream)


def refused(event: Mapping[str, Any]) -> None:
    """Raises what an abort with the status code of a refusal stands for.

    SGLang 0.5.23 says inside a 200 stream that its queue is full, or that an input is too long by less than
    it could tell at first. With the latter comes a token that answers nothing and has no log probability.
    """
    finish = (event.get("meta_info") or {}).get("finish_reason") or {}
    code = finish.get("status_code") if finish.get("type") == "abort" else None
    if code == 503:
        raise client.Transient("the engine's queue is full")
    if code is not None and 400 <= code < 500:
        raise client.error(code, str(finish.get("message", "")))


def _settle(args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
    """Keeps the tokens. A stream that was cut short leaves the sample ABORTED, ready to be resumed."""
    keep(args, sample, ask, stream.tokens, stream.log_probs, stream.meta)
