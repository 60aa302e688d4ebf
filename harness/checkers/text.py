"""TEXT: the text is the decoded response, and takes no part in the accounting.

Compared without regard to special tokens, a trailing stop token, and U+FFFD
where an interruption fell inside a character (spec/README.md, item 6).
"""

from __future__ import annotations

import re

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.history import Raised, Returned

REPLACEMENT = "\ufffd"


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        outcome = turn.outcome
        if not isinstance(outcome, Returned | Raised) or not turn.exchanges:
            continue
        view = outcome.view
        if (len(view.tokens) - trace.prompt if view.tokens else 0) != view.response_length:
            continue  # which tokens are the response is unclear: ALIGN's to say
        judged = True
        if not _agrees(view.response, outcome):
            return Finding(turn.index, f"the text is {_shown(view.response, outcome.decoded[0])}", sample)
    return HOLDS if judged else None


def _agrees(text: str, outcome: Returned | Raised) -> bool:
    """The text is the decoded ids; where requests tore a character, U+FFFD may stand for it or it may be missing."""
    if any(text in (d, d.rstrip(REPLACEMENT)) for d in outcome.decoded):
        return True  # a stream that breaks off holds an unfinished character back
    return any(re.fullmatch(_pattern(torn), text, re.DOTALL) for torn in outcome.torn)


def _pattern(torn: str) -> str:
    parts = re.findall(f"{REPLACEMENT}+|[^{REPLACEMENT}]+", torn)
    return "".join(f".{{0,{len(p)}}}" if p.startswith(REPLACEMENT) else re.escape(p) for p in parts)


def _shown(text: str, decoded: str) -> str:
    """Both from a little before they part."""
    start = max(next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), len(text)) - 8, 0)
    dots = "..." if start else ""
    return f"{dots}{text[start : start + 20]!r}, its tokens say {dots}{decoded[start : start + 20]!r}"
