"""The loop around the client: groups of samples, gathered batch after batch, and aborted in between.

A group is the answers to one prompt; it is trained on whole or not at all
(GROUP). Fields of ``args`` have slime's names: ``rollout_batch_size`` groups
are a batch, ``over_sampling_batch_size`` groups are begun at a time,
``rollout_max_response_len`` is B in tokens and is read at every call,
``sglang_server_concurrency`` requests run at once. ``rollout_abort`` is the
abort flag, ``fully_async`` (false if absent) leaves the other groups running
between two rollouts.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from reference_impl import client, generate
from reference_impl.sample import Sample
from reference_impl.source import DataSource, Group, Member, finished, restarted, samples

__all__ = ["ABORT_LIMIT_S", "ABORT_POLL_S", "MAX_TRIES", "DataSource", "Rollout", "RolloutError"]

ABORT_POLL_S = 1.0
ABORT_LIMIT_S = 30.0
MAX_TRIES = 5
"""For one group, until it is done or aborted."""
OPTIONAL = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "skip_special_tokens")

log = logging.getLogger(__name__)

Generate = Callable[[Any, Sample, dict[str, Any]], Awaitable[Member]]
Reward = Callable[[Any, Sample], Awaitable[float]]


class RolloutError(Exception):
    """No batch. All groups are in the source's buffer, or about to be if it was shut down."""


def sampling_params(args: Any) -> dict[str, Any]:
    """A new dict at every call, down to its lists: no two members share one (NO-ALIAS)."""
    given = {name: getattr(args, f"rollout_{name}", None) for name in OPTIONAL}
    set_ones = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}
    return {"max_new_tokens": args.rollout_max_response_len, **set_ones}


class Rollout:
    """Gathers finished groups batch after batch. One call of `rollout` at a time."""

    def __init__(
        self, args: Any, source: DataSource, *, generate: Generate = generate.generate, reward: Reward | None = None
    ) -> None:
        if getattr(args, "rollout_abort", None) is None:
            args.rollout_abort = asyncio.Event()
        self.args, self.source, self.generate, self.reward = args, source, generate, reward
        self.permits = asyncio.Semaphore(args.sglang_server_concurrency)
        self._flight: dict[asyncio.Task[bool], Group] = {}  # a dict, because a set has another order in every process
        self._done: list[Group] = []  # in the order in which they were
        self._left: list[Group] = []  # came back from an abort
        self._failures: list[BaseException] = []
        self._stop: asyncio.Future[None] | None = None  # there while a rollout runs
        self._aborts = asyncio.Lock()

    @property
    def tasks(self) -> set[asyncio.Task[bool]]:
        """The groups in flight."""
        return set(self._flight)

    @property
    def aborting(self) -> bool:
        """Whether the abort flag is up: nothing new is asked."""
        return generate.aborted(self.args)

    async def rollout(self) -> list[Group]:
        """A batch: ``rollout_batch_size`` groups, finished and scored, in the order in which they were.

        Raises `RolloutError` when one group fails `MAX_TRIES` times, or on `shutdown`.
        """
        if self._stop is not None:
            raise RolloutError("a rollout is running")
        stop = self._stop = asyncio.get_running_loop().create_future()
        size: int = self.args.rollout_batch_size
        try:
            await self._fill(size, stop)
            if not self._fully_async:
                await self._abort()
            if stop.done():  # it came in the middle of the abort
                raise RolloutError("shut down")
            batch, self._done = self._done[:size], self._done[size:]
            if not self._fully_async:
                self._store()
            return batch
        except asyncio.CancelledError:
            await self._cancel()
            self._store()
            raise
        except Exception:
            if not stop.done():  # else `shutdown` does it
                await self.shutdown()
            raise
        finally:
            self._stop = None

    async def shutdown(self) -> None:
        """Aborts, and puts every group into the buffer. A running `rollout` raises; a later one works again."""
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)
        try:
            await self._abort()
        finally:
            self._store()

    @property
    def _fully_async(self) -> bool:
        return getattr(self.args, "fully_async", False)

    async def _fill(self, size: int, stop: asyncio.Future[None]) -> None:
        """Until ``size`` groups are done."""
        while True:
            if stop.done() or self.aborting:  # somebody else raised the flag: nothing more would come
                raise RolloutError("shut down")
            if self._failures:
                raise self._failures[0]
            if len(self._done) >= size:
                return
            self._begin(size)
            events: list[asyncio.Future[Any]] = [*self._flight, stop]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)

    def _begin(self, size: int) -> None:
        """Begins groups as slime does; a fully asynchronous rollout has a fixed number of them in flight."""
        step: int = self.args.over_sampling_batch_size
        if self._fully_async:
            if len(self._flight) < step:
                self._start(step - len(self._flight))
        else:
            while len(self._flight) + len(self._done) < size:
                self._start(step)

    def _start(self, count: int) -> None:
        groups = self.source.get_samples(count)
        if not groups:
            raise RolloutError("the source gives no groups")
        for group in groups:
            task = asyncio.create_task(self._run(group))
            self._flight[task] = group
            task.add_done_callback(self._ended)  # also called for a task that was cancelled before it began

    def _ended(self, task: asyncio.Task[bool]) -> None:
        group = self._flight.pop(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            self._failures.append(fault)
        done = not task.cancelled() and fault is None and task.result()
        (self._done if done else self._left).append(group)

    async def _run(self, group: Group) -> bool:
        """Generates what is unfinished, then scores. False: an abort came first.

        A member that fails stops no other. Raises `RolloutError` when the group is not done after `MAX_TRIES`.
        """
        faults: list[BaseException] = []
        for _ in range(MAX_TRIES):
            self._forget(group)
            faults = await _all(self._member(group, place) for place in range(len(group)))
            if self.aborting:
                return False
            if not faults and all(map(finished, group)):
                faults = await _all(self._score(sample) for member in group for sample in samples(member))
                if not faults:
                    return True
        fault = faults[0] if faults else None
        name, cause = samples(group[0])[0].group_index, repr(fault) if fault else "it comes back aborted"
        raise RolloutError(f"group {name} is not done after {MAX_TRIES} tries: {cause}") from fault

    def _forget(self, group: Group) -> None:
        """Without partial rollout no prefix survives (GROUP). Finished members stay."""
        if not self.args.partial_rollout:
            group[:] = [member if finished(member) else restarted(member) for member in group]

    async def _member(self, group: Group, place: int) -> None:
        """One attempt. A member that was fanned out is continued sample by sample, and stays one member."""
        member = group[place]
        if isinstance(member, list):
            group[place] = [new for old in member for new in samples(await self._attempt(old))]
        else:
            group[place] = await self._attempt(member)

    async def _attempt(self, sample: Sample) -> Member:
        if sample.finished:
            return sample
        async with self.permits:
            if self.aborting:  # it has waited for its turn
                return sample
            if self.args.partial_rollout and self.args.mask_offpolicy_in_partial_rollout and sample.response_length:
                sample.loss_mask = [0] * sample.response_length
            made = await self.generate(self.args, sample, sampling_params(self.args))
        if not made:
            raise TypeError("generate gave no sample")
        return made

    async def _score(self, sample: Sample) -> None:
        if self.reward is not None and sample.reward is None:
            sample.reward = await self.reward(self.args, sample)

    async def _abort(self) -> None:
        """Ends every group in flight and lowers the flag.

        Takes little more than `ABORT_LIMIT_S`, whatever engines do.
        """
        async with self._aborts:
            self.args.rollout_abort.set()
            try:
                async with asyncio.timeout(ABORT_LIMIT_S):
                    await self._drain()
            except TimeoutError:
                log.warning("no end of the abort; %d groups are cancelled", len(self._flight))
            finally:
                await self._cancel()
                self.args.rollout_abort.clear()

    async def _drain(self) -> None:
        """Until nothing is in flight.

        A request can arrive just after an abort (THUDM/slime#2056), or be sent again by a
        retry: as long as a group is in flight the abort is repeated, whatever the engines say of their load.
        """
        while self._flight:
            await client.abort_engines(self.args)
            if self._flight:
                await asyncio.wait(self._flight, timeout=ABORT_POLL_S)

    async def _cancel(self) -> None:
        """Again and again: a custom generate function may swallow a cancellation."""
        while self._flight:
            for task in self._flight:
                task.cancel()
            await asyncio.wait(self._flight, timeout=ABORT_POLL_S)

    def _store(self) -> None:
        """All that was not handed out goes into the buffer, the surplus too (THUDM/slime#2238)."""
        groups = self._done + self._left
        self._done, self._left, self._failures = [], [], []
        for group in groups:
            self._forget(group)
        self.source.add_samples(groups)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> list[BaseException]:
    """Runs all to the end and gives what they raised."""
    return [fault for fault in await asyncio.gather(*work, return_exceptions=True) if fault is not None]
