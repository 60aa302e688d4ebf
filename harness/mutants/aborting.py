"""Bringing a loop to rest."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from harness.mutants.parts import Instead, Patient, Reference, mutant
from harness.scenario import Scenario, Step
from reference_impl import client
from reference_impl.generate import Ask, aborted, keep
from reference_impl.rollout import ABORT_LIMIT_S, ABORT_POLL_S, Rollout
from reference_impl.sample import Sample, Status
from reference_impl.source import Member, finished


@mutant("ABORT-LIVE", "THUDM/slime#2056", shows=Scenario(budget=1, over=2, steps=(Step("kill"),)))
class AbortsOnce(Patient):
    """Aborts once: a request that arrives after the abort runs on, and the loop waits for it."""

    async def _drain(self) -> None:
        await client.abort_engines(self.args)
        await _ended(self)


@mutant("ABORT-LIVE", "THUDM/slime#811", shows=Scenario(budget=1, over=2, partial=False))
class LogsTheAbort(Patient):
    """Of two branches one only says that it aborts, here the one without partial rollout."""

    async def _drain(self) -> None:
        if self.args.partial_rollout:
            await super()._drain()
        await _ended(self)


@mutant(
    "ABORT-LIVE",
    "THUDM/slime#1632",
    shows=Scenario(
        budget=1, steps=(Step("rollout"), Step("hold", count=2), Step("tokens"), Step("pass"), Step("wait"))
    ),
)
class RaisesOnSilentEngine(Patient):
    """An engine that does not answer makes the abort raise, and the step is lost."""

    async def _drain(self) -> None:
        engine = f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}"
        running = True
        batch, self._done = self._done, []  # a local, which goes with what is raised
        while running or self.tasks:
            await client.post_json(f"{engine}/abort_request", {"abort_all": True})
            loads = (await client.get_json(f"{engine}/v1/loads?include=core"))["loads"]
            running = any(load["num_running_reqs"] for load in loads)
            await asyncio.sleep(ABORT_POLL_S)
        self._done = batch + self._done


@mutant("ABORT-LIVE", "NovaSky-AI/SkyRL#1250", shows=Scenario(budget=1, over=2))
class AbortsNothing(Patient):
    """The order to abort names no request: the engine says yes and does nothing."""

    async def _drain(self) -> None:
        await client.post_json(
            f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}/abort_request", {"rid": ""}
        )
        await _ended(self)


@mutant("ABORT-LIVE", "vllm-project/vime#296", shows=Scenario(budget=1, over=3, permits=1))
class PausesForEver(Patient):
    """Who gets a permit while the loop pauses waits until it goes on, and the pause waits for all who wait."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.permits = _Paused(self)


class _Paused(asyncio.Semaphore):
    def __init__(self, loop: Rollout) -> None:
        super().__init__(loop.args.sglang_server_concurrency)
        self.loop = loop

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        while self.loop.aborting:  # noqa: ASYNC110 - a flag cannot be waited for
            await asyncio.sleep(ABORT_POLL_S)
        return True


# The proxy does not know that without partial rollout nothing of an answer is kept.
@mutant("ABORT-LIVE", "areal-project/AReaL#1618", also="GROUP", shows=Scenario(budget=1, over=2))
class SendsOn(Patient):
    """A proxy in front of the engine sends what was aborted again at once, whatever the loop does."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        generate = self.generate

        async def proxy(args: Any, sample: Sample, params: dict[str, Any]) -> Member:
            while True:
                made = await generate(Instead(args, rollout_abort=None), sample, params)
                if finished(made):
                    return made

        self.generate = proxy


@mutant("ABORT-LIVE", "smg-project/smg#2426", shows=Scenario(budget=1))
class AbortsLater(Rollout):
    """Repeats the abort later, from a task that nobody waits for: it hits whatever runs by then."""

    async def _drain(self) -> None:
        await super()._drain()
        self.late = asyncio.create_task(self._late())

    async def _late(self) -> None:
        await asyncio.sleep(ABORT_LIMIT_S)
        await client.abort_engines(self.args)


class _Kept(asyncio.Semaphore):
    async def __aexit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.release()


@mutant("ABORT-LIVE", "radixark/miles#1012", shows=Scenario(budget=1, steps=(Step("kill", count=5),)))
class KeepsPermits(Rollout):
    """An attempt that raises does not give its permit back."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.permits = _Kept(self.args.sglang_server_concurrency)


@mutant("STATUS", "InternLM/xtuner#1827", shows=Scenario(budget=1, over=2))
class CompletesLateAnswers(Reference):
    """Takes an answer that comes in during an abort for a completed one."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if aborted(args):
            sample.status = Status.COMPLETED


async def _ended(loop: Rollout) -> None:
    """Until nothing is in flight."""
    if loop.tasks:
        await asyncio.wait(loop.tasks)
