"""What the command line makes of an outcome: status, screen, files. Check and replay themselves are stood in for."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import harness.check
from harness import again, arguments, cli, tokenizer
from harness.check import Options, Report
from harness.checkers import Finding
from harness.events import Progress, Tell
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM
from harness.isolation import HarnessFault, Ready
from harness.pool import BadJournal
from harness.schedule import Schedule
from harness.targets.spec import TargetSpec
from harness.verdict import (
    CANNOT,
    CONFORMS,
    FAULT,
    INTERRUPTED,
    INVALID,
    USAGE,
    VALID,
    VIOLATES,
    Counterexample,
    Result,
)
from tests.unit.histories import Ask, Life, view

ENTRY = str(Path(__file__).resolve().parents[1] / "regressions/corpus/slime-2260-minimal.json")


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Said]]:
    """What the command line answers, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        assert isinstance(end.value.code, int)
        return Said(end.value.code, *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, before)


def broken(mode: str) -> Result:
    life = Life(budget=2, mode=mode).call(Ask(3, (5, 6, 7), "length"), after=view((5, 6, 7)))
    found = Counterexample(Schedule(budget=2), Finding(0, "may ask at most 2"), life.history)
    return Result("BUDGET", "MUST", mode, "inproc", INVALID, 4, found.finding.message, found)


HELD = Result("BUDGET", "MUST", PLAIN, "inproc", VALID, 4)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Options]]:
    """Lets a check come out like this; gives the options it was asked with."""

    def outcome(*results: Result, complete: bool = True, then: Callable[[Any], None] = lambda tell: None) -> Any:
        asked: list[Options] = []

        def check(options: Options, tell: Tell) -> Report:
            asked.append(options)
            then(tell)
            return Report(Ready("client", MODES, {}, ()), options, results, 1.0, complete)

        monkeypatch.setattr(harness.check, "check", check)
        return asked

    return outcome


def fails(error: BaseException) -> Callable[[Any], None]:
    def act(tell: Any) -> None:
        raise error

    return act


# Files and GitHub


def test_each_form_that_is_asked_for_is_written(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    checked(broken(PLAIN))
    assert say("check", "--json", "r.json", "--junit", "r.xml", "--html", "r.html").status == VIOLATES
    assert json.loads(Path("r.json").read_text())["results"][0]["rule"] == "BUDGET"
    assert "<testsuite" in Path("r.xml").read_text() and Path("r.html").read_text().startswith("<!doctype html>")


def test_github_is_told_where_it_runs_the_check(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(broken(PLAIN))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("what was there\n")
    said = say("check")
    assert "::error title=" in said.err and "::error" not in said.out
    assert Path("summary.md").read_text().startswith("what was there\n") and "BUDGET" in Path("summary.md").read_text()
    assert "::error" not in say("check", "--no-github").err
    monkeypatch.delenv("GITHUB_ACTIONS")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert "::error" not in say("check").err
    assert "::error" in say("check", "--github").err


def test_a_summary_that_cannot_be_written_changes_no_verdict(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(broken(PLAIN))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/such/folder")
    assert say("check", "--github").status == VIOLATES


# Statuses


def test_an_interrupt_is_no_verdict(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    checked(HELD, complete=False)
    said = say("check")
    assert (said.status, " BUDGET   MUST    valid 4" in said.out) == (INTERRUPTED, True)
    assert said.err == "rolloutcheck: interrupted; the verdicts above are what was known by then\n"


ENDINGS: dict[str, tuple[BaseException, int, str]] = {
    "interrupted": (KeyboardInterrupt(), INTERRUPTED, "rolloutcheck: interrupted\n"),
    "fault": (HarnessFault("Traceback of the worker"), FAULT, "a fault of rolloutcheck itself, please report it:\nTr"),
    "journal": (BadJournal("x is the journal of other work"), USAGE, "rolloutcheck: x is the journal of other work\n"),
    "crash": (ZeroDivisionError("by none"), FAULT, "a fault of rolloutcheck itself, please report it:\nTraceback "),
}


@pytest.mark.parametrize(("error", "status", "words"), ENDINGS.values(), ids=ENDINGS.keys())
def test_what_ends_a_check_is_said(
    say: Callable[..., Said], checked: Callable[..., Any], error: BaseException, status: int, words: str
) -> None:
    checked(then=fails(error))
    said = say("check")
    assert (said.status, said.out) == (status, "")
    assert words in said.err and str(error) in said.err


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interrupt_outside_a_command_is_one_too(
    say: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def app(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "app", app)
    assert say("check") == (INTERRUPTED, "", "rolloutcheck: interrupted\n")


def test_a_request_to_end_is_an_interrupt(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    checked(HELD)
    assert say("check").status == CONFORMS
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)


def test_no_arguments_show_the_help(say: Callable[..., Said]) -> None:
    said = say()
    assert said.status == USAGE and "replay" in said.out + said.err


# The screen


def test_a_rule_that_is_broken_in_several_modes_has_one_screen(
    say: Callable[..., Said], checked: Callable[..., Any]
) -> None:
    checked(*map(broken, (PLAIN, STREAM, INCREMENTAL)))
    said = say("check")
    assert said.status == VIOLATES
    assert said.out.count("BUDGET violated") == 1
    assert "  also     stream inproc, incremental inproc\n  replay   rolloutcheck replay failures/BUDGET-" in said.out
    assert len(list(Path("failures").iterdir())) == 3


def test_progress_is_a_line_a_phase_where_nobody_watches(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    def work(tell: Tell) -> None:
        for phase in ("corpus", "drawn"):
            for done in range(3):
                tell(Progress("inproc", phase, done, 3))

    checked(HELD, then=work)
    assert say("check").err == "inproc: corpus, 3\ninproc: drawn, 3\n"


def test_progress_is_a_bar_on_a_terminal(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    checked(HELD, then=lambda tell: tell(Progress("inproc", "drawn", 2, 3)))
    said = say("check")
    assert said.status == CONFORMS
    assert "inproc drawn" in said.err and "2/3" in said.err


def test_a_reader_that_left_changes_no_verdict(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(broken(PLAIN))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert say("check") == (VIOLATES, "", "")
        gone.write("goes nowhere")  # and does not fail when the file is closed


def test_closed_streams_are_nobody_s_concern(say: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert say("--version") == (CONFORMS, "", "")
    with sys.stdout as made:
        assert made.name == os.devnull


class Full(io.StringIO):
    """Takes what is written, and cannot put it anywhere."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_stream_that_cannot_be_flushed_changes_no_verdict(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(HELD)
    monkeypatch.setattr(sys, "stdout", Full())
    assert say("check").status == CONFORMS


# JSON


def test_json_may_take_standard_output(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    checked(broken(PLAIN))
    said = say("check", "--json", "-")
    (result,) = json.loads(said.out)["results"]
    assert (said.status, result["rule"], result["verdict"]) == (VIOLATES, "BUDGET", INVALID)


@pytest.mark.parametrize(("name", "words"), [("-", "standard output"), ("report.json", "report.json")])
def test_json_that_cannot_be_written(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    checked(HELD)
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(arguments, "print", full, raising=False)
    said = say("check", "--json", name)
    assert (said.status, said.err) == (USAGE, f"rolloutcheck: cannot write {words}: No space left on device\n")


def test_json_into_a_folder_is_refused_at_once(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    asked = checked(HELD)
    Path("folder").mkdir()
    assert say("check", "--json", "folder").err == "rolloutcheck: cannot write folder: it is a folder\n"
    assert asked == []


# Replay


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Lets a replay answer so; gives what it was asked with."""

    def outcome(*answers: str) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def run(spec: TargetSpec, files: Any, **options: Any) -> list[again.Answer]:
            asked.append({"spec": spec, "rules": [stored.rule for _, stored in files], **options})
            return [again.Answer(Path(a), "reference", a, f"because {a}", ("line",)) for a in answers]

        monkeypatch.setattr(again, "run", run)
        return asked

    return outcome


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ((again.FIXED,), CONFORMS),
        ((again.FIXED, again.CANNOT_RUN), CANNOT),
        ((again.CANNOT_RUN, again.STILL_FAILS, again.FIXED), VIOLATES),
    ],
)
def test_the_worst_answer_is_the_status(
    say: Callable[..., Said], answered: Callable[..., Any], answers: tuple[str, ...], status: int
) -> None:
    answered(*answers)
    said = say("replay", ENTRY)
    heads = [f"{answer.upper().replace('-', ' ')}   {answer}" for answer in answers]
    assert said == (status, "".join(f"{head}\n  line\n" for head in heads), "")


def test_replay_passes_on_what_it_was_told(say: Callable[..., Said], answered: Callable[..., Any]) -> None:
    asked = answered(again.FIXED)
    say("replay", ENTRY, "--mode", "stream", "--engine", "loopback", "--limit", "7")
    say("replay", ENTRY)
    given = {"spec": TargetSpec("reference"), "rules": ["BUDGET"], "tokenizer": None}
    assert asked == [
        {**given, "mode": STREAM, "engine": "loopback", "limit_s": 7.0},
        {**given, "mode": None, "engine": None, "limit_s": 20.0},
    ]


def test_replay_runs_one_mode(say: Callable[..., Said], answered: Callable[..., Any]) -> None:
    said = say("replay", ENTRY, "--mode", "both")
    assert said == (USAGE, "", "rolloutcheck: replay runs one mode: plain, stream or incremental\n")


@pytest.mark.parametrize("name", ["-", "answers.json"])
def test_answers_as_json(say: Callable[..., Said], answered: Callable[..., Any], name: str) -> None:
    answered(again.FIXED)
    said = say("replay", ENTRY, "--json", name)
    text = said.out if name == "-" else Path(name).read_text()
    assert json.loads(text) == [{"file": "fixed", "target": "reference", "answer": "fixed", "reason": "because fixed"}]
    assert (said.out[:5] == "FIXED") is (name != "-")


# What is needed


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("aioresponses", ("--engine", "aioresponses")), ("transformers", ("--tokenizer", "here"))],
)
def test_an_optional_package_that_is_not_there(
    say: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, package: str, arguments: tuple[str, ...]
) -> None:
    Path("here").mkdir()
    monkeypatch.setitem(sys.modules, package, None)
    tokenizer.load.cache_clear()
    said = say("check", *arguments)
    assert said == (
        USAGE,
        "",
        f"rolloutcheck: {arguments[0]}{' aioresponses' * (package == 'aioresponses')} needs the package {package}\n",
    )


def test_a_cluster_needs_its_package(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = checked(HELD)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert say("check", "--ray", "here") == (USAGE, "", "rolloutcheck: --ray needs the package ray\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert say("check", "--ray", "here").status == CONFORMS
    assert [options.ray for options in asked] == ["here"]


def test_a_mutant_is_a_target_of_its_own(say: Callable[..., Said], checked: Callable[..., Any]) -> None:
    asked = checked(HELD)
    assert say("check", "--target", "mutant:drops-stop").status == CONFORMS
    assert asked[0].target == TargetSpec("mutant", function="drops-stop")
    for option in (("--path", "."), ("--twin", "a:b")):
        said = say("check", "--target", "mutant:drops-stop", *option)
        assert said == (USAGE, "", "rolloutcheck: --path and --twin do not belong to a mutant\n")


def test_the_target_s_process_is_told_where_the_tokenizer_lies(
    say: Callable[..., Said], checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(tokenizer, "load", seen.append)
    asked = checked(HELD)
    assert say("check", "--tokenizer", "here").status == CONFORMS
    assert (seen, asked[0].tokenizer) == (["here"], str(tmp_path.resolve() / "here"))


def test_a_checkout_is_named_by_its_folder(
    say: Callable[..., Said], checked: Callable[..., Any], tmp_path: Path
) -> None:
    Path("tree/slime").mkdir(parents=True)
    asked = checked(broken(PLAIN))
    said = say("check", "--target", "slime", "--path", "tree")
    assert asked[0].target == TargetSpec("slime", root=str(tmp_path.resolve() / "tree"), revision="working tree")
    assert " --target slime --path tree\n" in said.out
