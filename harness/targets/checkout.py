"""A revision's tree in a folder of its own, or the user's working tree read in place.

The user's working tree, index and refs are never written to: git is asked for
object names and object bytes only. Objects are read raw (``ls-tree`` and
``cat-file``, not ``archive`` or ``worktree``), so no filter, textconv, hook,
file-system monitor or export attribute of the repository runs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.targets import CannotJudge

PACKAGES = ("slime",)
"""The folders taken from a tree. The first one must be there."""

WORKING_TREE, DIRTY = "working tree", "+dirty"
GIT_TIMEOUT = 60.0
"""Seconds one git command may take."""

_SUBMODULE = b"160000"
_FILE_MODES = {b"100644", b"100755"}  # neither symbolic links nor submodules


class UsageError(Exception):
    """The caller named something that is not there; the message is one line. Exit status 2."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where a tree lies and what reports call it."""

    root: Path
    """Put this on ``sys.path``."""

    revision: str
    """A short commit id, with ``+dirty`` if the packages differ from it, or ``working tree``."""


@dataclass(frozen=True, slots=True)
class Blob:
    oid: str
    path: str


@contextmanager
def checkout(
    path: str | os.PathLike[str],
    rev: str | None = None,
    packages: Sequence[str] = PACKAGES,
    folder: str | None = None,
) -> Iterator[Tree]:
    """The packages of ``path`` at ``rev``, for as long as the context lasts.

    ``path`` is a working tree, a linked worktree, a folder inside one that
    holds the packages, or a bare repository. Without ``rev`` a working tree is
    used in place, uncommitted changes included, and of a bare repository HEAD
    is taken. Trees taken from git lie in a temporary folder (in ``folder`` if one
    is given) that is removed on the way out.

    Raises UsageError for a path or a revision that does not exist, CannotJudge
    for a tree without the first package and for a git that does not work.
    """
    where = Path(path)
    if not where.is_dir():
        raise UsageError(f"not a directory: {where}")
    if rev is not None:
        _check_spelling(rev)
    try:
        kind = kind_of(where)
    except _NoGit:
        if rev is not None:
            raise
        kind = "none"
    if rev is None and kind != "bare":
        yield _in_place(where, packages, tracked=kind == "tree")
        return
    if kind == "none":
        raise UsageError(f"not a git repository, so it has no revision {rev!r}: {where}")
    commit = commit_of(where, rev or "HEAD")
    short = git(where, "rev-parse", "--short=9", commit).decode().strip()
    blobs = listing(where, commit, packages)
    if not any(blob.path.startswith(f"{packages[0]}/") for blob in blobs):
        raise CannotJudge(f"no {packages[0]} package at {short}")
    with tempfile.TemporaryDirectory(prefix="rolloutcheck-", dir=folder) as made:
        root = Path(made).resolve()
        _extract(where, blobs, root)
        yield Tree(root, short)


def _in_place(where: Path, packages: Sequence[str], *, tracked: bool) -> Tree:
    if not (where / packages[0]).is_dir():
        if tracked:
            raise CannotJudge(f"no {packages[0]} package in {where}")
        raise UsageError(f"not a checkout, it has no {packages[0]} folder: {where}")
    root = where.resolve()
    if not tracked:
        return Tree(root, WORKING_TREE)
    try:
        commit = commit_of(where, "HEAD")
    except UsageError:  # a repository without a commit
        return Tree(root, WORKING_TREE)
    short = git(where, "rev-parse", "--short=9", commit).decode().strip()
    blobs = listing(where, commit, packages)
    if not blobs:  # the package is not under version control at all
        return Tree(root, WORKING_TREE)
    return Tree(root, f"{short}{DIRTY}" if _differs(root, blobs, packages) else short)


def _check_spelling(rev: str) -> None:
    """Keeps options and control characters out of git's command line."""
    if not rev or rev.startswith("-") or not rev.isprintable():
        raise UsageError(f"not a revision: {rev!r}")


def kind_of(where: Path) -> str:
    """``tree``, ``bare`` (also the inside of a .git folder) or ``none``."""
    try:
        answer = git(where, "rev-parse", "--is-inside-work-tree")
    except GitFailed as error:
        if "not a git repository" in error.said:
            return "none"
        raise CannotJudge(f"git cannot read {where}: {error.said}") from error
    return "tree" if answer.strip() == b"true" else "bare"


def commit_of(where: Path, rev: str) -> str:
    try:
        found = git(where, "rev-parse", "--verify", "--quiet", rev).decode().strip()  # :/text takes no suffix
        answer = git(where, "rev-parse", "--verify", "--quiet", f"{found}^{{commit}}")
    except GitFailed as error:
        raise UsageError(f"unknown revision {rev!r} in {where}") from error
    name = answer.decode().strip()
    if not name.isalnum():  # git reads ^A and A..B as well
        raise UsageError(f"not a single revision: {rev!r}")
    return name


def listing(where: Path, commit: str, packages: Sequence[str]) -> list[Blob]:
    """The packages' regular files, by paths relative to ``where`` (or to a bare root)."""
    listing = git(where, "ls-tree", "-r", "-z", commit, "--", *packages)
    blobs = []
    for entry in listing.split(b"\0"):
        if not entry:
            continue
        meta, _, name = entry.partition(b"\t")
        mode, _, oid = meta.split(b" ")
        if mode == _SUBMODULE and os.fsdecode(name) in packages:
            raise CannotJudge(f"{os.fsdecode(name)} is a submodule at {commit[:9]}: its files are elsewhere")
        if mode in _FILE_MODES:
            blobs.append(Blob(oid.decode(), os.fsdecode(name)))
    return blobs


def _extract(where: Path, blobs: Sequence[Blob], root: Path) -> None:
    wanted = "".join(f"{blob.oid}\n" for blob in blobs).encode()
    try:
        stream = memoryview(git(where, "cat-file", "--batch", stdin=wanted))
    except GitFailed as error:
        raise CannotJudge(
            f"the repository lacks the content of files; is it a partial clone? ({error.said})"
        ) from error
    at = 0
    for blob in blobs:
        end = bytes(stream[at : at + 200]).index(b"\n") + at
        head = bytes(stream[at:end]).split(b" ")
        if len(head) != 3:  # "<oid> missing", as in a partial clone
            raise CannotJudge(f"the repository lacks the content of {blob.path}")
        start, size = end + 1, int(head[2])
        target = root.joinpath(blob.path)
        if ".." in Path(blob.path).parts or not target.is_relative_to(root):
            raise CannotJudge(f"the tree holds an unsafe path: {blob.path!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stream[start : start + size])
        at = start + size + 1


def _differs(root: Path, blobs: Sequence[Blob], packages: Sequence[str]) -> bool:
    """Whether the packages on disk are not the commit's.

    Compared by content and not with ``git status``, which would run clean
    filters and may write the index. Untracked Python files count: they import.
    """
    tracked = set()
    for blob in blobs:
        file = root / blob.path
        tracked.add(file)
        try:
            content = file.read_bytes()
        except OSError:
            return True
        unix = content.replace(b"\r\n", b"\n")  # what autocrlf would have made of it
        if blob.oid not in (_oid(content, blob.oid), _oid(unix, blob.oid)):
            return True
    return any(file not in tracked for package in packages for file in (root / package).rglob("*.py"))


def _oid(content: bytes, like: str) -> str:
    algorithm = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return algorithm(b"blob %d\0" % len(content) + content).hexdigest()


class GitFailed(CannotJudge):
    """A git command failed; ``said`` is what it complained of."""

    def __init__(self, said: str) -> None:
        super().__init__(f"git cannot read the repository: {said}")
        self.said = said


class _NoGit(CannotJudge):
    pass


def git(where: Path, *command: str, stdin: bytes | None = None) -> bytes:
    """What git prints. Raises GitFailed with its first line of complaint, or CannotJudge."""
    # GIT_DIR and friends, set inside hooks and by some tools, would point git elsewhere.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
    argv = ["git", "-C", str(where), "--no-pager", "--literal-pathspecs"]
    argv += ["-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false", *command]
    try:
        done = subprocess.run(argv, input=stdin or b"", capture_output=True, env=env, timeout=GIT_TIMEOUT, check=False)
    except FileNotFoundError as error:
        raise _NoGit("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CannotJudge(f"git {command[0]} took more than {GIT_TIMEOUT:g} s") from error
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace").strip().split("\n")[0].removeprefix("fatal: ")
    if "dubious ownership" in said:
        raise CannotJudge(
            f"git refuses {where}: it belongs to another user; "
            f"allow it with: git config --global --add safe.directory {where.resolve()}"
        )
    if "safe.bareRepository" in said:
        raise CannotJudge(f"git refuses the bare repository {where} (safe.bareRepository)")
    raise GitFailed(said or f"git {command[0]} failed with status {done.returncode}")
