"""Getting a slime tree, stubbing what it imports, and driving it: on a tiny checkout of our own.

What loads the checkout runs in this process, which is put back as it was: one slime per interpreter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from harness.targets import CannotJudge
from harness.targets.checkout import UsageError, checkout
from harness.targets.stubs import Stub, StubModule
from tests.unit.checkouts import FILES, git, python, write


def snapshot(root: Path) -> dict[str, bytes | None]:
    return {str(f): f.read_bytes() if f.is_file() else None for f in sorted(root.rglob("*"))}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout that is no repository."""
    root = tmp_path / "plain tree"
    write(root, FILES)
    return root


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A clean repository of two commits; the older one has no slime package."""
    root = tmp_path / "my slime"
    root.mkdir()
    git(root, "init", "--quiet")
    write(root, {"README": "nothing yet"})
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    write(root, FILES)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "second")
    return root


# Stubs


def test_a_stub_stands_for_most_things() -> None:
    stub: Any = Stub("torch")

    class Child(stub.nn.Module, stub.Other):  # type: ignore[misc]
        pass

    def function() -> None:
        pass

    assert not stub and not stub.x.y(1)[2] and not list(stub)
    assert stub.int32 is stub.int32
    assert (int | stub.Tensor) is stub.Tensor and (stub.Tensor | None) is stub.Tensor
    assert not isinstance(3, stub.Tensor) and not isinstance(stub, stub.Tensor)
    assert stub.remote(function) is function and stub.remote(n=1)(Child) is Child
    assert isinstance(Child(1, key=2), Child)
    with stub.no_grad() as inside:
        assert not inside
    assert int(stub.count()) == float(stub.count()) == 0 and not stub.count() > 0
    stub.table["key"] = 1
    assert "key" not in stub.table and not issubclass(int, stub.Tensor)
    assert "torch" in repr(stub)


def test_stub_errors_can_be_caught_and_raised() -> None:
    stub: Any = Stub("ray")
    with pytest.raises(ValueError, match="other"):  # noqa: PT012 - the except clause is the point
        try:
            raise ValueError("other")
        except stub.exceptions.RayError:
            raise AssertionError("caught a stub") from None
    with pytest.raises(stub.exceptions.RayError):
        raise stub.exceptions.RayError("mine")


def test_stubs_can_be_awaited() -> None:
    async def use() -> None:
        stub: Any = Stub("ray")
        assert not await stub.get.remote()
        async with stub.lock() as inside:
            assert not inside

    asyncio.run(use())


def test_a_stub_hides_no_protocol() -> None:
    module = StubModule("torch")
    assert module.__version__ == "99.0" and not module and not module.nn
    for name in ("__wrapped__", "__array__", "__fspath__"):
        assert not hasattr(module, name) and not hasattr(module.x, name)


# Loading


def test_a_sample_is_aborted_and_resumed(tree: Path) -> None:
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            for loop_use in range(2):
                asked.clear()
                target.reset(environment)
                sample = target.new_sample(Start("hi"))
                for _ in range(2):
                    params = {"max_new_tokens": 8}
                    sample = await target.generate(sample, params, stream=False)
                    sample = target.round_trip(sample)
                    view = target.view(sample)
                    print(asked[-1]["sampling_params"]["max_new_tokens"], view.tokens,
                          view.response_length, view.logprobs, view.status)
            await target.close()
        asyncio.run(main())
        print(target.name, target.modes, *sorted(target.stubbed))
        print([name for name in ("torch", "ray", "transformers") if name in sys.modules])
        """
    once = [
        "8 (104, 105, 7, 7) 2 (-0.5, -0.5) aborted",
        "6 (104, 105, 7, 7, 7) 3 (-0.5, -0.5, -0.5) truncated",
    ]
    assert python(script, tree).splitlines() == [
        *once,
        *once,
        "slime@abc ('plain',) ray sglang_router slime.rollout.rm_hub torch transformers",
        "[]",
    ]
    assert not list(tree.rglob("__pycache__"))


def test_restored_samples_flags_and_missing_modes(tree: Path) -> None:
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            start = Start("hi", tokens=(104, 105, 9), response_length=1, response="x",
                          logprobs=(-1.0,))
            sample = target.new_sample(start)
            sample.teacher_log_probs = [1.0]
            view = target.view(sample)
            print(view.status, view.tokens, view.logprobs, dict(view.arrays))
            target.set_abort(True)
            state = sys.modules["slime.rollout.sglang_rollout"].GenerateState(target.args)
            print(state.aborted)
            target.reset(environment)
            state = sys.modules["slime.rollout.sglang_rollout"].GenerateState(target.args)
            print(state.aborted)
            for refused in (
                lambda: target.new_sample(Start("hi", images=1)),
                lambda: target.generate(sample, {}, stream=True),
            ):
                try:
                    await refused()
                except CannotJudge as error:
                    print(error.not_applicable, error)
        asyncio.run(main())
        """
    assert python(script, tree).splitlines() == [
        "aborted (104, 105, 9) (-1.0,) {'teacher_log_probs': 1}",
        "True",
        "False",
        "True slime@abc takes no images beside a prompt",
        "True slime@abc has no stream mode",
    ]


def test_writes_to_args_are_told_and_forgotten(tree: Path) -> None:
    rollout = tree / "slime/rollout/sglang_rollout.py"
    text = rollout.read_text().replace("state = Gen", "args.rollout_seed = 1; state = Gen")
    rollout.write_text(text)
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            params = {"max_new_tokens": 8}
            await target.generate(target.new_sample(Start("hi")), params, stream=False)
            print(target.writes())
            target.reset(environment)
            print(target.writes(), target.args.rollout_seed != 1)
        asyncio.run(main())
        """
    said = python(script, tree)
    assert said.splitlines() == ["('rollout_seed',)", "() True"]


def test_a_field_that_args_lacks_is_named(tree: Path) -> None:
    rollout = tree / "slime/rollout/sglang_rollout.py"
    text = rollout.read_text().replace("state = Gen", "args.brand_new_option; state = Gen")
    rollout.write_text(text)
    script = """
        target = load(sys.argv[1], "abc")
        async def main():
            target.reset(environment)
            await target.generate(target.new_sample(Start("hi")), {}, stream=False)
        try:
            asyncio.run(main())
        except CannotJudge as error:
            print(error, target.missing_args())
        """
    said = python(script, tree)
    assert said == "slime@abc wants more: args has no field 'brand_new_option' ('brand_new_option',)"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("rollout/sglang_rollout.py", "import ray\n", "import slime.gone\n", "No module named"),
        ("rollout/sglang_rollout.py", "import ray\n", "import httpx.gone\n", "No module named"),
        ("rollout/sglang_rollout.py", "import ray\n", "from json import gone\n", "cannot import"),
        ("rollout/sglang_rollout.py", "import ray\n", "raise SystemExit('no GPU')\n", "no GPU"),
        ("rollout/sglang_rollout.py", "import ray\n", "import (\n", "SyntaxError"),
        ("rollout/sglang_rollout.py", "async def generate(", "async def renamed(", "no plain mode"),
        ("rollout/sglang_rollout.py", "sampling_params):", "params, x):", "not called the way"),
        ("utils/types.py", "class Status(", "class Kind(", "NameError"),
        (
            "utils/misc.py",
            "class",
            "import subprocess; subprocess.run(['git'])\nclass",
            "no program is started",
        ),
        ("utils/misc.py", "class", "import slime.gone\nclass", "slime.gone"),
    ],
)
def test_what_fails_to_load_is_said_in_one_line(tree: Path, file: str, old: str, new: str, said: str) -> None:
    source = tree / "slime" / file
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new, 1))
    script = """
        try:
            load(sys.argv[1], "abc")
        except CannotJudge as error:
            print(error)
        """
    output = python(script, tree)
    assert said in output and len(output.splitlines()) == 1


def test_a_tree_without_the_module_is_not_applicable(tree: Path) -> None:
    (tree / "slime/rollout/sglang_rollout.py").unlink()
    script = """
        try:
            load(sys.argv[1], "abc")
        except CannotJudge as error:
            print(error.not_applicable, error)
        """
    said = "True no slime.rollout.sglang_rollout or sglang_example at abc"
    assert python(script, tree) == said


def test_an_installed_slime_is_not_taken_for_the_checkout(tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write(site, {**FILES, "slime/rollout/sglang_rollout.py": ""})
    (tree / "slime/__init__.py").unlink()  # a regular package elsewhere beats a namespace
    script = """
        sys.path.append(sys.argv[2])
        try:
            load(sys.argv[1], "abc", heavy=frozenset())
        except CannotJudge as error:
            print(error)
        """
    assert "instead of the checkout" in python(script, tree, site)


def test_one_slime_per_process(tree: Path, tmp_path: Path) -> None:
    script = """
        for _ in range(2):
            try:
                load(sys.argv[1], "abc")
            except CannotJudge as error:
                print(error)
        """
    said = "a slime package is already loaded in this process"
    assert python(script, tree) == said


def test_stubs_are_for_the_checkout_only(tree: Path) -> None:
    write(
        tree,
        {
            "slime/late.py": """
                def lazy():
                    import pybase65
                    import torch.nn
                    return pybase65, torch.nn
                """
        },
    )
    script = """
        target = load(sys.argv[1], "abc")
        from slime.late import lazy
        print(*lazy())
        try:
            import pybase66
        except ModuleNotFoundError as error:
            print(error)
        """
    first, second = python(script, tree).splitlines()
    assert first.count("<module") == 2
    assert second == "No module named 'pybase66'"


def test_a_stub_that_the_checkout_itself_hides_is_left_alone(tree: Path) -> None:
    misc = tree / "slime/utils/misc.py"
    misc.write_text("import sys\nimport pybase65\nsys.modules['pybase65'] = None\n" + misc.read_text())
    script = """
        target = load(sys.argv[1], "abc")
        print("pybase65" in target.stubbed, sys.modules["pybase65"])
        """
    assert python(script, tree) == "True None"


def test_rewards_are_not_imported(tree: Path, tmp_path: Path) -> None:
    rollout = tree / "slime/rollout/sglang_rollout.py"
    rollout.write_text("from .rm_hub import async_rm\nfrom .rm_hub.math import grade\n" + rollout.read_text())
    write(tree, {"slime/rollout/rm_hub/__init__.py": "raise AssertionError"})
    script = """
        target = load(sys.argv[1], "abc")
        print(target.modes, *sorted(target.stubbed))
        """
    said = "('plain',) ray sglang_router slime.rollout.rm_hub torch transformers"
    assert python(script, tree) == said


def test_transformers_is_set_aside_and_given_back(tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write(site, {"transformers/__init__.py": "", "transformers/models.py": ""})
    script = """
        sys.path.insert(0, sys.argv[2])
        import transformers.models as before
        target = load(sys.argv[1], "abc")
        import transformers.models as after
        print("transformers" in target.stubbed, before is after)
        """
    assert python(script, tree, site) == "True True"


def test_installed_packages_win_unless_heavy(tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write(site, {"ray.py": "raise AssertionError", "sglang_router.py": "__version__ = '1.0'"})
    script = """
        sys.path.append(sys.argv[2])
        target = load(sys.argv[1], "abc", heavy=frozenset({"ray"}))
        print("ray" in target.stubbed, "sglang_router" in target.stubbed)
        """
    assert python(script, tree, site) == "True False"


# Trees


@pytest.fixture
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where temporary trees go; empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("clean_up")
def test_a_working_tree_is_used_in_place(repo: Path) -> None:
    head = git(repo, "rev-parse", "--short=9", "HEAD")
    before = snapshot(repo)
    with checkout(repo) as found:
        assert (found.root, found.revision) == (repo.resolve(), head)
        python("load(sys.argv[1], 'abc')", found.root)
    assert snapshot(repo) == before


@pytest.mark.parametrize(
    "change",
    [
        {"slime/utils/misc.py": "# edited"},
        {"slime/new.py": "# untracked"},
    ],
)
def test_uncommitted_changes_are_named(repo: Path, change: dict[str, str]) -> None:
    head = git(repo, "rev-parse", "--short=9", "HEAD")
    write(repo, change)
    with checkout(repo) as found:
        assert found.revision == f"{head}+dirty"
    with checkout(repo, "HEAD") as found:
        assert found.revision == head
        assert "# edited" not in (found.root / "slime/utils/misc.py").read_text()
        assert not (found.root / "slime/new.py").exists()


def test_changes_elsewhere_and_line_ends_do_not_count(repo: Path) -> None:
    head = git(repo, "rev-parse", "--short=9", "HEAD")
    write(repo, {"README": "edited"})
    types = repo / "slime/utils/types.py"
    types.write_bytes(types.read_bytes().replace(b"\n", b"\r\n"))
    with checkout(repo) as found:
        assert found.revision == head


@pytest.mark.usefixtures("clean_up")
@pytest.mark.parametrize("kind", ["tree", "bare", "worktree", "git folder"])
@pytest.mark.parametrize("rev", ["HEAD", None])
def test_every_kind_of_repository(
    repo: Path, tmp_path: Path, kind: str, rev: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(repo, "rev-parse", "--short=9", "HEAD")
    where = repo
    if kind == "bare":
        where = tmp_path / "a bare one.git"
        git(tmp_path, "clone", "--quiet", "--bare", str(repo), str(where))
    elif kind == "worktree":
        where = tmp_path / "linked one"
        git(repo, "worktree", "add", "--quiet", "--detach", str(where))
    elif kind == "git folder":
        where = repo / ".git"
    before = snapshot(where)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))  # as inside a hook
    with checkout(where, rev) as found:
        assert found.revision == head
        in_place = rev is None and kind in ("tree", "worktree")
        assert (found.root == where.resolve()) == in_place
        assert (found.root / "slime/utils/types.py").read_text() == dedent(FILES["slime/utils/types.py"])
    assert snapshot(where) == before


def test_filters_and_export_attributes_do_not_apply(repo: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    write(repo, {".gitattributes": "*.py filter=evil export-subst\nmisc.py export-ignore\n"})
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "-m", "third")
    for name in ("clean", "smudge"):
        git(repo, "config", f"filter.evil.{name}", f"touch '{ran}'; cat")
    git(repo, "config", "core.fsmonitor", f"touch '{ran}'")
    (repo / "slime/utils/misc.py").touch()
    with checkout(repo, "HEAD") as found:
        assert (found.root / "slime/utils/misc.py").is_file()
    with checkout(repo) as found:
        assert not found.revision.endswith("dirty")
    assert not ran.exists()


def test_links_are_not_followed_out_of_the_tree(repo: Path) -> None:
    (repo / "slime/link.py").symlink_to("/etc/hostname")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "-m", "link")
    with checkout(repo, "HEAD") as found:
        assert not (found.root / "slime/link.py").exists()


def test_a_folder_without_git_is_a_working_tree(tree: Path) -> None:
    with checkout(tree) as found:
        assert found.revision == "working tree"


def test_a_repository_without_commits_is_a_working_tree(tree: Path) -> None:
    git(tree, "init", "--quiet")
    with checkout(tree) as found:
        assert found.revision == "working tree"


@pytest.mark.usefixtures("clean_up")
@pytest.mark.parametrize("rev", ["nonesuch", "--foo", "-n1", "", "HEAD:slime", "HEAD..HEAD", "a\nb", "HEAD~7"])
def test_what_is_no_revision_is_a_usage_error(repo: Path, rev: str) -> None:
    with pytest.raises(UsageError) as caught, checkout(repo, rev):
        pass
    assert "\n" not in str(caught.value)


def test_what_is_no_checkout_is_a_usage_error(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for where, rev in [
        (tmp_path / "nonesuch", None),
        (tree / "slime/__init__.py", None),
        (tmp_path / "empty", None),
        (tree, "HEAD"),
    ]:
        with pytest.raises(UsageError), checkout(where, rev):
            pass


@pytest.mark.usefixtures("clean_up")
def test_a_tree_without_the_package_cannot_be_judged(repo: Path) -> None:
    with pytest.raises(CannotJudge, match="no slime package at"), checkout(repo, "HEAD~1"):
        pass
    shutil.rmtree(repo / "slime")
    with pytest.raises(CannotJudge, match="no slime package in"), checkout(repo):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another owner")
def test_a_repository_of_another_user_is_told_plainly(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setenv("HOME", str(repo.parent))  # its configuration may allow every folder
    for file in (repo, repo / ".git"):
        os.chown(file, 12345, 12345)
    with pytest.raises(CannotJudge, match=r"safe\.directory"), checkout(repo, "HEAD"):
        pass


def test_without_git_a_working_tree_can_still_be_used(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with checkout(repo) as found:
        assert found.revision == "working tree"
    with pytest.raises(CannotJudge, match="git is not installed"), checkout(repo, "HEAD"):
        pass
