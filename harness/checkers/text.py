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
        if not any(same_text(view.response, d) for d in outcome.decoded or ("",)):
            shown = f"{view.response[:20]!r}, its tokens say {(outcome.decoded or ('',))[0][:20]!r}"
            return Finding(turn.index, f"the text is {shown}", sample)
    return HOLDS if judged else None


def same_text(text: str, decoded: str) -> bool:
    """Equal, where each run of U+FFFD in ``text`` may stand for as many characters or fewer."""
    if text == decoded:
        return True
    if REPLACEMENT not in text and REPLACEMENT not in decoded:
        return False
    pattern = "".join(
        f".{{0,{len(part)}}}" if part.startswith(REPLACEMENT) else re.escape(part)
        for part in re.findall(f"{REPLACEMENT}+|[^{REPLACEMENT}]+", text)
    )
    return any(re.fullmatch(pattern, d, re.DOTALL) for d in (decoded, decoded.replace(REPLACEMENT, "")))
