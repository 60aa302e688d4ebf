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
from harness.checkers import RULE_IDS
from harness.inline import Inline
from harness.mutants import MODULES, load, not_planted, quirks
from harness.mutants.measure import Measured, detect, measure
from harness.mutants.parts import Mutant, Reference
from harness.options import Options
from harness.runner import Runner
from harness.schedule import KINDS, Schedule
from harness.search import Search
from harness.shrink import shrink
from harness.targets.function import FunctionTarget, reference
from harness.targets.spec import TargetSpec
from tests.quality.search import drawn, findings, judge, modes_of

MUTANTS = load()
SWEEP = 60
SEEDS, MEDIAN = 20, 30
DOCS = Path(__file__).resolve().parents[2] / "docs" / "mutants.md"

every_mutant = pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda m: f"{m.rule}-{m.id}")


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


def _cause(mutant: Mutant, schedule: Schedule) -> bool:
    """Whether the schedule holds what the mutant is said to need."""
    kinds = {*schedule.kinds, *(("round trip",) if any(a.round_trip for a in schedule.attempts) else ())}
    return not mutant.kinds or bool(schedule.preload) or bool(set(mutant.kinds) & kinds)


@every_mutant
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


@every_mutant
def test_what_is_found_shrinks_to_the_smallest_schedule_that_shows_it(mutant: Mutant) -> None:
    """Exactly, and whatever it was found on: the first hits of two seeds end at one schedule."""
    mode = mutant.modes[0]
    key = (mutant.rule, mode, mutant.faulty_engine)
    target = TargetSpec("mutant", function=mutant.id)
    for seed in (0, 1):
        found = detect(mutant, drawn(seed, 75 if mutant.faulty_engine else 300, faulty=mutant.faulty_engine))
        assert mode in found, f"seed {seed}: {mutant.rule} finds nothing in {mode}"
        with closing(Inline(target)) as worker:
            modes = tuple(dict.fromkeys((*worker.ready.modes, mode)))
            search = Search(worker, modes, Options(target, rules=(mutant.rule,)), "inproc")
            smallest = shrink(found[mode][1], lambda schedule, search=search: search.breaks(key, schedule) is not None)
        assert smallest == mutant.shows, f"seed {seed}"


def test_no_rule_speaks_of_the_reference() -> None:
    assert findings(reference(), drawn(11, 300)) == []


def test_no_rule_speaks_of_the_reference_on_a_faulty_engine() -> None:
    assert findings(reference(), drawn(11, 150, faulty=True)) == []


def test_mutants_differ_from_the_reference_by_their_fault_only() -> None:
    """What they are made from is the reference, cut into parts: it is as clean."""
    whole = Reference()
    assert findings(FunctionTarget("parts", whole.plain, whole.streaming), drawn(12, 150)) == []


def test_every_rule_judged_on_one_sample_has_a_mutant() -> None:
    assert {m.rule for m in MUTANTS.values()} == {r.id for r in spec.RULES.values() if r.scope == "sample"}


@every_mutant
def test_what_a_mutant_says_of_itself_makes_sense(mutant: Mutant) -> None:
    assert {mutant.rule, *mutant.also} <= set(RULE_IDS)
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
