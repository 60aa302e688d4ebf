"""The loop around the client, on an engine of our own and a virtual clock."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.loop import VirtualLoop
from reference_impl import client
from reference_impl.rollout import ABORT_LIMIT_S, ABORT_POLL_S, MAX_TRIES, DataSource, Rollout, RolloutError
from reference_impl.sample import Sample, Status

LENGTH = 4  # tokens of a whole answer, one a second


def arguments(**given: Any) -> Any:
    usual = {
        "sglang_router_ip": "here",
        "sglang_router_port": 7,
        "sglang_server_concurrency": 64,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 3,
        "rollout_max_response_len": 9,
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": False,
    }
    return Namespace(**usual | given)


def add(sample: Sample, count: int, finish: str | None = None) -> Sample:
    meta = {"weight_version": "1", "finish_reason": finish and {"type": finish}}
    sample.tokens = sample.tokens or [1]
    sample.append_response_tokens(tokens=[7] * count, log_probs=[-1.0] * count, meta_info=meta, text="x" * count)
    return sample


class Engine:
    """Two workers behind a router. Each answer takes ``takes(sample)`` seconds, or is aborted with what it has."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.takes: Callable[[Sample], float] = lambda sample: 1.0 + (sample.index or 0)
        self.running: list[asyncio.Future[None]] = []
        self.asked: list[tuple[int | None, dict[str, Any]]] = []
        self.most = 0
        self.aborts: list[float] = []
        self.dead: set[str] = set()
        self.deaf = 0  # orders to abort that it does not hear

    async def get_json(self, url: str) -> Any:
        self._reach(url)
        if url == "http://here:7/workers":
            return {"workers": [{"url": "http://a"}, {"url": "http://b"}]}
        raise AssertionError(url)

    async def post_json(self, url: str, body: Any) -> None:
        self._reach(url)
        assert url.endswith("/abort_request") and body == {"abort_all": True}
        if "//a" in url:
            self.aborts.append(self.loop.time())
            self.deaf -= 1
            for request in self.running if self.deaf < 0 else ():
                if not request.done():
                    request.set_result(None)

    def _reach(self, url: str) -> None:
        if any(name in url for name in self.dead):
            raise TimeoutError(url)

    async def generate(self, args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        self.asked.append((sample.index, params))
        if args.rollout_abort.is_set():
            sample.status = Status.ABORTED
            return sample
        return await self.send(sample)

    async def send(self, sample: Sample) -> Sample:
        request: asyncio.Future[None] = self.loop.create_future()
        self.running.append(request)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.wait([request], timeout=self.takes(sample))
        finally:
            self.running.remove(request)
        return add(sample, 1, "abort") if request.done() else add(sample, LENGTH - sample.response_length, "stop")


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


@pytest.fixture
def engine(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(loop)
    monkeypatch.setattr(client, "get_json", made.get_json)
    monkeypatch.setattr(client, "post_json", made.post_json)
    return made


def rolling(engine: Engine, *, generate: Any = None, reward: Any = None, size: int = 1, **given: Any) -> Rollout:
    source = DataSource(["p", "q", "r"], size)
    return Rollout(arguments(**given), source, generate=generate or engine.generate, reward=reward)


def indices(groups: Any) -> list[Any]:
    """Of the first sample of each member, group by group."""
    return [[(m[0] if isinstance(m, list) else m).index for m in group] for group in groups]


def at_rest(rollout: Rollout) -> bool:
    permits: Any = rollout.permits
    return not rollout.tasks and not rollout.aborting and permits._value == rollout.args.sglang_server_concurrency


def told(rollout: Rollout) -> list[tuple[str, int]]:
    return [(s.status.value, s.response_length) for group in rollout.source.buffer for s in group]


class TestSource:
    def test_new_groups(self) -> None:
        source = DataSource(["p", "q"], 2)
        groups = source.get_samples(2) + source.get_samples(1)
        assert indices(groups) == [[0, 1], [2, 3], [4, 5]]
        assert [[(s.group_index, s.prompt) for s in g] for g in groups] == [
            [(0, "p")] * 2,
            [(1, "q")] * 2,
            [(2, "p")] * 2,
        ]

    def test_the_buffer_comes_first(self) -> None:
        source = DataSource(["p"], 1)
        first = source.get_samples(3)
        source.add_samples(first)
        assert indices(source.get_samples(2) + source.get_samples(2)) == [[0], [1], [2], [3]]
        assert source.buffer == []

    def test_a_group_of_a_wrong_size(self) -> None:
        source = DataSource(["p"], 2)
        with pytest.raises(ValueError, match="a group of 1 among groups of 2"):
            source.add_samples([*source.get_samples(1), [Sample()]])
        assert source.buffer == []

    @pytest.mark.parametrize(("prompts", "size"), [([], 1), (["p"], 0)])
    def test_nothing_to_give(self, prompts: list[str], size: int) -> None:
        with pytest.raises(ValueError, match="prompts for groups of"):
            DataSource(prompts, size)

    def test_save_and_load(self, tmp_path: Path) -> None:
        source, path = DataSource(["p", "q"], 2), tmp_path / "state.json"
        group = source.get_samples(1)[0]
        group[1] = [add(Sample(index=1), 2, "abort"), Sample(index=1)]
        source.add_samples([group])
        source.save(path)
        again = DataSource(["p", "q"], 2)
        again.load(str(path))
        assert again.buffer == [group]
        assert again.buffer[0][1][0].weight_spans == [("1", 2)]
        again.get_samples(1)
        assert (indices(again.get_samples(1)), again.get_samples(1)[0][0].prompt) == ([[2, 3]], "p")
        assert [p.name for p in tmp_path.iterdir()] == ["state.json"]

    def test_what_cannot_be_saved_leaves_the_file_before(self, tmp_path: Path) -> None:
        source, path = DataSource(["p"], 1), tmp_path / "state.json"
        source.save(path)
        before = path.read_bytes()
        source.add_samples([[Sample(metadata={"no": object()})]])
        with pytest.raises(TypeError):
            source.save(path)
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        "text",
        [
            *("", "[]", "3", "\x80", '{"position": 1, "index": 1}', '{"position": "1", "index": 1, "buffer": []}'),
            *(json.dumps({"position": 1, "index": 1, "buffer": [g]}) for g in ([], [{}], [3], 3, [{"status": "x"}])),
        ],
    )
    def test_a_damaged_file(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "state.json"
        path.write_bytes(text.encode("latin-1"))
        source = DataSource(["p"], 1)
        source.add_samples(source.get_samples(1))
        with pytest.raises(ValueError, match=r"^\S+state.json holds no saved samples: [^\n]+$"):
            source.load(path)
        assert indices(source.get_samples(2)) == [[0], [1]]


class TestBatch:
    def test_the_first_groups_done_are_the_batch(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, size=2)
        batch = loop.run(rollout.rollout())
        assert indices(batch) == [[0, 1], [2, 3]]
        assert all(s.status is Status.COMPLETED and s.response_length == LENGTH for g in batch for s in g)
        assert (indices(rollout.source.buffer), at_rest(rollout)) == ([[4, 5]], True)
        assert told(rollout) == [("aborted", 1)] * 2
        assert rollout.source.buffer[0][0].weight_spans == [("1", 1)]

    def test_as_many_in_flight_as_slime_has(self, loop: VirtualLoop, engine: Engine) -> None:
        """2 at a time up to 5 make 6; there is no need for more until all but 4 have failed to count."""
        rollout = rolling(engine, rollout_batch_size=5, over_sampling_batch_size=2)
        assert indices(loop.run(rollout.rollout())) == [[0], [1], [2], [3], [4]]
        assert (engine.most, indices(rollout.source.buffer)) == (6, [[5]])

    def test_a_surplus_is_handed_out_later_and_not_generated_again(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes = lambda sample: 1.0
        rollout = rolling(engine)
        assert indices(loop.run(rollout.rollout())) == [[0], [1]]
        assert (indices(rollout.source.buffer), told(rollout)) == ([[2]], [("completed", LENGTH)])
        assert indices(loop.run(rollout.rollout()))[0] == [2]
        assert [index for index, _ in engine.asked].count(2) == 1

    def test_every_call_has_parameters_of_its_own(self, loop: VirtualLoop, engine: Engine) -> None:
        stop = ["s"]
        rollout = rolling(engine, size=2, rollout_temperature=0.5, rollout_stop=stop, rollout_top_k=None)
        loop.run(rollout.rollout())
        asked = [params for _, params in engine.asked]
        assert all(p == {"max_new_tokens": 9, "temperature": 0.5, "stop": ["s"]} for p in asked)
        assert len({id(p) for p in asked}) == len({id(p["stop"]) for p in asked} - {id(stop)}) == len(asked)
        rollout.args.rollout_max_response_len = 5
        engine.asked.clear()
        loop.run(rollout.rollout())
        assert {p["max_new_tokens"] for _, p in engine.asked} == {5}

    def test_no_more_requests_than_permits(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, size=4, sglang_server_concurrency=3)
        loop.run(rollout.rollout())
        assert (engine.most, at_rest(rollout)) == (3, True)
        assert told(rollout)[-1] == ("pending", 0), "it was aborted while it waited for a permit"

    def test_finished_members_stay_finished(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes = lambda sample: 99.0 if sample.index == 5 else 1.0
        rollout = rolling(engine, size=2)
        loop.run(rollout.rollout())
        assert told(rollout) == [("completed", LENGTH), ("aborted", 1)]
        engine.takes = lambda sample: 1.0
        assert indices(loop.run(rollout.rollout()))[0] == [4, 5]
        assert [index for index, _ in engine.asked].count(4) == 1

    def test_without_partial_rollout_no_prefix_survives(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes = lambda sample: 99.0 if sample.index == 5 else 1.0
        rollout = rolling(engine, size=2, partial_rollout=False)
        loop.run(rollout.rollout())
        kept, dropped = rollout.source.buffer[0]
        assert isinstance(kept, Sample) and kept.response_length == LENGTH
        assert dropped == Sample(group_index=2, index=5, prompt="r")

    @pytest.mark.parametrize(("partial", "mask", "first"), [(1, 1, 0), (1, 0, 1), (0, 1, 1)])
    def test_tokens_of_an_earlier_policy(
        self, loop: VirtualLoop, engine: Engine, partial: int, mask: int, first: int
    ) -> None:
        rollout = rolling(engine, partial_rollout=bool(partial), mask_offpolicy_in_partial_rollout=bool(mask))
        loop.run(rollout.rollout())
        engine.takes = lambda sample: 1.0
        assert loop.run(rollout.rollout())[0][0].loss_mask == [first, 1, 1, 1]

    def test_the_reward(self, loop: VirtualLoop, engine: Engine) -> None:
        scored: list[Any] = []

        async def reward(args: Any, sample: Sample) -> float:
            assert args is rollout.args
            assert sample.finished and not rollout.permits.locked(), "the permit is back"
            scored.append(sample.index)
            await asyncio.sleep(0.1)
            return 0.5

        rollout = rolling(engine, size=2, reward=reward, rollout_batch_size=1, over_sampling_batch_size=1)
        rollout.permits = asyncio.Semaphore(1)
        batch = loop.run(rollout.rollout())
        assert ([s.reward for s in batch[0]], scored) == ([0.5, 0.5], [0, 1])

    def test_half_an_answer_is_not_scored(self, loop: VirtualLoop, engine: Engine) -> None:
        async def reward(args: Any, sample: Sample) -> float:
            assert sample.reward is None, "scored once"
            return 0.5

        rollout = rolling(engine, size=2, reward=reward)
        for left in ([4, 5], [8, 9]):
            assert all(s.reward == 0.5 for group in loop.run(rollout.rollout()) for s in group)
            assert indices(rollout.source.buffer)[0] == left
            assert all(s.reward is None for s in rollout.source.buffer[0])


class TestFanOut:
    @staticmethod
    def fanning(engine: Engine) -> Any:
        async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Any:
            done = await engine.generate(args, sample, params)
            return done if sample.metadata else [done, add(Sample(index=sample.index, metadata={"turn": 2}), 1, "stop")]

        return generate

    def test_a_member_of_many_samples_is_one_member(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, generate=self.fanning(engine), size=2)
        batch = loop.run(rollout.rollout())
        assert [[len(m) for m in g] for g in batch] == [[2, 2], [2, 2]]
        (group,) = rollout.source.buffer
        assert [[s.status.value for s in m] for m in group] == [["aborted", "completed"]] * 2
        group[0][0].metadata = group[1][0].metadata = {"turn": 1}
        engine.asked.clear()
        again = loop.run(rollout.rollout())
        assert [[s.status.value for s in m] for m in again[0]] == [["completed"] * 2] * 2
        assert [index for index, _ in engine.asked].count(4) == 1

    def test_without_partial_rollout_it_is_one_sample_again(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, generate=self.fanning(engine), partial_rollout=False)
        loop.run(rollout.rollout())
        assert rollout.source.buffer == [[Sample(group_index=2, index=2, prompt="r")]]


class TestAbort:
    def test_a_request_that_arrives_after_the_abort(self, loop: VirtualLoop, engine: Engine) -> None:
        """It has looked at the flag before; the engine is idle when it is asked to abort."""

        async def late(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
            if sample.index == 2:
                await asyncio.sleep(2.5)
            return await engine.send(sample)

        engine.takes = lambda sample: 3600.0 if sample.index == 2 else 1.0
        rollout = rolling(engine, generate=late)
        loop.run(rollout.rollout())
        assert engine.aborts == [1.0, 2.0, 3.0]
        assert (told(rollout), at_rest(rollout)) == ([("aborted", 1)], True)

    def test_an_engine_that_does_not_hear_at_first(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes, engine.deaf = (lambda sample: 3600.0 if sample.index == 2 else 1.0), 1
        loop.run(rolling(engine).rollout())
        assert engine.aborts == [1.0, 1.0 + ABORT_POLL_S]

    def test_an_engine_that_never_hears(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes, engine.deaf = (lambda sample: 3600.0 if sample.index == 2 else 1.0), 10**6
        rollout = rolling(engine)
        assert indices(loop.run(rollout.rollout())) == [[0], [1]]
        assert engine.aborts[-1] == ABORT_LIMIT_S and at_rest(rollout)

    def test_nothing_in_flight_is_no_engine_s_affair(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes = lambda sample: 1.0
        loop.run(rolling(engine).rollout())
        assert engine.aborts == []

    @pytest.mark.parametrize("dead", ["//a", "//here"])
    def test_a_dead_engine_and_a_dead_router(self, loop: VirtualLoop, engine: Engine, dead: str) -> None:
        """What they still run is cancelled, and the others are aborted."""
        engine.takes, engine.dead = (lambda sample: 3600.0 if sample.index == 2 else 1.0), {dead}
        rollout = rolling(engine)

        async def main() -> float:
            assert indices(await rollout.rollout()) == [[0], [1]]
            return loop.time()

        assert loop.run(main()) == pytest.approx(1 + ABORT_LIMIT_S)
        assert (told(rollout), at_rest(rollout), engine.running) == ([("pending", 0)], True, [])

    def test_a_cancellation_that_is_swallowed(self, loop: VirtualLoop, engine: Engine) -> None:
        async def stubborn(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
            if sample.index == 2:
                for _ in range(2):
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        add(sample, 1)
            return await engine.send(sample)

        rollout = rolling(engine, generate=stubborn)
        loop.run(rollout.rollout())
        assert told(rollout) == [("pending", 2)] and at_rest(rollout)

    def test_nothing_is_scored_while_the_flag_is_up(self, loop: VirtualLoop, engine: Engine) -> None:
        async def deaf(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
            await asyncio.sleep(engine.takes(sample))
            return add(sample, LENGTH, "stop")

        async def reward(args: Any, sample: Sample) -> float:
            assert not rollout.aborting
            return 1.0

        rollout = rolling(engine, generate=deaf, reward=reward)
        loop.run(rollout.rollout())
        assert told(rollout) == [("completed", LENGTH)]
        assert rollout.source.buffer[0][0].reward is None
        assert loop.run(rollout.rollout())[0][0].reward == 1.0


class TestFailures:
    @staticmethod
    def failing(engine: Engine, times: int, how: Any) -> Any:
        """The sample with index 0 fails at first."""
        left = [times]

        async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Any:
            if sample.index == 0 and left[0]:
                left[0] -= 1
                return how(sample)
            return await engine.generate(args, sample, params)

        return generate

    @staticmethod
    def refuses(sample: Sample) -> Sample:
        raise client.Refused("HTTP 400: no")

    @pytest.mark.parametrize("how", ["refused", "aborted", "nothing", "cancelled"])
    @pytest.mark.parametrize("times", [MAX_TRIES - 1, MAX_TRIES])
    def test_a_group_is_tried_again_but_not_for_ever(
        self, loop: VirtualLoop, engine: Engine, how: str, times: int
    ) -> None:
        def cancelled(sample: Sample) -> Sample:
            raise asyncio.CancelledError

        ways = {
            "refused": (self.refuses, r"Refused\('HTTP 400: no'\)"),
            "aborted": (lambda sample: add(sample, 0, "abort"), "it comes back aborted"),
            "nothing": (lambda sample: None, "generate gave no sample"),
            "cancelled": (cancelled, "CancelledError"),
        }
        act, says = ways[how]
        rollout = rolling(engine, generate=self.failing(engine, times, act), size=2)
        if times < MAX_TRIES:
            batch = loop.run(rollout.rollout())
            assert all(s.status is Status.COMPLETED for g in batch for s in g)
        else:
            with pytest.raises(RolloutError, match=f"^group 0 is not done after {MAX_TRIES} tries: .*{says}"):
                loop.run(rollout.rollout())
            assert sorted(indices(rollout.source.buffer)) == [[0, 1], [2, 3], [4, 5]]
            assert indices(loop.run(rollout.rollout())) != [], "a later rollout begins to count anew"
        assert [index for index, _ in engine.asked].count(1) == 1, "its sibling is generated once"
        assert at_rest(rollout)

    def test_a_retry_without_partial_rollout_begins_again(self, loop: VirtualLoop, engine: Engine) -> None:
        generate = self.failing(engine, 1, lambda sample: add(sample, 2, "abort"))
        rollout = rolling(engine, generate=generate, partial_rollout=False)
        assert loop.run(rollout.rollout())[0][0].weight_versions == ["1"]

    def test_a_reward_that_fails_is_asked_again_and_nothing_is_generated(
        self, loop: VirtualLoop, engine: Engine
    ) -> None:
        faults = [OSError("down")]

        async def reward(args: Any, sample: Sample) -> float:
            if faults:
                raise faults.pop()
            return 1.0

        rollout = rolling(engine, reward=reward)
        loop.run(rollout.rollout())
        assert [index for index, _ in engine.asked] == [0, 1, 2]

    @pytest.mark.parametrize("fully_async", [False, True])
    def test_a_source_that_runs_dry(self, loop: VirtualLoop, engine: Engine, fully_async: bool) -> None:
        rollout = rolling(engine, fully_async=fully_async)
        rollout.source.get_samples = lambda count: []
        with pytest.raises(RolloutError, match="the source gives no groups"):
            loop.run(rollout.rollout())

    def test_one_rollout_at_a_time(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine)

        async def main() -> Any:
            first = asyncio.create_task(rollout.rollout())
            await asyncio.sleep(0.5)
            with pytest.raises(RolloutError, match="a rollout is running"):
                await rollout.rollout()
            return await first

        assert indices(loop.run(main())) == [[0], [1]]


class TestFullyAsync:
    def test_the_others_run_on(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, fully_async=True, over_sampling_batch_size=4)

        async def main() -> None:
            assert indices(await rollout.rollout()) == [[0], [1]]
            assert (len(rollout.tasks), engine.aborts, loop.time()) == (3, [], 2.0)
            await asyncio.sleep(10)
            assert rollout.tasks == set(), "they end between the rollouts"
            assert indices(await rollout.rollout()) == [[2], [3]]
            assert loop.time() == 12.0
            assert indices(await rollout.rollout()) == [[4], [5]], "the surplus is in order"
            assert engine.most == 4
            await rollout.shutdown()
            await rollout.shutdown()

        loop.run(main())
        assert at_rest(rollout) and engine.aborts
        assert indices(rollout.source.buffer) == [[6], [7], [8]]
        assert indices(loop.run(rollout.rollout())) == [[6], [7]], "a later rollout works again"

    def test_fewer_in_flight_when_the_number_is_lowered(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine, fully_async=True, over_sampling_batch_size=4)

        async def main() -> None:
            await rollout.rollout()
            rollout.args.over_sampling_batch_size = 1
            await rollout.rollout()

        loop.run(main())
        assert [index for index, _ in engine.asked] == [0, 1, 2, 3, 4]

    def test_a_failure_between_two_rollouts_is_raised_by_the_next(self, loop: VirtualLoop, engine: Engine) -> None:
        async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
            if sample.index == 2:
                await asyncio.sleep(5)
                raise client.EngineError("gone")
            return await engine.generate(args, sample, params)

        rollout = rolling(engine, generate=generate, fully_async=True)

        async def main() -> None:
            assert indices(await rollout.rollout()) == [[0], [1]]
            await asyncio.sleep(60)
            await rollout.rollout()

        with pytest.raises(RolloutError, match="gone"):
            loop.run(main())
        assert sorted(indices(rollout.source.buffer)) == [[2], [3]] and at_rest(rollout)


class TestEnding:
    def test_shutdown_ends_a_rollout_that_waits(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes = lambda sample: 1.0 + 50 * (sample.index or 0)
        rollout = rolling(engine)

        async def main() -> None:
            running = asyncio.create_task(rollout.rollout())
            await asyncio.sleep(2)
            await asyncio.gather(rollout.shutdown(), rollout.shutdown())
            assert loop.time() == 2.0
            with pytest.raises(RolloutError, match=r"^shut down$"):
                await running

        loop.run(main())
        assert (indices(rollout.source.buffer), at_rest(rollout)) == ([[0], [1], [2]], True)
        assert told(rollout) == [("completed", LENGTH), ("aborted", 1), ("aborted", 1)]

    def test_shutdown_in_the_middle_of_the_abort(self, loop: VirtualLoop, engine: Engine) -> None:
        engine.takes, engine.deaf = (lambda sample: 3600.0 if sample.index == 2 else 1.0), 20
        rollout = rolling(engine)

        async def main() -> None:
            running = asyncio.create_task(rollout.rollout())
            await asyncio.sleep(2.5)
            await rollout.shutdown()
            with pytest.raises(RolloutError, match=r"^shut down$"):
                await running

        loop.run(main())
        assert (indices(rollout.source.buffer), at_rest(rollout)) == ([[0], [1], [2]], True)

    def test_the_flag_of_somebody_else_ends_a_rollout(self, loop: VirtualLoop, engine: Engine) -> None:
        rollout = rolling(engine)
        rollout.args.rollout_abort.set()
        with pytest.raises(RolloutError, match=r"^shut down$"):
            loop.run(rollout.rollout())
        assert (rollout.source.buffer, at_rest(rollout), engine.asked) == ([], True, [])

    def test_the_flag_of_the_trainer_is_used(self, engine: Engine) -> None:
        flag = asyncio.Event()
        rollout = rolling(engine, rollout_abort=flag)
        assert rollout.args.rollout_abort is flag and not rollout.aborting

    @pytest.mark.parametrize(("after", "partial"), [(0.0, True), (1.5, True), (1.5, False), (4.5, True)])
    def test_a_cancelled_rollout_loses_nothing(
        self, loop: VirtualLoop, engine: Engine, after: float, partial: bool
    ) -> None:
        """Before the groups begin, while they run, and in the middle of the abort."""
        engine.takes, engine.deaf = (lambda sample: 3600.0 if sample.index == 2 else 2.0), 10**6
        rollout = rolling(engine, partial_rollout=partial)

        async def main() -> None:
            running = asyncio.create_task(rollout.rollout())
            await asyncio.sleep(after)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        loop.run(main())
        assert sorted(indices(rollout.source.buffer)) == [[0], [1], [2]]
        assert at_rest(rollout) and not engine.running
        engine.takes, engine.deaf = (lambda sample: 1.0), 0
        assert len(loop.run(rollout.rollout())) == 2
