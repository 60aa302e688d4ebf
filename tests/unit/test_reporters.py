"""What a person sees, to the letter."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from harness import corpus
from harness.check import Covered, Report
from harness.checkers import Case, Finding, checker
from harness.history import INCREMENTAL, PLAIN, STREAM, TRUNCATED, History
from harness.isolation import Ready
from harness.options import Options
from harness.reporters import failure, jsonfile, terminal, verdicts
from harness.reporters.violations import Violation, Violations, grouped
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.targets.function import FunctionTarget
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result
from tests import function_targets
from tests.unit.histories import Ask, Life, view

CORPUS = {entry.name: entry.work for entry in corpus.load() if isinstance(entry.work, Schedule)}


@contextmanager
def runner(client: str) -> Iterator[Runner]:
    made = Runner(FunctionTarget(client, getattr(function_targets, client), None))
    try:
        yield made
    finally:
        made.close()


def found(rule: str, client: str, schedule: Schedule) -> str:
    """The screen of a faulty client's violation."""
    with runner(client) as made:
        history = made.run(schedule, PLAIN)
        finding = checker(rule)(Case(PLAIN, {PLAIN: history}, made.run(schedule.uninterrupted(), PLAIN)))
    assert isinstance(finding, Finding)
    lines = failure.lines(rule, client, PLAIN, "inproc", finding, history, faulty_engine=schedule.faulty_engine)
    return "\n".join(lines)


def told(rule: str, life: Life, finding: Finding) -> str:
    """The screen of a finding on a history by hand."""
    return "\n".join(failure.lines(rule, "client", life.mode, "inproc", finding, life.history))


def screen(text: str) -> str:
    return text.strip("\n")


def test_BUDGET_minimal() -> None:
    assert found("BUDGET", "forgets_subtraction", CORPUS["slime-2260-minimal"]) == screen("""
BUDGET violated   forgets_subtraction   plain   inproc
  prompt 1, budget 2, context unknown
  attempt 1   asked 2   got 1   abort    aborted with 1
  attempt 2   asked 2   got 2   length   truncated with 3   <- may ask at most 1
  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003
""")


def test_BUDGET_with_the_numbers_of_the_issue() -> None:
    life = Life(budget=24576, context=40960)
    life.call(Ask(24576, (7,) * 19201, "abort"), after=view((7,) * 19201))
    life.call(*[Ask(24576, fault="http", code=400)] * 60, raises="HTTPStatusError")
    assert told("BUDGET", life, Finding(1, "may ask at most 5375")) == screen("""
BUDGET violated   client   plain   inproc
  prompt 3, budget 24576, context 40960
  attempt 1   asked 24576             got 19201   abort      aborted with 19201
  attempt 2   asked 24576, 60 times   got 0       HTTP 400   aborted with 19201, raises HTTPStatusError   <- may ask at most 5375
  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003
""")  # noqa: E501 - a screen is as wide as it is


def test_MODE_EQ() -> None:
    life = Life(mode=STREAM, budget=3).call(Ask(3, (5, 6, 7), "length"), after=view((5, 5, 6), TRUNCATED))
    assert told("MODE-EQ", life, Finding(0, "mode plain: other tokens")) == screen("""
MODE-EQ violated   client   stream   inproc
  prompt 3, budget 3, context unknown
  attempt 1   asked 3   got 3   length   truncated with 3   <- mode plain: other tokens
  why      spec/README.md#MODE-EQ, verl-project/verl#3319, NVIDIA-NeMo/RL#3851
""")


def test_RETRY_sixty_times() -> None:
    life = Life(budget=2).call(*[Ask(2, fault="http", code=400)] * 60, raises="HTTPStatusError")
    assert told("RETRY", life, Finding(0, "HTTP 400 is asked again 59 times")) == screen("""
RETRY violated (SHOULD)   client   plain   inproc
  prompt 3, budget 2, context unknown
  attempt 1   asked 2, 60 times   got 0   HTTP 400   pending with 0, raises HTTPStatusError   <- HTTP 400 is asked again 59 times
  why      spec/README.md#RETRY, THUDM/slime#1861, strands-rl/strands-sglang@dbaff4a
""")  # noqa: E501


def test_a_faulty_engine() -> None:
    schedule = Schedule(budget=2, attempts=(Attempt("over-deliver", after=1),))
    assert found("BUDGET", "keeps_more_than_asked", schedule) == screen("""
BUDGET violated   keeps_more_than_asked   plain   inproc   faulty engine
  prompt 1, budget 2, context unknown
  attempt 1   asked 2   got 3   length (over-deliver)   truncated with 3   <- total 3 > budget 2
  why      spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003
""")


def test_siblings() -> None:
    schedule = Schedule(budget=3, samples=2, attempts=(Attempt("abort", after=1),))
    assert found("MAXIMAL", "lowers_shared_cap", schedule) == screen("""
MAXIMAL violated   lowers_shared_cap   plain   inproc
  prompt 1, budget 3, context unknown, 2 samples share one dict
  attempt 1 of sample 1   asked 3   got 1   abort    aborted with 1
  attempt 1 of sample 2   asked 3   got 1   abort    aborted with 1
  attempt 2 of sample 1   asked 2   got 2   length   truncated with 3
  attempt 2 of sample 2   asked 1   got 1   length   truncated with 2   <- may ask 2
  why      spec/README.md#MAXIMAL, areal-project/AReaL#699, verl-project/verl#1627
""")


def test_a_finding_on_the_whole_run_stands_below_the_calls() -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,))).call(flag=True)
    assert told("RESUME-EQ", life, Finding(None, "uninterrupted: 2 tokens, here 1")) == screen("""
RESUME-EQ violated   client   plain   inproc
  prompt 3, budget 2, context unknown
  attempt 1   asked 2        got 1   abort        aborted with 1
  attempt 2   asks nothing           abort flag   aborted with 1
  uninterrupted: 2 tokens, here 1
  why      spec/README.md#RESUME-EQ, vllm-project/vllm#22283, sgl-project/sglang#11673
""")


def unfinished() -> Life:
    life = Life(budget=2).call(Ask(2, (5,), "length"))
    life.events.pop()  # nothing came back, as when the process was ended
    return life


ENDS = {
    "a stream that just ends": (
        Life(budget=2).call(Ask(2, (5,)), after=view((5,))),
        "asked 2   got 1   no terminal event   aborted with 1",
    ),
    "a broken connection": (
        Life(budget=2).call(Ask(2, fault="drop-before"), raises="ClientError"),
        "asked 2   got 0   drop-before   pending with 0, raises ClientError",
    ),
    "a hang": (
        Life(budget=2).call(Ask(2, (5,), "length"), halts="hang"),
        "asked 2   got 1   length   hang: it goes on and on",
    ),
    "a call that was not over": (unfinished(), "asked 2   got 1   length   "),
}


@pytest.mark.parametrize(("life", "row"), ENDS.values(), ids=ENDS.keys())
def test_how_a_call_ends(life: Life, row: str) -> None:
    lines = told("STATUS", life, Finding(0, "as it is")).splitlines()
    assert lines[2] == f"  attempt 1   {row}   <- as it is"


def test_of_many_calls_the_first_and_the_last_are_shown() -> None:
    life = Life(budget=20)
    for _ in range(16):
        life.call(Ask(20, (), "abort"), after=view(()))
    lines = told("BUDGET", life, Finding(15, "too much")).splitlines()
    assert len(lines) == failure.MAX_CALLS + 4
    assert lines[5] == "  ... 4 more"
    assert lines[4].startswith("  attempt 3  ") and lines[6].startswith("  attempt 8  ")
    assert lines[-2].endswith("<- too much")


def test_the_setting_names_what_is_unusual() -> None:
    life = Life(budget=3, context=40, preload=1, images=2, min_new_tokens=2, stop=("x",), seed=0, sglang="0.5.9")
    assert failure.setting(life.history) == (
        "prompt 3, budget 3, context 40, 1 token kept before, 2 images, min_new_tokens 2, "
        "stop ['x'], seed 0, SGLang 0.5.9"
    )


@pytest.mark.parametrize("message", ["x" * 1000, "[bold]not markup[/bold] :smile: " * 9])
def test_a_long_message_stays_on_its_line(message: str) -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,)))
    lines = told("BUDGET", life, Finding(0, message)).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 2 + failure.WIDTH + 40
    assert lines[2].endswith("...")


def result(rule: str, mode: str = PLAIN, verdict: str = VALID, count: int = 9, **more: object) -> Result:
    level = "SHOULD" if rule in ("NO-ALIAS", "RETRY", "PARAMS") or more.get("faulty_engine") else "MUST"
    return Result(rule, level, mode, "inproc", verdict, count, **more)  # type: ignore[arg-type]


def history() -> History:
    return Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,))).history


def report(*results: Result, name: str = "client") -> Report:
    options = Options(TargetSpec("reference"), engines=("inproc", "loopback"), profile="quick", seed=4)
    return Report(Ready(name, (PLAIN,), {}, ()), options, results, 1.25)


RESULTS = (
    result("BUDGET", verdict=INVALID, count=91, counterexample=Counterexample(Schedule(), Finding(0, "m"), history())),
    result("BUDGET", STREAM, UNKNOWN, 3, reason="hang"),
    result("RESUME-EQ", count=1234),
    result("RESUME-EQ", STREAM, UNKNOWN, 0, reason="hang"),
    result("MODE-EQ", STREAM),
    result("PARAMS", INCREMENTAL, UNKNOWN, 0, reason="no schedule put it to the test"),
    result("ALIGN", faulty_engine=True),
)


def shows(*lines: str) -> Violation:
    return Violation(RESULTS[0], "client", "", 4, lines)


def printed(width: int, shown: Report, found: Violations | None = None, **options: bool) -> str:
    out = io.StringIO()
    terminal.show(Console(file=out, width=width, **options), shown, found or {})  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_what_was_left_out_is_said() -> None:
    shown = replace(report(result("BUDGET")), skipped=(("client has no worker", 2), ("client takes no lists", 1)))
    said = ["2 runs left out: client has no worker", "1 run left out: client takes no lists"]
    assert [line for line in printed(100, shown).splitlines() if "left out" in line] == said


@pytest.mark.parametrize(
    ("covered", "size", "line"),
    [
        (Covered(1234, 1234), 3, "1,234 of 1,234 schedules of the scope of size 3, all"),
        (Covered(1234, 4000), 3, "1,234 of 4,000 schedules of the scope of size 3, 31%"),
        (Covered(1, 2000), None, "1 of 2,000 schedules drawn, 0%"),
    ],
)
def test_how_much_of_spread_work_was_done(covered: Covered, size: int | None, line: str) -> None:
    shown = report(result("BUDGET"))
    shown = replace(shown, covered=covered, options=replace(shown.options, scope=size))
    assert printed(100, shown).splitlines()[1] == line


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int) -> None:
    assert printed(width, report(*RESULTS), {0: shows("BUDGET violated   client", "  attempt 1")}) == screen("""
client   engine inproc, loopback   profile quick   seed 4   1.2 s

 rule        level    plain        stream      incremental
 ─────────────────────────────────────────────────────────
 BUDGET      MUST     invalid 91   unknown 3   -
 RESUME-EQ   MUST     valid 1234   unknown     -
 MODE-EQ     MUST     -            valid 9     -
 PARAMS      SHOULD   -            -           unknown

On an engine that breaks its own contract (counts as SHOULD):

 rule    level    plain
 ────────────────────────
 ALIGN   SHOULD   valid 9

unknown: BUDGET stream, RESUME-EQ stream: hang
unknown: PARAMS incremental: no schedule put it to the test

BUDGET violated   client
  attempt 1

violates: BUDGET
""")


@pytest.mark.parametrize(
    ("results", "strict", "said"),
    [
        ([result("BUDGET")], False, "conforms"),
        ([result("BUDGET"), result("STATUS", verdict=UNKNOWN, reason="r")], False, "cannot be judged: STATUS"),
        ([*RESULTS], False, "violates: BUDGET"),
        ([result("BUDGET"), result("PARAMS", verdict=INVALID)], False, "conforms"),
        ([result("BUDGET"), result("PARAMS", verdict=INVALID)], True, "violates: PARAMS"),
    ],
)
def test_the_last_line_says_what_gates(results: list[Result], strict: bool, said: str) -> None:
    assert verdicts.closing(report(*results), strict=strict) == said


def test_what_gates_comes_first_and_whole_rollouts_are_a_violation_of_their_own() -> None:
    example = RESULTS[0].counterexample
    three = [
        result("ALIGN", verdict=INVALID, counterexample=example, faulty_engine=True),
        result("BUDGET", verdict=INVALID, counterexample=example),
        result("BUDGET", verdict=INVALID, counterexample=example, on="rollout"),
    ]
    groups = grouped({place: replace(shows("head"), result=one) for place, one in enumerate(three)})
    assert [[v.result for v in group] for group in groups] == [[three[1]], [three[2]], [three[0]]]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_what_is_long_is_not_wrapped(width: int) -> None:
    """A command that is broken in two cannot be copied."""
    command = "  replay   rolloutcheck replay " + "x" * 200
    reason = "[bold]y[/bold] " * 20
    shown = printed(
        width, report(result("BUDGET", verdict=UNKNOWN, reason=reason)), {0: shows("head", command)}
    ).splitlines()
    assert command in shown
    assert f"unknown: BUDGET plain: {reason}".rstrip() in shown


def test_a_long_headline_is_not_wrapped() -> None:
    name = "some_package.some_module:some_function_with_a_name" * 2
    assert printed(80, report(RESULTS[2], name=name)).splitlines()[0].endswith(" s")


def test_a_cell_is_the_worst_of_its_engines() -> None:
    two = (result("BUDGET"), result("BUDGET", verdict=UNKNOWN, count=2, reason="r"))
    assert " BUDGET   MUST    unknown 11" in printed(80, report(*two))


def test_colours_are_for_terminals_and_NO_COLOR_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = report(*RESULTS)
    assert "\x1b" not in printed(80, shown)
    assert "\x1b[1;31minvalid 91" in printed(80, shown, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in printed(80, shown, force_terminal=True)


def test_json_says_what_the_report_says() -> None:
    data = jsonfile.data(report(*RESULTS), {0: replace(shows("the screen"), replay="the command")})
    assert (data["target"], data["engine"], data["seed"], data["revision"]) == ("client", "inproc,loopback", 4, None)
    first, *rest = data["results"]
    assert first["counterexample"]["summary"] == "the screen" and first["counterexample"]["replay"] == "the command"
    assert all(r["counterexample"] is None for r in rest)
    assert [r["verdict"] for r in data["results"]] == [r.verdict for r in RESULTS]
    assert json.loads(jsonfile.text(data)) == json.loads(json.dumps(data))
