"""Events made from pieces are those of the core, byte by byte."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from harness import tokenizer
from harness.engines import telling as module
from harness.engines.sglang import Engine, Place, Reply
from harness.engines.telling import Telling
from harness.schedule import VERSIONS, Schedule

VOCABULARY = tokenizer.load()
PLACE = Place(0, 0, 7)
TOTAL = 60
SPLIT = tuple("é日本".encode())


def script(draw: random.Random) -> tuple[int, ...]:
    """Letters, characters that are split, bytes that are none, merges and special tokens."""
    pieces = [(97,), SPLIT, (255,), (230, 151), (266,), (VOCABULARY.eos_token_id,), (34,), (10,)]
    said = [token for _ in range(TOTAL) for token in draw.choice(pieces)]
    return tuple(said[:TOTAL])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("block", [3, 128])
def test_as_the_core_says_it(
    version: str, incremental: bool, logprobs: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    changes = 0
    for number in range(20):
        draw = random.Random(number)
        schedule = Schedule(script=script(draw), sglang=version)
        engine = Engine(schedule, VOCABULARY, incremental=incremental)
        params: dict[str, Any] = {"max_new_tokens": TOTAL, "skip_special_tokens": draw.random() < 0.5}
        body = {"input_ids": [97], "sampling_params": params, "return_logprob": logprobs, "rid": '日"\n'}
        admitted = engine.admit(body, PLACE)
        assert not isinstance(admitted, Reply)
        ids, answer = admitted
        telling, sent = Telling(engine, body, ids, PLACE), 0
        while sent < TOTAL - 1:
            upto = min(TOTAL - 1, sent + draw.randint(1, 9))
            if draw.random() < 0.2:
                changes += 1
                answer = replace(answer, versions=(("default", sent), ("2", 999)), retractions=changes)
            told = telling.event(answer, (sent, upto))
            assert told == engine.event(body, ids, answer, (sent, upto), PLACE).data
            sent = upto
    assert changes > 20


def test_what_the_answer_no_longer_says_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is encoded in blocks: one that is cut off early costs little."""
    encoded: list[int] = []
    decode = VOCABULARY.decode
    monkeypatch.setattr(VOCABULARY, "decode", lambda ids, **given: encoded.extend(ids) or decode(ids, **given))
    engine = Engine(Schedule(script=(97,)), VOCABULARY)
    body = {"input_ids": [97], "sampling_params": {"max_new_tokens": 5000}}
    admitted = engine.admit(body, PLACE)
    assert not isinstance(admitted, Reply)
    telling = Telling(engine, body, admitted[0], PLACE)
    telling.event(admitted[1], (0, 1))
    telling.event(admitted[1], (1, 2))
    assert len(encoded) == module.BLOCK
