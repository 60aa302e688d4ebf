"""Stored violations again: which answer each history is, and what a file may not be."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import again, replay, version
from harness.again import CANNOT_RUN, FIXED, STILL_FAILS, Answer
from harness.history import ABORTED, COMPLETED, INCREMENTAL, PLAIN, STREAM, TRUNCATED, History
from harness.isolation import Ready
from harness.replay import BadFile, Failure
from harness.schedule import Attempt, Schedule, to_json
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.work import SAMPLE
from tests.unit.histories import Ask, Life, view

SPEC = TargetSpec("reference")
FILE = Path("failures/one.json")
Runs = Callable[[Schedule, str], History]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Answer]]:
    """Replays failures against a target that gives these histories."""

    def call(runs: Runs, *stored: Failure, modes: tuple[str, ...] = (PLAIN,), **options: Any) -> list[Answer]:
        opened: list[str] = []

        class Fake:
            ready = Ready("client", modes, {}, ())

            def __init__(self, spec: TargetSpec, front: str, tokenizer: str | None, **options: Any) -> None:
                assert (spec, tokenizer, options) == (SPEC, None, {"run_limit_s": 9.0, "level": SAMPLE})
                opened.append(front)

            def __enter__(self) -> Fake:
                return self

            def __exit__(self, *_: object) -> None: ...

            def modules(self) -> None: ...

            def run(self, schedule: Schedule, mode: str) -> History:
                return runs(schedule, mode)

        monkeypatch.setattr(again, "Worker", Fake)
        files = [(Path(f"{number}.json"), one) for number, one in enumerate(stored)]
        given = {"mode": None, "engine": None, "tokenizer": None, "limit_s": 9.0, **options}
        found = again.run(SPEC, files, **given)
        assert [a.file for a in found] == [file for file, _ in files]
        assert all(a.target == "client" for a in found)
        assert len(set(opened)) == len(opened)  # one worker an engine
        return found

    return call


def good() -> Life:
    return Life(budget=2).call(Ask(2, (5, 6), "length"), after=view((5, 6), TRUNCATED))


def told(life: Life) -> Runs:
    return lambda schedule, mode: life.history


def failure(rule: str = "BUDGET", mode: str = PLAIN, engine: str = "inproc", **schedule: Any) -> Failure:
    return Failure(rule, mode, engine, Schedule(**schedule))


def test_what_fails_again_is_shown(answers: Callable[..., list[Answer]]) -> None:
    life = Life(budget=2).call(Ask(3, (5, 6, 7), "length"), after=view((5, 6, 7), TRUNCATED))
    (answer,) = answers(told(life), failure())
    assert (answer.answer, answer.reason) == (STILL_FAILS, "may ask at most 2")
    assert answer.lines[0] == "BUDGET violated   client   plain   inproc"


def test_what_holds_is_fixed(answers: Callable[..., list[Answer]]) -> None:
    (answer,) = answers(told(good()), failure())
    assert (answer.answer, answer.reason) == (FIXED, "")
    assert answer.lines[0] == "BUDGET holds   client   plain   inproc" and "  attempt 1" in answer.lines[2]


def test_what_is_no_longer_put_to_the_test_is_fixed(answers: Callable[..., list[Answer]]) -> None:
    (answer,) = answers(told(Life(budget=0).call(after=view((), TRUNCATED))), failure())
    reason = "BUDGET is not broken, and is no longer put to the test"
    assert (answer.answer, answer.reason) == (FIXED, reason)
    assert answer.lines[0] == "BUDGET holds   client   plain   inproc" and answer.lines[-1] == f"  {reason}"


def test_a_target_that_raises_before_it_asks_has_fixed_nothing(answers: Callable[..., list[Answer]]) -> None:
    (answer,) = answers(told(Life(budget=2).call(raises="KeyError")), failure())
    assert answer.answer == CANNOT_RUN
    assert answer.lines == ("BUDGET has nothing to judge: the target raises KeyError: ",)


def test_what_a_finished_sample_raises_is_no_reason(answers: Callable[..., list[Answer]]) -> None:
    life = Life(budget=2, start=view((5,), COMPLETED)).call(raises="ValueError")
    (answer,) = answers(told(life), failure("MAXIMAL"))
    assert answer.answer == FIXED


def test_a_hang_is_no_answer(answers: Callable[..., list[Answer]]) -> None:
    life = Life(budget=2).call(Ask(2, (5,), "abort"), after=view((5,), ABORTED)).call(halts="hang")
    (answer,) = answers(told(life), failure())
    assert (answer.answer, answer.reason) == (CANNOT_RUN, "call 2: hang: it goes on and on")


def test_a_target_that_cannot_be_judged_says_why(answers: Callable[..., list[Answer]]) -> None:
    def refuses(schedule: Schedule, mode: str) -> History:
        raise CannotJudge("client has no images")

    (answer,) = answers(refuses, failure())
    assert (answer.answer, answer.lines) == (CANNOT_RUN, ("client has no images",))


@pytest.mark.parametrize(("mode", "lacks"), [(PLAIN, PLAIN), (STREAM, STREAM), (INCREMENTAL, INCREMENTAL)])
def test_a_mode_that_is_absent(answers: Callable[..., list[Answer]], mode: str, lacks: str) -> None:
    modes = (STREAM,) if mode == PLAIN else (PLAIN,)
    (answer,) = answers(told(good()), failure(mode=mode), modes=modes)
    assert (answer.answer, answer.reason) == (CANNOT_RUN, f"client has no {lacks} mode")


def test_an_engine_that_cannot_carry_it(answers: Callable[..., list[Answer]]) -> None:
    one = failure(engine="aioresponses", attempts=(Attempt("flag", after=1), Attempt("drop-after")))
    (answer,) = answers(told(good()), one)
    assert (answer.answer, answer.reason) == (CANNOT_RUN, "engine aioresponses cannot carry drop-after, flag")


def test_files_of_several_engines_keep_their_order(answers: Callable[..., list[Answer]]) -> None:
    names = ("inproc", "loopback", "inproc")
    found = answers(told(good()), *(failure(engine=name) for name in names))
    assert [a.lines[0].split()[-1] for a in found] == list(names)
    found = answers(told(good()), *(failure(engine=name) for name in names), engine="loopback", mode=PLAIN)
    assert [a.lines[0].split()[-1] for a in found] == ["loopback"] * 3


# Files


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"rule": "BUDGET", "schedule": to_json(Schedule())}))
    assert replay.read(file) == Failure("BUDGET", PLAIN, "inproc", Schedule())
    monkeypatch.setattr(replay, "MAX_BYTES", file.stat().st_size - 1)
    with pytest.raises(BadFile, match=r"one\.json is larger than 0 MiB: no failure file$"):
        replay.read(file)


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert version.version() == "0+checkout"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"7 of {name}")
    assert version.version() == "7 of rolloutcheck"


def test_the_package_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("harness", run_name="__main__")
    assert (end.value.code, capsys.readouterr().out) == (0, f"rolloutcheck {version.version()}\n")
