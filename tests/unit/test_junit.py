"""JUnit XML, read back by a parser that knows nothing of how it was written."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from harness.check import Report
from harness.history import PLAIN, STREAM
from harness.reporters import junit, violations
from harness.verdict import INVALID, UNKNOWN
from tests.unit.reports import HOSTILE, SHOWN, report, result


def read(shown: Report, *, strict: bool = False, replay: str = "") -> Element:
    found = {place: replace(v, replay=replay) for place, v in violations.of(shown).items()}
    text = junit.text(shown, found, strict=strict)
    text.encode()
    return ElementTree.fromstring(text)


def outcomes(root: Element) -> dict[str, list[str]]:
    """The tags in every case."""
    return {case.get("name", ""): [child.tag for child in case] for case in root.iter("testcase")}


def test_the_whole_text() -> None:
    shown = report(result("BUDGET"), result("BUDGET", STREAM, UNKNOWN, "hang"))
    assert junit.text(shown, {}, strict=False) == (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        '<testsuites name="rolloutcheck">'
        '<testsuite name="inproc" tests="2" errors="1" failures="0" skipped="0" time="0">'
        '<properties><property name="target" value="slime" /><property name="revision" value="1eed249" />'
        '<property name="engine" value="inproc" /><property name="profile" value="quick" />'
        '<property name="seed" value="4" /><property name="duration" value="1.2 s" /></properties>'
        '<testcase name="BUDGET plain" classname="slime.inproc" />'
        '<testcase name="BUDGET stream" classname="slime.inproc"><error message="hang" type="unknown">hang</error>'
        "</testcase></testsuite></testsuites>"
    )


def test_a_violation_that_gates_is_a_failure_with_its_screen_and_its_command() -> None:
    shown = report(result("BUDGET", verdict=INVALID, reason="may ask at most 1"))
    (failure,) = read(shown, replay="rolloutcheck replay x.json").iter("failure")
    assert failure.attrib == {"message": "may ask at most 1", "type": "violated"}
    assert failure.text == (
        "BUDGET violated   slime@1eed249   plain   inproc\n"
        "  prompt 3, budget 2, context unknown\n"
        "  attempt 1   asked 2   got 1   abort   aborted with 1   <- may ask at most 1\n"
        "  replay   rolloutcheck replay x.json\n"
        "  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003"
    )


@pytest.mark.parametrize("strict", [False, True])
def test_what_does_not_gate_is_skipped_and_not_green(strict: bool) -> None:
    root = read(
        report(
            result("BUDGET"),
            result("RETRY", verdict=INVALID, reason="sixty times"),
            result("RETRY", STREAM, UNKNOWN, "hang"),
            result("ALIGN", PLAIN, INVALID, "no", faulty_engine=True),
        ),
        strict=strict,
    )
    lax = {"BUDGET plain": [], "RETRY plain": ["skipped", "system-out"], "RETRY stream": ["skipped"]}
    hard = {"BUDGET plain": [], "RETRY plain": ["failure"], "RETRY stream": ["error"]}
    faulty = {"ALIGN plain": ["failure"] if strict else ["skipped", "system-out"]}
    assert outcomes(root) == (hard if strict else lax) | faulty
    assert [suite.get("skipped") for suite in root] == (["0", "0"] if strict else ["2", "1"])
    if not strict:
        skipped, out = root.iter("skipped"), root.iter("system-out")
        assert [s.get("message") for s in skipped] == ["sixty times", "hang", "no"]
        assert all("violated (SHOULD)" in (o.text or "") or "faulty engine" in (o.text or "") for o in out)


def test_where_only_SHOULD_rules_were_asked_for_they_gate() -> None:
    assert outcomes(read(report(result("RETRY", verdict=INVALID, reason="no")))) == {"RETRY plain": ["failure"]}


def test_a_suite_for_every_place() -> None:
    root = read(
        report(
            result("BUDGET"),
            replace(result("BUDGET"), engine="loopback"),
            result("BUDGET", on="rollout"),
            result("BUDGET", faulty_engine=True),
            result("STATUS"),
        )
    )
    found = {suite.get("name"): [case.get("classname") for case in suite.iter("testcase")] for suite in root}
    assert found == {
        "inproc": ["slime.inproc"] * 2,
        "loopback": ["slime.loopback"],
        "inproc, whole rollouts": ["slime.inproc, whole rollouts"],
        "inproc, faulty engine": ["slime.inproc, faulty engine"],
    }


def test_what_there_is_nothing_to_say_of_has_no_property() -> None:
    root = read(report(result("BUDGET"), name="client", revision=""))
    assert {p.get("name") for p in root.iter("property")} == {"target", "engine", "profile", "seed", "duration"}


def test_it_is_well_formed_whatever_a_target_says() -> None:
    shown = report(
        result("BUDGET", verdict=INVALID, reason=HOSTILE),
        result("STATUS", verdict=UNKNOWN, reason=HOSTILE),
        name=HOSTILE,
    )
    root = read(shown, replay=HOSTILE)
    (failure,), (error,) = root.iter("failure"), root.iter("error")
    assert failure.get("message") == error.get("message") == error.text == SHOWN
    assert SHOWN in (failure.text or "")
    assert {p.get("value") for p in root.iter("property") if p.get("name") == "target"} == {SHOWN}
