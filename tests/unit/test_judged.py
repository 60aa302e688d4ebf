"""One revision judged, what is stored run on another, and what is kept for the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import judged as module
from harness import known as known_module
from harness import revisions
from harness.again import CANNOT_RUN, FIXED, STILL_FAILS, Answer
from harness.check import Report
from harness.checkers import Finding
from harness.history import MODES, PLAIN, STREAM
from harness.isolation import Ready
from harness.judged import ABSENT, Broken, Judged, Said, judge, only_here, rows, still_broken
from harness.known import Known
from harness.options import UNTIL_BROKEN, Options
from harness.revisions import Revision
from harness.rollouts import RolloutHistory
from harness.schedule import Attempt, Schedule
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Result
from harness.work import ROLLOUT, SAMPLE
from tests.unit.checkouts import FILES, git, write

OPTIONS = Options(TargetSpec("slime"), modes=(PLAIN, STREAM), rules=("BUDGET",), profile="quick", lenient=True)
BUDGET = ("BUDGET", PLAIN)
CLIENT = "slime/rollout/sglang_rollout.py"
SUBTRACTION = 'sampling_params["max_new_tokens"] -= sample.response_length\n'
ABORTED = Schedule(budget=2, attempts=(Attempt("abort", after=1),))
HERE = Path()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three revisions: right, broken, and one that does not import."""
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "--quiet")
    for change in (FILES, {CLIENT: FILES[CLIENT].replace(SUBTRACTION, "pass\n")}, {CLIENT: "raise OSError('no')\n"}):
        write(root, change)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", "change")
    return root


@pytest.fixture(scope="module")
def line(repo: Path) -> list[Revision]:
    return revisions.touching(repo, revisions.find(repo, "HEAD"), None)


def test_a_revision_is_checked_in_the_modes_it_has(repo: Path, line: list[Revision], tmp_path: Path) -> None:
    right, broken, neither = (judge(repo, OPTIONS, str(tmp_path), revision, ()) for revision in line)
    assert right.rows[BUDGET] == Said(VALID) and right.complete
    assert right.rows["BUDGET", STREAM] == Said(ABSENT, "slime has no stream mode")
    assert broken.rows[BUDGET].verdict == INVALID
    found = broken.rows[BUDGET].broken
    assert found is not None and found.lines[0] == f"BUDGET violated   slime@{line[1].short}   plain   inproc"
    assert set(neither.rows.values()) == {Said(UNKNOWN, "importing slime.rollout.sglang_rollout failed: OSError: no")}
    assert right.modules == broken.modules and neither.modules is None
    assert {"slime.rollout.sglang_rollout", "slime.rollout.sglang_streaming_rollout"} <= set(right.modules or ())
    assert not list(tmp_path.iterdir())
    fault = [(BUDGET, found.work)]
    still, fixed, cannot = (still_broken(repo, OPTIONS, str(tmp_path), line[i], fault).said[0] for i in (1, 0, 2))
    assert still.verdict == INVALID and still.broken is not None and still.broken.lines == found.lines
    assert fixed.verdict == VALID and fixed.holds[0] == f"BUDGET holds   slime@{line[0].short}   plain   inproc"
    assert cannot.verdict == UNKNOWN and cannot.reason == "importing slime.rollout.sglang_rollout failed: OSError: no"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, repo: Path) -> Any:
    """Lets a check of a revision come out like this."""

    def outcome(
        *results: Result, modes: tuple[str, ...] = (PLAIN, STREAM), absent: dict[str, str] | None = None
    ) -> Any:
        def check(options: Options) -> Report:
            return Report(Ready("slime", modes, {STREAM: absent} if absent else {}, ()), options, results, 1.0)

        monkeypatch.setattr(module, "check", check)

    return outcome


def result(verdict: str, mode: str = PLAIN, rule: str = "BUDGET", **more: Any) -> Result:
    return Result(rule, "MUST", mode, "inproc", verdict, 3, "why" if verdict != VALID else "", **more)


def test_the_worst_verdict_counts_and_a_faulty_engine_does_not(repo: Path, line: list[Revision], checked: Any) -> None:
    checked(result(VALID), result(UNKNOWN, on="rollout"), result(INVALID, faulty_engine=True), result(VALID, STREAM))
    found = judge(repo, OPTIONS, "/tmp", line[0], ())
    assert found.rows == {BUDGET: Said(UNKNOWN, "why"), ("BUDGET", STREAM): Said(VALID)}


def test_a_row_without_a_result_says_why(repo: Path, line: list[Revision], checked: Any) -> None:
    checked(result(VALID), modes=(PLAIN,), absent=f"no stream at {line[0].short}")
    assert judge(repo, OPTIONS, "/tmp", line[0], ()).rows["BUDGET", STREAM] == Said(ABSENT, "no stream")
    compares = replace(OPTIONS, rules=("MODE-EQ",))
    checked(modes=(STREAM,))
    assert judge(repo, compares, "/tmp", line[0], ()).rows == {
        ("MODE-EQ", STREAM): Said(ABSENT, "it has no other mode to compare with")
    }


def test_rows_are_the_rules_in_the_modes_that_they_have() -> None:
    assert rows(replace(OPTIONS, rules=("MODE-EQ", "BUDGET"))) == [
        ("BUDGET", PLAIN),
        ("BUDGET", STREAM),
        ("MODE-EQ", STREAM),
    ]
    assert rows(replace(OPTIONS, modes=None)) == []


@pytest.mark.parametrize(
    ("answers", "verdict", "reason"),
    [
        ([STILL_FAILS, STILL_FAILS], INVALID, "m"),
        ([STILL_FAILS, FIXED], UNKNOWN, f"flaky: [{ABORTED}] fails, and in a fresh process it does not"),
        ([STILL_FAILS, CANNOT_RUN], UNKNOWN, f"flaky: [{ABORTED}] fails, and in a fresh process it does not"),
        ([CANNOT_RUN], ABSENT, "m"),
        (["hang"], UNKNOWN, f"on [{ABORTED}]: m"),
        ([STILL_FAILS, "hang"], UNKNOWN, f"on [{ABORTED}]: m"),
        ([FIXED], VALID, ""),
    ],
)
def test_what_fails_is_run_again(
    answers: list[str], verdict: str, reason: str, repo: Path, line: list[Revision], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Iterator[str] = iter(answers)

    def run(*given: object, asked: Callable[[object], None], **more: object) -> list[Answer]:
        asked(("slime.x",))
        said = next(told)
        return [Answer(HERE, "slime", CANNOT_RUN if said == "hang" else said, "m", ("screen",), said == "hang")]

    monkeypatch.setattr(module.again, "run", run)
    (said,) = still_broken(repo, OPTIONS, "/tmp", line[0], [(BUDGET, ABORTED)]).said
    assert (said.verdict, said.reason) == (verdict, reason)
    assert next(told, None) is None
    assert (said.broken is not None) is (verdict == INVALID)


# against another revision


def test_what_breaks_one_revision_and_not_another(repo: Path, line: list[Revision], tmp_path: Path) -> None:
    right, broken = line[:2]
    found = only_here(repo, OPTIONS, str(tmp_path), broken, right, BUDGET, (ABORTED,))
    assert found is not None and found.lines[0] == f"BUDGET violated   slime@{broken.short}   plain   inproc"
    assert found.work != ABORTED  # it is shrunk
    assert only_here(repo, OPTIONS, str(tmp_path), right, broken, BUDGET, (ABORTED,)) is None
    assert not list(tmp_path.iterdir())


class Made:
    """A search on a client that breaks the rule on some of what is run, ``times`` times."""

    def __init__(self, breaks: Callable[[Any], bool], times: int = 1_000_000) -> None:
        self.breaks_on, self.left = breaks, times
        self.worker = SimpleNamespace(ready=Ready("client", MODES, {}, ()))

    def breaks(self, key: object, wanted: Any) -> Finding | None:
        if not self.breaks_on(wanted) or not self.left:
            return None
        self.left -= 1
        return Finding(None, "m")

    def history(self, wanted: Any, mode: str) -> RolloutHistory:
        return RolloutHistory(wanted, mode, 0, {}, ())


@pytest.mark.parametrize(("times", "found"), [(1_000_000, True), (1, False)])
def test_whole_rollouts_are_searched_too(times: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what fails once only is no difference."""
    made = iter([Made(lambda wanted: bool(wanted.steps), times), Made(lambda wanted: False)])
    monkeypatch.setattr(module, "_search", lambda *_: nullcontext(next(made)))
    monkeypatch.setattr(module, "shrink", lambda wanted, keeps: wanted)
    monkeypatch.setattr(module.corpus, "load", lambda: ())
    revision = Revision("1" * 40, "111111111", "2026-01-01", "s")
    asked = replace(OPTIONS, levels=(ROLLOUT,))
    shown = only_here(HERE, asked, "/tmp", revision, revision, BUDGET, ())
    assert (shown is not None) is found


def test_a_loop_that_is_not_there_says_nothing_of_single_samples(
    repo: Path, line: list[Revision], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(options: Options) -> Report:
        if options.levels == (ROLLOUT,):
            raise CannotJudge("slime has no loop", not_applicable=True)
        return Report(Ready("slime", (PLAIN, STREAM), {}, ()), options, (result(VALID), result(VALID, STREAM)), 1.0)

    monkeypatch.setattr(module, "check", check)
    both = replace(OPTIONS, levels=(SAMPLE, ROLLOUT), rules=("BUDGET", "GROUP"))
    found = judge(repo, both, "/tmp", line[0], ())
    assert found.rows[BUDGET] == Said(VALID)
    assert found.rows["GROUP", PLAIN] == Said(ABSENT, "slime has no loop")
    assert found.modules is None


def test_a_revision_that_hangs_on_import(tmp_path: Path) -> None:
    write(tmp_path, FILES | {CLIENT: "while True: pass\n"})
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "hangs")
    head = revisions.find(tmp_path, "HEAD")
    said = judge(tmp_path, replace(OPTIONS, run_limit_s=0.4), str(tmp_path), head, ()).rows[BUDGET]
    assert said == Said(UNKNOWN, "importing slime does not end within 1 s")


def test_a_revision_without_the_package(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "nothing")
    head = revisions.find(tmp_path, "HEAD")
    assert judge(tmp_path, OPTIONS, str(tmp_path), head, ()).rows[BUDGET] == Said(UNKNOWN, "no slime package")


# what is kept

TREE = {"slime/a": "1", "slime/b": "1"}
ELSEWHERE = {"slime/a": "1", "slime/b": "2"}
FOUND = Judged(
    {BUDGET: Said(INVALID, "m", Broken(ABORTED, ("head", "call"))), ("BUDGET", STREAM): Said(VALID)}, ("slime.a",)
)


def test_what_is_known_of_a_client_is_known_wherever_it_is(tmp_path: Path) -> None:
    known = Known(tmp_path / "new folder", OPTIONS, "scan")
    assert known.judged(TREE) is None
    known.add(TREE, FOUND)
    assert known.judged(TREE) is known.judged(ELSEWHERE) is FOUND
    assert known.judged({"slime/a": "2"}) is None
    known.add_replay(TREE, FOUND, BUDGET, ABORTED, Said(VALID))
    again = Known(tmp_path / "new folder", OPTIONS, "scan")
    assert again.judged(ELSEWHERE) == FOUND
    assert again.replay(ELSEWHERE, FOUND, BUDGET, ABORTED) == Said(VALID)
    assert again.replay(TREE, FOUND, ("BUDGET", STREAM), ABORTED) is None
    again.forget()
    assert Known(tmp_path / "new folder", OPTIONS, "scan").judged(TREE) is None


def test_what_could_not_be_imported_is_known_by_all_its_files() -> None:
    known = Known(None, OPTIONS, "scan")
    known.add(TREE, Judged({BUDGET: Said(UNKNOWN, "m")}))
    assert known.judged(TREE) is not None and known.judged(ELSEWHERE) is None
    known.add(TREE, FOUND)
    known.forget()  # there is no file


def test_a_client_that_asks_for_more_is_known_by_more(tmp_path: Path) -> None:
    known = Known(tmp_path, OPTIONS, "scan")
    known.add(TREE, FOUND)
    assert not known.widen(TREE, FOUND, None) and not known.widen(TREE, FOUND, ("slime.a",))
    assert known.widen(TREE, FOUND, ("slime.b",))
    for one in (known, Known(tmp_path, OPTIONS, "scan")):
        assert one.judged(TREE) == replace(FOUND, modules=("slime.a", "slime.b"))
        assert one.judged(ELSEWHERE) is None


def test_other_work_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(options: Options) -> bool:
        return Known(tmp_path, options, "scan").judged(TREE) is not None

    Known(tmp_path, OPTIONS, "scan").add(TREE, FOUND)
    assert kept(OPTIONS) and kept(replace(OPTIONS, jobs=7, first=(("BUDGET", ABORTED),)))
    assert kept(replace(OPTIONS, target=TargetSpec("slime", "/elsewhere")))
    for other in ({"seed": 1}, {"profile": "ci"}, {"rules": ()}, {"modes": (PLAIN,)}, {"depth": UNTIL_BROKEN}):
        assert not kept(replace(OPTIONS, **other))  # type: ignore[arg-type]
    monkeypatch.setattr(known_module, "digest", lambda: "another suite")
    assert not kept(OPTIONS)


def test_a_file_that_is_damaged_costs_only_what_is_damaged(tmp_path: Path) -> None:
    known = Known(tmp_path, OPTIONS, "scan")
    known.add(TREE, FOUND)
    assert known.file is not None
    whole = known.file.read_text()
    fewer = json.dumps({**json.loads(whole), "rows": []})
    strange = json.dumps({**json.loads(whole), "modules": [5]})
    bad = ["[]", "nonsense", "{}", fewer, strange, "[" * 100_000]
    known.file.write_text("\n".join(bad) + "\n" + whole + whole[:40])
    assert Known(tmp_path, OPTIONS, "scan").judged(TREE) == FOUND
    known.file.write_bytes(b"\xff\xfe")
    assert Known(tmp_path, OPTIONS, "scan").judged(TREE) is None


def test_a_tokenizer_is_known_by_its_files(tmp_path: Path) -> None:
    files = tmp_path / "tokenizer"
    files.mkdir()
    (files / "a.json").write_text("1")
    (files / "folder").mkdir()
    asked = replace(OPTIONS, tokenizer=str(files))
    Known(tmp_path, asked, "scan").add(TREE, FOUND)
    assert Known(tmp_path, asked, "scan").judged(TREE) == FOUND
    (files / "a.json").write_text("2")
    assert Known(tmp_path, asked, "scan").judged(TREE) is None


def test_what_is_unknown_is_asked_again_by_the_next_run(tmp_path: Path) -> None:
    doubt = replace(FOUND, rows={**FOUND.rows, BUDGET: Said(UNKNOWN, "it hangs")})
    known = Known(tmp_path, OPTIONS, "scan")
    known.add(TREE, doubt)
    known.add_replay(TREE, doubt, BUDGET, ABORTED, Said(UNKNOWN, "it hangs"))
    assert known.judged(TREE) is doubt and known.replay(TREE, doubt, BUDGET, ABORTED) is not None
    again = Known(tmp_path, OPTIONS, "scan")
    assert again.judged(TREE) is None and again.replay(TREE, doubt, BUDGET, ABORTED) is None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    known = Known(tmp_path / "file", OPTIONS, "scan")
    known.add(TREE, FOUND)
    assert known.judged(TREE) is FOUND and known.file is None


def test_a_counterexample_is_named_after_the_revision_it_is_shown_for() -> None:
    shown = Broken(ABORTED, ("BUDGET violated   slime@111111111   plain", "  slime@111111111"))
    revision = Revision("2" * 40, "222222222", "2026-01-01", "s")
    assert shown.named(revision).lines == ("BUDGET violated   slime@222222222   plain", "  slime@111111111")


def test_a_target_that_does_not_load_is_unknown(
    repo: Path, line: list[Revision], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(options: Options) -> Report:
        raise CannotJudge(f"slime@{line[0].short} has no such thing at {line[0].short}", not_applicable=True)

    monkeypatch.setattr(module, "check", check)
    assert judge(repo, OPTIONS, "/tmp", line[0], ()).rows[BUDGET] == Said(ABSENT, "slime has no such thing")
