"""The small tokenizer means the same on every machine, and loads through transformers as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import tokenizer

SMALL = tokenizer.load()

GOLDEN = {
    "a": [97],
    "b": [98],
    "ab": [256],
    "abc": [257],
    "a b": [97, 32, 98],
    " a": [258],
    " ab": [32, 256],
    "12": [260],
    "th": [261],
    "the": [262],
    " the": [32, 262],
    "é": [266],
    "日": [268],
    "日本": [268, 270],
    "zz": [122, 122],
    "<|endoftext|>": [271],
    "<|im_start|>": [272],
    "<|im_end|>": [273],
    "<|image|>": [274],
    "the ab<|im_end|>é": [262, 32, 256, 273, 266],
    "": [],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_ids_are_stable(text: str) -> None:
    """Stored schedules hold ids: a change here makes every one of them mean something else."""
    assert SMALL.encode(text) == GOLDEN[text]


def test_special_ids() -> None:
    assert (SMALL.eos_token_id, SMALL.image_token_id, SMALL.vocab_size) == (271, 274, 275)


def test_bytes_are_the_first_256_ids() -> None:
    alphabet = tokenizer._byte_alphabet()
    assert sorted(SMALL.backend.token_to_id(alphabet[b]) for b in range(256)) == list(range(256))
    assert [SMALL.backend.token_to_id(alphabet[b]) for b in range(256)] == list(range(256))


@settings(deadline=None)
@given(st.text())
def test_text_survives(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 270), max_size=8), st.lists(st.integers(0, 270), max_size=8))
def test_texts_of_parts_join_but_for_split_characters(one: list[int], two: list[int]) -> None:
    """`SmallTokenizer.concatenative`."""
    whole, parts = SMALL.decode(one + two), SMALL.decode(one) + SMALL.decode(two)
    assert whole == parts or "\ufffd" in parts


def test_tokens_again_are_not_the_tokens_that_were_sampled() -> None:
    """What makes PREFIX visible: a client that re-tokenises gets other ids."""
    assert SMALL.encode(SMALL.decode([97, 98])) == [256]


def test_half_a_character_is_the_replacement_character() -> None:
    first = SMALL.backend.token_to_id(tokenizer._byte_alphabet()[0xE6])
    assert SMALL.decode([first]) == "\ufffd"


def test_special_tokens_show_unless_asked_otherwise() -> None:
    assert SMALL.decode([97, 271]) == "a<|endoftext|>"
    assert SMALL.decode([97, 271], skip_special_tokens=True) == "a"
    assert SMALL.batch_decode([[97], [271]], True) == ["a", ""]


def test_what_clients_use_of_a_hugging_face_tokenizer() -> None:
    assert SMALL("ab") == {"input_ids": [256], "attention_mask": [1]}
    text = SMALL.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>user\nab<|im_end|>\n"
    assert SMALL.apply_chat_template([{"role": "user", "content": "ab"}]) == SMALL.encode(text)


def test_texts_are_remembered_but_not_without_bound() -> None:
    small = tokenizer.SmallTokenizer()
    decoded: list[tuple[int, ...]] = []
    real = small._decode

    def counted(ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        decoded.append(ids)
        return real(ids, skip_special_tokens)

    small._decode = counted  # type: ignore[method-assign]
    assert [small.decode(97), small.decode([97]), small.decode([97] * 65)] == ["a", "a", "a" * 65]
    assert decoded == [(97,), (97,) * 65]
    small.decode([97] * 65)
    assert len(decoded) == 3  # a long text is rarely said twice
    for number in range(10_001):
        small.decode([number % 200, number // 200])
    assert len(small._texts) < 10_000
    assert small.decode([97]) == "a" and decoded.count((97,)) == 2


def test_load_is_kept() -> None:
    assert tokenizer.load() is tokenizer.load()


def test_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    SMALL.save_pretrained(tmp_path)
    loaded = tokenizer.load(str(tmp_path))
    assert loaded is not SMALL
    assert loaded.eos_token_id == SMALL.eos_token_id
    for text, ids in GOLDEN.items():
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids, skip_special_tokens=False) == SMALL.decode(ids)
        assert loaded.decode(ids, skip_special_tokens=True) == SMALL.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("content", [None, "", "not json", '{"model_type": "nobody knows"}'])
def test_a_bad_directory_is_one_line(tmp_path: Path, content: str | None) -> None:
    directory = tmp_path / "tokenizer"
    if content is not None:
        directory.mkdir()
        if content:
            (directory / "tokenizer.json").write_text(content)
            (directory / "config.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer") as caught:
        tokenizer.load(str(directory))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer directory"):
        tokenizer.load(str(file))
