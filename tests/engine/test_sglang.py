"""The engine core against SGLang as it was recorded: every claim of spec/sglang.md that is marked as modelled.

What is recorded as a behaviour of its own is compared in test_conformance.py; here is what schedules ask for,
and what only shows within one answer.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import tokenizer
from harness.conformance import Difference, differences
from harness.engines import content_type, gate
from harness.engines.sglang import Engine, Place, Reply, decode, logprob
from harness.history import Delivered, Faulted
from harness.record import kept
from harness.schedule import FIELDS, Attempt, Schedule
from harness.strategies import schedules
from harness.wire import Exchange
from tests.engine.recordings import SERVERS, recording
from tests.gate.bodies import HARMLESS, HOSTILE

PROJECT = Path(__file__).resolve().parents[2]
PROMPT = "z" * 10  # ten ids, as in the recorded requests; none of them merge
HERE = Place(0, 0, 0)


@dataclass(frozen=True)
class Answered:
    """A reply, parsed: ``events`` without [DONE] of a stream, ``body`` of a plain answer."""

    reply: Reply
    events: tuple[dict[str, Any], ...]
    done: bool
    body: Any

    @property
    def told(self) -> list[Delivered]:
        return [t for p in self.reply.parts for t in p.tells if isinstance(t, Delivered)]

    @property
    def faults(self) -> list[Faulted]:
        told = [t for p in self.reply.parts for t in p.tells if isinstance(t, Faulted)]
        return told + ([self.reply.lost] if self.reply.lost else [])

    @property
    def last(self) -> dict[str, Any]:
        last: dict[str, Any] = self.events[-1] if self.reply.stream else self.body
        return last

    @property
    def finish(self) -> dict[str, Any] | None:
        finish: dict[str, Any] | None = self.last["meta_info"]["finish_reason"]
        return finish


def parsed(reply: Reply) -> Answered:
    data = b"".join(p.data for p in reply.parts)
    if not reply.stream:
        try:
            return Answered(reply, (), False, json.loads(data))
        except ValueError:
            return Answered(reply, (), False, data.decode())
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    done = lines[-1:] == ["[DONE]"]
    return Answered(reply, tuple(json.loads(x) for x in lines if x != "[DONE]"), done, None)


def ask(
    request: dict[str, Any] | None = None,
    fault: Attempt | None = None,
    *,
    version: str = "0.5.23",
    incremental: bool = False,
    place: Place = HERE,
    **schedule: Any,
) -> Answered:
    """The answer to ``request``; keys that are no fields of /generate are sampling parameters."""
    engine = Engine(
        Schedule(**{"prompt": PROMPT, "script": (97, 98, 99), "sglang": version} | schedule),
        tokenizer.load(),
        incremental=incremental,
    )
    request = {"return_logprob": True, **(request or {})}
    fields = (*gate.REQUEST, "foo")
    body: dict[str, Any] = {k: v for k, v in request.items() if k in fields}
    body.setdefault("sampling_params", {k: v for k, v in request.items() if k not in fields})
    if "text" not in body:
        body.setdefault("input_ids", list(engine.prompt_ids))
    return parsed(engine.answer(body, fault or Attempt(), place))


def recorded(name: str, behaviour: str, part: str = "") -> Exchange:
    """An exchange of one of the recorded servers."""
    return next(x for x in recording(name).exchanges if (x.behaviour, x.part) == (behaviour, part))


def against(ours: Answered, real: Exchange) -> list[Difference]:
    """In what an answer of the mock differs from a recorded one, where it is asked for by a schedule."""
    body = None if ours.reply.stream else ours.body
    events = ours.events if ours.reply.stream else None
    kind = content_type(ours.reply)
    return differences(
        kept(replace(real, status=ours.reply.status, kind=kind, body=body, events=events, of=len(ours.events))), real
    )


def meta(one: Exchange) -> dict[str, Any]:
    """What the whole answer, or a stream's last event, says of its request."""
    said: dict[str, Any] = (one.body if one.events is None else one.events[-1])["meta_info"]
    return said


def count(value: Any) -> int:
    return value["n"] if isinstance(value, dict) else len(value)


def test_every_modelled_claim_has_a_test() -> None:
    """The table in spec/sglang.md: the cases of each row marked "yes" stand in a test's docstring or are replayed."""
    text = (PROJECT / "spec/sglang.md").read_text(encoding="utf-8").partition("## Modelled by the mock engine")[2]
    text = text.partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    holders = [globals(), *(vars(c) for name, c in globals().items() if name.startswith("Test"))]
    tests = [f for holder in holders for name, f in holder.items() if name.startswith("test_")]
    cited = {case for f in tests for case in re.findall(r"`(\w+)`", f.__doc__ or "")}
    cited |= {behaviour for name in SERVERS for behaviour in recording(name).behaviours}
    modelled = [(claim, re.findall(r"`(\w+)`", seen)) for claim, seen, yes in rows if yes.strip() == "yes"]
    assert len(modelled) >= 19
    for claim, cases in modelled:
        cases = [c for c in cases if c not in ("stop", "length")]
        assert cases, f"{claim.strip()}: cites no case"
        for case in cases:
            assert case in cited, f"{claim.strip()}: no test cites {case}"


class TestShapes:
    def test_plain(self) -> None:
        """0.5.23, 0.5.9 `plain_logprob`, `plain_nologprob`: logprob triples, or no logprob keys at all."""
        body = ask({"max_new_tokens": 2}).body
        assert body["output_ids"] == [97, 98]
        assert body["text"] == "ab"
        assert body["meta_info"]["output_token_logprobs"] == [
            [logprob(10, 97), 97, None],
            [logprob(11, 98), 98, None],
        ]
        without = ask({"max_new_tokens": 2, "return_logprob": False}).body["meta_info"]
        assert not [k for k in without if "logprobs" in k]

    @pytest.mark.parametrize("chunks", [(1,), (2,), (1, 4), (100,)])
    def test_cumulative_stream(self, chunks: tuple[int, ...]) -> None:
        """0.5.23 `stream_logprob`: each event repeats ids, text and logprobs; finish_reason only in the last."""
        answer = ask({"stream": True, "max_new_tokens": 7}, chunks=chunks)
        lengths = [len(e["output_ids"]) for e in answer.events]
        assert lengths[-1] == 7
        assert lengths == sorted(set(lengths))
        for event in answer.events:
            length = len(event["output_ids"])
            assert event["output_ids"] == [97, 98, 99, 97, 98, 99, 97][:length]
            assert event["meta_info"]["completion_tokens"] == len(event["meta_info"]["output_token_logprobs"]) == length
            assert event["text"] == "abcabca"[:length]
        finishes = [e["meta_info"]["finish_reason"] for e in answer.events]
        assert finishes == [None] * (len(finishes) - 1) + [{"type": "length", "length": 7}]
        assert answer.done

    def test_incremental_stream(self) -> None:
        """0.5.23i `stream_logprob`: ids, text and logprobs are what is new, completion_tokens is not."""
        answer = ask({"stream": True, "max_new_tokens": 3}, incremental=True)
        assert [e["output_ids"] for e in answer.events] == [[97], [98], [99]]
        assert [e["text"] for e in answer.events] == ["a", "b", "c"]
        assert [len(e["meta_info"]["output_token_logprobs"]) for e in answer.events] == [1, 1, 1]
        assert [e["meta_info"]["completion_tokens"] for e in answer.events] == [1, 2, 3]

    def test_merged_incremental_events(self) -> None:
        """0.5.23i `abort_all`: the second recorded event holds two ids, and completion_tokens 3."""
        event = ask({"stream": True, "max_new_tokens": 3}, incremental=True, chunks=(1, 2)).events[1]
        assert len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"]) == 2
        assert event["meta_info"]["completion_tokens"] == event["meta_info"]["output_token_logprobs_length"] == 3

    def test_0_5_9_stream_output(self) -> None:
        """0.5.9 `stream_logprob`: only output_ids is new, text and logprobs are cumulative."""
        answer = ask({"stream": True, "max_new_tokens": 3}, version="0.5.9", incremental=True)
        assert [e["output_ids"] for e in answer.events] == [[97], [98], [99]]
        assert [e["text"] for e in answer.events] == ["a", "ab", "abc"]
        assert [len(e["meta_info"]["output_token_logprobs"]) for e in answer.events] == [1, 2, 3]

    def test_text_may_wait_for_a_character(self) -> None:
        """0.5.23, 0.5.23i `stream_logprob`: text says nothing new while ids arrive."""
        script = (0xE6, 0x97, 0xA5)
        answer = ask({"stream": True, "max_new_tokens": 3}, script=tuple(_byte_id(b) for b in script))
        assert [len(e["output_ids"]) for e in answer.events] == [1, 2, 3]
        assert [e["text"] for e in answer.events] == ["", "", "日"]

    @pytest.mark.parametrize(
        ("params", "says"),
        [
            ({"skip_special_tokens": "x"}, 'invalid type: string "x", expected a boolean'),
            ({"min_new_tokens": "3"}, 'invalid type: string "3", expected i64'),
            ({"no_stop_trim": 1}, "invalid type: integer `1`, expected a boolean"),
            ({"stop_token_ids": 7}, "invalid type: integer `7`, expected a sequence"),
            ({"stop_token_ids": [3, "a"]}, 'invalid type: string "a", expected i64'),
            ({"max_new_tokens": True}, "invalid type: boolean `true`, expected i64"),
            ({"logit_bias": [1]}, "invalid type: sequence, expected a map"),
            ({"logit_bias": {"120": "a"}}, 'invalid type: string "a", expected f64'),
            ({"stop": 3}, "invalid type: integer `3`, expected a value or an array of values for StringOrList"),
            ({"stop": [3]}, "invalid type: integer `3`, expected a string"),
        ],
    )
    def test_a_parameter_of_the_wrong_type(self, params: dict[str, Any], says: str) -> None:
        """As 0.5.23 `max_bool`; the others were seen by hand (0.5.23)."""
        answer = ask({"max_new_tokens": 3, **params})
        assert answer.reply.status == 400 and json.loads(answer.reply.parts[0].data) == {"error": says}

    def test_a_bias_for_what_is_no_token(self) -> None:
        """0.5.23, by hand."""
        answer = ask({"logit_bias": {"x": 100.0}})
        assert answer.reply.status == 400
        assert answer.body == {"error": {"message": "invalid literal for int() with base 10: 'x'"}}

    @pytest.mark.parametrize(
        "name", ["min_new_tokens", "skip_special_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "stop"]
    )
    def test_null_is_as_if_it_were_not_given(self, name: str) -> None:
        """0.5.23, by hand."""
        assert ask({"max_new_tokens": 3, name: None}).last["output_ids"] == [97, 98, 99]

    def test_an_unknown_top_level_key_is_ignored(self) -> None:
        """0.5.23, 0.5.9 `unknown_toplevel`."""
        assert ask({"max_new_tokens": 1, "foo": 1}).reply.status == 200


def _byte_id(byte: int) -> int:
    alphabet = tokenizer._byte_alphabet()
    found: int = tokenizer.load().backend.token_to_id(alphabet[byte])
    return found


class TestAborts:
    def test_running(self) -> None:
        """0.5.23p `stream_abort_running`, 0.5.23, 0.5.9 `abort_all`: 200, the tokens stay, type abort."""
        for stream in (False, True):
            answer = ask({"max_new_tokens": 9, "stream": stream}, Attempt("abort", after=4))
            assert answer.reply.status == 200
            assert answer.last["output_ids"] == [97, 98, 99, 97]
            finish = answer.finish or {}
            real = meta(recorded("0.5.23", "abort_all", "plain"))["finish_reason"]
            assert {k: finish[k] for k in ("type", "message")} == {k: real[k] for k in ("type", "message")}

    def test_one_more_decode_step(self) -> None:
        """0.5.23p `stream_abort_running`, 0.5.23i `abort_all`: a last token comes after the abort."""
        real = recorded("0.5.23", "abort_running", "stream").events or ()
        assert count(real[-1]["output_ids"]) == count(real[-2]["output_ids"]) + 1
        late = ask({"max_new_tokens": 9, "stream": True}, Attempt("abort-late", after=4))
        assert [len(e["output_ids"]) for e in late.events][-2:] == [4, 5]
        assert (late.finish or {})["type"] == "abort"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("after", [0, 4, 9])
    def test_one_that_is_asked_for(self, after: int, stream: bool) -> None:
        """What a server is asked to do the mock can do too: a counterexample found there runs here."""
        asked, late = (
            ask({"max_new_tokens": 9, "stream": stream}, Attempt(kind, after=after))
            for kind in ("abort-request", "abort-late")
        )
        assert asked == late and len(asked.last["output_ids"]) == min(after + 1, 9)

    @pytest.mark.parametrize("stream", [False, True])
    def test_queued(self, stream: bool) -> None:
        """0.5.23 `abort_all`, a waiting request: no tokens, and no prompt_tokens, cached_tokens, num_retractions."""
        real = recorded("0.5.23-queue", "abort_queued", "stream" if stream else "plain")
        ours = ask({"max_new_tokens": 9, "stream": stream}, Attempt("abort-queued"))
        assert ours.done == stream
        assert against(ours, real) == []
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & ours.last["meta_info"].keys()

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
    def test_retracted_then_aborted(self, version: str, stream: bool) -> None:
        """0.5.23, 0.5.9 `pause_retract_then_abort_all`: the shape of a queued abort, and the tokens stay."""
        real = recorded(version, "pause_retract_then_abort_all", "stream" if stream else "plain")
        ours = ask({"max_new_tokens": 999, "stream": stream}, Attempt("abort-retracted", after=50), version=version)
        assert len(ours.last["output_ids"]) == 50
        assert ours.finish == meta(real)["finish_reason"]
        assert ours.finish == {"type": "abort", "message": "Abort in waiting queue"}
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & ours.last["meta_info"].keys()
        if not stream or version == "0.5.23":  # 0.5.9 was recorded with --stream-output
            assert against(ours, real) == []

    def test_an_incremental_stream_is_told_everything_once_more(self) -> None:
        """0.5.23i `pause_retract_then_abort_all`: all text and logprobs again, and of the ids the last one."""
        real = (recorded("0.5.23-incremental", "pause_retract_then_abort_all", "stream").events or ())[-1]
        assert count(real["meta_info"]["output_token_logprobs"]) >= real["meta_info"]["completion_tokens"]
        asked = {"max_new_tokens": 9, "stream": True}
        last = ask(asked, Attempt("abort-retracted", after=4), incremental=True).events[-1]
        assert (last["text"], last["output_ids"]) == ("abca", [97])
        assert len(last["meta_info"]["output_token_logprobs"]) == last["meta_info"]["completion_tokens"] == 4

    def test_retracted_and_resumed(self) -> None:
        """0.5.23 `pause_retract`: nothing lost or doubled, num_retractions 0 before and 1 after."""
        real = recorded("0.5.23", "pause_retract", "stream").events or ()
        assert [e["meta_info"]["num_retractions"] for e in (real[0], real[-1])] == [0, 1]
        ours = ask({"max_new_tokens": 6, "stream": True}, Attempt("retract", after=3))
        assert [e["meta_info"]["num_retractions"] for e in ours.events] == [0, 0, 1, 1, 1, 1]
        assert ours.last["output_ids"] == [97, 98, 99, 97, 98, 99]
        assert ours.finish == {"type": "length", "length": 6}
        assert "total_retractions" in ask({"max_new_tokens": 6}, version="0.5.9").body["meta_info"]

    def test_just_after_sending(self) -> None:
        """0.5.23 `abort_immediate`: either shape, 0 to 3 tokens; the schedule's kinds give all of them."""
        for part in ("after 0 ms", "after 10 ms", "after 30 ms"):
            real = recorded("0.5.23", "abort_immediate", part)
            kind = "abort-queued" if "queue" in meta(real)["finish_reason"]["message"] else "abort"
            ours = ask({"max_new_tokens": 99}, Attempt(kind, after=meta(real)["completion_tokens"]))
            assert len(ours.last["output_ids"]) == count(real.body["output_ids"])
            assert against(ours, real) == []

    def test_abort_beats_stop_and_length_on_the_last_step(self) -> None:
        """Source: the engine tests for an abort before it tests for the end (spec/README.md, item 1)."""
        full = ask({"max_new_tokens": 3}, Attempt("abort", after=3))
        assert (full.finish or {})["type"] == "abort"
        on_stop = ask({"max_new_tokens": 9}, Attempt("abort", after=3), natural=2)
        assert on_stop.body["output_ids"] == [97, 98, tokenizer.load().eos_token_id]
        assert (on_stop.finish or {})["type"] == "abort"

    def test_an_abort_after_the_end_comes_too_late(self) -> None:
        """0.5.23 `abort_noop`: aborting what is not there does nothing."""
        assert ask({"max_new_tokens": 3}, Attempt("abort", after=4)).finish == {"type": "length", "length": 3}


class TestLimits:
    @pytest.mark.parametrize("stream", [False, True])
    def test_max_0_is_an_empty_answer(self, stream: bool) -> None:
        """0.5.23, 0.5.9 `max0`, `max0_stream`: 200, length, no tokens, no phantom logprob."""
        answer = ask({"max_new_tokens": 0, "stream": stream})
        assert answer.finish == {"type": "length", "length": 0}
        assert answer.last["output_ids"] == answer.last["meta_info"]["output_token_logprobs"] == []
        assert len(answer.events) == stream

    def test_negative_and_wrong_types(self) -> None:
        """0.5.23 `max_neg`, `max_neg_stream`, `max_floatint`, `max_string`, `max_bool`, `max_float`."""
        assert ask({"max_new_tokens": -1}).reply.status == 400
        assert ask({"max_new_tokens": -1, "stream": True}).reply.status == 200
        for wrong in (3.0, "3", True, 3.7):
            answer = ask({"max_new_tokens": wrong})
            assert answer.reply.status == 400
            assert isinstance(answer.body["error"], str)

    def test_defaults(self) -> None:
        """0.5.23, 0.5.9 `max_omitted`, `max_null`: 128, and up to the limit."""
        assert len(ask({}).body["output_ids"]) == 128
        assert len(ask({"max_new_tokens": None}, context=256).body["output_ids"]) == 244

    @pytest.mark.parametrize(("asked", "got"), [(246, 244), (245, 244), (244, 244), (243, 243)])
    def test_silent_cap_near_the_context(self, asked: int, got: int) -> None:
        """0.5.23 `exact_total`, `exact_total_minus1`: length with fewer tokens than were asked for."""
        answer = ask({"max_new_tokens": asked}, context=256)
        assert answer.finish == {"type": "length", "length": got}

    def test_over_the_context(self) -> None:
        """0.5.23, 0.5.9 `over_total`, `over_total_stream`, `exact_total`: 0.5.9 also refuses input + max = C."""
        message = "Requested token count exceeds the model's maximum context length of 256 tokens."
        assert ask({"max_new_tokens": 247}, context=256).body["error"]["message"].startswith(message)
        assert ask({"max_new_tokens": 246}, context=256, version="0.5.9").body["error"]["message"].startswith(message)
        streamed = ask({"max_new_tokens": 247, "stream": True}, context=256)
        assert streamed.reply.status == 200
        assert streamed.events[0]["error"]["message"].startswith(message)

    @pytest.mark.parametrize(("length", "status"), [(249, 200), (250, 400), (255, 400), (256, 400), (300, 400)])
    def test_the_reserve_of_six(self, length: int, status: int) -> None:
        """0.5.23 `input_ctx_minus6_max5`, `input_ctx_minus5_null`, `input_eq_ctx`, `input_too_long`."""
        answer = ask({"input_ids": [122] * length, "max_new_tokens": 1 if length < 256 else None}, context=256)
        assert answer.reply.status == status

    def test_minimum_above_maximum(self) -> None:
        """0.5.23 `min_gt_max`: 400."""
        assert ask({"max_new_tokens": 2, "min_new_tokens": 3}).reply.status == 400
        assert ask({"max_new_tokens": 3, "min_new_tokens": 3}).reply.status == 200


class TestEnds:
    def test_stop_before_the_budget(self) -> None:
        """0.5.23, 0.5.9 `eos_first`, `stop_id_before_budget`: the stop id is counted and leaves the text."""
        for version in ("0.5.23", "0.5.9"):
            body = ask({"max_new_tokens": 9, "skip_special_tokens": False}, natural=2, version=version).body
            eos = tokenizer.load().eos_token_id
            assert body["output_ids"] == [97, 98, eos]
            assert body["text"] == "ab"
            assert body["meta_info"]["completion_tokens"] == len(body["meta_info"]["output_token_logprobs"]) == 3
            assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}

    def test_no_stop_trim(self) -> None:
        """0.5.23, 0.5.9 `stop_id_no_trim`: the text keeps the stop token."""
        asked = {"max_new_tokens": 9, "skip_special_tokens": False, "no_stop_trim": True}
        assert ask(asked, natural=1).body["text"] == "a<|endoftext|>"

    def test_stop_at_the_budget(self) -> None:
        """0.5.23 `stop_id_at_budget1`, `eos_at_budget1`: stop; the same cases of 0.5.9: length."""
        assert (ask({"max_new_tokens": 1}, natural=0).finish or {})["type"] == "stop"
        assert ask({"max_new_tokens": 1}, natural=0, version="0.5.9").finish == {"type": "length", "length": 1}
        for version, kind in (("0.5.23", "stop"), ("0.5.9", "length")):
            for case in ("stop_id_at_budget1", "eos_at_budget1"):
                assert meta(recorded(version, case))["finish_reason"]["type"] == kind

    def test_the_minimum_masks_stop_tokens(self) -> None:
        """0.5.23, 0.5.9 `stop_id_min_new`."""
        body = ask({"max_new_tokens": 9, "min_new_tokens": 4}, natural=1).body
        assert body["output_ids"] == [97, 98, 99, 97, tokenizer.load().eos_token_id]


class TestErrors:
    def test_http_errors(self) -> None:
        """0.5.9 `unknown_param` (500, plain text), 0.5.23p `queue_full` (503); 429 is assumed to look like 503."""
        answer = ask({"max_new_tokens": 1}, Attempt("http", code=500))
        assert (answer.reply.status, answer.body) == (500, "Internal Server Error")
        assert recorded("0.5.9", "unknown_param").body == "Internal Server Error"
        for code in (400, 429, 503):
            answer = ask({"max_new_tokens": 1, "stream": True}, Attempt("http", code=code))
            assert (answer.reply.status, answer.reply.stream) == (code, False)
            assert answer.body["error"]["message"] if code == 400 else answer.body["code"] == code
            assert [f.code for f in answer.faults] == [code]

    def test_a_fault_strikes_as_often_as_the_schedule_says(self) -> None:
        """The harness's own rule: ``times`` requests meet the fault, the next is answered."""
        fault = Attempt("http", code=503, times=2)
        statuses = [ask({"max_new_tokens": 1}, fault, place=Place(0, 0, n)).reply.status for n in range(3)]
        assert statuses == [503, 503, 200]

    @pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
    def test_error_event(self, version: str) -> None:
        """0.5.23, 0.5.9 `over_total_stream`: one event with an error, then [DONE]; 0.5.9 sends the message only."""
        real = (recorded(version, "over_total_stream").events or ())[0]["error"]
        ours = ask({"max_new_tokens": 9, "stream": True}, Attempt("error-event", after=2, code=400), version=version)
        assert ours.reply.status == 200
        assert ours.done
        assert [len(e.get("output_ids", ())) for e in ours.events] == [1, 2, 0]
        error = ours.events[-1]["error"]
        assert {k: v for k, v in error.items() if k != "message"} == {k: v for k, v in real.items() if k != "message"}
        assert [f.kind for f in ours.faults] == ["error-event"]

    def test_queue_full(self) -> None:
        """0.5.23p `queue_full`: plain 503 in a third shape; in a stream an abort with status_code 503."""
        real = recorded("0.5.23-queue", "queue_full", "plain")
        plain = ask({"max_new_tokens": 1}, Attempt("queue-full"))
        assert (plain.reply.status, plain.body) == (real.status, real.body)
        real = recorded("0.5.23-queue", "queue_full", "stream")
        stream = ask({"max_new_tokens": 1, "stream": True}, Attempt("queue-full"))
        assert (stream.reply.status, stream.done) == (200, True)
        assert stream.finish == meta(real)["finish_reason"]
        assert against(stream, real) == []

    def test_a_request_that_is_no_object(self) -> None:
        """A body that is not JSON, or no object, is a 400 with a plain string."""
        engine = Engine(Schedule(prompt=PROMPT), tokenizer.load())
        bodies: list[Any] = [None, [], "x", 3]
        for body in bodies:
            answer = parsed(engine.answer(body, Attempt(), HERE))
            assert answer.reply.status == 400
            assert isinstance(answer.body["error"], str)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("body", "message"), HOSTILE)
    def test_a_body_that_the_gate_refuses(self, body: Any, message: str, stream: bool) -> None:
        """A 400 with a plain string, in a stream too; tests/gate shows that SGLang says the same."""
        answer = ask({**body, "stream": stream} if "stream" not in body else body)
        assert (answer.reply.status, answer.reply.stream, answer.body) == (400, False, {"error": message})

    @pytest.mark.parametrize("body", HARMLESS)
    def test_a_body_that_the_gate_lets_through(self, body: dict[str, Any]) -> None:
        assert ask(body).reply.status == 200

    def test_null_is_the_default(self) -> None:
        """For the server a parameter that is null is none: special tokens are left out of the text."""
        answers = [
            ask({"max_new_tokens": 2, "skip_special_tokens": skip}, script=(273, 97)) for skip in (None, True, False)
        ]
        assert [answer.body["text"] for answer in answers] == ["a", "a", "<|im_end|>a"]

    def test_parameters_of_a_batch_for_one_prompt(self) -> None:
        """Seen with 0.5.23: the gate lets them through, and what comes after it does not expect them."""
        answer = ask({"sampling_params": [{"max_new_tokens": 1}]})
        assert (answer.reply.status, answer.body) == (500, "Internal Server Error")

    @pytest.mark.parametrize("batch", [{"input_ids": [[97], [98]]}, {"text": ["a", "b"]}])
    def test_a_batch_is_not_modelled(self, batch: dict[str, Any]) -> None:
        answer = ask(batch)
        assert (answer.reply.status, answer.body) == (400, {"error": "the mock answers no batch"})

    def test_a_stream_that_is_closed_has_no_terminal_event(self) -> None:
        """A reply cut short in an orderly way: complete events, and no [DONE]."""
        answer = ask({"max_new_tokens": 3, "stream": True}, Attempt("close", after=2))
        assert [e["output_ids"] for e in answer.events] == [[97], [97, 98]]
        assert (answer.done, answer.reply.ending, answer.reply.lost) == (False, "end", HERE.fault("close"))

    def test_a_request_without_any_limit_is_refused(self) -> None:
        """Not of a server: it would go on for hours, the mock would fill the memory."""
        answer = ask({"max_new_tokens": None})
        assert answer.reply.status == 400
        assert answer.body["error"]["message"] == "the schedule never stops and the request sets no limit"


class TestNearTheLimit:
    """0.5.23 `input_ctx_minus6_max5_stream`: what the gate lets through and the scheduler refuses."""

    LATE: ClassVar[dict[str, Any]] = {"input_ids": [122] * 250, "max_new_tokens": 5, "stream": True}

    @pytest.mark.parametrize("logprob", [True, False])
    def test_a_stream_is_refused_with_an_abort_and_a_token_that_answers_nothing(self, logprob: bool) -> None:
        ours = ask(self.LATE | {"return_logprob": logprob}, context=256)
        assert (ours.reply.status, ours.done, len(ours.events)) == (200, True, 1)
        assert (ours.finish or {})["status_code"] == 400
        assert len(ours.last["output_ids"]) == ours.last["meta_info"]["prompt_tokens"] == 1
        assert ours.last["meta_info"].get("output_token_logprobs") == ([] if logprob else None)

    def test_the_history_says_that_it_was_refused(self) -> None:
        """So that a client which keeps that token breaks PREFIX."""
        ours = ask(self.LATE, context=256)
        assert ours.told == []
        assert [(f.kind, f.code) for f in ours.faults] == [("error-event", 400)]

    def test_0_5_9_was_not_seen_to(self) -> None:
        assert "error" in ask(self.LATE, context=256, version="0.5.9").events[0]


class TestStopStrings:
    """0.5.23, 0.5.9 `stopstr_trim` and those beside it."""

    ASKED: ClassVar[dict[str, Any]] = {"max_new_tokens": 9, "stop": "bc"}

    def test_the_ids_stay_and_the_text_is_cut(self) -> None:
        body = ask(self.ASKED).body
        assert (body["output_ids"], body["text"]) == ([97, 98, 99], "a")
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "bc"}

    def test_no_stop_trim(self) -> None:
        assert ask(self.ASKED | {"no_stop_trim": True}).body["text"] == "abc"

    def test_inside_a_token(self) -> None:
        """0.5.23 `stopstr_partial`, `stopstr_partial_trim`."""
        the = tokenizer.load().backend.token_to_id("the")
        asked = {"max_new_tokens": 9, "stop": ["x", "h"]}
        assert ask(asked, script=(the,)).body["text"] == "t"
        assert ask(asked | {"no_stop_trim": True}, script=(the,)).body["text"] == "the"

    def test_at_the_budget(self) -> None:
        """0.5.23 `stopstr_at_budget`: stop; the same case of 0.5.9: length."""
        asked = self.ASKED | {"max_new_tokens": 3}
        assert (ask(asked).finish or {})["type"] == "stop"
        old = ask(asked, version="0.5.9")
        assert (old.finish, old.body["text"]) == ({"type": "length", "length": 3}, "abc")

    def test_what_may_become_one_is_held_back(self) -> None:
        """0.5.23 `stopstr_trim_stream`: no event ever showed text that the last one took back."""
        events = ask(self.ASKED | {"stream": True}).events
        assert [e["text"] for e in events] == ["a", "a", "a"]
        assert [e["text"] for e in ask({"stop": "bb", "max_new_tokens": 3, "stream": True}).events] == ["a", "a", "abc"]

    @pytest.mark.parametrize("stop", ["", ["x", ""]])
    def test_an_empty_one_ends_at_once(self, stop: Any) -> None:
        """0.5.23, by hand."""
        body = ask({"max_new_tokens": 5, "stop": stop}).body
        assert (body["output_ids"], body["text"]) == ([97], "")
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}

    def test_what_is_never_said_stops_nothing(self) -> None:
        assert len(ask({"max_new_tokens": 5, "stop": ["zz"]}).body["output_ids"]) == 5


class TestBiases:
    """A bias of 100 leaves nothing else to be said: `eos_first`, `stop_id_before_budget`, `ignore_eos_and_stop_id`."""

    ASKED: ClassVar[dict[str, Any]] = {"max_new_tokens": 4, "logit_bias": {"120": 100.0}}

    def test_a_token_that_is_no_stop(self) -> None:
        assert ask(self.ASKED).body["output_ids"] == [120] * 4

    def test_a_smaller_bias_decides_nothing(self) -> None:
        assert ask({"max_new_tokens": 2, "logit_bias": {"120": 5.0}}).body["output_ids"] == [97, 98]

    def test_a_stop_token(self) -> None:
        asked = self.ASKED | {"stop_token_ids": [120]}
        assert ask(asked).body["output_ids"] == [120]
        assert ask(asked).finish == {"type": "stop", "matched": 120}
        assert ask(asked | {"ignore_eos": True}).body["output_ids"] == [120] * 4
        assert ask(asked | {"min_new_tokens": 2}).body["output_ids"] == [97, 98, 120]  # `stop_id_min_new`


class TestInputLogprobs:
    def test_from_where_they_are_asked_for(self) -> None:
        """0.5.23, 0.5.9 `plain_logprob_start0`: the first has none."""
        entries = ask({"max_new_tokens": 1} | {"logprob_start_len": 8}).body["meta_info"]["input_token_logprobs"]
        assert entries == [[None, 122, None], [logprob(9, 122), 122, None]]

    @pytest.mark.parametrize("start", [None, -1])
    def test_without_a_start_there_are_none(self, start: Any) -> None:
        """0.5.23 `plain_logprob`; 0.5.9 has the last one."""
        for version, expected in (("0.5.23", []), ("0.5.9", [[None, 122, None]])):
            body = ask({"max_new_tokens": 1, "logprob_start_len": start}, version=version).body
            assert body["meta_info"]["input_token_logprobs"] == expected


class Spaced:
    """A tokenizer that, as SentencePiece, gives a word's space only where something comes before it."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join({1: " a", 2: " b", 3: "\u0301"}[i] for i in ids if i or not skip_special_tokens).lstrip(" ")


class TestDecoding:
    def test_a_word_keeps_its_space_after_what_came_before(self) -> None:
        assert decode(Spaced(), (), (1, 2), False) == "a b"
        assert decode(Spaced(), (1,), (2, 1), False) == " b a"

    def test_text_that_does_not_begin_with_what_came_before_stands_alone(self) -> None:
        """As where a tokenizer composes characters."""

        class Composing(Spaced):
            def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
                return unicodedata.normalize("NFC", super().decode(ids, skip_special_tokens))

        assert decode(Composing(), (1,), (3, 2), False) == "\u0301 b"

    def test_no_ids_are_no_text(self) -> None:
        assert decode(Spaced(), (1,), (), False) == ""


class TestWhatTheClientIsTold:
    """`Delivered` and `Faulted` say what the bytes say."""

    @settings(max_examples=200, deadline=None)
    @given(schedules(), st.booleans(), st.booleans(), st.data())
    def test_told_is_what_was_sent(
        self, schedule: Schedule, stream: bool, incremental: bool, data: st.DataObject
    ) -> None:
        engine = Engine(schedule, tokenizer.load(), incremental=incremental)
        fault = data.draw(st.sampled_from(schedule.attempts or (Attempt(),)))
        kept = data.draw(st.integers(0, 5))
        request = {
            "input_ids": [*engine.prompt_ids, *engine.response_ids(kept)],
            "sampling_params": {"max_new_tokens": schedule.budget},
            "return_logprob": True,
            "stream": stream,
        }
        reply = engine.answer(request, fault, HERE)
        assert engine.answer(request, fault, HERE) == reply  # a pure function
        whole = [p for p in reply.parts if p.tells and isinstance(p.tells[0], Delivered)]
        told = [t for p in whole for t in p.tells if isinstance(t, Delivered)]
        ids = tuple(i for t in told for i in t.ids)
        assert len(ids) <= schedule.budget
        bodies = [json.loads(p.data.removeprefix(b"data: ")) for p in whole]
        if bodies:
            last = bodies[-1]
            entries = last["meta_info"]["output_token_logprobs"]
            if stream and incremental and schedule.sglang != "0.5.9":
                again = (
                    fault.kind == "abort-retracted" and not told[-1].ids
                )  # the last event tells everything once more
                entries = [e for b in bodies[: len(bodies) - again] for e in b["meta_info"]["output_token_logprobs"]]
            assert tuple(e[1] for e in entries) == ids
            assert tuple(e[0] for e in entries) == tuple(p for t in told for p in t.logprobs)
            assert last["meta_info"]["completion_tokens"] == len(ids)
            finish = last["meta_info"]["finish_reason"]
            assert told[-1].finish == (finish and finish["type"])
        if stream and not incremental and bodies:
            assert tuple(bodies[-1]["output_ids"]) == ids

    def test_an_unfaithful_input_gets_another_answer(self) -> None:
        """A lost or re-tokenised token cannot go unseen: the answer differs from the script, the same every time."""
        faithful = ask({"input_ids": [122] * 10 + [97, 98], "max_new_tokens": 3}).body["output_ids"]
        assert faithful == [99, 97, 98]
        assert ask({"input_ids": [122] * 10 + [97], "max_new_tokens": 3}).body["output_ids"] == [98, 99, 97]
        for wrong in ([122] * 9 + [97, 98], [122] * 10 + [256]):
            answers = [ask({"input_ids": wrong, "max_new_tokens": 3}).body["output_ids"] for _ in range(2)]
            assert answers[0] == answers[1]
            assert set(answers[0]) <= set(range(48, 58))

    @pytest.mark.parametrize("field", [f for f in FIELDS if f != "meta_info"])
    def test_a_faulty_engine_leaves_out_a_field(self, field: str) -> None:
        """Not modelled on a server: the mock breaks its contract on request."""
        answer = ask({"max_new_tokens": 2}, Attempt("missing", field=field))
        assert field not in {**answer.body, **answer.body["meta_info"]}
        assert all(t.faulty for t in answer.told)

    def test_a_faulty_engine_delivers_more(self) -> None:
        """Not modelled on a server: more than was asked for."""
        assert len(ask({"max_new_tokens": 2}, Attempt("over-deliver", after=3)).body["output_ids"]) == 5

    def test_a_faulty_engine_loses_ids(self) -> None:
        """0.5.9 `abort_all` (291 ids for 295 logprobs), on request and in any version."""
        answer = ask({"max_new_tokens": 3, "stream": True}, Attempt("lost-ids"), incremental=True)
        assert sum(len(e["output_ids"]) for e in answer.events) < len(answer.told)


class TestDetails:
    """Where the mock once disagreed with the recording."""

    def test_0_5_9_has_no_weight_versions(self) -> None:
        """0.5.9 `stream_logprob`, `plain_logprob`."""
        assert "weight_versions" not in ask({"max_new_tokens": 2, "stream": True}, version="0.5.9").last["meta_info"]

    def test_0_5_23_plain_has_weight_versions(self) -> None:
        """0.5.23 `plain_logprob`."""
        assert "weight_versions" in ask({"max_new_tokens": 2}).body["meta_info"]

    @pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
    def test_a_running_abort_has_two_nulls(self, version: str) -> None:
        """0.5.23, 0.5.9 `abort_all`."""
        real = meta(recorded(version, "abort_all", "plain"))["finish_reason"]
        assert ask({"max_new_tokens": 9}, Attempt("abort", after=2), version=version).finish == real

    def test_0_5_9_answers_an_unknown_key_in_plain_text(self) -> None:
        """0.5.9 `unknown_param`: HTTP 500, text/plain, "Internal Server Error"."""
        real = recorded("0.5.9", "unknown_param")
        ours = ask({"max_new_tokens": 3, "foo": 1, "sampling_params": {"foo": 1}}, version="0.5.9")
        assert (ours.reply.status, ours.body) == (real.status, real.body)

    def test_0_5_9_keeps_the_text_of_a_stop_id_at_the_budget(self) -> None:
        """0.5.9 `stop_id_at_budget1`: text "zz", where 0.5.23 has ""."""
        asked = {"max_new_tokens": 1, "skip_special_tokens": False}
        assert recorded("0.5.9", "stop_id_at_budget1").body["text"]
        assert ask(asked, natural=0, version="0.5.9").body["text"] == "<|endoftext|>"

    def test_0_5_9_repeats_the_last_id_of_a_queue_abort(self) -> None:
        """0.5.9 `pause_retract_then_abort_all`: with --stream-output the last two events bring the same id."""
        real = recorded("0.5.9", "pause_retract_then_abort_all", "stream").events or ()
        assert real[-1]["output_ids"] == real[-2]["output_ids"]
        asked = {"max_new_tokens": 9, "stream": True}
        ours = ask(asked, Attempt("abort-retracted", after=3), version="0.5.9", incremental=True)
        assert ours.events[-1]["output_ids"] == ours.events[-2]["output_ids"]

    @pytest.mark.parametrize("incremental", [False, True])
    def test_text_is_held_back_until_a_character_is_whole(self, incremental: bool) -> None:
        """0.5.23, 0.5.23i `stream_logprob`: the second event brings an id and no new text."""
        script = (65, *(_byte_id(b) for b in "日".encode()))
        ours = ask({"stream": True, "max_new_tokens": 4}, script=script, incremental=incremental).events
        assert ours[1]["text"] == ("" if incremental else ours[0]["text"])

    @pytest.mark.parametrize("code", [429, 503])
    def test_an_http_503_has_the_third_shape(self, code: int) -> None:
        """0.5.23p `queue_full`; spec/sglang.md assumes that 429 looks like 503."""
        real = recorded("0.5.23-queue", "queue_full", "plain").body
        assert ask({"max_new_tokens": 1}, Attempt("http", code=code)).body.keys() == real.keys()
