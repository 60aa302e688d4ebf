"""Text that a target had a hand in."""

from __future__ import annotations

import pytest

from harness.reporters.plain import clean, cut


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is", "as it is"),
        ("été ✓ 模型 😀", "été ✓ 模型 😀"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31mred\x00\r", r"\x1b[31mred\x00\r"),
        ("half \ud800 a character", r"half \ud800 a character"),
        ("\u202egnirts \ufffe\u2028", r"\u202egnirts \ufffe\u2028"),
    ],
)
def test_what_cannot_be_seen_is_written_as_an_escape(text: str, shown: str) -> None:
    assert clean(text) == shown
    clean(text).encode()


@pytest.mark.parametrize(("text", "shown"), [("12345", "12345"), ("123456", "12..."), ("", "")])
def test_what_is_long_is_cut(text: str, shown: str) -> None:
    assert cut(text, 5) == shown
