"""How much is asked for, and samples without room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.mutants.parts import (
    STOPPED,
    STREAMS,
    Instead,
    Limited,
    Reference,
    asking,
    mutant,
    prompt_length,
    room,
)
from harness.schedule import Attempt, Schedule
from reference_impl.generate import Ask, keep, prepare
from reference_impl.sample import Sample, Status


# Another length than uninterrupted, and one that depends on the mode where the transport interrupts; asks at r = B.
@mutant(
    "BUDGET",
    "THUDM/slime#2260",
    kinds=STOPPED,
    also="EXHAUSTED MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1, attempts=(Attempt("abort", after=1),)),
)
class ForgetsSubtraction(Limited):
    """Asks for the whole budget again after a resume."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        whole = {**params, "max_new_tokens": params["max_new_tokens"] + sample.response_length}
        return room(args, sample, whole)


@mutant(
    "BUDGET",
    "THUDM/slime#2003",
    kinds=STOPPED,
    also="EXHAUSTED MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1), Attempt("abort"))),
)
class SubtractsLastAttempt(Limited):
    """Subtracts what the last attempt brought, not all that is kept: a sample climbs on."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        forgotten = sample.metadata.get("kept_before", 0)
        return room(args, sample, {**params, "max_new_tokens": params["max_new_tokens"] + forgotten})

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        sample.metadata["kept_before"] = sample.response_length
        keep(args, sample, ask, *answer)


# asks at r >= B
@mutant("BUDGET", "verl-project/verl#4568", also="EXHAUSTED", shows=Schedule(budget=0, context=2))
class FillsContext(Limited):
    """Asks for C - P - r where C is known, whatever the budget."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        if args.rollout_max_context_len is None:
            return room(args, sample, params)
        return room(args, sample, {**params, "max_new_tokens": 1 << 40})


# One token too many is one more than uninterrupted, and perhaps more than C.
@mutant(
    "BUDGET",
    "vllm-project/vllm#27922",
    kinds=("over-deliver",),
    also="CONTEXT RESUME-EQ",
    faulty_engine=True,
    shows=Schedule(budget=1, attempts=(Attempt("over-deliver", after=1),)),
)
class KeepsMoreThanAsked(Reference):
    """Keeps all that the engine delivers, asked or not."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, replace(ask, limit=1 << 40), *answer)


# ends unasked where P >= B - r
@mutant("MAXIMAL", "areal-project/AReaL#699", also="STATUS", shows=Schedule(budget=2))
class ChargesPrompt(Limited):
    """Takes the budget for prompt and response together."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        own: int = params["max_new_tokens"] - sample.response_length - prompt_length(args, sample)
        return min(own, room(args, sample, params))


# Text is longer or shorter than tokens: too little, nothing or too much is asked, also of a full sample.
@mutant(
    "MAXIMAL",
    "sgl-project/sglang#34852",
    kinds=STOPPED,
    also="BUDGET EXHAUSTED MODE-EQ RESUME-EQ STATUS",
    shows=Schedule(budget=3, script=(256,), attempts=(Attempt("abort", after=1),)),
)
class CountsCharacters(Limited):
    """Subtracts the characters of the text from the budget."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        own: int = params["max_new_tokens"] - len(sample.response)
        return min(own, room(args, sample, {**params, "max_new_tokens": 1 << 40}))


@mutant("MAXIMAL", "verl-project/verl#4668", modes=STREAMS, also="MODE-EQ", shows=Schedule(budget=7, context=8))
class OneLessInStream(Limited):
    """Of two paths one asks for C - P - r and the other for one less."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        limit = args.rollout_max_context_len
        return super().prepare(
            Instead(args, rollout_max_context_len=limit - 1 if stream and limit is not None else limit),
            sample,
            params,
            stream,
        )


# No room in the context, and yet a request.
@mutant(
    "CONTEXT",
    "radixark/miles#487",
    "thinking-machines-lab/tinker-cookbook#506",
    "NVIDIA-NeMo/RL#2514",
    also="EXHAUSTED",
    shows=Schedule(budget=1, context=1),
)
class IgnoresContext(Limited):
    """Checks the budget only; the engine refuses what does not fit."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        return room(Instead(args, rollout_max_context_len=None), sample, params)


@mutant("CONTEXT", "vllm-project/vllm#40689", also="EXHAUSTED", shows=Schedule(budget=1, context=1))
class OneOverContext(Limited):
    """Asks for one token more than the context holds."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        limit = args.rollout_max_context_len
        return room(Instead(args, rollout_max_context_len=None if limit is None else limit + 1), sample, params)


@mutant(
    "CONTEXT",
    "TIGER-AI-Lab/verl-tool#85",
    "THUDM/slime#1861",
    kinds=STOPPED,
    also="EXHAUSTED RESUME-EQ",
    shows=Schedule(budget=8, context=8, attempts=(Attempt("abort", after=1),)),
)
class ForgetsResponseInContext(Limited):
    """Takes the prompt from the context but not what is kept."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        left: int = params["max_new_tokens"] - sample.response_length
        limit: int | None = args.rollout_max_context_len
        return left if limit is None else min(left, limit - prompt_length(args, sample))


# 0 is more than the negative rest of an over-full sample, or than what its context holds.
@mutant(
    "EXHAUSTED",
    "modelscope/ms-swift#6023",
    "sgl-project/sglang#4998",
    "huggingface/transformers#28621",
    also="BUDGET CONTEXT",
    shows=Schedule(budget=0),
)
class AsksForZero(Limited):
    """Sends max_new_tokens 0 where nothing is left."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.finished:
            return None
        return asking(args, sample, params, stream, max(room(args, sample, params), 0))


@mutant(
    "EXHAUSTED",
    "vllm-project/vllm#36789",
    "modelscope/ms-swift#6441",
    "PrimeIntellect-ai/prime-rl#1938",
    shows=Schedule(budget=0),
)
class AsksForLessThanZero(Limited):
    """Sends what the subtraction gives, also below 0."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.finished:
            return None
        return asking(args, sample, params, stream, room(args, sample, params))


# Full by an interruption, the sample stays aborted; uninterrupted, or in plain mode, it ends.
@mutant("EXHAUSTED", "verl-project/verl#4668", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=0))
class RaisesWhenFull(Reference):
    """Asserts that something is left."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if not sample.finished and room(args, sample, params) <= 0:
            raise AssertionError("max_tokens must be at least 1")
        return prepare(args, sample, params, stream=stream)


@mutant("EXHAUSTED", "THUDM/slime#92", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=0))
class LeavesAborted(Reference):
    """Hands a sample that was aborted exactly at its budget back as it is, for ever."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        before = sample.status
        ask = prepare(args, sample, params, stream=stream)
        if ask is None:
            sample.status = before
        return ask


@mutant(
    "BUDGET",
    "verl-project/verl#7207",
    kinds=STOPPED,
    also="EXHAUSTED MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1, attempts=(Attempt("abort", after=1),)),
)
class ChargesKeptToPrompt(Limited):
    """Takes what is kept from the room of the longest prompt allowed, here two more than this one, and not from B."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        budget: int = params["max_new_tokens"]
        own = min(budget, 2 + budget - sample.response_length)
        return min(own, room(args, sample, {**params, "max_new_tokens": 1 << 40}))


# ends unasked, uninterrupted as well
@mutant("STATUS", "AgentR1/Agent-R1#58", also="RESUME-EQ MODE-EQ", shows=Schedule(prompt="aa", budget=1))
class DropsLongPrompt(Reference):
    """Compares the prompt's length with the response budget, and drops what is longer."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if not sample.finished and prompt_length(args, sample) > params["max_new_tokens"]:
            sample.status = Status.TRUNCATED
            return None
        return prepare(args, sample, params, stream=stream)


@mutant("STATUS", "verl-project/verl#1627", "PrimeIntellect-ai/prime-rl#1782", shows=Schedule(budget=8, context=8))
class RejectsInsteadOfClamping(Reference):
    """Ends a sample whose whole budget does not fit into the context, where a part of it would."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        limit = args.rollout_max_context_len
        whole = prompt_length(args, sample) + params["max_new_tokens"]
        if not sample.finished and limit is not None and whole > limit:
            sample.status = Status.TRUNCATED
            return None
        return prepare(args, sample, params, stream=stream)


# More than B - r and more than C holds.
@mutant("EXHAUSTED", "openvinotoolkit/openvino.genai#2416", also="BUDGET CONTEXT", shows=Schedule(budget=0, preload=1))
class WrapsAround(Limited):
    """Subtracts without a sign: below 0 the cap becomes four thousand million."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        return room(args, sample, params) % (1 << 32)


# The modes differ because one of them keeps more than its budget.
@mutant(
    "MODE-EQ",
    "verl-project/verl#3319",
    "NVIDIA-NeMo/RL#478",
    modes=STREAMS,
    also="BUDGET EXHAUSTED RESUME-EQ",
    shows=Schedule(budget=0, context=8),
)
class FillsContextInStream(FillsContext):
    """Asks for C - P - r in streams, and for B - r in plain mode."""
