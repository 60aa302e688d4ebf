"""What a GitHub workflow is told, to the letter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.check import INTERRUPTED, Covered, Report
from harness.history import PLAIN, STREAM
from harness.reporters import github, violations
from harness.reporters.violations import Violations
from harness.verdict import INVALID, UNKNOWN, Result
from tests.unit.reports import report, result


def told(shown: Report, *, strict: bool = False) -> list[str]:
    return github.annotations(shown, found(shown), strict=strict)


def found(shown: Report, replay: str = "rolloutcheck replay x.json") -> Violations:
    return {place: replace(v, replay=replay) for place, v in violations.of(shown).items()}


def budget(mode: str = PLAIN, reason: str = "may ask at most 1") -> Result:
    return result("BUDGET", mode, INVALID, reason)


# annotations


def test_a_violation_is_one_error_whatever_the_number_of_modes() -> None:
    assert told(report(budget(), budget(STREAM), result("STATUS"))) == [
        "::error title=BUDGET violated in plain%2C stream::BUDGET violated   slime@1eed249   plain   inproc"
        "%0A  prompt 3, budget 2, context unknown"
        "%0A  attempt 1   asked 2   got 1   abort   aborted with 1   <- may ask at most 1"
        "%0A  also     stream inproc"
        "%0A  replay   rolloutcheck replay x.json"
        "%0A  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003"
    ]


def test_what_conforms_says_nothing() -> None:
    assert told(report(result("BUDGET"), result("STATUS"))) == []


@pytest.mark.parametrize(("strict", "kind"), [(False, "::warning"), (True, "::error")])
def test_what_does_not_gate_is_a_warning(strict: bool, kind: str) -> None:
    shown = report(
        result("BUDGET"),
        result("RETRY", PLAIN, INVALID, "no"),
        result("ALIGN", PLAIN, INVALID, "no", faulty_engine=True),
        result("RETRY", STREAM, UNKNOWN, "hang"),
    )
    assert [line.partition("::")[2].partition("::")[0] for line in told(shown, strict=strict)] == [
        f"{kind[2:]} title=RETRY violated in plain",
        f"{kind[2:]} title=ALIGN violated in plain on a faulty engine",
        f"{kind[2:]} title=cannot be judged",
    ]


def test_unknown_that_gates_is_an_error_a_reason() -> None:
    shown = report(
        result("BUDGET", PLAIN, UNKNOWN, "hang"),
        result("STATUS", PLAIN, UNKNOWN, "hang"),
        result("RETRY", PLAIN, UNKNOWN, "hang"),
        result("ALIGN", PLAIN, UNKNOWN, INTERRUPTED),
    )
    assert told(shown) == [
        "::error title=cannot be judged::unknown: BUDGET plain, STATUS plain: hang",
        "::error title=cannot be judged::unknown: what was not finished: interrupted",
        "::warning title=cannot be judged::unknown: RETRY plain: hang",
    ]


def test_a_command_stays_on_its_line_and_in_its_place() -> None:
    reason = "100%\r\n::stop-commands::x\x1b]0;title, a: b\u2028"
    (line,) = told(report(result("BUDGET", PLAIN, UNKNOWN, reason)))
    assert line == (
        r"::error title=cannot be judged::unknown: BUDGET plain: 100%25\r%0A::stop-commands::x\x1b]0;title, a: b\u2028"
    )
    assert github._property("100%: a,\r\n") == "100%25%3A a%2C%0D%0A"


def test_a_long_message_is_cut() -> None:
    (line,) = told(report(result("BUDGET", PLAIN, UNKNOWN, "x" * 10_000)))
    assert len(line) < github.MAX_MESSAGE + 100 and line.endswith("...")


@pytest.mark.parametrize(("number", "last"), [(10, "r9"), (11, "2 more: see the summary of the job"), (30, "21 more")])
def test_no_more_errors_than_are_shown(number: int, last: str) -> None:
    lines = told(report(*(result("BUDGET", PLAIN, UNKNOWN, f"r{i}") for i in range(number))))
    assert len(lines) == github.MAX_ERRORS
    assert last in lines[-1] and "r8" in lines[8]


# the summary


def test_a_summary() -> None:
    shown = report(
        budget(), result("STATUS"), result("STATUS", STREAM, UNKNOWN, "hang"), result("BUDGET", on="rollout")
    )
    shown = replace(shown, skipped=(("no worker", 2),), covered=Covered(5, 10))
    assert github.summary(shown, found(shown)) == (
        """
## ❌ rolloutcheck: `slime@1eed249` violates

target `slime`, revision `1eed249`, engine `inproc`, profile `quick`, seed `4`, duration `1.2 s`

5 of 10 schedules drawn, 50%

2 runs left out: `no worker`

### On single samples

| rule | level | plain | stream |
| --- | --- | --- | --- |
| BUDGET | MUST | ❌ invalid 9 |  |
| STATUS | MUST | ✅ valid 9 | ❔ unknown 9 |

### Over whole rollouts

| rule | level | plain |
| --- | --- | --- |
| BUDGET | MUST | ✅ valid 9 |

### BUDGET violated in plain

```text
BUDGET violated   slime@1eed249   plain   inproc
  prompt 3, budget 2, context unknown
  attempt 1   asked 2   got 1   abort   aborted with 1   <- may ask at most 1
  replay   rolloutcheck replay x.json
  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003
```

### Unknown

```text
unknown: STATUS stream: hang
```
""".lstrip("\n")
    )


@pytest.mark.parametrize(
    ("shown", "strict", "head"),
    [
        (report(result("BUDGET")), False, "## ✅ rolloutcheck: `slime@1eed249` conforms"),
        (report(result("BUDGET", PLAIN, UNKNOWN, "x")), False, "## ❔ rolloutcheck: `slime@1eed249` cannot be judged"),
        (replace(report(budget()), complete=False), False, "## ❔ rolloutcheck: `slime@1eed249` interrupted"),
        (
            report(result("BUDGET"), result("RETRY", PLAIN, INVALID, "x")),
            False,
            "## ✅ rolloutcheck: `slime@1eed249` conforms",
        ),
        (
            report(result("BUDGET"), result("RETRY", PLAIN, INVALID, "x")),
            True,
            "## ❌ rolloutcheck: `slime@1eed249` violates",
        ),
    ],
)
def test_the_headline_says_what_the_exit_status_says(shown: Report, strict: bool, head: str) -> None:
    assert github.summary(shown, found(shown), strict=strict).splitlines()[0] == head


def test_an_interruption_is_said() -> None:
    shown = replace(report(result("BUDGET")), complete=False)
    assert "\nInterrupted: the verdicts are what was known by then.\n" in github.summary(shown, {})


def test_backticks_and_pipes_end_nothing() -> None:
    shown = report(
        budget(reason="```\n# not a heading"), result("STATUS", PLAIN, UNKNOWN, "a ```` b | c <b>"), name="`a|b`\x00"
    )
    text = github.summary(shown, found(shown))
    assert text.startswith("## ❌ rolloutcheck: `` `a|b`\\x00 `` violates\n")
    assert text.count("\n````text\n") == 1 and text.count("\n`````text\n") == 1
    assert "\n````\n" in text and text.endswith("\n`````\n")
    assert github._row("a|b\\", "c\nd") == "| a\\|b\\\\ | c d |"


def test_what_does_not_fit_is_left_out_and_said() -> None:
    rules = [f"R{i}" for i in range(80)]
    shown = report(*(replace(budget(reason="é" * 30_000), rule="BUDGET", engine=rule) for rule in rules))
    many = {
        place: replace(v, result=replace(v.result, rule=rules[place]), lines=("é" * 30_000, "why"))
        for place, v in found(shown).items()
    }
    text = github.summary(shown, many)
    assert 900_000 < len(text.encode()) < 1 << 20
    assert text.endswith("\n56 parts of this summary did not fit.\n")
