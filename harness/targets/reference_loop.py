"""The reference implementation's rollout loop as a target, whole or with a part of it replaced (`harness.mutants`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.history import SampleView
from harness.targets import Args, CannotJudge, LoopEnvironment, Watch
from harness.targets.function import Flag, Generate, view
from reference_impl import client
from reference_impl.generate import generate
from reference_impl.generate_streaming import generate_streaming
from reference_impl.rollout import DataSource, Rollout


class ReferenceLoop:
    """See `harness.targets.LoopTarget` for what its methods promise."""

    modes: tuple[str, ...] = ("plain", "stream")
    stoppable = True

    def __init__(
        self, name: str = "reference", loop: type[Rollout] = Rollout, source: type[DataSource] = DataSource
    ) -> None:
        self.name, self._loop_class, self._source_class = name, loop, source
        self.absent: Mapping[str, CannotJudge] = {}
        self.stubbed: frozenset[str] = frozenset()
        self.generates: dict[bool, Generate] = {False: generate, True: generate_streaming}
        """The generate function, plain and streaming."""
        memory = "/dev/shm"  # where there is such a thing: the loop waits for the disk when it saves
        self._folder = tempfile.TemporaryDirectory(
            prefix="rolloutcheck-", dir=memory if os.access(memory, os.W_OK) else None
        )

    def reset(self, env: LoopEnvironment, watch: Watch) -> None:
        self._env, self._watch = env, watch
        self._start(env.scenario.budget)

    def _start(self, budget: int) -> None:
        env, scenario = self._env, self._env.scenario
        self._flag = LoweredFlag()
        self._args = Args(
            sglang_router_ip=env.host,
            sglang_router_port=env.port,
            tokenizer=env.tokenizer,
            rollout_batch_size=scenario.batch,
            over_sampling_batch_size=scenario.over,
            n_samples_per_prompt=scenario.members,
            partial_rollout=scenario.partial,
            mask_offpolicy_in_partial_rollout=scenario.mask,
            rollout_max_response_len=budget,
            rollout_max_context_len=None,
            rollout_abort=self._flag,
            sglang_server_concurrency=scenario.permits,
            fully_async=scenario.spanning,
        )
        self._source = self._watched_source(self._source_class(env.prompts, scenario.members))
        self.loop = self._loop_class(self._args, self._source, generate=self._generate, reward=_reward)

    def _watched_source(self, source: DataSource) -> DataSource:
        get, watch = source.get_samples, self._watch

        def get_samples(count: int) -> Any:
            groups = get(count)
            watch.taken(groups)
            return groups

        source.get_samples = get_samples  # type: ignore[method-assign]
        return source

    async def _generate(self, args: Any, sample: Any, params: dict[str, Any]) -> Any:
        function = self.generates[self._env.stream]
        result = await self._watch.call(sample, params, lambda: function(args, sample, params))
        return [result] if self._env.scenario.fan_out else result

    async def rollout(self, number: int) -> Sequence[Sequence[Any]]:
        return await self.loop.rollout()

    def buffer(self) -> Sequence[Sequence[Any]]:
        return self._source.buffer

    async def restart(self, budget: int) -> None:
        await self.loop.shutdown()
        self._watch.saved()
        file = Path(self._folder.name) / "source.json"
        self._source.save(file)
        self._start(budget)
        self._source.load(file)

    async def stop(self) -> None:
        await self.loop.shutdown()

    def aborting(self) -> bool:
        return self._flag.on

    def permits(self) -> tuple[int, int] | None:
        return self.loop.permits._value, self._env.scenario.permits

    def index(self, sample: Any) -> int:
        return int(sample.index)

    def view(self, sample: Any) -> SampleView:
        return view(sample)

    def scored(self, sample: Any) -> bool:
        return sample.reward is not None

    def versions(self, sample: Any) -> tuple[str, ...] | None:
        return tuple(sample.weight_versions)

    def spans(self, sample: Any) -> tuple[tuple[str, int], ...] | None:
        return tuple((version, count) for version, count in sample.weight_spans)

    async def close(self) -> None:
        self._folder.cleanup()
        await client.close()


class LoweredFlag(Flag):
    """The abort flag as a loop uses it."""

    def set(self) -> None:
        self.on = True

    def clear(self) -> None:
        self.on = False


async def _reward(args: Any, sample: Any) -> float:
    return 1.0
