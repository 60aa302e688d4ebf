"""Whole rollouts through everything that single samples go through: search, pool, worker, replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

from harness import again, corpus, inline, isolation, options, pool, replay, scenario_strategies
from harness import check as module
from harness.again import CANNOT_RUN, FIXED, STILL_FAILS
from harness.check import Report, check
from harness.checkers import ROLLOUT_RULE_IDS
from harness.events import Event, Tell, ignore
from harness.history import INCREMENTAL, PLAIN, STREAM, Halted
from harness.inline import Inline
from harness.isolation import Ready, Worker
from harness.options import Options
from harness.pool import Portion
from harness.replay import Failure
from harness.rollouts import RolloutHistory
from harness.scenario import Scenario, Step
from harness.search import Search, Tally, to_json
from harness.strategies import BATCHES, PART, sample_parts
from harness.targets import CannotJudge
from harness.targets.reference_loop import ReferenceLoop
from harness.targets.spec import TargetSpec, load_loop
from harness.verdict import CANNOT, CONFORMS, INVALID, UNKNOWN, VALID, VIOLATES, exit_status
from harness.work import ROLLOUT, SAMPLE, level
from reference_impl.rollout import DataSource, Rollout
from tests.unit.loop_histories import began, broke, call, ended, groups, history, member

REFERENCE = TargetSpec("reference")
LOSES = Scenario(budget=1, steps=(Step("budget", 0, 1), Step("rollout")))
SCHEMAS = [json.loads(p.read_text()) for p in (Path(__file__).resolve().parents[2] / "spec/schemas").glob("*.json")]


class ForgetsItsBuffer(DataSource):
    def load(self, path: Any) -> None:
        super().load(path)
        self.buffer.clear()


class InProcess:
    """Stands in for `Worker`: one of a process at a time has a stage."""

    ran: list[tuple[Any, str]]

    def __init__(self, spec: TargetSpec, front: str = "inproc", *_: Any, level: str = SAMPLE, **__: Any) -> None:
        self.spec, self.front, self.level = spec, front, level
        self._inline: Inline | None = None
        self.ready = Ready("client", (PLAIN, STREAM), {}, ())

    def ahead(self, wanted: Any, mode: str) -> None: ...

    def run(self, wanted: Any, mode: str) -> Any:
        self.ran.append((wanted, mode))
        self._inline = self._inline or Inline(self.spec, self.front, level=self.level)
        return self._inline.run(wanted, mode)

    def twin(self) -> InProcess:
        return type(self)(self.spec, self.front, level=self.level)

    def launch(self) -> None: ...

    def wait(self) -> Ready:
        return self.ready

    def modules(self) -> tuple[str, ...] | None:
        return None if self.level == ROLLOUT else ("slime.x",)

    def close(self) -> None:
        made, self._inline = self._inline, None
        if made is not None:
            made.close()


Checked = Callable[..., Report]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Checks a loop made of these parts, on few scenarios."""
    monkeypatch.setattr(module, "Worker", InProcess)
    for place in (module, options, pool):
        monkeypatch.setattr(place, "SCENARIOS", {"quick": 6, "ci": 6, "deep": 6})
        monkeypatch.setattr(place, "PROFILES", {"quick": 3, "ci": 3, "deep": 3})
    few = tuple(e for e in corpus.load() if e.name in ("slime-2260-minimal", "loop-buffer-is-lost-at-a-checkpoint"))
    monkeypatch.setattr(corpus, "load", lambda: few)

    def make(
        loop: type[Rollout] = Rollout,
        source: type[DataSource] = DataSource,
        tell: Tell = ignore,
        **given: Any,
    ) -> Report:
        monkeypatch.setattr(InProcess, "ran", [], raising=False)
        monkeypatch.setattr(inline, "load_loop", lambda spec: ReferenceLoop("client", loop, source))
        asked = Options(REFERENCE, **{"profile": "quick", "levels": (ROLLOUT,), **given})
        return check(asked, tell)

    return make


def status(report: Report) -> int:
    return exit_status(list(report.results), strict=False)


# The search


def test_the_reference_s_loop_is_judged_in_its_modes(checked: Checked) -> None:
    report = checked()
    assert {(r.rule, r.mode) for r in report.results} == {(r, m) for r in ROLLOUT_RULE_IDS for m in (PLAIN, STREAM)}
    assert {(r.on, r.engine, r.faulty_engine) for r in report.results} == {(ROLLOUT, "inproc", False)}
    assert {r.verdict for r in report.results if r.rule != "EXHAUSTED"} == {VALID}
    assert all(isinstance(wanted, Scenario) for wanted, _ in InProcess.ran)


def test_the_other_kind_of_stream_is_run_where_it_is_asked_for(checked: Checked) -> None:
    report = checked(modes=(INCREMENTAL,), rules=("GROUP",))
    assert [(r.mode, r.verdict) for r in report.results] == [(INCREMENTAL, VALID)]


def test_both_levels_are_judged_one_after_the_other(checked: Checked) -> None:
    report = checked(levels=(SAMPLE, ROLLOUT), rules=("BUDGET", "TEXT", "GROUP"), modes=(PLAIN,))
    said = [(r.on, r.rule) for r in report.results if not r.faulty_engine]
    assert said == [(SAMPLE, "BUDGET"), (SAMPLE, "TEXT"), (ROLLOUT, "BUDGET"), (ROLLOUT, "GROUP")]
    assert status(report) == CONFORMS


@pytest.mark.parametrize(("rule", "on"), [("GROUP", ROLLOUT), ("TEXT", SAMPLE)])
def test_a_level_without_a_rule_that_was_asked_for_is_left_out(checked: Checked, rule: str, on: str) -> None:
    report = checked(levels=(SAMPLE, ROLLOUT), rules=(rule,), modes=(PLAIN,))
    assert {r.on for r in report.results} == {on} == {level(wanted) for wanted, _ in InProcess.ran}


def test_the_corpus_comes_first_and_then_what_is_drawn(checked: Checked) -> None:
    told: list[Event] = []
    checked(tell=told.append, rules=("GROUP",))
    counted = [(p.phase, p.done, p.total) for p in told]
    assert counted == [("corpus", 0, 1), *(("whole rollouts", done, 6) for done in range(6))]
    drawn = list(dict.fromkeys(wanted for wanted, _ in InProcess.ran))[1:]
    assert drawn == list(scenario_strategies.drawn(6, 0))


def test_GROUP_is_broken_and_shrunk(checked: Checked) -> None:
    report = checked(source=ForgetsItsBuffer, rules=("GROUP", "ABORT-LIVE"))
    assert status(report) == VIOLATES
    found = {(r.rule, r.mode): r for r in report.results}
    assert found["ABORT-LIVE", PLAIN].verdict == VALID
    for mode in (PLAIN, STREAM):
        result = found["GROUP", mode]
        assert result.verdict == INVALID and result.counterexample is not None
        assert result.counterexample.schedule == Scenario(budget=1, over=2, steps=(Step("restart"),))
        assert isinstance(result.counterexample.history, RolloutHistory)
        words = "was in the buffer when it was saved, and is not when it is loaded"
        assert result.reason == words and result.counterexample.finding.rollout == 1


class SeesMany(Rollout):
    """Loses what is aborted, in two ways: with lists of samples it also raises."""

    def _store(self) -> None:
        for group in self._left:
            assert not isinstance(group[0], list)
        self._left = []
        super()._store()


def test_GROUP_is_shrunk_in_the_way_it_was_broken_and_without_lists_where_that_breaks_it_too(checked: Checked) -> None:
    """A crash that lists of samples cause hides nothing, and what is lost quietly does not shrink to the crash."""
    (result,) = [r for r in checked(SeesMany, rules=("GROUP",)).results if r.mode == PLAIN]
    assert result.counterexample is not None and isinstance(result.counterexample.schedule, Scenario)
    assert not result.counterexample.schedule.fan_out
    assert result.reason == "is lost: neither handed to training nor in the buffer"


def test_what_the_loop_has_no_code_for_is_counted(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(self: ReferenceLoop, env: Any, watch: Any) -> None:
        if env.scenario.mask:
            raise CannotJudge("client masks nothing", not_applicable=True)
        real(self, env, watch)

    real = ReferenceLoop.reset
    monkeypatch.setattr(ReferenceLoop, "reset", reset)
    report = checked(rules=("GROUP",), modes=(PLAIN,))
    masked = sum(scenario.mask for scenario in scenario_strategies.drawn(6, 0))
    assert report.skipped == (("client masks nothing", masked),) and masked > 0
    assert report.results[0].verdict == VALID


def test_a_target_without_a_loop_leaves_the_level_unknown(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacks(InProcess):
        def wait(self) -> Ready:
            if self.level == ROLLOUT:
                raise CannotJudge("client has no rollout loop", not_applicable=True)
            return self.ready

    monkeypatch.setattr(module, "Worker", Lacks)
    report = checked(levels=(SAMPLE, ROLLOUT), rules=("BUDGET",), modes=(PLAIN,))
    last = report.results[-1]
    assert (last.on, last.verdict, last.reason) == (ROLLOUT, UNKNOWN, "whole rollouts: client has no rollout loop")
    assert status(report) == CANNOT
    with pytest.raises(CannotJudge, match="has no rollout loop"):
        checked(levels=(ROLLOUT,))


def test_a_loop_that_asks_nothing_cannot_be_judged(checked: Checked) -> None:
    class Silent(Rollout):
        async def rollout(self) -> Any:
            return []

    with pytest.raises(CannotJudge, match="no request of client reached the engine inproc"):
        checked(Silent)


def test_the_same_seed_runs_the_same_scenarios(checked: Checked) -> None:
    ran = []
    for seed in (3, 3, 4):
        checked(rules=("GROUP",), seed=seed)
        ran.append(InProcess.ran)
    assert ran[0] == ran[1] != ran[2]


# What is drawn


def test_a_part_is_of_different_scenarios_and_the_same_again() -> None:
    first = scenario_strategies.part(1, 0)
    assert first == scenario_strategies.part(1, 0) != scenario_strategies.part(1, 1)
    assert BATCHES < len(first) == len(set(first)) <= PART


def test_parts_are_taken_until_there_are_enough_different_values() -> None:
    parts = [[1, 2, 1], [2], [3, 1, 4]]
    assert list(sample_parts(lambda number: parts[number], 3)) == [1, 2, 3]
    assert list(sample_parts(lambda number: parts[number], 0)) == []


# Work that is spread


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Portion]]:
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


def test_a_plan_of_rollouts_is_drawn_whatever_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SCENARIOS", {"deep": PART + 7})
    plan = pool.plan(Options(REFERENCE, profile="deep", scope=2), ROLLOUT)
    assert (plan.name, plan.schedules) == ("whole rollouts", PART + 7)
    assert plan.portions == (Portion("rollouts", 0, PART), Portion("rollouts", 1, 7))


def test_a_portion_of_rollouts_is_a_part_of_what_is_drawn() -> None:
    assert pool._schedules(Options(REFERENCE, seed=4), Portion("rollouts", 1, 9)) == scenario_strategies.part(4, 1)[:9]


def test_spread_work_is_added_up(checked: Checked, here: list[Portion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Worker", Worker)  # a front is the only one of its process
    report = checked(jobs=1, rules=("GROUP",), modes=(PLAIN,))
    assert here == [Portion("rollouts", 0, 6)]
    assert report.covered is not None and (report.covered.schedules, report.covered.of) == (6, 6)
    assert [(r.on, r.verdict) for r in report.results] == [(ROLLOUT, VALID)]


def test_tallies_of_scenarios_survive_the_way_between_processes() -> None:
    asked = Options(REFERENCE, rules=("GROUP",))
    one, two = (Search(None, (PLAIN,), asked, "inproc", ROLLOUT) for _ in range(2))  # type: ignore[arg-type]
    one.tallies["GROUP", PLAIN, False] = Tally(4, LOSES)
    two.add(json.loads(json.dumps(to_json(one.tallies))))
    assert two.tallies == one.tallies


# The worker


def test_a_worker_runs_scenarios() -> None:
    with Worker(REFERENCE, level=ROLLOUT) as worker:
        assert (worker.ready.name, worker.ready.modes) == ("reference", (PLAIN, STREAM))
        worker.ahead(LOSES, STREAM)
        first, second = worker.run(LOSES, PLAIN), worker.run(LOSES, STREAM)
        assert isinstance(first, RolloutHistory) and isinstance(second, RolloutHistory)
        assert (first.scenario, first.mode, second.mode) == (LOSES, PLAIN, STREAM)
        assert worker.twin().level == ROLLOUT
    with closing(Inline(REFERENCE, level=ROLLOUT)) as same:
        assert same.run(LOSES, PLAIN) == first
        assert same.ready == worker.ready
        same.ahead(LOSES, PLAIN)


@pytest.mark.parametrize(("how", "said"), [("hang", "no end within 20 s"), ("exit", "the target left its process")])
def test_what_breaks_off_is_a_history(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(REFERENCE, level=ROLLOUT) as worker:
        monkeypatch.setattr(worker, "_receive", lambda limit_s: how)
        assert worker.run(LOSES, PLAIN) == RolloutHistory(LOSES, PLAIN, -1, {}, (Halted(0, 0, how, said),))


def test_an_answer_of_the_other_level_is_a_fault_of_the_harness() -> None:
    with Worker(REFERENCE) as worker, pytest.raises(isolation.HarnessFault):
        worker.run(LOSES, PLAIN)


@pytest.mark.parametrize("kind", ["reference", "mutant", "function"])
def test_a_loop_is_loaded_where_there_is_one(kind: str) -> None:
    if kind == "reference":
        assert isinstance(load_loop(REFERENCE), ReferenceLoop)
        return
    if kind == "mutant":
        loop = load_loop(TargetSpec("mutant", function="aborts-once"))
        assert isinstance(loop, ReferenceLoop) and loop.name == "mutant:aborts-once"
        return
    with pytest.raises(CannotJudge, match=r"^client:f is a generate function: it has no rollout loop$") as error:
        load_loop(TargetSpec("function", function="client:f"))
    assert error.value.not_applicable


# Replay


Answers = Callable[..., tuple[str, str]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What becomes of a stored violation of GROUP on a loop with this history."""

    def call_(run: RolloutHistory, rule: str = "GROUP", **given: Any) -> tuple[str, str]:
        class Fake:
            ready = Ready("client", (PLAIN,), {}, ())

            def __init__(self, spec: TargetSpec, front: str, tokenizer: Any, **options: Any) -> None:
                assert (front, options["level"]) == ("inproc", ROLLOUT)

            def __enter__(self) -> Fake:
                return self

            def __exit__(self, *_: object) -> None: ...

            def modules(self) -> None: ...

            def run(self, wanted: Scenario, mode: str) -> RolloutHistory:
                assert wanted == LOSES
                return run

        monkeypatch.setattr(again, "Worker", Fake)
        stored = Failure(rule, PLAIN, "loopback", LOSES)
        settings = {"mode": None, "engine": "loopback", "tokenizer": None, "limit_s": 9.0, **given}
        (answer,) = again.run(REFERENCE, [(Path("one.json"), stored)], **settings)
        return answer.answer, answer.lines[0]

    return call_


def test_what_still_fails_is_shown(answers: Answers) -> None:
    run = history(began(), ended(groups((0, 1))))
    assert answers(run) == (STILL_FAILS, "GROUP violated   client   plain   inproc   whole rollouts")


def test_what_holds_is_fixed(answers: Answers) -> None:
    assert answers(history(began(), ended(groups((0,))))) == (
        FIXED,
        "GROUP holds   client   plain   inproc   whole rollouts",
    )


def test_rollouts_that_put_nothing_to_the_test_have_fixed_nothing(answers: Answers) -> None:
    said = "PROVENANCE has nothing to judge: the rollouts do not put it to the test"
    assert answers(history(began(), ended(((member(0),),))), "PROVENANCE") == (CANNOT_RUN, said)


def test_a_loop_that_raises_has_fixed_nothing(answers: Answers) -> None:
    said = "GROUP has nothing to judge: the target raises KeyError: 'x'"
    assert answers(history(began(), call(0), broke())) == (CANNOT_RUN, said)


def test_a_hang_is_no_answer(answers: Answers) -> None:
    run = history(began(), Halted(0, 0, "hang", "no end"))
    assert answers(run) == (CANNOT_RUN, "call 1: hang: no end")


def test_a_mode_that_is_absent(answers: Answers) -> None:
    assert answers(history(), mode=STREAM) == (CANNOT_RUN, "client has no stream mode")


# Failure files


@pytest.fixture
def stored(checked: Checked, tmp_path: Path) -> Path:
    result = next(r for r in checked(source=ForgetsItsBuffer, rules=("GROUP",)).results)
    assert result.counterexample is not None
    scenario = result.counterexample.schedule
    failure = replay.Failure(result.rule, result.mode, result.engine, scenario, "slime", "abc", "the screen")
    return replay.write(tmp_path, failure, 7)


def test_a_failure_file_holds_a_scenario_and_fits_its_schema(stored: Path) -> None:
    data = json.loads(stored.read_text())
    registry = Registry[Any]().with_resources([(s["$id"], Resource.from_contents(s)) for s in SCHEMAS])
    (schema,) = (s for s in SCHEMAS if s["$id"] == "urn:rolloutcheck:failure:1")
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    validator.validate(data)
    assert not validator.is_valid({**data, "schedule": {"prompt": "a", "budget": 1, "script": [65]}})
    assert not validator.is_valid({k: v for k, v in data.items() if k != "scenario"})
    assert "schedule" not in data and stored.name.startswith("GROUP-")


def test_a_failure_file_is_read_back_and_fails_again(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = replay.read(stored)
    assert (failure.rule, failure.engine, failure.summary) == ("GROUP", "inproc", "the screen")
    assert failure.schedule == Scenario(budget=1, over=2, steps=(Step("restart"),))

    class Entered(InProcess):
        def __enter__(self) -> Entered:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    monkeypatch.setattr(again, "Worker", Entered)
    given: dict[str, Any] = {"mode": None, "engine": None, "tokenizer": None, "limit_s": 9.0}
    (answer,) = again.run(REFERENCE, [(stored, failure)], **given)
    assert answer.answer == STILL_FAILS
    monkeypatch.setattr(inline, "load_loop", lambda spec: ReferenceLoop("client"))
    (answer,) = again.run(REFERENCE, [(stored, failure)], **given)
    assert answer.answer == FIXED


@pytest.mark.parametrize(
    ("rule", "kind"),
    [("TEXT", "scenario"), ("GROUP", "schedule"), ("NOPE", "scenario")],
)
def test_a_file_whose_rule_is_not_judged_on_what_it_holds_is_refused(tmp_path: Path, rule: str, kind: str) -> None:
    body = {"budget": 1, "steps": []} if kind == "scenario" else {"prompt": "a", "budget": 1, "script": [65]}
    (tmp_path / "x.json").write_text(json.dumps({"rule": rule, kind: body}))
    with pytest.raises(replay.BadFile, match=f"unknown rule '{rule}'"):
        replay.read(tmp_path / "x.json")


@pytest.mark.parametrize("data", [{"scenario": 3}, {"scenario": {"budget": 1}}, {}])
def test_what_holds_no_scenario_is_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"rule": "GROUP", **data}))
    with pytest.raises(replay.BadFile):
        replay.read(tmp_path / "x.json")


def test_a_corpus_entry_is_a_failure_file_too() -> None:
    path = Path(__file__).resolve().parents[1] / "regressions/corpus/loop-aborted-by-the-engine.json"
    failure = replay.read(path)
    assert (failure.rule, failure.mode, level(failure.schedule)) == ("GROUP", PLAIN, ROLLOUT)
