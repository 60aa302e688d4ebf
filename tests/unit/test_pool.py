"""Portions: cut, run by other processes, kept in a journal and gone on from."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import check as module
from harness import options as asked
from harness import pool, scope
from harness.check import Covered, check
from harness.history import MODES, PLAIN
from harness.options import Options
from harness.pool import BadJournal, Journal, Plan, Portion
from harness.schedule import Attempt, Schedule
from harness.search import Search, Tally, to_json
from harness.strategies import PART, part
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID
from harness.work import SAMPLE

REFERENCE = TargetSpec("reference")
FORGETS = TargetSpec("mutant", function="forgets-subtraction")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (asked, module, pool):
        monkeypatch.setattr(place, "PROFILES", {"quick": 30, "ci": 300, "deep": 2 * PART + 7})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Portion]:
    """Portions run in this process; which did, in order."""
    ran: list[Portion] = []

    def one_by_one(work: Any, tasks: Any, jobs: int | None = None) -> Iterator[tuple[Any, Any]]:
        for name, arguments in tasks:
            ran.append(name)
            yield name, work(*arguments)

    monkeypatch.setattr(pool, "spread", one_by_one)
    yield ran
    if pool._search is not None:
        pool._search[1].worker.close()
        pool._search = None


# plans


def test_a_plan_cuts_what_is_drawn() -> None:
    plan = pool.plan(Options(REFERENCE, profile="deep"))
    assert plan.schedules == (2 * PART + 7) + (2 * PART + 7) // 4
    assert plan.portions == (
        Portion("drawn", 0, PART),
        Portion("drawn", 1, PART),
        Portion("drawn", 2, 7),
        Portion("faulty engine", 0, (2 * PART + 7) // 4),
    )


def test_a_plan_cuts_a_scope_and_its_portions_are_the_whole_scope() -> None:
    options = Options(REFERENCE, scope=1)
    plan = pool.plan(options)
    assert (plan.name, plan.schedules) == ("scope", scope.count(1))
    found = [s for portion in plan.portions for s in pool._schedules(options, portion)]
    assert found == list(scope.schedules(1))


def test_a_portion_is_the_same_whatever_was_run_before_it() -> None:
    options = Options(REFERENCE, scope=1)
    portions = pool.plan(options).portions
    last = pool._schedules(options, portions[-1])
    assert pool._schedules(options, portions[3]) == list(scope.schedules(1))[720:960]
    assert pool._schedules(options, portions[-1]) == last
    drawn = Portion("drawn", 1, 9)
    assert pool._schedules(Options(REFERENCE, seed=4), drawn) == part(4, 1)[:9]
    faulty = pool._schedules(Options(REFERENCE), Portion("faulty engine", 0, PART))
    assert any(s.faulty_engine for s in faulty)


@pytest.mark.parametrize(
    ("given", "spread"),
    [({}, False), ({"profile": "deep"}, True), ({"jobs": 1}, True), ({"scope": 0}, True), ({"limit_s": 1.0}, True)],
)
def test_when_the_work_is_spread(given: dict[str, Any], spread: bool) -> None:
    assert Options(REFERENCE, **given).spread is spread


# what a portion finds


def test_tallies_survive_the_way_between_processes() -> None:
    options = Options(REFERENCE, rules=("BUDGET", "STATUS"))
    one, two = Search(None, MODES, options, "inproc"), Search(None, MODES, options, "inproc")  # type: ignore[arg-type]
    large, small = Schedule(budget=3, attempts=(Attempt("abort", after=2),)), Schedule(attempts=(Attempt("abort"),))
    one.tallies["BUDGET", PLAIN, False] = Tally(4, large, kinds=Counter({"abort": 3}))
    one.tallies["STATUS", PLAIN, True] = Tally(1, None, 2, "first")
    found = json.loads(json.dumps(to_json(one.tallies)))
    assert len(found) == 2
    two.add(found)
    assert two.tallies == one.tallies
    one.tallies["BUDGET", PLAIN, False] = Tally(1, small, kinds=Counter({"abort": 1, "http": 1}))
    one.tallies["STATUS", PLAIN, True] = Tally(0, None, 1, "second")
    two.add(to_json(one.tallies))
    assert two.tallies["BUDGET", PLAIN, False] == Tally(5, small, kinds=Counter({"abort": 4, "http": 1}))
    assert two.tallies["STATUS", PLAIN, True] == Tally(1, None, 3, "first")


def test_a_portion_counts_from_nothing(here: list[Portion]) -> None:
    options = Options(FORGETS, rules=("BUDGET",), profile="deep")
    first = pool.run(options, "inproc", (PLAIN,), Portion("drawn", 0, 20))
    again = pool.run(options, "inproc", (PLAIN,), Portion("drawn", 0, 20))
    assert first == again and first[0] == 20
    (broken,) = (f for f in first[1] if f[:3] == ["BUDGET", PLAIN, False])
    assert broken[4] is not None


def test_a_process_that_is_given_other_work_lets_go_of_the_old(here: list[Portion]) -> None:
    """As a Ray worker may be: two fronts in one process would patch the same libraries."""
    portion = Portion("drawn", 0, 3)
    for engine in ("inproc", "aioresponses", "inproc"):
        assert pool.run(Options(REFERENCE, profile="deep"), engine, (PLAIN,), portion)[0] == 3


# processes


def number(of: int) -> tuple[int, int]:
    return of * of, os.getpid()


def refuses(of: int) -> int:
    raise CannotJudge(f"not {of}")


def dies(of: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return of


def sleeps(of: int) -> int:
    time.sleep(60)
    return of


def test_tasks_run_in_processes_of_their_own() -> None:
    found = dict(pool.spread(number, ((i, (i,)) for i in range(7)), 2))
    assert {i: square for i, (square, _) in found.items()} == {i: i * i for i in range(7)}
    assert os.getpid() not in {pid for _, pid in found.values()} and len({pid for _, pid in found.values()}) <= 2


def test_what_a_task_raises_is_raised_here_and_nobody_is_left() -> None:
    with pytest.raises(CannotJudge, match="not 0"):
        list(pool.spread(refuses, [(0, (0,))], 1))


def test_processes_end_when_nobody_waits_any_more() -> None:
    begin = time.monotonic()
    with suppress(KeyboardInterrupt), pool.processes(1) as made:
        future = made.submit(sleeps, 1)
        while not future.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 30


def test_tasks_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def tasks() -> Iterator[tuple[int, tuple[int]]]:
        for i in range(50):
            taken.append(i)
            yield i, (i,)

    results = pool.spread(number, tasks(), 1)
    next(results)
    assert len(taken) == 2
    results.close()


def test_there_is_a_core() -> None:
    assert pool.cores() >= 1


# a check that is spread


def test_a_deep_check_runs_every_portion(here: list[Portion]) -> None:
    report = check(Options(REFERENCE, rules=("BUDGET",), profile="deep"))
    assert here == list(pool.plan(Options(REFERENCE, profile="deep")).portions)
    assert {r.verdict for r in report.results} == {VALID}
    assert report.covered is not None and report.covered.of == 458 and 400 <= report.covered.schedules <= 458


def test_what_a_portion_finds_is_shrunk_and_confirmed(here: list[Portion]) -> None:
    report = check(Options(FORGETS, modes=(PLAIN,), rules=("BUDGET",), scope=1))
    (result,) = (r for r in report.results if not r.faulty_engine)
    assert result.verdict == INVALID and result.counterexample is not None
    assert result.counterexample.schedule == Schedule(budget=1, attempts=(Attempt("abort", after=1),))
    assert report.covered == Covered(scope.count(1), scope.count(1))


def test_no_portion_is_begun_when_the_time_is_over(here: list[Portion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run", lambda *_: time.sleep(0.06) or (10, []))
    report = check(Options(REFERENCE, rules=("BUDGET",), scope=2, limit_s=0.05))
    assert len(here) <= 1
    assert report.covered is not None and report.covered.schedules < report.covered.of == scope.count(2)


def test_what_several_engines_have_covered_is_added_up(here: list[Portion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run", lambda *_: (10, []))
    report = check(Options(REFERENCE, rules=("BUDGET",), scope=0, engines=("inproc", "loopback")))
    portions = pool.plan(Options(REFERENCE, scope=0)).portions
    assert here == [*portions, *portions]
    assert report.covered == Covered(2 * 10 * len(portions), 2 * scope.count(0))


def test_each_engine_gets_its_share_of_the_time() -> None:
    options = Options(REFERENCE, engines=("inproc", "loopback"), limit_s=100)
    now = time.monotonic()
    first, last = module._until(options, now, 0, 2), module._until(options, now, 1, 2)
    assert first is not None and last is not None
    assert 49 < first - now < 51 and 99 < last - now < 101
    assert module._until(Options(REFERENCE), now, 0, 1) is None


# the journal


def deep(file: Path, **given: Any) -> Options:
    return Options(REFERENCE, **{"rules": ("BUDGET",), "profile": "deep", "journal": str(file), **given})


def explored(options: Options) -> list[Any]:
    plan = pool.plan(options)
    return list(pool.explore(options, "inproc", (PLAIN,), plan))


def test_what_is_in_the_journal_is_not_run_again(here: list[Portion], tmp_path: Path) -> None:
    options = deep(tmp_path / "journal")
    whole = explored(options)
    assert len(here) == 4
    assert sorted(explored(options)) == sorted(whole) and len(here) == 4
    lines = (tmp_path / "journal").read_text().splitlines()
    (tmp_path / "journal").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # killed while it wrote
    assert sorted(explored(options)) == sorted(whole) and len(here) == 6
    assert len((tmp_path / "journal").read_text().splitlines()) == 5


def test_a_journal_serves_every_engine(here: list[Portion], tmp_path: Path) -> None:
    options = deep(tmp_path / "journal")
    journal = Journal(options, "loopback", (PLAIN,))
    journal.add(Portion("drawn", 0, PART), (3, []))
    assert Journal(options, "loopback", (PLAIN,)).known == {Portion("drawn", 0, PART): (3, [])}
    assert Journal(options, "inproc", (PLAIN,)).known == {}


@pytest.mark.parametrize("other", [{"seed": 1}, {"scope": 1}, {"rules": ()}, {"target": FORGETS}])
def test_a_journal_of_other_work_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    Journal(deep(tmp_path / "journal"), "inproc", (PLAIN,))
    given = {"target": REFERENCE, "rules": ("BUDGET",), "profile": "deep", "journal": str(tmp_path / "journal")}
    with pytest.raises(BadJournal, match="is the journal of other work"):
        Journal(Options(**{**given, **other}), "inproc", (PLAIN,))


@pytest.mark.parametrize("text", ["nonsense\n", '"{', "{}\n{\n{}\n", "[1]\n"])
def test_a_file_that_is_no_journal_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text(text)
    with pytest.raises(BadJournal):
        Journal(deep(tmp_path / "journal"), "inproc", (PLAIN,))
    assert (tmp_path / "journal").read_text() == text


@pytest.mark.parametrize("line", ["[]", "{}", '{"engine": "inproc", "portion": {"kind": 1}}', "7"])
def test_a_line_that_is_no_portion_is_refused(line: str, tmp_path: Path) -> None:
    options = deep(tmp_path / "journal")
    Journal(options, "inproc", (PLAIN,))
    with (tmp_path / "journal").open("a") as file:
        file.write(line + "\n{}\n")
    with pytest.raises(BadJournal, match="is no journal of rolloutcheck"):
        Journal(options, "inproc", (PLAIN,))


@pytest.mark.parametrize("name", ["/dev/full", "/nowhere/journal"])
def test_a_journal_that_cannot_be_written_is_refused(name: str) -> None:
    with pytest.raises(BadJournal, match=f"cannot use {name}: "):
        Journal(deep(Path(name)), "inproc", (PLAIN,)).add(Portion("drawn", 0, 1), (1, []))


def test_a_journal_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"\xff\xfe")
    with pytest.raises(BadJournal, match="is no journal of rolloutcheck"):
        Journal(deep(tmp_path / "journal"), "inproc", (PLAIN,))


def test_the_plan_is_data() -> None:
    assert Plan("scope", (), 0).portions == ()


# in the other process


def test_other_people_s_code_has_a_process_of_its_own_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Fake:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append((arguments, options))

        def __enter__(self) -> str:
            return "started"

    monkeypatch.setattr("harness.isolation.Worker", Fake)
    target = TargetSpec("function", function="client:f")
    assert pool._worker(Options(target, tokenizer="there", run_limit_s=3.0), "loopback", SAMPLE) == "started"
    assert made == [((target, "loopback", "there"), {"run_limit_s": 3.0, "level": SAMPLE})]


def test_an_interrupt_is_the_parent_s_affair_and_a_termination_leaves_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    handlers: dict[int, Any] = {}
    monkeypatch.setattr("harness.worker.die_with_parent", lambda: said.append("dies with its parent"))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    pool._begin(os.getppid())
    assert handlers[signal.SIGINT] is signal.SIG_IGN and said == ["dies with its parent"]
    with pytest.raises(SystemExit):
        handlers[signal.SIGTERM](signal.SIGTERM, None)


def test_a_process_whose_parent_is_gone_already_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def leave(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr("harness.worker.die_with_parent", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended, match="1"):
        pool._begin(os.getppid() + 1)


def test_a_process_that_leaves_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    search = SimpleNamespace(worker=SimpleNamespace(close=lambda: ended.append("closed")))
    monkeypatch.setattr(pool, "_search", (None, search))
    pool._leave()
    pool._leave()
    assert ended == ["closed"] and pool._search is None


def test_a_process_that_is_killed_is_one_line() -> None:
    with pytest.raises(CannotJudge, match="was ended from outside; is there enough memory"):
        list(pool.spread(dies, [(0, (0,))], 1))


def test_a_journal_that_fills_the_disk_costs_nothing_that_was_found(
    here: list[Portion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Journal, portion: Portion, found: Any) -> None:
        raise BadJournal("cannot use journal: No space left on device")

    monkeypatch.setattr(Journal, "add", full)
    options = deep(tmp_path / "journal", scope=0)
    assert len(explored(options)) == len(pool.plan(options).portions)
    assert capsys.readouterr().err == (
        "rolloutcheck: cannot use journal: No space left on device; going on without a journal\n"
    )


@pytest.mark.parametrize(("count", "found"), [(-1, []), (PART + 1, []), (1, [[1]]), (1, 7)])
def test_a_portion_that_cannot_be_is_refused(count: int, found: Any, tmp_path: Path) -> None:
    options = deep(tmp_path / "journal")
    Journal(options, "inproc", (PLAIN,)).add(Portion("drawn", 0, PART), (count, found))
    with pytest.raises(BadJournal, match="is no journal of rolloutcheck"):
        Journal(options, "inproc", (PLAIN,))


def test_portions_that_are_not_of_the_plan_do_not_count(here: list[Portion], tmp_path: Path) -> None:
    options = deep(tmp_path / "journal")
    Journal(options, "inproc", (PLAIN,)).add(Portion("drawn", 99, PART), (5, []))
    assert len(explored(options)) == 4


def test_a_journal_is_of_one_state_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "client.py").write_text("one = 1\n")
    target = TargetSpec("function", root=str(tmp_path / "code"), function="client:f")
    options = Options(target, profile="deep", journal=str(tmp_path / "journal"))
    Journal(options, "inproc", (PLAIN,))
    Journal(options, "inproc", (PLAIN,))
    (tmp_path / "code" / "client.py").write_text("one = 2\n")
    with pytest.raises(BadJournal, match="is the journal of other work"):
        Journal(options, "inproc", (PLAIN,))
    monkeypatch.setattr(pool, "MAX_FILES", 0)
    with pytest.raises(BadJournal, match="holds more than 0 Python files; --path may name a smaller folder"):
        Journal(options, "inproc", (PLAIN,))


def test_nothing_run_is_not_valid(here: list[Portion]) -> None:
    report = check(Options(REFERENCE, rules=("BUDGET",), modes=(PLAIN,), scope=1, limit_s=0.0))
    assert {(r.verdict, r.reason) for r in report.results} == {(UNKNOWN, "the time was over before a schedule was run")}


def test_Ctrl_C_waits_while_a_process_is_begun() -> None:
    """Else that process had nothing to read, and a traceback of its own."""
    told: list[str] = []

    def tasks() -> Iterator[tuple[int, tuple[int, ...]]]:
        yield 0, (1,)

    class Pool:
        def submit(self, work: Any, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            told.append("begun")
            return Future[int]()

    @contextmanager
    def processes(jobs: int) -> Iterator[Pool]:
        yield Pool()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "processes", processes)
        with pytest.raises(KeyboardInterrupt):
            next(pool.spread(abs, tasks(), 1))
    assert told == ["begun"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
