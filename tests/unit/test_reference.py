"""The reference implementation where the rules do not look: arithmetic, the sample's surface, and bad wires."""

from __future__ import annotations

import asyncio
import copy
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import tokenizer
from harness.history import MODES, PLAIN, STREAM, History, Requested, Returned, SampleView
from harness.loop import VirtualLoop
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.targets.function import FunctionTarget, reference
from reference_impl import budget, client
from reference_impl.generate import generate, pairs, prepare
from reference_impl.generate_streaming import Stream, generate_streaming
from reference_impl.sample import Sample, Status

COUNTS = st.integers(0, 60)


class TestBudget:
    @settings(deadline=None)
    @given(COUNTS, st.none() | COUNTS, COUNTS, COUNTS)
    def test_allowance(self, limit: int, context: int | None, prompt: int, kept: int) -> None:
        """As many as can be added one at a time."""
        added = 0
        while kept + added < limit and (context is None or prompt + kept + added < context):
            added += 1
        assert budget.allowance(limit, context, prompt, kept) == added

    @settings(deadline=None)
    @given(COUNTS, COUNTS, COUNTS)
    def test_remaining_minimum(self, minimum: int, kept: int, ask: int) -> None:
        """As many as are missing, one at a time, while the ask has room."""
        missing = 0
        while kept + missing < minimum and missing < ask:
            missing += 1
        assert budget.remaining_minimum(minimum, kept, ask) == missing

    @settings(deadline=None)
    @given(COUNTS, COUNTS)
    def test_clip(self, tokens: int, ask: int) -> None:
        assert budget.clip(tokens, ask) == len(range(tokens)[:ask])

    @settings(deadline=None)
    @given(COUNTS, st.none() | COUNTS, COUNTS, st.lists(COUNTS, max_size=6))
    def test_never_past_a_limit(self, limit: int, context: int | None, prompt: int, delivered: list[int]) -> None:
        """Whatever the engine delivers, attempt after attempt, clipped: r <= B and P + r <= C from the start on."""
        kept = 0
        for tokens in delivered:
            kept += budget.clip(tokens, budget.allowance(limit, context, prompt, kept))
        assert kept <= limit
        assert context is None or kept == 0 or prompt + kept <= context

    def test_the_numbers_of_slime_2260(self) -> None:
        """B 24576, C 40960, 19202 tokens of input at the second attempt, one of them prompt."""
        assert budget.allowance(24576, 40960, 1, 19201) == 24576 - 19201


def sampled(**fields: Any) -> Sample:
    return Sample(**{"prompt": "ab", "index": 3, **fields})


probabilities = st.floats(-50, 0, allow_nan=False)
appended = st.lists(st.tuples(st.lists(st.tuples(st.integers(0, 300), probabilities), max_size=4), st.booleans()))


SLIME = (
    *("group_index", "index", "prompt", "tokens", "multimodal_inputs", "response", "response_length", "label"),
    *("reward", "loss_mask", "weight_versions", "rollout_log_probs", "status", "metadata", "session_id"),
)


class TestSample:
    def test_surface(self) -> None:
        """Fields, statuses and defaults are those that slime's custom generate functions use."""
        sample = Sample()
        assert [name for name in SLIME if not hasattr(sample, name)] == []
        assert {s.name: s.value for s in Sample.Status} == {
            n: n.lower() for n in ("PENDING", "COMPLETED", "TRUNCATED", "ABORTED", "FAILED")
        }
        assert (sample.tokens, sample.response, sample.response_length) == ([], "", 0)
        assert sample.loss_mask is sample.rollout_log_probs is None
        assert sample.status is Status.PENDING

    def test_samples_share_no_lists(self) -> None:
        one, two = Sample(), Sample()
        one.tokens.append(1)
        one.metadata["a"] = 1
        assert (two.tokens, two.metadata) == ([], {})

    @settings(deadline=None)
    @given(appended, st.sampled_from(list(Sample.Status)))
    def test_json(self, parts: list[tuple[list[tuple[int, float]], bool]], status: Sample.Status) -> None:
        sample = sampled(tokens=[256], metadata={"a": [1, None]}, label="é", status=status, session_id="s")
        for part, trainable in parts:
            sample.append_response_tokens(
                None, tokens=[t for t, _ in part], log_probs=[p for _, p in part], trainable=trainable, text="é"
            )
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample

    def test_unknown_keys_become_attributes(self) -> None:
        sample = Sample.from_dict(sampled().to_dict() | {"rollout_id": 7})
        assert vars(sample)["rollout_id"] == 7

    def test_unknown_keys_survive_the_buffer(self) -> None:
        sample = Sample.from_dict(sampled().to_dict() | {"rollout_id": 7})
        assert sample.to_dict()["rollout_id"] == 7

    @settings(deadline=None)
    @given(appended)
    def test_lists_stay_aligned(self, parts: list[tuple[list[tuple[int, float]], bool]]) -> None:
        sample = sampled(tokens=[256])
        mask: list[int] = []
        probs: list[float] = []
        for part, trainable in parts:
            sample.append_response_tokens(
                tokens=[t for t, _ in part], log_probs=[p for _, p in part], trainable=trainable
            )
            mask += [int(trainable)] * len(part)
            probs += [p if trainable else 0.0 for _, p in part]
            assert len(sample.tokens) - 1 == sample.response_length == len(mask)
            assert (sample.loss_mask or []) == mask
            assert (sample.rollout_log_probs or []) == probs
            assert sample.prompt_ids == [256]

    def test_tokens_of_a_tool(self) -> None:
        sample = sampled(tokens=[256])
        sample.append_response_tokens(tokens=[65], log_probs=[-1.5], text="A")
        sample.append_response_tokens(tokens=[66, 67], trainable=False, text="BC")
        assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 0], [-1.5, 0.0, 0.0])
        assert (sample.response, sample.status) == ("ABC", Status.PENDING)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"tokens": [1, 2], "log_probs": [-1.0]},
            {"tokens": [1], "log_probs": None},
            {"tokens": [1], "log_probs": [-1.0, -2.0]},
            {"tokens": [], "log_probs": [-1.0]},
            {"tokens": ["x"], "log_probs": [-1.0]},
        ],
    )
    def test_what_does_not_fit_is_refused(self, wrong: dict[str, Any]) -> None:
        sample = sampled(tokens=[256, 65], response_length=1, rollout_log_probs=[-1.0], response="A")
        before = copy.deepcopy(sample)
        with pytest.raises(ValueError, match=r".+"):
            sample.append_response_tokens(**wrong, text="x", meta_info={"finish_reason": {"type": "stop"}})
        assert sample == before

    def test_a_sample_that_is_misaligned_already_is_refused(self) -> None:
        sample = sampled(tokens=[256, 65], response_length=1)
        before = copy.deepcopy(sample)
        with pytest.raises(ValueError, match="1 tokens are kept with 0"):
            sample.append_response_tokens(tokens=[66], log_probs=[-1.0])
        assert sample == before

    @pytest.mark.parametrize(
        ("finish", "status"),
        [
            ({"type": "stop", "matched": 2}, Status.COMPLETED),
            ({"type": "length", "length": 1}, Status.TRUNCATED),
            ({"type": "abort", "message": "Aborted"}, Status.ABORTED),
            (None, Status.PENDING),
            ({"type": "tool_calls"}, Status.PENDING),
            ({}, Status.PENDING),
        ],
    )
    def test_status(self, finish: dict[str, Any] | None, status: Status) -> None:
        sample = sampled()
        sample.append_response_tokens(meta_info={"finish_reason": finish, "weight_version": 3})
        assert (sample.status, sample.weight_versions) == (status, ["3"])

    def test_terminal_info_on_request_only(self) -> None:
        sample = sampled()
        sample.append_response_tokens(meta_info={"finish_reason": {"type": "stop"}}, update_terminal_info=False)
        assert sample.status is Status.PENDING


# Server-sent events as bytes


class _Content:
    def __init__(self, segments: list[bytes]) -> None:
        self._segments = segments

    async def iter_any(self) -> AsyncIterator[bytes]:
        for segment in self._segments:
            yield segment


def read(*segments: bytes) -> list[dict[str, Any]]:
    response: Any = Namespace(content=_Content(list(segments)))

    async def collect() -> list[dict[str, Any]]:
        return [event async for event in client.events(response)]

    return asyncio.run(collect())


class TestEvents:
    def test_lines(self) -> None:
        assert read(b'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n') == [{"a": 1}, {"a": 2}]

    def test_crlf(self) -> None:
        assert read(b'data: {"a": 1}\r\n\r\ndata: [DONE]\r\n\r\n') == [{"a": 1}]

    def test_crlf_split_between_the_two(self) -> None:
        assert read(b'data: {"a": 1}\r', b"\n\r", b'\ndata: {"a": 2}\r\n\r\n') == [{"a": 1}, {"a": 2}]

    def test_comments_and_other_fields(self) -> None:
        assert read(b': ping\n\nevent: message\nid: 1\nretry: 5\ndata: {"a": 1}\n\n:\n\n') == [{"a": 1}]

    def test_no_space_after_the_colon(self) -> None:
        assert read(b'data:{"a": 1}\n\ndata:[DONE]\n\n') == [{"a": 1}]

    def test_a_line_longer_than_a_reader_s_limit(self) -> None:
        """aiohttp's readline refuses lines over 128 KiB; a cumulative event of a long answer is longer."""
        long = {"ids": list(range(100_000))}
        data = b"data: " + json.dumps(long).encode() + b"\n\n"
        assert len(data) > 128 * 1024
        assert read(*(data[i : i + 4096] for i in range(0, len(data), 4096))) == [long]

    @settings(deadline=None)
    @given(st.lists(st.text(alphabet="aé日\u2028\u0085\U0001f600", max_size=4), max_size=4), st.integers(1, 7))
    def test_any_split(self, texts: list[str], size: int) -> None:
        """A segment may end inside a character, and U+2028 is no line end."""
        events = [{"text": t} for t in texts]
        data = b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in events)
        assert read(*(data[i : i + size] for i in range(0, len(data), size))) == events

    def test_what_is_no_json_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="Expecting"):
            read(b"data: {oops\n\n")

    def test_a_line_cut_off_is_not_an_event(self) -> None:
        assert read(b'data: {"a": 1}\n\ndata: {"a": ') == [{"a": 1}]


def told(ids: list[int], total: int, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-float(i), i, None] for i in ids],
        "completion_tokens": total,
        "finish_reason": finish and {"type": finish},
    }
    return {"text": "", "output_ids": ids, "meta_info": meta | extra}


class TestStream:
    def test_cumulative(self) -> None:
        stream = Stream()
        for event in (told([1], 1), told([1, 2], 2), told([1, 2], 2), told([1, 2, 3], 3, "stop")):
            stream.add(event)
        assert (stream.tokens, stream.log_probs) == ([1, 2, 3], [-1.0, -2.0, -3.0])
        assert stream.finish == {"type": "stop"}

    def test_incremental(self) -> None:
        stream = Stream()
        for event in (told([1], 1), told([2, 3], 3), told([], 3), told([4], 4, "length")):
            stream.add(event)
        assert stream.tokens == [1, 2, 3, 4]

    def test_the_first_event_is_both(self) -> None:
        """[1, 1] then [1, 1, 1]: an increment could look like a repetition; completion_tokens decides."""
        cumulative, incremental = Stream(), Stream()
        for event in (told([1, 1], 2), told([1, 1, 1], 3)):
            cumulative.add(event)
        for event in (told([1, 1], 2), told([1, 1, 1], 5)):
            incremental.add(event)
        assert (len(cumulative.tokens), len(incremental.tokens)) == (3, 5)

    @pytest.mark.parametrize("event", [told([1, 9], 3), told([9, 2, 3], 3), told([], 7), told([1], 1)])
    def test_what_does_not_continue_is_refused(self, event: dict[str, Any]) -> None:
        stream = Stream()
        stream.add(told([1, 2], 2))
        with pytest.raises(client.MalformedReply):
            stream.add(event)
        assert stream.tokens == [1, 2]

    @pytest.mark.parametrize("field", ["output_ids", "completion_tokens"])
    def test_tokens_without_log_probabilities(self, field: str) -> None:
        event: dict[str, Any] = {"output_ids": [1]} if field == "output_ids" else {"meta_info": {field: 1}}
        with pytest.raises(client.MalformedReply):
            pairs(event)

    def test_ids_are_read_from_the_log_probabilities(self) -> None:
        """0.5.9 loses ids from output_ids when events pile up."""
        assert pairs(told([1, 2], 2) | {"output_ids": [2]})[0] == [1, 2]


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "message", "kind"),
        [
            (400, "max_new_tokens must be at least 0, got -1.", client.Refused),
            (404, "", client.Refused),
            (None, "anything", client.Refused),
            (429, "slow down", client.Transient),
            (500, "Internal Server Error", client.Transient),
            (503, "The request queue is full.", client.Transient),
            (400, "Requested token count exceeds the model's maximum context length of 256", client.InputTooLong),
            (400, "Input length (250 tokens) exceeds the maximum allowed length (250 tokens).", client.InputTooLong),
            (None, "The input (256 tokens) is longer than the model's context length (256", client.InputTooLong),
        ],
    )
    def test_kinds(self, code: int | None, message: str, kind: type[Exception]) -> None:
        assert type(client.error(code, message)) is kind

    def test_a_refusal_is_no_transient_fault(self) -> None:
        assert not issubclass(client.Refused, client.Transient)


# One attempt, on a wire of our own


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


def arguments(**given: Any) -> Any:
    return Namespace(
        **{"sglang_router_ip": "127.0.0.1", "sglang_router_port": 1, "tokenizer": tokenizer.load()} | given
    )


Wire = Callable[[Callable[[], AsyncIterator[dict[str, Any]]]], None]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """Replaces HTTP: the given events are what the stream brings."""

    def use(events: Callable[[], AsyncIterator[dict[str, Any]]]) -> None:
        async def ask(args: Any, payload: Any, consume: Any) -> Any:
            return await consume(None)

        monkeypatch.setattr(client, "ask", ask)
        monkeypatch.setattr(client, "events", lambda response: events())

    return use


class TestStreaming:
    def test_a_cancelled_attempt_keeps_its_tokens(self, loop: VirtualLoop, wire: Wire) -> None:
        """The cancellation passes on; what has arrived stays on the sample, aligned."""
        hanging = asyncio.Event()

        async def events() -> AsyncIterator[dict[str, Any]]:
            yield told([65, 66], 2)
            hanging.set()
            await asyncio.sleep(10**9)

        sample = sampled()

        async def main() -> bool:
            task = asyncio.create_task(generate_streaming(arguments(), sample, {"max_new_tokens": 5}))
            await hanging.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return task.cancelled()

        wire(events)
        assert loop.run(main())
        assert (sample.tokens, sample.response_length, sample.response) == ([256, 65, 66], 2, "AB")
        assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1], [-65.0, -66.0])
        assert sample.status is Status.ABORTED

    def test_cancelled_before_the_first_event(self, loop: VirtualLoop, wire: Wire) -> None:
        async def events() -> AsyncIterator[dict[str, Any]]:
            await asyncio.sleep(10**9)
            yield {}

        sample = sampled()
        before = copy.deepcopy(sample)

        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(generate_streaming(arguments(), sample, {"max_new_tokens": 5}), 1)

        wire(events)
        loop.run(main())
        assert sample == before

    @pytest.mark.parametrize(
        "fault",
        [aiohttp.ClientPayloadError(), client.Transient("x"), ValueError("no JSON"), client.MalformedReply("x")],
    )
    def test_a_fault_after_tokens_keeps_them(self, loop: VirtualLoop, wire: Wire, fault: Exception) -> None:
        async def events() -> AsyncIterator[dict[str, Any]]:
            yield told([65], 1)
            raise fault

        wire(events)
        sample = loop.run(generate_streaming(arguments(), sampled(), {"max_new_tokens": 5}))
        assert (sample.response_length, sample.status) == (1, Status.ABORTED)

    def test_a_fault_after_the_terminal_event_changes_nothing(self, loop: VirtualLoop, wire: Wire) -> None:
        async def events() -> AsyncIterator[dict[str, Any]]:
            yield told([65], 1, "stop")
            raise aiohttp.ClientPayloadError

        wire(events)
        sample = loop.run(generate_streaming(arguments(), sampled(), {"max_new_tokens": 5}))
        assert sample.status is Status.COMPLETED

    def test_a_stream_of_nothing_is_transient(self, loop: VirtualLoop, wire: Wire) -> None:
        async def events() -> AsyncIterator[dict[str, Any]]:
            nothing: tuple[dict[str, Any], ...] = ()
            for event in nothing:
                yield event

        wire(events)
        with pytest.raises(client.Transient, match="without an event"):
            loop.run(generate_streaming(arguments(), sampled(), {"max_new_tokens": 5}))

    def test_an_error_event_that_says_nothing(self, loop: VirtualLoop, wire: Wire) -> None:
        async def events() -> AsyncIterator[dict[str, Any]]:
            yield {"error": None}

        wire(events)
        with pytest.raises(client.Refused):
            loop.run(generate_streaming(arguments(), sampled(), {"max_new_tokens": 5}))


PARAMS = {"max_new_tokens": 5, "min_new_tokens": 4, "stop": ["x"], "temperature": 1.0}


class TestPrepare:
    def test_the_caller_s_dict_stays(self) -> None:
        params, args = copy.deepcopy(PARAMS), arguments(rollout_max_context_len=4)
        sample = sampled(tokens=[256, 65, 66], response_length=2, rollout_log_probs=[-1.0, -1.0])
        before = copy.deepcopy(sample)
        ask = prepare(args, sample, params, stream=True)
        assert ask is not None
        assert (ask.limit, ask.payload["input_ids"]) == (1, [256, 65, 66])
        assert ask.payload["sampling_params"] == {**PARAMS, "max_new_tokens": 1, "min_new_tokens": 1}
        assert params == PARAMS
        ask.payload["input_ids"].append(9)
        assert sample == before

    def test_context_unknown_or_absent(self) -> None:
        for args in (arguments(), arguments(rollout_max_context_len=None)):
            ask = prepare(args, sampled(), PARAMS, stream=False)
            assert ask is not None
            assert ask.limit == 5
            assert "stream" not in ask.payload

    @pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
    def test_a_finished_sample_is_left_alone(self, status: Status) -> None:
        sample = sampled(status=status)
        before = copy.deepcopy(sample)
        assert prepare(arguments(), sample, PARAMS, stream=False) is None
        assert sample == before

    def test_images(self) -> None:
        sample = sampled(multimodal_inputs={"images": ["one"]})
        first = prepare(arguments(), sample, PARAMS, stream=False)
        assert first is not None
        assert (first.payload["text"], first.payload["image_data"]) == ("ab", ["one"])
        assert "input_ids" not in first.payload
        sample.tokens, sample.response_length = [256, 65], 1
        second = prepare(arguments(), sample, PARAMS, stream=False)
        assert second is not None
        assert (second.payload["input_ids"], second.payload["image_data"]) == ([256, 65], ["one"])
        assert "text" not in second.payload


# On an engine


def run(target: FunctionTarget, schedule: Schedule, mode: str, front: str = "inproc") -> History:
    runner = Runner(target, front)
    try:
        return runner.run(schedule, mode)
    finally:
        runner.close()


def final(history: History) -> SampleView:
    return [e for e in history.events if isinstance(e, Returned)][-1].view


RESUMED = Schedule(prompt="é the", budget=5, script=(65, 97, 98), attempts=(Attempt("abort", after=2),))


def test_one_connection_for_many_calls() -> None:
    """Also after errors and across runs: the streams are read to their end."""
    runner: Any = Runner(reference(), "loopback")
    try:
        server = runner.front._handler._server
        asked = 0
        for schedule in (RESUMED, Schedule(budget=1, attempts=(Attempt("http", code=503),)), Schedule(budget=3)):
            for mode in MODES:
                asked += sum(isinstance(e, Requested) for e in runner.run(schedule, mode).events)
                assert len(server.connections) == 1
        assert server.requests_count == asked > 10
    finally:
        runner.close()


@pytest.mark.parametrize("front", ["inproc", "loopback"])
def test_long_events(front: str) -> None:
    """A cumulative event of 12,000 tokens with log probabilities is longer than 128 KiB."""
    history = run(reference(), Schedule(budget=12_000, chunks=(6_000,)), STREAM, front)
    assert final(history).response_length == 12_000


def test_the_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    """Without ``args.tokenizer`` it is loaded from ``args.hf_checkpoint``, once."""
    pytest.importorskip("transformers")
    tokenizer.load().save_pretrained(tmp_path)

    def without(function: Any) -> Any:
        async def call(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            own = Namespace(
                sglang_router_ip=args.sglang_router_ip,
                sglang_router_port=args.sglang_router_port,
                hf_checkpoint=str(tmp_path),
            )
            return await function(own, sample, params)

        return call

    target = FunctionTarget("checkpoint", without(generate), without(generate_streaming))
    for mode in (PLAIN, STREAM):
        assert final(run(target, RESUMED, mode)) == final(run(reference(), RESUMED, mode))


async def slime_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A custom generate function in slime's manner: its field and method names, and nothing of ours."""
    sampling_params = dict(sampling_params)
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] <= 0:
        sample.status = sample.Status.TRUNCATED
        return sample
    if not sample.tokens:
        sample.tokens = args.tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
        output = await response.json()
    new = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in new],
        log_probs=[item[0] for item in new],
        trainable=True,
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


def test_a_custom_generate_function_of_slime_runs_unchanged() -> None:
    target = FunctionTarget("slime-style", slime_generate, None)
    view, expected = final(run(target, RESUMED, PLAIN)), final(run(reference(), RESUMED, PLAIN))
    assert (view.tokens, view.response, view.status) == (expected.tokens, expected.response, expected.status)
    assert (view.loss_mask, view.logprobs) == (expected.loss_mask, expected.logprobs)
