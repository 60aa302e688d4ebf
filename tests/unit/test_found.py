"""What an adversary found in `bisect`, `scan` and `promote`: each of these was wrong once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import revisions
from harness.targets.checkout import UsageError
from harness.verdict import CANNOT, CONFORMS, FAULT, USAGE
from tests.unit.checkouts import FILES, git, write
from tests.unit.test_history_commands import (  # noqa: F401 - fixtures
    BROKEN,
    RIGHT,
    ROLLOUT,
    Said,
    failure,
    other,
    repo,
    say,
)

LINE = 'sampling_params["max_new_tokens"] -= sample.response_length\n'
CASE = 'args.rollout_max_response_len == 0 and len(sample.tokens) == 2 and sample.prompt == "a"'
"""The smallest schedule on which BROKEN breaks BUDGET."""
HANGS = RIGHT.replace(LINE, f"{LINE}            if {CASE}:\n                import time; time.sleep(1000)\n")
LAZY = RIGHT.replace(
    LINE,
    f"{LINE}            if {CASE}:\n                from slime.rollout.lazy import RIGHT\n"
    "                if not RIGHT:\n                    sampling_params['max_new_tokens'] = 5\n",
)
NAMESPACE = RIGHT.replace(
    "class GenerateState",
    "try:\n            from slime.knobs.one import SUB\n        except ImportError:\n            SUB = 1\n\n\n"
    "        class GenerateState",
    1,
).replace(LINE, 'sampling_params["max_new_tokens"] -= sample.response_length * SUB\n')


def history(root: Path, *changes: dict[str, str]) -> Path:
    for number, change in enumerate(changes):
        write(root, change)
        if number == 0:
            git(root, "init", "--quiet", "-b", "main")
        git(root, "add", "-A", ".")
        git(root, "commit", "--quiet", "-m", f"c{number}", GIT_COMMITTER_DATE=f"2026-01-{number + 1:02}T00:00:00Z")
        git(root, "tag", f"v{number}")
    return root


def timeline(say: Callable[..., Said], root: Path, cache: Path, *more: object) -> list[tuple[str, str]]:  # noqa: F811
    said = say("scan", "--path", root, "--rule", "BUDGET", "--mode", "plain", "--cache", cache, "--json", "-", *more)
    tags = {git(root, "rev-parse", "--short=9", tag): tag for tag in git(root, "tag").split()}
    return [(tags[one["from"]], one["verdict"]) for one in json.loads(said.out)["rules"]["BUDGET"]["plain"]]


def test_a_namespace_package_that_appears_makes_another_client(
    say: Callable[..., Said],  # noqa: F811
    tmp_path: Path,
) -> None:
    root = history(tmp_path / "slime", {**FILES, ROLLOUT: NAMESPACE}, {"slime/knobs/one.py": "SUB = 0\n"})
    assert timeline(say, root, tmp_path / "cache", "--jobs", "1") == [("v0", "valid"), ("v1", "invalid")]


def test_a_module_that_only_a_replay_imports_makes_another_client(
    say: Callable[..., Said],  # noqa: F811
    tmp_path: Path,
) -> None:
    lazy = "slime/rollout/lazy.py"
    changes = [{ROLLOUT: LAZY, lazy: "RIGHT = True\n"}, {lazy: "RIGHT = False\n"}, {lazy: "RIGHT = True\n"}]
    root = history(tmp_path / "slime", {**FILES, ROLLOUT: BROKEN}, *changes)
    found = timeline(say, root, tmp_path / "cache", "--jobs", "1")
    assert found == [("v0", "invalid"), ("v1", "valid"), ("v2", "invalid"), ("v3", "valid")]


def test_a_client_that_hangs_on_a_known_counterexample_is_not_called_valid(
    say: Callable[..., Said],  # noqa: F811
    tmp_path: Path,
) -> None:
    root = history(tmp_path / "slime", {**FILES, ROLLOUT: BROKEN}, {ROLLOUT: HANGS})
    found = timeline(say, root, tmp_path / "cache", "--jobs", "1", "--limit", "2")
    assert found == [("v0", "invalid"), ("v1", "unknown")]


def test_bisect_draws_no_boundary_where_the_good_side_cannot_run_the_counterexample(
    say: Callable[..., Said],  # noqa: F811
    tmp_path: Path,
) -> None:
    root = history(tmp_path / "slime", {**FILES, ROLLOUT: HANGS}, {ROLLOUT: BROKEN})
    ends = ("--old", "v0", "--new", "v1", "--profile", "quick", "--limit", "2", "--cache", tmp_path / "cache")
    assert say("bisect", "--path", root, "--rule", "BUDGET", *ends).status != CONFORMS


SURROGATE = "raise OSError('\\ud800 \\x1b]0;title\\x07 \\u202e')\n"


def test_what_an_import_says_can_be_shown_and_written(say: Callable[..., Said], tmp_path: Path) -> None:  # noqa: F811
    root = history(tmp_path / "slime", FILES, {ROLLOUT: SURROGATE})
    said = say("scan", "--path", root, "--rule", "BUDGET", "--cache", tmp_path / "cache", "--json", "found.json")
    assert said.status == CONFORMS and "\x1b" not in said.out and "\u202e" not in said.out


def test_a_path_that_is_no_utf_8(say: Callable[..., Said], tmp_path: Path) -> None:  # noqa: F811
    strange = {os.fsdecode(b"slime/caf\xe9.txt"): "", ROLLOUT: "raise OSError('no disk')\n"}
    root = history(tmp_path / "slime", FILES, strange)
    assert say("scan", "--path", root, "--rule", "BUDGET", "--cache", tmp_path / "cache").status == CONFORMS


@pytest.mark.parametrize("more", [("--old", "^v0"), ("--rule", "MODE-EQ"), ("--cache", "x" * 300)])
def test_what_bisect_is_wrongly_asked_is_no_fault_of_its_own(
    more: tuple[str, ...],
    say: Callable[..., Said],  # noqa: F811
    repo: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    ends = ("--old", "v0", "--new", "v3", "--rule", "BUDGET", "--profile", "quick", "--cache", tmp_path / "cache")
    assert say("bisect", "--path", repo, *ends, *more).status != FAULT


def test_a_promotion_that_fails_leaves_no_entry(say: Callable[..., Said], failure: Path) -> None:  # noqa: F811
    Path("corpus").mkdir()
    said = say("promote", failure, "--name", "x", "--fault", "\udcff", "--report", "a/b#1", "--corpus", "corpus")
    assert said.status != FAULT
    assert not list(Path("corpus").iterdir())


def test_a_damaged_cache_costs_nothing_but_time(say: Callable[..., Said], repo: Path, tmp_path: Path) -> None:  # noqa: F811
    command = ("scan", "--path", repo, "--rule", "BUDGET", "--rev", "v0", "--cache", tmp_path / "cache")
    assert say(*command).status == CONFORMS
    (file,) = (tmp_path / "cache").iterdir()
    first = json.loads(file.read_text().splitlines()[0])
    for line in (json.dumps({**first, "rows": []}), "[" * 100_000, json.dumps({**first, "modules": [5]})):
        file.write_text(line + "\n")
        assert say(*command).status == CONFORMS


def test_level_both_tells_clients_apart_by_what_either_level_imports(
    say: Callable[..., Said],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The second data source does not import for another reason: the reason at v1 must be its own."""
    source = "slime/rollout/data_source.py"
    root = history(tmp_path / "slime", {**FILES, source: "raise OSError('one')\n"}, {source: "raise OSError('two')\n"})
    said = say(
        "scan", "--path", root, "--rule", "BUDGET", "--mode", "plain", "--level", "both", "--jobs", "1",
        "--cache", tmp_path / "cache", "--json", "-",
    )  # fmt: skip
    reasons = [one["reason"] for one in json.loads(said.out)["rules"]["BUDGET"]["plain"]]
    assert len(reasons) == 2 and "one" in reasons[0] and "two" in reasons[1]


def test_what_a_client_reads_at_run_time_is_part_of_it(say: Callable[..., Said], tmp_path: Path) -> None:  # noqa: F811
    reads = RIGHT.replace(LINE, f"import os\n            if not os.path.exists(__file__ + '.off'): {LINE}")
    changes = [{**FILES, ROLLOUT: reads}, {f"{ROLLOUT}.off": ""}]
    found = timeline(say, history(tmp_path / "slime", *changes), tmp_path / "cache", "--jobs", "1")
    assert found == [("v0", "valid"), ("v1", "invalid")]


def test_a_day_cuts_the_history_where_it_begins_and_not_in_its_middle(tmp_path: Path) -> None:
    root = tmp_path / "slime"
    write(root, FILES)
    git(root, "init", "--quiet", "-b", "main")
    for number, day in enumerate(("2026-01-01", "2026-03-01", "2026-02-01", "2026-03-02")):
        write(root, {"slime/a.py": str(number)})
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", str(number), GIT_COMMITTER_DATE=f"{day}T00:00:00Z")
    found = revisions.touching(root, revisions.find(root, "HEAD"), "2026-03-01")
    assert [revision.subject for revision in found] == ["1", "2", "3"]
    assert revisions.find(root, ":/2").subject == "2"
    with pytest.raises(UsageError, match="not a single revision"):
        revisions.find(root, "^HEAD")


def test_two_forms_of_the_report_do_not_share_a_place(say: Callable[..., Said]) -> None:  # noqa: F811
    same = say("check", "--json", "r", "--html", "r")
    assert same == (USAGE, "", "rolloutcheck: two forms of the report cannot both go to r\n")
    both = say("check", "--json", "-", "--junit", "-")
    assert both.err == "rolloutcheck: two forms of the report cannot both go to standard output\n"


@pytest.mark.parametrize("option", ["--cache", "--json", "--path"])
def test_a_name_that_is_too_long_is_one_line(option: str, say: Callable[..., Said], repo: Path) -> None:  # noqa: F811
    said = say("scan", "--path", repo, option, "x" * 300)
    assert said.status == USAGE and "File name too long" in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "report", "said"),
    [
        ("it asks", "a/b#1", "the fault is told in a sentence, from a capital to a full stop"),
        ("", "a/b#1", "the fault is told in a sentence, from a capital to a full stop"),
        ("It asks.", "somewhere", "'somewhere' is no report: OWNER/REPOSITORY#NUMBER or OWNER/REPOSITORY@COMMIT"),
    ],
)
def test_what_is_promoted_can_be_read_by_others(
    fault: str,
    report: str,
    said: str,
    say: Callable[..., Said],  # noqa: F811
    other: Path,  # noqa: F811
) -> None:
    Path("corpus").mkdir()
    promote = ("promote", other, "--name", "x", "--corpus", "corpus")
    assert say(*promote, "--fault", fault, "--report", report).err == f"rolloutcheck: {said}\n"
    assert not list(Path("corpus").iterdir())
    Path("corpus/damaged.json").write_text("[" * 100_000)
    assert "damaged corpus file damaged.json" in say(*promote, "--fault", "It asks.", "--report", "a/b#1").err


def test_a_cache_that_has_no_end_is_not_read(say: Callable[..., Said], repo: Path, tmp_path: Path) -> None:  # noqa: F811
    command = ("scan", "--path", repo, "--rule", "BUDGET", "--rev", "v0", "--cache", tmp_path / "cache")
    assert say(*command).status == CONFORMS
    (file,) = (tmp_path / "cache").iterdir()
    file.unlink()
    file.symlink_to("/dev/zero")
    assert say(*command).status == CONFORMS


def test_a_clone_without_its_files_cannot_be_judged(say: Callable[..., Said], repo: Path, tmp_path: Path) -> None:  # noqa: F811
    partial = tmp_path / "partial"
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:none", f"file://{repo}", str(partial))
    said = say("scan", "--path", partial, "--rule", "BUDGET", "--rev", "v0", "--cache", tmp_path / "cache")
    assert said.status == CANNOT and "lacks the content" in said.out
