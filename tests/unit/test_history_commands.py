"""`bisect`, `scan`, `promote` and `check --git-bisect` from outside, on a small slime with a history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from referencing import Registry, Resource

import harness.bisect
import harness.scan
from harness import cli
from harness.verdict import CANNOT, CONFORMS, INTERRUPTED, USAGE, VIOLATES
from tests.unit.checkouts import FILES, git, write
from tests.unit.test_history_reports import FOUND, SCAN

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {p.name.partition(".")[0]: json.loads(p.read_text()) for p in (ROOT / "spec/schemas").glob("*.json")}
REGISTRY: Registry[Any] = Registry().with_resources((s["$id"], Resource.from_contents(s)) for s in SCHEMAS.values())
ROLLOUT = "slime/rollout/sglang_rollout.py"
RIGHT = FILES[ROLLOUT]
BROKEN = RIGHT.replace('sampling_params["max_new_tokens"] -= sample.response_length\n', "pass\n")
SUBJECTS = ("first", "docs", "lose the budget", "other file", "does not import", "count again", "last")


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right, right, broken, broken, does not import, right, right; in a path with a space."""
    root = tmp_path_factory.mktemp("repo") / "my slime"
    changes: list[dict[str, str]] = [
        FILES,
        {"README.md": "about"},
        {ROLLOUT: BROKEN},
        {"slime/other.py": "1"},
        {ROLLOUT: "raise OSError('no disk')\n"},
        {ROLLOUT: RIGHT},
        {"slime/other.py": "2"},
    ]
    for number, (change, subject) in enumerate(zip(changes, SUBJECTS, strict=True)):
        write(root, change)
        if number == 0:
            git(root, "init", "--quiet", "-b", "main")
        git(root, "add", ".")
        when = f"2026-01-{number + 1:02}T00:00:00Z"
        git(root, "commit", "--quiet", "-m", subject, GIT_COMMITTER_DATE=when)
        git(root, "tag", f"v{number}")
    return root


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Said]]:
    """What the command line answers, in a folder of its own."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> Said:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        assert isinstance(end.value.code, int)
        return Said(end.value.code, *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, before)


def bisection(repo: Path, tmp_path: Path, old: str, new: str, *more: str) -> list[object]:
    ends = ["--old", old, "--new", new, "--rule", "BUDGET", "--profile", "quick"]
    return ["bisect", "--path", repo, *ends, "--cache", tmp_path / "cache", *more]


def valid(name: str, data: Any) -> Any:
    jsonschema.Draft202012Validator(
        SCHEMAS[name], registry=REGISTRY, format_checker=jsonschema.FormatChecker()
    ).validate(data)
    return data


def state(repo: Path) -> tuple[str, ...]:
    """Everything of a repository that a bisection could have changed."""
    return (
        git(repo, "for-each-ref"),
        git(repo, "rev-parse", "HEAD"),
        git(repo, "--no-optional-locks", "status", "--porcelain", "--ignored"),
        git(repo, "worktree", "list"),
        *sorted(f"{p} {p.stat().st_mtime_ns}" for p in (repo / ".git").iterdir() if p.is_file()),
    )


def test_bisect_finds_the_first_bad_one_and_leaves_nothing_behind(
    say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    before = state(repo)
    said = say(*bisection(repo, tmp_path, "v0", "v3", "--json", "found.json"))
    short = git(repo, "rev-parse", "--short=9", "v2")
    last = git(repo, "rev-parse", "--short=9", "v1")
    assert said.status == CONFORMS, said.err
    assert f"first bad: {short} 2026-01-03 lose the budget\n" in said.out
    assert f"BUDGET violated   slime@{short}   plain   inproc\n" in said.out
    assert f"BUDGET holds   slime@{last}   plain   inproc\n" in said.out
    data = valid("bisect", json.loads(Path("found.json").read_text()))
    assert (data["revision"], data["direction"], data["before"]) == (short, "first-bad", last)
    assert data["old"]["verdict"], data["new"]["verdict"] == ("valid", "invalid")
    assert data["subject"] == "lose the budget" and not data["candidates"]
    (failure,) = Path("failures").iterdir()
    assert data["counterexample"]["replay"].startswith(f"rolloutcheck replay failures/{failure.name} --target slime")
    assert state(repo) == before and not list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "cache").glob("*"))
    replayed = say("replay", failure, "--target", "slime", "--path", repo, "--rev", "v1", "--json", "replayed.json")
    assert replayed.status == CONFORMS and replayed.out.startswith(f"FIXED   {failure}\n  BUDGET holds   slime@{last}")
    valid("replay", json.loads(Path("replayed.json").read_text()))


def test_bisect_finds_the_first_good_one_and_says_what_it_skipped(
    say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    said = say(*bisection(repo, tmp_path, "v3", "v6", "--json", "-"))
    assert said.status == CANNOT
    assert said.err.endswith("cannot be judged: no revision in between tells which of them it is\n")
    data = valid("bisect", json.loads(said.out))
    between = [git(repo, "rev-parse", "--short=9", name) for name in ("v4", "v5")]
    assert (data["direction"], data["revision"], data["candidates"]) == ("first-good", None, between)
    assert data["skipped"] == [
        {"revision": between[0], "reason": "importing slime.rollout.sglang_rollout failed: OSError: no disk"}
    ]


@pytest.mark.parametrize(
    ("old", "new", "status", "line"),
    [
        ("v0", "v1", CANNOT, "cannot be judged: both ends are alike: in plain BUDGET is valid"),
        ("v4", "v6", CANNOT, "importing slime.rollout.sglang_rollout failed: OSError: no disk"),
        ("v0", "v0", USAGE, "--old and --new are the same revision"),
        ("v3", "v0", USAGE, "exchange them"),
        ("v9", "v0", USAGE, "unknown revision 'v9' in "),
    ],
)
def test_ends_that_frame_nothing(
    old: str, new: str, status: int, line: str, say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    said = say(*bisection(repo, tmp_path, old, new))
    assert said.status == status and line in said.err.splitlines()[-1]
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--target", "reference"),
            "only slime's history can be searched, not that of 'reference'; see `git",
        ),
        (("--rule", "MODE-EQ"), "rule MODE-EQ is judged in stream and incremental: give --mode"),
        (("--mode", "both"), "bisect searches one mode and one level"),
        (("--level", "both"), "bisect searches one mode and one level"),
        (("--rule", "NOPE"), "unknown rule 'NOPE'"),
        (("--path", "/nowhere"), "not a directory: /nowhere"),
        (("--json", "no/folder/file"), "cannot write no/folder/file: no such folder"),
    ],
)
def test_what_bisect_is_wrongly_asked(
    arguments: tuple[str, ...], line: str, say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    said = say(*bisection(repo, tmp_path, "v0", "v3"), *arguments)
    assert said.status == USAGE and said.err.startswith(f"rolloutcheck: {line}")


def test_a_repository_must_be_named(say: Callable[..., Said]) -> None:
    assert say("scan").err == "rolloutcheck: --target slime needs --path DIR\n"


def test_a_cache_that_is_a_file(say: Callable[..., Said], repo: Path) -> None:
    Path("file").write_text("")
    assert say("scan", "--path", repo, "--cache", "file").err == "rolloutcheck: --cache file is no folder\n"


def test_changes_that_are_not_committed_are_said_to_be_left_out(
    say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    dirty = tmp_path / "dirty"
    git(tmp_path, "clone", "--quiet", str(repo), str(dirty))
    (dirty / ROLLOUT).write_text("changed")
    before = state(dirty)
    said = say(*bisection(dirty, tmp_path, "v0", "v1"))
    assert "rolloutcheck: the working tree has changes that are not committed; they are not looked at\n" in said.err
    assert state(dirty) == before


def test_scan_gives_the_whole_timeline_and_goes_on_from_what_it_knows(
    say: Callable[..., Said], repo: Path, tmp_path: Path
) -> None:
    command = ("scan", "--path", repo, "--rule", "BUDGET", "--cache", tmp_path / "cache")
    said = say(*command, "--json", "found.json", "--jobs", "2")
    assert said.status == CONFORMS, said.err
    names = [git(repo, "rev-parse", "--short=9", f"v{number}") for number in range(7)]
    data = valid("scan", json.loads(Path("found.json").read_text()))
    assert data["commits"] == 6 and [r["revision"] for r in data["revisions"]] == [names[i] for i in (0, 2, 4, 5)]
    ranges = [(one["from"], one["to"], one["verdict"]) for one in data["rules"]["BUDGET"]["plain"]]
    assert ranges == [
        (names[0], names[0], "valid"),
        (names[2], names[2], "invalid"),
        (names[4], names[4], "unknown"),
        (names[5], names[5], "valid"),
    ]
    assert {one["verdict"] for one in data["rules"]["BUDGET"]["stream"]} == {"absent", "unknown"}
    assert f"  2026-01-03 {names[2]}   invalid     1   lose the budget\n" in said.out
    (failure,) = Path("failures").iterdir()
    assert f"]   failures/{failure.name}\n" in said.out
    begin = time.monotonic()
    again = say(*command, "--json", "-")
    assert time.monotonic() - begin < 5
    assert json.loads(again.out)["rules"] == data["rules"]


def test_scan_begins_where_it_is_told_to(say: Callable[..., Said], repo: Path, tmp_path: Path) -> None:
    command = ("scan", "--path", repo, "--rule", "BUDGET", "--mode", "plain", "--cache", tmp_path, "--json", "-")
    assert say(*command, "--since", "2026-02-01").err == "rolloutcheck: no revision since 2026-02-01 touches slime\n"
    said = say(*command, "--since", "v4", "--rev", "v4")
    assert said.status == CANNOT and said.err.endswith("cannot be judged: no revision could be\n")


def test_ctrl_c_ends_a_scan_with_what_is_known(repo: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "harness", "scan", "--path", str(repo), "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [*command, "--rule", "BUDGET", "--jobs", "1", "--profile", "ci"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob("cache/scan-*")) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert err.endswith("rolloutcheck: interrupted; the same command goes on from here\n")
    assert "BUDGET plain\n" in out and "interrupted before it was judged" in out
    assert not list(temporary.iterdir())


# what comes of them, whatever it is


@pytest.mark.parametrize("complete", [True, False])
def test_a_bisection_that_was_interrupted_says_how_to_go_on(
    complete: bool, say: Callable[..., Said], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.bisect, "bisect", lambda *_: replace(FOUND, complete=complete))
    said = say(*bisection(repo, tmp_path, "v0", "v3"))
    assert said.status == (CONFORMS if complete else INTERRUPTED) and said.out.startswith("BUDGET   plain   ")
    assert said.err == ("" if complete else "rolloutcheck: interrupted; the same command goes on from here\n")


def test_a_timeline_as_a_page(
    say: Callable[..., Said], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.scan, "scan", lambda *_: SCAN)
    assert say("scan", "--path", repo, "--cache", tmp_path, "--html", "page.html").status == CONFORMS
    assert Path("page.html").read_text().startswith("<!doctype html>")
    monkeypatch.setattr(harness.scan, "scan", lambda *_: replace(SCAN, complete=False))
    said = say("scan", "--path", repo, "--cache", tmp_path)
    assert (said.status, said.err) == (INTERRUPTED, "rolloutcheck: interrupted; the same command goes on from here\n")


def test_a_folder_for_failures_that_cannot_be_made_is_said_once(
    say: Callable[..., Said], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.scan, "scan", lambda *_: SCAN)
    Path("file").write_text("")
    said = say("scan", "--path", repo, "--cache", tmp_path, "--failures", "file")
    assert said.err == "rolloutcheck: cannot write file: File exists; violations are not stored\n"


def test_a_shallow_clone_is_said_to_be_one(
    say: Callable[..., Said], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "2", f"file://{repo}", str(shallow))
    monkeypatch.setattr(harness.scan, "scan", lambda *_: SCAN)
    said = say("scan", "--path", shallow, "--cache", tmp_path)
    assert said.err == "rolloutcheck: this clone is shallow: revisions before its beginning are not looked at\n"


# git bisect run


def test_git_bisect_run_takes_the_check_as_it_is(repo: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(repo), str(clone))
    git(clone, "bisect", "start", "v3", "v0")
    check = [sys.executable, "-m", "harness", "check", "--git-bisect", "--target", "slime", "--path", ".", "--rule"]
    python = [*check, "BUDGET", "--profile", "quick", "--failures", str(tmp_path / "failures")]
    said = git(clone, "bisect", "run", *python, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1")
    assert f"{git(repo, 'rev-parse', 'v2')} is the first bad commit" in said


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--target", "slime", "--path", "/nowhere"), 128),
        (("--nonsense",), 128),
        (("--target", "no_such:function"), CANNOT),
    ],
)
def test_what_is_no_verdict_ends_git_bisect_run(
    arguments: tuple[str, ...], status: int, say: Callable[..., Said]
) -> None:
    assert say("check", "--git-bisect", *arguments).status == status


# stored failures


@pytest.fixture
def failure(say: Callable[..., Said], repo: Path) -> Path:
    at = ("--target", "slime", "--path", repo)
    said = say("check", *at, "--rev", "v2", "--rule", "BUDGET", "--profile", "quick")
    assert said.status == VIOLATES
    (file,) = Path("failures").iterdir()
    return file


def test_check_runs_what_is_stored_first(say: Callable[..., Said], repo: Path, failure: Path) -> None:
    at = ("--target", "slime", "--path", repo, "--rule", "BUDGET", "--profile", "quick")
    said = say("check", *at, "--rev", "v3", "--replay", failure)
    assert said.status == VIOLATES and said.err.startswith("inproc: replay, 1\ninproc: corpus, ")
    said = say("check", *at, "--rev", "v3", "--replay", failure, "--level", "rollout")
    assert said == (USAGE, "", f"rolloutcheck: {failure} is of a single sample: give --level sample\n")


@pytest.fixture
def other() -> Path:
    """A failure that is no entry yet."""
    file = Path("other.json")
    schedule = {"prompt": "a", "budget": 5, "script": [66], "attempts": [{"kind": "abort", "after": 2}]}
    file.write_text(json.dumps({"rule": "BUDGET", "schedule": schedule}))
    return file


def test_a_failure_is_promoted_to_the_corpus(say: Callable[..., Said], other: Path) -> None:
    Path("corpus").mkdir()
    promote = ("promote", other, "--fault", "It asks again.", "--report", "THUDM/slime#1", "--corpus", "corpus")
    said = say(*promote, "--name", "slime-1")
    assert said.status == CONFORMS and said.out.startswith("corpus/slime-1.json: BUDGET on [")
    data = json.loads(Path("corpus/slime-1.json").read_text())
    assert (data["fault"], data["reports"], data["rules"]) == ("It asks again.", ["THUDM/slime#1"], ["BUDGET"])
    assert say("replay", "corpus/slime-1.json").status == CONFORMS
    assert say(*promote, "--name", "slime-1").err == "rolloutcheck: there is an entry corpus/slime-1.json already\n"
    assert "is no name for an entry" in say(*promote, "--name", "Slime 1").err
    assert "no folder nowhere; run it in a checkout" in say(*promote, "--name", "x", "--corpus", "nowhere").err


def test_what_does_not_put_the_rule_to_the_test_is_not_promoted(say: Callable[..., Said]) -> None:
    """As where the right client has nothing left to ask."""
    Path("corpus").mkdir()
    Path("f.json").write_text('{"rule": "BUDGET", "schedule": {"prompt": "a", "budget": 0, "script": [65]}}')
    said = say("promote", "f.json", "--name", "x", "--fault", "It.", "--report", "a/b#1", "--corpus", "corpus")
    reason = "BUDGET is not broken, and is no longer put to the test"
    assert said == (USAGE, "", f"rolloutcheck: f.json is no test of BUDGET: on the reference, {reason}\n")


def test_what_is_in_the_corpus_is_not_promoted_again(say: Callable[..., Said]) -> None:
    Path("corpus").mkdir()
    entry = ROOT / "tests/regressions/corpus/slime-2260-minimal.json"
    said = say("promote", entry, "--name", "x", "--fault", "It.", "--report", "a/b#1", "--corpus", "corpus")
    assert said == (USAGE, "", "rolloutcheck: the entry slime-2260-minimal is the same schedule\n")


def test_a_corpus_that_cannot_be_written(
    say: Callable[..., Said], other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("corpus").mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    said = say("promote", other, "--name", "x", "--fault", "It.", "--report", "a/b#1", "--corpus", "corpus")
    assert said == (USAGE, "", "rolloutcheck: cannot write corpus/x.json: No space left on device\n")
