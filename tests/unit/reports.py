"""Reports by hand, and what a target may have to say."""

from __future__ import annotations

from harness.check import Report
from harness.checkers import Finding
from harness.history import PLAIN
from harness.isolation import Ready
from harness.options import Options
from harness.schedule import Schedule
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, VALID, Counterexample, Result
from tests.unit.histories import Ask, Life, view

HOSTILE = "]]>\x00\x1b[31m <&> \ud800 \ufffe \r\n \"'"
SHOWN = "]]>\\x00\\x1b[31m <&> \\ud800 \\ufffe \\r\n \"'"


def broken(message: str) -> Counterexample:
    history = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,))).history
    return Counterexample(Schedule(), Finding(0, message), history)


def result(rule: str, mode: str = PLAIN, verdict: str = VALID, reason: str = "", **more: object) -> Result:
    level = "SHOULD" if rule == "RETRY" or more.get("faulty_engine") else "MUST"
    given = {"counterexample": broken(reason)} if verdict == INVALID else {}
    return Result(rule, level, mode, "inproc", verdict, 9, reason, **(given | more))  # type: ignore[arg-type]


def report(*results: Result, name: str = "slime@1eed249", revision: str = "1eed249") -> Report:
    options = Options(TargetSpec("slime", revision=revision), profile="quick", seed=4)
    return Report(Ready(name, (PLAIN,), {}, ()), options, results, 1.25)
