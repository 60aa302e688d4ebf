"""A violation on one screen: the calls in a row, and beside the one that is wrong what it may do.

Derived from the recorded history, line by line.
"""

from __future__ import annotations

import spec
from harness.checkers import Finding
from harness.checkers.trace import Trace
from harness.history import History
from harness.reporters import rollouts
from harness.reporters.calls import WIDTH, cells, count
from harness.rollouts import RolloutHistory
from harness.schedule import Schedule
from harness.work import Run

MAX_CALLS = 12


def lines(
    rule: str,
    target: str,
    mode: str,
    engine: str,
    finding: Finding | None,
    history: Run,
    *,
    faulty_engine: bool = False,
) -> list[str]:
    """The screen without the replay command: headline, setting, a line a call, sources. No finding: the rule holds."""
    should = "" if spec.RULES[rule].level == "MUST" else " (SHOULD)"
    verdict = ("holds" if finding is None else "violated") + should
    head = f"{rule} {verdict}   {target}   {mode}   {engine}"
    if isinstance(history, RolloutHistory):
        out = [head + "   whole rollouts", "  " + rollouts.setting(history)]
        out += ["  " + line for line in rollouts.lines(rule, finding, history)]
    else:
        out = [head + ("   faulty engine" if faulty_engine else ""), "  " + setting(history)]
        out += ["  " + line for line in calls(Trace(history), finding)]
        out += [f"  {finding.message}"] if finding is not None and finding.attempt is None else []
    if finding is None:
        return out
    sources = ", ".join(source.ref for source in spec.RULES[rule].sources[:2])
    out.append(f"  why      {spec.anchor(rule)}" + (f", {sources}" if sources else ""))
    return out


def setting(history: History) -> str:
    """The numbers the sample starts with: "prompt 3, budget 2, context unknown"."""
    schedule = history.schedule
    context = "unknown" if schedule.context is None else schedule.context
    words = [f"prompt {len(history.prompt_ids)}", f"budget {schedule.budget}", f"context {context}"]
    words += [f"{count(schedule.preload, 'token')} kept before"] if schedule.preload else []
    words += [f"{schedule.samples} samples share one dict"] if schedule.samples > 1 else []
    words += [count(schedule.images, "image")] if schedule.images else []
    words += [f"min_new_tokens {schedule.min_new_tokens}"] if schedule.min_new_tokens else []
    words += [f"stop {list(schedule.stop)}"] if schedule.stop else []
    words += [f"seed {schedule.seed}"] if schedule.seed is not None else []
    words += [f"SGLang {schedule.sglang}"] if schedule.sglang != Schedule().sglang else []
    return ", ".join(words)


def calls(trace: Trace, finding: Finding | None) -> list[str]:
    """One line a call up to the one that is wrong, with an arrow at it."""
    rows = []
    arrow_at = None if finding is None or finding.attempt is None else (finding.attempt, finding.sample)
    for sample, turn in sorted(trace.all_turns, key=lambda pair: (pair[1].index, pair[0])):
        wrong = (turn.index, sample) == arrow_at
        name = f"attempt {turn.index + 1}" + (f" of sample {sample + 1}" if trace.schedule.samples > 1 else "")
        rows.append((name, *cells(turn), f"<- {finding.message}" if finding is not None and wrong else ""))
        if wrong:
            break
    if len(rows) > MAX_CALLS:
        left = len(rows) - MAX_CALLS
        rows = [*rows[:3], (f"... {left} more", "", "", "", "", ""), *rows[-(MAX_CALLS - 3) :]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]  # the arrow's column is open
    aligned = ("   ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows)
    return [line if len(line) <= WIDTH + 40 else line[: WIDTH + 37] + "..." for line in aligned]
