"""Per-token arrays and the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.history import PLAIN
from harness.mutants.parts import (
    STOPPED,
    Reference,
    altered,
    mutant,
)
from harness.schedule import Attempt, Schedule
from reference_impl.generate import Ask, keep, pairs, prepare, tokenizer
from reference_impl.generate_streaming import Stream
from reference_impl.sample import Sample, Status


# Every array is compared.
@mutant(
    "ALIGN",
    "THUDM/slime#1440",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class MaskNotExtended(Reference):
    """The loss mask keeps the entries of the first attempt."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        mask = sample.loss_mask
        keep(args, sample, ask, *answer)
        if mask:
            sample.loss_mask = mask


@mutant(
    "ALIGN",
    "THUDM/slime#1995",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class ReplacesLogprobs(Reference):
    """The log probabilities are those of the last attempt only."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        sample.rollout_log_probs = [0.0] * sample.response_length  # what keep needs to go on
        before = sample.response_length
        keep(args, sample, ask, *answer)
        sample.rollout_log_probs = sample.rollout_log_probs[before:]


@mutant(
    "ALIGN",
    "sgl-project/sglang#34488",
    kinds=("lost-ids", "missing"),
    modes=(PLAIN,),
    also="RESUME-EQ",
    faulty_engine=True,
    shows=Schedule(budget=1, attempts=(Attempt("lost-ids"),)),
)
class TwoSources(Reference):
    """Takes ids from one list and log probabilities from another, unchecked."""

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        return reply.get("output_ids") or [], pairs(reply)[1]

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, log_probs, meta = answer
        keep(args, sample, ask, tokens, [0.0] * len(tokens), meta)
        before = (sample.rollout_log_probs or [])[: sample.response_length - len(tokens[: ask.limit])]
        sample.rollout_log_probs = [*before, *log_probs[: ask.limit]]


@mutant(
    "TEXT",
    "THUDM/slime#92",
    kinds=("abort", "abort-late", "abort-retracted"),
    also="EXHAUSTED MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1, attempts=(Attempt("abort", after=1),)),
)
class TextBeforeTokens(Reference):
    """Returns early at an abort: the text has what the tokens do not."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        tokens, _, meta = answer
        if (meta.get("finish_reason") or {}).get("type") != "abort":
            return keep(args, sample, ask, *answer)
        sample.response += tokenizer(args).decode(list(tokens))
        sample.status = Status.ABORTED


# The length is wrong, and with it what counts as the response.
@mutant(
    "ALIGN",
    "sgl-project/sglang#34852",
    also="BUDGET CONTEXT MODE-EQ PREFIX RESUME-EQ STATUS TEXT",
    shows=Schedule(budget=1, natural=0),
)
class CountsTextAsLength(Reference):
    """Takes the number of characters for the response length."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.finished:
            sample.response_length = len(sample.response)


@mutant(
    "TEXT",
    "InternLM/xtuner#1244",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class TextOfLastAttempt(Reference):
    """The text is what the last attempt brought."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before = sample.response_length
        keep(args, sample, ask, *answer)
        sample.response = tokenizer(args).decode(sample.tokens[len(ask.prompt_ids) + before :])


# It is compared.
@mutant(
    "ALIGN",
    "verl-project/verl#6089",
    "radixark/miles#861",
    "PrimeIntellect-ai/verifiers#382",
    kinds=("over-deliver",),
    also="RESUME-EQ MODE-EQ",
    faulty_engine=True,
    shows=Schedule(budget=1, attempts=(Attempt("over-deliver", after=1),)),
)
class CutsIdsOnly(Reference):
    """Cuts an answer that is too long, but misses one of the arrays."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before = sample.rollout_log_probs or []
        sample.rollout_log_probs = [0.0] * sample.response_length  # what keep needs to go on
        keep(args, sample, ask, *answer)
        sample.rollout_log_probs = [*before, *answer[1]]


# Every array is compared.
@mutant(
    "ALIGN",
    "radixark/miles#1672",
    "THUDM/slime#2124",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ PREFIX",
    shows=Schedule(budget=1, attempts=(Attempt("abort", after=1),)),
)
class AbortedWithoutLogprobs(Reference):
    """Tokens of an aborted answer come without their log probabilities."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before, held = sample.rollout_log_probs or [], sample.response_length
        sample.rollout_log_probs = [0.0] * held  # what keep needs to go on
        keep(args, sample, ask, *answer)
        new = [] if sample.status is Status.ABORTED else sample.rollout_log_probs[held:]
        sample.rollout_log_probs = [*before, *new]


@mutant("ALIGN", "THUDM/slime#1045", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=1))
class LastTokenWithoutLogprob(Reference):
    """One array has no row for the last token of a finished answer, which no forward pass has seen."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.finished and sample.rollout_log_probs:
            sample.rollout_log_probs = sample.rollout_log_probs[:-1]


# They are compared.
@mutant(
    "ALIGN",
    "NovaSky-AI/SkyRL#1868",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class LogprobsAtFirstOnly(Reference):
    """Takes the flag for log probabilities from another place when it resumes, where it is off."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        return altered(ask, return_logprob=False) if ask is not None and sample.response_length else ask

    def read(self, reply: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        return pairs(self._filled(reply))

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        stream.add(self._filled(event))

    def _filled(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        meta = event.get("meta_info") or {}
        if "output_token_logprobs" in meta:
            return event
        entries = [[0.0, token, None] for token in event.get("output_ids") or []]
        return {**event, "meta_info": {**meta, "output_token_logprobs": entries}}

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        before = sample.rollout_log_probs or []
        sample.rollout_log_probs = [0.0] * sample.response_length  # what keep needs to go on
        keep(args, sample, ask, *answer)
        if ask.payload["return_logprob"]:
            before = [*before, *sample.rollout_log_probs[len(before) :]]
        sample.rollout_log_probs = before
