"""slime's rollout loop as a target, on a checkout in small: what is replaced, what is seen, what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import tokenizer
from harness.checkers import ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import PLAIN, STREAM, Called, Halted, Requested
from harness.rollouts import Aborting, Began, Broke, Ended, Event, Left, Restarted, RolloutHistory, Stopped
from harness.scenario import Scenario, Step
from harness.stage import Stage
from harness.targets import CannotJudge, slime_loop
from harness.targets.spec import TargetSpec, load_loop
from tests.unit.checkouts import FILES, fresh, write

ROLLOUT, SOURCE = "slime/rollout/sglang_rollout.py", "slime/rollout/data_source.py"
WORKER, STREAMING = "slime/rollout/fully_async_rollout.py", "slime/rollout/sglang_streaming_rollout.py"
HTTP, MISC, TYPES = "slime/utils/http_utils.py", "slime/utils/misc.py", "slime/utils/types.py"

LOOP = """
    import asyncio

    from tqdm import tqdm
    from transformers import AutoTokenizer

    from slime.rollout.rm_hub import async_rm, batched_async_rm
    from slime.utils.http_utils import post
    from slime.utils.misc import SingletonMeta, load_function
    from slime.utils.types import Sample


    class GenerateState(metaclass=SingletonMeta):
        def __init__(self, args):
            self.args, self.aborted, self.pending = args, False, {}
            self.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
            self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)


    async def generate(args, sample, sampling_params):
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = sample.tokens or tokenizer.encode(sample.prompt, add_special_tokens=False)
        asked = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        payload = {"input_ids": sample.tokens, "sampling_params": asked, "return_logprob": True}
        answer = await post(f"{url}/generate", payload)
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        sample.tokens = sample.tokens + [token for _, token, *_ in entries]
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + [logprob for logprob, *_ in entries]
        sample.response_length += len(entries)
        sample.response += answer["text"]
        sample.weight_versions.append(meta["weight_version"])
        ends = {"abort": "aborted", "stop": "completed", "length": "truncated"}
        sample.status = Sample.Status(ends[meta["finish_reason"]["type"]])
        return sample


    async def generate_and_rm(args, sample, params):
        state = GenerateState(args)
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            path = args.custom_generate_function_path
            sample = await (load_function(path) if path else generate)(args, sample, params)
        if isinstance(sample, list):
            for one, reward in zip(sample, await batched_async_rm(args, sample), strict=True):
                one.reward = reward
        elif sample.status != Sample.Status.ABORTED:
            sample.reward = await async_rm(args, sample)
        return sample


    async def generate_and_rm_group(args, group, sampling_params):
        return await asyncio.gather(*(generate_and_rm(args, sample, dict(sampling_params)) for sample in group))


    async def abort(args):
        state = GenerateState(args)
        state.aborted = True
        while state.pending:
            await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/abort_request", {"abort_all": True})
            await asyncio.wait(state.pending, timeout=1)
            state.ended += [task.result() for task in state.pending if task.done()]
            state.pending = {task: None for task in state.pending if not task.done()}


    async def generate_rollout_async(args, rollout_id, data_source):
        state = GenerateState(args)
        bar, done, state.ended = tqdm(total=args.rollout_batch_size), [], []
        while len(done) < args.rollout_batch_size:
            if not state.pending:
                for group in data_source(args.over_sampling_batch_size):
                    params = {"max_new_tokens": args.rollout_max_response_len}
                    state.pending[asyncio.create_task(generate_and_rm_group(args, group, params))] = None
            await asyncio.wait(state.pending, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in state.pending if task.done()]:
                del state.pending[task]
                if len(done) < args.rollout_batch_size:
                    done.append(task.result())
                    bar.update(1)
                else:
                    state.ended.append(task.result())
        bar.close()
        await abort(args)
        state.aborted = False
        return done, state.ended
    """
SOURCES = """
    import torch

    from slime.utils.data import Dataset
    from slime.utils.types import Sample


    class RolloutDataSourceWithBuffer:
        def __init__(self, args):
            self.args, self.buffer, self.count = args, [], 0
            self.dataset = Dataset(args.prompt_data, shuffle=args.rollout_shuffle)
            self.path = f"{args.save}/state.pt"

        def get_samples(self, num_samples):
            taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
            return taken + [self.new() for _ in range(num_samples - len(taken))]

        def new(self):
            prompt = self.dataset.samples[self.count % len(self.dataset)].prompt
            first = self.count * self.args.n_samples_per_prompt
            self.count += 1
            return [Sample(index=first + i, prompt=prompt) for i in range(self.args.n_samples_per_prompt)]

        def add_samples(self, samples):
            self.buffer += samples

        def save(self, rollout_id):
            torch.save({"count": self.count, "buffer": self.buffer}, self.path)

        def load(self, rollout_id=None):
            state = torch.load(self.path, weights_only=False)
            self.count, self.buffer = state["count"], state["buffer"]
    """
SPANNING = """
    import asyncio
    import queue

    from slime.rollout.sglang_rollout import generate_and_rm_group

    _global_worker = None


    class AsyncRolloutWorker:
        def __init__(self, args, data_buffer, concurrency=10):
            self.args, self.source, self.concurrency = args, data_buffer, concurrency
            self.running, self.output_queue, self.worker_thread = True, queue.Queue(maxsize=1), None

        async def _loop(self):
            active = {}
            while self.running:
                for task in [task for task in active if task.done()]:
                    del active[task]
                    self.output_queue.put(task.result(), block=False)
                while len(active) < self.args.over_sampling_batch_size:
                    (group,) = self.source.get_samples(1)
                    params = {"max_new_tokens": self.args.rollout_max_response_len}
                    active[asyncio.create_task(generate_and_rm_group(self.args, group, params))] = None
                await asyncio.sleep(1)
            self.worker_thread.join()

        def stop(self):
            self.running = False


    async def _generate_rollout_async(args, rollout_id, data_buffer):
        worker = _global_worker
        assert worker.worker_thread.is_alive()
        while worker.output_queue.qsize() < args.rollout_batch_size:
            await asyncio.sleep(1)
        taken = [worker.output_queue.get() for _ in range(args.rollout_batch_size)]
        return taken
    """
REWARDS = """
    async def async_rm(args, sample):
        raise AssertionError("no reward model is asked")

    batched_async_rm = async_rm
    """
DATA = """
    class Dataset:
        def __init__(self, path, **options):
            raise AssertionError("no file is read")
    """
STREAMS = """
    from slime.rollout.sglang_rollout import generate

    async def generate_streaming(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        sample.metadata = {"streamed": True}
        return sample
    """
TREE = {
    **FILES,
    ROLLOUT: LOOP,
    SOURCE: SOURCES,
    WORKER: SPANNING,
    STREAMING: STREAMS,
    "slime/rollout/rm_hub.py": REWARDS,
    "slime/utils/data.py": DATA,
    HTTP: FILES[HTTP].replace("return response.json()", "return response.json() if response.content else None"),
    MISC: FILES[MISC] + "\n\n        def load_function(path):\n            raise KeyError(path)\n",
    TYPES: FILES[TYPES]
    .replace(
        '            prompt: str = ""\n',
        '            prompt: str = ""\n            reward: float | None = None\n'
        "            weight_versions: list = field(default_factory=list)\n",
    )
    .replace('TRUNCATED = "truncated"', 'TRUNCATED = "truncated"\n                COMPLETED = "completed"'),
}
VOCABULARY = tokenizer.load()
Play = Callable[..., RolloutHistory]


@contextmanager
def staged(tree: Path, files: dict[str, str] | None = None, without: str = "") -> Iterator[Stage]:
    write(tree, {name: text for name, text in (TREE | (files or {})).items() if name != without})
    with fresh(), closing(Stage(slime_loop.load(str(tree), "abc"), VOCABULARY)) as made:
        yield made


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("slime")) as made:
        yield made


@pytest.fixture
def played(stage: Stage) -> Play:
    """The history of a scenario, on which no rule is broken."""

    def play(*steps: Step, mode: str = PLAIN, **given: Any) -> RolloutHistory:
        history = stage.run(Scenario(steps=steps, **{"budget": 2, **given}), mode)
        case = RolloutCase(mode, history)
        found = {rule: rollout_checker(rule)(case) for rule in ROLLOUT_RULE_IDS}
        assert {rule: one for rule, one in found.items() if isinstance(one, Finding)} == {}
        return history

    return play


def told(history: RolloutHistory, *kinds: type) -> list[Any]:
    return [event for event in history.events if isinstance(event, kinds)]


def test_a_rollout_and_what_is_seen_of_it(stage: Stage, played: Play) -> None:
    history = played(over=2, members=2, permits=3)
    assert (stage.target.name, stage.target.modes, dict(stage.target.absent)) == ("slime@abc", (PLAIN, STREAM), {})
    assert "torch" in stage.target.stubbed
    (end,) = told(history, Ended)
    assert [m.sample for group in end.groups for m in group] == [0, 1]
    assert [m.sample for group in end.buffer for m in group] == [2, 3]
    assert end.left == Left((), (), (3, 3))
    for group in end.groups:
        assert all(m.scored and m.versions == ("0",) and m.spans is None for m in group)
    assert not any(m.scored for group in end.buffer for m in group)
    assert dict(history.prompts) == {0: (97,), 1: (97,), 2: (98,), 3: (98,)}


def test_aborted_groups_come_back_from_the_buffer(played: Play) -> None:
    history = played(Step("tokens", 1), Step("rollout"), over=2)
    assert [(c.sample, c.view.response_length) for c in told(history, Called)][:4] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert len(told(history, Ended)) == 2 and told(history, Aborting)


def test_a_restart_saves_and_loads_in_another_process(played: Play) -> None:
    history = played(Step("tokens", 1), Step("budget", 0, 3), Step("rollout"), over=2)
    (back,) = told(history, Restarted)
    assert back.before == back.after and [m.sample for g in back.after for m in g] == [1]
    assert [(b.rollout, b.budget) for b in told(history, Began)] == [(1, 2), (2, 3)]


def test_a_stop_brings_the_rollout_to_its_end(played: Play) -> None:
    history = played(Step("stop"))
    assert len(told(history, Ended)) == 1 and len(told(history, Stopped)) == 2


@pytest.mark.parametrize("fan_out", [False, True])
def test_streaming_is_a_custom_generate_function(stage: Stage, played: Play, fan_out: bool) -> None:
    history = played(mode=STREAM, fan_out=fan_out)
    assert len(told(history, Called)) == len(told(history, Requested)) == 1
    (end,) = told(history, Ended)
    (member,) = end.groups[0]
    assert len(member.views) == 1 and member.scored


def test_lists_of_samples_are_made_in_plain_mode_too(played: Play) -> None:
    assert len(told(played(fan_out=True), Ended)) == 1


def test_other_custom_functions_are_slime_s_affair(stage: Stage) -> None:
    with pytest.raises(KeyError, match="other"):
        stage.target._rollout.load_function("other")  # type: ignore[attr-defined]


def test_a_fully_asynchronous_rollout_goes_on_between_two(played: Play) -> None:
    history = played(Step("tokens", 0, 9), Step("rollout"), Step("tokens", 1), Step("restart"), spanning=True, over=2)
    assert [e.rollout for e in told(history, Ended)] == [1, 2], "more is done than the queue was made for"
    assert len(told(history, Restarted)) == 1 and told(history, Stopped)[-1].left.running == ()


def test_a_worker_that_was_stopped_is_started_again(played: Play) -> None:
    history = played(Step("end"), Step("stop"), Step("rollout"), spanning=True)
    assert [e.rollout for e in told(history, Ended)] == [1, 2]


def test_a_sample_without_a_number(stage: Stage) -> None:
    class Unnumbered:
        index = None

    assert stage.target.index(Unnumbered()) == -1 and stage.target.versions(Unnumbered()) is None


def test_the_process_has_its_own_files(stage: Stage) -> None:
    target: Any = stage.target
    folder = Path(target._folder.name)
    assert folder.is_dir()


# Other forms


def test_a_loop_whose_output_names_its_samples(tmp_path: Path) -> None:
    with_name = LOOP.replace("return done, state.ended", "return Output(done)")
    named = "    class Output:\n        def __init__(self, samples):\n            self.samples = samples\n\n"
    files = {ROLLOUT: with_name.replace("    async def abort(", named + "\n    async def abort(")}
    files[WORKER] = SPANNING.replace("return taken", "return Output(taken)").replace(
        "import generate_and_rm_group", "import Output, generate_and_rm_group"
    )
    with staged(tmp_path, files) as made:
        for spanning in (False, True):
            (end,) = told(made.run(Scenario(budget=2, spanning=spanning), PLAIN), Ended)
            assert [m.sample for group in end.groups for m in group] == [0]


def test_a_loop_without_permits_has_none(tmp_path: Path) -> None:
    lines = LOOP.replace("            self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)\n", "")
    files = {ROLLOUT: lines.replace("async with state.semaphore:", "if True:"), SOURCE: SOURCES}
    with staged(tmp_path, files) as made:
        (end,) = told(made.run(Scenario(budget=2), PLAIN), Ended)
        assert end.left.permits is None


def test_a_data_source_that_does_not_use_torch(tmp_path: Path) -> None:
    lines = SOURCES.replace("import torch", "import copy").replace(
        'torch.save({"count": self.count, "buffer": self.buffer}, self.path)', "pass"
    )
    with staged(tmp_path, {SOURCE: lines}) as made:
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


def test_a_revision_without_streaming_or_a_worker_says_so(tmp_path: Path) -> None:
    with staged(tmp_path, {STREAMING: "x = 1"}, without=WORKER) as made:
        with pytest.raises(CannotJudge, match=r"^slime@abc has no stream mode$"):
            made.run(Scenario(), STREAM)
        with pytest.raises(CannotJudge, match=r"^slime@abc has no fully-async rollout$") as error:
            made.run(Scenario(spanning=True), PLAIN)
        assert error.value.not_applicable
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


def test_the_data_source_s_older_place(tmp_path: Path) -> None:
    older = {"slime/ray/__init__.py": "", "slime/ray/rollout_data_source.py": SOURCES}
    with staged(tmp_path, older, without=SOURCE) as made:
        (end,) = told(made.run(Scenario(budget=2), PLAIN), Ended)
        assert [m.sample for group in end.groups for m in group] == [0]


def test_a_revision_that_takes_no_lists_of_samples_says_so(tmp_path: Path) -> None:
    with staged(tmp_path, {ROLLOUT: LOOP.replace("isinstance(sample, list)", "type(sample) is list")}) as made:
        with pytest.raises(CannotJudge, match=r"^slime@abc takes no lists of samples$") as error:
            made.run(Scenario(fan_out=True), PLAIN)
        assert error.value.not_applicable
        assert told(made.run(Scenario(budget=2), PLAIN), Ended)


@pytest.mark.parametrize(
    ("field", "last"),
    [
        ("args.no_such_field", Halted(0, 0, "view", "slime@abc wants more: args has no field 'no_such_field'")),
        ("state.no_such", Broke(1, "AttributeError", "'GenerateState' object has no attribute 'no_such'", False, ())),
    ],
    ids=["ours", "slime's own"],
)
def test_a_field_of_args_that_is_not_known_is_no_fault_of_slime_s(tmp_path: Path, field: str, last: Event) -> None:
    bar = "bar, done, state.ended = "
    with staged(tmp_path, {ROLLOUT: LOOP.replace(bar, f"{field}\n        {bar}")}) as made:
        assert made.run(Scenario(budget=2), PLAIN).events == (Began(1, 2), last)


@pytest.mark.parametrize(
    ("file", "old", "new", "missing"),
    [
        (SOURCE, "class RolloutDataSourceWithBuffer", "class RolloutDataSource", "no data source with a buffer"),
        (ROLLOUT, "async def generate_rollout_async", "async def rollout", "no generate_rollout_async"),
        (ROLLOUT, "generate_and_rm_group", "group", "no generate_and_rm_group"),
        (ROLLOUT, "generate_and_rm(", "one(", "no generate_and_rm"),
        (ROLLOUT, "SingletonMeta, load_function", "SingletonMeta", "no load_function"),
        (ROLLOUT, "abort(", "abort_all(", "no abort"),
        (SOURCE, "", "", "no slime.rollout.data_source"),
    ],
    ids=["buffer", "loop", "group", "member", "load_function", "abort", "source"],
)
def test_a_revision_without_a_part_cannot_be_judged(
    tmp_path: Path, file: str, old: str, new: str, missing: str
) -> None:
    files = {**TREE, file: TREE[file].replace(old, new) if old else TREE[file]}
    files.pop(WORKER)
    write(tmp_path, {name: text for name, text in files.items() if old or name != file})
    with fresh(), pytest.raises(CannotJudge, match=f"^slime@abc has {missing}$") as error:
        load_loop(TargetSpec("slime", root=str(tmp_path), revision="abc"))
    assert error.value.not_applicable


def test_tasks_are_known_by_their_files() -> None:
    async def main() -> tuple[str, str]:
        task = asyncio.ensure_future(asyncio.sleep(0))
        other: Any = type("Other", (), {"get_coro": lambda self: None})()
        return slime_loop._file(task), slime_loop._file(other)

    here, nowhere = asyncio.run(main())
    assert here.endswith("tasks.py") and nowhere == ""
