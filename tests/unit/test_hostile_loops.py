"""Loops that use threads, give what is no batch, raise what has no words, or end in their own time."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from harness.history import PLAIN, Halted
from harness.rollouts import Broke
from harness.scenario import Scenario, Step
from harness.stage import Stage
from harness.targets.reference_loop import ReferenceLoop
from harness.targets.slime_loop import SlimeLoop
from tests.unit.test_stage import VOCABULARY, loop, names, run


def test_a_loop_may_use_threads() -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        groups = await target.loop.rollout()
        await asyncio.to_thread(time.sleep, 0.02)
        return groups

    assert "Stuck" not in names(run(loop(rollout)))


def test_every_scenario_begins_at_the_same_time() -> None:
    with closing(Stage(ReferenceLoop(), VOCABULARY)) as stage:
        begun = []
        for _ in range(2):
            stage.begin(Scenario(budget=1), PLAIN)
            begun.append(stage.loop.time())
            stage.loop.jump(90_000)
            stage.end()
    assert begun == [0.0, 0.0]


@pytest.mark.parametrize("given", [None, 7, [[None]]])
def test_what_is_no_batch_of_groups_cannot_be_read(given: Any) -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        return given

    last = run(loop(rollout)).events[-1]
    assert isinstance(last, Halted) and last.kind == "view"
    assert last.message.startswith("the loop cannot be read: ")


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(("error", "said"), [(Wordless(), "?"), (OSError("\ud800"), "?"), (OSError("é"), "é")])
def test_an_error_without_words_has_a_name(error: Exception, said: str) -> None:
    async def rollout(target: ReferenceLoop, number: int) -> Any:
        raise error

    assert run(loop(rollout)).events[-1] == Broke(1, type(error).__name__, said, False, ())


@pytest.mark.parametrize("step", ["restart", "stop"])
def test_a_loop_that_cancels_itself_has_raised(step: str) -> None:
    async def cancels(*_: Any) -> None:
        raise asyncio.CancelledError

    target = loop()
    setattr(target, step, cancels)
    last = run(target, Step(step)).events[-1]
    assert isinstance(last, Broke) and last.error == "CancelledError"


def test_a_shutdown_that_lets_everything_finish_aborts_nothing() -> None:
    class Graceful(ReferenceLoop):
        async def stop(self) -> None:
            await asyncio.wait(self.loop.tasks or [asyncio.create_task(asyncio.sleep(0))])

    assert "Straggled" not in names(run(Graceful(), Step("stop")))


def test_what_slime_s_worker_leaves_is_cancelled_and_nothing_else() -> None:
    names: dict[str, Any] = {"asyncio": asyncio}
    exec(compile("async def endless():\n    await asyncio.sleep(3600)", "/elsewhere/worker.py", "exec"), names)

    async def main() -> tuple[bool, Any]:
        left = asyncio.create_task(names["endless"]())
        worker: Any = SimpleNamespace(_work=left, _root="/elsewhere", _async=SimpleNamespace(_global_worker=1))
        SlimeLoop._end_worker(worker)
        await asyncio.wait([left])
        return left.cancelled(), worker._worker

    assert asyncio.run(main()) == (True, None)
