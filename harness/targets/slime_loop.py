"""THUDM/slime's rollout loop as a target: its own groups, abort, data source, buffer and fully-async worker.

What belongs to one sample is `harness.targets.slime`'s. Replaced are the data
set (prompts of the scenario), the reward (always 1), torch's file format and
the worker's thread (its coroutine runs on the loop of the run); the rest is the
revision's own code.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.history import PLAIN, STREAM, SampleView
from harness.targets import Args, CannotJudge, Environment, LoopEnvironment, Start, Watch, slime
from harness.targets.slime import SlimeTarget

LOOP, ASYNC = "generate_rollout_async", "slime.rollout.fully_async_rollout"
DATA_SOURCES = ("slime.rollout.data_source", "slime.ray.rollout_data_source")
"""Where the data source lives, the present name first."""

WATCHED = "rolloutcheck.watched"
"""Stands for the path of a custom generate function."""


def load(root: str, revision: str) -> SlimeLoop:
    """The loop of the slime package below ``root``. Raises CannotJudge, also for a revision without one."""
    sample = slime.load(root, revision, also=(*DATA_SOURCES, ASYNC))
    source = next((sample.others[name] for name in DATA_SOURCES if name in sample.others), None)
    if source is None:
        raise CannotJudge(f"{sample.name} has no {DATA_SOURCES[0]}", not_applicable=True)
    return SlimeLoop(sample, source, sample.others.get(ASYNC))


class SlimeLoop:
    """A loaded revision's loop. See `harness.targets.LoopTarget` for what its methods promise."""

    stoppable = False  # the worker is stopped when its process ends

    def __init__(self, sample: SlimeTarget, source: ModuleType, spanning: ModuleType | None) -> None:
        self.probed = sample.probed
        rollout = sample.rollout
        self.name, self.modes, self.absent, self.stubbed = sample.name, sample.modes, sample.absent, sample.stubbed
        self._sample, self._rollout, self._source_module, self._async = sample, rollout, source, spanning
        self._source_class: Any = getattr(source, "RolloutDataSourceWithBuffer", None)
        for name in (LOOP, "generate_and_rm_group", "generate_and_rm", "abort", "load_function"):
            if not callable(getattr(rollout, name, None)):
                raise CannotJudge(f"{self.name} has no {name}", not_applicable=True)
        if self._source_class is None:
            raise CannotJudge(f"{self.name} has no data source with a buffer", not_applicable=True)
        self._folder = tempfile.TemporaryDirectory(prefix="rolloutcheck-")
        self._files: dict[str, Any] = {}
        self._generate = {mode: sample.function(mode) for mode in (PLAIN, STREAM)}
        self._worker: Any = None
        self._takes_lists = "isinstance(sample, list)" in inspect.getsource(rollout.generate_and_rm)
        self._root = os.path.dirname(os.path.dirname(os.path.abspath(rollout.__file__)))
        self._patch()

    # the run

    def reset(self, env: LoopEnvironment, watch: Watch) -> None:
        scenario = env.scenario
        if scenario.spanning and self._async is None:
            raise CannotJudge(f"{self.name} has no fully-async rollout", not_applicable=True)
        if scenario.fan_out and not self._takes_lists:
            raise CannotJudge(f"{self.name} takes no lists of samples", not_applicable=True)
        if env.stream and STREAM not in self.modes:
            raise self.absent[STREAM]
        self._env, self._watch, self._worker = env, watch, None
        self._files.clear()
        self._start(scenario.budget)
        self._source = self._new_source()

    def _start(self, budget: int) -> None:
        """A new process: everything that the client keeps in globals is gone."""
        env, scenario = self._env, self._env.scenario
        self._sample.reset(Environment(env.host, env.port, env.tokenizer, budget))
        self.args: Args = self._sample.args
        custom = WATCHED if env.stream or scenario.fan_out else None
        given = {
            "buffer_filter_path": None,
            "custom_generate_function_path": custom,
            "dump_details": None,
            "load": self._folder.name,
            "mask_offpolicy_in_partial_rollout": scenario.mask,
            "n_samples_per_prompt": scenario.members,
            "over_sampling_batch_size": scenario.over,
            "partial_rollout": scenario.partial,
            "prompt_data": "the scenario's prompts",
            "rollout_batch_size": scenario.batch,
            "rollout_num_gpus": 1,
            "rollout_shuffle": False,
            "save": self._folder.name,
            "sglang_server_concurrency": scenario.permits,
        }
        for name, value in given.items():
            setattr(self.args, name, value)
        self._sample.renew_state()

    def _new_source(self) -> Any:
        source = self._source_class(self.args)
        get, watch = source.get_samples, self._watch

        def get_samples(num_samples: int) -> Any:
            groups = get(num_samples)
            watch.taken(groups)
            return groups

        source.get_samples = get_samples
        return source

    async def rollout(self, number: int) -> Sequence[Sequence[Any]]:
        try:
            return await self._spanning(number) if self._env.scenario.spanning else await self._one(number)
        except AttributeError as error:
            if str(error).startswith("args has no field"):
                raise CannotJudge(f"{self.name} wants more: {error}") from error
            raise

    async def _one(self, number: int) -> Sequence[Sequence[Any]]:
        # As generate_rollout does, without its thread.
        output = await self._rollout.generate_rollout_async(self.args, number, self._source.get_samples)
        aborted: Any = []
        if isinstance(output, tuple):
            output, aborted = output
        if aborted:
            self._source.add_samples(aborted)
        groups: Sequence[Sequence[Any]] = getattr(output, "samples", output)
        return groups

    async def _spanning(self, number: int) -> Sequence[Sequence[Any]]:
        module: Any = self._async
        if self._worker is None:
            self._worker = worker = module.AsyncRolloutWorker(
                self.args, self._source, concurrency=self._env.scenario.permits
            )
            worker.output_queue.maxsize = 0  # a full one waits for another thread, and here is none
            worker.worker_thread = SimpleNamespace(is_alive=lambda: True, join=lambda timeout=None: None)
            self._work = asyncio.get_running_loop().create_task(worker._loop())
        module._global_worker = self._worker
        output = await module._generate_rollout_async(self.args, number, self._source)
        groups: Sequence[Sequence[Any]] = getattr(output, "samples", output)
        return groups

    def buffer(self) -> Sequence[Sequence[Any]]:
        buffer: Sequence[Sequence[Any]] = self._source.buffer
        return buffer

    async def restart(self, budget: int) -> None:
        await self.stop()
        self._watch.saved()
        self._source.save(0)
        self._start(budget)
        self._source = self._new_source()
        self._source.load(0)

    async def stop(self) -> None:
        """Only the fully-async worker can be stopped."""
        if self._worker is None:
            return
        self._worker.stop()
        await asyncio.wait([self._work])
        self._end_worker()

    def _end_worker(self) -> None:
        """As `asyncio.run` ends the worker's own loop: what is left of it is cancelled."""
        for task in asyncio.all_tasks(self._work.get_loop()):
            if _file(task).startswith(self._root):
                task.cancel()
        self._worker = self._async._global_worker = None  # type: ignore[union-attr]

    # what is seen of it

    def aborting(self) -> bool:
        return bool(self._sample.state.aborted)

    def permits(self) -> tuple[int, int] | None:
        semaphore = getattr(self._sample.state, "semaphore", None)
        return None if semaphore is None else (semaphore._value, self._env.scenario.permits)

    def index(self, sample: Any) -> int:
        return -1 if sample.index is None else int(sample.index)

    def view(self, sample: Any) -> SampleView:
        return self._sample.view(sample)

    def scored(self, sample: Any) -> bool:
        return sample.reward is not None

    def versions(self, sample: Any) -> tuple[str, ...] | None:
        listed = getattr(sample, "weight_versions", None)
        return None if listed is None else tuple(map(str, listed))

    def spans(self, sample: Any) -> tuple[tuple[str, int], ...] | None:
        return None

    async def close(self) -> None:
        self._folder.cleanup()
        await self._sample.close()

    # what is replaced

    def _patch(self) -> None:
        rollout: Any = self._rollout
        load_function = rollout.load_function
        rollout.generate = self._watched
        rollout.load_function = lambda path: self._watched if path == WATCHED else load_function(path)
        rollout.tqdm = _NoBar
        rollout.async_rm = rollout.batched_async_rm = _reward
        source: Any = self._source_module
        source.Dataset = lambda *_, **__: _DataSet([self._sample.new_sample(Start(p)) for p in self._env.prompts])
        source.torch = SimpleNamespace(save=self._save, load=self._load)

    async def _watched(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        """The revision's generate function of the mode, told to the watch; as a list where the scenario wants one."""
        function: Callable[..., Awaitable[Any]] | None = self._generate[STREAM if self._env.stream else PLAIN]
        assert function is not None
        result = await self._watch.call(
            sample, sampling_params, lambda: function(args=args, sample=sample, sampling_params=sampling_params)
        )
        return [result] if self._env.scenario.fan_out else result

    def _save(self, state: Any, path: Any) -> None:
        Path(path).touch()
        self._files[str(path)] = copy.deepcopy(state)

    def _load(self, path: Any, *_: Any, **__: Any) -> Any:
        return copy.deepcopy(self._files[str(path)])


def _file(task: asyncio.Task[Any]) -> str:
    """Where the code that a task runs was written."""
    return str(getattr(getattr(task.get_coro(), "cr_code", None), "co_filename", ""))


class _DataSet:
    """What slime's data source needs of its data set."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)


class _NoBar:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def update(self, *_: Any) -> None: ...

    def close(self) -> None: ...


async def _reward(args: Any, sample: Any, **_: Any) -> Any:
    """Early revisions give lists of samples to the function for one."""
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0
