"""A repository's history along first parents, and what of a revision's tree a client is made of.

Read only, as everything that asks git (`harness.targets.checkout`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from itertools import dropwhile
from pathlib import Path

from harness.targets import CannotJudge
from harness.targets.checkout import DIRTY, PACKAGES, GitFailed, UsageError, checkout, commit_of, git, kind_of, listing

_DATA = "*"
"""Where a tree has everything that is no module."""

_FORMAT = "%H%x00%h%x00%cs%x00%s"


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit: its full and its short name, when it was committed (``2026-08-12``), and its first line."""

    commit: str
    short: str
    date: str
    subject: str

    def __str__(self) -> str:
        return f"{self.short} {self.date} {self.subject}"


Tree = Mapping[str, str]
"""The files and folders of the packages by path, without endings: what identifies their content."""


def repository(path: str | os.PathLike[str]) -> Path:
    """The path, after it was seen to be in a git repository. Raises UsageError or CannotJudge."""
    where = Path(path)
    if not where.is_dir():
        raise UsageError(f"not a directory: {where}")
    if kind_of(where) == "none":
        raise UsageError(f"not a git repository, so it has no history: {where}")
    return where


def find(where: Path, rev: str) -> Revision:
    """Raises UsageError for what is no revision there."""
    try:
        commit = commit_of(where, rev)
    except UsageError as error:
        raise UsageError(f"{error}{_shallow(where)}") from error
    (found,) = _log(where, "-1", commit)
    return found


def between(where: Path, old: Revision, new: Revision) -> list[Revision]:
    """From ``old`` to ``new``, both included, along first parents. Raises UsageError unless one leads to the other."""
    if old.commit == new.commit:
        raise UsageError(f"--old and --new are the same revision, {old.short}")
    if not _is_ancestor(where, old, new):
        if _is_ancestor(where, new, old):
            raise UsageError(f"--old {old.short} is newer than --new {new.short}; exchange them")
        raise UsageError(f"--old {old.short} is not an ancestor of --new {new.short}{_shallow(where)}")
    found = _log(where, "--first-parent", new.commit)
    commits = [revision.commit for revision in found]
    if old.commit not in commits:
        raise UsageError(
            f"--old {old.short} came to --new {new.short} by a merge; name a revision of the line it was merged into"
        )
    return found[: commits.index(old.commit) + 1][::-1]


def touching(where: Path, new: Revision, since: str | None) -> list[Revision]:
    """Revisions up to ``new`` along first parents that touch the packages, oldest first.

    ``since``: the oldest, a revision (itself included) or a day (``2026-04-01``). Raises UsageError.
    """
    begin, day = None, None
    if since is not None:
        day = _day(since)
        begin = None if day else find(where, since)
    if begin is not None and begin.commit != new.commit:
        between(where, begin, new)
    limits = [f"^{begin.commit}"] if begin is not None else []
    found = _log(where, "--first-parent", new.commit, *limits, "--", *PACKAGES)
    if begin is not None:
        found.append(begin)
    oldest_first = found[::-1]
    return list(dropwhile(lambda revision: day is not None and revision.date < day, oldest_first))


def tree(where: Path, revision: Revision) -> Tree:
    """What there is of the packages. One that cannot be read is like no other; judging it will say why."""
    try:
        files = {blob.path: blob.oid for blob in listing(where, revision.commit, PACKAGES)}
    except CannotJudge:
        return {"": revision.commit}
    found: dict[str, str] = {}
    for path in sorted(files):
        folder, _, name = path.rpartition("/")
        if not name.endswith(".py"):  # a client may read it, whatever it is
            found[_DATA] = found.get(_DATA, "") + f"{path}\0{files[path]}\0"
        stem = f"{folder}/{name.partition('.')[0]}"  # a module may be compiled
        found[stem] = found.get(stem, "") + f"{name}\0{files[path]}\0"
        while folder:  # a folder is a module too
            found.setdefault(folder, "")
            folder = folder.rpartition("/")[0]
    return found


def client(tree: Tree, modules: Sequence[str] | None) -> str:
    """What identifies the client in a tree: a hash of every file that its modules are, or would be, imported from.

    ``modules`` are all that were asked for when it ran, there or not. None: not known, so everything counts.
    """
    found = sha256()
    for stem in sorted(tree) if modules is None else [_DATA, *_stems(modules)]:
        found.update(f"{stem}\0{tree.get(stem)}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:16]


def _stems(modules: Iterable[str]) -> list[str]:
    places = [module.replace(".", "/") for module in modules]
    return sorted(place + end for place in places for end in ("", "/__init__"))


def is_shallow(where: Path) -> bool:
    return git(where, "rev-parse", "--is-shallow-repository").strip() == b"true"


def is_dirty(where: Path) -> bool:
    """Whether the packages on disk are not the ones of HEAD. A bare repository has none on disk."""
    if kind_of(where) != "tree":
        return False
    try:
        with checkout(where) as tree:
            return tree.revision.endswith(DIRTY)
    except (CannotJudge, UsageError):  # nothing there that could differ
        return False


def _shallow(where: Path) -> str:
    return "; this clone is shallow: `git fetch --unshallow` brings the rest" if is_shallow(where) else ""


def _day(text: str) -> str | None:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        return None


def _is_ancestor(where: Path, old: Revision, new: Revision) -> bool:
    try:
        git(where, "merge-base", "--is-ancestor", old.commit, new.commit)
    except GitFailed:  # it says no by its status
        return False
    return True


def _log(where: Path, *what: str) -> list[Revision]:
    """Newest first."""
    try:
        lines = git(
            where,
            "log",
            "-z",
            "--abbrev=9",
            "--encoding=UTF-8",
            "--no-show-signature",
            "--no-color",
            f"--format={_FORMAT}",
            *what,
        )
    except GitFailed as error:
        raise CannotJudge(f"git cannot read the history of {where}: {error.said}") from error
    words = lines.decode("utf-8", "replace").split("\0")
    rows = zip(*[iter(words)] * 4, strict=False)
    return [Revision(commit, short, day, _printable(subject)) for commit, short, day, subject in rows]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
