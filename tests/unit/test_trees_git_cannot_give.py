"""What git or the tree refuses is one line that says whose affair it is, and no file is written for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.targets import CannotJudge, checkout
from harness.targets.checkout import checkout as tree_of
from tests.unit.checkouts import FILES, git, write


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    write(root, FILES)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def refusal(where: Path, rev: str | None = "HEAD") -> str:
    with pytest.raises(CannotJudge) as caught, tree_of(where, rev):
        pass
    (line,) = str(caught.value).splitlines()
    return line


def test_a_repository_that_is_damaged(repo: Path) -> None:
    (repo / ".git/config").write_text("[nonsense")
    assert refusal(repo).startswith(f"git cannot read {repo}: bad config")


def test_a_git_that_does_not_come_back(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "bin" / "git"
    write(slow.parent, {slow.name: "#!/bin/sh\nexec sleep 60\n"})
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(checkout, "GIT_TIMEOUT", 0.2)
    assert refusal(repo) == "git rev-parse took more than 0.2 s"


def test_a_git_that_fails_without_a_word(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "bin" / "git"
    write(mute.parent, {mute.name: "#!/bin/sh\nexit 7\n"})
    mute.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mute.parent}{os.pathsep}{os.environ['PATH']}")
    assert refusal(repo) == f"git cannot read {repo}: git rev-parse failed with status 7"


def test_a_bare_repository_that_git_is_told_to_refuse(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "--quiet", "--bare", str(repo), str(bare))
    home = tmp_path / "home"
    write(home, {".gitconfig": "[safe]\n    bareRepository = explicit\n"})
    monkeypatch.setenv("HOME", str(home))
    assert refusal(bare) == f"git refuses the bare repository {bare} (safe.bareRepository)"


def test_a_clone_without_the_contents(repo: Path) -> None:
    """As a partial clone: nothing is fetched while a target is checked."""
    name = git(repo, "rev-parse", "HEAD:slime/utils/misc.py")
    (repo / ".git/objects" / name[:2] / name[2:]).unlink()
    assert refusal(repo) == "the repository lacks the content of slime/utils/misc.py"


def test_a_path_that_leads_out_of_the_tree(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git makes no such tree, but one can be made by hand."""
    real = checkout.listing

    def altered(*arguments: object) -> list[checkout.Blob]:
        first, *rest = real(*arguments)  # type: ignore[arg-type]
        return [checkout.Blob(first.oid, "slime/../../stray.py"), *rest]

    monkeypatch.setattr(checkout, "listing", altered)
    assert refusal(repo) == "the tree holds an unsafe path: 'slime/../../stray.py'"
    assert not list(tmp_path.rglob("stray.py"))


def test_a_file_that_is_gone_makes_a_tree_dirty(repo: Path) -> None:
    (repo / "slime/utils/misc.py").unlink()
    with tree_of(repo) as found:
        assert found.revision.endswith("+dirty")


def test_a_package_that_is_not_under_version_control(repo: Path) -> None:
    git(repo, "rm", "--quiet", "--cached", "-r", "slime")
    write(repo, {"README": "the package is ignored"})
    git(repo, "add", "README")
    git(repo, "commit", "--quiet", "-m", "second")
    with tree_of(repo) as found:
        assert found.revision == "working tree"


def test_a_partial_clone(repo: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial.git"
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:none", f"file://{repo}", str(partial))
    assert refusal(partial).startswith("the repository lacks the content of files; is it a partial clone? (")
