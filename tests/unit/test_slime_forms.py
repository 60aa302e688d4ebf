"""The forms that slime has had over time, each in small: what is picked, what is passed, what is said to be missing."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from harness.history import PLAIN, Requested, Returned
from harness.isolation import Worker
from harness.schedule import Attempt, Schedule
from harness.targets.spec import TargetSpec
from tests.unit.checkouts import FILES, python, write

ROLLOUT = "slime/rollout/sglang_rollout.py"
STREAMING = "slime/rollout/sglang_streaming_rollout.py"
TYPES = "slime/utils/types.py"
HTTP = "slime/utils/http_utils.py"
MISC = "slime/utils/misc.py"

LOAD_AND_SAY = """
    try:
        target = load(sys.argv[1], "abc")
    except CannotJudge as error:
        print(error.not_applicable, error)
    """


def one_call(*, images: int = 0, stream: bool = False) -> str:
    """A script that calls once and prints what the sample holds then."""
    return f"""
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            sample = target.new_sample(Start("hi", images={images}))
            sample = await target.generate(sample, {{"max_new_tokens": 8}}, stream={stream})
            view = target.view(sample)
            print(view.tokens, view.response, view.status)
            await target.close()
        asyncio.run(main())
        """


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    write(root, FILES)
    return root


def change(tree: Path, file: str, old: str, new: str) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1))


# Streaming

STREAMS = """
    from slime.rollout.sglang_rollout import generate

    async def generate_streaming(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        sample.response = "streamed"
        return sample
    """


def test_a_revision_that_streams_has_both_modes(tree: Path) -> None:
    write(tree, {STREAMING: STREAMS})
    said = python(one_call(stream=True) + "print(target.modes, target.absent)", tree)
    assert said.splitlines() == ["(104, 105, 7, 7) streamed aborted", "('plain', 'stream') {}"]


def test_streaming_that_does_not_import_leaves_plain_to_be_judged(tree: Path) -> None:
    write(tree, {STREAMING: "import slime.gone"})
    said = python("target = load(sys.argv[1], 'abc'); print(target.modes, target.absent['stream'])", tree)
    start = "('plain',) importing slime.rollout.sglang_streaming_rollout failed: ModuleNotFoundError: "
    assert said == start + "No module named 'slime.gone'"


# The first revisions: another name, no state of its own, a client a call

EARLY = {
    MISC: "",
    HTTP: """
        from httpx import AsyncClient

        async def post(url, payload):
            async with AsyncClient() as client:
                return (await client.post(url, json=payload)).json()
        """,
    "slime/rollout/sglang_example.py": """
        from slime.utils.http_utils import post
        from slime.utils.types import Sample

        TOKENIZER = SEMAPHORE = "left over"
        EVAL_PROMPT_DATASET = {"left": "over"}

        async def generate_one_sample_vanilla(args, tokenizer, sample, sampling_params):
            sample.response = f"{TOKENIZER} {SEMAPHORE} {EVAL_PROMPT_DATASET}"
            sample.tokens = tokenizer.encode(sample.prompt)
            await post(f"http://{args.sglang_router_ip}:1/generate", {})
            sample.status = Sample.Status.TRUNCATED
            return sample
        """,
}


def test_an_early_revision_is_reset_and_given_our_tokenizer(tree: Path) -> None:
    (tree / ROLLOUT).unlink()
    write(tree, EARLY)
    said = python(one_call() + "print(target.name, target.modes, len(asked))", tree)
    assert said.splitlines() == ["(104, 105) None None {} truncated", "slime@abc ('plain',) 1"]


def test_a_state_that_is_no_singleton_is_not_made_for_it(tree: Path) -> None:
    """Then the abort flag is one that nobody reads; what the revision does is its own affair."""
    change(tree, ROLLOUT, "class GenerateState(metaclass=SingletonMeta):", "class GenerateState:")
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            target.set_abort(True)
            await target.close()
        asyncio.run(main())
        print(type(target._state).__name__, target._state.aborted)
        """
    assert python(script, tree) == "SimpleNamespace True"


def test_a_client_for_so_many_connections(tree: Path) -> None:
    change(
        tree, HTTP, "def init_http_client(args):", "def init_http_client(connections):\n    assert connections == 512"
    )
    assert python(one_call(), tree) == "(104, 105, 7, 7)  aborted"


def test_before_partial_rollout_there_is_nothing_to_judge(tree: Path) -> None:
    change(tree, TYPES, "class Status(Enum):", "class Other(Enum):")
    change(tree, TYPES, "status: Status = Status.PENDING", "status: str = 'pending'")
    said = "True Sample has no Status at abc: there is no partial rollout yet"
    assert python(LOAD_AND_SAY, tree) == said


def test_samples_without_log_probabilities_are_said_to_have_no_place_for_them(tree: Path) -> None:
    change(tree, TYPES, "    rollout_log_probs: list[float] | None = None\n", "")
    script = """
        target = load(sys.argv[1], "abc")
        view = target.view(target.new_sample(Start("hi", (104, 105, 9), 1, "x", (-1.0,))))
        print(view.has_logprobs, view.logprobs, view.tokens)
        """
    assert python(script, tree) == "False None (104, 105, 9)"


# Samples

JSON_FORMS = {
    "no method": ("def to_dict(self):", "def as_dict(self):", "slime@abc has no to_dict and from_dict"),
    "no form": (
        '"status": self.status.value}',
        '"status": self.status}',
        "slime@abc has no JSON form of a sample: Object of type Status is not JSON serializable",
    ),
}


@pytest.mark.parametrize(("old", "new", "said"), JSON_FORMS.values(), ids=JSON_FORMS.keys())
def test_samples_that_do_not_go_through_JSON_are_no_fault(tree: Path, old: str, new: str, said: str) -> None:
    change(tree, TYPES, old, new)
    script = """
        target = load(sys.argv[1], "abc")
        try:
            target.round_trip(target.new_sample(Start("hi")))
        except CannotJudge as error:
            print(error.not_applicable, error)
        """
    assert python(script, tree) == f"True {said}"


def test_offsets_count_the_spans_between_them(tree: Path) -> None:
    script = """
        target = load(sys.argv[1], "abc")
        sample = target.new_sample(Start("hi"))
        sample.rollout_top_p_token_offsets = [0, 2, 5]
        print(dict(target.view(sample).arrays))
        """
    assert python(script, tree) == "{'rollout_top_p_token_offsets': 2}"


def test_an_AttributeError_of_the_revision_is_its_own(tree: Path) -> None:
    change(tree, ROLLOUT, "state = GenerateState(args)", "sample.no_such_field")
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            await target.generate(target.new_sample(Start("hi")), {}, stream=False)
        try:
            asyncio.run(main())
        except AttributeError as error:
            print(error, target.missing_args())
        """
    assert python(script, tree) == "'Sample' object has no attribute 'no_such_field' ()"


# Images

IMAGES = {
    TYPES: (
        "metadata: dict =",
        "multimodal_inputs: dict = None\n    multimodal_train_inputs: dict = None\n    metadata: dict =",
    ),
    ROLLOUT: (
        'url = f"http',
        """if sample.multimodal_inputs:
        images = [encode_image_for_rollout_engine(i) for i in sample.multimodal_inputs["images"]]
        sample.response = str((images[0][:10], state.processor(text=sample.prompt, images=images)))
    else:
        sample.response = str(state.processor)
    url = f"http""",
    ),
}


def with_images(tree: Path) -> None:
    for file, (old, new) in IMAGES.items():
        change(tree, file, old, new)
    change(tree, ROLLOUT, "self.aborted = False", "self.aborted, self.processor = False, load_processor(args)")
    names = "def load_processor(*_): raise AssertionError\nencode_image_for_rollout_engine = load_processor\n"
    write(tree, {ROLLOUT: names + (tree / ROLLOUT).read_text()})


def test_images_reach_the_revision_s_own_code(tree: Path) -> None:
    with_images(tree)
    answer = "{'input_ids': [[104, 105]], 'attention_mask': [[1, 1]], 'pixel_values': [[0.0], [0.0]]}"
    assert python(one_call(images=2), tree) == f"(104, 105, 7, 7) ('data:image', {answer}) aborted"


def test_a_sample_without_images_finds_no_processor(tree: Path) -> None:
    """Some revisions hand every sample to a processor that is there."""
    with_images(tree)
    assert python(one_call(), tree) == "(104, 105, 7, 7) None aborted"


def test_a_sample_from_a_buffer_has_its_pixels(tree: Path) -> None:
    with_images(tree)
    script = """
        target = load(sys.argv[1], "abc")
        sample = target.new_sample(Start("hi", (104, 105, 9), 1, "x", (-1.0,), images=2))
        print(len(sample.multimodal_inputs["images"]), sample.multimodal_train_inputs, target.view(sample).status)
        """
    assert python(script, tree) == "2 {'pixel_values': [[0.0], [0.0]]} aborted"


# December 2025: every prompt through the chat template


def test_a_chat_template_adds_nothing(tree: Path) -> None:
    with_images(tree)  # these take images from a prompt of chat messages only
    names = """
def prepare_model_inputs(prompt, tokenizer):
    text = tokenizer.apply_chat_template(prompt, tokenize=False)
    assert tokenizer.eos_token_id == 0
    return tokenizer(text)["input_ids"]
"""
    write(tree, {ROLLOUT: (tree / ROLLOUT).read_text() + names})
    inputs = "prepare_model_inputs(sample.prompt, state.tokenizer)"
    change(tree, ROLLOUT, "state.tokenizer.encode(sample.prompt)", inputs)
    calls = "Letters.__call__ = lambda self, text: {'input_ids': self.encode(text)}\n"
    assert python(calls + dedent(one_call()), tree) == "(104, 105, 7, 7) None aborted"
    script = """
        target = load(sys.argv[1], "abc")
        try:
            target.new_sample(Start("hi", images=1))
        except CannotJudge as error:
            print(error.not_applicable, error)
        """
    assert python(script, tree) == "True slime@abc takes no images beside a prompt"


# The client


def test_a_client_is_kept_for_its_loop_and_made_anew_for_another(tree: Path) -> None:
    script = """
        target = load(sys.argv[1], "abc")
        http, clients = sys.modules["slime.utils.http_utils"], []
        async def main(close):
            for _ in range(2):
                target.reset(environment)
                clients.append(http._http_client)
            if close:
                await target.close()
                print(http._http_client, clients[-1].is_closed)
        asyncio.run(main(close=False))
        asyncio.run(main(close=True))
        print([clients.index(c) for c in clients], clients[0].is_closed, clients[0]._trust_env)
        async def end():
            await target.close()
            print("nothing to close")
        asyncio.run(end())
        """
    assert python(script, tree).splitlines() == ["None True", "[0, 0, 2, 2] False False", "nothing to close"]


# In the process it is meant for


def test_a_worker_serves_a_checkout(tree: Path) -> None:
    change(tree, ROLLOUT, '"input_ids":', '"return_logprob": True, "input_ids":')
    with Worker(TargetSpec("slime", root=str(tree), revision="abc")) as worker:
        assert (worker.ready.name, worker.ready.modes) == ("slime@abc", (PLAIN,))
        assert {"ray", "torch"} <= set(worker.ready.stubbed)
        history = worker.run(Schedule(budget=3, attempts=(Attempt("abort", after=1),)), PLAIN)
    assert [e.params["max_new_tokens"] for e in history.events if isinstance(e, Requested)][:2] == [3, 2]
    assert [e.view.status for e in history.events if isinstance(e, Returned)][:2] == ["aborted", "truncated"]
