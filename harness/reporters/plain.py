"""Text that a target had a hand in, made fit for any file and any screen."""

from __future__ import annotations


def clean(text: str) -> str:
    r"""The text with whatever cannot be seen written as an escape: ``\x1b``, ``\ud800``, ``\u202e``.

    Control characters are not allowed in XML, lone surrogates cannot be encoded, and
    direction marks would have a line read as something else. Line feeds and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
