"""Reading a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.history import INCREMENTAL, STREAM
from harness.mutants.parts import (
    STREAMS,
    Reference,
    mutant,
)
from harness.schedule import Attempt, Schedule
from reference_impl import client
from reference_impl.generate import Ask, keep, pairs, prepare, tokenizer
from reference_impl.generate_streaming import Stream
from reference_impl.sample import Sample


# No request brought these tokens together; clipped to m they hide how the answer ended.
@mutant("MODE-EQ", "THUDM/slime#2272", modes=(STREAM,), also="PREFIX RESUME-EQ STATUS", shows=Schedule(budget=2))
class AppendsCumulative(Reference):
    """Adds each cumulative event to the last: 5, 5 6, 5 6 7 become 5 5 6 5 6 7."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        tokens, log_probs = pairs(event)
        stream.tokens, stream.log_probs = stream.tokens + tokens, stream.log_probs + log_probs
        stream.meta = event.get("meta_info") or {}


@mutant(
    "MODE-EQ", "ai-dynamo/dynamo#13996", modes=(INCREMENTAL,), also="PREFIX RESUME-EQ STATUS", shows=Schedule(budget=2)
)
class TakesDeltaForWhole(Reference):
    """Takes every event for all there is, incremental ones too."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        stream.tokens, stream.log_probs = pairs(event)
        stream.meta = event.get("meta_info") or {}


# How much is lost depends on the events, of which the uninterrupted run has one.
@mutant("MODE-EQ", "LostRuins/koboldcpp#1031", modes=STREAMS, also="RESUME-EQ", shows=Schedule(budget=1))
class DropsLastTokens(Reference):
    """Loses in streams what comes with the end of the answer."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known, probs = stream.tokens, stream.log_probs
        stream.add(event)
        if stream.finish and stream.finish.get("type") != "abort":
            stream.tokens, stream.log_probs = known, probs


@mutant("STATUS", "agentjido/req_llm#462", modes=STREAMS, also="MODE-EQ RESUME-EQ", shows=Schedule(budget=1))
class DropsLastEvent(Reference):
    """Loses the last event of a stream with its finish_reason."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        if not (event.get("meta_info") or {}).get("finish_reason"):
            stream.add(event)
        elif not stream.meta:
            stream.meta = {"completion_tokens": 0}


@mutant(
    "MODE-EQ",
    "sgl-project/sglang#34852",
    modes=STREAMS,
    also="PREFIX RESUME-EQ STATUS",
    shows=Schedule(budget=1, natural=0, skip_special_tokens=True),
)
class SkipsEventsWithoutText(Reference):
    """Passes over stream events whose text is empty, and their tokens with them."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known, probs = stream.tokens, stream.log_probs
        stream.add(event)
        if not event.get("text"):
            stream.tokens, stream.log_probs = known, probs


@mutant("TEXT", "sgl-project/sglang#31598", modes=(STREAM,), also="MODE-EQ RESUME-EQ", shows=Schedule(budget=2))
class TextTwice(Reference):
    """Adds each cumulative event's text to the last one's; the tokens are right."""

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


# What is over too early is shorter, and in one mode only.
@mutant("STATUS", "adolfousier/opencrabs#1499", modes=STREAMS, also="MODE-EQ RESUME-EQ", shows=Schedule(budget=2))
class FirstEventIsTheLast(Reference):
    """Takes the finish_reason of every event for an end, also one that says nothing yet."""

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        if stream.meta:
            return
        stream.add(event)
        if not stream.finish:
            stream.meta = {**stream.meta, "finish_reason": {"type": "stop"}}


# The text is compared.
@mutant(
    "TEXT",
    "ai-dynamo/dynamo#12630",
    modes=STREAMS,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, script=(128, 65)),
)
class DecodesEventByEvent(Reference):
    """Decodes what each event brings on its own, and drops halves of characters."""

    def __init__(self) -> None:
        self.text = ""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        self.text, self.tokenizer = sample.response, tokenizer(args)
        self.skip = params.get("skip_special_tokens", True)
        return prepare(args, sample, params, stream=stream)

    def add(self, stream: Stream, event: Mapping[str, Any]) -> None:
        known = len(stream.tokens)
        stream.add(event)
        self.text += self.tokenizer.decode(stream.tokens[known:], skip_special_tokens=self.skip).strip("\ufffd")

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.response = self.text


# The text is compared.
@mutant(
    "TEXT",
    "dust-tt/dust#25944",
    kinds=("drop-inside", "error-event"),
    modes=STREAMS,
    also="MODE-EQ RESUME-EQ",
    shows=Schedule(budget=2, attempts=(Attempt("drop-inside", after=1),)),
)
class TextGrowsPerRetry(Reference):
    """Begins a broken stream anew, with the text of the broken one still there."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        self.text = []
        return prepare(args, sample, params, stream=stream)

    def broken(self, args: Any, sample: Sample, ask: Ask, stream: Stream) -> None:
        if not stream.finish:
            self.text.append(tokenizer(args).decode(stream.tokens))
            raise client.Transient("the stream broke off")

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        sample.response += "".join(self.text)
