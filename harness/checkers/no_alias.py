"""NO-ALIAS: a call leaves the caller's parameters, prompt and arguments and the sibling samples as they were."""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Turn
from harness.history import Raised, Returned


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        if isinstance(turn.outcome, Returned | Raised):
            judged = True
            problem = _problem(turn, turn.outcome)
            if problem:
                return Finding(turn.index, problem, sample)
    return HOLDS if judged else None


def _problem(turn: Turn, outcome: Returned | Raised) -> str | None:
    before, after = turn.params, outcome.params
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name) or (name in before) != (name in after):
            return f"the caller's {name} was {before.get(name)!r}, is {after.get(name)!r}"
    if outcome.writes:
        return f"sets args.{outcome.writes[0]}"
    if outcome.view.prompt != turn.entry.prompt:
        return "changes the prompt"
    known = len(turn.siblings)
    if known == len(outcome.others) and turn.siblings != outcome.others:
        return "changes a sibling sample"
    return None
