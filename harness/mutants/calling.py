"""What belongs to the caller, retries and parameters."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from harness.mutants.parts import (
    STOPPED,
    STREAMS,
    Consume,
    Reference,
    altered,
    mutant,
)
from harness.schedule import Attempt, Schedule
from reference_impl import client
from reference_impl.generate import Ask, prepare
from reference_impl.sample import Sample


# Who reads the lowered cap asks for less than B - r, and ends early.
@mutant(
    "NO-ALIAS",
    "verl-project/verl#5430",
    also="MAXIMAL MODE-EQ RESUME-EQ STATUS",
    shows=Schedule(budget=2, attempts=(Attempt("abort", after=1),)),
)
class LowersSharedCap(Reference):
    """Writes what is left into the caller's dict."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is not None:
            params["max_new_tokens"] = ask.limit
        return ask


@mutant("NO-ALIAS", "areal-project/AReaL#1625", shows=Schedule(budget=1))
class WritesArgs(Reference):
    """Keeps what is left in args, which the whole group shares."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is not None:
            args.rollout_max_response_len = ask.limit
        return ask


@mutant(
    "RETRY",
    "strands-rl/strands-sglang@dbaff4a",
    kinds=("http", "error-event"),
    shows=Schedule(budget=1, attempts=(Attempt("http", code=400),)),
)
class RetriesRefusals(Reference):
    """Asks again for what was refused for good."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        for _ in range(client.RETRIES):
            try:
                return await client.ask(args, ask.payload, consume)
            except client.InputTooLong:
                raise
            except client.Refused:
                await asyncio.sleep(client.BACKOFF_S)
        return await client.ask(args, ask.payload, consume)


@mutant(
    "RETRY",
    "invergent-ai/surogate#177",
    "THUDM/slime#594",
    kinds=("http", "drop-before"),
    shows=Schedule(budget=1, attempts=(Attempt("drop-before", times=1000),)),
)
class RetriesForEver(Reference):
    """Asks until it gets an answer."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        while True:
            try:
                return await client.ask(args, ask.payload, consume)
            except client.Transient:
                await asyncio.sleep(client.BACKOFF_S)


@mutant(
    "RETRY",
    "vllm-project/vime#117",
    kinds=("http", "drop-before"),
    modes=STREAMS,
    shows=Schedule(budget=1, attempts=(Attempt("drop-before"),)),
)
class RetriesInPlainOnly(Reference):
    """Asks up to sixty times in plain mode and once in streams."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        async with client.session().post(url, json=ask.payload) as response:
            if response.status != 200:
                raise client.error(response.status, await response.text())
            return await consume(response)


class DropsParameter(Reference):
    """A payload builder that leaves ``names`` out."""

    names: tuple[str, ...] = ()

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None:
            return None
        sent = {k: v for k, v in ask.payload["sampling_params"].items() if k not in self.names}
        return altered(ask, sampling_params=sent)


@mutant("PARAMS", "areal-project/AReaL#1429", "THUDM/slime#2036", shows=Schedule(budget=1, stop=("☃",)))
class DropsStop(DropsParameter):
    """Stop strings do not reach the engine."""

    names = ("stop",)


@mutant("PARAMS", "verl-project/verl#6857", shows=Schedule(budget=1, seed=0))
class DropsSeed(DropsParameter):
    """The seed does not reach the engine."""

    names = ("sampling_seed",)


@mutant("PARAMS", "THUDM/slime#2242", shows=Schedule(budget=1, min_new_tokens=1))
class DropsMinimum(DropsParameter):
    """The minimum does not reach the engine."""

    names = ("min_new_tokens",)


# The engine's own maximum of 128 is more than B and C; what is clipped does not say how it ended.
@mutant(
    "PARAMS",
    "NovaSky-AI/SkyRL#1317",
    "NVIDIA-NeMo/RL#2365",
    also="BUDGET CONTEXT MODE-EQ RESUME-EQ STATUS",
    shows=Schedule(budget=1),
)
class DropsMaximum(DropsParameter):
    """The cap does not reach the engine, which has one of its own."""

    names = ("max_new_tokens",)


@mutant(
    "PARAMS",
    "THUDM/slime#2242",
    kinds=STOPPED,
    shows=Schedule(budget=2, min_new_tokens=1, attempts=(Attempt("abort", after=1),)),
)
class WholeMinimumAgain(Reference):
    """Sends the whole minimum again after a resume."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or "min_new_tokens" not in params:
            return ask
        sent = {**ask.payload["sampling_params"], "min_new_tokens": params["min_new_tokens"]}
        return altered(ask, sampling_params=sent)


@mutant(
    "RETRY", "THUDM/slime#2260", "sgl-project/sglang#2876", "NovaSky-AI/SkyRL#1032", shows=Schedule(budget=1, context=2)
)
class RetriesTooLong(Reference):
    """Asks again for what does not fit into the context."""

    async def ask(self, args: Any, ask: Ask, consume: Consume) -> Any:
        for _ in range(client.RETRIES):
            with contextlib.suppress(client.InputTooLong):
                return await client.ask(args, ask.payload, consume)
        return await client.ask(args, ask.payload, consume)


@mutant(
    "PARAMS",
    "verl-project/verl#6857",
    kinds=STOPPED,
    shows=Schedule(budget=2, seed=0, attempts=(Attempt("abort", after=1),)),
)
class SeedByAttempt(Reference):
    """Numbers the seeds by the request and not by the sample."""

    def prepare(self, args: Any, sample: Sample, params: dict[str, Any], stream: bool) -> Ask | None:
        ask = prepare(args, sample, params, stream=stream)
        if ask is None or params.get("sampling_seed") is None or not sample.response_length:
            return ask
        sent = {**ask.payload["sampling_params"], "sampling_seed": params["sampling_seed"] + 1}
        return altered(ask, sampling_params=sent)
