"""Schedules and scenarios made for the mock, as a server that runs can take them.

Where the mock is told when to abort, a server is asked to, and a few tokens more
come before it has: lengths are longer here. What only an engine itself can cause is
left out, and so are images, which most models do not take, and sampling seeds.
A context limit becomes the server's own, with a prompt that leaves as much room.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.scenario import Scenario, Step
from harness.schedule import FAULTY_ENGINE, Attempt, Schedule
from harness.server import Server
from harness.work import Work

SCALE = 8
LONGEST_PROMPT = 8_192
"""Tokens; above that a context limit is not put to the test."""

LONGEST_BUDGET = 512
"""Tokens; an issue's own numbers would take a server minutes."""

FILLERS = ("x", " x", ".")
MARGIN = 8
"""Tokens that must be free behind what a client asks who knows no limit: a little more than the server's reserve."""

LOOPS_CANNOT = frozenset({"hold", "pass", "update"})
"""Steps that a server cannot be made to take."""

ENDING = (Step("budget"), Step("rollout"))
"""What a server stops exactly at its budget is luck."""

BECOMES = {
    "abort": "abort-request",
    "abort-late": "abort-request",
    "abort-retracted": "abort-request",
    "abort-queued": "abort-request",
    "retract": "delay",
}


def adapt(work: Work, server: Server, tokenizer: Any) -> Work | None:
    """The schedule or scenario for this server; None where it makes no sense there."""
    return _scenario(work) if isinstance(work, Scenario) else _schedule(work, server, tokenizer)


def _scenario(scenario: Scenario) -> Scenario | None:
    """Longer, too; but at the end the budget is lowered, so that there are samples which have all they may have."""
    if scenario.budget > LONGEST_BUDGET:
        return None
    steps = (*(_step(s) for s in scenario.steps if s.kind not in LOOPS_CANNOT), *ENDING)
    return replace(scenario, budget=scenario.budget * SCALE, late=False, lengths=(None,), steps=steps)


def _step(step: Step) -> Step:
    return replace(step, count=step.count * SCALE) if step.kind == "tokens" else step


def _schedule(schedule: Schedule, server: Server, tokenizer: Any) -> Schedule | None:
    if (schedule.kinds and set(schedule.kinds) <= FAULTY_ENGINE) or schedule.budget > LONGEST_BUDGET:
        return None
    made = replace(
        schedule,
        budget=schedule.budget * SCALE,
        preload=schedule.preload * SCALE,
        min_new_tokens=schedule.min_new_tokens * SCALE,
        attempts=tuple(_attempt(a, schedule.budget) for a in schedule.attempts if a.kind not in FAULTY_ENGINE),
        script=tuple(t for t in schedule.script if t < 256) or (97,),
        natural=None if schedule.natural is None else schedule.natural * SCALE,
        images=0,
        seed=None,
        context=None,
        sglang=server.version,
    )
    prompt = len(tokenizer.encode(schedule.prompt, add_special_tokens=False))
    if schedule.context is None:
        return made if prompt + made.budget + MARGIN <= server.limit else None
    length = server.limit - (schedule.context - prompt)
    if server.limit > LONGEST_PROMPT or length < 1:
        return None
    text = _prompt(schedule.prompt, length, tokenizer)
    return replace(made, prompt=text, context=server.limit) if text is not None else None


def _attempt(attempt: Attempt, budget: int) -> Attempt:
    kind, after = BECOMES.get(attempt.kind, attempt.kind), attempt.after * SCALE
    if kind == "abort-request" and attempt.after >= budget:  # it would come when the answer is whole
        after = budget * SCALE // 2
    return replace(attempt, kind=kind, after=after)


def _prompt(text: str, length: int, tokenizer: Any) -> str | None:
    """The text, filled up to so many tokens; None where that cannot be had."""
    for filler in FILLERS:
        count = max(length - len(tokenizer.encode(text, add_special_tokens=False)), 0)
        for _ in range(4):
            tried = text + filler * count
            missing = length - len(tokenizer.encode(tried, add_special_tokens=False))
            if missing == 0:
                return tried
            count = max(count + missing, 0)
    return None
