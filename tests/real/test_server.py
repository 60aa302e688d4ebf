"""The box itself: the real server answers, its greedy answers are repeatable, and it goes away."""

from __future__ import annotations

from typing import Any

from harness import tokenizer as tokenizers
from tests.real.model import CONTEXT
from tests.real.server import SMALL, VERSION, Server, client, other_flags

TOKENIZER = tokenizers.load()
ENDS, GOES_ON = "1+1=", "hello"
"""Prompts whose greedy answers end after four tokens, and not within forty."""


def greedy(server: Server, ids: list[int], most: int = 40) -> Any:
    return server.generate({"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": most}})


def ids_of(server: Server, ids: list[int], most: int = 40) -> list[int]:
    answer: list[int] = greedy(server, ids, most)["output_ids"]
    return answer


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text)
    return ids


def test_it_is_there(real: Server) -> None:
    with client(timeout=60) as http:
        assert http.get(f"{real.url}/health").status_code == 200
    told = real.get("/get_server_info")
    assert told["version"] == VERSION
    assert real.context == CONTEXT


def test_a_greedy_answer_is_the_same_every_time(real: Server) -> None:
    first = ids_of(real, encode(GOES_ON))
    assert len(first) == 40
    assert ids_of(real, encode(GOES_ON)) == first


def test_an_answer_goes_on_where_it_was_cut(real: Server) -> None:
    """What resuming relies on (RESUME-EQ): after the prompt and five tokens of the answer come the others."""
    prompt = encode(GOES_ON)
    whole = ids_of(real, prompt)
    assert ids_of(real, [*prompt, *whole[:5]], 35) == whole[5:]


def test_an_answer_ends_by_itself(real: Server) -> None:
    answer = greedy(real, encode(ENDS))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": TOKENIZER.eos_token_id}
    assert answer["output_ids"][-1] == TOKENIZER.eos_token_id
    assert 1 < len(answer["output_ids"]) < 40


def test_client_and_server_share_the_tokenizer(real: Server) -> None:
    """A text and its ids are the same prompt."""
    params = {"temperature": 0, "max_new_tokens": 8}
    by_text = real.generate({"text": "the 日本 abc", "sampling_params": params})
    by_ids = real.generate({"input_ids": encode("the 日本 abc"), "sampling_params": params})
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(encode("the 日本 abc"))


@other_flags(*SMALL)
def test_one_with_other_flags(other: Server) -> None:
    """It runs beside the first. That nothing of it is left afterwards, its fixture looks after."""
    assert other.context == 256
    assert ids_of(other, encode(ENDS))[-1] == TOKENIZER.eos_token_id
