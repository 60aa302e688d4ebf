"""A stream's events made from pieces: what an event says again is not encoded again.

A cumulative stream repeats itself with every token, and to encode it anew each
time costs the square of its length. Here text, ids and logprobs are kept as JSON
with the places where each token ends, and the rest is cut from an event of the
core's own (`Engine.frame`), so that there is one model of the shapes. The bytes
are those of `Engine.event`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from harness.engines.sglang import ENCODE, Answer, Engine, Place, triples

BLOCK = 128
"""Tokens that are encoded together, before they are due: an answer may be cut off long before its end."""


class Telling:
    """The events of one request that nothing befalls but new weights and retractions.

    For tokenizers that are ``concatenative``: what follows a whole character does not change it.
    """

    def __init__(self, engine: Engine, body: dict[str, Any], ids: tuple[int, ...], place: Place) -> None:
        self._engine, self._body, self._input, self._place = engine, body, ids, place
        self._with_logprobs = bool(body.get("return_logprob"))
        self._skips = (body.get("sampling_params") or {}).get("skip_special_tokens") is not False
        self._text, self._ids, self._logprobs = _Pieces(), _Pieces(), _Pieces()
        self._ready = self._shown = 0
        self._open: tuple[int, ...] = ()
        """``_ready``: tokens in the pieces. ``_open``: those of a character that may go on, ``_shown`` of its text."""
        self._framed: Answer | None = None
        self._frame: tuple[bytes, ...] = ()

    def event(self, answer: Answer, span: tuple[int, int]) -> bytes:
        """The event that tells the tokens of ``span``."""
        first, upto = span
        if upto > self._ready:
            self._prepare(answer, max(upto, self._ready + BLOCK))
        if answer is not self._framed:
            self._frame = self._engine.frame(self._body, self._input, answer, upto, self._place)
            self._framed = answer
        first = first if self._engine.incremental else 0
        rest = 0 if self._engine.old else first  # 0.5.9 makes only the ids a delta (`stream_logprob`)
        head, ids, number, end, *last = self._frame
        parts: list[bytes | bytearray] = [
            head,
            b'"',
            self._text.of(rest, upto),
            b'"',
            ids,
            b"[",
            self._ids.of(first, upto)[:-1],
            b"]",
        ]
        parts += [number, b"%d" % upto, end]
        if self._with_logprobs:
            parts += [b"[", self._logprobs.of(rest, upto)[:-1], b"]", (b"%d" % upto).join(last)]
        return b"".join(parts)

    def _prepare(self, answer: Answer, upto: int) -> None:
        said = answer.ids[self._ready : upto]
        self._ids.grow(b"%d," % token for token in said)
        self._text.grow(self._texts(said))
        if self._with_logprobs:
            encoded = ENCODE(triples(answer, self._ready, upto)).encode()
            self._logprobs.grow(b"[%b]," % triple for triple in encoded[2:-2].split(b"],["))
        self._ready += len(said)

    def _texts(self, said: tuple[int, ...]) -> Iterator[bytes]:
        """What each token adds to the text; an unfinished character is held back, as by `Engine.event`."""
        for token in said:
            self._open = (*self._open, token)
            piece: str = self._engine.tokenizer.decode(self._open, skip_special_tokens=self._skips)
            visible = piece.rstrip("\ufffd")
            yield ENCODE(visible[self._shown :])[1:-1].encode()
            self._shown = len(visible)
            if visible == piece:
                self._open, self._shown = (), 0


class _Pieces:
    """JSON that only grows, a piece a token."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("Q", [0])

    def grow(self, pieces: Iterable[bytes]) -> None:
        made = tuple(pieces)
        self._data += b"".join(made)
        self._ends.extend(tuple(accumulate(map(len, made), initial=self._ends[-1]))[1:])

    def of(self, first: int, upto: int) -> bytearray:
        """The pieces of the tokens from ``first`` on and before ``upto``."""
        return self._data[self._ends[first] : self._ends[upto]]
