"""The report as JUnit XML, for Jenkins, GitLab and whatever else reads it.

A verdict that decides the exit status is a pass, a failure or an error. One that
does not is never any of these when it is bad: a failure would turn a pipeline red
that the command calls green, and nobody opens the output of a test that passed.
It is skipped, with its message: that is how pytest tells of a failure it expects,
and both Jenkins and GitLab list such cases apart.
"""

from __future__ import annotations

from io import BytesIO
from itertools import groupby

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from harness.check import Report
from harness.reporters import verdicts
from harness.reporters.plain import clean
from harness.reporters.violations import Violation, Violations, screen
from harness.verdict import INVALID, UNKNOWN, Result, gating
from harness.work import ROLLOUT


def text(report: Report, violations: Violations, *, strict: bool) -> str:
    """The XML. A suite an engine, apart for a faulty one and for whole rollouts; a case a rule and mode."""
    xml = JUnitXml("rolloutcheck")
    gates = gating(report.results, strict=strict)
    facts = verdicts.facts(report)
    numbered = sorted(enumerate(report.results), key=lambda pair: _suite(pair[1]))
    for name, results in groupby(numbered, key=lambda pair: _suite(pair[1])):
        suite = TestSuite(name)
        for key, value in facts.items():
            suite.add_property(key, clean(value))
        for number, result in results:
            where = f"{facts['target']}.{name}"  # without the revision, so that a case keeps its history
            suite.add_testcase(_case(result, where, violations.get(number), gates=result in gates))
        xml.add_testsuite(suite)
    out = BytesIO()
    xml.write(out)
    return out.getvalue().decode()


def _suite(result: Result) -> str:
    faulty = ", faulty engine" if result.faulty_engine else ""
    return result.engine + faulty + (", whole rollouts" if result.on == ROLLOUT else "")


def _case(result: Result, where: str, violation: Violation | None, *, gates: bool) -> TestCase:
    case = TestCase(f"{result.rule} {result.mode}", clean(where))
    shown = "" if violation is None else clean("\n".join(screen([violation])))
    message = clean(result.reason)
    if result.verdict == INVALID:
        case.result = [_told(Failure(message, "violated"), shown) if gates else Skipped(message, "violated")]
        if not gates:
            case.system_out = shown
    elif result.verdict == UNKNOWN:
        case.result = [_told(Error(message, "unknown"), message) if gates else Skipped(message, "unknown")]
    return case


def _told(outcome: Failure | Error, text: str) -> Failure | Error:
    outcome.text = text
    return outcome
