"""What the worker's process does, in this one: the lines it reads and writes, and what it asks of the system."""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from harness import history, schedule, work, worker
from harness.history import PLAIN, STREAM, Requested
from harness.runner import Runner
from harness.scenario import Scenario
from harness.schedule import Attempt, Schedule
from harness.stage import Stage
from harness.targets import CannotJudge, Target, slime
from harness.targets.function import find
from harness.targets.function import reference as reference_target
from harness.targets.spec import TargetSpec, load
from harness.work import ROLLOUT, SAMPLE

RESUMED = Schedule(budget=3, attempts=(Attempt("abort", after=1),))
PAIR = TargetSpec(
    "function", function="reference_impl.generate_streaming:generate_streaming", twin="reference_impl.generate:generate"
)
Spoken = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported, and gives its name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made: list[str] = []

    def write(text: str) -> str:
        made.append(f"worker_client_{len(made)}")
        (tmp_path / f"{made[-1]}.py").write_text(dedent(text))
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoken]:
    """What the worker answers to these lines. Its runners are closed: a front is the only one of its process."""
    opened: list[Runner | Stage] = []

    class Kept(Runner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

    class KeptStage(Stage):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(worker, "Runner", Kept)
    monkeypatch.setattr(worker, "Stage", KeptStage)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)  # this process is not one of its own

    def call(
        spec: TargetSpec, *requests: dict[str, Any], front: str = "inproc", level: str = SAMPLE
    ) -> list[dict[str, Any]]:
        first = {"target": spec.to_json(), "front": front, "tokenizer": None, "level": level}
        replies = io.StringIO()
        worker.serve(io.StringIO("".join(json.dumps(line) + "\n" for line in (first, *requests))), replies)
        return [json.loads(line) for line in replies.getvalue().splitlines()]

    yield call
    for runner in opened:
        runner.close()


def wanted(one: Schedule, mode: str) -> dict[str, Any]:
    return {"schedule": schedule.to_json(one), "mode": mode}


# The lines


def test_a_target_is_loaded_and_then_runs_a_schedule_a_line(spoken: Spoken) -> None:
    ready, *answers = spoken(TargetSpec("reference"), wanted(RESUMED, STREAM), wanted(RESUMED, PLAIN))
    assert ready == {"ready": {"name": "reference", "modes": [PLAIN, STREAM], "absent": {}, "stubbed": []}}
    runs = [history.from_json(answer["history"]) for answer in answers]
    assert [(run.schedule, run.mode) for run in runs] == [(RESUMED, STREAM), (RESUMED, PLAIN)]
    assert [e.stream for run in runs for e in run.events if isinstance(e, Requested)] == [True, True, False, False]


def test_it_tells_which_modules_of_the_client_were_asked_for(spoken: Spoken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there and those that are not, what the target looks for by name, and none of other packages."""

    def asks(spec: TargetSpec, _: object) -> Target:
        for name in ("slime.one", "slime_plugins", "json.nothing"):
            with suppress(ImportError):
                find_spec(name)
        target = reference_target()
        target.probed = ("slime.two",)  # type: ignore[attr-defined]
        return target

    monkeypatch.setattr(worker, "load", asks)
    monkeypatch.setitem(sys.modules, "slime", ModuleType("slime"))
    sys.modules["slime"].__path__ = []
    _, answer = spoken(TargetSpec("reference"), {"modules": True})
    assert answer == {"modules": ["slime.one", "slime.two"]}


def test_a_loop_is_loaded_and_then_runs_a_scenario_a_line(spoken: Spoken) -> None:
    one = Scenario(budget=2)
    requests = [{**work.to_json(one), "mode": mode} for mode in (STREAM, PLAIN)]
    ready, *answers = spoken(TargetSpec("reference"), *requests, level=ROLLOUT)
    assert ready == {"ready": {"name": "reference", "modes": [PLAIN, STREAM], "absent": {}, "stubbed": []}}
    runs = [work.run_from_json(answer) for answer in answers]
    assert [(run.scenario, run.mode) for run in runs] == [(one, STREAM), (one, PLAIN)]  # type: ignore[union-attr]


def test_a_function_has_no_loop(spoken: Spoken) -> None:
    said = f"{PAIR.function} is a generate function: it has no rollout loop"
    assert spoken(PAIR, level=ROLLOUT) == [{"cannot": said, "not_applicable": True}]


def test_functions_are_called_once_to_see_what_they_ask_for(spoken: Spoken) -> None:
    *trials, ready, answer = spoken(PAIR, wanted(RESUMED, PLAIN))
    assert trials == [{"trial": PAIR.function}, {"trial": PAIR.twin}]
    assert ready["ready"]["modes"] == [PLAIN, STREAM]
    assert answer["history"]["mode"] == PLAIN


def test_a_target_that_does_not_load_is_one_answer(spoken: Spoken) -> None:
    said = "importing no_such_module failed: ModuleNotFoundError: No module named 'no_such_module'"
    answers = spoken(TargetSpec("function", function="no_such_module:f"), wanted(RESUMED, PLAIN))
    assert answers == [{"cannot": said, "not_applicable": False}]


def test_a_fault_while_it_loads_is_told_with_its_traceback(spoken: Spoken) -> None:
    (answer,) = spoken(TargetSpec("reference"), front="no-such-front")
    assert answer["broken"].startswith("Traceback") and "no-such-front" in answer["broken"]


def test_a_run_that_fails_does_not_end_the_worker(spoken: Spoken) -> None:
    plain_only = TargetSpec("function", function=PAIR.twin)
    requests = wanted(RESUMED, STREAM), {"schedule": {}, "mode": PLAIN}, wanted(RESUMED, PLAIN)
    ready, absent, broken, good = spoken(plain_only, *requests)[-4:]
    assert ready["ready"]["absent"] == {STREAM: f"{PAIR.twin} has no stream mode"}
    assert absent == {"cannot": f"{PAIR.twin} has no stream mode", "not_applicable": True}
    assert broken["broken"].startswith("Traceback") and "ScheduleError" in broken["broken"]
    assert set(good) == {"history"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no luck')", "raises before it asks: RuntimeError: no luck"),
        ("await asyncio.Event().wait()", "does not come back from its first call: it waits for something"),
        ("return sample", "sent no /generate request; it finds the engine at"),
    ],
    ids=["raises", "hangs", "asks nothing"],
)
def test_a_first_call_that_asks_nothing(spoken: Spoken, module: Callable[[str], str], body: str, said: str) -> None:
    name = module(f"""
        import asyncio
        async def f(args, sample, params):
            {body}
        """)
    trial, answer = spoken(TargetSpec("function", function=f"{name}:f"))
    assert trial == {"trial": f"{name}:f"}
    assert answer["cannot"].startswith(f"{name}:f {said}") and not answer["not_applicable"]


# What is loaded


def never(target: Target) -> bool | None:
    raise AssertionError("only functions are tried")


def test_the_reference_has_both_modes() -> None:
    assert load(TargetSpec("reference"), never).modes == (PLAIN, STREAM)


def test_slime_is_loaded_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    target = reference_target()
    monkeypatch.setattr(slime, "load", lambda *arguments: asked.append(arguments) or target)
    assert load(TargetSpec("slime", root="tree", revision="abc"), never) is target
    assert asked == [("tree", "abc")]


def test_a_function_is_found_in_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    name = "client_of_a_folder"
    (tmp_path / f"{name}.py").write_text("async def f(args, sample, params): ...")
    spec = TargetSpec("function", root=str(tmp_path), function=f"{name}:f")
    try:
        for _ in range(2):
            assert load(spec, lambda target: True).modes == (STREAM,)
        assert sys.path.count(str(tmp_path)) == 1
    finally:
        del sys.modules[name]


@pytest.mark.parametrize(("stream", "words"), [(True, "a stream"), (False, "plain replies")])
def test_twins_that_ask_alike_are_refused(stream: bool, words: str) -> None:
    with pytest.raises(CannotJudge, match=f"both ask for {words}$"):
        load(PAIR, lambda target: stream)


CLIENT = """
    async def good(args, sample, params): ...
    def synchronous(args, sample, params): ...
    async def lonely(args): ...
    number = 5
    """


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "has no function 'missing'"),
        ("number", "has no function 'number'"),
        ("synchronous", "is no async function; expected async def synchronous(args, sample, sampling_params)"),
        ("lonely", "cannot be called with (args, sample, sampling_params): too many positional arguments"),
    ],
)
def test_what_is_no_generate_function(module: Callable[[str], str], name: str, said: str) -> None:
    home = module(CLIENT)
    with pytest.raises(CannotJudge) as caught:
        find(f"{home}:{name}")
    assert str(caught.value) in (f"{home} {said}", f"{home}:{name} {said}")
    assert find(f"{home}:good").__name__ == "good"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError('one\\ntwo')", "ValueError: one"),
        ("raise ValueError", "ValueError: "),
    ],
)
def test_a_module_that_fails_is_one_line(module: Callable[[str], str], text: str, said: str) -> None:
    home = module(text.replace("\n", "\\n"))
    with pytest.raises(CannotJudge) as caught:
        find(f"{home}:f")
    assert str(caught.value) == f"importing {home} failed: {said}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_of_an_import_is_passed_on(module: Callable[[str], str], error: type[BaseException]) -> None:
    home = module(f"import asyncio, builtins\nraise {error.__module__}.{error.__name__}")
    with pytest.raises(error):
        find(f"{home}:f")


# The process


def test_the_kernel_is_asked_to_end_it_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Library:
        def prctl(self, *arguments: Any) -> int:
            asked.append(arguments)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    worker.die_with_parent()
    assert asked == [(1, signal.SIGKILL)]


def test_another_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)  # None has no prctl
    worker.die_with_parent()
    assert asked == [None]


def test_the_protocol_s_streams_are_out_of_the_target_s_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prints afterwards, prints to standard error; whatever reads, reads nothing."""
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # given back
    kept = [os.dup(number) for number in (0, 1, 2)]
    pipes = [os.pipe() for _ in range(3)]
    (input_read, input_write), (output_read, output_write), (errors_read, errors_write) = pipes
    try:
        for number, end in enumerate((input_read, output_write, errors_write)):
            os.dup2(end, number)
        requests, replies = worker.take_streams()
        os.write(input_write, "é\n".encode())
        with requests, replies:
            assert requests.readline() == "é\n"
            replies.write("answer\n")
            os.write(1, b"printed\n")
            nothing = os.read(0, 9), sys.stdin.read()
    finally:
        for number, before in enumerate(kept):
            os.dup2(before, number)
    assert os.read(output_read, 99) == b"answer\n"
    assert os.read(errors_read, 99) == b"printed\n"
    assert nothing == (b"", "")
    sys.stdin.close()
    for end in (*kept, *(end for pipe in pipes for end in pipe)):
        os.close(end)
