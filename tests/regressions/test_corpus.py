"""The corpus: every known fault has a small schedule that would show it, and the reference passes them all."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

import spec
from harness import scenario, work
from harness.checkers import (
    HOLDS,
    ROLLOUT_RULE_IDS,
    RULE_IDS,
    Case,
    Finding,
    RolloutCase,
    checker,
    halt,
    rollout_checker,
)
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM, History, Requested, Returned
from harness.runner import Runner
from harness.schedule import Schedule, from_json
from harness.stage import Stage
from harness.targets import Target
from harness.targets.function import FunctionTarget, reference
from harness.targets.reference_loop import ReferenceLoop
from reference_impl import client
from reference_impl.generate import generate
from reference_impl.rollout import DataSource, Rollout
from tests.function_targets import forgets_subtraction

HERE = Path(__file__).resolve().parent
CORPUS: dict[str, Any] = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(HERE.glob("corpus/*.json"))}
SCHEMAS = {
    name: json.loads((HERE.parents[1] / f"spec/schemas/{name}.schema.json").read_text(encoding="utf-8"))
    for name in ("schedule", "scenario")
}
SCHEDULES = {name: from_json(entry["schedule"]) for name, entry in CORPUS.items() if "schedule" in entry}
SCENARIOS = {name: scenario.from_json(entry["scenario"]) for name, entry in CORPUS.items() if "scenario" in entry}
BROKEN = [name for name in CORPUS if name.startswith("slime-2260-")]


def test_there_is_a_corpus() -> None:
    assert 20 <= len(CORPUS) <= 50
    assert BROKEN == ["slime-2260-issue-numbers", "slime-2260-minimal"]


def kind(name: str) -> str:
    return "scenario" if name in SCENARIOS else "schedule"


@pytest.mark.parametrize("name", CORPUS)
class TestFiles:
    def test_form(self, name: str) -> None:
        entry = CORPUS[name]
        assert list(entry) == ["fault", "reports", "rules", kind(name)]
        assert (kind(name) == "scenario") == name.startswith("loop-")
        assert re.fullmatch(r"[A-Z].*\.", entry["fault"])
        assert "\n" not in entry["fault"]
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)

    def test_reports_are_public(self, name: str) -> None:
        reports = CORPUS[name]["reports"]
        assert reports
        assert len(set(reports)) == len(reports)
        for ref in reports:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40})", ref), ref

    def test_rules_are_known(self, name: str) -> None:
        rules = CORPUS[name]["rules"]
        assert rules
        assert set(rules) <= set(ROLLOUT_RULE_IDS if name in SCENARIOS else RULE_IDS) & spec.RULES.keys()

    def test_what_is_run_is_valid_and_says_nothing_twice(self, name: str) -> None:
        data = CORPUS[name][kind(name)]
        jsonschema.validate(data, SCHEMAS[kind(name)])
        read = work.to_json(work.from_json(CORPUS[name]))[kind(name)]
        assert read == data  # nothing that has its default value
        assert list(read) == list(data)


def test_nothing_is_there_twice_for_the_same_rules() -> None:
    seen: dict[Any, str] = {}
    for name, wanted in (SCHEDULES | SCENARIOS).items():
        key = (wanted, tuple(CORPUS[name]["rules"]))
        assert key not in seen, f"{name} and {seen[key]}"
        seen[key] = name


# The reference


def case(runner: Runner, schedule: Schedule, mode: str) -> Case:
    """The runs of a schedule in all modes up to ``mode``, and the one that nothing interrupts."""
    modes = MODES[: MODES.index(mode) + 1]
    histories = {m: runner.run(schedule, m) for m in modes}
    return Case(mode, histories, runner.run(schedule.uninterrupted(), mode))


@pytest.fixture(scope="module", params=["inproc", "loopback"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(reference(), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_reference_conforms(runner: Runner, name: str, mode: str) -> None:
    judged = case(runner, SCHEDULES[name], mode)
    assert halt(judged.history) is None
    findings = {rule: checker(rule)(judged) for rule in RULE_IDS}
    assert {rule: f for rule, f in findings.items() if isinstance(f, Finding)} == {}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_puts_its_rules_to_the_test(runner: Runner, name: str) -> None:
    """A rule that is cited is judged in at least one mode, and holds."""
    cases = [case(runner, SCHEDULES[name], mode) for mode in MODES]
    for rule in CORPUS[name]["rules"]:
        assert HOLDS in [checker(rule)(c) for c in cases], rule


# The reference's loop


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Not for the whole module: a front is the only one of its process."""
    made = Stage(ReferenceLoop())
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_reference_s_loop_conforms(stage: Stage, name: str, mode: str) -> None:
    """And the rules that are cited are judged."""
    history = stage.run(SCENARIOS[name], mode)
    assert halt(history) is None
    judged = {rule: rollout_checker(rule)(RolloutCase(mode, history)) for rule in ROLLOUT_RULE_IDS}
    assert {rule: f for rule, f in judged.items() if isinstance(f, Finding)} == {}
    assert {judged[rule] for rule in CORPUS[name]["rules"]} == {HOLDS}


# THUDM/slime#2260, on a client that forgets to subtract what it has


async def _forgets(args: Any, sample: Any, params: dict[str, Any], *, stream: bool) -> Any:
    """Asks for the whole budget at every attempt; answers an error with FAILED."""
    tokens = list(sample.tokens) or args.tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "stream": stream}
    entries: list[Any] = []
    meta: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
        body = (await response.read()).decode()
    for line in body.split("\n\n"):
        data = line.removeprefix("data: ")
        if data in ("", "[DONE]"):
            continue
        event = json.loads(data)
        if "error" in event:
            sample.status = type(sample).Status.FAILED
            return sample
        meta = event["meta_info"]
        new = meta["output_token_logprobs"]
        entries = new if len(new) == meta["completion_tokens"] else entries + new
    sample.tokens = tokens
    sample.append_response_tokens(
        args, tokens=[e[1] for e in entries], log_probs=[e[0] for e in entries], meta_info=meta
    )
    sample.response = args.tokenizer.decode(sample.tokens[len(tokens) - sample.response_length + len(entries) :])
    return sample


async def forgets(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    return await _forgets(args, sample, params, stream=False)


async def forgets_streaming(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    return await _forgets(args, sample, params, stream=True)


def run(target: Target, schedule: Schedule, mode: str) -> History:
    made = Runner(target)
    try:
        return made.run(schedule, mode)
    finally:
        made.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BROKEN)
def test_slime_2260_is_caught(name: str, mode: str) -> None:
    history = run(FunctionTarget("forgets", forgets, forgets_streaming), SCHEDULES[name], mode)
    finding = checker("BUDGET")(Case(mode, {mode: history}))
    assert isinstance(finding, Finding)
    assert finding.attempt == 1
    assert finding.message == ("may ask at most 1" if name == "slime-2260-minimal" else "may ask at most 5375")


@pytest.mark.parametrize("mode", [PLAIN, STREAM, INCREMENTAL])
def test_the_numbers_of_the_issue(mode: str) -> None:
    """19202 + 24576 > 40960: the engine refuses what the second attempt asks."""
    schedule = SCHEDULES["slime-2260-issue-numbers"]
    history = run(FunctionTarget("forgets", forgets, forgets_streaming), schedule, mode)
    first, second = [e for e in history.events if isinstance(e, Requested)][:2]
    assert (schedule.context, schedule.budget) == (40960, 24576)
    assert (len(first.input_ids or ()), first.params["max_new_tokens"]) == (1, 24576)
    assert (len(second.input_ids or ()), second.params["max_new_tokens"]) == (19202, 24576)
    views = [e.view for e in history.events if isinstance(e, Returned)][:2]
    assert [(v.response_length, v.status) for v in views] == [(19201, "aborted"), (19201, "failed")]
    context = checker("CONTEXT")(Case(mode, {mode: history}))
    assert isinstance(context, Finding)
    assert (context.attempt, context.message) == (1, "input 19202 + 24576 > context 40960")


@pytest.mark.parametrize("mode", MODES)
def test_the_reference_asks_for_what_is_left(mode: str) -> None:
    history = run(reference(), SCHEDULES["slime-2260-issue-numbers"], mode)
    asked = [(len(e.input_ids or ()), e.params["max_new_tokens"]) for e in history.events if isinstance(e, Requested)]
    assert asked == [(1, 24576), (19202, 24576 - 19201)]
    final = [e.view for e in history.events if isinstance(e, Returned)][-1]
    assert (final.response_length, final.status) == (24576, "truncated")


# The faults of loops, each as a small part of the reference's loop that is replaced


class HandsOverWhatTheEngineAborts(Rollout):
    async def _run(self, group: Any) -> bool:
        await asyncio.gather(*(self._member(group, place) for place in range(len(group))))
        return not self.aborting


class ForgetsItsBuffer(DataSource):
    def load(self, path: Path) -> None:
        super().load(path)
        self.buffer.clear()


class DropsItsSurplus(Rollout):
    def _store(self) -> None:
        self._done = []
        super()._store()


class KnowsNoLists(Rollout):
    def _store(self) -> None:
        for group in self._left:
            assert all(member.status for member in group)
        super()._store()


class AbortsOnce(Rollout):
    async def _abort(self) -> None:
        self.args.rollout_abort.set()
        await client.abort_engines(self.args)
        while self.tasks:
            await asyncio.wait(self.tasks)
        self.args.rollout_abort.clear()


async def names_one_version(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    """The last one, for all tokens."""
    made = await generate(args, sample, params)
    made.weight_spans = [(made.weight_versions[-1], made.response_length)]
    return made


def faulty(loop: type[Rollout] = Rollout, source: type[DataSource] = DataSource, made: Any = generate) -> ReferenceLoop:
    target = ReferenceLoop("faulty", loop, source)
    target.generates = {False: made, True: made}
    return target


FAULTY_LOOPS = {
    "loop-aborted-by-the-engine": (
        lambda: faulty(HandsOverWhatTheEngineAborts),
        "is handed to training aborted with 0",
    ),
    "loop-buffer-is-lost-at-a-checkpoint": (
        lambda: faulty(source=ForgetsItsBuffer),
        "was in the buffer when it was saved, and is not when it is loaded",
    ),
    "loop-finished-surplus-is-lost": (
        lambda: faulty(DropsItsSurplus),
        "is lost: neither handed to training nor in the buffer",
    ),
    "loop-lists-of-samples": (
        lambda: faulty(KnowsNoLists),
        "is lost: the abort raises AttributeError: 'list' object has no attribute 'status'",
    ),
    "loop-request-after-the-abort": (
        lambda: faulty(AbortsOnce),
        "its request came after the abort, and nothing aborts it",
    ),
    "loop-resumed-sample-exceeds-its-budget": (lambda: faulty(made=forgets_subtraction), "may ask at most 1"),
    "loop-weights-change-under-a-request": (
        lambda: faulty(made=names_one_version),
        "its weight spans are 1: 3, but the engine's were 0: 1, 1: 2",
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_fault_of_a_loop_is_caught(name: str) -> None:
    make, words = FAULTY_LOOPS[name]
    (rule,) = CORPUS[name]["rules"]
    with closing(Stage(make())) as made:
        finding = rollout_checker(rule)(RolloutCase(PLAIN, made.run(SCENARIOS[name], PLAIN)))
    assert isinstance(finding, Finding)
    assert finding.message == words
