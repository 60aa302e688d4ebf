"""Faulty clients: the reference with one thing wrong each, as somebody reported it.

`Reference` is the reference implementation cut into the parts that a fault
replaces; a fault is a subclass that replaces one. Every client is a pair of
module-level async functions, plain and streaming, so ``tests.faulty_clients:NAME``
is a target. `FAULTS` says which rule must find each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from reference_impl import client
from reference_impl.generate import Ask, _whole, aborted, generate, keep, pairs, prepare, tokenizer
from reference_impl.generate_streaming import Stream, generate_streaming
from reference_impl.sample import Sample, Status

Generate = Callable[[Any, Sample, dict[str, Any]], Awaitable[Sample]]
PLAIN, STREAM, INCREMENTAL = "plain", "stream", "incremental"
STREAMS = (STREAM, INCREMENTAL)
ALL = (PLAIN, *STREAMS)


class Reference:
    """The reference. `tests.quality` checks that it is as faultless as the original."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        return prepare(args, sample, params, stream=stream)

    async def ask(self, args: Any, ask: Ask, consume: Callable[[aiohttp.ClientResponse], Awaitable[Any]]) -> Any:
        return await client.ask(args, ask.payload, consume)

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        stream.add(event)

    def broken(self, args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
        """A stream broke off after its first token."""

    def settle(
        self,
        args: Any,
        sample: Sample,
        ask: Ask,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        meta: Mapping[str, Any],
    ) -> None:
        keep(args, sample, ask, tokens, log_probs, meta)

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        return pairs(reply)

    async def plain(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        """One plain attempt."""
        ask = self.prepare(args, sample, sampling_params, False)
        if ask is None:
            return sample
        try:
            reply = await self.ask(args, ask, _whole)
        except client.InputTooLong:
            sample.status = Status.TRUNCATED
            return sample
        tokens, log_probs = self.read(reply)
        self.settle(args, sample, ask, tokens, log_probs, reply.get("meta_info") or {})
        return sample

    async def streaming(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        """One streamed attempt."""
        ask = self.prepare(args, sample, sampling_params, True)
        if ask is None:
            return sample
        asked = ask
        try:
            await self.ask(args, ask, lambda response: self._consume(args, sample, asked, response))
        except client.InputTooLong:
            sample.status = Status.TRUNCATED
        return sample

    async def _consume(self, args: Any, sample: Sample, ask: Ask, response: aiohttp.ClientResponse) -> None:
        stream = Stream()
        try:
            async for event in client.events(response):
                if "error" in event:
                    fault = event["error"] or {}
                    raise client.error(fault.get("code"), str(fault.get("message", "")))
                self.add(stream, event)
                if aborted(args) and not stream.finish:
                    break
        except asyncio.CancelledError:
            raise
        except (aiohttp.ClientError, client.EngineError, ValueError):
            if not (stream.tokens or stream.finish):
                raise
            self.broken(args, sample, ask, stream)
        if stream.finish.get("type") == "abort" and stream.finish.get("status_code") == 503:
            raise client.Transient("the engine's queue is full")
        if not stream.meta:
            raise client.Transient("the stream ended without an event")
        self.settle(args, sample, ask, stream.tokens, stream.log_probs, stream.meta)

    def both(self) -> tuple[Generate, Generate]:
        """The plain and the streaming function."""
        return self.plain, self.streaming


same, same_streaming = Reference().both()


# how much is asked for


def prompt_length(args: Any, sample: Sample) -> int:
    return len(sample.prompt_ids or tokenizer(args).encode(sample.prompt, add_special_tokens=False))


def room(args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
    """min(B - r, C - P - r), negative for a sample that is over-full."""
    left: int = params["max_new_tokens"] - sample.response_length
    limit: int | None = args.rollout_max_context_len
    return left if limit is None else min(left, limit - prompt_length(args, sample) - sample.response_length)


class _Instead:
    """``args`` with some fields replaced; the original is not touched."""

    def __init__(self, args: Any, **fields: Any) -> None:
        self.__dict__.update(fields, _args=args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_args"], name)


def asking(args: Any, sample: Sample, params: dict[str, Any], stream: bool, limit: int) -> Ask | None:
    """The reference's request, but for ``limit`` tokens, whatever that is. None when finished or flagged."""
    free = _Instead(args, rollout_max_context_len=None)
    ask = prepare(free, sample, {**params, "max_new_tokens": 1 << 40}, stream=stream)
    if ask is None:
        return None
    sent = {**ask.payload["sampling_params"], "max_new_tokens": limit}
    if "min_new_tokens" in sent:
        sent["min_new_tokens"] = max(0, min(sent["min_new_tokens"], limit))
    return altered(replace(ask, limit=max(limit, 0)), sampling_params=sent)


def altered(ask: Ask, **fields: Any) -> Ask:
    """The request with some fields of its payload replaced; None takes a field away."""
    payload = {**ask.payload, **fields}
    return replace(ask, payload={name: value for name, value in payload.items() if value is not None})


class Limited(Reference):
    """A client with an arithmetic of its own: ``limit`` is m, and nothing is asked at 0 or below."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        return room(args, sample, params)

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.finished:
            return None
        limit = self.limit(args, sample, params)
        if limit <= 0:
            sample.status = Status.TRUNCATED
            return None
        return asking(args, sample, params, stream, limit)


class ForgetsSubtraction(Limited):
    """Asks for the whole budget again after a resume. THUDM/slime#2260"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        whole = {**params, "max_new_tokens": params["max_new_tokens"] + sample.response_length}
        return room(args, sample, whole)


forgets_subtraction, forgets_subtraction_streaming = ForgetsSubtraction().both()


class SubtractsLastAttempt(Limited):
    """Subtracts what the last attempt brought, not all that is kept: a sample climbs on. THUDM/slime#2003"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        forgotten = sample.metadata.get("kept_before", 0)
        return room(args, sample, {**params, "max_new_tokens": params["max_new_tokens"] + forgotten})

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        sample.metadata["kept_before"] = sample.response_length
        keep(args, sample, ask, *answer)


subtracts_last_attempt, subtracts_last_attempt_streaming = SubtractsLastAttempt().both()


class FillsContext(Limited):
    """Asks for C - P - r where C is known, whatever the budget. verl-project/verl#4568"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        if args.rollout_max_context_len is None:
            return room(args, sample, params)
        return room(args, sample, {**params, "max_new_tokens": 1 << 40})


fills_context, fills_context_streaming = FillsContext().both()


class KeepsMoreThanAsked(Reference):
    """Keeps all that the engine delivers, asked or not. NVIDIA-NeMo/RL#2365"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, replace(ask, limit=1 << 40), *answer)


keeps_more_than_asked, keeps_more_than_asked_streaming = KeepsMoreThanAsked().both()


class ChargesPrompt(Limited):
    """Takes the budget for prompt and response together. areal-project/AReaL#699"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        own: int = params["max_new_tokens"] - sample.response_length - prompt_length(args, sample)
        return min(own, room(args, sample, params))


charges_prompt, charges_prompt_streaming = ChargesPrompt().both()


class CountsCharacters(Limited):
    """Subtracts the characters of the text from the budget. sgl-project/sglang#34852"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        own: int = params["max_new_tokens"] - len(sample.response)
        return min(own, room(args, sample, {**params, "max_new_tokens": 1 << 40}))


counts_characters, counts_characters_streaming = CountsCharacters().both()


class OneLessInStream(Limited):
    """Of two paths one asks for C - P - r and the other for one less. verl-project/verl#4668"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        limit = args.rollout_max_context_len
        return super().prepare(
            _Instead(args, rollout_max_context_len=limit - 1 if stream and limit is not None else limit),
            sample,
            params,
            stream,
        )


_, one_less_streaming = OneLessInStream().both()


class IgnoresContext(Limited):
    """Checks the budget only; the engine refuses what does not fit. radixark/miles#487"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        return room(_Instead(args, rollout_max_context_len=None), sample, params)


ignores_context, ignores_context_streaming = IgnoresContext().both()


class OneOverContext(Limited):
    """Asks for one token more than the context holds. vllm-project/vllm#40689"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        limit = args.rollout_max_context_len
        return room(_Instead(args, rollout_max_context_len=None if limit is None else limit + 1), sample, params)


one_over_context, one_over_context_streaming = OneOverContext().both()


class ForgetsResponseInContext(Limited):
    """Takes the prompt from the context but not what is kept. TIGER-AI-Lab/verl-tool#85"""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        left: int = params["max_new_tokens"] - sample.response_length
        limit: int | None = args.rollout_max_context_len
        return left if limit is None else min(left, limit - prompt_length(args, sample))


forgets_response_in_context, forgets_response_in_context_streaming = ForgetsResponseInContext().both()


# a sample without room


class AsksForZero(Limited):
    """Sends max_new_tokens 0 where nothing is left. modelscope/ms-swift#6023, sgl-project/sglang#4998"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.finished:
            return None
        return asking(args, sample, params, stream, max(room(args, sample, params), 0))


asks_for_zero, asks_for_zero_streaming = AsksForZero().both()


class AsksForLessThanZero(Limited):
    """Sends what the subtraction gives, also below 0. vllm-project/vllm#36789, modelscope/ms-swift#6441"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.finished:
            return None
        return asking(args, sample, params, stream, room(args, sample, params))


asks_for_less_than_zero, asks_for_less_than_zero_streaming = AsksForLessThanZero().both()


class RaisesWhenFull(Reference):
    """Asserts that something is left. verl-project/verl#4668"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if not sample.finished and room(args, sample, params) <= 0:
            raise AssertionError("max_tokens must be at least 1")
        return prepare(args, sample, params, stream=stream)


raises_when_full, raises_when_full_streaming = RaisesWhenFull().both()


class LeavesAborted(Reference):
    """Hands a sample that was aborted exactly at its budget back as it is, for ever. THUDM/slime#92"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        before = sample.status
        ask = prepare(args, sample, params, stream=stream)
        if ask is None:
            sample.status = before
        return ask


leaves_aborted, leaves_aborted_streaming = LeavesAborted().both()


# what is sent again after a resume


class Retokenises(Reference):
    """Encodes prompt and response text again. huggingface/trl#5224"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not sample.response_length:
            return ask
        text = f"{sample.prompt}{sample.response}"
        return altered(ask, input_ids=tokenizer(args).encode(text, add_special_tokens=False))


retokenises, retokenises_streaming = Retokenises().both()


class SendsText(Reference):
    """Sends prompt and response as text. THUDM/slime#1130"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not sample.response_length:
            return ask
        return altered(ask, input_ids=None, text=f"{sample.prompt}{sample.response}")


sends_text, sends_text_streaming = SendsText().both()


class DropsLastKept(Reference):
    """Resumes without the last kept token. PrimeIntellect-ai/verifiers@0315d48c7"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not sample.response_length:
            return ask
        return altered(ask, input_ids=ask.payload["input_ids"][:-1])


drops_last_kept, drops_last_kept_streaming = DropsLastKept().both()


class SecondAnswer(Reference):
    """Resumes from the prompt and appends the second answer to the first. ls1intum/edutelligence#853"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not sample.response_length:
            return ask
        return altered(ask, input_ids=list(ask.prompt_ids))


second_answer, second_answer_streaming = SecondAnswer().both()


class ImagesAsTextAgain(Reference):
    """Sends a prompt with images as text, also when there is a response to go on from. THUDM/slime#1803"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not ask.payload.get("image_data"):
            return ask
        return altered(ask, input_ids=None, text=sample.prompt)


images_as_text_again, images_as_text_again_streaming = ImagesAsTextAgain().both()


class BlanksOldLogprobs(Reference):
    """Has no log probabilities for the prefix that it sends again. strands-rl/strands-sglang@a326eb6"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        if sample.response_length:
            sample.rollout_log_probs = [0.0] * sample.response_length
        keep(args, sample, ask, *answer)


blanks_old_logprobs, blanks_old_logprobs_streaming = BlanksOldLogprobs().both()


class AppendsRetry(Reference):
    """Keeps a broken stream's tokens, asks the same again, and keeps those as well. THUDM/slime#1861"""

    def broken(self, args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
        if not stream.finish:
            self.settle(args, sample, ask, stream.tokens, stream.log_probs, stream.meta)
            raise client.Transient("the stream broke off")


_, appends_retry_streaming = AppendsRetry().both()


# a resume that does not happen


class NeverResumes(Reference):
    """Hands an aborted sample with a response back as it is, and it is never scored. THUDM/slime#92"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.status is Status.ABORTED and sample.response_length and room(args, sample, params) > 0:
            return None
        return prepare(args, sample, params, stream=stream)


never_resumes, never_resumes_streaming = NeverResumes().both()


class EndsOnResume(Reference):
    """Ends an aborted sample though the rest would fit. PrimeIntellect-ai/prime-rl#1782"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.status is Status.ABORTED and sample.response_length:
            sample.status = Status.TRUNCATED
            return None
        return prepare(args, sample, params, stream=stream)


ends_on_resume, ends_on_resume_streaming = EndsOnResume().both()


# streams


class AppendsCumulative(Reference):
    """Adds each cumulative event to the last: 5, 5 6, 5 6 7 become 5 5 6 5 6 7. Mismatch as in THUDM/slime#2272"""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        tokens, log_probs = pairs(event)
        stream.tokens, stream.log_probs = stream.tokens + tokens, stream.log_probs + log_probs
        stream.meta = event.get("meta_info") or {}


_, appends_cumulative_streaming = AppendsCumulative().both()


class TakesDeltaForWhole(Reference):
    """Takes every event for all there is, incremental ones too. ai-dynamo/dynamo#13996"""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        stream.tokens, stream.log_probs = pairs(event)
        stream.meta = event.get("meta_info") or {}


_, takes_delta_for_whole_streaming = TakesDeltaForWhole().both()


class DropsLastTokens(Reference):
    """Loses in streams what comes with the end of the answer. LostRuins/koboldcpp#1031"""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known, probs = stream.tokens, stream.log_probs
        stream.add(event)
        if stream.finish and stream.finish.get("type") != "abort":
            stream.tokens, stream.log_probs = known, probs


_, drops_last_tokens_streaming = DropsLastTokens().both()


class DropsLastEvent(Reference):
    """Loses the last event of a stream with its finish_reason. agentjido/req_llm#462"""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        if not (event.get("meta_info") or {}).get("finish_reason"):
            stream.add(event)
        elif not stream.meta:
            stream.meta = {"completion_tokens": 0}


_, drops_last_event_streaming = DropsLastEvent().both()


class SkipsEventsWithoutText(Reference):
    """Passes over stream events whose text is empty, and their tokens with them. sgl-project/sglang#34852"""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known, probs = stream.tokens, stream.log_probs
        stream.add(event)
        if not event.get("text"):
            stream.tokens, stream.log_probs = known, probs


_, skips_events_without_text_streaming = SkipsEventsWithoutText().both()


class TextTwice(Reference):
    """Adds each cumulative event's text to the last one's; the tokens are right. sgl-project/sglang#31598"""

    def __init__(self) -> None:
        self.text = ""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        self.text = sample.response
        return prepare(args, sample, params, stream=stream)

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        self.text += event.get("text", "")
        stream.add(event)

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.response = self.text


_, text_twice_streaming = TextTwice().both()


# the status


class CompletesWithoutEnd(Reference):
    """Takes a stream that was cut for one that has ended. PrimeIntellect-ai/verifiers#1191"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if not answer[2].get("finish_reason"):
            sample.status = Status.COMPLETED


_, completes_without_end_streaming = CompletesWithoutEnd().both()


class PendingWithoutEnd(Reference):
    """Never learns how a cut stream ended and leaves the sample pending. vllm-project/vllm#47933"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if not answer[2].get("finish_reason"):
            sample.status = Status.PENDING


_, pending_without_end_streaming = PendingWithoutEnd().both()


class CompletesAborted(Reference):
    """Lets an aborted answer go on as a finished one. rllm-org/rllm#542"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if (answer[2].get("finish_reason") or {}).get("type") == "abort":
            sample.status = Status.COMPLETED


completes_aborted, completes_aborted_streaming = CompletesAborted().both()


class CompletesTruncated(Reference):
    """Never says that an answer was cut at its length. OpenRLHF/OpenRLHF#1327, NovaSky-AI/SkyRL#81"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.status is Status.TRUNCATED:
            sample.status = Status.COMPLETED


completes_truncated, completes_truncated_streaming = CompletesTruncated().both()


class AbortsShortAnswers(Reference):
    """Concludes from fewer tokens than asked that there was an abort. verl-project/verl#4865"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if len(answer[0]) < ask.limit:
            sample.status = Status.ABORTED


aborts_short_answers, aborts_short_answers_streaming = AbortsShortAnswers().both()


class AbortsShortLength(Reference):
    """The same for `length` only; the engine has given two tokens fewer than asked. sgl-project/sglang#33814"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.status is Status.TRUNCATED and len(answer[0]) < ask.limit:
            sample.status = Status.ABORTED


aborts_short_length, aborts_short_length_streaming = AbortsShortLength().both()


class KeyErrorOnQueueAbort(Reference):
    """Reads prompt_tokens, which an abort in the queue lacks. sgl-project/sglang#14835, THUDM/slime#327"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        assert answer[2]["prompt_tokens"] >= 0
        keep(args, sample, ask, *answer)


key_error_on_queue_abort, key_error_on_queue_abort_streaming = KeyErrorOnQueueAbort().both()


class GeneratesAgain(Reference):
    """Generates for a sample that is finished. PrimeIntellect-ai/verifiers#2036"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        before = sample.status
        if sample.finished:
            sample.status = Status.ABORTED
        ask = prepare(args, sample, params, stream=stream)
        sample.status = before if ask is not None else sample.status
        return ask


generates_again, generates_again_streaming = GeneratesAgain().both()


# arrays and text


class MaskNotExtended(Reference):
    """The loss mask keeps the entries of the first attempt. THUDM/slime#1440"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        mask = sample.loss_mask
        keep(args, sample, ask, *answer)
        if mask:
            sample.loss_mask = mask


mask_not_extended, mask_not_extended_streaming = MaskNotExtended().both()


class ReplacesLogprobs(Reference):
    """The log probabilities are those of the last attempt only. THUDM/slime#1995"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        sample.rollout_log_probs = [0.0] * sample.response_length  # what keep needs to go on
        before = sample.response_length
        keep(args, sample, ask, *answer)
        sample.rollout_log_probs = sample.rollout_log_probs[before:]


replaces_logprobs, replaces_logprobs_streaming = ReplacesLogprobs().both()


class TwoSources(Reference):
    """Takes ids from one list and log probabilities from another, unchecked. sgl-project/sglang#34488"""

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        return reply.get("output_ids") or [], pairs(reply)[1]

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, log_probs, meta = answer
        keep(args, sample, ask, tokens, [0.0] * len(tokens), meta)
        before = (sample.rollout_log_probs or [])[: sample.response_length - len(tokens[: ask.limit])]
        sample.rollout_log_probs = [*before, *log_probs[: ask.limit]]


two_sources, _ = TwoSources().both()


class TextBeforeTokens(Reference):
    """Returns early at an abort: the text has what the tokens do not. THUDM/slime#92"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, _, meta = answer
        if (meta.get("finish_reason") or {}).get("type") != "abort":
            return keep(args, sample, ask, *answer)
        sample.response += tokenizer(args).decode(list(tokens))
        sample.status = Status.ABORTED


text_before_tokens, text_before_tokens_streaming = TextBeforeTokens().both()


class CountsTextAsLength(Reference):
    """Takes the number of characters for the response length. sgl-project/sglang#34852"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.finished:
            sample.response_length = len(sample.response)


counts_text_as_length, counts_text_as_length_streaming = CountsTextAsLength().both()


class TextOfLastAttempt(Reference):
    """The text is what the last attempt brought. InternLM/xtuner#1244"""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before = sample.response_length
        keep(args, sample, ask, *answer)
        sample.response = tokenizer(args).decode(sample.tokens[len(ask.prompt_ids) + before :])


text_of_last_attempt, text_of_last_attempt_streaming = TextOfLastAttempt().both()


# what belongs to the caller


class LowersSharedCap(Reference):
    """Writes what is left into the caller's dict. verl-project/verl#5430"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is not None:
            params["max_new_tokens"] = ask.limit
        return ask


lowers_shared_cap, lowers_shared_cap_streaming = LowersSharedCap().both()


class WritesArgs(Reference):
    """Keeps what is left in args, which the whole group shares. areal-project/AReaL#1625"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is not None:
            args.rollout_max_response_len = ask.limit
        return ask


writes_args, writes_args_streaming = WritesArgs().both()


# retries


class RetriesRefusals(Reference):
    """Asks again for what was refused for good. strands-rl/strands-sglang@dbaff4a"""

    async def ask(self, args: Any, ask: Ask, consume: Callable[[aiohttp.ClientResponse], Awaitable[Any]]) -> Any:
        for _ in range(client.RETRIES):
            try:
                return await client.ask(args, ask.payload, consume)
            except client.InputTooLong:
                raise
            except client.Refused:
                await asyncio.sleep(client.BACKOFF_S)
        return await client.ask(args, ask.payload, consume)


retries_refusals, retries_refusals_streaming = RetriesRefusals().both()


class RetriesForEver(Reference):
    """Asks until it gets an answer. invergent-ai/surogate#177"""

    async def ask(self, args: Any, ask: Ask, consume: Callable[[aiohttp.ClientResponse], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await client.ask(args, ask.payload, consume)
            except client.Transient:
                await asyncio.sleep(client.BACKOFF_S)


retries_for_ever, retries_for_ever_streaming = RetriesForEver().both()


class RetriesInPlainOnly(Reference):
    """Asks up to sixty times in plain mode and once in streams. vllm-project/vime#117"""

    async def ask(self, args: Any, ask: Ask, consume: Callable[[aiohttp.ClientResponse], Awaitable[Any]]) -> Any:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        async with client.session().post(url, json=ask.payload) as response:
            if response.status != 200:
                raise client.error(response.status, await response.text())
            return await consume(response)


_, retries_in_plain_only_streaming = RetriesInPlainOnly().both()


# parameters


class DropsParameter(Reference):
    """A payload builder that leaves ``names`` out."""

    names: tuple[str, ...] = ()

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None:
            return None
        sent = {k: v for k, v in ask.payload["sampling_params"].items() if k not in self.names}
        return altered(ask, sampling_params=sent)


class DropsStop(DropsParameter):
    """Stop strings do not reach the engine. areal-project/AReaL#1429"""

    names = ("stop",)


class DropsSeed(DropsParameter):
    """The seed does not reach the engine. verl-project/verl#6857"""

    names = ("sampling_seed",)


class DropsMinimum(DropsParameter):
    """The minimum does not reach the engine. THUDM/slime#2242"""

    names = ("min_new_tokens",)


class DropsMaximum(DropsParameter):
    """The cap does not reach the engine, which has one of its own. NovaSky-AI/SkyRL#1317"""

    names = ("max_new_tokens",)


drops_stop, drops_stop_streaming = DropsStop().both()
drops_seed, drops_seed_streaming = DropsSeed().both()
drops_minimum, drops_minimum_streaming = DropsMinimum().both()
drops_maximum, drops_maximum_streaming = DropsMaximum().both()


class WholeMinimumAgain(Reference):
    """Sends the whole minimum again after a resume. THUDM/slime#2242"""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or "min_new_tokens" not in params:
            return ask
        sent = {**ask.payload["sampling_params"], "min_new_tokens": params["min_new_tokens"]}
        return altered(ask, sampling_params=sent)


whole_minimum_again, whole_minimum_again_streaming = WholeMinimumAgain().both()


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault and what must be said of it.

    ``rule`` must find it in each of ``modes``. Rules in ``also`` may speak up, for
    the reason that stands beside them; every other rule must be silent. ``kinds``
    are the interruptions that show it (a preloaded response stands in for one);
    with none it shows without. ``report`` is the public report that it models.
    """

    name: str
    plain: Generate | None
    stream: Generate | None
    rule: str
    modes: tuple[str, ...]
    kinds: tuple[str, ...]
    report: str
    also: frozenset[str] = frozenset()
    faulty_engine: bool = False
    rare: bool = False
    """Shows on fewer than one schedule in fifty, so that a hundred of them need not find it."""


STOPPED = ("abort", "abort-late", "abort-retracted", "flag", "close", "drop-inside", "error-event")
"""What can leave a part of a response on the sample."""
ANY: tuple[str, ...] = ()


def _fault(
    name: str,
    rule: str,
    report: str,
    *,
    kinds: tuple[str, ...] = ANY,
    also: str = "",
    modes: tuple[str, ...] = ALL,
    plain: Generate | None = None,
    faulty_engine: bool = False,
    rare: bool = False,
) -> Fault:
    """The fault whose functions are called ``name`` and ``name_streaming``, or either."""
    names = globals()
    own = names.get(name)
    stream = names.get(f"{name}_streaming")
    return Fault(
        name,
        plain or (own if PLAIN in modes else None),
        stream,
        rule,
        modes,
        kinds,
        report,
        frozenset(also.split()),
        faulty_engine,
        rare,
    )


FAULTS: tuple[Fault, ...] = (
    # Another length than uninterrupted, and one that depends on the mode where the transport interrupts; asks at r = B.
    _fault("forgets_subtraction", "BUDGET", "THUDM/slime#2260", kinds=STOPPED, also="EXHAUSTED RESUME-EQ MODE-EQ"),
    _fault(
        "subtracts_last_attempt",
        "BUDGET",
        "THUDM/slime#2003",
        kinds=STOPPED,
        also="EXHAUSTED RESUME-EQ MODE-EQ",
        rare=True,
    ),
    _fault("fills_context", "BUDGET", "verl-project/verl#4568", also="EXHAUSTED"),  # asks at r >= B
    # One token too many is one more than uninterrupted, and perhaps more than C.
    _fault(
        "keeps_more_than_asked",
        "BUDGET",
        "NVIDIA-NeMo/RL#2365",
        kinds=("over-deliver",),
        also="CONTEXT RESUME-EQ",
        faulty_engine=True,
    ),
    _fault("charges_prompt", "MAXIMAL", "areal-project/AReaL#699", also="STATUS"),  # ends unasked where P >= B - r
    # Text is longer or shorter than tokens: too little, nothing or too much is asked, also of a full sample.
    _fault(
        "counts_characters",
        "MAXIMAL",
        "sgl-project/sglang#34852",
        kinds=STOPPED,
        also="BUDGET EXHAUSTED STATUS RESUME-EQ MODE-EQ",
        rare=True,
    ),
    _fault(
        "one_less",
        "MAXIMAL",
        "verl-project/verl#4668",
        modes=STREAMS,
        plain=generate,
        also="MODE-EQ",
        rare=True,
    ),
    # No room in the context, and yet a request.
    _fault("ignores_context", "CONTEXT", "radixark/miles#487", also="EXHAUSTED", rare=True),
    _fault("one_over_context", "CONTEXT", "vllm-project/vllm#40689", also="EXHAUSTED", rare=True),
    _fault(
        "forgets_response_in_context",
        "CONTEXT",
        "TIGER-AI-Lab/verl-tool#85",
        kinds=STOPPED,
        also="EXHAUSTED RESUME-EQ",
        rare=True,
    ),
    # 0 is more than the negative rest of an over-full sample, or than what its context holds.
    _fault("asks_for_zero", "EXHAUSTED", "modelscope/ms-swift#6023", also="BUDGET CONTEXT"),
    _fault("asks_for_less_than_zero", "EXHAUSTED", "vllm-project/vllm#36789"),
    # Full by an interruption, the sample stays aborted; uninterrupted, or in plain mode, it ends.
    _fault("raises_when_full", "EXHAUSTED", "verl-project/verl#4668", also="RESUME-EQ MODE-EQ"),
    _fault("leaves_aborted", "EXHAUSTED", "THUDM/slime#92", also="RESUME-EQ MODE-EQ"),
    # Another input gives other tokens, and perhaps a longer one than fits.
    _fault("retokenises", "PREFIX", "huggingface/trl#5224", kinds=STOPPED, also="CONTEXT RESUME-EQ MODE-EQ"),
    _fault("sends_text", "PREFIX", "THUDM/slime#1130", kinds=STOPPED, also="CONTEXT RESUME-EQ MODE-EQ"),
    # With one token kept, or none sent, the request is that of a restart, which may ask for B and the whole minimum.
    _fault(
        "drops_last_kept",
        "PREFIX",
        "PrimeIntellect-ai/verifiers@0315d48c7",
        kinds=STOPPED,
        also="MAXIMAL PARAMS RESUME-EQ MODE-EQ",
    ),
    _fault(
        "second_answer",
        "PREFIX",
        "ls1intum/edutelligence#853",
        kinds=STOPPED,
        also="MAXIMAL PARAMS RESUME-EQ MODE-EQ STATUS",
    ),
    _fault(
        "images_as_text_again",
        "PREFIX",
        "THUDM/slime#1803",
        kinds=STOPPED,
        also="MAXIMAL PARAMS RESUME-EQ MODE-EQ",
        rare=True,
    ),
    # They are part of the sample that is compared.
    _fault(
        "blanks_old_logprobs", "PREFIX", "strands-rl/strands-sglang@a326eb6", kinds=STOPPED, also="RESUME-EQ MODE-EQ"
    ),
    # Two answers are longer than one, and than what may be asked.
    _fault(
        "appends_retry",
        "PREFIX",
        "THUDM/slime#1861",
        kinds=("drop-inside", "error-event"),
        modes=STREAMS,
        plain=generate,
        also="BUDGET CONTEXT RESUME-EQ MODE-EQ STATUS RETRY",
    ),
    # In one mode there is something to resume, in the other not; what ends unasked has no status from the engine.
    _fault("never_resumes", "RESUME-EQ", "THUDM/slime#92", kinds=STOPPED, also="MODE-EQ", rare=True),
    _fault(
        "ends_on_resume",
        "RESUME-EQ",
        "PrimeIntellect-ai/prime-rl#1782",
        kinds=STOPPED,
        also="STATUS MODE-EQ",
        rare=True,
    ),
    # No request brought these tokens together; clipped to m they hide how the answer ended.
    _fault(
        "appends_cumulative",
        "MODE-EQ",
        "THUDM/slime#2272",
        modes=(STREAM,),
        plain=generate,
        also="PREFIX RESUME-EQ STATUS",
    ),
    _fault(
        "takes_delta_for_whole",
        "MODE-EQ",
        "ai-dynamo/dynamo#13996",
        modes=(INCREMENTAL,),
        plain=generate,
        also="PREFIX RESUME-EQ STATUS",
    ),
    # How much is lost depends on the events, of which the uninterrupted run has one.
    _fault(
        "drops_last_tokens",
        "MODE-EQ",
        "LostRuins/koboldcpp#1031",
        modes=STREAMS,
        plain=generate,
        also="RESUME-EQ",
    ),
    _fault(
        "drops_last_event", "STATUS", "agentjido/req_llm#462", modes=STREAMS, plain=generate, also="MODE-EQ RESUME-EQ"
    ),
    _fault(
        "skips_events_without_text",
        "MODE-EQ",
        "sgl-project/sglang#34852",
        modes=STREAMS,
        plain=generate,
        also="PREFIX RESUME-EQ STATUS",
        rare=True,
    ),
    _fault(
        "text_twice",
        "TEXT",
        "sgl-project/sglang#31598",
        modes=(STREAM,),
        plain=generate,
        also="MODE-EQ RESUME-EQ",  # the text is compared
    ),
    # What is over too early is shorter than it would have been.
    _fault(
        "completes_without_end",
        "STATUS",
        "PrimeIntellect-ai/verifiers#1191",
        kinds=("flag", "close", "drop-inside", "error-event"),
        modes=STREAMS,
        plain=generate,
        also="MODE-EQ RESUME-EQ",
    ),
    _fault(
        "pending_without_end",
        "STATUS",
        "vllm-project/vllm#47933",
        kinds=("flag", "close", "drop-inside", "error-event"),
        modes=STREAMS,
        plain=generate,
    ),
    _fault(
        "completes_aborted",
        "STATUS",
        "rllm-org/rllm#542",
        kinds=("abort", "abort-late", "abort-queued", "abort-retracted"),
        also="MODE-EQ RESUME-EQ",
    ),
    # A resume at r = B ends TRUNCATED, an answer of B tokens COMPLETED.
    _fault("completes_truncated", "STATUS", "OpenRLHF/OpenRLHF#1327", also="MODE-EQ RESUME-EQ"),
    # What is aborted is resumed; where it is cut short depends on the mode, and on where it was interrupted.
    _fault("aborts_short_answers", "STATUS", "verl-project/verl#4865", also="MODE-EQ RESUME-EQ"),
    _fault("aborts_short_length", "STATUS", "sgl-project/sglang#33814", also="MODE-EQ RESUME-EQ", rare=True),
    _fault("key_error_on_queue_abort", "STATUS", "sgl-project/sglang#14835", kinds=("abort-queued", "abort-retracted")),
    # More tokens than there would have been.
    _fault("generates_again", "STATUS", "PrimeIntellect-ai/verifiers#2036", also="MODE-EQ RESUME-EQ"),
    # Every array is compared.
    _fault("mask_not_extended", "ALIGN", "THUDM/slime#1440", kinds=STOPPED, also="MODE-EQ RESUME-EQ"),
    _fault("replaces_logprobs", "ALIGN", "THUDM/slime#1995", kinds=STOPPED, also="MODE-EQ RESUME-EQ"),
    _fault(
        "two_sources",
        "ALIGN",
        "sgl-project/sglang#34488",
        kinds=("lost-ids", "missing"),
        modes=(PLAIN,),
        also="RESUME-EQ",
        faulty_engine=True,
    ),
    # The length is wrong, and with it what counts as the response.
    _fault(
        "counts_text_as_length",
        "ALIGN",
        "sgl-project/sglang#34852",
        also="TEXT PREFIX STATUS BUDGET CONTEXT MODE-EQ RESUME-EQ",
    ),
    _fault(
        "text_before_tokens",
        "TEXT",
        "THUDM/slime#92",
        kinds=("abort", "abort-late", "abort-retracted"),
        also="MODE-EQ RESUME-EQ EXHAUSTED",
        rare=True,
    ),
    _fault("text_of_last_attempt", "TEXT", "InternLM/xtuner#1244", kinds=STOPPED, also="MODE-EQ RESUME-EQ"),
    # Who reads the lowered cap asks for less than B - r, and ends early.
    _fault("lowers_shared_cap", "NO-ALIAS", "verl-project/verl#5430", also="MAXIMAL STATUS MODE-EQ RESUME-EQ"),
    _fault("writes_args", "NO-ALIAS", "areal-project/AReaL#1625"),
    _fault("retries_refusals", "RETRY", "strands-rl/strands-sglang@dbaff4a", kinds=("http", "error-event"), rare=True),
    _fault("retries_for_ever", "RETRY", "invergent-ai/surogate#177", kinds=("http", "drop-before"), rare=True),
    _fault(
        "retries_in_plain_only",
        "RETRY",
        "vllm-project/vime#117",
        kinds=("http", "drop-before"),
        modes=STREAMS,
        plain=generate,
    ),
    _fault("drops_stop", "PARAMS", "areal-project/AReaL#1429"),
    _fault("drops_seed", "PARAMS", "verl-project/verl#6857"),
    _fault("drops_minimum", "PARAMS", "THUDM/slime#2242"),
    # The engine's own maximum of 128 is more than B and C; what is clipped does not say how it ended.
    _fault("drops_maximum", "PARAMS", "NovaSky-AI/SkyRL#1317", also="BUDGET CONTEXT STATUS RESUME-EQ MODE-EQ"),
    _fault("whole_minimum_again", "PARAMS", "THUDM/slime#2242", kinds=STOPPED, rare=True),
)
"""Every planted fault, in the order of the rules where it can be."""

__all__ = ["FAULTS", "Fault", "Reference", "generate_streaming", "same", "same_streaming"]
