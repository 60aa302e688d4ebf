"""The reference cut into the parts that a fault replaces, and how a faulty client is declared.

A mutant is a subclass of `Reference` that replaces one part, or of the loop
around it (`Rollout`) or its data source (`DataSource`). `Reference` itself, and
`Patient` of the loops, are as faultless as the original: tests/quality checks that.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from harness import work
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM
from harness.targets import CannotJudge
from harness.targets.function import FunctionTarget, Generate
from harness.targets.reference_loop import ReferenceLoop
from harness.work import Work
from reference_impl import client
from reference_impl.generate import Ask, _whole, aborted, generate, keep, pairs, prepare, tokenizer
from reference_impl.generate_streaming import Stream, generate_streaming, refused
from reference_impl.rollout import Rollout
from reference_impl.sample import Sample, Status
from reference_impl.source import DataSource, Group

STREAMS = (STREAM, INCREMENTAL)
STOPPED = ("abort", "abort-late", "abort-retracted", "flag", "close", "drop-inside", "error-event")
"""What can leave a part of a response on the sample."""

Consume = Callable[[aiohttp.ClientResponse], Awaitable[Any]]


class Reference:
    """The reference, one method a part."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        return prepare(args, sample, params, stream=stream)

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
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
                refused(event)
                self.add(stream, event)
                if aborted(args) and not stream.finish:
                    break
        except (aiohttp.ClientError, client.EngineError, ValueError):
            if not (stream.tokens or stream.finish):
                raise
            self.broken(args, sample, ask, stream)
        if not stream.meta:
            raise client.Transient("the stream ended without an event")
        self.settle(args, sample, ask, stream.tokens, stream.log_probs, stream.meta)


class Patient(Rollout):
    """The reference's loop without its last resort: an abort takes as long as the engines take.

    Most loops are like this. Nothing ends what is forgotten, so that a fault in the abort shows.
    """

    async def _abort(self) -> None:
        async with self._aborts:
            self.args.rollout_abort.set()
            try:
                await self._drain()
            finally:
                self.args.rollout_abort.clear()


class Unchecked(DataSource):
    """The reference's data source, which takes a group of any size."""

    def add_samples(self, groups: list[Group]) -> None:
        self.buffer.extend(groups)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted fault and what must be said of it.

    ``client`` replaces a part of the generate function, of the loop or of its data source.
    ``rule`` must find it in each of ``modes``. Rules in ``also`` may speak up, for
    the reason that stands beside the class; every other rule must be silent.
    ``kinds`` are the interruptions that show it (a preloaded response stands in
    for one, a round trip too); with none it shows without. ``reports`` are the
    public reports it models. ``shows`` is the smallest schedule on which its rule
    finds it, what shrinking must end at, in the first of ``modes``; a scenario where
    it is judged on whole rollouts.
    """

    id: str
    fault: str
    client: type[Reference] | type[Rollout] | type[DataSource]
    rule: str
    reports: tuple[str, ...]
    modes: tuple[str, ...]
    kinds: tuple[str, ...]
    also: frozenset[str]
    faulty_engine: bool
    shows: Work

    @property
    def level(self) -> str:
        """What it is judged on: single samples, or whole rollouts."""
        return work.level(self.shows)

    @property
    def name(self) -> str:
        return f"mutant:{self.id}"

    def target(self) -> FunctionTarget:
        """A new client. Raises CannotJudge (not applicable) for a fault of the loop."""
        functions = self._functions()
        if functions is None:
            raise CannotJudge(f"{self.name} is a loop around the reference: give --level rollout", not_applicable=True)
        return FunctionTarget(self.name, functions[False], functions[True] if self.modes != (PLAIN,) else None)

    def loop(self) -> ReferenceLoop:
        """A new loop: the reference's, with what is faulty replaced."""
        functions = self._functions()
        if functions is not None:
            made = ReferenceLoop(self.name)
            made.generates = functions
            return made
        if issubclass(self.client, DataSource):
            return ReferenceLoop(self.name, source=self.client)
        assert issubclass(self.client, Rollout)
        return ReferenceLoop(self.name, self.client, getattr(self.client, "source_class", DataSource))

    def _functions(self) -> dict[bool, Generate] | None:
        """Its generate functions, plain and streaming. What its modes do not name is the reference's."""
        if not issubclass(self.client, Reference):
            return None
        made = self.client()
        plain: Generate = made.plain if PLAIN in self.modes else generate
        return {False: plain, True: made.streaming if self.modes != (PLAIN,) else generate_streaming}


C = TypeVar("C", bound=type[Reference] | type[Rollout] | type[DataSource])
declared: dict[str, Mutant] = {}
"""By id, in the order of declaration; `harness.mutants.load` fills it."""


def mutant(
    rule: str,
    *reports: str,
    kinds: tuple[str, ...] = (),
    modes: tuple[str, ...] = MODES,
    also: str = "",
    faulty_engine: bool = False,
    shows: Work,
) -> Callable[[C], C]:
    """Declares a class as a mutant; its docstring says what is wrong. With a scenario in ``shows``: of the loop."""

    def declare(cls: C) -> C:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        fault = (cls.__doc__ or "").partition("\n")[0]
        declared[name] = Mutant(
            name, fault, cls, rule, reports, modes, kinds, frozenset(also.split()), faulty_engine, shows
        )
        return cls

    return declare


# what mutants are made with


def prompt_length(args: Any, sample: Sample) -> int:
    return len(sample.prompt_ids or tokenizer(args).encode(sample.prompt, add_special_tokens=False))


def room(args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
    """min(B - r, C - P - r), negative for a sample that is over-full."""
    left: int = params["max_new_tokens"] - sample.response_length
    limit: int | None = args.rollout_max_context_len
    return left if limit is None else min(left, limit - prompt_length(args, sample) - sample.response_length)


class Instead:
    """``args`` with some fields replaced; the original is not touched."""

    def __init__(self, args: Any, **fields: Any) -> None:
        self.__dict__.update(fields, _args=args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_args"], name)


def asking(args: Any, sample: Sample, params: dict[str, Any], stream: bool, limit: int) -> Ask | None:
    """The reference's request, but for ``limit`` tokens, whatever that is. None when finished or flagged."""
    free = Instead(args, rollout_max_context_len=None)
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
