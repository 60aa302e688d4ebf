"""What became of the sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.mutants.parts import (
    STOPPED,
    STREAMS,
    Reference,
    mutant,
)
from harness.schedule import Attempt, Schedule
from reference_impl.generate import Ask, keep, prepare
from reference_impl.generate_streaming import Stream
from reference_impl.sample import Sample, Status


# What is over too early is shorter than it would have been.
@mutant(
    "STATUS",
    "PrimeIntellect-ai/verifiers#1191",
    kinds=("flag", "close", "drop-inside", "error-event"),
    modes=STREAMS,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("flag", after=1),)),
)
class CompletesWithoutEnd(Reference):
    """Takes a stream that was cut for one that has ended."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if not answer[2].get("finish_reason"):
            sample.status = Status.COMPLETED


@mutant(
    "STATUS",
    "vllm-project/vllm#47933",
    kinds=("flag", "close", "drop-inside", "error-event"),
    modes=STREAMS,
    shows=Schedule(budget=2, attempts=(Attempt("flag", after=1),)),
)
class PendingWithoutEnd(Reference):
    """Never learns how a cut stream ended and leaves the sample pending."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if not answer[2].get("finish_reason"):
            sample.status = Status.PENDING


# An abort is one in plain mode.
@mutant(
    "STATUS",
    "vllm-project/vllm#47933",
    "vllm-project/vllm#22283",
    kinds=STOPPED,
    modes=STREAMS,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1, attempts=(Attempt("abort", after=1),)),
)
class SkipsEventsWithoutTokens(PendingWithoutEnd):
    """Passes over stream events that bring no token, and never learns of an abort that came so."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known, meta = len(stream.tokens), stream.meta
        stream.add(event)
        if known == len(stream.tokens) and meta:
            stream.meta = meta


@mutant(
    "STATUS",
    "rllm-org/rllm#542",
    kinds=("abort", "abort-late", "abort-queued", "abort-retracted"),
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1, attempts=(Attempt("abort"),)),
)
class CompletesAborted(Reference):
    """Marks an aborted answer as completed."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if (answer[2].get("finish_reason") or {}).get("type") == "abort":
            sample.status = Status.COMPLETED


# A resume at r = B ends TRUNCATED, an answer of B tokens COMPLETED.
@mutant(
    "STATUS",
    "OpenRLHF/OpenRLHF#1327",
    "NovaSky-AI/SkyRL#81",
    "THUDM/slime#203",
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=1),
)
class CompletesTruncated(Reference):
    """Never says that an answer was cut at its length."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.status is Status.TRUNCATED:
            sample.status = Status.COMPLETED


# What is aborted is resumed; where it is cut short depends on the mode, and on where it was interrupted.
@mutant("STATUS", "verl-project/verl#4865", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=2, natural=0))
class AbortsShortAnswers(Reference):
    """Concludes from fewer tokens than asked that there was an abort."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if len(answer[0]) < ask.limit:
            sample.status = Status.ABORTED


@mutant("STATUS", "sgl-project/sglang#33814", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=6, context=8))
class AbortsShortLength(Reference):
    """Concludes it from `length` alone, where two tokens fewer than asked have come."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.status is Status.TRUNCATED and len(answer[0]) < ask.limit:
            sample.status = Status.ABORTED


@mutant(
    "STATUS",
    "sgl-project/sglang#14835",
    "THUDM/slime#327",
    "InternLM/xtuner#1394",
    "sgl-project/sglang#17610",
    kinds=("abort-queued", "abort-retracted"),
    shows=Schedule(budget=1, attempts=(Attempt("abort-retracted"),)),
)
class KeyErrorOnQueueAbort(Reference):
    """Reads prompt_tokens, which an abort in the queue lacks."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        assert answer[2]["prompt_tokens"] >= 0
        keep(args, sample, ask, *answer)


# More tokens than there would have been.
@mutant("STATUS", "PrimeIntellect-ai/verifiers#2036", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=1, natural=0))
class GeneratesAgain(Reference):
    """Generates for a sample that is finished."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        before = sample.status
        if sample.finished:
            sample.status = Status.ABORTED
        ask = prepare(args, sample, params, stream=stream)
        sample.status = before if ask is not None else sample.status
        return ask


# More is asked for where the context was the limit.
@mutant("STATUS", "radixark/miles#2587", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=1))
class LengthIsNotTheEnd(Reference):
    """Does not look at the finish_reason: an answer that was cut at its length goes on."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.status is Status.TRUNCATED:
            sample.status = Status.ABORTED


@mutant("MODE-EQ", "NVIDIA-NeMo/RL#3851", modes=STREAMS, also="STATUS RESUME-EQ", shows=Schedule(budget=1))
class LengthGoesOnInStream(LengthIsNotTheEnd):
    """An answer that was cut at its length ends the sample in plain mode, and not in streams."""


@mutant(
    "STATUS",
    "vllm-project/vime#49",
    kinds=("abort", "abort-late", "abort-queued", "abort-retracted"),
    shows=Schedule(budget=1, attempts=(Attempt("abort"),)),
)
class RaisesOnEmptyAbort(Reference):
    """Looks for the abort in the sample's old status, and wants tokens otherwise."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        if not answer[0] and sample.status is not Status.ABORTED and ask.limit:
            raise RuntimeError("the answer has no tokens")
        keep(args, sample, ask, *answer)


@mutant("STATUS", "BerriAI/litellm#25825", also="MODE-EQ RESUME-EQ", shows=Schedule(budget=1))
class AlwaysCompleted(Reference):
    """Whatever ended the answer, the sample is completed."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.status = Status.COMPLETED


class _Bridged(Sample):
    """A sample in another vocabulary, which has one word for every end."""

    def to_dict(self) -> dict[str, Any]:
        status = Status.COMPLETED if self.finished else self.status
        return {**super().to_dict(), "status": status.value}


@mutant(
    "STATUS",
    "PrimeIntellect-ai/verifiers#1824",
    kinds=("round trip",),
    also="RESUME-EQ MODE-EQ",
    shows=Schedule(budget=1, attempts=(Attempt(), Attempt(round_trip=True))),
)
class LosesTruncationInBuffer(Reference):
    """Writes a truncated sample to the buffer as a completed one."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.__class__ = _Bridged
