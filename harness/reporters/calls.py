"""A call in a few words: what it asked, what it got, how it ended, and the sample afterwards."""

from __future__ import annotations

from itertools import groupby

from harness.checkers.trace import Exchange, Turn
from harness.history import Halted, Raised

WIDTH = 100


def cells(turn: Turn) -> tuple[str, str, str, str]:
    """Asked, got, how it ended, and the sample afterwards."""
    last = turn.last
    asked = "asks nothing" if last is None else f"asked {'no limit' if last.asked is None else last.asked}"
    got = "" if last is None else f"got {len(last.ids)}"
    if len(turn.exchanges) > 1:
        asked += f", {len(turn.exchanges)} times"
    return asked, got, _end(turn), after(turn)


def _end(turn: Turn) -> str:
    """How the requests of a call ended, repetitions once."""
    ends = ", ".join(key for key, _ in groupby(ended(e) for e in turn.exchanges))
    return " ".join(filter(None, [ends, flag(turn), planned(turn)]))


def flag(turn: Turn) -> str:
    """That the client's abort flag was up."""
    return "abort flag" if turn.flagged else ""


def planned(turn: Turn) -> str:
    """What befell a call that the end of its requests does not tell."""
    if not turn.exchanges or turn.plan.kind not in ("missing", "over-deliver", "lost-ids", "drop-after"):
        return ""
    return f"({turn.plan.kind}{' ' + turn.plan.field if turn.plan.field else ''})"


def ended(exchange: Exchange) -> str:
    """How a request ended: a finish_reason, or what came instead of it."""
    if exchange.finish is not None:
        return exchange.finish
    if exchange.fault is None:
        return "no terminal event"
    code = f" {exchange.fault.code}" if exchange.fault.code is not None else ""
    return f"{'HTTP' if exchange.fault.kind == 'http' else exchange.fault.kind}{code}"


def after(turn: Turn) -> str:
    """The sample afterwards, or why there is none: "truncated with 3"."""
    if isinstance(turn.outcome, Halted):
        return f"{turn.outcome.kind}: {turn.outcome.message}"[:WIDTH]
    if turn.after is None:
        return ""
    raised = f", raises {turn.outcome.error}" if isinstance(turn.outcome, Raised) else ""
    return f"{turn.after.status} with {turn.after.response_length}{raised}"


def count(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
