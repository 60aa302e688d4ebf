"""The mock beside the recorded servers: the same requests over HTTP, every answer field by field.

``python -m tests.engine.test_conformance`` writes the table in spec/sglang.md anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import conformance
from harness.conformance import AGREES, DIFFERS, ON_PURPOSE, PURPOSE, Difference, Row, compare, differences
from harness.engines import live, sglang, web
from harness.engines.live import Options
from harness.engines.sglang import Engine, Part
from harness.probes import PROBES
from harness.record import Recording
from harness.reporters.conformance import markdown
from harness.wire import Exchange
from tests.engine.recordings import FOLDER, SERVERS, recording

PROJECT = Path(__file__).resolve().parents[2]
SPEC = PROJECT / "spec" / "sglang.md"
BEGIN, END = "<!-- conformance -->\n", "<!-- /conformance -->\n"


@lru_cache
def rows(name: str) -> tuple[Row, ...]:
    """The mock beside a recorded server."""
    real = recording(name)
    return compare(conformance.mocked(real), real)


def only(name: str, behaviour: str) -> Recording:
    """One behaviour of a recorded server."""
    real = recording(name)
    return replace(real, exchanges=tuple(x for x in real.exchanges if x.behaviour == behaviour))


@pytest.mark.parametrize("name", SERVERS)
def test_the_mock_differs_on_purpose_or_not_at_all(name: str) -> None:
    unexplained = [f"{r.behaviour}: {one}" for r in rows(name) for one in r.differences if not one.reason]
    assert not unexplained
    assert len(rows(name)) == len(recording(name).behaviours) >= 50


def test_every_behaviour_was_recorded() -> None:
    assert {name for one in SERVERS for name in recording(one).behaviours} == {one.name for one in PROBES}


def test_every_reason_is_one_for_something() -> None:
    given = {reason for name in SERVERS for row in rows(name) for reason in row.reasons}
    assert {reason for _, _, reason in PURPOSE} == given


def table() -> str:
    return markdown([(name, rows(name)) for name in SERVERS])


def test_the_specification_has_the_table() -> None:
    assert SPEC.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == table()


@pytest.mark.parametrize("name", SERVERS)
def test_recordings_fit_their_schema_and_hold_nothing_personal(name: str) -> None:
    """No ids of requests, times, addresses or paths."""
    text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    schema = json.loads((PROJECT / "spec/schemas/recording.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        validator.validate(line)
    assert ["server" in line for line in lines] == [True] + [False] * (len(lines) - 1)
    assert len(text) < 160_000
    assert not re.search(r'"(id":"(?!MODEL)|e2e_latency|response_sent_to_client_ts|timestamp)', text)
    assert not re.search(r"/home|/tmp|rolloutcheck-|[0-9a-f]{32}|1[78]\d{8}|\d+\.\d+\.\d+\.\d+", text)


# what is planted is seen


def without(field: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The mock leaves out a field of meta_info."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = Engine._meta

        def cut(self: Engine, *given: Any, **more: Any) -> dict[str, Any]:
            return {k: v for k, v in whole(self, *given, **more).items() if k != field}

        patch.setattr(Engine, "_meta", cut)

    return plant


def options(**other: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return setting(conformance, "Options", lambda **given: Options(**given | other))


def setting(where: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, value)


@pytest.mark.parametrize(
    ("name", "behaviour", "plant", "field"),
    [
        ("0.5.23", "input_ctx_minus6_max5", setting(sglang, "RESERVE", 5), "status"),
        ("0.5.23", "input_ctx_minus6_max5_stream", setting(sglang, "RESERVE", 5), "finish_reason.type"),
        ("0.5.23", "exact_total", setting(sglang, "STOP_MARGIN", 1), "body.meta_info.completion_tokens"),
        ("0.5.23", "exact_total_stream", setting(sglang, "STOP_MARGIN", 1), "last.meta_info.finish_reason.length"),
        ("0.5.23", "max_omitted", setting(sglang, "DEFAULT_MAX_NEW", 64), "completion_tokens"),
        ("0.5.23", "abort_running", setting(live, "ABORTED", {"type": "abort", "message": "Aborted"}), "err_type"),
        ("0.5.23", "rid_reused", setting(live, "LATE_ABORT_S", 99.0), "finish_reason.type"),
        ("0.5.23", "disconnect_plain", setting(live, "ORPHAN_S", 0.1), "num_running_reqs"),
        ("0.5.23", "disconnect_plain", setting(live, "ORPHAN_S", 9.0), "num_running_reqs"),
        ("0.5.23", "pause_retract", without("num_retractions"), "num_retractions"),
        ("0.5.23", "plain_logprob", without("dp_rank"), "dp_rank"),
        ("0.5.23", "plain_logprob", setting(web, "content_type", lambda reply: "text/plain"), "content type"),
        ("0.5.23", "stream_logprob", setting(sglang, "DONE", Part(b"")), "[DONE]"),
        ("0.5.23-incremental", "stream_logprob", options(incremental=False), "next.output_ids"),
        ("0.5.9", "stop_id_at_budget1", options(sglang="0.5.23"), "finish_reason.type"),
        ("0.5.23", "pause_retract_then_abort_all", setting(live, "TOLD_EVERY", 1_000), "completion_tokens"),
        ("0.5.23-queue", "retract_queue_full", setting(live.Scheduler, "_full", lambda self: False), "status"),
    ],
)
def test_a_planted_difference_is_seen(
    name: str,
    behaviour: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    field: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = only(name, behaviour)
    (honest,) = compare(conformance.mocked(real), real)
    assert honest.verdict == AGREES or honest.reasons
    plant(monkeypatch)
    (row,) = compare(conformance.mocked(real), real)
    assert row.verdict == DIFFERS
    assert any(field in one.field for one in row.differences if not one.reason), row.differences


# the comparison itself

META: dict[str, Any] = {"completion_tokens": 2, "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3}
PLAIN = Exchange(
    *(
        "b",
        "",
        "POST",
        "/generate",
        {"input_ids": 3, "sampling_params": {"max_new_tokens": 2}},
        200,
        "application/json",
    ),
    {"text": "ab", "output_ids": [1, 2], "meta_info": META},
)
ABORT: dict[str, Any] = {"type": "abort", "message": "Aborted"}
DETAILS = "cached_tokens_details"


def said(one: Exchange = PLAIN, **other: Any) -> Exchange:
    """The answer with other fields of meta_info."""
    return replace(one, body=one.body | {"meta_info": META | other})


def names(mock: Exchange, real: Exchange = PLAIN) -> list[str]:
    return [one.field for one in differences(mock, real)]


def stream(*counts: int, total: int = 0, **other: Any) -> Exchange:
    """A stream whose events have so many ids each, of as many tokens as so far, or ``total``."""
    events = [{"output_ids": [7] * n, "meta_info": {"completion_tokens": total or n}} for n in counts]
    return replace(PLAIN, body=None, events=tuple(events), of=len(events), done=True, **other)


class TestDifferences:
    @pytest.mark.parametrize(
        ("mock", "found"),
        [
            (PLAIN, []),
            (replace(PLAIN, status=400), ["status"]),
            (replace(PLAIN, kind="text/plain"), ["content type"]),
            (replace(PLAIN, during="paused"), ["ended while"]),
            (replace(PLAIN, body=PLAIN.body | {"output_ids": [8, 9], "text": "z"}), []),
            (replace(PLAIN, body=PLAIN.body | {"output_ids": [8]}), ["body.output_ids"]),
            (replace(PLAIN, body=PLAIN.body | {"output_ids": []}), ["body.output_ids"]),
            (replace(PLAIN, body=PLAIN.body | {"output_ids": {"n": 2, "head": [1], "tail": [2]}}), []),
            (replace(PLAIN, body=PLAIN.body | {"text": None}), ["body.text"]),
            (replace(PLAIN, body={k: v for k, v in PLAIN.body.items() if k != "text"}), ["body.text"]),
            (said(prompt_tokens=4), ["body.meta_info.prompt_tokens"]),
            (said(dp_rank=None), ["body.meta_info.dp_rank"]),
            (said(weight_versions=[{"version": "1", "start": 0}]), ["body.meta_info.weight_versions"]),
            (said(finish_reason=None), [f"body.meta_info.finish_reason{x}" for x in ("", ".length", ".type")]),
            (said(finish_reason=META["finish_reason"] | {"length": 1}), ["body.meta_info.finish_reason.length"]),
            (replace(PLAIN, body="text"), ["body", "body.meta_info.completion_tokens"]),
            (replace(PLAIN, status=None, kind=None, body=None), ["body", "body.meta_info.completion_tokens"]),
        ],
    )
    def test_a_plain_answer(self, mock: Exchange, found: list[str]) -> None:
        assert [name for name in found if name not in names(mock)] == []
        assert bool(names(mock)) == bool(found)

    def test_where_an_abort_came_is_not_compared_but_whether_there_were_tokens_is(self) -> None:
        real = said(finish_reason=ABORT)
        some = said(finish_reason=ABORT, completion_tokens=5)
        assert names(replace(some, body=some.body | {"output_ids": [1] * 5}), real) == []
        none = said(finish_reason=ABORT, completion_tokens=0)
        assert "body.meta_info.completion_tokens" in names(none, real)

    def test_a_token_and_a_string_are_other_matches(self) -> None:
        def stop(matched: Any) -> Exchange:
            return said(finish_reason={"type": "stop", "matched": matched})

        assert names(stop(1), stop(2)) == []
        assert names(stop("x"), stop(2)) == ["body.meta_info.finish_reason.matched"]

    def test_the_spans_of_weights_are_compared_by_name(self) -> None:
        def spans(*versions: str, end: int = 1) -> Exchange:
            return said(weight_versions=[{"version": v, "start": 0, "end": end} for v in versions])

        assert names(spans("1", "2", end=9), spans("1", "2")) == []
        assert names(spans("2"), spans("1", "2")) == ["body.meta_info.weight_versions"]

    def test_what_a_cache_holds_is_not_compared(self) -> None:
        assert names(said(**{DETAILS: None}), said(**{DETAILS: {"device": 9, "host": 0}})) == []

    def test_an_older_recording_may_have_asked_otherwise(self) -> None:
        request: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 9}, "return_logprob": True}
        other = said(completion_tokens=9, prompt_tokens=1, output_token_logprobs=[1] * 9)
        assert names(other) == [
            *("body.meta_info.completion_tokens", "body.meta_info.output_token_logprobs"),
            *("body.meta_info.prompt_tokens", "body.output_ids"),
        ]
        assert names(replace(other, request=request, body=other.body | {"output_ids": [1] * 9})) == []

    def test_a_stream(self) -> None:
        real = stream(1, 2, 3)
        assert names(stream(1, 2, 3), real) == []
        assert names(stream(1, 2, 4), real) == ["last.meta_info.completion_tokens"]
        assert names(replace(real, done=False), real) == ["[DONE]"]
        assert "events" in names(stream(), real)
        assert "body.text" in names(PLAIN, real)

    def test_how_a_stream_grows(self) -> None:
        cumulative, incremental = stream(1, 2, 3), replace(stream(1, 1, 1))
        events = [e | {"meta_info": {"completion_tokens": n}} for n, e in enumerate(incremental.events or (), 1)]
        assert names(replace(incremental, events=tuple(events)), cumulative) == ["last.output_ids", "next.output_ids"]

    def test_a_single_event_says_nothing_of_growth(self) -> None:
        assert names(stream(3), stream(1, 2, 3)) == []
        assert names(stream(1, 3), stream(1, 2, 3)) == []

    def test_the_length_of_logprobs_is_a_number_of_tokens(self) -> None:
        assert names(said(output_token_logprobs_length=2), said(output_token_logprobs_length=2)) == []
        field = "body.meta_info.output_token_logprobs_length"
        assert names(said(output_token_logprobs_length=1), said(output_token_logprobs_length=2)) == [field]

    def test_a_list_that_is_no_tokens_is_compared_as_it_is(self) -> None:
        one, two = replace(PLAIN, body=[1, 2]), replace(PLAIN, body=[1, 3])
        assert (names(one, one), names(one, two)) == ([], ["body"])


class TestCompare:
    def real(self, *exchanges: Exchange) -> Recording:
        return Recording("0.5.23", 256, 999, False, False, None, None, exchanges)

    def test_an_exchange_that_the_mock_lacks_differs(self) -> None:
        (row,) = compare(self.real(), self.real(PLAIN))
        assert (row.behaviour, row.verdict) == ("b", DIFFERS)
        assert str(row.differences[0]) == "the exchange is 'nothing', and 'there' on the server"

    def test_what_only_the_mock_was_asked_is_left_out(self) -> None:
        assert compare(self.real(PLAIN), self.real()) == ()

    def test_the_same_part_twice_is_compared_one_by_one(self) -> None:
        second = replace(PLAIN, status=400)
        assert compare(self.real(PLAIN, second), self.real(PLAIN, second)) == (Row("b", ()),)
        (row,) = compare(self.real(second, PLAIN), self.real(PLAIN, second))
        assert [one.field for one in row.differences] == ["status", "status"]

    def test_a_difference_on_purpose_has_its_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conformance, "PURPOSE", (("b*", "stat*", "it is so"), ("c", "*", "never")))
        mock, real = self.real(replace(PLAIN, status=1, part="p")), self.real(replace(PLAIN, part="p"))
        (row,) = compare(mock, real)
        assert (row.verdict, row.reasons) == (ON_PURPOSE, ("it is so",))
        assert row.differences == (Difference("p", "status", 1, 200, "it is so"),)
        assert str(row.differences[0]) == "p: status is 1, and 200 on the server"
        mock = self.real(replace(PLAIN, status=1, kind="x", part="p"))
        assert compare(mock, real)[0].verdict == DIFFERS


@pytest.mark.parametrize(
    ("mock", "real", "said"),
    [
        ("ab", "ac", "x is 'ab', and 'ac' on the server"),
        ("a" * 61, 5, f"x is '{'a' * 61}', and 5 on the server"),
        ("a" * 61, "b", f"x is '{'a' * 60}...', and 'b' on the server"),
        ("a" * 99 + "b", "a" * 99 + "cd", f"x is '...{'a' * 30}b', and '...{'a' * 30}cd' on the server"),
    ],
)
def test_of_long_texts_the_place_is_shown_where_they_part(mock: Any, real: Any, said: str) -> None:
    assert str(Difference("", "x", mock, real)) == said


class TestMarkdown:
    def test_a_row_for_each_pair_and_a_number_for_each_reason(self) -> None:
        odd = Row("max0", (Difference("", "status", 1, 2, "so it is"),))
        text = markdown(
            [
                ("A", [Row("plain_logprob", ()), Row("stream_logprob", ()), odd, Row("max0_stream", ())]),
                ("B", [Row("max0", (Difference("", "status", 1, 2),))]),
            ]
        )
        assert text.splitlines() == [
            "| behaviour | A | B |",
            "| --- | --- | --- |",
            "| `plain_logprob`, `stream_logprob` | agrees |  |",
            "| `max0`, `max0_stream` | on purpose (1); agrees | differs |",
            "",
            "1. so it is",
        ]


if __name__ == "__main__":
    before, _, rest = SPEC.read_text(encoding="utf-8").partition(BEGIN)
    SPEC.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
