"""Each planted fault on the smallest schedule that shows it and on a few more: no search, the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from harness import corpus
from harness.checkers import ROLLOUT_RULE_IDS, Finding, RolloutCase, rollout_checker
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM
from harness.mutants import load, measure
from harness.mutants.measure import detect
from harness.mutants.parts import Mutant, Reference
from harness.runner import Runner
from harness.scenario import Scenario
from harness.schedule import Attempt, Schedule
from harness.stage import Stage
from harness.targets import CannotJudge
from harness.targets.function import FunctionTarget
from harness.work import ROLLOUT, SAMPLE
from tests.quality.search import judge

every_mutant = pytest.mark.parametrize("mutant", load().values(), ids=lambda m: f"{m.rule}-{m.id}")


of_a_sample = pytest.mark.parametrize(
    "mutant", [m for m in load().values() if m.level == SAMPLE], ids=lambda m: f"{m.rule}-{m.id}"
)
of_a_loop = pytest.mark.parametrize(
    "mutant", [m for m in load().values() if m.level == ROLLOUT], ids=lambda m: f"{m.rule}-{m.id}"
)


@every_mutant
def test_it_is_found_on_what_shows_it(mutant: Mutant) -> None:
    plain = Schedule() if mutant.level == SAMPLE else Scenario()
    found = detect(mutant, (plain, mutant.shows, plain))
    assert found[mutant.modes[0]][1] in (mutant.shows, plain)


LIVES = (
    Schedule(budget=3, attempts=(Attempt("abort", after=1), Attempt("flag"), Attempt("run", round_trip=True))),
    Schedule(budget=4, min_new_tokens=3, attempts=(Attempt("flag", after=1), Attempt("abort", after=1))),
    Schedule(budget=2, attempts=(Attempt("queue-full"), Attempt("close"), Attempt("drop-after"))),
    Schedule(budget=2, attempts=(Attempt("http", code=400, times=9),)),
    Schedule(prompt="zz", budget=3, context=8),
    Schedule(budget=3, attempts=(Attempt("http", code=503), Attempt("error-event", after=1), Attempt("drop-inside"))),
    Schedule(budget=3, natural=2, attempts=(Attempt("drop-after"),)),
    Schedule(budget=3, images=1, attempts=(Attempt("abort", after=1),)),
)
"""Small ones that together meet most of what an engine and a caller do."""


@of_a_sample
def test_only_rules_with_a_reason_speak(mutant: Mutant) -> None:
    target = mutant.target()
    modes = tuple(m for m in MODES if (STREAM if m == INCREMENTAL else m) in target.modes)
    with closing(Runner(target)) as runner:
        said = {rule for life in LIVES for _, rule, _ in judge(runner, life, modes)}
    assert said <= {mutant.rule, *mutant.also}


@of_a_loop
def test_only_rules_with_a_reason_speak_of_a_loop(mutant: Mutant) -> None:
    """On the scenarios that show the faults of the others."""
    scenarios = [m.shows for m in load().values() if isinstance(m.shows, Scenario)]
    with closing(Stage(mutant.loop())) as stage:
        runs = (RolloutCase(PLAIN, stage.run(scenario, PLAIN)) for scenario in scenarios)
        said = {rule for case in runs for rule, check in LOOPS.items() if isinstance(check(case), Finding)}
    assert said <= {mutant.rule, *mutant.also}


LOOPS = {rule: rollout_checker(rule) for rule in ROLLOUT_RULE_IDS}


def test_the_reference_in_parts_is_silent() -> None:
    whole = Reference()
    known = tuple(e.work for e in corpus.load() if isinstance(e.work, Schedule) and e.work.budget <= 1000)
    with closing(Runner(FunctionTarget("parts", whole.plain, whole.streaming))) as runner:
        assert [finding for schedule in (*LIVES, *known) for finding in judge(runner, schedule, MODES)] == []


def test_the_search_ends_where_every_mode_has_been_found() -> None:
    mutant = next(m for m in load().values() if m.modes[0] == PLAIN and len(m.modes) > 1)
    asked = iter([mutant.shows] * 3)
    found = detect(mutant, asked)
    assert {mode: number for mode, (number, _) in found.items()} == dict.fromkeys(mutant.modes, 1)
    assert len(list(asked)) == 2


def test_a_measure_tells_how_many_seeds_are_done_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(work: Any, tasks: Any, jobs: int | None) -> Iterator[tuple[Any, Any]]:
        assert jobs == 5
        for name, arguments in reversed(list(tasks)):
            yield name, work(*arguments)

    told: list[tuple[int, int]] = []
    monkeypatch.setattr(measure.pool, "spread", backwards)
    monkeypatch.setattr(measure, "of_seed", lambda ids, seed, profile: dict.fromkeys(ids, seed + 1))
    (found,) = measure.measure(["drops-stop"], 3, jobs=5, tell=lambda done, total: told.append((done, total)))
    assert (found.schedules, told) == ((1, 2, 3), [(1, 3), (2, 3), (3, 3)])


def test_a_loop_around_the_reference_is_no_generate_function() -> None:
    mutant = next(m for m in load().values() if m.id == "aborts-once")
    with pytest.raises(
        CannotJudge, match=r"^mutant:aborts-once is a loop around the reference: give --level rollout$"
    ) as error:
        mutant.target()
    assert error.value.not_applicable


def test_what_no_schedule_shows_is_not_found() -> None:
    assert detect(load()["forgets-subtraction"], [Schedule(), Schedule(budget=2)]) == {}
