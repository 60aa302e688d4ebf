"""What smaller means for a scenario, and which scenarios are simpler than one (`harness.shrink`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from harness.scenario import AIMED, COUNTED, Scenario, Step

_PLAIN = Scenario()
_FIELDS = tuple(f.name for f in fields(Scenario) if f.name not in ("budget", "steps"))
_NUMBERS = ("budget", "members", "batch", "over")
_ORDER = ("tokens", "rollout", "end", "abort", "wait", "kill", "update", "restart", "budget", "stop", "hold", "pass")
"""Kinds of steps, the easiest to follow first."""

_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("over", 2),
    ("over", 3),
    ("members", 2),
    ("batch", 2),
    ("permits", 1),
    ("partial", False),
    ("spanning", True),
    ("late", True),
    ("lengths", (1,)),
    ("lengths", (0,)),
)
_STEPS = (Step("tokens"), Step("rollout"), Step("abort"), Step("kill"), Step("budget", count=0))
MAX_PARTLY, MAX_EXCHANGED = 8, 5


def size(scenario: Scenario) -> tuple[int, ...]:
    """What smaller means: fewer steps, less that is unusual, smaller numbers, plainer steps, in this order."""
    unusual = sum(getattr(scenario, name) != getattr(_PLAIN, name) for name in _FIELDS)
    numbers = sum(getattr(scenario, name) for name in _NUMBERS) + sum(
        0 if n is None else n + 1 for n in scenario.lengths
    )
    numbers += sum(s.count for s in scenario.steps if s.kind in COUNTED) + sum(
        s.which for s in scenario.steps if s.kind in AIMED
    )
    kinds = sum(_ORDER.index(s.kind) for s in scenario.steps)
    rest = len(scenario.lengths) + abs(scenario.permits - _PLAIN.permits)
    untidy = sum(s != _tidy(s) for s in scenario.steps)
    places = sum(place for place, s in enumerate(scenario.steps) if s.kind in ("rollout", "hold"))
    return (len(scenario.steps), unusual, numbers, kinds, rest, untidy, places)


SMALLEST = sorted(
    {
        Scenario(budget=1),
        *(Scenario(budget=1, **{a: b}) for a, b in _SETTINGS),
        *(Scenario(budget=1, **{a: b, c: d}) for a, b in _SETTINGS for c, d in _SETTINGS if a != c),
    },
    key=size,
)
"""Those without steps, of which at most two settings are unusual: all are tried, from whatever it is that is shrunk."""


def simpler(s: Scenario) -> Iterator[Scenario]:
    """Simpler scenarios, the boldest first."""
    steps = s.steps
    yield from SMALLEST
    yield replace(s, steps=())
    for length in (len(steps) // 2, len(steps) // 4):
        if length > 1:
            for start in range(0, len(steps), length):
                yield replace(s, steps=(*steps[:start], *steps[start + length :]))
    for i in reversed(range(len(steps))):
        yield replace(s, steps=(*steps[:i], *steps[i + 1 :]))
    for i in range(len(steps)):
        for j in range(i + 1, len(steps)):
            if len(steps) <= 8:
                yield replace(s, steps=(*steps[:i], *steps[i + 1 : j], *steps[j + 1 :]))
    for name in _FIELDS:
        yield _with(s, **{name: getattr(_PLAIN, name)})
    yield replace(s, steps=tuple(map(_tidy, steps)))
    for name in _NUMBERS:
        for lower in dict.fromkeys((1, getattr(s, name) // 2, getattr(s, name) - 1)):
            if 0 < lower < getattr(s, name):
                yield _with(s, **{name: lower})
    for i, length_ in enumerate(s.lengths):
        for other in (None, 0, 1, (length_ or 0) - 1):
            if other != length_ and (other or 0) >= 0:
                yield replace(s, lengths=(*s.lengths[:i], other, *s.lengths[i + 1 :]))
        if len(s.lengths) > 1:
            yield replace(s, lengths=(*s.lengths[:i], *s.lengths[i + 1 :]))
    for i, step in enumerate(steps):
        for plain in _simpler_steps(step):
            yield replace(s, steps=(*steps[:i], plain, *steps[i + 1 :]))
        if step.kind == "tokens" and step.count == 1 and s.budget > 1:  # it may only be there to begin the rollout
            begun = (*steps[:i], Step("rollout"), *steps[i + 1 :])
            yield _with(s, budget=s.budget - 1, steps=begun)
        for name in ("budget", "members", "over"):  # one number less here and there
            if step.kind in COUNTED and step.count > 1 and getattr(s, name) > 1:
                fewer = replace(step, count=step.count - 1)
                yield _with(s, **{name: getattr(s, name) - 1, "steps": (*steps[:i], fewer, *steps[i + 1 :])})
    for i in range(len(steps) - 1):
        yield replace(s, steps=(*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]))
    if len(steps) <= MAX_PARTLY:
        yield from _partly(s)
    if len(steps) <= MAX_EXCHANGED:
        yield from _exchanged(s)


def _exchanged(s: Scenario) -> Iterator[Scenario]:
    """With one or two things taken away and another put in their place.

    There is more than one way to an abort, or to a sample that is taken up
    again: what was found by one of them ends like what was found by another.
    """
    for without in _without(s):
        for name, value in _SETTINGS:
            if getattr(without, name) == getattr(_PLAIN, name):
                yield replace(without, **{name: value})
        yield replace(without, budget=without.budget + 1)
    for i, j in _places(len(s.steps)):
        rest = (*s.steps[:i], *s.steps[i + 1 : j], *s.steps[j + 1 :])
        for step in _STEPS:
            there = replace(s, steps=(*rest[:i], step, *rest[i:]))
            yield there
            yield replace(there, budget=s.budget + 1)
            for name in _FIELDS:
                if getattr(s, name) != getattr(_PLAIN, name):
                    yield _with(there, **{name: getattr(_PLAIN, name)})


def _partly(s: Scenario) -> Iterator[Scenario]:
    """With something half done in place of some steps.

    A sample that has a part of its answer: the engine aborts it late, or the
    loop does. A batch that has a part of its groups: the loop is shut down.
    """
    for i, j in _places(len(s.steps)):
        before, after = s.steps[:i], s.steps[j + 1 :]
        for budget in (s.budget, s.budget + 1):
            yield _with(s, budget=budget, late=True, steps=(*before, Step("abort"), *after))
            settings = {"budget": budget, "late": False, "batch": 1, "over": 2}
            yield _with(s, **settings, steps=(*before, Step("tokens", 1), *after))
            yield _with(s, **settings, steps=(*before, Step("tokens", 1), Step("update"), *after))
        yield _with(s, batch=2, over=1, steps=(*before, Step("tokens"), Step("stop"), *after))


def _places(length: int) -> Iterator[tuple[int, int]]:
    for i in range(length):
        for j in range(i, length):
            yield i, j


def _without(s: Scenario) -> Iterator[Scenario]:
    """With one or two steps less, or one setting."""
    for i in range(len(s.steps)):
        yield replace(s, steps=(*s.steps[:i], *s.steps[i + 1 :]))
    for i in range(len(s.steps)):
        for j in range(i + 1, len(s.steps)):
            yield replace(s, steps=(*s.steps[:i], *s.steps[i + 1 : j], *s.steps[j + 1 :]))
    for name in _FIELDS:
        if getattr(s, name) != getattr(_PLAIN, name):
            yield _with(s, **{name: getattr(_PLAIN, name)})


def _simpler_steps(step: Step) -> Iterator[Step]:
    for kind in _ORDER[: _ORDER.index(step.kind)]:
        yield _tidy(replace(step, kind=kind))
    for name in ("which", "count"):
        value = getattr(step, name)
        least = 1 if name == "count" and step.kind != "budget" else 0
        for lower in dict.fromkeys((0, 1, value // 2, value - 1)):
            if least <= lower < value:
                yield replace(step, **{name: lower})


def _tidy(step: Step) -> Step:
    """Without the numbers that its kind does not look at."""
    plain = Step(step.kind)
    return Step(
        step.kind,
        step.which if step.kind in AIMED else plain.which,
        step.count if step.kind in COUNTED else plain.count,
    )


def _with(s: Scenario, **values: Any) -> Scenario:
    return replace(s, **values)
