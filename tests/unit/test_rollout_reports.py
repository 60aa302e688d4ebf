"""Violations of whole rollouts on one screen, exactly, and the report they stand in."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.check import Report
from harness.checkers import Finding, RolloutCase, rollout_checker
from harness.history import ABORTED, PLAIN, Halted
from harness.isolation import Ready
from harness.options import Options
from harness.reporters import failure, jsonfile, rollouts, terminal
from harness.reporters.violations import Violation
from harness.rollouts import Aborting, Broke, Event, Left, Restarted, RolloutHistory, Straggled, Stuck, Updated
from harness.scenario import Scenario, Step
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, VALID, Counterexample, Result
from tests.unit.histories import view
from tests.unit.loop_histories import began, broke, call, ended, groups, history, member, stopped, taken

Told = Event | list[Event]
ONE = view((5,), ABORTED)
WAITS = ((member(1, ONE),),)


def screen(rule: str, *told: Told, **scenario: object) -> str:
    one = history(*told, **scenario)
    finding = rollout_checker(rule)(RolloutCase(one.mode, one))
    assert isinstance(finding, Finding)
    return "\n".join(failure.lines(rule, "client", PLAIN, "inproc", finding, one))


def shown(*told: Told, rule: str = "GROUP") -> list[str]:
    """The lines of a history, of a finding that is in no rollout."""
    return rollouts.lines(rule, Finding(None, "no", -1, 0), history(*told))[:-1]


SCREENS: dict[str, tuple[str, str]] = {
    "a rule of single samples, with an arrow at the call": (
        screen(
            "BUDGET",
            [began(), taken((0,), (1,)), *call(0), *call(1, finish="abort"), ended(groups((0,)), WAITS)],
            [began(2), *call(1, 1, before=ONE, asked=4, ids=(6,)), ended(groups((1,)))],
            over=2,
        ),
        """
BUDGET violated   client   plain   inproc   whole rollouts
  budget 4, 1 group of 1 a rollout, taken 2 at a time
  rollout 1, budget 4
    sample 1   asked 4   got 1   stop    completed with 1
    sample 2   asked 4   got 1   abort   aborted with 1
    trains on 1; buffer 2
  rollout 2, budget 4
    sample 2   asked 4   got 1   stop    completed with 2   <- rollout 2: may ask at most 3
  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003
""",
    ),
    "a rule of loops, up to the rollout's end": (
        screen(
            "GROUP",
            [began(), taken((0, 1), (2, 3)), *call(0), Updated("1"), Aborting(1), *call(1, finish="abort")],
            [ended(groups((0, 1))), began(2), *call(4), began(3)],
            members=2,
            over=2,
            partial=True,
        ),
        """
GROUP violated   client   plain   inproc   whole rollouts
  budget 4, 1 group of 2 a rollout, taken 2 at a time
  rollout 1, budget 4
    sample 1   asked 4   got 1   stop    completed with 1
    weights 1
    abort of 1 request
    sample 2   asked 4   got 1   abort   aborted with 1
    trains on 1+2; buffer none
  => rollout 1, sample 3: is lost: neither handed to training nor in the buffer
  why      spec/README.md#GROUP, THUDM/slime#200, THUDM/slime#2238
""",
    ),
    "a request that nobody aborts": (
        screen(
            "ABORT-LIVE", began(), call(3, finish="abort"), Aborting(0), Straggled(1, 3), Stuck(1, "it waits", ("a",))
        ),
        """
ABORT-LIVE violated   client   plain   inproc   whole rollouts
  budget 4, 1 group of 1 a rollout, taken 1 at a time
  rollout 1, budget 4
    sample 4   asked 4   got 1   abort   aborted with 1
    abort of 0 requests
    does not end: it waits
  => rollout 1, sample 4: its request came after the abort, and nothing aborts it
  why      spec/README.md#ABORT-LIVE, THUDM/slime#2056, THUDM/slime#1632
""",
    ),
    "a loop that does not end by itself": (
        screen("ABORT-LIVE", began(), Stuck(1, "it waits", ("a",))),
        """
ABORT-LIVE violated   client   plain   inproc   whole rollouts
  budget 4, 1 group of 1 a rollout, taken 1 at a time
  rollout 1, budget 4
    does not end: it waits
  => rollout 1: rollout 1 does not end: it waits: a
  why      spec/README.md#ABORT-LIVE, THUDM/slime#2056, THUDM/slime#1632
""",
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen(name: str) -> None:
    seen, wanted = SCREENS[name]
    assert seen == wanted.strip("\n")


def test_what_each_event_says() -> None:
    told = (
        *(began(budget=2), Restarted(WAITS, ()), Restarted(groups((0, 1), (2,)), groups((0, 1)))),
        *(Updated("3"), Aborting(0), broke(), Stuck(1, "it waits", ()), Halted(0, 0, "hang", "no end")),
        *(stopped(), Straggled(1, 0), taken((0,)), ended(groups((0, 1)), WAITS)),
    )
    assert shown(*told) == [
        "rollout 1, budget 2",
        "restart: buffer 2 saved, none loaded",
        "restart: buffer 1+2, 3 saved, 1+2 loaded",
        "  weights 3",
        "  abort of 0 requests",
        "  raises KeyError: 'x'",
        "  does not end: it waits",
        "  hang: no end",
        "shut down",
        "  trains on 1+2; buffer 2",
    ]


@pytest.mark.parametrize(
    "event",
    [Broke(1, "E", "x" * 300, False, ()), Stuck(1, "x" * 300, ()), Halted(0, 0, "hang", "x" * 300)],
    ids=lambda event: type(event).__name__,
)
def test_what_is_long_is_cut(event: Event) -> None:
    assert list(map(len, shown(event))) == [rollouts.WIDTH]


def test_a_long_row_is_cut() -> None:
    one = history(began(), call(0))
    (_, row) = rollouts.lines("BUDGET", Finding(0, "x" * 300, 0, 1), one)
    assert row.endswith("...") and len(row) == rollouts.WIDTH + 40


def test_of_many_rows_the_first_and_the_last_are_shown() -> None:
    calls = [began(), *(event for sample in range(40) for event in call(sample))]
    last = rollouts.lines("GROUP", Finding(None, "no", -1, 1), history(*calls))
    assert len(last) == rollouts.MAX_ROWS + 2
    assert [line.split()[:2] for line in last[:3]] == [["rollout", "1,"], ["sample", "1"], ["sample", "2"]]
    assert last[6] == "... 15 lines more"
    assert [line.split()[1] for line in last[7:9]] == ["21", "22"] and last[-1] == "=> rollout 1: no"
    few = rollouts.lines("GROUP", Finding(None, "no", -1, 1), history(*calls[: 1 + 4 * 25]))
    assert len(few) == rollouts.MAX_ROWS + 1


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (Scenario(), "budget 4, 1 group of 1 a rollout, taken 1 at a time"),
        (
            Scenario(2, 3, 2, 4, 1, False, True, True, True, True),
            "budget 2, 2 groups of 3 a rollout, taken 4 at a time, no partial rollout, fully async, "
            "off-policy tokens masked, generate returns lists, 1 permit",
        ),
    ],
    ids=["plain", "unusual"],
)
def test_the_setting_names_what_is_unusual(scenario: Scenario, said: str) -> None:
    assert rollouts.setting(RolloutHistory(scenario, PLAIN, 0, {}, ())) == said


# The report


COUNTEREXAMPLE = Counterexample(
    Scenario(budget=1, steps=(Step("kill"),)), Finding(None, "no", 0, 1), history(began(), ended(left=Left((0,))))
)
REPORT = Report(
    Ready("client", (PLAIN,), {}, ()),
    Options(TargetSpec("reference"), profile="quick"),
    (
        Result("BUDGET", "MUST", PLAIN, "inproc", VALID, 9),
        Result("BUDGET", "MUST", PLAIN, "inproc", VALID, 4, on="rollout"),
        Result("ABORT-LIVE", "MUST", PLAIN, "inproc", INVALID, 4, "no", COUNTEREXAMPLE, on="rollout"),
    ),
    1.0,
)


def test_whole_rollouts_have_a_table_of_their_own() -> None:
    out = io.StringIO()
    terminal.show(Console(file=out, width=80), REPORT, {})
    assert (
        "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        == """
client   engine inproc   profile quick   seed 0   1.0 s

 rule     level   plain
 ────────────────────────
 BUDGET   MUST    valid 9

Over whole rollouts:

 rule         level   plain
 ──────────────────────────────
 BUDGET       MUST    valid 4
 ABORT-LIVE   MUST    invalid 4


violates: ABORT-LIVE""".lstrip("\n")
    )


def test_without_single_samples_there_is_one_table() -> None:
    out = io.StringIO()
    terminal.show(Console(file=out, width=80), replace(REPORT, results=REPORT.results[1:]), {})
    assert out.getvalue().count(" rule ") == 1


def test_json_holds_the_scenario_and_says_on_what_a_rule_was_judged() -> None:
    stored = Violation(REPORT.results[2], "client", "", 0, ("screen",), "file", "command")
    first, second, last = jsonfile.data(REPORT, {2: stored})["results"]
    assert [first["on"], second["on"], last["on"]] == ["sample", "rollout", "rollout"]
    assert last["counterexample"] == {
        "scenario": {"budget": 1, "steps": [{"kind": "kill"}]},
        "summary": "screen",
        "replay": "command",
    }
