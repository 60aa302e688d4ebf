"""Odd clients: unlike the reference, and right all the same. No rule may speak of them.

Each takes a liberty that spec/README.md gives. A false alarm is the worst
fault a checker can have: nobody reads the second report of a tool that cried wolf.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from harness.mutants.parts import Consume, Limited, Reference, altered, prompt_length, room
from harness.targets.function import Generate
from reference_impl import client
from reference_impl.generate import Ask, aborted, keep, prepare, tokenizer
from reference_impl.generate_streaming import Stream
from reference_impl.sample import Sample, Status


def empty(sample: Sample) -> None:
    """All kept tokens go together (spec/README.md#restarts)."""
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = None


class Restarts(Reference):
    """Drops everything when it is interrupted, and begins again from the prompt."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if not sample.finished:
            empty(sample)
            sample.status = Status.ABORTED


class RestartsAtOnce(Reference):
    """Drops the partial response of a sample at the start of the next call, while there is room."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if not sample.finished and room(args, sample, params) > 0 and not aborted(args):
            empty(sample)
        return prepare(args, sample, params, stream=stream)


class _OneTry(Reference):
    """No retries."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        try:
            async with client.session().post(url, json=ask.payload) as response:
                if response.status != 200:
                    raise client.error(response.status, await response.text())
                return await consume(response)
        except aiohttp.ClientError as fault:
            raise client.Transient(str(fault)) from fault


class RaisesAlways(_OneTry):
    """Raises on every fault, and keeps nothing of a broken stream."""

    def broken(self, args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
        if not stream.finish:
            raise client.Transient("the stream broke off")

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        if not answer[2].get("finish_reason"):
            raise client.Transient("the answer has no end")
        keep(args, sample, ask, *answer)


class EndsInstead(Reference):
    """Turns what would be raised into a status: ``refused`` after a 4xx, ABORTED after a transient fault."""

    refused = Status.FAILED

    async def plain(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        try:
            return await super().plain(args, sample, sampling_params)
        except client.Refused:
            sample.status = self.refused
        except client.EngineError:
            sample.status = Status.ABORTED
        return sample

    async def streaming(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        try:
            return await super().streaming(args, sample, sampling_params)
        except client.Refused:
            sample.status = self.refused
        except client.EngineError:
            sample.status = Status.ABORTED
        return sample


class AbortsRefused(EndsInstead):
    """A 4xx leaves the sample ABORTED."""

    refused = Status.ABORTED


class NeverRetries(EndsInstead, _OneTry):
    """One try; whatever happens, the sample is ABORTED, or FAILED after a 4xx."""


class RetriesMore(Reference):
    """Ten times as many tries."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        for _ in range(9):
            try:
                return await client.ask(args, ask.payload, consume)
            except client.Transient:
                continue
        return await client.ask(args, ask.payload, consume)


class _GoesOn(Reference):
    """One attempt that says whether the answer had an end."""

    def __init__(self) -> None:
        self.broke = False

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        self.broke = not answer[2].get("finish_reason") and not aborted(args)


class ResumesInside(Reference):
    """Goes on, in the same call, from the tokens that an answer without an end has brought."""

    async def plain(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        for _ in range(5):
            once = _GoesOn()
            await once.plain(args, sample, sampling_params)
            if not once.broke:
                break
        return sample

    async def streaming(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        for _ in range(5):
            once = _GoesOn()
            await once.streaming(args, sample, sampling_params)
            if not once.broke:
                break
        return sample


class DropsStopToken(Reference):
    """Takes a trailing stop token off every array."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, log_probs, meta = answer
        if (meta.get("finish_reason") or {}).get("type") == "stop" and len(tokens) <= ask.limit:
            tokens, log_probs = tokens[:-1], log_probs[:-1]
        keep(args, sample, ask, tokens, log_probs, meta)


class DropsStopOnAbort(DropsStopToken):
    """Takes a trailing stop token off every array and the answer for complete, also where an abort landed on it."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, log_probs, meta = answer
        on_stop = list(tokens[-1:]) == [tokenizer(args).eos_token_id] and len(tokens) <= ask.limit
        if not on_stop or (meta.get("finish_reason") or {}).get("type") != "abort":
            return super().settle(args, sample, ask, *answer)
        keep(args, sample, ask, tokens[:-1], log_probs[:-1], meta)
        sample.status = Status.COMPLETED


class NeverWantsLogprobs(Reference):
    """Asks for no log probabilities and keeps none; what a buffer gave it stays as it was."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        return None if ask is None else altered(ask, return_logprob=False)

    def _filled(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        meta = event.get("meta_info") or {}
        entries = [[0.0, token, None] for token in event.get("output_ids") or []]
        return {**event, "meta_info": {**meta, "output_token_logprobs": entries}}

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        return super().read(self._filled(reply))

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        stream.add(self._filled(event))

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before = sample.rollout_log_probs
        sample.rollout_log_probs = [0.0] * sample.response_length  # what keep needs to go on
        keep(args, sample, ask, *answer)
        sample.rollout_log_probs = before


class FlagFirst(Reference):
    """Looks at the abort flag before anything else, also for a sample without room."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if not sample.finished and aborted(args):
            sample.status = Status.ABORTED
            return None
        return prepare(args, sample, params, stream=stream)


class DiscardsBroken(Reference):
    """Keeps nothing of a stream without a terminal event."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, log_probs, meta = answer
        if not meta.get("finish_reason") and not aborted(args):
            tokens, log_probs = [], []
        keep(args, sample, ask, tokens, log_probs, meta)


class EndsInReserve(Limited):
    """Ends TRUNCATED without asking where the engine would refuse the input, C - 6 and above."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        limit = args.rollout_max_context_len
        length = prompt_length(args, sample) + sample.response_length
        return 0 if limit is not None and length >= limit - 6 else room(args, sample, params)


class EndsAbortedAtStop(Reference):
    """An abort on the stop token means COMPLETED, one at the budget TRUNCATED."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if (answer[2].get("finish_reason") or {}).get("type") != "abort":
            return
        if sample.response_length and sample.tokens[-1] == tokenizer(args).eos_token_id:
            sample.status = Status.COMPLETED
        elif len(answer[0]) >= ask.limit:
            sample.status = Status.TRUNCATED


class JoinsTexts(Reference):
    """Joins the texts of the attempts; a character at a seam stays broken."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before, text = sample.response_length, sample.response
        keep(args, sample, ask, *answer)
        new = sample.tokens[len(ask.prompt_ids) + before :]
        skip = ask.payload["sampling_params"].get("skip_special_tokens", True)
        sample.response = text + tokenizer(args).decode(new, skip_special_tokens=skip)


class KeepsEngineText(Reference):
    """Takes the engine's text and adds it to what it has, as slime does: held back and torn characters included."""

    _said: str = ""

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        self._said = reply.get("text", "")
        return super().read(reply)

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        before = self._said if stream.meta else ""
        stream.add(event)
        new = len((event.get("meta_info") or {}).get("output_token_logprobs") or ())
        self._said = event.get("text", "") if new == len(stream.tokens) else before + event.get("text", "")

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        text = sample.response
        keep(args, sample, ask, *answer)
        sample.response = text + self._said


class HidesSpecialTokens(Reference):
    """Special tokens never show in its texts."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        ids = sample.tokens[len(ask.prompt_ids) :]
        sample.response = tokenizer(args).decode(ids, skip_special_tokens=True)


class NoMask(Reference):
    """Has no loss mask; an absent one means all ones."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.loss_mask = None


class MasksOldTokens(Reference):
    """Does not train on tokens of earlier attempts. The values of a loss mask are not judged (ALIGN)."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        old = sample.response_length
        keep(args, sample, ask, *answer)
        sample.loss_mask = [0] * old + [1] * (sample.response_length - old)


class StoresPromptFirst(Reference):
    """Has the prompt's ids on the sample before it asks."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is not None and not sample.tokens:
            sample.tokens = list(ask.prompt_ids)
            sample.loss_mask, sample.rollout_log_probs = [], []
        return ask


class OtherObject(Reference):
    """Returns another sample than it was given."""

    async def plain(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return await super().plain(args, copy.deepcopy(sample), sampling_params)

    async def streaming(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return await super().streaming(args, copy.deepcopy(sample), sampling_params)


class SendsOnlyWhatCounts(Reference):
    """Leaves parameters that are None out of the request, and sends one stop string as a string."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None:
            return None
        sent = {k: v for k, v in ask.payload["sampling_params"].items() if v is not None}
        if len(sent.get("stop", ())) == 1:
            sent["stop"] = sent["stop"][0]
        return altered(ask, sampling_params=sent)


class RefusesMoreThanAsked(Reference):
    """An answer with more tokens than asked is no answer."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        if len(answer[0]) > ask.limit:
            raise client.MalformedReply(f"{len(answer[0])} tokens for {ask.limit}")
        keep(args, sample, replace(ask), *answer)


@dataclass(frozen=True, slots=True)
class Odd:
    """An odd client and the liberty it takes, by its place in spec/README.md."""

    name: str
    plain: Generate
    stream: Generate
    liberty: str
    conforming_only: bool = False
    """Odd, but at the mercy of an engine that leaves a field out."""


def _odd(cls: type[Reference], liberty: str, *, conforming_only: bool = False) -> Odd:
    client = cls()
    return Odd(cls.__name__, client.plain, client.streaming, liberty, conforming_only)


ODD: tuple[Odd, ...] = (
    _odd(Restarts, "Restarts"),
    _odd(RestartsAtOnce, "Restarts"),
    _odd(RaisesAlways, "RETRY, item 3"),
    _odd(EndsInstead, "item 8"),
    _odd(AbortsRefused, "item 8"),
    _odd(NeverRetries, "RETRY"),
    _odd(RetriesMore, "RETRY"),
    _odd(ResumesInside, "attempt: it may retry inside"),
    _odd(DropsStopToken, "item 6"),
    _odd(DropsStopOnAbort, "items 1 and 6"),
    _odd(NeverWantsLogprobs, "ALIGN", conforming_only=True),
    _odd(FlagFirst, "item 9"),
    _odd(DiscardsBroken, "item 3, RETRY"),
    _odd(EndsInReserve, "item 7"),
    _odd(EndsAbortedAtStop, "items 1 and 2"),
    _odd(JoinsTexts, "item 6"),
    _odd(KeepsEngineText, "item 6", conforming_only=True),
    _odd(HidesSpecialTokens, "TEXT"),
    _odd(NoMask, "item 5"),
    _odd(MasksOldTokens, "ALIGN"),
    _odd(StoresPromptFirst, "item 5"),
    _odd(OtherObject, "NO-ALIAS"),
    _odd(SendsOnlyWhatCounts, "PARAMS"),
    _odd(RefusesMoreThanAsked, "item 10"),
)
