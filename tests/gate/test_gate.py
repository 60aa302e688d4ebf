"""The request gate of SGLang 0.5.23 says what the mock says, and lets through what clients send.

In the server a body first meets the route's type, which refuses much and converts some of the rest, and then the
gate: srt/entrypoints/http_server.py asks `generate_contract_error` (srt/entrypoints/api_contract.py), which decodes
the body as it was sent by `GenerateRequest.from_json_value` and answers 400 {"error": text} to what does not fit,
with stream=true as well. Only then is the request tokenized, and its limits looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from harness import tokenizer
from harness.engines import gate as ours
from harness.engines.sglang import Engine, Place
from harness.schedule import Attempt, Schedule
from harness.targets.checkout import checkout
from harness.targets.function import reference
from tests.gate.bodies import HARMLESS, HOSTILE, bodies
from tests.gate.conftest import Gate
from tests.gate.sent import sent

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("ROLLOUTCHECK_SLIME", "")
UNSEEN = {
    *("image_data", "video_data", "audio_data", "mm_hashes", "images_config", "modalities"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
    *("routed_dp_rank", "disagg_prefill_dp_rank", "kv_hints", "cache_salt", "require_reasoning"),
    *("lora_path", "session_params", "max_thinking_tokens", "custom_logit_processor", "custom_labels"),
    *("return_prompt_token_ids", "routed_experts_start_len", "return_sampling_mask"),
}
"""Fields that the mock does not look at."""


def test_every_field_is_known_or_left_out_on_purpose(gate: Gate) -> None:
    assert tuple(gate.sampling) == tuple(ours.SAMPLING)
    assert set(gate.request) - set(ours.REQUEST) == UNSEEN
    assert set(ours.REQUEST) <= set(gate.request)


@pytest.mark.parametrize(("body", "message"), HOSTILE)
def test_it_refuses_what_the_mock_refuses(gate: Gate, body: dict[str, Any], message: str) -> None:
    assert (gate.violation(body), ours.violation(body)) == (message, message)


@pytest.mark.parametrize("body", HARMLESS)
def test_it_lets_through_what_the_mock_lets_through(gate: Gate, body: dict[str, Any]) -> None:
    assert (gate.violation(body), ours.violation(body)) == (None, None)


@pytest.mark.parametrize("body", [None, [], "x", 3, 1.5, True])
def test_a_body_that_is_no_object(gate: Gate, body: Any) -> None:
    said = gate.violation(body)
    assert said is not None and said == ours.violation(body)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies())
def test_they_agree_on_hostile_bodies(gate: Gate, body: Any) -> None:
    """In every word; and what is let through the mock can answer, or refuse for another reason."""
    said = gate.violation(body)
    assert ours.violation(body) == said
    engine = Engine(Schedule(prompt="a", natural=3), tokenizer.load())
    reply = engine.answer(body, Attempt(), Place(0, 0, 0))
    data = b"".join(part.data for part in reply.parts)
    if said is not None:
        assert (reply.status, reply.stream, json.loads(data)) == (400, False, {"error": said})
    else:
        assert not data.startswith(b'{"error":"') or b"batch" in data


def test_the_reference_passes(gate: Gate) -> None:
    fit_to_be_sent(gate, sent(reference()))


@pytest.mark.skipif(not CHECKOUT, reason="ROLLOUTCHECK_SLIME names no slime checkout")
@pytest.mark.parametrize("revision", ["26e859afc", "624b824a8"])
def test_slime_passes(gate: Gate, revision: str) -> None:
    with checkout(Path(CHECKOUT), revision) as tree:
        command = [sys.executable, "-m", "tests.gate.sent", str(tree.root), tree.revision]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    fit_to_be_sent(gate, [json.loads(line) for line in done.stdout.splitlines()])


def fit_to_be_sent(gate: Gate, sent: list[Any]) -> None:
    """Every body passes both gates; and there are many, of all kinds."""
    assert {gate.violation(body) for body in sent} == {ours.violation(body) for body in sent} == {None}
    assert len(sent) > 100
    assert {bool(body.get("stream")) for body in sent} == {False, True}
    names = {name for body in sent for name in body["sampling_params"]}
    assert names >= {"max_new_tokens", "min_new_tokens", "sampling_seed", "stop", "skip_special_tokens"}
    assert any("image_data" in body for body in sent)
