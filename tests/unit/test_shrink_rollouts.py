"""Shrinking scenarios: always smaller, as small as it gets, and every way to be simpler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness import corpus
from harness.scenario import STEPS, Scenario, Step, from_json, to_json
from harness.shrink import MAX_TRIES, shrink
from harness.shrink import size as size_of_work
from harness.shrink_rollouts import (
    MAX_EXCHANGED,
    MAX_PARTLY,
    SMALLEST,
    _exchanged,
    _partly,
    _places,
    _without,
    simpler,
    size,
)

LARGE = Scenario(
    budget=4,
    members=2,
    batch=3,
    over=2,
    permits=2,
    partial=False,
    mask=True,
    late=True,
    lengths=(None, 3, 0),
    steps=tuple(Step(kind, 2, 3) for kind in STEPS),
)
Predicate = Callable[[Scenario], bool]

RESULTS: dict[str, tuple[Predicate, Scenario]] = {
    "anything": (lambda s: True, Scenario(budget=1)),
    "budget": (lambda s: s.budget >= 3, Scenario(budget=3)),
    "over": (lambda s: s.over > 1, Scenario(budget=1, over=2)),
    "flag": (lambda s: not s.partial, Scenario(budget=1, partial=False)),
    "length": (lambda s: 3 in s.lengths, Scenario(budget=1, lengths=(3,))),
    "two lengths": (lambda s: len(s.lengths) > 1, Scenario(budget=1, lengths=(None, None))),
    "a step": (lambda s: len(s.steps) > 0, Scenario(budget=1, steps=(Step("rollout"),))),
    "kind": (lambda s: "restart" in s.kinds, Scenario(budget=1, steps=(Step("restart"),))),
    "aim": (
        lambda s: any(x.kind in ("kill", "abort") and x.which == 1 for x in s.steps),
        Scenario(budget=1, steps=(Step("abort", 1),)),
    ),
    "order": (
        lambda s: s.kinds.count("rollout") == 1 and s.kinds.count("end") == 1,
        Scenario(budget=1, steps=(Step("rollout"), Step("end"))),
    ),
    "hang together": (
        lambda s: 1 < sum(x.count for x in s.steps if x.kind == "tokens") + 1 == s.budget,
        Scenario(budget=2, steps=(Step("tokens"),)),
    ),
}


def middle(s: Scenario) -> list[Scenario]:
    """What is simpler than a scenario, without what is tried first on all and last on short ones."""
    every = list(simpler(s))
    tail = [
        *(_partly(s) if len(s.steps) <= MAX_PARTLY else ()),
        *(_exchanged(s) if len(s.steps) <= MAX_EXCHANGED else ()),
    ]
    end = len(every) - len(tail)
    assert (every[: len(SMALLEST)], every[end:]) == (SMALLEST, tail)
    return every[len(SMALLEST) : end]


@pytest.mark.parametrize("name", RESULTS)
def test_the_result_is_the_smallest(name: str) -> None:
    predicate, smallest = RESULTS[name]
    start = LARGE if predicate(LARGE) else next(s for s in simpler(LARGE) if predicate(s))
    assert shrink(start, predicate) == smallest


@pytest.mark.parametrize("entry", [e for e in corpus.load() if isinstance(e.work, Scenario)], ids=lambda e: e.name)
def test_a_corpus_entry_shrinks_within_bounds(entry: corpus.Entry) -> None:
    start, asked = entry.work, list[Scenario]()
    assert isinstance(start, Scenario)

    def broken(one: object) -> bool:
        assert isinstance(one, Scenario)
        asked.append(one)
        return len(one.steps) == len(start.steps)

    result = shrink(start, broken)
    assert isinstance(result, Scenario) and len(result.steps) == len(start.steps)
    assert size(result) <= size(start) and len(asked) == len(set(asked)) <= MAX_TRIES


def test_what_is_simpler_is_a_scenario() -> None:
    short = replace(LARGE, steps=LARGE.steps[:MAX_EXCHANGED])
    assert all(from_json(to_json(one)) == one for start in (LARGE, short) for one in simpler(start))
    assert middle(LARGE)[0] == replace(LARGE, steps=())


def test_the_smallest_of_all_are_tried_first_whatever_it_is() -> None:
    assert list(map(size, SMALLEST)) == sorted(map(size, SMALLEST)) and len(set(SMALLEST)) == len(SMALLEST)
    assert SMALLEST[0] == Scenario(budget=1) and {s.steps for s in SMALLEST} == {()}
    assert {s.budget for s in SMALLEST} == {1}
    for one in (Scenario(1, over=3), Scenario(1, over=2, partial=False), Scenario(1, members=2, lengths=(0,))):
        assert one in SMALLEST
    assert Scenario(1, members=2, batch=2, permits=1) not in SMALLEST


def test_steps_go_by_halves_and_quarters_and_one_by_one() -> None:
    two, kinds = [], ["tokens", "hold", "pass", "wait", "kill", "abort", "update", "end"]
    start = Scenario(steps=tuple(map(Step, kinds)))
    left = [one.kinds for one in middle(start)]
    assert left[1:7] == [
        (*kinds[4:],),
        (*kinds[:4],),
        (*kinds[2:],),
        (*kinds[:2], *kinds[4:]),
        (*kinds[:4], *kinds[6:]),
        (*kinds[:6],),
    ]
    assert left[7:15] == [(*kinds[:i], *kinds[i + 1 :]) for i in reversed(range(8))]
    two = [(*kinds[:i], *kinds[i + 1 : j], *kinds[j + 1 :]) for i in range(8) for j in range(i + 1, 8)]
    assert left[15 : 15 + len(two)] == two


def test_pairs_of_steps_are_left_out_of_few_only() -> None:
    many = Scenario(steps=(Step("wait"),) * 9)
    assert min(len(s.steps) for s in middle(many)[1:]) == 5  # a half is the most that goes at once
    assert {len(s.steps) for s in middle(many)} == {0, 5, 7, 8, 9}


def test_numbers_go_down() -> None:
    start = Scenario(budget=8, steps=(Step("tokens", 3, 9),))
    every = middle(start)
    assert [s.budget for s in every if s.steps == start.steps and s.budget != 8] == [1, 4, 7]
    assert [s.steps[0].which for s in every if s.steps and s.steps[0].which != 3] == [0, 1, 2]
    assert [s.steps[0].count for s in every if s.budget == 8 and s.steps and s.steps[0].count != 9] == [1, 4, 8]
    assert replace(start, budget=7, steps=(Step("tokens", 3, 8),)) in every


def test_a_new_budget_may_be_nothing() -> None:
    start = Scenario(budget=1, steps=(Step("budget", 0, 3),))
    assert [s.steps[0].count for s in middle(start) if s.kinds == ("budget",) and s.steps[0].count != 3] == [0, 1, 2]


@pytest.mark.parametrize("name", ["budget", "members", "over"])
def test_one_number_less_here_and_there(name: str) -> None:
    start = Scenario(budget=1, steps=(Step("end"), Step("hold", 0, 2)))
    fewer = (Step("end"), Step("hold"))
    more = replace(start, **{name: 2})  # type: ignore[arg-type]
    assert replace(more, **{name: 1}, steps=fewer) in middle(more)  # type: ignore[arg-type]
    assert [s for s in middle(start) if s.steps == fewer] == [replace(start, steps=fewer)]


def test_one_token_may_only_be_there_to_begin_the_rollout() -> None:
    start = Scenario(budget=2, steps=(Step("hold"), Step("tokens"), Step("end")))
    begun = Scenario(budget=1, steps=(Step("hold"), Step("rollout"), Step("end")))
    assert begun in middle(start)
    for other in (replace(start, budget=1), replace(start, steps=(Step("hold"), Step("tokens", 0, 2), Step("end")))):
        assert not [s for s in middle(other) if "rollout" in s.kinds and s.budget < other.budget]


def test_nothing_goes_below_its_least() -> None:
    plain = Scenario(budget=1, steps=(Step("tokens", 0, 1),))
    assert all(s.budget == 1 and s.members == s.batch == s.over == 1 for s in middle(plain))
    assert all(s.steps[0].count == 1 for s in middle(plain) if s.steps)
    assert all(n is None or n >= 0 for s in middle(Scenario(lengths=(0, None))) for n in s.lengths)


def test_a_length_becomes_none_or_less() -> None:
    start = Scenario(lengths=(3, None))
    assert [s.lengths for s in middle(start) if s.lengths != start.lengths and not s.steps] == [
        (None,),
        (None, None),
        (0, None),
        (1, None),
        (2, None),
        (None,),
        (3, 0),
        (3, 1),
        (3,),
    ]


def test_neighbours_are_swapped() -> None:
    start = Scenario(steps=(Step("rollout"), Step("end"), Step("stop")))
    assert [s.kinds for s in middle(start)][-2:] == [("end", "rollout", "stop"), ("rollout", "stop", "end")]


# What takes the place of something else


def test_places_of_a_row() -> None:
    assert list(_places(0)) == []
    assert list(_places(3)) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


def test_what_is_half_done_takes_the_place_of_some_steps() -> None:
    start = Scenario(budget=3, members=2, steps=(Step("wait"), Step("end")))
    every = list(_partly(start))
    assert len(every) == 3 * 7 and len(set(every)) == len(every)
    late, over = replace(start, late=True), replace(start, over=2)
    assert every[:7] == [
        replace(late, steps=(Step("abort"), Step("end"))),
        replace(over, steps=(Step("tokens", 1), Step("end"))),
        replace(over, steps=(Step("tokens", 1), Step("update"), Step("end"))),
        replace(late, budget=4, steps=(Step("abort"), Step("end"))),
        replace(over, budget=4, steps=(Step("tokens", 1), Step("end"))),
        replace(over, budget=4, steps=(Step("tokens", 1), Step("update"), Step("end"))),
        replace(start, batch=2, steps=(Step("tokens"), Step("stop"), Step("end"))),
    ]
    assert [s.kinds for s in every[6::7]] == [("tokens", "stop", "end"), ("tokens", "stop"), ("wait", "tokens", "stop")]


def test_less_by_one_or_two_steps_or_a_setting() -> None:
    start = Scenario(budget=3, over=2, mask=True, steps=(Step("wait"), Step("end"), Step("stop")))
    assert [s.kinds for s in list(_without(start))[:6]] == [
        ("end", "stop"),
        ("wait", "stop"),
        ("wait", "end"),
        ("stop",),
        ("end",),
        ("wait",),
    ]
    assert list(_without(start))[6:] == [replace(start, over=1), replace(start, mask=False)]
    assert list(_without(Scenario())) == []


def test_a_setting_takes_the_place_of_a_step_or_another_setting() -> None:
    start = Scenario(budget=3, over=2, steps=(Step("end"),))
    every = list(_exchanged(start))
    without_step, without_setting = Scenario(budget=3, over=2), Scenario(budget=3, steps=(Step("end"),))
    assert every[0] == replace(without_step, members=2) and replace(without_step, lengths=(0,)) in every
    assert replace(without_step, budget=4) in every
    assert replace(without_setting, over=3) in every and replace(without_setting, permits=1) in every
    assert replace(without_setting, budget=4) in every
    assert replace(without_step, over=3) not in every, "a setting that is there is not another"


def test_a_step_takes_the_place_of_some_or_of_a_setting() -> None:
    start = Scenario(budget=3, over=2, steps=(Step("hold"), Step("end"), Step("wait")))
    every = list(_exchanged(start))
    for steps in (
        (Step("kill"), Step("end"), Step("wait")),  # for one
        (Step("hold"), Step("end"), Step("abort")),
        (Step("hold"), Step("budget", count=0)),  # for two
        (Step("tokens"), Step("end")),
    ):
        assert all(replace(start, budget=budget, steps=steps) in every for budget in (3, 4))
        assert replace(start, over=1, steps=steps) in every
    assert {len(s.steps) for s in every} == {1, 2, 3}


def test_only_short_ones_are_changed_in_part() -> None:
    for length in (MAX_EXCHANGED, MAX_EXCHANGED + 1, MAX_PARTLY, MAX_PARTLY + 1):
        start = Scenario(steps=(Step("end"),) * length)
        kinds = {kind for s in simpler(start) for kind in s.kinds}
        assert ("kill" in kinds) == (length <= MAX_EXCHANGED) and ("abort" in kinds) == (length <= MAX_PARTLY)


def test_numbers_that_a_kind_does_not_look_at_are_tidied_away() -> None:
    start = Scenario(steps=(Step("wait", 2, 3), Step("hold", 2, 3), Step("kill", 2, 3), Step("pass", 2, 3)))
    tidy = (Step("wait"), Step("hold", 0, 3), Step("kill", 2, 3), Step("pass", 2, 3))
    assert replace(start, steps=tidy) in list(simpler(start))
    assert size(replace(start, steps=tidy)) < size(start)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (Scenario(late=True, budget=9), Scenario(steps=(Step("end"),))),  # fewer steps
        (Scenario(budget=9), Scenario(late=True)),  # less that is unusual
        (Scenario(budget=3, permits=2), Scenario(budget=4, permits=2)),  # smaller numbers
        (Scenario(lengths=(1,)), Scenario(lengths=(2,))),
        (Scenario(lengths=(None, None)), Scenario(lengths=(None, 0))),
        (Scenario(steps=(Step("tokens", 1, 1),)), Scenario(steps=(Step("tokens", 1, 2),))),
        (Scenario(steps=(Step("kill", 1),)), Scenario(steps=(Step("kill", 2),))),
        (Scenario(steps=(Step("rollout"),)), Scenario(steps=(Step("end"),))),  # plainer steps
        (Scenario(lengths=(1,)), Scenario(lengths=(1, None))),
        (Scenario(permits=7), Scenario(permits=4)),
        (Scenario(permits=9), Scenario(permits=4)),
        (Scenario(steps=(Step("end"),)), Scenario(steps=(Step("end", 5),))),
        (Scenario(steps=(Step("rollout"), Step("end"))), Scenario(steps=(Step("end"), Step("rollout")))),
    ],
)
def test_what_smaller_means(smaller: Scenario, larger: Scenario) -> None:
    assert size(smaller) < size(larger)
    assert size(smaller) == size_of_work(smaller)
