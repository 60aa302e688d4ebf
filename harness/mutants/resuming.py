"""What is sent again after a resume, and resumes that do not happen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from harness.mutants.parts import (
    STOPPED,
    STREAMS,
    Reference,
    altered,
    mutant,
    room,
)
from harness.schedule import Attempt, Schedule
from reference_impl import client
from reference_impl.generate import Ask, keep, prepare, tokenizer
from reference_impl.generate_streaming import Stream
from reference_impl.sample import Sample, Status


class AltersResume(Reference, ABC):
    """Sends something else where there is a response to go on from."""

    @abstractmethod
    def resumed(self, args: Any, sample: Sample, ask: Ask) -> Ask: ...

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        return ask if ask is None or not sample.response_length else self.resumed(args, sample, ask)


# Another input gives other tokens, and perhaps a longer one than fits, or one without a response.
@mutant(
    "PREFIX",
    "huggingface/trl#5224",
    "rllm-org/rllm#272",
    "modelscope/ms-swift#10012",
    "PrimeIntellect-ai/verifiers#1081",
    kinds=STOPPED,
    also="CONTEXT MAXIMAL MODE-EQ PARAMS RESUME-EQ",
    shows=Schedule(budget=2, script=(128,), attempts=(Attempt("abort", after=1),)),
)
class Retokenises(AltersResume):
    """Encodes prompt and response text again."""

    def resumed(self, args: Any, sample: Sample, ask: Ask) -> Ask:
        text = f"{sample.prompt}{sample.response}"
        return altered(ask, input_ids=tokenizer(args).encode(text, add_special_tokens=False))


@mutant(
    "PREFIX",
    "THUDM/slime#1130",
    kinds=STOPPED,
    also="CONTEXT MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class SendsText(AltersResume):
    """Sends prompt and response as text."""

    def resumed(self, args: Any, sample: Sample, ask: Ask) -> Ask:
        return altered(ask, input_ids=None, text=f"{sample.prompt}{sample.response}")


# With one token kept, or none sent, the request is that of a restart, which may ask for B and the whole minimum.
@mutant(
    "PREFIX",
    "PrimeIntellect-ai/verifiers@0315d48c7",
    kinds=STOPPED,
    also="MAXIMAL MODE-EQ PARAMS RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class DropsLastKept(AltersResume):
    """Resumes without the last kept token."""

    def resumed(self, args: Any, sample: Sample, ask: Ask) -> Ask:
        return altered(ask, input_ids=ask.payload["input_ids"][:-1])


@mutant(
    "PREFIX",
    "ls1intum/edutelligence#853",
    kinds=STOPPED,
    also="MAXIMAL MODE-EQ PARAMS RESUME-EQ STATUS",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class SecondAnswer(AltersResume):
    """Resumes from the prompt and appends the second answer to the first."""

    def resumed(self, args: Any, sample: Sample, ask: Ask) -> Ask:
        return altered(ask, input_ids=list(ask.prompt_ids))


@mutant(
    "PREFIX",
    "THUDM/slime#1803",
    "THUDM/slime#2388",
    kinds=STOPPED,
    also="MAXIMAL MODE-EQ PARAMS RESUME-EQ",
    shows=Schedule(budget=2, images=1, attempts=(Attempt("abort", after=1),)),
)
class ImagesAsTextAgain(Reference):
    """Sends a prompt with images as text, also when there is a response to go on from."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or not ask.payload.get("image_data"):
            return ask
        return altered(ask, input_ids=None, text=sample.prompt)


# They are part of the sample that is compared.
@mutant(
    "PREFIX",
    "strands-rl/strands-sglang@a326eb6",
    kinds=STOPPED,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class BlanksOldLogprobs(Reference):
    """Has no log probabilities for the prefix that it sends again."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        if sample.response_length:
            sample.rollout_log_probs = [0.0] * sample.response_length
        keep(args, sample, ask, *answer)


# Two answers are longer than one, and than what may be asked.
@mutant(
    "PREFIX",
    "THUDM/slime#1861",
    "livekit/agents#1298",
    "areal-project/AReaL#1498",
    kinds=("drop-inside", "error-event"),
    modes=STREAMS,
    also="BUDGET CONTEXT MODE-EQ RESUME-EQ RETRY STATUS",
    shows=Schedule(budget=2, attempts=(Attempt("drop-inside", after=1),)),
)
class AppendsRetry(Reference):
    """Keeps a broken stream's tokens, asks the same again, and keeps those as well."""

    def broken(self, args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
        if not stream.finish:
            self.settle(args, sample, ask, stream.tokens, stream.log_probs, stream.meta)
            raise client.Transient("the stream broke off")


# In one mode there is something to resume, in the other not; what ends unasked has no status from the engine.
@mutant(
    "RESUME-EQ",
    "THUDM/slime#92",
    kinds=STOPPED,
    also="MODE-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class NeverResumes(Reference):
    """Hands an aborted sample with a response back as it is, and it is never scored."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.status is Status.ABORTED and sample.response_length and room(args, sample, params) > 0:
            return None
        return prepare(args, sample, params, stream=stream)


@mutant(
    "RESUME-EQ",
    "NovaSky-AI/SkyRL#508",
    kinds=STOPPED,
    also="MODE-EQ STATUS",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class EndsOnResume(Reference):
    """Ends an aborted sample though the rest would fit."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        if sample.status is Status.ABORTED and sample.response_length:
            sample.status = Status.TRUNCATED
            return None
        return prepare(args, sample, params, stream=stream)


# A shorter input has room for more, and gets other tokens.
@mutant(
    "PREFIX",
    "PrimeIntellect-ai/prime-rl#1986",
    also="MAXIMAL CONTEXT RESUME-EQ MODE-EQ",
    shows=Schedule(budget=7, context=8, attempts=(Attempt("abort", after=1),)),
)
class CutsPrompt(Reference):
    """Cuts the input from the left until the whole budget fits behind it."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or args.rollout_max_context_len is None or "input_ids" not in ask.payload:
            return ask
        held = max(args.rollout_max_context_len - params["max_new_tokens"], 1)
        return altered(ask, input_ids=ask.payload["input_ids"][-held:])
