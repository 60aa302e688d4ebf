"""The command line from outside: statuses, one line for what is wrong, and targets that misbehave.

What does not need a process of its own calls `main`; the target has its worker all the same.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

from harness import check, corpus, options
from harness import replay as stored
from harness.cli import main
from harness.verdict import CANNOT, CONFORMS, USAGE, VIOLATES
from tests.unit.test_slime_loading import FILES, git, write

PROJECT = Path(__file__).resolve().parents[2]
FAULTY = "tests.function_targets:forgets_subtraction"
QUICK = ("--profile", "quick", "--rule", "BUDGET")
INTERRUPTED = 130
MARK = "ROLLOUTCHECK_TEST_MARK"
SOON_S, GONE_S = 5.0, 2.0


@dataclass
class Command:
    """A run of the command line. ``mark`` is in the environment of all that it starts."""

    arguments: tuple[str, ...]
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, **options: Any) -> subprocess.Popen[str]:
        hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "GIT_DIR")
        env = {k: v for k, v in os.environ.items() if k not in hidden}
        env |= {"PYTHONPATH": str(PROJECT), MARK: self.mark, **self.env}
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *self.arguments],
            cwd=self.cwd,
            env=env,
            text=True,
            **({"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
        )

    def left(self) -> list[int]:
        """Processes that the command has started and that are still there."""
        end = time.monotonic() + GONE_S
        while (found := self._alive()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _alive(self) -> list[int]:
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone, or another user's
                continue
        return found


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str
    left: tuple[int, ...]

    @property
    def complaints(self) -> list[str]:
        """Standard error without progress."""
        return [line for line in self.err.splitlines() if not re.match(r"\w+: [a-z ]+, \d+$", line)]


Inside = Callable[..., Done]


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 60) -> Done:
    command = Command(arguments, cwd, env or {})
    process = command.start()
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    left = command.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Done(process.returncode, out, err, tuple(left))


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Inside:
    """Runs the command line in this process, on few schedules."""
    for place in (check, options):
        monkeypatch.setattr(place, "PROFILES", {"quick": 8})
    for place in (check, options):
        monkeypatch.setattr(place, "SCENARIOS", {"quick": 8})
    names = ("abort-exactly", "slime-2260-minimal", "loop-aborted")
    few = tuple(entry for entry in corpus.load() if entry.name.startswith(names))
    monkeypatch.setattr(corpus, "load", lambda: few)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))

    def call(*arguments: str, cwd: Path) -> Done:
        command = Command(arguments, cwd)
        monkeypatch.setenv(MARK, command.mark)
        monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        captured = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, captured.out, captured.err, tuple(command.left()))

    return call


# Bad input

TARGETS = """
    import json, os, subprocess, sys, time
    from reference_impl.generate import generate as good
    from reference_impl.generate_streaming import generate_streaming


    async def other(args, sample, params):
        return await good(args, sample, params)

    def synchronous(args, sample, params):
        return sample

    async def lonely(args):
        return None

    async def silent(args, sample, params):
        return sample

    async def gives_none(args, sample, params):
        await good(args, sample, params)

    async def raises(args, sample, params):
        raise RuntimeError("no\\nluck [bold]today[/bold]")

    async def leaves(args, sample, params):
        os._exit(7)

    async def gives_up(args, sample, params):
        sys.exit("enough")

    async def interrupts(args, sample, params):
        raise KeyboardInterrupt

    async def waits(args, sample, params):
        import asyncio
        await asyncio.get_running_loop().create_future()

    async def odd_tokens(args, sample, params):
        await good(args, sample, params)
        sample.tokens = [object()]
        return sample

    async def patches(args, sample, params):
        json.dumps = lambda *values, **options: "{}"
        return await good(args, sample, params)

    number = 5
    """

GOOD: dict[str, Any] = {
    "format": "rolloutcheck-failure-1",
    "rule": "BUDGET",
    "mode": "plain",
    "engine": "inproc",
    "target": "t",
    "revision": "",
    "summary": "",
    "schedule": {"prompt": "a", "budget": 2, "script": [65], "attempts": [{"kind": "abort", "after": 1}]},
    "version": "0",
    "seed": 0,
}


def altered(schedule: dict[str, Any] | None = None, **fields: Any) -> str:
    """A failure file with something else in it."""
    return json.dumps({**GOOD, "schedule": {**GOOD["schedule"], **(schedule or {})}, **fields})


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is no JSON"),
    "words": ("not JSON", "is no JSON"),
    "binary": (bytes(range(256)), "is no JSON"),
    "cut": (altered()[:-9], "is no JSON"),
    "list": ("[1]", "no failure file"),
    "null": ("null", "no failure file"),
    "no-schedule": ("{}", "no failure file"),
    "format": (altered(format="other-1"), "format 'other-1' is not known"),
    "format-of-two-lines": (altered(format="a\nb"), "is not known"),
    "rule": (altered(rule="NOPE"), "unknown rule 'NOPE'"),
    "rule-type": (altered(rule=["a", "b"]), "unknown rule"),
    "mode": (altered(mode="both"), "unknown mode 'both'"),
    "kind": (altered({"attempts": [{"kind": "explode"}]}), "attempts[0].kind must be one of"),
    "attempt-type": (altered({"attempts": [3]}), "attempts[0] must be an object"),
    "attempts": (altered({"attempts": [{"kind": "abort"}] * 65}), "at most 64"),
    "http-code": (altered({"attempts": [{"kind": "http"}]}), "code is needed"),
    "negative": (altered({"attempts": [{"kind": "abort", "after": -1}]}), "after must be an integer"),
    "field": (altered({"a\nb": 1}), "unknown field"),
    "huge": (altered({"budget": 10**30}), "budget must be an integer"),
    "digits": (altered().replace('"budget": 2', '"budget": ' + "9" * 6000), "digits"),
    "infinite": (altered().replace('"budget": 2', '"budget": 1e999'), "budget must be an integer"),
    "nan": (altered().replace('"budget": 2', '"budget": NaN'), "budget must be an integer"),
    "true": (altered({"budget": True}), "budget must be an integer"),
    "deep": ("[" * 100_000, "is no JSON"),
    "deep-prompt": (altered().replace('"a"', "[" * 900 + "]" * 900), "prompt must be"),
    "stop": (altered({"stop": [""]}), "stop must hold"),
    "target-type": (altered(target=5), "wrong type"),
}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that bad input needs; commands run in it and leave nothing."""
    root = tmp_path_factory.mktemp("bad input")
    files = {"clients.py": TARGETS, "broken.py": "import missing_package", "quits.py": "raise SystemExit(3)"}
    write(root, {**files, "cut.py": "def f(:"})
    (root / "empty").mkdir()
    (root / "repo").mkdir()
    git(root / "repo", "init", "--quiet")
    write(root / "repo", {"README": "no slime here"})
    git(root / "repo", "add", ".")
    git(root / "repo", "commit", "--quiet", "-m", "first")
    write(root / "fake", {**FILES, "slime/utils/misc.py": "raise RuntimeError('not today')"})
    write(root / "partial", {name: text for name, text in FILES.items() if "sglang_rollout" not in name})
    write(root / "nothing", {**FILES, "slime/rollout/sglang_rollout.py": "x = 1"})
    for name, (content, _) in BAD_FILES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (root / f"{name}.json").write_bytes(data)
    for name, text in {
        "good": altered(),
        "engine": altered(engine="nope"),
        "address": altered(engine="http://127.0.0.1:1"),
        "loop-rule": altered(rule="ABORT-LIVE"),
        "surrogate": altered({"prompt": "\ud800"}),
    }.items():
        (root / f"{name}.json").write_text(text)
    return root


def own(function: str, *more: str) -> tuple[str, ...]:
    return ("check", "--target", f"clients:{function}", "--path", ".", *QUICK, *more)


SLIME = ("check", "--target", "slime", "--path")
LINES: list[Any] = [
    ("no-such-path", (*SLIME, "no-where"), USAGE, "not a directory: no-where"),
    ("no-checkout", (*SLIME, "empty"), USAGE, "not a checkout, it has no slime folder: empty"),
    ("a-file-for-a-path", (*SLIME, "clients.py"), USAGE, "not a directory: clients.py"),
    ("revision-of-no-repository", (*SLIME, "fake", "--rev", "HEAD"), USAGE, "not a git repository"),
    ("unknown-revision", (*SLIME, "repo", "--rev", "nope"), USAGE, "unknown revision 'nope'"),
    ("option-like-revision", (*SLIME, "repo", "--rev=--help"), USAGE, "not a revision: '--help'"),
    ("revision-of-two-lines", (*SLIME, "repo", "--rev", "a\nb"), USAGE, "not a revision"),
    ("revision-without-slime", (*SLIME, "repo", "--rev", "HEAD"), CANNOT, "no slime package at"),
    ("tree-without-slime", (*SLIME, "repo"), CANNOT, "no slime package in repo"),
    ("slime-fails-at-import", (*SLIME, "fake", *QUICK), CANNOT, "not today"),
    ("slime-without-rollout", (*SLIME, "partial", *QUICK), CANNOT, "sglang_rollout"),
    ("slime-without-generate", (*SLIME, "nothing", *QUICK), CANNOT, "has no plain mode"),
    ("slime-without-path", ("check", "--target", "slime"), USAGE, "--target slime needs --path DIR"),
    ("unknown-rule", ("check", "--rule", "NOPE"), USAGE, "unknown rule 'NOPE'; the rules are BUDGET, "),
    (
        "loop-rule",
        ("check", "--rule", "ABORT-LIVE"),
        USAGE,
        "rule ABORT-LIVE is judged on whole rollouts: give --level rollout",
    ),
    (
        "sample-rule",
        ("check", "--rule", "TEXT", "--level", "rollout"),
        USAGE,
        "rule TEXT is judged on single samples: give --level sample",
    ),
    ("lower-case-loop-rule", ("check", "--rule", "group", "--level", "both"), USAGE, "did you mean GROUP?"),
    (
        "rollout-engine",
        ("check", "--level", "rollout", "--engine", "loopback"),
        USAGE,
        "whole rollouts are run on the engine inproc",
    ),
    (
        "scope-of-rollouts",
        ("check", "--level", "rollout", "--scope", "2"),
        USAGE,
        "a scope holds single samples; whole rollouts are drawn",
    ),
    (
        "function-without-loop",
        ("check", "--target", "clients:other", "--level", "rollout", "--profile", "quick"),
        CANNOT,
        "clients:other is a generate function: it has no rollout loop",
    ),
    ("unknown-engine", ("check", "--engine", "x"), USAGE, "unknown engine 'x'; the engines are inproc, "),
    ("no-engine", ("check", "--engine", ""), USAGE, "unknown engine ''"),
    ("no-server", ("check", "--engine", "http://127.0.0.1:1"), CANNOT, "nothing answers at http://127.0.0.1:1"),
    (
        "server-load",
        ("check", "--engine", "http://127.0.0.1:1", "--jobs", "2"),
        USAGE,
        "a server is asked by one process",
    ),
    ("unknown-target", ("check", "--target", "sliem"), USAGE, "unknown target 'sliem'; give reference, slime or pkg"),
    ("verl", ("check", "--target", "verl"), USAGE, "verl is planned"),
    ("half-a-target", ("check", "--target", "clients:"), USAGE, "unknown target 'clients:'"),
    ("twin-of-reference", ("check", "--twin", "clients:good"), USAGE, "--twin belongs to a target pkg.mod:function"),
    ("twin-without-function", own("good", "--twin", "clients"), USAGE, "unknown target 'clients'"),
    ("rev-with-reference", ("check", "--rev", "HEAD"), USAGE, "--rev belongs to --target slime"),
    ("rev-with-function", own("good", "--rev", "HEAD"), USAGE, "--rev belongs to --target slime"),
    ("path-with-reference", ("check", "--path", "."), USAGE, "--path does not belong to --target reference"),
    ("no-folder", ("check", "--target", "a:b", "--path", "no-where"), USAGE, "no folder no-where"),
    ("no-tokenizer", ("check", "--tokenizer", "no-where"), USAGE, "no tokenizer directory: no-where"),
    ("no-module", ("check", "--target", "no_such:f"), CANNOT, "importing no_such failed: ModuleNotFoundError"),
    ("module-fails", ("check", "--target", "broken:f"), CANNOT, "No module named 'missing_package'"),
    ("module-exits", ("check", "--target", "quits:f"), CANNOT, "importing quits failed: SystemExit: 3"),
    ("module-does-not-compile", ("check", "--target", "cut:f"), CANNOT, "importing cut failed: SyntaxError"),
    ("no-function", own("missing"), CANNOT, "clients has no function 'missing'"),
    ("no-callable", own("number"), CANNOT, "clients has no function 'number'"),
    ("not-async", own("synchronous"), CANNOT, "clients:synchronous is no async function"),
    ("signature", own("lonely"), CANNOT, "cannot be called with (args, sample, sampling_params)"),
    ("asks-nothing", own("silent"), CANNOT, "clients:silent sent no /generate request"),
    ("gives-none", own("gives_none"), CANNOT, "clients:gives_none returned NoneType, not a sample"),
    ("raises", own("raises"), CANNOT, "clients:raises raises before it asks: RuntimeError: no"),
    ("sys-exit", own("gives_up"), CANNOT, "raises before it asks: SystemExit: enough"),
    ("os-exit", own("leaves"), CANNOT, "ends its process"),
    ("interrupts", own("interrupts"), CANNOT, "ends its process"),
    ("waits", own("waits"), CANNOT, "clients:waits does not come back from its first call"),
    ("no-stream-mode", own("good", "--mode", "stream"), CANNOT, "clients:good has no stream mode"),
    ("no-incremental-mode", own("good", "--mode", "incremental"), CANNOT, "clients:good has no stream mode"),
    ("no-plain-mode", own("generate_streaming", "--mode", "both"), CANNOT, "has no plain mode"),
    ("twins-alike", own("good", "--twin", "clients:other"), CANNOT, "both ask for plain replies"),
    ("no-file", ("replay", "no-where.json"), USAGE, "cannot read no-where.json: No such file or directory"),
    ("a-folder-for-a-file", ("replay", "empty"), USAGE, "empty is no file"),
    ("long-name", ("replay", "x" * 300), USAGE, "File name too long"),
    ("replay-both", ("replay", "empty", "--mode", "both"), USAGE, ""),
    ("replay-target", ("replay", "good.json", "--target", "x"), USAGE, "unknown target 'x'"),
    *((f"file-{name}", ("replay", f"{name}.json"), USAGE, BAD_FILES[name][1]) for name in ("binary", "kind", "deep")),
    ("file-engine", ("replay", "engine.json"), USAGE, "nope"),
    ("file-address", ("replay", "address.json"), USAGE, "address.json was found on a server: give --engine"),
    ("file-loop-rule", ("replay", "loop-rule.json"), USAGE, "ABORT-LIVE"),
    ("file-surrogate", ("replay", "surrogate.json"), USAGE, "prompt"),
    ("tokenizer", ("check", "--tokenizer", "empty"), USAGE, "empty"),
    ("no-target", ("check", "--target", "", *QUICK), USAGE, "target"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "status", "words"),
    [pytest.param(*line, id=line[0]) if type(line) is tuple else line for line in LINES],
)
def test_bad_input_is_one_line(
    place: Path, inside: Inside, name: str, arguments: tuple[str, ...], status: int, words: str
) -> None:
    done = inside(*arguments, cwd=place)
    assert done.status == status, done.err
    assert done.out == ""
    assert done.err.endswith("\n") and done.err.count("\n") == 1, done.err
    assert done.err.startswith("rolloutcheck: ") and len(done.err) < 500
    assert words in done.err
    assert "Traceback" not in done.err and not set("╭│╰─") & set(done.err)
    assert not done.left


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("replay", "deep.json"), USAGE), (("check", "--rule", "NOPE"), USAGE), (own("leaves"), CANNOT)],
    ids=["file", "rule", "target"],
)
def test_bad_input_is_one_line_from_outside(place: Path, arguments: tuple[str, ...], status: int) -> None:
    done = run(*arguments, cwd=place)
    assert (done.status, done.out, done.left) == (status, "", ())
    assert re.fullmatch(r"rolloutcheck: [^\n]+\n", done.err)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_failure_file_is_one_line(place: Path, name: str) -> None:
    with pytest.raises(stored.BadFile) as error:
        stored.read(place / f"{name}.json")
    message = str(error.value)
    assert message.isprintable() and len(message) < 400 + len(str(place))
    assert message.startswith(str(place / f"{name}.json")) and BAD_FILES[name][1] in message


@pytest.mark.parametrize(
    "arguments",
    ["check --frobnicate", "check --profile x", "check --seed -1", "check --limit x", "check extra", "frob", "replay"],
)
def test_a_wrong_option_is_a_usage_error(tmp_path: Path, inside: Inside, arguments: str) -> None:
    done = inside(*arguments.split(), cwd=tmp_path)
    assert (done.status, done.out) == (USAGE, "")
    assert len(done.err.splitlines()) == 1 and done.err.startswith("rolloutcheck: ")


# What it says when all is well


SCHEMAS = {p.name.partition(".")[0]: json.loads(p.read_text()) for p in (PROJECT / "spec/schemas").glob("*.json")}


def validate(data: Any, name: str) -> None:
    registry = Registry[Any]().with_resources([(s["$id"], Resource.from_contents(s)) for s in SCHEMAS.values()])
    jsonschema.Draft202012Validator(SCHEMAS[name], registry=registry).validate(data)


@dataclass(frozen=True)
class Violation:
    """A run that found BUDGET broken, and the folder it ran in."""

    done: Done
    folder: Path
    report: dict[str, Any]

    @property
    def file(self) -> Path:
        (file,) = (self.folder / "failures").iterdir()
        return file

    @property
    def command(self) -> list[str]:
        (line,) = (line for line in self.done.out.splitlines() if line.startswith("  replay   "))
        return shlex.split(line.removeprefix("  replay   "))


@pytest.fixture(scope="session")
def violation(tmp_path_factory: pytest.TempPathFactory) -> Violation:
    folder = tmp_path_factory.mktemp("a violation")
    done = run("check", "--target", FAULTY, *QUICK, "--json", "report.json", cwd=folder)
    return Violation(done, folder, json.loads((folder / "report.json").read_text()))


def test_version(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.status, done.err) == (CONFORMS, "")
    assert re.fullmatch(r"rolloutcheck \S+\n", done.out)


def test_conforms(tmp_path: Path) -> None:
    done = run("check", *QUICK, "--mode", "plain", cwd=tmp_path)
    assert (done.status, done.complaints, done.left) == (CONFORMS, [], ())
    assert re.match(r"reference   engine inproc   profile quick   seed 0   \d+\.\d s\n", done.out)
    assert re.search(r"^ BUDGET   MUST    valid \d+ *$", done.out, re.M)
    assert not (tmp_path / "failures").exists()


def test_violates(violation: Violation) -> None:
    done = violation.done
    assert (done.status, done.complaints, done.left) == (VIOLATES, [], ())
    assert re.search(r"^ BUDGET   MUST    invalid \d+ *$", done.out, re.M)
    assert done.out.count(" violated ") == 1
    assert "\x1b" not in done.out + done.err
    assert max(map(len, done.out.splitlines())) <= 160


@pytest.mark.parametrize(("level", "on"), [("rollout", {"rollout"}), ("both", {"sample", "rollout"})])
def test_whole_rollouts_conform(inside: Inside, tmp_path: Path, level: str, on: set[str]) -> None:
    rules = ("--rule", "BUDGET", "--rule", "GROUP")
    done = inside("check", *QUICK, *rules, "--level", level, "--json", "report.json", cwd=tmp_path)
    assert (done.status, done.complaints, done.left) == (CONFORMS, [], ())
    assert "Over whole rollouts:" in done.out and re.search(r"^ GROUP    MUST    valid \d+ ", done.out, re.M)
    report = json.loads((tmp_path / "report.json").read_text())
    validate(report, "report")
    assert {r["on"] for r in report["results"]} == on


def test_a_function_has_samples_and_no_rollouts(place: Path, inside: Inside) -> None:
    done = inside("check", "--target", "clients:other", *QUICK, "--level", "both", cwd=place)
    assert done.status == CANNOT and not done.left
    assert re.search(r"^ BUDGET   MUST    valid \d+ *$", done.out, re.M)
    said = "whole rollouts: clients:other is a generate function: it has no rollout loop"
    assert f"unknown: BUDGET plain: {said}\n" in done.out


def test_a_failure_file_fits_its_schema(violation: Violation) -> None:
    data = json.loads(violation.file.read_text())
    validate(data, "failure")
    assert (data["rule"], data["target"], data["seed"]) == ("BUDGET", FAULTY, 0)
    screen = violation.done.out.partition("\n\n")[2].strip()
    *shown, empty, last = [s for s in screen.splitlines() if "  replay " not in s]
    assert shown[-5:] == data["summary"].splitlines() and (empty, last) == ("", "violates: BUDGET")


def test_a_report_fits_its_schema(violation: Violation) -> None:
    validate(violation.report, "report")


def test_a_report_says_what_the_screen_says(violation: Violation) -> None:
    report = violation.report
    (found,) = (r for r in report["results"] if r["verdict"] == "invalid")
    assert (found["rule"], found["mode"], found["level"]) == ("BUDGET", "plain", "MUST")
    assert f" invalid {found['schedules']}" in violation.done.out
    assert shlex.split(found["counterexample"]["replay"]) == violation.command
    assert all(line in violation.done.out for line in found["counterexample"]["summary"].splitlines())
    assert found["counterexample"]["schedule"] == json.loads(violation.file.read_text())["schedule"]


def test_the_same_seed_gives_the_same_report_and_standard_output_is_json(violation: Violation, tmp_path: Path) -> None:
    done = run("check", "--target", FAULTY, *QUICK, "--seed", "0", "--json", "-", cwd=tmp_path)
    report = json.loads(done.out)
    assert (done.status, done.complaints) == (VIOLATES, [])
    assert {**report, "duration_s": 0} == {**violation.report, "duration_s": 0}


def test_the_replay_command_on_the_screen_works(violation: Violation) -> None:
    name, *arguments = violation.command
    assert name == "rolloutcheck"
    done = run(*arguments, cwd=violation.folder)
    assert (done.status, done.err) == (VIOLATES, "")
    head, *screen = done.out.splitlines()
    assert head == f"STILL FAILS   failures/{violation.file.name}"
    assert [line.removeprefix("  ") for line in screen] == json.loads(violation.file.read_text())[
        "summary"
    ].splitlines()


def test_replay_on_the_reference_says_fixed(violation: Violation, inside: Inside) -> None:
    done = inside("replay", str(violation.file), "--target", "reference", cwd=violation.folder)
    assert (done.status, done.err) == (CONFORMS, "")
    assert done.out.startswith(f"FIXED   {violation.file}\n  BUDGET holds   reference   plain   inproc\n    prompt ")


def test_replay_of_another_target_s_failure_wants_the_target_named(violation: Violation, inside: Inside) -> None:
    done = inside("replay", str(violation.file), cwd=violation.folder)
    assert (done.status, done.out) == (USAGE, "")
    assert "name the --target to run it against" in done.err and len(done.err.splitlines()) == 1


def test_replay_says_fixed_where_the_right_client_asks_nothing(tmp_path: Path, inside: Inside) -> None:
    """CONTEXT has no request to judge on the reference, and that is what was wanted."""
    schedule = {"prompt": "a", "budget": 1, "context": 1, "script": [65], "attempts": []}
    (tmp_path / "one.json").write_text(json.dumps({**GOOD, "rule": "CONTEXT", "schedule": schedule}))
    done = inside("replay", "one.json", "--target", "reference", cwd=tmp_path)
    assert done.status == CONFORMS and done.out.startswith("FIXED")


def test_replay_in_a_mode_that_is_absent_says_cannot_run(violation: Violation) -> None:
    done = run(*violation.command[1:], "--mode", "stream", cwd=violation.folder)
    assert done.status == CANNOT
    assert done.out.splitlines()[0] == f"CANNOT RUN   failures/{violation.file.name}"
    assert "has no stream mode" in done.out


def test_replay_as_json(violation: Violation) -> None:
    entry = PROJECT / "tests/regressions/corpus/refusal-asked-again.json"
    done = run(*violation.command[1:], str(entry), "--json", "-", cwd=violation.folder)
    answers = json.loads(done.out)
    assert (done.status, done.err) == (VIOLATES, "")
    assert [set(a) for a in answers] == [{"file", "target", "answer", "reason"}] * 2
    assert [(a["file"], a["target"]) for a in answers] == [
        (f"failures/{violation.file.name}", FAULTY),
        (str(entry), FAULTY),
    ]
    assert answers[0]["answer"] == "still-fails" and answers[0]["reason"]
    assert answers[1]["answer"] in ("fixed", "cannot-run")


def test_strict_lets_a_SHOULD_rule_gate(tmp_path: Path, inside: Inside) -> None:
    arguments = ("--target", "tests.function_targets:drops_stop", "--profile", "quick", "--rule", "PARAMS")
    done = inside("check", *arguments, "--strict", cwd=tmp_path)
    assert (done.status, done.complaints) == (VIOLATES, [])
    assert "PARAMS violated (SHOULD)" in done.out


def test_a_check_of_SHOULD_rules_alone_lets_them_gate(tmp_path: Path, inside: Inside) -> None:
    done = inside("check", "--mode", "plain", "--profile", "quick", "--rule", "PARAMS", cwd=tmp_path)
    assert done.status == CONFORMS


def test_a_folder_that_cannot_be_written_loses_nothing_else(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "file").write_text("")
    done = inside("check", "--target", FAULTY, *QUICK, "--failures", "file", "--json", "report.json", cwd=tmp_path)
    assert done.status == VIOLATES
    assert done.complaints == ["rolloutcheck: cannot write file: File exists; violations are not stored"]
    assert "BUDGET violated" in done.out and "  replay " not in done.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [r["counterexample"]["replay"] for r in report["results"] if r["counterexample"]] == [""]


def test_a_report_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, inside: Inside) -> None:
    done = inside("check", *QUICK, "--mode", "plain", "--json", "no-where/report.json", cwd=tmp_path)
    assert done.status == USAGE
    assert done.complaints == ["rolloutcheck: cannot write no-where/report.json: no such folder"]


def test_a_reader_that_leaves_early_is_no_violation(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(altered())
    command = Command(("replay", "one.json"), tmp_path)
    read, write_end = os.pipe()
    os.close(read)
    process = command.start(stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert process.returncode != VIOLATES
    assert "Traceback" not in err


# Ctrl-C


def reads_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    while word not in (line := process.stderr.readline()):
        assert line, "ended without a word"


def test_an_interrupt_shows_what_is_known_and_leaves_nobody(tmp_path: Path) -> None:
    command = Command(("check", "--profile", "deep", "--rule", "BUDGET"), tmp_path)
    process = command.start()
    reads_until(process, "drawn")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - began < SOON_S) == (INTERRUPTED, True)
    assert err.splitlines()[-1] == "rolloutcheck: interrupted; the verdicts above are what was known by then"
    assert re.search(r"^ BUDGET   MUST    unknown \d+   unknown \d+   unknown \d+ *$", out, re.M)
    assert "unknown: what was not finished: interrupted" in out
    assert not command.left()


def test_an_interrupt_while_a_target_hangs_at_import_leaves_nobody(tmp_path: Path) -> None:
    write(tmp_path, {"hangs.py": "open('here', 'w').close()\nwhile True: pass"})
    command = Command(("check", "--target", "hangs:f", *QUICK), tmp_path)
    process = command.start()
    end = time.monotonic() + 30
    while not (tmp_path / "here").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    left = command.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert process.returncode == INTERRUPTED
    assert (left, err) == ([], "rolloutcheck: interrupted\n")


# Targets that misbehave

BEFORE = {
    # What a resumed call does before it asks, and whether its run can be judged.
    "talks": ("print('x' * 10**6); print('y' * 10**6, file=sys.stderr); os.write(2, b'z' * 10**6)", True),
    "closes 1": ("os.close(1)", True),
    "closes 0": ("os.close(0)", True),
    "starts a child": ("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e5)'])", True),
    "forks": ("os.fork() or time.sleep(1e5)", True),
    "starts a thread": ("threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()", True),
    "starts a thread to wait for": ("threading.Thread(target=time.sleep, args=(1e6,)).start()", True),
    "changes folder": ("os.chdir('/')", True),
    "clears the environment": ("os.environ.clear()", True),
    "takes the clock": ("time.monotonic = lambda: 0.0", True),
    "waits": ("await asyncio.get_running_loop().create_future()", False),
    "spins": ("while True: pass", False),
    "sleeps": ("time.sleep(1e6)", False),
    "leaves": ("os._exit(0)", False),
    "dies": ("os.kill(os.getpid(), signal.SIGSEGV)", False),
    "kills its group": ("os.killpg(0, signal.SIGTERM)", False),
    "interrupts": ("raise KeyboardInterrupt", False),
    "closes everything": ("os.closerange(0, 64)", False),
}
AFTER = {
    "raises": "raise RuntimeError('[bold]' + 'x' * 10**6 + '\\n\\x1b[31m')",
    "gives up": "sys.exit(0)",
}
JUDGED = {**{name: judged for name, (_, judged) in BEFORE.items()}, **dict.fromkeys(AFTER, True)}


def client(before: dict[str, str], after: dict[str, str], asks: str = "forgets_subtraction") -> str:
    """A client that, when it resumes, does what its prompt says."""

    def acts(by_prompt: dict[str, str]) -> str:
        tests = [
            f"if resumed and sample.prompt == {name!r}: {act}" for name, act in by_prompt.items() if act[:5] != "while"
        ]
        loops = [
            f"while resumed and sample.prompt == {n!r}: pass" for n, act in by_prompt.items() if act[:5] == "while"
        ]
        return "\n".join("    " + line for line in (*tests, *loops))

    return "\n".join(
        (
            "import asyncio, json, os, signal, subprocess, sys, threading, time",
            f"from tests.function_targets import {asks} as ask",
            "async def f(args, sample, params):",
            "    resumed = sample.status.value == 'aborted'",
            acts(before),
            "    sample = await ask(args, sample, params)",
            acts(after),
            "    return sample",
        )
    )


GROUPS = {
    "survives": [name for name, judged in JUDGED.items() if judged] + ["waits"],
    "hangs": ["spins", "sleeps"],
    "ends": ["leaves", "dies", "closes everything"],
    "is ended": ["kills its group", "interrupts"],
}
"""Few enough that lose their worker in one command: a target that does it often is given up."""


@pytest.mark.parametrize("names", GROUPS.values(), ids=list(GROUPS))
def test_a_misbehaving_target_is_contained(tmp_path: Path, names: list[str]) -> None:
    """One call after the other meets it: every file gets its answer, and nobody is left."""
    (tmp_path / "nuisance.py").write_text(client({name: act for name, (act, _) in BEFORE.items()}, AFTER))
    for name in names:
        (tmp_path / f"{name}.json").write_text(altered({"prompt": name}))
    files = [f"{name}.json" for name in names]
    done = run("replay", *files, "--target", "nuisance:f", "--limit", "2", cwd=tmp_path)
    heads = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert heads == [f"{'STILL FAILS' if JUDGED[name] else 'CANNOT RUN'}   {name}.json" for name in names]
    assert (done.status, done.err, done.left) == (VIOLATES if JUDGED[names[0]] else CANNOT, "", ())
    assert "\x1b" not in done.out and max(map(len, done.out.splitlines())) <= 320


def test_every_nuisance_is_tried() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(JUDGED)


def test_tokens_that_are_no_integers_leave_it_unknown(place: Path, inside: Inside) -> None:
    done = inside(*own("odd_tokens"), cwd=place)
    assert done.status == CANNOT and "view: the sample cannot be read: TypeError: a token is no int" in done.out


def test_a_target_that_replaces_json_changes_nothing(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "nuisance.py").write_text(client({"a": "json.dumps = lambda *values, **options: '{}'"}, {}))
    (tmp_path / "one.json").write_text(altered())
    done = inside("replay", "one.json", "--target", "nuisance:f", "--path", ".", cwd=tmp_path)
    assert (done.err, done.left) == ("", ()) and done.status in (VIOLATES, CANNOT)


HANGS_ONCE = """
import os, time
from tests.function_targets import same

async def f(args, sample, params):
    if sample.status.value == "aborted" and not os.path.exists("hung"):
        open("hung", "w").close()
        time.sleep(1e6)
    return await same(args, sample, params)
"""


def test_a_target_that_hangs_once_is_unknown_and_the_search_goes_on(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "nuisance.py").write_text(HANGS_ONCE)
    done = inside("check", "--target", "nuisance:f", *QUICK, "--limit", "2", cwd=tmp_path)
    assert (done.status, done.complaints, done.left) == (CANNOT, [], ())
    assert re.search(r"^ BUDGET   MUST    unknown \d+ *$", done.out, re.M)
    assert "unknown: BUDGET plain: call 1: hang: no end within 2 s" in done.out
