"""The search, on targets in this process: what is unknown is never green, and every row has its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import spec
from harness import check as module
from harness import corpus, search
from harness import options as options_module
from harness.check import Report, check
from harness.checkers import RULE_IDS, Case, Judgement, checker
from harness.events import Event, Progress
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM, Halted, History
from harness.isolation import Ready
from harness.options import MODE_SETS, PROFILES, QUICK_BUDGET, UNTIL_BROKEN, Options
from harness.runner import Runner
from harness.scenario import Scenario
from harness.schedule import Attempt, Schedule
from harness.search import applies, as_run
from harness.targets import CannotJudge
from harness.targets.function import FunctionTarget, Generate
from harness.targets.spec import TargetSpec
from harness.verdict import CANNOT, CONFORMS, INVALID, UNKNOWN, VALID, VIOLATES, Result, exit_status
from harness.work import SAMPLE, level
from reference_impl.generate import generate
from reference_impl.generate_streaming import generate_streaming
from tests.function_targets import (
    drops_stop,
    forgets_subtraction,
    forgets_subtraction_streaming,
    keeps_more_than_asked,
)

WHOLE = tuple(entry for entry in corpus.load() if level(entry.work) == SAMPLE)
Run = Callable[[Runner, int, Schedule, str], History]


def plainly(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
    return runner.run(schedule, mode)


class InProcess:
    """Stands in for `Worker`. ``target`` and ``run`` are set by the test; ``process`` counts up with each twin."""

    target: FunctionTarget
    how: Run
    ran: list[tuple[Schedule, str]]

    def __init__(
        self, spec: TargetSpec, front: str = "inproc", *_: Any, process: int = 0, level: str = SAMPLE, **__: Any
    ) -> None:
        self.spec, self.front, self.process, self.level = spec, front, process, level
        self._runner: Runner | None = None
        absent = {mode: str(error) for mode, error in self.target.absent.items()}
        self.ready = Ready(self.target.name, self.target.modes, absent, ())

    def ahead(self, schedule: Schedule, mode: str) -> None: ...

    def run(self, schedule: Schedule, mode: str) -> History:
        self.ran.append((schedule, mode))
        if self._runner is None:  # not before: a front is the only one of its process
            self._runner = Runner(self.target, self.front)
        return type(self).how(self._runner, self.process, schedule, mode)

    def twin(self) -> InProcess:
        return type(self)(self.spec, self.front, process=self.process + 1)

    def launch(self) -> None: ...

    def wait(self) -> Ready:
        return self.ready

    def modules(self) -> tuple[str, ...]:
        return ("slime.x",)

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Checks a pair of functions, on few schedules."""
    monkeypatch.setattr(module, "Worker", InProcess)
    for place in (module, options_module):
        monkeypatch.setattr(place, "PROFILES", {"quick": 12, "ci": 12})
    few = tuple(e for place, e in enumerate(WHOLE) if place % 4 == 0 or getattr(e.work, "images", 0))
    monkeypatch.setattr(corpus, "load", lambda: few)

    def call(plain: Generate | None, stream: Generate | None = None, how: Run = plainly, **options: Any) -> Report:
        monkeypatch.setattr(InProcess, "target", FunctionTarget("client", plain, stream), raising=False)
        monkeypatch.setattr(InProcess, "how", staticmethod(how), raising=False)
        monkeypatch.setattr(InProcess, "ran", [], raising=False)
        return check(Options(TargetSpec("reference"), **{"profile": "quick", **options}))

    return call


def only(report: Report, rule: str, mode: str = PLAIN, *, faulty: bool = False) -> Result:
    (found,) = (r for r in report.results if (r.rule, r.mode, r.faulty_engine) == (rule, mode, faulty))
    return found


def status(report: Report, *, strict: bool = False) -> int:
    return exit_status(list(report.results), strict=strict)


def test_the_reference_is_valid_in_every_mode(checked: Callable[..., Report]) -> None:
    report = checked(generate, generate_streaming)
    assert {r.verdict for r in report.results} == {VALID}
    assert all(r.schedules and r.reason == "" and r.counterexample is None for r in report.results)
    assert (status(report), report.complete) == (CONFORMS, True)


def test_results_come_by_rule_then_mode_then_engine(checked: Callable[..., Report]) -> None:
    report = checked(generate, generate_streaming)
    places = [(RULE_IDS.index(r.rule), MODES.index(r.mode), r.faulty_engine) for r in report.results]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    two = checked(generate, rules=("BUDGET",), engines=("inproc", "aioresponses"))
    assert [r.engine for r in two.results if not r.faulty_engine] == ["inproc", "aioresponses"]


def test_only_the_rules_that_are_asked_for(checked: Callable[..., Report]) -> None:
    report = checked(generate, rules=("BUDGET", "STATUS"))
    assert list(dict.fromkeys(r.rule for r in report.results)) == ["BUDGET", "STATUS"]


def test_BUDGET_is_broken_and_shrunk_in_every_mode(checked: Callable[..., Report]) -> None:
    report = checked(forgets_subtraction, forgets_subtraction_streaming, rules=("BUDGET",))
    assert status(report) == VIOLATES
    for mode in MODES:
        result = only(report, "BUDGET", mode)
        assert (result.verdict, result.level) == (INVALID, "MUST")
        assert result.counterexample is not None
        assert result.counterexample.schedule == Schedule(attempts=(Attempt("abort", after=1),))
        assert result.counterexample.finding.message == result.reason
        assert result.counterexample.history.mode == mode
    assert not [r for r in report.results if r.faulty_engine]  # the cause is the same, and is said once


# Unknown is never green


def test_a_checker_that_crashes_is_unknown(checked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    real = checker

    def crashes(case: Case) -> Judgement:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(search, "checker", lambda rule: crashes if rule == "BUDGET" else real(rule))
    report = checked(generate, rules=("BUDGET", "STATUS"))
    result = only(report, "BUDGET")
    assert (result.verdict, result.schedules) == (UNKNOWN, 0)
    assert result.reason.startswith("the checker of BUDGET crashed: ZeroDivisionError: no such luck (")
    assert only(report, "STATUS").verdict == VALID
    assert status(report) == CANNOT


def test_nothing_judged_is_unknown(checked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    real = checker
    monkeypatch.setattr(search, "checker", lambda rule: (lambda case: None) if rule == "BUDGET" else real(rule))
    report = checked(generate, rules=("BUDGET",))
    (result,) = report.results  # and no row for the faulty engine
    assert (result.verdict, result.schedules, result.reason) == (UNKNOWN, 0, "no schedule put it to the test")
    assert status(report) == CANNOT


def test_one_run_that_hangs_is_unknown(checked: Callable[..., Report]) -> None:
    hung: list[Schedule] = []

    def once(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if hung or schedule.budget < 2:
            return runner.run(schedule, mode)
        hung.append(schedule)
        return History(schedule, mode, (), -1, (Halted(1, 0, "hang", "it goes on"),))

    report = checked(generate, how=once, rules=("BUDGET",))
    result = only(report, "BUDGET")
    assert hung and result.schedules > 0
    assert (result.verdict, result.reason) == (UNKNOWN, "call 2: hang: it goes on")
    assert status(report) == CANNOT


def test_one_run_that_cannot_be_judged_is_unknown(checked: Callable[..., Report]) -> None:
    def some(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if schedule.images:
            raise CannotJudge("client: no images here")
        return runner.run(schedule, mode)

    result = only(checked(generate, how=some, rules=("BUDGET",)), "BUDGET")
    assert result.verdict == UNKNOWN
    assert result.reason.startswith("client: no images here (")


def test_what_a_client_does_not_have_is_no_reason(checked: Callable[..., Report]) -> None:
    def some(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if schedule.images:
            raise CannotJudge("client has no images", not_applicable=True)
        return runner.run(schedule, mode)

    assert only(checked(generate, how=some, rules=("BUDGET",)), "BUDGET").verdict == VALID


def test_a_failure_that_a_fresh_process_does_not_show_is_flaky(checked: Callable[..., Report]) -> None:
    def first_process(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if process:
            runner.target = FunctionTarget("client", generate, None)
        return runner.run(schedule, mode)

    report = checked(forgets_subtraction, how=first_process, rules=("BUDGET",))
    result = only(report, "BUDGET")
    assert (result.verdict, result.counterexample) == (UNKNOWN, None)
    assert result.reason == "flaky: [prompt 'a', budget 1: abort after 1] fails, and in a fresh process it does not"
    assert status(report) == CANNOT


def test_a_client_that_fails_every_other_time_is_flaky(checked: Callable[..., Report]) -> None:
    calls = 0

    async def now_and_then(args: Any, sample: Any, params: Any) -> Any:
        nonlocal calls
        if sample.response_length == 0:
            calls += 1
        return await (forgets_subtraction if calls % 2 else generate)(args, sample, params)

    report = checked(now_and_then, rules=("BUDGET",))
    result = only(report, "BUDGET")
    assert (result.verdict, result.reason[:7], result.counterexample) == (UNKNOWN, "flaky: ", None)
    assert status(report) == CANNOT


ENGINES = ("inproc", "aioresponses")


def test_an_interrupt_leaves_what_is_known(checked: Callable[..., Report]) -> None:
    count = 0

    def stops(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        nonlocal count
        count += 1
        if count > 20:
            raise KeyboardInterrupt
        return runner.run(schedule, mode)

    report = checked(forgets_subtraction, how=stops, rules=("BUDGET", "CONTEXT"), engines=ENGINES)
    assert not report.complete
    assert {r.verdict for r in report.results} == {UNKNOWN}
    begun, other = (replace(report, results=tuple(r for r in report.results if r.engine == e)) for e in ENGINES)
    assert only(begun, "BUDGET").reason.startswith("interrupted before it was confirmed on [")
    assert only(begun, "CONTEXT").reason == "interrupted"
    assert [(r.rule, r.reason) for r in other.results] == [("BUDGET", "interrupted"), ("CONTEXT", "interrupted")]
    assert status(report) == CANNOT


# Modes


def test_MODE_EQ_needs_two_modes(checked: Callable[..., Report]) -> None:
    rules = ("BUDGET", "MODE-EQ")
    for report in (checked(generate, rules=rules), checked(generate, generate_streaming, modes=(STREAM,), rules=rules)):
        assert "MODE-EQ" not in {r.rule for r in report.results}
    both = checked(generate, generate_streaming, modes=MODE_SETS["both"], rules=rules)
    assert [r.mode for r in both.results if r.rule == "MODE-EQ" and not r.faulty_engine] == [STREAM]
    streaming = checked(None, generate_streaming, rules=("MODE-EQ",))
    assert [r.mode for r in streaming.results if not r.faulty_engine] == [INCREMENTAL]


def test_where_a_rule_applies() -> None:
    for rule in RULE_IDS:
        for mode in MODES:
            in_its_modes = mode in spec.RULES[rule].modes
            assert applies(rule, mode, MODES) is (in_its_modes and (rule != "MODE-EQ" or mode != PLAIN))
    assert not applies("MODE-EQ", STREAM, (STREAM, INCREMENTAL))


@pytest.mark.parametrize(
    ("modes", "words"),
    [((STREAM,), "client has no stream mode"), ((INCREMENTAL,), "has no stream mode"), ((PLAIN, STREAM), "no stream")],
)
def test_a_mode_that_is_absent_cannot_be_judged(
    checked: Callable[..., Report], modes: tuple[str, ...], words: str
) -> None:
    with pytest.raises(CannotJudge, match=words) as error:
        checked(generate, modes=modes)
    assert error.value.not_applicable


def test_a_client_with_a_stream_has_both_kinds(checked: Callable[..., Report]) -> None:
    report = checked(None, generate_streaming, rules=("BUDGET",))
    assert [r.mode for r in report.results if not r.faulty_engine] == [STREAM, INCREMENTAL]


# Engines that break their contract


def test_a_faulty_engine_has_rows_of_its_own(checked: Callable[..., Report]) -> None:
    report = checked(keeps_more_than_asked, rules=("BUDGET",))
    conforming, faulty = only(report, "BUDGET"), only(report, "BUDGET", faulty=True)
    assert (conforming.verdict, conforming.level) == (VALID, "MUST")
    assert (faulty.verdict, faulty.level) == (INVALID, "SHOULD")
    assert faulty.counterexample is not None
    assert faulty.counterexample.schedule.kinds == ("over-deliver",)
    assert (status(report), status(report, strict=True)) == (CONFORMS, VIOLATES)


def test_PARAMS_gates_when_it_is_strict(checked: Callable[..., Report]) -> None:
    report = checked(drops_stop, rules=("BUDGET", "PARAMS"))
    assert only(report, "PARAMS").verdict == INVALID
    assert (status(report), status(report, strict=True)) == (CONFORMS, VIOLATES)


# Profiles


def test_a_quick_check_leaves_large_entries_out(
    checked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = WHOLE[-12:]
    monkeypatch.setattr(corpus, "load", lambda: entries)
    large = {as_run(e.work, PLAIN) for e in entries if e.work.budget > QUICK_BUDGET}
    small = {as_run(e.work, PLAIN) for e in entries} - large
    assert large and small
    checked(generate, rules=("BUDGET",), profile="quick")
    ran = {schedule for schedule, _ in InProcess.ran}
    assert small <= ran and not large & ran
    checked(generate, rules=("BUDGET",), profile="ci")
    assert large <= {schedule for schedule, _ in InProcess.ran}


def test_the_same_seed_runs_the_same_schedules(checked: Callable[..., Report]) -> None:
    ran = []
    for seed in (3, 3, 4):
        checked(generate, rules=("BUDGET",), seed=seed)
        ran.append(InProcess.ran)
    assert ran[0] == ran[1] != ran[2]


def test_progress_counts_to_its_total(checked: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Event] = []
    checked(forgets_subtraction, rules=("BUDGET",))
    check(Options(TargetSpec("reference"), rules=("BUDGET",), profile="quick"), said.append)
    phases = list(dict.fromkeys(p.phase for p in said if isinstance(p, Progress)))
    assert phases == ["corpus", "drawn", "faulty engine", "shrinking"]
    for phase in phases:
        steps = [p for p in said if isinstance(p, Progress) and p.phase == phase]
        assert [p.done for p in steps] == list(range(steps[0].total))


def test_the_profiles_grow() -> None:
    assert list(PROFILES) == ["quick", "ci", "deep"]
    assert sorted(PROFILES.values()) == list(PROFILES.values())


# What a search through a history asks for

SUBTRACTS = Schedule(budget=4, script=(66,), attempts=(Attempt("abort", after=2), Attempt("abort", after=1)))
"""Breaks BUDGET of a client that forgets to subtract, and is not the smallest that does."""


def test_what_is_known_is_run_first_and_not_shrunk_again_for_its_rule(checked: Callable[..., Report]) -> None:
    known = (("BUDGET", SUBTRACTS), ("MAXIMAL", SUBTRACTS), ("BUDGET", Scenario()))
    report = checked(forgets_subtraction, rules=("BUDGET",), first=known, depth=UNTIL_BROKEN)
    example = only(report, "BUDGET").counterexample
    assert example is not None and example.schedule == SUBTRACTS
    assert InProcess.ran[0] == (SUBTRACTS, PLAIN) and {schedule for schedule, _ in InProcess.ran} == {SUBTRACTS}


def test_what_is_known_of_another_rule_is_shrunk(checked: Callable[..., Report]) -> None:
    report = checked(forgets_subtraction, rules=("BUDGET",), first=(("STATUS", SUBTRACTS),), depth=UNTIL_BROKEN)
    example = only(report, "BUDGET").counterexample
    assert example is not None and len(example.schedule.attempts) == 1


def test_it_looks_on_until_everything_is_broken(checked: Callable[..., Report]) -> None:
    """The corpus breaks BUDGET of this client, and nothing STATUS."""
    checked(forgets_subtraction, rules=("BUDGET",), depth=UNTIL_BROKEN)
    hasty = len(InProcess.ran)
    checked(forgets_subtraction, rules=("BUDGET", "STATUS"), depth=UNTIL_BROKEN)
    assert len(InProcess.ran) > hasty


def test_a_mode_that_is_absent_can_be_left_out(checked: Callable[..., Report]) -> None:
    report = checked(generate, rules=("BUDGET",), modes=(PLAIN, STREAM), lenient=True)
    assert [r.mode for r in report.results if not r.faulty_engine] == [PLAIN]
    with pytest.raises(CannotJudge, match="client has no stream mode"):
        checked(generate, rules=("BUDGET",), modes=(STREAM,), lenient=True)


def test_a_counterexample_is_shown_in_every_mode_and_interruptions_are_counted(checked: Callable[..., Report]) -> None:
    found = only(checked(forgets_subtraction, generate_streaming, rules=("BUDGET",)), "BUDGET")
    assert found.counterexample is not None
    assert [run.mode for run in found.counterexample.others] == [STREAM, INCREMENTAL]
    kinds = dict(found.kinds)
    assert 0 < kinds["abort"] <= found.schedules


def test_a_report_says_which_modules_the_target_asked_for(checked: Callable[..., Report]) -> None:
    assert checked(generate, rules=("BUDGET",)).modules == ("slime.x",)
