"""The history of a repository, as git tells it, and what of a tree a client is made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import revisions
from harness.judged import Said, judge
from harness.revisions import Revision
from harness.targets import CannotJudge
from harness.targets.checkout import UsageError
from tests.unit.checkouts import git
from tests.unit.test_judged import OPTIONS

Commit = Callable[..., str]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "a repository"  # with a space in its path
    root.mkdir()
    git(root, "init", "--quiet", "-b", "main")
    return root


@pytest.fixture
def commit(repo: Path) -> Commit:
    """Commits files, a day after the commit before; gives the full name."""
    day = 0

    def make(message: str = "change", **files: str) -> str:
        nonlocal day
        day += 1
        when = f"2026-01-{day:02}T12:00:00Z"
        for name, text in files.items():
            path = repo / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git(repo, "add", ".")
        git(repo, "commit", "--quiet", "--allow-empty", "-m", message, GIT_COMMITTER_DATE=when)
        return git(repo, "rev-parse", "HEAD").strip()

    return make


def names(found: list[Revision]) -> list[str]:
    return [revision.commit for revision in found]


def wrong(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    (line,) = str(caught.value).splitlines()
    return line


def test_a_revision_says_when_it_was_committed_and_why(repo: Path, commit: Commit) -> None:
    full = commit("a subject\twith a tab\n\nand a body", slime__a="1")
    found = revisions.find(repo, "HEAD")
    assert found == Revision(full, full[:9], "2026-01-01", "a subject?with a tab")
    assert str(found) == f"{full[:9]} 2026-01-01 a subject?with a tab"


def test_what_is_no_repository(tmp_path: Path) -> None:
    empty, nowhere = tmp_path / "empty", tmp_path / "nowhere"
    empty.mkdir()
    assert wrong(UsageError, lambda: revisions.repository(nowhere)) == f"not a directory: {nowhere}"
    assert wrong(UsageError, lambda: revisions.repository(empty)).startswith("not a git repository")


def test_a_repository_without_a_commit(repo: Path) -> None:
    where = revisions.repository(repo)
    assert wrong(UsageError, lambda: revisions.find(where, "HEAD")) == f"unknown revision 'HEAD' in {repo}"


def test_the_line_leads_along_first_parents(repo: Path, commit: Commit) -> None:
    first, second = commit(slime__a="1"), commit(slime__a="2")
    git(repo, "checkout", "--quiet", "-b", "side")
    side = commit(slime__b="1")
    git(repo, "checkout", "--quiet", "main")
    third = commit(slime__c="1")
    git(repo, "merge", "--quiet", "--no-ff", "-m", "merge", "side")
    merge = git(repo, "rev-parse", "HEAD").strip()

    def between(old: str, new: str) -> list[str]:
        return names(revisions.between(repo, revisions.find(repo, old), revisions.find(repo, new)))

    assert between(first, merge) == [first, second, third, merge]
    assert between(second, side) == [second, side]
    assert "came to --new" in wrong(UsageError, lambda: between(side, merge))
    assert "the same revision" in wrong(UsageError, lambda: between(first, first))
    assert "exchange them" in wrong(UsageError, lambda: between(third, first))
    assert "is not an ancestor" in wrong(UsageError, lambda: between(side, third))


def test_what_touches_the_packages(repo: Path, commit: Commit) -> None:
    first, _, third = commit(slime__a="1"), commit(other="2"), commit(slime__a="3")
    fourth = commit(slime__b="4")
    head = revisions.find(repo, "HEAD")
    assert names(revisions.touching(repo, head, None)) == [first, third, fourth]
    assert names(revisions.touching(repo, head, "2026-01-03")) == [third, fourth]
    assert names(revisions.touching(repo, head, first)) == [first, third, fourth]
    assert names(revisions.touching(repo, head, fourth)) == [fourth]
    assert names(revisions.touching(repo, head, "2027-01-01")) == []
    assert "unknown revision 'yesterday'" in wrong(UsageError, lambda: revisions.touching(repo, head, "yesterday"))


def test_a_shallow_clone_says_how_to_get_the_rest(repo: Path, commit: Commit, tmp_path: Path) -> None:
    first, _ = commit(slime__a="1"), commit(slime__a="2")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repo}", str(shallow))
    assert not revisions.is_shallow(repo) and revisions.is_shallow(shallow)
    assert wrong(UsageError, lambda: revisions.find(shallow, first)).endswith(
        "; this clone is shallow: `git fetch --unshallow` brings the rest"
    )


def test_a_history_that_cannot_be_read(repo: Path, commit: Commit) -> None:
    first, second = commit(slime__a="1"), commit(slime__a="2")
    old, new = revisions.find(repo, first), revisions.find(repo, second)
    os.remove(repo / ".git/objects" / first[:2] / first[2:])
    assert wrong(CannotJudge, lambda: revisions.touching(repo, new, None)).startswith("git cannot read the history of")
    assert wrong(UsageError, lambda: revisions.between(repo, old, new)).startswith(f"--old {old.short} is not an")


def test_a_submodule_is_said_to_be_one(repo: Path, commit: Commit, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    git(tmp_path, "init", "--quiet", str(inner))
    git(inner, "commit", "--quiet", "--allow-empty", "-m", "inner")
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "slime")
    commit()
    head = revisions.find(repo, "HEAD")
    assert revisions.tree(repo, head) == {"": head.commit}
    said = judge(repo, OPTIONS, str(tmp_path), head, ()).rows["BUDGET", "plain"]
    assert said == Said("unknown", "slime is a submodule: its files are elsewhere")


@pytest.mark.parametrize(("change", "dirty"), [(None, False), ("slime/a", True), ("other", False)])
def test_a_working_tree_that_differs(repo: Path, commit: Commit, change: str | None, dirty: bool) -> None:
    commit(slime__a="1")
    if change:
        (repo / change).write_text("changed")
    assert revisions.is_dirty(repo) is dirty


def test_what_has_no_working_tree_is_not_dirty(repo: Path, commit: Commit, tmp_path: Path) -> None:
    commit(other="1")
    assert not revisions.is_dirty(repo)  # there is no package that could differ
    bare = tmp_path / "bare"
    git(tmp_path, "clone", "--quiet", "--bare", str(repo), str(bare))
    assert not revisions.is_dirty(bare)


def test_a_client_is_the_files_of_its_modules(repo: Path, commit: Commit) -> None:
    def tree(**files: str) -> revisions.Tree:
        commit(**files)
        return revisions.tree(repo, revisions.find(repo, "HEAD"))

    first = tree(**{"slime__a.py": "1", "slime__b.py": "1"})
    other = tree(**{"slime__b.py": "2"})
    added = tree(**{"slime__c__d.py": "1", "elsewhere.py": "1"})
    assert set(added) == {"slime", "slime/a", "slime/b", "slime/c", "slime/c/d"}
    of_a, of_more = ("slime.a",), ("slime.a", "slime.c")  # a folder alone is a package
    assert revisions.client(first, of_a) == revisions.client(other, of_a) == revisions.client(added, of_a)
    assert revisions.client(first, of_more) == revisions.client(other, of_more) != revisions.client(added, of_more)
    everything = [revisions.client(tree, None) for tree in (first, other, added)]
    assert len(set(everything)) == 3
