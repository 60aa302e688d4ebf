"""The search where runs are missing, differ from time to time, or differ from mode to mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from harness import check as module
from harness.check import Report
from harness.history import MODES, PLAIN, STREAM, History
from harness.mutants import load
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.search import Search
from harness.targets import CannotJudge
from harness.verdict import CANNOT, INVALID, UNKNOWN, VALID
from reference_impl.generate import generate
from reference_impl.generate_streaming import generate_streaming
from tests.unit import test_check
from tests.unit.test_check import only, status

checked = test_check.checked
MUTANTS = load()
Checked = Callable[..., Report]


def plain(mutant: str) -> Any:
    return MUTANTS[mutant].client().plain


def streaming(mutant: str) -> Any:
    return MUTANTS[mutant].client().streaming


# Nothing is asked


@pytest.mark.parametrize("engines", [("inproc", "aioresponses"), ("aioresponses", "inproc")])
def test_an_engine_that_no_request_reaches_leaves_the_other_one_s_verdicts(
    checked: Checked, engines: tuple[str, ...]
) -> None:
    def some(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if runner.front.name == "aioresponses":
            return History(schedule, mode, (), -1, ())
        return runner.run(schedule, mode)

    report = checked(generate, how=some, rules=("BUDGET", "STATUS"), engines=engines)
    reason = "engine aioresponses: no request of client reached the engine aioresponses"
    said = {(r.rule, r.engine, r.verdict, r.reason) for r in report.results if not r.faulty_engine}
    assert said == {
        (rule, engine, *((VALID, "") if engine == "inproc" else (UNKNOWN, reason)))
        for rule in ("BUDGET", "STATUS")
        for engine in engines
    }
    assert status(report) == CANNOT


async def raises(args: Any, sample: Any, params: Any) -> Any:
    raise RuntimeError("no luck")


async def waits(args: Any, sample: Any, params: Any) -> Any:
    await asyncio.Event().wait()


async def is_silent(args: Any, sample: Any, params: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (raises, ": RuntimeError: no luck"),
        (waits, ": hang: it waits for something that can never happen"),
        (is_silent, ""),
    ],
)
def test_a_client_that_asks_nothing_cannot_be_judged_and_says_why(checked: Checked, client: Any, words: str) -> None:
    with pytest.raises(CannotJudge) as caught:
        checked(client, rules=("BUDGET",))
    assert str(caught.value) == f"no request of client reached the engine inproc{words}"


async def misspells(args: Any, sample: Any, params: Any) -> Any:
    return await generate(args, sample, params | {"temperatur": 1.0})


@pytest.mark.parametrize("rules", [("BUDGET",), ("STATUS", "TEXT")])
@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_a_client_whose_every_request_is_refused_cannot_be_judged(
    checked: Checked, rules: tuple[str, ...], mode: str
) -> None:
    """It never asks too much, and keeps what it is given; in one mode is enough."""
    with pytest.raises(CannotJudge) as caught:
        checked(misspells if mode == PLAIN else generate, misspells_streaming, rules=rules)
    said = f"no {mode} request of client got a token from the engine inproc: HTTP 400: unknown field `temperatur`"
    assert str(caught.value).startswith(said)


async def misspells_streaming(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    return await generate_streaming(args, sample, params | {"temperatur": 1.0})


async def gives_up(args: Any, sample: Any, params: Any) -> Any:
    with suppress(Exception):
        await generate(args, sample, params | {"temperatur": 1.0})
    sample.status = type(sample).Status.COMPLETED
    return sample


def test_one_that_breaks_a_rule_all_the_same_is_judged(checked: Checked) -> None:
    """A refused request that is called an answer: what is wrong with it says more."""
    report = checked(gives_up, rules=("STATUS",))
    assert only(report, "STATUS").verdict == INVALID


@pytest.mark.parametrize(("lacks", "words"), [(False, "client: not today"), (True, "no request of client reached")])
def test_a_client_that_can_never_be_judged_says_why_unless_it_only_lacks_something(
    checked: Checked, lacks: bool, words: str
) -> None:
    def never(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        raise CannotJudge("client: not today", not_applicable=lacks)

    with pytest.raises(CannotJudge, match=f"^{words}"):
        checked(generate, how=never, rules=("BUDGET",))


# From time to time


def test_what_was_seen_once_and_then_not_again_is_flaky(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen again at once it is not, since runs are kept; it may be when they had to be let go."""
    calls = 0
    real = module._Check._shrink

    async def once(args: Any, sample: Any, params: Any) -> Any:
        nonlocal calls
        calls += bool(sample.response_length)
        forgets = calls == 1 and sample.response_length
        return await (plain("forgets-subtraction") if forgets else generate)(args, sample, params)

    def later(work: Any) -> None:
        work.search.histories.clear()
        real(work)

    monkeypatch.setattr(module._Check, "_shrink", later)
    result = only(checked(once, rules=("BUDGET",)), "BUDGET")
    assert (result.verdict, result.counterexample) == (UNKNOWN, None)
    assert result.reason.startswith("flaky: it failed once on [") and result.reason.endswith("] and then did not")


def test_runs_are_not_kept_without_bound(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = Search.history

    def counted(search: Search, schedule: Schedule, mode: str) -> History | CannotJudge:
        found = real(search, schedule, mode)
        sizes.append(len(search.histories))
        return found

    monkeypatch.setattr(Search, "history", counted)
    monkeypatch.setattr("harness.search.MAX_HISTORIES", 5)
    assert only(checked(generate, rules=("BUDGET",)), "BUDGET").verdict == VALID
    assert max(sizes) == 6 and sizes.count(1) > 2


def test_a_simpler_schedule_that_cannot_be_judged_is_no_counterexample(checked: Checked) -> None:
    def some(runner: Runner, process: int, schedule: Schedule, mode: str) -> History:
        if schedule.budget < 2 and schedule.attempts:
            raise CannotJudge("client has no such small budgets", not_applicable=True)
        return runner.run(schedule, mode)

    result = only(checked(plain("forgets-subtraction"), how=some, rules=("BUDGET",)), "BUDGET")
    assert result.verdict == INVALID and result.counterexample is not None
    assert result.counterexample.schedule == Schedule(budget=2, attempts=(Attempt("abort", after=1),))


# From mode to mode


def test_two_faults_of_one_rule_are_shrunk_on_their_own(checked: Checked) -> None:
    report = checked(plain("keeps-more-than-asked"), streaming("forgets-subtraction"), rules=("BUDGET", "STATUS"))
    stream, alone = only(report, "BUDGET", STREAM), only(report, "BUDGET", PLAIN, faulty=True)
    assert stream.counterexample is not None and alone.counterexample is not None
    assert stream.counterexample.schedule == MUTANTS["forgets-subtraction"].shows
    assert alone.counterexample.schedule == MUTANTS["keeps-more-than-asked"].shows


def test_one_fault_in_several_modes_is_shrunk_once(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk: list[Schedule] = []
    real = module.shrink

    def counted(schedule: Schedule, broken: Callable[[Schedule], bool]) -> Schedule:
        shrunk.append(schedule)
        return real(schedule, broken)

    monkeypatch.setattr(module, "shrink", counted)
    report = checked(plain("drops-stop"), streaming("drops-stop"), rules=("PARAMS",))
    found = [only(report, "PARAMS", mode).counterexample for mode in MODES]
    assert [c.schedule for c in found if c is not None] == [MUTANTS["drops-stop"].shows] * 3
    assert len(shrunk) == 1
