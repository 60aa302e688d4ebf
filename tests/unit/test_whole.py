"""Rules of single samples on the histories of loops: whose calls are judged together, and how they are told."""

from __future__ import annotations

import pytest

from harness.calls import NOBODY
from harness.checkers import HOLDS, Case, Finding, Judgement, RolloutCase, halt, whole
from harness.history import ABORTED, STREAM, Called, Flagged, Halted, Requested, Returned
from harness.rollouts import Aborting, Event, Restarted
from harness.schedule import Schedule
from tests.unit.histories import EOS, PROMPT, view
from tests.unit.loop_histories import BUDGET, began, broke, call, ended, finding, groups, history, judge, member, taken

ONE = view((5,), ABORTED)
HALF = call(0, finish="abort")
ON = call(0, 1, before=ONE, asked=3, ids=(6,))


def lives(*told: Event | list[Event]) -> list[tuple[int, int, int, int]]:
    """Sample, first call, budget, and how many events."""
    found = whole.lives(history(*told))
    return [(one.sample, one.first, one.history.schedule.budget, len(one.history.events)) for one in found]


def test_every_sample_has_a_life_of_its_own() -> None:
    one = history(began(), HALF, call(3), ON, mode=STREAM)
    first, second = whole.lives(one)
    assert (first.sample, first.first, second.sample) == (0, 0, 3)
    assert first.history.schedule == Schedule(budget=BUDGET)
    assert (first.history.mode, first.history.prompt_ids, first.history.eos) == (STREAM, PROMPT, EOS)
    assert [(e.attempt, e.sample) for e in first.history.events] == [(0, 0)] * 4 + [(1, 0)] * 4  # type: ignore[union-attr]
    assert {e.sample for e in second.history.events} == {0}  # type: ignore[union-attr]


def test_a_life_begins_anew_where_the_budget_changes() -> None:
    assert lives(began(), HALF, ended(), began(2), ON) == [(0, 0, 4, 8)]
    assert lives(began(), HALF, began(2, budget=3), ON) == [(0, 0, 4, 4), (0, 1, 3, 4)]


def test_the_calls_of_a_life_are_counted_from_its_first() -> None:
    last = list(whole.lives(history(began(), HALF, began(2, budget=3), ON)))[-1]
    assert [e.attempt for e in last.history.events] == [0] * 4  # type: ignore[union-attr]


def test_a_life_ends_where_a_new_process_does_not_know_the_sample() -> None:
    known = ((member(0, ONE),),)
    both = [began(), *HALF, *call(1)]
    assert lives(both, Restarted(known, known), began(2), ON) == [(1, 0, 4, 4), (0, 0, 4, 8)]
    assert lives(both, Restarted((), ()), began(2), call(0, 1)) == [(0, 0, 4, 4), (1, 0, 4, 4), (0, 1, 4, 4)]


def test_what_no_call_has_made_belongs_to_nobody() -> None:
    stray = Requested(0, NOBODY, 0, False, PROMPT, None, 0, {}, True)
    assert lives(began(), stray, HALF) == [(0, 0, 4, 4)]


def test_a_sample_without_a_prompt_has_none() -> None:
    one = history(began(), HALF)
    (life,) = whole.lives(type(one)(one.scenario, one.mode, one.eos, {}, one.events))
    assert life.history.prompt_ids == ()


def test_before_the_first_rollout_the_budget_is_the_scenario_s() -> None:
    assert lives(HALF) == [(0, 0, 4, 4)]


def test_BUDGET_is_judged_on_what_the_rollout_was_called_with() -> None:
    """Not on what the loop passes on."""
    assert judge("BUDGET", began(), HALF, ON) is HOLDS
    found = finding("BUDGET", began(), call(1), began(2, budget=2), call(3, asked=4))
    assert found == Finding(0, "may ask at most 2", 3, 2)


def test_a_finding_tells_the_call_in_the_whole_scenario() -> None:
    more = call(0, 1, before=ONE, asked=2, ids=(6,), finish="abort")
    told = began(), HALF, began(2, budget=3), more, began(3, budget=3), call(0, 2, before=view((5, 6)), asked=3)
    assert finding("BUDGET", *told) == Finding(2, "may ask at most 1", 0, 3)


def test_what_nothing_puts_to_the_test_is_not_judged() -> None:
    assert judge("BUDGET", began()) is None
    called, *_, returned = HALF
    assert judge("BUDGET", began(), called, returned) is None
    assert judge("BUDGET", began(), called, returned, call(1)) is HOLDS
    assert judge("BUDGET", began(), call(1), call(2, asked=4)) is HOLDS


def test_a_finding_on_no_call_in_particular_is_of_the_last_rollout() -> None:
    def rule(case: Case) -> Judgement:
        return Finding(None, "no")

    one = history(began(), HALF, began(2))
    assert whole.check(rule, RolloutCase(one.mode, one)) == Finding(None, "no", 0, 2)


# Where a finding is


def test_a_finding_is_in_the_sample_s_last_call_by_then() -> None:
    events = [began(), *HALF, ended(), began(2), *ON, ended(rollout=2), began(3), *call(0, 2)]
    case = RolloutCase("plain", history(events))
    assert case.finding(events[5], "x", 0) == Finding(0, "x", 0, 1)
    assert case.finding(events[11], "x", 0) == Finding(1, "x", 0, 2)
    assert case.finding(events[11], "x", 7) == Finding(None, "x", 7, 2)
    assert case.finding(events[11], "x", None) == Finding(None, "x", -1, 2)
    assert case.finding(Aborting(0), "x", 0) == Finding(2, "x", 0, 3)  # not in the history


def test_the_rollout_of_a_call() -> None:
    case = RolloutCase("plain", history(began(), HALF, began(2), ON, began(3)))
    assert [case.rollout_of(0, attempt) for attempt in (0, 1, 2, None)] == [1, 2, 3, 3]
    assert case.rollout_of(1, 0) == 3
    assert RolloutCase("plain", history(HALF)).rollout_of(0, 0) == 0


@pytest.mark.parametrize("sign", [Flagged(0, 0, None), Aborting(2)])
def test_a_loop_is_aborting_from_the_first_sign_until_the_next_rollout(sign: Event) -> None:
    first, then, last = ended(), ended(rollout=1, buffer=groups((0,))), ended(rollout=2)
    case = RolloutCase("plain", history(began(), first, sign, HALF, then, began(2), last))
    assert [case.aborting(event) for event in (first, then, last)] == [False, True, False]
    assert not case.aborting(Aborting(9))  # not in the history


@pytest.mark.parametrize("sign", [Flagged(0, 0, None), Aborting(2)])
def test_a_loop_whose_rollout_has_ended_is_not_aborting(sign: Event) -> None:
    last = broke()
    case = RolloutCase("plain", history(began(), sign, ended(), last))
    assert not case.aborting(last)


def test_what_a_rollout_that_raises_has_lost() -> None:
    told = [began(), taken((0,), (1,)), ended(groups((0,)), groups((1,))), began(2), taken((1, 2), (3,)), broke()]
    kept = broke(buffer=groups((2,)), rollout=2)
    case = RolloutCase("plain", history(told, taken((4,)), kept, taken((5,))))
    assert case.lost(told[-1]) == [1, 2, 3]  # type: ignore[arg-type]
    assert case.lost(kept) == [1, 3, 4]
    assert case.lost(broke(rollout=9)) == [1, 2, 3, 4, 5]  # not in the history


def test_how_a_run_broke_off() -> None:
    off = Halted(0, 0, "hang", "no end")
    assert halt(history(began(), off)) == off
    assert halt(history(off, began())) is None
    assert halt(history()) is None


def test_the_lives_are_told_once() -> None:
    case = RolloutCase("plain", history(began(), HALF))
    assert case.lives is case.lives and isinstance(case.lives, tuple)
    assert isinstance(case.lives[0].history.events[0], Called)
    assert isinstance(case.lives[0].history.events[-1], Returned)
