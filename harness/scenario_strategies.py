"""Hypothesis strategies for scenarios, and for their parts: `harness.machine` draws its steps from the same.

Simple values come first. Steps are weighted so that most scenarios have groups
that end, groups that are aborted, and a later rollout that takes them up again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from harness.scenario import Scenario, Step
from harness.strategies import CACHED_PARTS, batches, distinct, sample_parts

MAX_STEPS = 20

_SIX = range(6)
_WHICH = st.sampled_from(_SIX)


def _one_of(kind: str, whiches: Iterable[int], counts: Iterable[int]) -> st.SearchStrategy[Step]:
    """Every combination, drawn by one choice and not by three: a machine's run is a fifth faster for it."""
    return st.sampled_from([Step(kind, which, count) for which in whiches for count in counts])


STEP: dict[str, st.SearchStrategy[Step]] = {
    "tokens": _one_of("tokens", _SIX, (1, 2, 9, 1)),
    "rollout": st.just(Step("rollout")),
    "end": st.just(Step("end")),
    "hold": _one_of("hold", (0,), (1, 2, 3)),
    "pass": _one_of("pass", range(3), (1, 2, 3)),
    "wait": st.just(Step("wait")),
    # Of nine a client that tries five times fails once; of 99 the sample fails for good.
    "kill": _one_of("kill", _SIX, (1, 99, 9, 99)),
    "abort": _one_of("abort", _SIX, (1,)),
    "update": st.just(Step("update")),
    "restart": st.just(Step("restart")),
    "budget": _one_of("budget", (0,), range(5)),
    "stop": st.just(Step("stop")),
}
"""A strategy for every kind of step."""

WEIGHTS = {"tokens": 8, "rollout": 4, "hold": 2, "pass": 2, "kill": 3}

# Two answers end, and one of them, or both, is still on its way.
_RACE = st.tuples(
    st.builds(Step, st.just("hold"), st.just(0), st.sampled_from((1, 1, 1, 2))),
    st.builds(Step, st.just("tokens"), st.sampled_from((1, 2, 0, 3)), st.just(9)),
    st.builds(Step, st.just("tokens"), st.sampled_from((0, 0, 1)), st.just(9)),
)
# The answer arrives, and the order to abort that follows from it does not.
_SILENCE = st.builds(
    lambda which: (Step("hold", count=2), Step("tokens", which, 9), Step("pass"), Step("wait")), st.sampled_from((0, 1))
)
# An answer that is cut in the middle.
_CUT = _WHICH.map(lambda which: (Step("tokens", which), Step("abort", which)))
# New weights in the middle of an answer.
_CHANGE = st.tuples(st.builds(Step, st.just("tokens"), _WHICH, st.just(1)), st.just(Step("update")))

_SINGLE = (s.map(lambda step: (step,)) for kind, s in STEP.items() for _ in range(WEIGHTS.get(kind, 1)))
_PART: st.SearchStrategy[tuple[Step, ...]] = st.one_of(*_SINGLE, _RACE, _RACE, _CUT, _CUT, _CHANGE, _CHANGE, _SILENCE)
"""A step, or several that show something in this order only, which single ones seldom have."""

_OPENING: st.SearchStrategy[tuple[Step, ...]] = st.one_of(
    st.just(()),
    st.just(()),
    *(part.map(lambda steps: (Step("rollout"), *steps)) for part in (_RACE, _SILENCE, _CHANGE)),
)
_STEPS = st.builds(
    lambda first, parts: (*first, *(step for part in parts for step in part))[:MAX_STEPS],
    _OPENING,
    st.lists(_PART, max_size=MAX_STEPS),
)

SETTINGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 5),
        "members": st.integers(1, 2),
        "batch": st.integers(1, 2),
        "over": st.sampled_from((1, 2, 3, 2)),
        "permits": st.sampled_from((8, 4, 1, 2)),
        "partial": st.sampled_from((True, True, True, False)),
        "mask": st.booleans(),
        "spanning": st.sampled_from((False, False, False, True)),
        "fan_out": st.sampled_from((False,) * 7 + (True,)),
        "late": st.booleans(),
        "lengths": st.lists(st.sampled_from((None, None, 1, 2, 3, 0)), min_size=1, max_size=4).map(tuple),
    }
)
"""Everything of a scenario but its steps."""


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return Scenario(steps=draw(_STEPS), **draw(SETTINGS))


_BATCHES = batches(scenarios())


def drawn(count: int, seed: int) -> Iterator[Scenario]:
    """``count`` different scenarios, the same for the same seed."""
    return sample_parts(lambda number: part(seed, number), count)


@lru_cache(maxsize=CACHED_PARTS)
def part(seed: int, number: int) -> tuple[Scenario, ...]:
    """The ``number``-th part of what is drawn for a seed (`harness.strategies.part`)."""
    return distinct(_BATCHES, seed, number)
