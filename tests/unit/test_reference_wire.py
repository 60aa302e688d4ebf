"""The reference on wires of our own: what it sends to the letter, what it keeps, and what it says when it fails."""

from __future__ import annotations

import asyncio
import copy
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from harness.loop import VirtualLoop
from reference_impl import budget, client, generate
from reference_impl.generate import keep, pairs, prepare
from reference_impl.generate_streaming import Stream, generate_streaming
from reference_impl.sample import Sample, Status

PARAMS = {"max_new_tokens": 5, "temperature": 1.0}
URL = "http://here:7/generate"


class Letters:
    """A tokenizer whose ids are the code points; it remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def encode(self, text: str, **how: Any) -> tuple[int, ...]:
        self.asked.append(how)
        return tuple(map(ord, text))

    def decode(self, ids: list[int], **how: Any) -> str:
        self.asked.append(how)
        return "".join(map(chr, ids))


def arguments(**given: Any) -> Any:
    return Namespace(**{"sglang_router_ip": "here", "sglang_router_port": 7, "tokenizer": Letters()} | given)


def sampled(**fields: Any) -> Sample:
    return Sample(**{"prompt": "ab", **fields})


def kept(response: str = "cd", **fields: Any) -> Sample:
    """A sample that has been interrupted."""
    probs = [-float(ord(c)) for c in response]
    return sampled(
        tokens=[97, 98, *map(ord, response)],
        response=response,
        response_length=len(response),
        loss_mask=[1] * len(response),
        rollout_log_probs=probs,
        **{"status": Status.ABORTED, "weight_spans": [("", len(response))] if response else [], **fields},
    )


def told(text: str, finish: str | None = None, /, **meta: Any) -> dict[str, Any]:
    """A reply, or an event, that brings the letters of ``text``."""
    entries = [[-float(ord(c)), ord(c), None] for c in text]
    reason = None if finish is None else {"type": finish}
    return {"meta_info": {"output_token_logprobs": entries, "finish_reason": reason} | meta}


class Flag:
    def __init__(self, *, up: bool) -> None:
        self.up = up

    def is_set(self) -> bool:
        return self.up


class Answer:
    """What aiohttp gives for one request."""

    def __init__(self, reply: Any = None, *, status: int = 200, text: str = "") -> None:
        self.reply, self.status, self._text = reply, status, text

    async def json(self, *, content_type: str | None = "application/json") -> Any:
        assert content_type is None, "a router may forget the content type"
        return self.reply

    async def text(self) -> str:
        return self._text


class Session:
    """Gives one answer after the other, and remembers what was posted and when."""

    def __init__(self, loop: VirtualLoop, *answers: Any) -> None:
        self.loop, self.answers = loop, list(answers)
        self.posted: list[tuple[str, Any]] = []
        self.times: list[float] = []

    @asynccontextmanager
    async def post(self, url: str, *, json: Any) -> AsyncIterator[Any]:
        self.posted.append((url, copy.deepcopy(json)))
        self.times.append(self.loop.time())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield answer


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


@pytest.fixture
def http(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Replaces aiohttp: the given answers come one after the other."""

    def use(*answers: Any) -> Session:
        made = Session(loop, *answers)
        monkeypatch.setattr(client, "session", lambda: made)
        return made

    return use


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replaces HTTP: the given events are what the stream brings; gives the list of payloads that were sent."""

    def use(*events: Any) -> list[Any]:
        sent: list[Any] = []

        async def ask(args: Any, payload: Any, consume: Any) -> Any:
            sent.append((args, payload))
            return await consume("the response")

        async def all_of(response: Any) -> AsyncIterator[Any]:
            assert response == "the response"
            for event in events:
                if isinstance(event, BaseException):
                    raise event
                yield event() if callable(event) else event

        monkeypatch.setattr(client, "ask", ask)
        monkeypatch.setattr(client, "events", all_of)
        return sent

    return use


class TestAsk:
    async def whole(self, response: Any) -> Any:
        return response.reply

    def test_it_posts_the_payload_and_gives_what_is_made_of_the_answer(self, loop: VirtualLoop, http: Any) -> None:
        session = http(Answer({"a": 1}))
        assert loop.run(client.ask(arguments(), {"x": 2}, self.whole)) == {"a": 1}
        assert session.posted == [(URL, {"x": 2})]

    def test_a_connection_fault_is_retried_four_times_half_a_second_apart(self, loop: VirtualLoop, http: Any) -> None:
        faults = [aiohttp.ClientConnectionError(f"no. {n}") for n in range(5)]
        session = http(*faults)
        with pytest.raises(client.Transient) as caught:
            loop.run(client.ask(arguments(), {}, self.whole))
        assert str(caught.value) == f"no answer from {URL}: no. 4"
        assert caught.value.__cause__ is faults[4]
        assert session.times == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert loop.time() == 2.0, "nobody waits behind the last try"

    def test_a_transient_fault_is_retried_as_often_and_then_passes_on(self, loop: VirtualLoop, http: Any) -> None:
        session = http(*[Answer(status=503, text=f"busy {n}") for n in range(5)])
        with pytest.raises(client.Transient, match=r"^HTTP 503: busy 4$"):
            loop.run(client.ask(arguments(), {}, self.whole))
        assert session.times == [0.0, 0.5, 1.0, 1.5, 2.0]

    def test_the_last_try_counts(self, loop: VirtualLoop, http: Any) -> None:
        http(*[Answer(status=429)] * 2, aiohttp.ServerDisconnectedError(), Answer(status=500), Answer(7))
        assert loop.run(client.ask(arguments(), {}, self.whole)) == 7

    def test_a_refusal_is_not_retried(self, loop: VirtualLoop, http: Any) -> None:
        session = http(Answer(status=400, text="no"), Answer(7))
        with pytest.raises(client.Refused, match=r"^HTTP 400: no$"):
            loop.run(client.ask(arguments(), {}, self.whole))
        assert len(session.posted) == 1


@pytest.mark.parametrize(
    ("code", "message", "said"),
    [
        (400, "no", "HTTP 400: no"),
        (None, "no", "HTTP 400: no"),
        (404, "gone", "HTTP 404: gone"),
        (428, "first", "HTTP 428: first"),
        (430, "x", "HTTP 430: x"),
        (499, "x", "HTTP 499: x"),
        (429, "slow", "HTTP 429: slow"),
        (500, "", "HTTP 500: "),
        (501, "x", "HTTP 501: x"),
        (400, "over the maximum context length", "over the maximum context length"),
    ],
)
def test_an_error_says_what_the_engine_said(code: int | None, message: str, said: str) -> None:
    error = client.error(code, message)
    assert str(error) == said
    assert isinstance(error, client.Transient) is (code in (429, 500, 501))


class TestSession:
    def test_one_for_all_calls_of_a_loop(self) -> None:
        async def main() -> Any:
            first = client.session()
            assert client.session() is first
            assert first.timeout == aiohttp.ClientTimeout(total=None, sock_connect=30)
            assert isinstance(first.cookie_jar, aiohttp.DummyCookieJar)
            await first.close()
            second = client.session()
            assert second is not first and not second.closed
            await client.close()
            assert second.closed
            third = client.session()
            assert third is not second
            await client.close()
            await client.close()  # nothing to close is no error
            return third

        assert asyncio.run(main()).closed
        assert asyncio.run(main()).closed, "another loop has another session"


class TestPlain:
    def test_a_reply_is_kept(self, loop: VirtualLoop, http: Any) -> None:
        args = arguments()
        session = http(Answer(told("cd", "stop", weight_version="w")))
        sample = loop.run(generate.generate(args, sampled(), PARAMS))
        sent = {"sampling_params": PARAMS, "return_logprob": True, "input_ids": [97, 98]}
        assert session.posted == [(URL, sent)]
        assert sample == kept(status=Status.COMPLETED, weight_versions=["w"], weight_spans=[("w", 2)])

    def test_a_reply_without_meta_info_ends_nothing(self, loop: VirtualLoop, http: Any) -> None:
        http(Answer({"text": ""}))
        assert loop.run(generate.generate(arguments(), sampled(), PARAMS)).status is Status.ABORTED

    def test_an_input_that_is_too_long_ends_the_sample(self, loop: VirtualLoop, http: Any) -> None:
        http(Answer(status=400, text="longer than the model's context length"))
        before = sampled()
        assert loop.run(generate.generate(arguments(), before, PARAMS)) is before
        assert before == sampled(status=Status.TRUNCATED)

    def test_a_reply_that_is_no_object_is_refused_and_shown_in_short(self, loop: VirtualLoop, http: Any) -> None:
        http(Answer(["0123456789" * 9]))
        with pytest.raises(client.MalformedReply) as caught:
            loop.run(generate.generate(arguments(), sampled(), PARAMS))
        assert str(caught.value) == "the reply is no object: ['" + "0123456789" * 7 + "01234567"


class TestPrepare:
    def test_a_new_sample(self) -> None:
        args = arguments()
        ask = prepare(args, sampled(), PARAMS, stream=True)
        assert ask == generate.Ask(
            [97, 98],
            5,
            {"sampling_params": PARAMS, "return_logprob": True, "stream": True, "input_ids": [97, 98]},
        )
        assert args.tokenizer.asked == [{"add_special_tokens": False}]

    def test_what_was_encoded_once_is_not_encoded_again(self) -> None:
        args = arguments()
        ask = prepare(args, kept(prompt="something else"), PARAMS, stream=False)
        assert ask is not None
        assert (ask.prompt_ids, ask.limit, ask.payload["input_ids"]) == ([97, 98], 3, [97, 98, 99, 100])
        assert args.tokenizer.asked == []

    @pytest.mark.parametrize(("context", "limit"), [(None, 3), (100, 3), (6, 2), (5, 1)])
    def test_the_limit_is_what_the_budget_and_the_context_leave(self, context: int | None, limit: int) -> None:
        ask = prepare(arguments(rollout_max_context_len=context), kept(), PARAMS, stream=False)
        assert ask is not None
        assert ask.limit == ask.payload["sampling_params"]["max_new_tokens"] == limit

    @pytest.mark.parametrize("up", [True, False])
    def test_a_full_sample_is_truncated_even_under_the_flag(self, up: bool) -> None:
        sample = kept("cdefg")
        assert prepare(arguments(rollout_abort=Flag(up=up)), sample, PARAMS, stream=False) is None
        assert sample == kept("cdefg", status=Status.TRUNCATED)

    def test_nothing_is_asked_under_the_flag(self) -> None:
        sample = sampled()
        assert prepare(arguments(rollout_abort=Flag(up=True)), sample, PARAMS, stream=False) is None
        assert sample == sampled(status=Status.ABORTED)
        assert prepare(arguments(rollout_abort=Flag(up=False)), sample, PARAMS, stream=False) is not None
        assert prepare(arguments(rollout_abort=None), sample, PARAMS, stream=False) is not None

    @pytest.mark.parametrize(("given", "sent"), [(4, 2), (2, 0), (9, 3)])
    def test_the_minimum_is_what_remains_of_it(self, given: int, sent: int) -> None:
        ask = prepare(arguments(), kept(), PARAMS | {"min_new_tokens": given}, stream=False)
        assert ask is not None
        assert ask.payload["sampling_params"] == PARAMS | {"max_new_tokens": 3, "min_new_tokens": sent}

    def test_no_minimum_is_added(self) -> None:
        for params in (PARAMS, PARAMS | {"min_new_tokens": 0}):
            ask = prepare(arguments(), sampled(), params, stream=False)
            assert ask is not None
            assert ask.payload["sampling_params"] == params

    def test_images_go_along_and_replace_the_ids_at_the_start(self) -> None:
        images = ["one", "two"]
        start = prepare(arguments(), sampled(multimodal_inputs={"images": images}), PARAMS, stream=False)
        again = prepare(arguments(), kept(multimodal_inputs={"images": images}), PARAMS, stream=False)
        without = prepare(arguments(), sampled(multimodal_inputs={"audio": [1]}), PARAMS, stream=False)
        assert start is not None and again is not None and without is not None
        head = {"sampling_params": PARAMS, "return_logprob": True}
        assert start.payload == {**head, "image_data": images, "text": "ab"}
        assert again.payload == {
            **head,
            "sampling_params": PARAMS | {"max_new_tokens": 3},
            "image_data": images,
            "input_ids": [97, 98, 99, 100],
        }
        assert without.payload == {**head, "input_ids": [97, 98]}
        assert start.payload["image_data"] is not images, "the request has a list of its own"


class TestPairs:
    def test_ids_and_log_probabilities_come_from_one_list(self) -> None:
        assert pairs(told("cd")) == ([99, 100], [-99.0, -100.0])

    def test_nothing_is_nothing(self) -> None:
        for event in ({}, {"meta_info": None}, {"meta_info": {}}, {"output_ids": [], "meta_info": {"x": 1}}):
            assert pairs(event) == ([], [])

    @pytest.mark.parametrize("event", [{"output_ids": [1]}, {"meta_info": {"completion_tokens": 1}}])
    def test_tokens_without_log_probabilities_are_refused(self, event: dict[str, Any]) -> None:
        with pytest.raises(client.MalformedReply, match=r"^tokens came without log probabilities$"):
            pairs(event)


class Own(Sample):
    """A sample of the caller's own class."""

    given: Any = None

    def append_response_tokens(self, args: Any = None, **more: Any) -> None:
        self.given = args
        super().append_response_tokens(args, **more)


class TestKeep:
    @pytest.mark.parametrize(
        ("text", "finish", "limit", "response", "status"),
        [
            ("cd", "stop", 2, "cd", Status.COMPLETED),
            ("cd", "length", 5, "cd", Status.TRUNCATED),
            ("cd", "abort", 5, "cd", Status.ABORTED),
            ("cd", None, 5, "cd", Status.ABORTED),
            ("cdx", "stop", 2, "cd", Status.TRUNCATED),
            ("cdx", None, 2, "cd", Status.TRUNCATED),
        ],
    )
    def test_tokens_and_status(self, text: str, finish: str | None, limit: int, response: str, status: Status) -> None:
        event, sample, prompt = told(text, finish), sampled(), [97, 98]
        keep(
            arguments(), sample, generate.Ask(prompt, limit, {"sampling_params": {}}), *pairs(event), event["meta_info"]
        )
        assert sample == kept(response, status=status)
        assert sample.tokens is not prompt

    def test_what_was_kept_stays(self) -> None:
        sample, event = kept("cd"), told("e", "stop")
        keep(arguments(), sample, generate.Ask([97, 98], 3, {"sampling_params": {}}), *pairs(event), event["meta_info"])
        assert sample == kept("cde", status=Status.COMPLETED)

    def test_the_sample_is_given_the_arguments(self) -> None:
        sample, args = Own(prompt="ab"), arguments()
        keep(args, sample, generate.Ask([97, 98], 3, {"sampling_params": {}}), [], [], {})
        assert sample.given is args

    @pytest.mark.parametrize(("params", "skip"), [({}, True), ({"skip_special_tokens": False}, False)])
    def test_special_tokens_are_shown_as_asked(self, params: dict[str, Any], skip: bool) -> None:
        args = arguments()
        keep(args, sampled(), generate.Ask([97], 3, {"sampling_params": params}), [98], [-1.0], {})
        assert args.tokenizer.asked == [{"skip_special_tokens": skip}]


def test_the_tokenizer_given_comes_before_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_load", lambda directory: f"the one of {directory}")
    given = Letters()
    assert generate.tokenizer(Namespace(tokenizer=given, hf_checkpoint="d")) is given
    assert generate.tokenizer(Namespace(tokenizer=None, hf_checkpoint="d")) == "the one of d"
    assert generate.tokenizer(Namespace(hf_checkpoint="d")) == "the one of d"


class TestStream:
    def test_what_does_not_continue_is_refused_with_the_numbers(self) -> None:
        stream = Stream()
        assert (stream.tokens, stream.log_probs, stream.meta, stream.finish) == ([], [], {}, {})
        stream.add(told("cd", completion_tokens=2))
        with pytest.raises(client.MalformedReply, match=r"^2 tokens, then an event with 1 makes 4$"):
            stream.add(told("e", completion_tokens=4))

    def test_an_abort_may_count_a_token_that_it_does_not_bring(self) -> None:
        """What SGLang says when it is asked to abort what it was about to refuse."""
        stream = Stream()
        stream.add(told("cd", completion_tokens=2))
        stream.add(told("", "abort", completion_tokens=1))
        assert stream.tokens == [ord("c"), ord("d")] and stream.finish == {"type": "abort"}
        with pytest.raises(client.MalformedReply, match=r"^2 tokens, then an event with 0 makes 3$"):
            stream.add(told("", "stop", completion_tokens=3))

    def test_an_event_without_a_count_repeats_everything(self) -> None:
        stream = Stream()
        stream.add(told("c"))
        stream.add(told("cd"))
        assert stream.tokens == [99, 100]

    def test_an_event_without_meta_info_says_nothing(self) -> None:
        stream = Stream()
        stream.add({})
        assert (stream.tokens, stream.meta) == ([], {})

    def test_log_probabilities_follow_the_tokens(self) -> None:
        whole, parts = Stream(), Stream()
        for event in (told("c", completion_tokens=1), told("cd", "stop", completion_tokens=2)):
            whole.add(event)
        for event in (told("c", completion_tokens=1), told("d", "stop", completion_tokens=2)):
            parts.add(event)
        for made in (whole, parts):
            assert (made.tokens, made.log_probs) == ([99, 100], [-99.0, -100.0])
            assert made.finish == {"type": "stop"}


class TestStreaming:
    def test_what_is_sent_and_kept(self, loop: VirtualLoop, stream: Any) -> None:
        sent = stream(told("c", completion_tokens=1), told("cd", "stop", completion_tokens=2, weight_version="w"))
        args = arguments()
        sample = loop.run(generate_streaming(args, sampled(), PARAMS))
        payload = {"sampling_params": PARAMS, "return_logprob": True, "stream": True, "input_ids": [97, 98]}
        assert sent == [(args, payload)]
        assert sample == kept(status=Status.COMPLETED, weight_versions=["w"], weight_spans=[("", 1), ("w", 1)])

    def test_nothing_is_sent_for_a_full_sample(self, loop: VirtualLoop, stream: Any) -> None:
        sent, sample = stream(), kept("cdefg")
        assert loop.run(generate_streaming(arguments(), sample, PARAMS)) is sample
        assert (sent, sample.status) == ([], Status.TRUNCATED)

    @pytest.mark.parametrize(
        ("event", "kind", "said"),
        [
            ({"error": {"code": 503, "message": "busy"}}, client.Transient, "HTTP 503: busy"),
            ({"error": {"message": "no"}}, client.Refused, "HTTP 400: no"),
            ({"error": {"code": 422}}, client.Refused, "HTTP 422: "),
            ({"error": None}, client.Refused, "HTTP 400: "),
            ({"error": {"message": 5}}, client.Refused, "HTTP 400: 5"),
        ],
    )
    def test_an_error_event_is_what_the_status_would_be(
        self, loop: VirtualLoop, stream: Any, event: Any, kind: type[Exception], said: str
    ) -> None:
        stream(event)
        before = sampled()
        with pytest.raises(kind) as caught:
            loop.run(generate_streaming(arguments(), before, PARAMS))
        assert (type(caught.value), str(caught.value)) == (kind, said)
        assert before == sampled()

    def test_an_error_event_that_says_too_long_ends_the_sample(self, loop: VirtualLoop, stream: Any) -> None:
        stream({"error": {"message": "over the maximum allowed length"}})
        assert loop.run(generate_streaming(arguments(), sampled(), PARAMS)) == sampled(status=Status.TRUNCATED)

    def test_an_error_event_behind_tokens_leaves_them(self, loop: VirtualLoop, stream: Any) -> None:
        stream(told("c", completion_tokens=1), {"error": {"message": "x"}})
        assert loop.run(generate_streaming(arguments(), sampled(), PARAMS)) == kept("c")

    def test_the_flag_ends_the_reading_behind_the_event(self, loop: VirtualLoop, stream: Any) -> None:
        flag = Flag(up=False)

        def raised() -> Any:
            flag.up = True
            return told("cd", completion_tokens=2)

        stream(told("c", completion_tokens=1), raised, told("cde", "stop", completion_tokens=3))
        sample = loop.run(generate_streaming(arguments(rollout_abort=flag), sampled(), PARAMS))
        assert sample == kept("cd")

    def test_the_flag_does_not_undo_a_terminal_event(self, loop: VirtualLoop, stream: Any) -> None:
        flag = Flag(up=False)

        def raised() -> Any:
            flag.up = True
            return told("c", "stop", completion_tokens=1)

        stream(raised, lambda: pytest.fail("read to its end"))
        with pytest.raises(pytest.fail.Exception):
            loop.run(generate_streaming(arguments(rollout_abort=flag), sampled(), PARAMS))
        flag.up = False
        stream(raised)
        sample = loop.run(generate_streaming(arguments(rollout_abort=flag), sampled(), PARAMS))
        assert sample == kept("c", status=Status.COMPLETED)

    @pytest.mark.parametrize(
        ("reason", "status"),
        [
            ({"type": "abort"}, Status.ABORTED),
            ({"type": "abort", "status_code": 500}, Status.ABORTED),
            ({"type": "stop", "status_code": 503}, Status.COMPLETED),
        ],
    )
    def test_only_an_abort_with_503_says_that_the_queue_is_full(
        self, loop: VirtualLoop, stream: Any, reason: dict[str, Any], status: Status
    ) -> None:
        stream(told("", finish_reason=reason))
        assert loop.run(generate_streaming(arguments(), sampled(), PARAMS)).status is status
        stream(told("", finish_reason={"type": "abort", "status_code": 503}))
        before = sampled()
        with pytest.raises(client.Transient, match=r"^the engine's queue is full$"):
            loop.run(generate_streaming(arguments(), before, PARAMS))
        assert before == sampled()

    def test_a_stream_without_an_event_is_a_fault(self, loop: VirtualLoop, stream: Any) -> None:
        stream()
        with pytest.raises(client.Transient, match=r"^the stream ended without an event$"):
            loop.run(generate_streaming(arguments(), sampled(), PARAMS))

    @pytest.mark.parametrize("first", [None, told("", completion_tokens=0)], ids=["before an event", "without a token"])
    def test_a_fault_before_the_first_token_passes_on(self, loop: VirtualLoop, stream: Any, first: Any) -> None:
        for fault in (aiohttp.ClientPayloadError("cut"), ValueError("no JSON"), client.MalformedReply("x")):
            stream(*([] if first is None else [first]), fault)
            before = sampled()
            with pytest.raises(type(fault)) as caught:
                loop.run(generate_streaming(arguments(), before, PARAMS))
            assert caught.value is fault
            assert before == sampled()

    def test_a_fault_behind_an_end_without_tokens_changes_nothing(self, loop: VirtualLoop, stream: Any) -> None:
        stream(told("", "abort", completion_tokens=0), aiohttp.ClientPayloadError("cut"))
        assert loop.run(generate_streaming(arguments(), sampled(), PARAMS)).status is Status.ABORTED

    def test_a_cancelled_attempt_keeps_what_came(self, loop: VirtualLoop, stream: Any) -> None:
        for events, expected in (([], sampled()), ([told("c", completion_tokens=1)], kept("c"))):
            stream(*events, asyncio.CancelledError())
            sample = sampled()
            with pytest.raises(asyncio.CancelledError):
                loop.run(generate_streaming(arguments(), sample, PARAMS))
            assert sample == expected


class TestAppend:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 tokens came with 1 log probabilities"),
            ({"tokens": [1]}, "1 tokens came with 0 log probabilities"),
        ],
    )
    def test_tokens_that_lack_log_probabilities_are_refused(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=rf"^{said}$"):
            sampled().append_response_tokens(**given)

    def test_a_sample_that_lacks_log_probabilities_is_refused(self) -> None:
        sample = kept("cd", metadata={})
        sample.rollout_log_probs = [-1.0]
        with pytest.raises(ValueError, match=r"^2 tokens are kept with 1 log probabilities$"):
            sample.append_response_tokens(tokens=[1], log_probs=[-1.0])

    def test_an_absent_mask_is_one_of_ones(self) -> None:
        sample = kept("cd")
        sample.loss_mask = None
        sample.append_response_tokens(tokens=[101], log_probs=[-101.0], trainable=False)
        assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-99.0, -100.0, 0.0])

    def test_ids_and_probabilities_become_plain_numbers(self) -> None:
        sample = sampled(tokens=[97, 98])
        sample.append_response_tokens(tokens=[True], log_probs=[-1], text="x")
        assert [*map(type, sample.tokens), type(sample.rollout_log_probs[0])] == [int, int, int, float]  # type: ignore[index]
        assert sample.response == "x"

    def test_what_is_told_without_tokens_leaves_the_lists_absent(self) -> None:
        sample = sampled()
        sample.append_response_tokens(meta_info={"finish_reason": {"type": "stop"}})
        assert sample == sampled(status=Status.COMPLETED)

    def test_a_list_that_a_view_holds_does_not_grow(self) -> None:
        sample = kept("c", weight_versions=["v"])
        lists = sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.weight_versions
        before = copy.deepcopy(lists)
        sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"weight_version": 2})
        assert lists == before
        assert sample.weight_versions == ["v", "2"]


def test_the_arithmetic_at_its_corners() -> None:
    """[BUDGET] [CONTEXT] [PARAMS]"""
    assert [budget.allowance(4, c, 3, 1) for c in (None, 3, 4, 5, 6, 99)] == [3, 0, 0, 1, 2, 3]
    assert [budget.allowance(b, None, 3, 2) for b in (1, 2, 3)] == [0, 0, 1]
    assert [budget.remaining_minimum(m, 2, 3) for m in (0, 2, 3, 5, 6)] == [0, 0, 1, 3, 3]
    assert [budget.clip(n, 2) for n in (0, 2, 3)] == [0, 2, 2]


def versions(*told: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in told]


class TestWeightSpans:
    """Which weights made which tokens."""

    @pytest.mark.parametrize(
        ("limit", "meta", "spans"),
        [
            (5, {"weight_version": 2}, [("2", 4)]),
            (5, {"weight_version": "2", "weight_versions": versions(("1", 0, 3), ("2", 3, 4))}, [("1", 3), ("2", 1)]),
            (2, {"weight_version": "2", "weight_versions": versions(("1", 0, 3), ("2", 3, 4))}, [("1", 2)]),
            (5, {"weight_version": "2", "weight_versions": versions(("1", 0, 2), ("1", 2, 3))}, [("1", 3), ("2", 1)]),
            (5, {"weight_version": "2", "weight_versions": versions(("1", 1, 9))}, [("2", 1), ("1", 3)]),
            (5, {"weight_version": "2", "weight_versions": []}, [("2", 4)]),
            (5, {}, [("", 4)]),
        ],
    )
    def test_of_a_reply(
        self, loop: VirtualLoop, http: Any, limit: int, meta: dict[str, Any], spans: list[tuple[str, int]]
    ) -> None:
        http(Answer(told("cdef", "length", **meta)))
        sample = loop.run(generate.generate(arguments(), sampled(), {"max_new_tokens": limit}))
        assert sample.weight_spans == spans
        assert sum(count for _, count in spans) == sample.response_length

    @pytest.mark.parametrize("cumulative", [True, False])
    @pytest.mark.parametrize("ends", [True, False])
    def test_of_a_stream(self, loop: VirtualLoop, stream: Any, cumulative: bool, ends: bool) -> None:
        """Until the terminal event tells, a token has the version of the event that first brought it."""
        whole = ["c", "cd", "cd", "cdef"]
        parts = whole if cumulative else ["c", "d", "", "ef"]
        events = [
            told(text, completion_tokens=len(sofar), weight_version=version)
            for text, sofar, version in zip(parts, whole, "1122", strict=True)
        ]
        if ends:
            events[-1]["meta_info"] |= {
                "weight_versions": versions(("1", 0, 3), ("2", 3, 4)),
                "finish_reason": {"type": "stop"},
            }
        stream(*events)
        sample = loop.run(generate_streaming(arguments(), sampled(), {"max_new_tokens": 9}))
        assert sample.weight_spans == ([("1", 3), ("2", 1)] if ends else [("1", 2), ("2", 2)])

    def test_of_a_resumed_sample(self) -> None:
        sample = sampled(tokens=[97, 98, 99], response_length=1, rollout_log_probs=[-1.0], status=Status.ABORTED)
        for version in "112":
            sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"weight_version": version})
        sample.append_response_tokens(tokens=[6, 6], trainable=False)
        sample.append_response_tokens(meta_info={"weight_version": "3"})
        assert sample.weight_spans == [("", 1), ("1", 2), ("2", 1), ("", 2)]
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample

    def test_a_restart_leaves_the_prompt_only(self) -> None:
        sample = kept("cd", reward=1.0, weight_versions=["1"], index=3, label="l")
        sample.restart()
        assert sample == sampled(index=3, label="l")


class TestControl:
    """What is said to a router or an engine, apart from /generate."""

    @pytest.mark.parametrize("status", [200, 500])
    def test_one_question_and_one_order(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
        calls: list[tuple[Any, ...]] = []

        class Response:
            async def json(self, *, content_type: str | None) -> Any:
                assert content_type is None
                return {"a": 1}

            def raise_for_status(self) -> None:
                if status != 200:
                    raise aiohttp.ClientError(status)

        class Control:
            @asynccontextmanager
            async def _call(self, *call: Any, **how: Any) -> AsyncIterator[Any]:
                assert how.pop("timeout").total == client.CONTROL_S
                calls.append((*call, how))
                yield Response()

            def get(self, url: str, **how: Any) -> Any:
                return self._call("get", url, **how)

            def post(self, url: str, **how: Any) -> Any:
                return self._call("post", url, **how)

        monkeypatch.setattr(client, "session", Control)
        if status == 200:
            assert loop.run(client.get_json("u")) == {"a": 1}
            loop.run(client.post_json("v", {"b": 2}))
        else:
            with pytest.raises(aiohttp.ClientError):
                loop.run(client.get_json("u"))
            with pytest.raises(aiohttp.ClientError):
                loop.run(client.post_json("v", {"b": 2}))
        assert calls == [("get", "u", {}), ("post", "v", {"json": {"b": 2}})]
