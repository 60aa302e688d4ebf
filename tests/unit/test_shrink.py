"""Shrinking: what is found is still broken, never larger, and the same whatever it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings

from harness import corpus
from harness.checkers import Case, Finding, checker
from harness.history import PLAIN
from harness.runner import Runner
from harness.schedule import Attempt, Schedule, from_json, to_json
from harness.shrink import MAX_TRIES, shrink, size
from harness.strategies import schedules
from harness.targets.function import FunctionTarget
from tests.function_targets import forgets_subtraction
from tests.quality.search import drawn

Predicate = Callable[[Schedule], bool]

QUIET = settings(database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))

SMALLEST: dict[str, tuple[Predicate, Schedule]] = {
    "anything": (lambda s: True, Schedule(budget=0)),
    "budget": (lambda s: s.budget >= 3, Schedule(budget=3)),
    "abort": (
        lambda s: any(a.kind == "abort" and a.after >= 2 for a in s.attempts),
        Schedule(budget=0, attempts=(Attempt("abort", after=2),)),
    ),
    "images": (lambda s: s.images > 0, Schedule(budget=0, images=1)),
    "context": (lambda s: s.context is not None, Schedule(budget=0, context=1)),
    "round-trip": (
        lambda s: any(a.round_trip for a in s.attempts),
        Schedule(budget=0, attempts=(Attempt(round_trip=True),)),
    ),
    "two-attempts": (lambda s: len(s.attempts) >= 2, Schedule(budget=0, attempts=(Attempt(), Attempt()))),
    "siblings": (lambda s: s.samples > 1, Schedule(budget=0, samples=2)),
    "version": (lambda s: s.sglang == "0.5.9", Schedule(budget=0, sglang="0.5.9")),
    "prompt": (lambda s: len(s.prompt) >= 2, Schedule(budget=0, prompt="ab")),
}
LOOSE = {"prompt", "round-trip"}
"""Where the letters or the kind that are left depend on where it came from."""


def like(schedule: Schedule) -> tuple[int, ...]:
    """How many attempts there are and how much else is unusual, without the attempts' kinds."""
    return (len(schedule.attempts), *size(replace(schedule, attempts=()))[:1])


@pytest.mark.parametrize("name", SMALLEST)
@QUIET
@given(schedule=schedules())
def test_the_result_is_the_smallest(name: str, schedule: Schedule) -> None:
    predicate, smallest = SMALLEST[name]
    assume(predicate(schedule))
    result = shrink(schedule, predicate)
    assert like(result) == like(smallest) if name in LOOSE else result == smallest


class Counted:
    """A predicate that notes what it was asked."""

    def __init__(self, predicate: Predicate) -> None:
        self.predicate, self.asked = predicate, list[Schedule]()

    def __call__(self, schedule: Schedule) -> bool:
        self.asked.append(schedule)
        return self.predicate(schedule)


def strange(schedule: Schedule) -> bool:
    """Nothing that falls with the size: numbers that hang together."""
    return (schedule.budget + 3 * len(schedule.attempts) + len(schedule.prompt)) % 3 == 0


@QUIET
@given(schedule=schedules())
def test_what_holds_of_every_result(schedule: Schedule) -> None:
    assume(strange(schedule))
    counted = Counted(strange)
    result = shrink(schedule, counted)
    assert strange(result)
    assert size(result) <= size(schedule)
    assert len(counted.asked) == len(set(counted.asked)) <= MAX_TRIES
    assert schedule not in counted.asked
    assert shrink(schedule, strange) == result
    assert shrink(result, strange) == result
    assert from_json(to_json(result)) == result


@QUIET
@given(schedule=schedules(faulty=True))
def test_nothing_is_smaller_than_what_nothing_smaller_breaks(schedule: Schedule) -> None:
    assert shrink(schedule, lambda s: s == schedule) == schedule


@pytest.mark.parametrize(
    ("name", "schedule"), [(e.name, e.work) for e in corpus.load() if isinstance(e.work, Schedule)]
)
def test_a_corpus_entry_shrinks_within_bounds(name: str, schedule: Schedule) -> None:
    counted = Counted(lambda s: len(s.attempts) == len(schedule.attempts))
    result = shrink(schedule, counted)
    assert len(result.attempts) == len(schedule.attempts), name
    assert size(result) <= size(schedule)
    assert len(counted.asked) <= MAX_TRIES


def test_the_number_of_tries_is_bounded() -> None:
    """A long schedule that gives way one token at a time."""
    long = Schedule(budget=9000, natural=7001, attempts=(Attempt("abort", after=8003),) * 5)
    counted = Counted(lambda s: len(s.attempts) == 5 and s.budget % 2 == 0)
    shrink(long, counted)
    assert len(counted.asked) <= MAX_TRIES


def test_what_cannot_be_made_smaller_is_given_up_in_time() -> None:
    """More tokens than tries, each of which might have been the plain one."""
    counted = Counted(lambda s: False)
    schedule = Schedule(script=(66,) * (MAX_TRIES + 100))
    assert shrink(schedule, counted) == schedule
    assert len(counted.asked) == MAX_TRIES - 1  # the schedule itself is one of the seen


def test_a_fault_that_strikes_often_needs_to_strike_twice_at_most() -> None:
    schedule = Schedule(budget=0, attempts=(Attempt("http", code=500, times=60),))
    result = shrink(schedule, lambda s: any(a.kind == "http" and a.times > 1 for a in s.attempts))
    assert result == Schedule(budget=0, attempts=(Attempt("http", code=400, times=2),))


def test_what_is_tried_instead_of_what_is_odd() -> None:
    """Each for its own reason, and none taken here: nothing is broken by anything smaller."""
    odd = Schedule(budget=0, script=(66, 67), seed=5, attempts=(Attempt("error-event", after=2, code=503),))
    counted = Counted(lambda s: False)
    assert shrink(odd, counted) == odd
    for kind in ("flag", "close", "drop-inside"):
        assert replace(odd, attempts=(Attempt(kind, after=2),)) in counted.asked
    assert replace(odd, seed=0) in counted.asked
    assert replace(odd, script=(65,), natural=0) in counted.asked


def test_no_mistake_of_the_caller_is_added() -> None:
    """A prompt that is longer than the context is not ours to make, nor a minimum above the budget."""
    schedule = Schedule(prompt="abc", context=5, min_new_tokens=3, budget=4)
    result = shrink(schedule, lambda s: s.context is not None and s.min_new_tokens > 0)
    assert result == Schedule(context=1, min_new_tokens=1, budget=1)


def test_what_is_from_a_buffer_becomes_an_attempt() -> None:
    schedule = Schedule(budget=4, preload=2)
    result = shrink(schedule, lambda s: bool(s.preload) or s.kinds == ("abort",))
    assert result == Schedule(budget=0, attempts=(Attempt("abort"),))


def test_an_attempt_that_only_a_round_trip_needs_loses_its_kind() -> None:
    schedule = Schedule(budget=0, attempts=(Attempt("abort", round_trip=True),))
    assert shrink(schedule, SMALLEST["round-trip"][0]) == SMALLEST["round-trip"][1]


# THUDM/slime#2260

SLIME_2260 = Schedule(prompt="a", budget=1, attempts=(Attempt("abort", after=1),))


@pytest.fixture(scope="module")
def broken() -> Iterator[Predicate]:
    """Whether BUDGET is broken by the client that forgets the subtraction."""
    check = checker("BUDGET")
    with closing(Runner(FunctionTarget("forgets", forgets_subtraction, None))) as runner:
        yield lambda s: isinstance(check(Case(PLAIN, {PLAIN: runner.run(s, PLAIN)})), Finding)


def test_fifty_schedules_shrink_to_one(broken: Predicate) -> None:
    failing = [s for s in drawn(5, 400) if broken(s) and "abort-late" not in s.kinds][:50]
    assert len(failing) == 50
    assert {shrink(s, broken) for s in failing} == {SLIME_2260}


def test_a_late_abort_shrinks_to_an_abort(broken: Predicate) -> None:
    assert shrink(Schedule(budget=1, attempts=(Attempt("abort-late"),)), broken) == SLIME_2260
