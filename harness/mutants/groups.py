"""Groups and the samples in them, on their way through attempts, abort, buffer and checkpoint."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from harness.mutants.parts import Limited, Unchecked, mutant, room
from harness.scenario import Scenario, Step
from reference_impl.rollout import Rollout, sampling_params
from reference_impl.sample import Sample, Status
from reference_impl.source import DataSource, Group, Member, finished, restarted, samples


@mutant("BUDGET", "THUDM/slime#200", shows=Scenario(budget=2, spanning=True, late=True, steps=(Step("abort"),)))
class WholeBudgetWhenAsync(Limited):
    """Fully asynchronous, asks for the whole budget again whenever it picks up a sample."""

    def limit(self, args: Any, sample: Sample, params: Mapping[str, Any]) -> int:
        left = room(args, sample, params)
        return params["max_new_tokens"] if left > 0 and args.fully_async else left


# What is left can be nothing.
@mutant("MAXIMAL", also="STATUS", shows=Scenario(budget=3, late=True, steps=(Step("abort"),)))
class SharesParams(Rollout):
    """All members are called with one dict, into which each call writes what its sample has left."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        generate, shared = self.generate, sampling_params(self.args)

        async def lowering(args: Any, sample: Sample, params: dict[str, Any]) -> Member:
            shared["max_new_tokens"] -= sample.response_length
            return await generate(args, sample, shared)

        self.generate = lowering


@mutant("ALIGN", shows=Scenario(budget=1, mask=True, late=True, steps=(Step("abort"),)))
class MasksThePrompt(Rollout):
    """The mask of old tokens is made as long as prompt and response."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        generate = self.generate

        async def masking(args: Any, sample: Sample, params: dict[str, Any]) -> Member:
            if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
                sample.loss_mask = [0] * len(sample.tokens)
            return await generate(args, sample, params)

        self.generate = masking


# No attempt can add to them any more.
@mutant("ALIGN", also="STATUS", shows=Scenario(budget=1, over=2, late=True, steps=(Step("restart"), Step("rollout"))))
class LoadsWithoutLogprobs(DataSource):
    """A checkpoint's samples come back without their log probabilities."""

    def load(self, path: str | os.PathLike[str]) -> None:
        super().load(path)
        for sample in _waiting(self):
            sample.rollout_log_probs = None


# A finished sample begins again.
@mutant("GROUP", also="STATUS", shows=Scenario(budget=1, over=2, steps=(Step("restart"),)))
class LoadsWithoutResponses(DataSource):
    """A checkpoint's samples come back without their responses, which would have to be generated again."""

    def load(self, path: str | os.PathLike[str]) -> None:
        super().load(path)
        for sample in _waiting(self):
            sample.restart()


@mutant("GROUP", shows=Scenario(budget=1, over=2, steps=(Step("restart"),)))
class SavesNoBuffer(DataSource):
    """A checkpoint holds the position among the prompts, and not what waits in the buffer."""

    def save(self, path: str | os.PathLike[str]) -> None:
        waiting, self.buffer = self.buffer, []
        super().save(path)
        self.buffer = waiting


@mutant(
    "GROUP",
    "THUDM/slime#2238",
    shows=Scenario(budget=1, batch=2, steps=(Step("tokens"), Step("stop"))),
)
class LosesSurplus(Rollout):
    """Throws away the groups that were finished beyond the batch."""

    def _store(self) -> None:
        self._done, self._left = [], [group for group in self._left if not all(map(finished, group))]
        super()._store()


@mutant("GROUP", "radixark/miles#1012", shows=Scenario(budget=1, steps=(Step("kill", count=25),)))
class LosesFailedGroups(Rollout):
    """A group that fails is gone, and its exception with it."""

    def _ended(self, task: asyncio.Task[bool]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._flight.pop(task)
        else:
            super()._ended(task)


# A finished sample begins again.
@mutant("GROUP", "radixark/miles#2800", also="STATUS", shows=Scenario(budget=1, members=2, steps=(Step("abort"),)))
class RestartsWholeGroups(Rollout):
    """One aborted member costs the whole group: the finished ones are generated again too."""

    def _forget(self, group: Group) -> None:
        super()._forget(group)
        if not all(map(finished, group)):
            group[:] = map(restarted, group)


@mutant("GROUP", "PrimeIntellect-ai/prime-rl#2590", shows=Scenario(budget=1, steps=(Step("kill", count=5),)))
class DropsFailedMembers(Rollout):
    """A member that fails is left out, and the group goes on without it."""

    source_class = Unchecked

    async def _run(self, group: Group) -> bool:
        self._forget(group)
        faults = await asyncio.gather(*(self._member(group, i) for i in range(len(group))), return_exceptions=True)
        group[:] = [member for member, fault in zip(group, faults, strict=True) if fault is None]
        return await super()._run(group)


@mutant("GROUP", "huggingface/trl#7176", shows=Scenario(budget=1, members=2, over=2, permits=1))
class DropsUnsentMembers(Rollout):
    """Of a group that is aborted it puts back the members that had been sent, unless none was."""

    source_class = Unchecked

    def _store(self) -> None:
        for group in self._left:
            group[:] = [member for member in group if samples(member)[0].status is not Status.PENDING] or group
        super()._store()


@mutant(
    "GROUP",
    "PrimeIntellect-ai/prime-rl#1296",
    shows=Scenario(budget=1, steps=(Step("rollout"), Step("hold"), Step("tokens"), Step("stop"))),
)
class CountsTwice(Rollout):
    """Puts back what is in flight when it aborts, and takes what finishes all the same for done."""

    async def _drain(self) -> None:
        self._left += self._flight.values()
        await super()._drain()

    def _ended(self, task: asyncio.Task[bool]) -> None:
        if not self.aborting:
            super()._ended(task)
        else:
            group = self._flight.pop(task)
            self._done += [group] if all(map(finished, group)) else []


@mutant("GROUP", "PrimeIntellect-ai/verifiers#1864", shows=Scenario(budget=1, over=2))
class ScoresTooEarly(Rollout):
    """Scores what an attempt brings, whether or not the answer has ended."""

    async def _attempt(self, sample: Sample) -> Member:
        made = await super()._attempt(sample)
        for each in samples(made):
            await self._score(each)
        return made


@mutant("GROUP", shows=Scenario(budget=1, partial=False, late=True, steps=(Step("abort"),)))
class KeepsPrefix(Rollout):
    """Without partial rollout the kept tokens survive an abort."""

    def _forget(self, group: Group) -> None:
        pass


# One sample is generated by two at once.
@mutant("GROUP", also="STATUS PREFIX", shows=Scenario(budget=1, over=2))
class PutsBackTwice(Rollout):
    """Puts aborted groups back twice, from the abort and from the end of the rollout."""

    async def _abort(self) -> None:
        await super()._abort()
        self._left += self._left


def _waiting(source: DataSource) -> list[Sample]:
    return [sample for group in source.buffer for member in group for sample in samples(member)]
