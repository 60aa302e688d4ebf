"""A violation on one screen: the calls in a row, and beside the one that is wrong what it may do.

Derived from the recorded history, line by line.
"""

from __future__ import annotations

from itertools import groupby

import spec
from harness.checkers import Finding
from harness.checkers.trace import Exchange, Trace, Turn
from harness.history import Halted, History, Raised
from harness.schedule import Schedule

MAX_CALLS = 12
WIDTH = 100


def lines(
    rule: str, target: str, mode: str, engine: str, finding: Finding, history: History, *, faulty_engine: bool = False
) -> list[str]:
    """The screen without the replay command: headline, setting, a line a call, sources."""
    trace = Trace(history)
    verdict = "violated" if spec.RULES[rule].level == "MUST" else "violated (SHOULD)"
    head = f"{rule} {verdict}   {target}   {mode}   {engine}"
    out = [head + ("   faulty engine" if faulty_engine else ""), "  " + setting(history)]
    out += ["  " + line for line in calls(trace, finding)]
    if finding.attempt is None:
        out.append(f"  {finding.message}")
    sources = ", ".join(source.ref for source in spec.RULES[rule].sources[:2])
    out.append(f"  why      {spec.anchor(rule)}" + (f", {sources}" if sources else ""))
    return out


def setting(history: History) -> str:
    """The numbers the sample starts with: "prompt 3, budget 2, context unknown"."""
    schedule = history.schedule
    context = "unknown" if schedule.context is None else schedule.context
    words = [f"prompt {len(history.prompt_ids)}", f"budget {schedule.budget}", f"context {context}"]
    words += [f"{_count(schedule.preload, 'token')} kept before"] if schedule.preload else []
    words += [f"{schedule.samples} samples share one dict"] if schedule.samples > 1 else []
    words += [_count(schedule.images, "image")] if schedule.images else []
    words += [f"min_new_tokens {schedule.min_new_tokens}"] if schedule.min_new_tokens else []
    words += [f"stop {list(schedule.stop)}"] if schedule.stop else []
    words += [f"seed {schedule.seed}"] if schedule.seed is not None else []
    words += [f"SGLang {schedule.sglang}"] if schedule.sglang != Schedule().sglang else []
    return ", ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def calls(trace: Trace, finding: Finding) -> list[str]:
    """One line a call up to the one that is wrong, with an arrow at it."""
    rows = []
    for sample, turn in sorted(trace.all_turns, key=lambda pair: (pair[1].index, pair[0])):
        wrong = finding.attempt is not None and (turn.index, sample) == (finding.attempt, finding.sample)
        name = f"attempt {turn.index + 1}" + (f" of sample {sample + 1}" if trace.schedule.samples > 1 else "")
        rows.append((name, *_cells(turn), f"<- {finding.message}" if wrong else ""))
        if wrong:
            break
    if len(rows) > MAX_CALLS:
        left = len(rows) - MAX_CALLS
        rows = [*rows[:3], (f"... {left} more", "", "", "", "", ""), *rows[-(MAX_CALLS - 3) :]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]  # the arrow's column is open
    aligned = ("   ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows)
    return [line if len(line) <= WIDTH + 40 else line[: WIDTH + 37] + "..." for line in aligned]


def _cells(turn: Turn) -> tuple[str, str, str, str]:
    """Asked, got, how it ended, and the sample afterwards."""
    last = turn.last
    asked = "asks nothing" if last is None else f"asked {'no limit' if last.asked is None else last.asked}"
    got = "" if last is None else f"got {len(last.ids)}"
    if len(turn.exchanges) > 1:
        asked += f", {len(turn.exchanges)} times"
    return asked, got, _end(turn), _after(turn)


def _end(turn: Turn) -> str:
    """How the requests of a call ended, repetitions once."""
    words = [", ".join(key for key, _ in groupby(_ended(e) for e in turn.exchanges))]
    if turn.flagged:
        words.append("abort flag")
    if turn.exchanges and turn.plan.kind in ("missing", "over-deliver", "lost-ids", "drop-after"):
        words.append(f"({turn.plan.kind}{' ' + turn.plan.field if turn.plan.field else ''})")
    return " ".join(filter(None, words))


def _ended(exchange: Exchange) -> str:
    if exchange.finish is not None:
        return exchange.finish
    if exchange.fault is None:
        return "no terminal event"
    code = f" {exchange.fault.code}" if exchange.fault.code is not None else ""
    return f"{'HTTP' if exchange.fault.kind == 'http' else exchange.fault.kind}{code}"


def _after(turn: Turn) -> str:
    if isinstance(turn.outcome, Halted):
        return f"{turn.outcome.kind}: {turn.outcome.message}"[:WIDTH]
    if turn.after is None:
        return ""
    raised = f", raises {turn.outcome.error}" if isinstance(turn.outcome, Raised) else ""
    return f"{turn.after.status} with {turn.after.response_length}{raised}"
