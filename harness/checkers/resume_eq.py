"""RESUME-EQ: interrupted and resumed, a sample ends as one that never was interrupted.

Not judged: what depends on the output of one request alone (min_new_tokens),
what comes after a stop token on which an abort landed, requests in the
engine's reserve below C, and samples the client gave up as FAILED.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Trace
from harness.history import FAILED, TERMINAL, Raised, Returned
from harness.schedule import Schedule

TOLERANCE = 1 / 32
"""The mock's logprobs are sixteenths; a real one gave differences of 1e-6 in float32."""


def check(case: Case) -> Judgement:
    trace, baseline = case.trace, case.baseline
    if baseline is None or not comparable(trace.schedule):
        return None
    if trace.near_limit() or baseline.near_limit():
        return None
    after, expected = final(trace), final(baseline)
    if after is None or expected is None or expected.view.status not in TERMINAL or after.view.status == FAILED:
        return None
    if went_past_stop(trace):
        return None
    problem = difference(after, expected)
    if problem is None:
        return HOLDS
    return Finding(None, f"uninterrupted: {problem}")


def comparable(schedule: Schedule) -> bool:
    """Whether the schedule can be compared with its uninterrupted run, whatever that shows."""
    return not left_to_others(schedule) and bool(schedule.attempts) and not schedule.min_new_tokens


def left_to_others(schedule: Schedule) -> bool:
    """Whether no two runs of the schedule are compared, here and in MODE-EQ."""
    if "lost-ids" in schedule.kinds:
        return True  # a client without logprobs cannot know what was lost
    return schedule.samples > 1  # what sharing one dict does to siblings is told by NO-ALIAS and MAXIMAL


def final(trace: Trace) -> Returned | Raised | None:
    """How the last call ended; None if none did."""
    outcome = trace.turns[-1].outcome if trace.turns else None
    return outcome if isinstance(outcome, Returned | Raised) else None


def difference(one: Returned | Raised, two: Returned | Raised) -> str | None:
    """What two samples differ in, as "expected, here observed"; None if they are alike.

    Where a character was torn between requests the texts are left to TEXT.
    """
    after, expected = one.view, two.view
    for name in ("response_length", "tokens", "status"):
        here, there = getattr(after, name), getattr(expected, name)
        if here != there:
            return f"{name} {_short(there)}, here {_short(here)}"
    if not close(after.logprobs or (), expected.logprobs or ()):
        return "other logprobs"
    if after.response != expected.response and not one.torn and not two.torn:
        return f"text {expected.response[:20]!r}, here {after.response[:20]!r}"
    return None


def close(one: Sequence[float], two: Sequence[float]) -> bool:
    """Equal logprobs: a model computes those of a prompt and of a step in another order, and rounds otherwise."""
    return len(one) == len(two) and all(a == b or abs(a - b) <= TOLERANCE for a, b in zip(one, two, strict=True))


def _short(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def went_past_stop(trace: Trace) -> bool:
    """The stop token came without word that the answer ended (item 1), or the sample was resumed behind one."""
    eos = trace.history.eos
    return any(
        (turn.live and turn.exchanges and turn.entry.tokens[-1:] == (eos,))
        or any(e.finish not in ("stop", "length") and e.ids[-1:] == (eos,) for e in turn.exchanges)
        for turn in trace.turns
    )
