"""Tokenizers: a small byte-level BPE made on the spot, or a local directory.

The default needs the ``tokenizers`` package only. It is built from an explicit
list of merges instead of training, so that a token id means the same on every
machine and in every stored schedule: ids 0 to 255 are the bytes, then come the
merges, then the special tokens. Merges across likely seams ("a" + "b") make a
client that re-tokenises text get other ids, and multi-byte characters give
tokens that decode to a part of a character.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

MERGES = ("ab", "abc", " a", " ab", "12", "th", "the", " the", "é", "日", "本")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
EOS = "<|endoftext|>"
SHORT = 64
"""Texts of so few tokens are remembered."""


def _byte_alphabet() -> list[str]:
    """The printable stand-in for each byte, as byte-level BPE (GPT-2) defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


class SmallTokenizer:
    """Byte-level BPE with 256 bytes, a few merges and four special tokens.

    ``decode`` keeps special tokens unless asked otherwise, and gives U+FFFD for
    an incomplete character, as Hugging Face tokenizers do.
    """

    name = "small byte-level BPE"
    concatenative = True
    """The text of two lists of ids is the text of both together, but for split characters."""

    def __init__(self) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = _byte_alphabet()
        vocab = {piece: i for i, piece in enumerate(alphabet)}
        merges: list[tuple[str, str]] = []
        for word in MERGES:
            pieces = [alphabet[b] for b in word.encode()]
            while len(pieces) > 1:  # left to right: every prefix of a merge is a token too
                merged = pieces[0] + pieces[1]
                if merged not in vocab:
                    merges.append((pieces[0], pieces[1]))
                    vocab[merged] = len(vocab)
                pieces[:2] = [merged]
        self._texts: dict[tuple[tuple[int, ...], bool], str] = {}  # an engine says the same few texts again and again
        self.backend: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
        self.eos_token_id = self._id(EOS)
        self.eos_token = EOS
        self.pad_token_id, self.pad_token = self.eos_token_id, EOS
        self.image_token_id = self._id("<|image|>")
        self.vocab_size: int = self.backend.get_vocab_size()

    def _id(self, token: str) -> int:
        found: int = self.backend.token_to_id(token)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
        if len(ids) > SHORT:
            return self._decode(ids, skip_special_tokens)
        key = (ids, skip_special_tokens)
        if key not in self._texts:
            if len(self._texts) > 10_000:
                self._texts.clear()
            self._texts[key] = self._decode(ids, skip_special_tokens)
        return self._texts[key]

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **_: Any) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **_: Any) -> Any:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that ``AutoTokenizer.from_pretrained`` loads. Imports transformers."""
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_object=self.backend, eos_token=EOS, pad_token=EOS).save_pretrained(
            str(directory)
        )


@lru_cache(maxsize=4)
def load(directory: str | None = None) -> Any:
    """The tokenizer of a local directory, or the small one. Nothing is downloaded.

    Raises ValueError with one line when the directory holds no tokenizer.
    """
    if directory is None:
        return SmallTokenizer()
    if not Path(directory).is_dir():
        raise ValueError(f"no tokenizer directory: {directory}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it says that there is no PyTorch
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{directory} holds no tokenizer that loads: {type(error).__name__}") from error
