"""The engine core against SGLang as it was recorded: every claim of spec/sglang.md that is marked as modelled.

``observed.json`` is extracted from exchanges with real servers; "0.5.23", "0.5.23i", "0.5.23p" and "0.5.9" are the
servers of spec/sglang.md. Ids, times and latencies are left out, ``input_ids`` is a count, a text is its first six
characters, and a list of more than six entries is {n, head, tail}.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import tokenizer
from harness.engines import content_type
from harness.engines.sglang import Engine, Place, Reply, decode, logprob
from harness.history import Delivered, Faulted
from harness.schedule import FIELDS, Attempt, Schedule
from harness.strategies import schedules

PROJECT = Path(__file__).resolve().parents[2]
OBSERVED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("observed.json").read_text(encoding="utf-8"))
PROMPT = "z" * 10  # ten ids, as in the recorded requests; none of them merge
HERE = Place(0, 0, 0)

ABSENT = {
    "meta_info.output_token_logprobs_length": "no client reads it; the list says how long it is",
    "meta_info.reasoning_tokens": "no reasoning parser is modelled",
    "meta_info.dp_rank": "one worker",
}
"""Fields of the real server that the mock leaves out on purpose. Latencies and time stamps are left out likewise."""

OTHER_VALUES = {
    "text": "another model and tokenizer",
    "output_ids": "another model; how many there are is compared",
    "meta_info.output_token_logprobs": "another model; how many there are is compared",
    "meta_info.input_token_logprobs": "0.5.9 repeats the last input id; no client under test asks for the input's",
    "meta_info.cached_tokens": "the mock caches nothing",
    "meta_info.prompt_tokens": "a text prompt has other tokens here",
    "meta_info.weight_version": "the recorded server's weights were updated before some cases",
    "meta_info.weight_versions": "as weight_version",
    "meta_info.finish_reason.matched": "another tokenizer's EOS",
}
"""Fields that agree in name and type, and differ in value on purpose."""


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
    fields = ("input_ids", "text", "stream", "return_logprob", "sampling_params", "foo", "rid")
    body: dict[str, Any] = {k: v for k, v in request.items() if k in fields}
    body.setdefault("sampling_params", {k: v for k, v in request.items() if k not in fields})
    if "text" not in body:
        body.setdefault("input_ids", list(engine.prompt_ids))
    return parsed(engine.answer(body, fault or Attempt(), place))


def replay(key: str) -> tuple[Answered, dict[str, Any]]:
    """The mock's answer to a recorded request, and the recorded answer."""
    server, _, case = key.partition(" ")
    request, answer = dict(OBSERVED[key]["request"]), OBSERVED[key]["answer"]
    if "input_ids" in request:
        request["input_ids"] = [122] * request["input_ids"]
    elif "text" not in request:
        request["input_ids"] = None  # `no_input`
    last = answer["events"][-2] if "events" in answer else answer["body"]
    meta = last.get("meta_info", {}) if isinstance(last, dict) else {}
    natural = None
    if (meta.get("finish_reason") or {}).get("type") == "stop" or case in ("eos_at_budget1", "stop_id_at_budget1"):
        natural = meta["completion_tokens"] - 1
    if case == "stop_id_min_new":
        natural = 0
    engine = Engine(
        Schedule(prompt=PROMPT, script=(48,), natural=natural, context=256, sglang=server.rstrip("ip")),
        tokenizer.load(),
        incremental=server in ("0.5.23i", "0.5.9"),  # the recorded 0.5.9 ran with --stream-output
    )
    return parsed(engine.answer(request, Attempt(), HERE)), answer


def fields(value: Any, where: str = "") -> dict[str, Any]:
    """The leaves of nested objects by their dotted path; lists are leaves."""
    if not isinstance(value, dict) or "n" in value or not value:
        return {where: value}
    return {k: v for name, inner in value.items() for k, v in fields(inner, f"{where}.{name}".lstrip(".")).items()}


def count(value: Any) -> int:
    return value["n"] if isinstance(value, dict) else len(value)


def differences(mock: dict[str, Any], real: dict[str, Any]) -> list[str]:
    """Fields in which a mock event or body differs from a recorded one, other than on purpose."""
    ours, theirs, found = fields(mock), fields(real), []
    ours.pop("meta_info.id")
    for name in sorted({*ours, *theirs}):
        if name not in ours and name not in ABSENT:
            found.append(f"{name}: the mock lacks it")
        elif name in ours and name not in theirs:
            found.append(f"{name}: the real server does not send it")
        elif name in ours:
            one, two = ours[name], theirs[name]
            if isinstance(one, list):
                if "input" not in name and count(one) != count(two):
                    found.append(f"{name}: {count(one)} entries, recorded {count(two)}")
            elif type(one) is not type(two) or (one != two and name not in OTHER_VALUES):
                found.append(f"{name}: {one!r}, recorded {two!r}")
    return found


REPLAYED = sorted(k for k, v in OBSERVED.items() if "request" in v)
ERRORS = [k for k in REPLAYED if "error" in json.dumps(OBSERVED[k]["answer"]) or OBSERVED[k]["answer"]["status"] != 200]
ANSWERS = [k for k in REPLAYED if k not in ERRORS]


@pytest.mark.parametrize("key", REPLAYED)
def test_status_and_content_type_agree(key: str) -> None:
    """Every recorded request: the same HTTP status, and the same kind of body."""
    ours, real = replay(key)
    assert ours.reply.status == real["status"]
    assert ours.reply.stream == ("events" in real)
    if key != "0.5.9 unknown_param":  # see test_0_5_9_answers_an_unknown_key_in_plain_text
        assert content_type(ours.reply) == real["ctype"]


@pytest.mark.parametrize("key", ANSWERS)
def test_answers_agree_field_by_field(key: str) -> None:
    """Every recorded answer: the same keys and types; the same values but for `OTHER_VALUES`."""
    ours, real = replay(key)
    if "events" not in real:
        assert differences(ours.body, real["body"]) == []
        return
    assert real["events"][-1] == "data: [DONE]"
    assert ours.done
    theirs = real["events"][:-1]
    assert len(ours.events) == real.get("of", len(theirs))
    for one, two in zip((ours.events[0], ours.events[-1]), (theirs[0], theirs[-1]), strict=True):
        assert differences(one, two) == []


@pytest.mark.parametrize("key", [k for k in ERRORS if k != "0.5.9 unknown_param"])
def test_errors_agree(key: str) -> None:
    """Every recorded error: the same shape and code, and the same words but for those of a wrong type or name."""
    ours, real = replay(key)
    if "events" in real:
        assert [e.keys() for e in ours.events] == [{"error"}]
        assert ours.done
        mock, recorded = ours.events[0]["error"], real["events"][0]["error"]
    else:
        assert ours.body.keys() == real["body"].keys() == {"error"}
        mock, recorded = ours.body["error"], real["body"]["error"]
    assert type(mock) is type(recorded)
    if isinstance(mock, str):
        return  # the field's type or name is wrong: the words are the deserialiser's
    assert mock.keys() == recorded.keys()
    assert recorded["message"].startswith(mock["message"])  # the mock leaves out the advice at the end
    assert {k: v for k, v in mock.items() if k != "message"} == {k: v for k, v in recorded.items() if k != "message"}


def test_every_modelled_claim_has_a_test() -> None:
    """The table in spec/sglang.md: the cases of each row marked "yes" stand in a test's docstring or are replayed."""
    text = (PROJECT / "spec/sglang.md").read_text(encoding="utf-8").partition("## Modelled by the mock engine")[2]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    holders = [globals(), *(vars(c) for name, c in globals().items() if name.startswith("Test"))]
    tests = [f for holder in holders for name, f in holder.items() if name.startswith("test_")]
    cited = {case for f in tests for case in re.findall(r"`(\w+)`", f.__doc__ or "")}
    cited |= {key.split()[1] for key in REPLAYED}
    modelled = [(claim, re.findall(r"`(\w+)`", seen)) for claim, seen, yes in rows if yes.strip() == "yes"]
    assert len(modelled) >= 19
    for claim, cases in modelled:
        cases = [c for c in cases if c not in ("stop", "length")]
        assert cases, f"{claim.strip()}: cites no case"
        for case in cases:
            assert case in cited, f"{claim.strip()}: no test cites {case}"


def test_observed_holds_nothing_personal() -> None:
    """The extract is small and holds no ids, times or addresses."""
    text = Path(__file__).with_name("observed.json").read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert not re.search(r'"(id|rid|e2e_latency|response_sent_to_client_ts|timestamp)"', text)
    assert not re.search(r"/home|[0-9a-f]{32}|1[78]\d{8}", text)


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
        real = OBSERVED["0.5.23i abort_all stream"]["answer"]["events"][1]
        ours = ask({"stream": True, "max_new_tokens": 3}, incremental=True, chunks=(1, 2)).events[1]
        for event in (real, ours):
            assert len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"]) == 2
            assert event["meta_info"]["completion_tokens"] == 3

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
            real = OBSERVED["0.5.23 abort_all plain"]["answer"]["body"]["meta_info"]["finish_reason"]
            assert {k: finish[k] for k in ("type", "message")} == {k: real[k] for k in ("type", "message")}

    def test_one_more_decode_step(self) -> None:
        """0.5.23p `stream_abort_running`, 0.5.23i `abort_all`: a last token comes after the abort."""
        real = OBSERVED["0.5.23p stream_abort_running"]["answer"]["events"]
        assert count(real[-2]["output_ids"]) == count(real[-3]["output_ids"]) + 1
        late = ask({"max_new_tokens": 9, "stream": True}, Attempt("abort-late", after=4))
        assert [len(e["output_ids"]) for e in late.events][-2:] == [4, 5]
        assert (late.finish or {})["type"] == "abort"

    @pytest.mark.parametrize("stream", [False, True])
    def test_queued(self, stream: bool) -> None:
        """0.5.23 `abort_all`, a waiting request: no tokens, and no prompt_tokens, cached_tokens, num_retractions."""
        real = OBSERVED["0.5.23 abort_all stream"]["answer"]["events"][0]
        ours = ask({"max_new_tokens": 9, "stream": stream}, Attempt("abort-queued"))
        assert ours.done == stream
        assert differences(ours.last, real) == []
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & ours.last["meta_info"].keys()

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
    def test_retracted_then_aborted(self, version: str, stream: bool) -> None:
        """0.5.23, 0.5.9 `pause_retract_then_abort_all`: the shape of a queued abort, and the tokens stay."""
        answer = OBSERVED[f"{version} pause_retract_then_abort_all {'stream' if stream else 'plain'}"]["answer"]
        real = answer["events"][-2] if stream else answer["body"]
        ours = ask({"max_new_tokens": 999, "stream": stream}, Attempt("abort-retracted", after=50), version=version)
        assert len(ours.last["output_ids"]) == 50
        assert ours.finish == real["meta_info"]["finish_reason"]
        assert ours.finish == {"type": "abort", "message": "Abort in waiting queue"}
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & ours.last["meta_info"].keys()
        if not stream and version == "0.5.23":
            assert differences(ours.last, real) == []

    def test_retracted_and_resumed(self) -> None:
        """0.5.23 `pause_retract`: nothing lost or doubled, num_retractions 0 before and 1 after."""
        real = OBSERVED["0.5.23 pause_retract stream"]["answer"]["events"]
        assert [e["meta_info"]["num_retractions"] for e in (real[0], real[-2])] == [0, 1]
        ours = ask({"max_new_tokens": 6, "stream": True}, Attempt("retract", after=3))
        assert [e["meta_info"]["num_retractions"] for e in ours.events] == [0, 0, 1, 1, 1, 1]
        assert ours.last["output_ids"] == [97, 98, 99, 97, 98, 99]
        assert ours.finish == {"type": "length", "length": 6}
        assert "total_retractions" in ask({"max_new_tokens": 6}, version="0.5.9").body["meta_info"]

    def test_just_after_sending(self) -> None:
        """0.5.23 `abort_immediate`: either shape, 0 to 3 tokens; the schedule's kinds give all of them."""
        for finish, ids, probs in OBSERVED["0.5.23 abort_immediate"]["finish"].values():
            kind = "abort-queued" if "queue" in finish["message"] else "abort"
            ours = ask({"max_new_tokens": 9}, Attempt(kind, after=ids))
            assert len(ours.last["output_ids"]) == ids
            assert len(ours.last["meta_info"]["output_token_logprobs"]) == probs
            assert (ours.finish or {})["message"] == finish["message"]

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
                body = OBSERVED[f"{version} {case}"]["answer"]["body"]
                assert body["meta_info"]["finish_reason"]["type"] == kind

    def test_the_minimum_masks_stop_tokens(self) -> None:
        """0.5.23, 0.5.9 `stop_id_min_new`."""
        body = ask({"max_new_tokens": 9, "min_new_tokens": 4}, natural=1).body
        assert body["output_ids"] == [97, 98, 99, 97, tokenizer.load().eos_token_id]


class TestErrors:
    def test_http_errors(self) -> None:
        """0.5.9 `unknown_param` (500, plain text), 0.5.23p `queue_full` (503); 429 is assumed to look like 503."""
        answer = ask({"max_new_tokens": 1}, Attempt("http", code=500))
        assert (answer.reply.status, answer.body) == (500, "Internal Server Error")
        assert OBSERVED["0.5.9 unknown_param"]["answer"]["body"] == "Internal Server Error"
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
        real = OBSERVED[f"{version} over_total_stream"]["answer"]["events"][0]["error"]
        ours = ask({"max_new_tokens": 9, "stream": True}, Attempt("error-event", after=2, code=400), version=version)
        assert ours.reply.status == 200
        assert ours.done
        assert [len(e.get("output_ids", ())) for e in ours.events] == [1, 2, 0]
        error = ours.events[-1]["error"]
        assert {k: v for k, v in error.items() if k != "message"} == {k: v for k, v in real.items() if k != "message"}
        assert [f.kind for f in ours.faults] == ["error-event"]

    def test_queue_full(self) -> None:
        """0.5.23p `queue_full`: plain 503 in a third shape; in a stream an abort with status_code 503."""
        real = OBSERVED["0.5.23p queue_full plain"]["answer"]
        plain = ask({"max_new_tokens": 1}, Attempt("queue-full"))
        assert (plain.reply.status, plain.body) == (real["status"], real["body"])
        event = OBSERVED["0.5.23p queue_full stream"]["answer"]["events"][0]
        stream = ask({"max_new_tokens": 1, "stream": True}, Attempt("queue-full"))
        assert (stream.reply.status, stream.done) == (200, True)
        assert stream.finish == event["meta_info"]["finish_reason"]
        assert differences(stream.events[0], event) == []

    def test_a_request_that_is_no_object(self) -> None:
        """A body that is not JSON, or no object, is a 400 with a plain string."""
        engine = Engine(Schedule(prompt=PROMPT), tokenizer.load())
        bodies: list[Any] = [None, [], "x", 3]
        for body in bodies:
            answer = parsed(engine.answer(body, Attempt(), HERE))
            assert answer.reply.status == 400
            assert isinstance(answer.body["error"], str)

    @pytest.mark.parametrize("stream", [False, True])
    def test_parameters_that_are_no_object(self, stream: bool) -> None:
        """As any body that does not fit: a 400 with a plain string, in a stream too."""
        answer = ask({"sampling_params": [1], "stream": stream})
        assert (answer.reply.status, answer.body) == (400, {"error": "sampling_params must be an object"})

    @pytest.mark.parametrize("ids", ["zz", [1.0], [True], ["z"], {}])
    def test_input_ids_that_are_no_ids(self, ids: Any) -> None:
        answer = ask({"input_ids": ids})
        assert (answer.reply.status, answer.body) == (400, {"error": "input_ids must be a list of integers"})

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
                entries = [e for b in bodies for e in b["meta_info"]["output_token_logprobs"]]
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

    @pytest.mark.parametrize("key", ["0.5.23 abort_all plain", "0.5.9 abort_all plain"])
    def test_a_running_abort_has_two_nulls(self, key: str) -> None:
        """0.5.23, 0.5.9 `abort_all`."""
        real = OBSERVED[key]["answer"]["body"]["meta_info"]["finish_reason"]
        assert ask({"max_new_tokens": 9}, Attempt("abort", after=2), version=key[:6].strip()).finish == real

    def test_0_5_9_answers_an_unknown_key_in_plain_text(self) -> None:
        """0.5.9 `unknown_param`: HTTP 500, text/plain, "Internal Server Error"."""
        ours, real = replay("0.5.9 unknown_param")
        assert ours.body == real["body"]

    def test_0_5_9_keeps_the_text_of_a_stop_id_at_the_budget(self) -> None:
        """0.5.9 `stop_id_at_budget1`: text "zz", where 0.5.23 has ""."""
        asked = {"max_new_tokens": 1, "skip_special_tokens": False}
        assert OBSERVED["0.5.9 stop_id_at_budget1"]["answer"]["body"]["text"]
        assert ask(asked, natural=0, version="0.5.9").body["text"] == "<|endoftext|>"

    def test_0_5_9_repeats_the_last_id_of_a_queue_abort(self) -> None:
        """0.5.9 `pause_retract_then_abort_all`: with --stream-output the last two events bring the same id."""
        real = OBSERVED["0.5.9 pause_retract_then_abort_all stream"]["answer"]["events"]
        assert real[-2]["output_ids"] == real[-3]["output_ids"]
        asked = {"max_new_tokens": 9, "stream": True}
        ours = ask(asked, Attempt("abort-retracted", after=3), version="0.5.9", incremental=True)
        assert ours.events[-1]["output_ids"] == ours.events[-2]["output_ids"]

    @pytest.mark.parametrize("incremental", [False, True])
    def test_text_is_held_back_until_a_character_is_whole(self, incremental: bool) -> None:
        """0.5.23, 0.5.23i `stream_logprob`: the second event brings an id and no new text."""
        real = OBSERVED[f"0.5.23{'i' if incremental else ''} stream_logprob"]["answer"]["events"]
        assert real[1]["text"] == ("" if incremental else real[0]["text"])
        script = (65, *(_byte_id(b) for b in "日".encode()))
        ours = ask({"stream": True, "max_new_tokens": 4}, script=script, incremental=incremental).events
        assert ours[1]["text"] == ("" if incremental else ours[0]["text"])

    @pytest.mark.parametrize("code", [429, 503])
    def test_an_http_503_has_the_third_shape(self, code: int) -> None:
        """0.5.23p `queue_full`; spec/sglang.md assumes that 429 looks like 503."""
        real = OBSERVED["0.5.23p queue_full plain"]["answer"]["body"]
        assert ask({"max_new_tokens": 1}, Attempt("http", code=code)).body.keys() == real.keys()
