"""Every planted fault is found by its rule, and by no rule that has no reason to speak; the reference by none.

This is the measure of the whole: a checker that cannot find its fault finds
nothing, and one that finds what is not there is worse.
"""

from __future__ import annotations

import re
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import pytest

import spec
from harness.checkers import ROLLOUT_RULE_IDS, RULE_IDS
from harness.inline import Inline
from harness.mutants import MODULES, load, not_planted, quirks
from harness.mutants.measure import Measured, detect, measure
from harness.mutants.measure import drawn as drawn_for
from harness.mutants.parts import Mutant, Patient, Reference, Unchecked
from harness.options import Options
from harness.runner import Runner
from harness.scenario import Scenario
from harness.schedule import KINDS, Schedule
from harness.search import Search
from harness.shrink import shrink, size
from harness.stage import Stage
from harness.targets.function import FunctionTarget, reference
from harness.targets.reference_loop import ReferenceLoop
from harness.targets.spec import TargetSpec
from harness.work import ROLLOUT, SAMPLE, Work
from tests.quality.search import (
    drawn,
    drawn_rollouts,
    findings,
    findings_on_rollouts,
    judge,
    judge_rollouts,
    modes_of,
)

MUTANTS = load()
SWEEP = 60
SEEDS, MEDIAN = 20, 30
DOCS = Path(__file__).resolve().parents[2] / "docs" / "mutants.md"


def each(*levels: str) -> pytest.MarkDecorator:
    chosen = [m for m in MUTANTS.values() if m.level in levels]
    return pytest.mark.parametrize("mutant", chosen, ids=[f"{m.rule}-{m.id}" for m in chosen])


every_mutant = each(SAMPLE, ROLLOUT)


@lru_cache(maxsize=1)
def measured() -> dict[str, Measured]:
    """Every mutant in every seed of the profile ci."""
    return {m.mutant.id: m for m in measure(MUTANTS, SEEDS, "ci")}


@pytest.mark.xdist_group("measured")
def test_every_mutant_is_found_in_every_seed_of_the_ci_profile() -> None:
    """By its own rule, in each of its modes, by drawn schedules alone."""
    assert [m.mutant.id for m in measured().values() if not m.detected] == []
    assert {len(m.schedules) for m in measured().values()} == {SEEDS}


@pytest.mark.xdist_group("measured")
def test_the_median_mutant_is_found_within_thirty_schedules() -> None:
    medians = sorted(m.median for m in measured().values() if m.median is not None)
    assert medians[len(medians) // 2] <= MEDIAN


def _cause(mutant: Mutant, schedule: Work) -> bool:
    """Whether the schedule holds what the mutant is said to need."""
    if not isinstance(schedule, Schedule):
        return not mutant.kinds
    kinds = {*schedule.kinds, *(("round trip",) if any(a.round_trip for a in schedule.attempts) else ())}
    return not mutant.kinds or bool(schedule.preload) or bool(set(mutant.kinds) & kinds)


@each(SAMPLE)
def test_no_other_rule_speaks_of_a_mutant_without_reason(mutant: Mutant) -> None:
    """Rules that may are named with the mutant; its own speaks only where its cause is."""
    target = mutant.target()
    modes = modes_of(target)
    with closing(Runner(target)) as runner:
        for schedule in drawn(0, SWEEP, faulty=mutant.faulty_engine):
            for mode, rule, finding in judge(runner, schedule, modes):
                said = f"{rule} says [{finding.message}] in {mode} on [{schedule}]"
                assert rule in {mutant.rule, *mutant.also}, f"false alarm: {said}"
                assert rule != mutant.rule or mode not in mutant.modes or _cause(mutant, schedule), said


@each(ROLLOUT)
def test_no_other_rule_speaks_of_a_loop_without_reason(mutant: Mutant) -> None:
    with closing(Stage(mutant.loop())) as stage:
        for scenario in drawn_rollouts(0, SWEEP):
            for mode, rule, finding in judge_rollouts(stage, scenario):
                said = f"{rule} says [{finding.message}] in {mode} on [{scenario}]"
                assert rule in {mutant.rule, *mutant.also}, f"false alarm: {said}"


@every_mutant
def test_what_is_found_shrinks_to_the_smallest_schedule_that_shows_it(mutant: Mutant) -> None:
    """Exactly, and whatever it was found on: the first hits of two seeds end at one schedule.

    In a loop there can be two ways to a fault with as many steps: the second seed may end at the other one.
    """
    mode = mutant.modes[0]
    key = (mutant.rule, mode, mutant.faulty_engine)
    target = TargetSpec("mutant", function=mutant.id)
    for seed in (0, 1):
        found = detect(mutant, drawn_for(mutant, "ci", seed))
        assert mode in found, f"seed {seed}: {mutant.rule} finds nothing in {mode}"
        with closing(Inline(target, level=mutant.level)) as worker:
            modes = tuple(dict.fromkeys((*worker.ready.modes, mode)))
            search = Search(worker, modes, Options(target, rules=(mutant.rule,)), "inproc", mutant.level)
            smallest = shrink(found[mode][1], lambda schedule, search=search: search.breaks(key, schedule) is not None)
        other_way = seed == 1 and isinstance(mutant.shows, Scenario) and size(smallest)[0] == size(mutant.shows)[0]
        assert smallest == mutant.shows or other_way, f"seed {seed}: {smallest}"


def test_no_rule_speaks_of_the_reference() -> None:
    assert findings(reference(), drawn(11, 300)) == []


def test_no_rule_speaks_of_the_reference_on_a_faulty_engine() -> None:
    assert findings(reference(), drawn(11, 150, faulty=True)) == []


def test_mutants_differ_from_the_reference_by_their_fault_only() -> None:
    """What they are made from is the reference, cut into parts: it is as clean."""
    whole = Reference()
    assert findings(FunctionTarget("parts", whole.plain, whole.streaming), drawn(12, 150)) == []


def test_no_rule_speaks_of_the_reference_loop() -> None:
    assert findings_on_rollouts(ReferenceLoop(), drawn_rollouts(11, 300)) == []


def test_loops_differ_from_the_reference_by_their_fault_only() -> None:
    """What some of them are made from is as clean."""
    assert findings_on_rollouts(ReferenceLoop("parts", Patient, Unchecked), drawn_rollouts(12, 150)) == []


def test_every_rule_has_a_mutant() -> None:
    assert {m.rule for m in MUTANTS.values()} == set(spec.RULES)


def test_every_rule_that_only_a_loop_can_break_has_a_mutant_of_the_loop() -> None:
    loops = {m.rule for m in MUTANTS.values() if m.level == ROLLOUT}
    assert {rule.id for rule in spec.RULES.values() if rule.scope == "loop"} <= loops


@every_mutant
def test_what_a_mutant_says_of_itself_makes_sense(mutant: Mutant) -> None:
    assert {mutant.rule, *mutant.also} <= set(ROLLOUT_RULE_IDS if mutant.level == ROLLOUT else RULE_IDS)
    assert mutant.rule not in mutant.also
    assert mutant.modes and set(mutant.modes) <= set(spec.RULES[mutant.rule].modes)
    assert set(mutant.kinds) <= {*KINDS, "round trip"}
    assert mutant.fault.endswith(".") and len(mutant.fault) <= 120
    assert mutant.client.__module__.removeprefix("harness.mutants.") in MODULES
    assert _cause(mutant, mutant.shows) and mutant.shows.faulty_engine == mutant.faulty_engine


# the public reports


def test_every_report_has_one_place() -> None:
    """137 reports: planted, a quirk of the engine, or not planted with the reason."""
    planted = {report for mutant in MUTANTS.values() for report in mutant.reports}
    places = [planted, set(quirks()), set(not_planted())]
    assert sum(map(len, places)) == len(set.union(*places)) == 137
    for report in set.union(*places):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40})", report), report


def test_a_quirk_is_something_that_schedules_hold() -> None:
    for report, quirk in quirks().items():
        assert quirk.partition(",")[0] in {*KINDS, "sglang 0.5.9"}, report


def test_a_report_that_is_not_planted_has_a_reason() -> None:
    for report, reason in not_planted().items():
        assert len(reason) > 20, report


def test_the_table_in_the_docs_has_a_row_for_every_mutant_and_report() -> None:
    """Made anew by `rolloutcheck mutants --docs docs/mutants.md`; the figures vary with the version of Hypothesis."""
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.*?) \| \[([A-Z-]+)\]\(.*?\| (\d+) of (\d+) \| [\d.]+ \| \d+ \|", text, re.M
    )
    assert [(i, fault, rule) for i, fault, rule, *_ in rows] == [(m.id, m.fault, m.rule) for m in MUTANTS.values()]
    assert {(found, seeds) for *_, found, seeds in rows} == {(str(SEEDS), str(SEEDS))}
    for report in (*quirks(), *not_planted(), *(r for m in MUTANTS.values() for r in m.reports)):
        assert f"[{report}](" in text
