"""Whole rollouts on one screen: what each takes, every call in it, and what becomes of the samples.

Derived from the recorded history, line by line. Samples and rollouts are counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.checkers import LOOP_RULE_IDS, Finding, RolloutCase
from harness.checkers.trace import Trace, Turn
from harness.history import Called, Halted
from harness.reporters.calls import cells, count
from harness.rollouts import (
    Aborting,
    Began,
    Broke,
    Ended,
    Event,
    Group,
    Restarted,
    RolloutHistory,
    Stopped,
    Stuck,
    Updated,
)

MAX_ROWS = 26
WIDTH = 100
Row = tuple[str, ...]


def setting(history: RolloutHistory) -> str:
    """The numbers of the loop: "budget 4, 1 group of 2 a rollout, taken 2 at a time"."""
    s = history.scenario
    words = [f"budget {s.budget}", f"{count(s.batch, 'group')} of {s.members} a rollout, taken {s.over} at a time"]
    words += [] if s.partial else ["no partial rollout"]
    words += ["fully async"] if s.spanning else []
    words += ["off-policy tokens masked"] if s.mask else []
    words += ["generate returns lists"] if s.fan_out else []
    words += [count(s.permits, "permit")] if s.spanning or s.permits != type(s)().permits else []
    return ", ".join(words)


def lines(rule: str, finding: Finding | None, history: RolloutHistory) -> list[str]:
    """The rows up to what is wrong, then what is wrong in words. None: nothing is."""
    at_call = rule not in LOOP_RULE_IDS
    rows = list(_rows(history, finding or Finding(None, ""), at_call=at_call))
    widths = [max((len(row[i]) for row in rows if len(row) > 1), default=0) for i in range(5)]
    out = [_aligned(row, widths) for row in rows]
    if len(out) > MAX_ROWS:
        left = len(out) - MAX_ROWS
        out = [*out[:6], f"... {left} lines more", *out[-(MAX_ROWS - 6) :]]
    if finding is not None and not at_call:
        who = f", sample {finding.sample + 1}" if finding.sample >= 0 else ""
        out.append(f"=> rollout {finding.rollout}{who}: {finding.message}")
    return out


def _rows(history: RolloutHistory, finding: Finding, *, at_call: bool) -> Iterator[Row]:
    calls = calls_of(history)
    rollout = 0
    for event in history.events:
        if isinstance(event, Called):
            wrong = at_call and (event.sample, event.attempt) == (finding.sample, finding.attempt)
            _, turn = calls[event.sample, event.attempt]
            arrow = f"<- rollout {finding.rollout}: {finding.message}" if wrong else ""
            yield (f"  sample {event.sample + 1}", *cells(turn), arrow)
            if wrong:
                return
            continue
        rollout = event.rollout if isinstance(event, Began) else rollout
        if not at_call and rollout > finding.rollout > 0:
            return
        line = said(event)
        if line:
            yield (line,)


def calls_of(history: RolloutHistory) -> dict[tuple[int, int], tuple[Trace, Turn]]:
    """The calls by sample and attempt, each with the trace of its sample."""
    lives = RolloutCase(history.mode, history).lives
    traces = ((life, Trace(life.history)) for life in lives)
    return {(life.sample, life.first + turn.index): (trace, turn) for life, trace in traces for turn in trace.turns}


def said(event: Event) -> str:
    """An event of the loop in a line; empty for one that is not shown."""
    if isinstance(event, Began):
        return f"rollout {event.rollout}, budget {event.budget}"
    if isinstance(event, Ended):
        return f"  trains on {_names(event.groups)}; buffer {_names(event.buffer)}"
    if isinstance(event, Restarted):
        return f"restart: buffer {_names(event.before)} saved, {_names(event.after)} loaded"
    if isinstance(event, Updated):
        return f"  weights {event.version}"
    if isinstance(event, Aborting):
        return f"  abort of {count(event.requests, 'request')}"
    if isinstance(event, Broke):
        return f"  raises {event.error}: {event.message}"[:WIDTH]
    if isinstance(event, Stuck):
        return f"  does not end: {event.why}"[:WIDTH]
    if isinstance(event, Halted):
        return f"  {event.kind}: {event.message}"[:WIDTH]
    return "shut down" if isinstance(event, Stopped) else ""


def _names(groups: Iterable[Group]) -> str:
    """The samples, those of a group joined: "1+2, 5"."""
    return ", ".join("+".join(str(member.sample + 1) for member in group) for group in groups) or "none"


def _aligned(row: Row, widths: list[int]) -> str:
    if len(row) == 1:
        return row[0]
    line = "   ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
    return line if len(line) <= WIDTH + 40 else line[: WIDTH + 37] + "..."
