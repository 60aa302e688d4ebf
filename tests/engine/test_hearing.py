"""What a client is told by the bytes that a server sends: every shape of both versions, and none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import tokenizer
from harness.engines.hearing import Hearing, Unheard, events
from harness.engines.sglang import DONE, Engine, Place
from harness.history import Delivered, Faulted
from harness.schedule import Attempt, Schedule
from tests.engine.upstreams import event

PLACE = Place(1, 0, 2)
SCHEDULE = Schedule(prompt="日é", budget=6, script=(65, 97, 98, 0xE6, 0x97, 0xA5), chunks=(1, 2))
VOCABULARY = tokenizer.load()
BODY: dict[str, Any] = {"input_ids": list(VOCABULARY.encode("日é")), "stream": True}
BODY["sampling_params"] = {"max_new_tokens": 6, "ignore_eos": True}


def told(*data: bytes, weights: bool = False) -> list[Delivered | Faulted]:
    hearing = Hearing(PLACE, weights=weights)
    return [said for one in data for said in hearing.event(one)]


def delivered(ids: tuple[int, ...], finish: str | None = None, **other: Any) -> Delivered:
    return Delivered(1, 0, 2, ids, other.pop("logprobs", (-1.0,) * len(ids)), finish, **other)


def compact(body: Any) -> bytes:
    """An event without spaces, as SGLang writes it."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


# It hears what the mock says


@pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    "fault", [Attempt(kind, 3, times=9) for kind in ("run", "abort", "abort-late", "retract", "delay")]
)
def test_the_mock_is_heard_as_it_speaks(version: str, incremental: bool, logprobs: bool, fault: Attempt) -> None:
    """By its bytes alone the history is what the mock's own is."""
    engine = Engine(replace(SCHEDULE, sglang=version), VOCABULARY, incremental=incremental)
    for stream in (False, True):
        reply = engine.answer({**BODY, "stream": stream, "return_logprob": logprobs}, fault, PLACE)
        hearing, heard, meant = Hearing(PLACE), list[Any](), list[Any]()
        for part in reply.parts:
            meant += part.tells
            heard += hearing.event(part.data) if stream else hearing.plain(200, part.data)
        if not logprobs:  # they are not told
            meant = [_without(one) for one in meant]
        assert heard == meant and sum(len(one.ids) for one in heard) == hearing.count > 0
        assert hearing.finished


def _without(one: Delivered) -> Delivered:
    return Delivered(1, 0, 2, one.ids, (0.0,) * len(one.ids), one.finish, one.status_code)


@pytest.mark.parametrize("kind", ["http", "queue-full", "error-event"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
def test_errors_are_heard_as_they_are_told(kind: str, stream: bool, version: str) -> None:
    engine = Engine(Schedule(sglang=version), VOCABULARY)
    attempt = Attempt(kind, code=500 if kind != "queue-full" else None, times=9)
    reply = engine.answer({**BODY, "stream": stream}, attempt, PLACE)
    hearing, heard = Hearing(PLACE), list[Any]()
    for part in reply.parts:
        heard += hearing.event(part.data) if reply.stream else hearing.plain(reply.status or 0, part.data)
    assert heard == [one for part in reply.parts for one in part.tells]
    assert hearing.finished


# Streams by hand


def test_a_cumulative_stream_repeats_itself() -> None:
    assert told(event([5], 1), event([5, 6, 7], 3), event([5, 6, 7], 3, "length")) == [
        delivered((5,)),
        delivered((6, 7)),
        delivered((), "length"),
    ]


def test_an_incremental_stream_does_not() -> None:
    assert told(event([5], 1), event([6, 7], 3), event([], 3), event([8], 4, "stop")) == [
        delivered((5,)),
        delivered((6, 7)),
        delivered(()),
        delivered((8,), "stop"),
    ]


def test_the_old_version_makes_only_the_ids_a_delta() -> None:
    """Its logprobs are whole, also where ids are lost because events piled up."""

    def old(ids: list[int], whole: list[int]) -> bytes:
        return event(ids, len(whole), output_token_logprobs=[[-1.0, token, None] for token in whole])

    assert told(old([5], [5]), old([8], [5, 6, 7, 8])) == [delivered((5,)), delivered((6, 7, 8))]


def test_without_logprobs_the_ids_count() -> None:
    nothing: dict[str, Any] = {"output_token_logprobs": None}
    zeros = {"logprobs": (0.0, 0.0)}
    assert told(event([5, 6], 2, **nothing), event([5, 6, 7, 8], 4, **nothing)) == [
        delivered((5, 6), **zeros),
        delivered((7, 8), **zeros),
    ]
    bare = b'data: {"meta_info": {}}\n\n'
    assert told(bare) == [delivered(())]


def test_a_finish_with_a_status() -> None:
    reason = {"type": "abort", "message": "full", "status_code": 503}
    assert told(event([], 0, finish_reason=reason)) == [delivered((), "abort", status_code=503)]


@pytest.mark.parametrize("code", [400, 413])
def test_a_refusal_that_comes_as_an_abort(code: int) -> None:
    """0.5.23 `input_ctx_minus6_max5_stream`: its token answers nothing."""
    reason = {"type": "abort", "message": "too long", "status_code": code}
    hearing = Hearing(PLACE)
    assert hearing.event(event([5], 1, finish_reason=reason)) == (PLACE.fault("error-event", code, "too long"),)
    assert hearing.finished and hearing.count == 0


def test_an_event_whose_tail_is_written_otherwise_is_read_in_full() -> None:
    """A token's text, which nobody here asks for, may look like the start of a token."""
    body = json.loads(event([5, 6], 2)[len("data: ") :])
    entries = body["meta_info"]["output_token_logprobs"]
    for text in (None, "[", "]]"):
        entries[0][2] = entries[1][2] = text
        assert told(compact(body)) == [delivered((5, 6))]


def test_an_event_that_counts_more_than_it_brings_is_read_in_full() -> None:
    body = json.loads(event([5, 6], 3)[len("data: ") :])
    assert told(compact(body)) == [delivered((5, 6))]


@pytest.mark.parametrize(
    ("ids", "total", "probs"),
    [([5], -5, [-1.0]), ([-1], 1, [-1.0]), ([1 << 31], 1, [-1.0]), ([5], 1, [float("nan")])],
)
def test_numbers_that_no_engine_gives(ids: list[int], total: int, probs: list[float]) -> None:
    entries = [[p, token, None] for p, token in zip(probs, ids, strict=True)]
    data = event([5], total, output_token_logprobs=entries)
    for written in (data, compact(json.loads(data[len("data: ") :]))):
        with pytest.raises(Unheard):
            told(written)


def test_what_the_weights_were() -> None:
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": 7, "start": 2, "end": 3}]
    assert told(event([5], 1, weight_version="a"), event([5, 6, 7], 3, weight_versions=spans), weights=True) == [
        delivered((5,), versions=("a",)),
        delivered((6, 7), versions=("a", "7")),
    ]
    assert told(event([5], 1), weights=True) == [delivered((5,), versions=("",))]
    assert told(event([5], 1, weight_version="a")) == [delivered((5,))]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ({"message": "m", "code": 400}, 400, "m"),
        ({"message": "m"}, None, "m"),
        ({"message": "m", "code": "400"}, None, "m"),
        ({}, None, ""),
        ("m", None, "m"),
    ],
)
def test_an_error_in_a_stream_ends_it(error: Any, code: int | None, message: str) -> None:
    hearing = Hearing(PLACE)
    data = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    assert hearing.event(data) == (Faulted(1, 0, 2, "error-event", code, message),)
    assert hearing.finished and hearing.count == 0


@pytest.mark.parametrize("data", [DONE.data, b": a comment\n\n", b"\n\n", b"data: [1]\n\n", b"data: {", b"", b"\xff"])
def test_what_is_no_event_tells_nothing(data: bytes) -> None:
    hearing = Hearing(PLACE)
    assert hearing.event(data) == () and not hearing.finished
    assert hearing.event(b"data: " + b"[" * 99_999) == ()


# Plain answers


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"detail": "no"}', '{"detail": "no"}'),
        (b"Internal Server Error", "Internal Server Error"),
        (b"[1]", "[1]"),
        (b"\xff" + b"x" * 999, "\ufffd" + "x" * 299),
        (b"", ""),
    ],
)
def test_plain_errors_in_every_shape(data: bytes, message: str) -> None:
    hearing = Hearing(PLACE)
    assert hearing.plain(400, data) == (Faulted(1, 0, 2, "http", 400, message),)
    assert hearing.finished  # there is nothing more to come


def test_a_plain_answer() -> None:
    hearing = Hearing(PLACE)
    data = event([5, 6], 2, "length").removeprefix(b"data: ")
    assert hearing.plain(200, data) == (delivered((5, 6), "length"),)
    assert hearing.count == 2 and hearing.finished


# What is no SGLang's: no history says what its client was told

NONSENSE: list[dict[str, Any]] = [
    {},
    {"output_ids": [5]},
    {"output_ids": [5], "meta_info": None},
    {"output_ids": 5, "meta_info": {}},
    {"output_ids": ["a"], "meta_info": {}},
    {"meta_info": {"completion_tokens": "many"}},
    {"meta_info": {"completion_tokens": None}},
    {"meta_info": {"finish_reason": "stop"}},
    {"meta_info": {"output_token_logprobs": [[-1.0]]}},
    {"meta_info": {"output_token_logprobs": [[None, 5, None]]}},
    {"meta_info": {"output_token_logprobs": 7}},
    {"meta_info": {"weight_versions": [{"version": "a"}], "completion_tokens": 1}},
]


@pytest.mark.parametrize("body", NONSENSE, ids=map(str, range(len(NONSENSE))))
def test_an_answer_that_is_none(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    with pytest.raises(Unheard, match="an answer has"):
        Hearing(PLACE, weights=True).event(b"data: " + data + b"\n\n")
    with pytest.raises(Unheard, match="an answer has"):
        Hearing(PLACE, weights=True).plain(200, data)


@pytest.mark.parametrize("data", [b"", b"ok", b"[]", b"[{}]", b"<html>"])
def test_a_good_answer_that_is_no_object(data: bytes) -> None:
    with pytest.raises(Unheard, match="an answer begins with b"):
        Hearing(PLACE).plain(200, data)


# Events out of segments


def split(*segments: bytes) -> list[bytes]:
    async def come() -> AsyncIterator[bytes]:
        for segment in segments:
            yield segment

    async def collect() -> list[bytes]:
        return [one async for one in events(come())]

    return asyncio.run(collect())


WHOLE = [b"data: {}\n\n", b"data: a\nb\n\n", b"\n\n", b"data: [DONE]\n\n", b"rest\n"]


def test_events_are_whole_wherever_the_bytes_are_cut() -> None:
    data = b"".join(WHOLE)
    assert split(data) == WHOLE
    assert split(*(data[i : i + 1] for i in range(len(data)))) == WHOLE
    for cut in range(len(data) + 1):
        assert split(data[:cut], data[cut:]) == WHOLE
    assert split() == [] and split(b"") == []
    assert split(b"data: {}\n\n") == [b"data: {}\n\n"]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\n\n", b"data: {}", b"\r\n"]), max_size=30), st.data())
def test_nothing_is_lost_and_nothing_is_added(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    segments = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found = split(*segments)
    assert b"".join(found) == whole
    assert all(one.endswith(b"\n\n") and b"\n\n" not in one[:-2] for one in found[:-1])
    assert found == split(whole)
