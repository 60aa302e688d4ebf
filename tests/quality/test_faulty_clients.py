"""Every planted fault is found by its rule, and by no rule that has no reason to speak; the reference by none.

This is the measure of the whole: a checker that cannot find its fault among a
hundred schedules finds nothing, and one that finds what is not there is worse.
"""

from __future__ import annotations

from contextlib import closing

import pytest

import spec
from harness.checkers import RULE_IDS
from harness.history import PLAIN
from harness.runner import Runner
from harness.targets.function import FunctionTarget, find, reference
from tests.faulty_clients import FAULTS, Fault, same, same_streaming
from tests.quality.search import drawn, findings, judge, modes_of

SCHEDULES = 100
RARE = 2000
SWEEP = 60
SEEDS = (0, 1, 2)
COMMON = tuple(f for f in FAULTS if not f.rare)
COMPARES_MODES = ("MODE-EQ", "RETRY")


def _name(fault: Fault) -> str:
    return f"{fault.rule}-{fault.name}"


def _shows(fault: Fault, schedule: object) -> bool:
    """Whether the schedule holds what the fault is said to need."""
    kinds, preload = getattr(schedule, "kinds", ()), getattr(schedule, "preload", 0)
    return not fault.kinds or bool(preload) or bool(set(fault.kinds) & set(kinds))


@pytest.mark.parametrize("fault", COMMON, ids=_name)
def test_its_rule_finds_a_fault_and_others_are_silent(fault: Fault) -> None:
    """Within a hundred schedules, for each of three seeds, in each of its modes."""
    target = FunctionTarget(fault.name, fault.plain, fault.stream)
    modes = modes_of(target)
    with closing(Runner(target)) as runner:
        for seed in SEEDS:
            missing = set(fault.modes)
            for number, schedule in enumerate(drawn(seed, SCHEDULES, faulty=fault.faulty_engine)):
                for mode, rule, finding in judge(runner, schedule, modes):
                    said = f"{rule} says [{finding.message}] in {mode} on [{schedule}]"
                    assert rule in {fault.rule, *fault.also}, f"false alarm: {said}"
                    if rule == fault.rule:
                        assert mode not in missing or _shows(fault, schedule), f"found without its cause: {said}"
                        missing.discard(mode)
                if not missing and (seed != SEEDS[0] or number >= SWEEP):
                    break  # the first seed goes on, in search of false alarms
            assert not missing, f"{fault.rule} misses {fault.name} in {sorted(missing)}, seed {seed}"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.rare], ids=_name)
def test_its_rule_finds_a_rare_fault(fault: Fault) -> None:
    """What needs several things at once is found among some more schedules."""
    target = FunctionTarget(fault.name, fault.plain, fault.stream)
    modes = modes_of(target)
    missing, pair = set(fault.modes), fault.rule in COMPARES_MODES
    with closing(Runner(target)) as runner:
        for number, schedule in enumerate(drawn(SEEDS[0], RARE, faulty=fault.faulty_engine)):
            rules: tuple[str, ...] = RULE_IDS
            if number >= SCHEDULES:  # what is left is the search for the rule's own finding
                rules, modes = (fault.rule,), tuple(m for m in modes if m in missing or (m == PLAIN and pair))
            for mode, rule, finding in judge(runner, schedule, modes, rules):
                said = f"{rule} says [{finding.message}] in {mode} on [{schedule}]"
                assert rule in {fault.rule, *fault.also}, f"false alarm: {said}"
                if rule == fault.rule:
                    assert mode not in missing or _shows(fault, schedule), f"found without its cause: {said}"
                    missing.discard(mode)
            if not missing and number >= SCHEDULES - 1:
                break
    assert not missing, f"{fault.rule} misses {fault.name} in {sorted(missing)}"


def test_no_rule_speaks_of_the_reference() -> None:
    assert findings(reference(), drawn(11, 300)) == []


def test_no_rule_speaks_of_the_reference_on_a_faulty_engine() -> None:
    assert findings(reference(), drawn(11, 150, faulty=True)) == []


def test_the_faults_differ_from_the_reference_by_their_fault_only() -> None:
    """What they are made from is the reference, cut into parts: it is as clean."""
    assert findings(FunctionTarget("same", same, same_streaming), drawn(12, 150)) == []


def test_every_rule_judged_on_one_sample_has_a_fault() -> None:
    assert {f.rule for f in FAULTS} == {r.id for r in spec.RULES.values() if r.scope == "sample"}


def test_every_fault_is_a_target_that_can_be_named() -> None:
    names = [f.name for f in FAULTS]
    assert len(set(names)) == len(names)
    for fault in FAULTS:
        for name, function in ((fault.name, fault.plain), (f"{fault.name}_streaming", fault.stream)):
            module = getattr(function, "__module__", "")
            if function is not None and module == "tests.faulty_clients":
                assert find(f"tests.faulty_clients:{name}") == function, name


def test_every_fault_says_which_rules_there_are() -> None:
    for fault in FAULTS:
        assert {fault.rule, *fault.also} <= set(RULE_IDS), fault.name
        assert fault.rule not in fault.also, fault.name
        assert fault.modes and set(fault.modes) <= set(spec.RULES[fault.rule].modes), fault.name
