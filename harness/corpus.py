"""The regression corpus: one schedule or scenario per known fault, run against every target before any search."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from harness.replay import Failure
from harness.work import Work, from_json, to_json

_PLACES = (
    Path(__file__).resolve().parent.parent / "tests" / "regressions" / "corpus",  # a checkout
    Path(__file__).resolve().parent / "corpus",  # an installed package
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A known fault: what went wrong, where it was reported, the rules it broke and a schedule or scenario of it."""

    name: str
    fault: str
    reports: tuple[str, ...]
    rules: tuple[str, ...]
    work: Work


class BadEntry(Exception):
    """What is to be added is no entry. One line; exit status 2."""


def add(directory: Path, name: str, fault: str, reports: Sequence[str], failure: Failure) -> Path:
    """Makes a failure an entry of the corpus in ``directory``. Raises BadEntry."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise BadEntry(f"{name!r} is no name for an entry: small letters, digits and hyphens")
    if not re.fullmatch(r"[A-Z].*\.", fault) or not fault.isprintable():
        raise BadEntry("the fault is told in a sentence, from a capital to a full stop")
    for ref in reports:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40})", ref, re.ASCII):
            raise BadEntry(f"{ref!r} is no report: OWNER/REPOSITORY#NUMBER or OWNER/REPOSITORY@COMMIT")
    if not directory.is_dir():
        raise BadEntry(f"no folder {directory}; run it in a checkout of rolloutcheck, or give --corpus")
    path = directory / f"{name}.json"
    if path.exists():
        raise BadEntry(f"there is an entry {path} already")
    there = (_entry(file) for file in sorted(directory.glob("*.json")))
    try:
        known = next((entry.name for entry in chain(load(), there) if entry.work == failure.schedule), None)
    except ValueError as error:
        raise BadEntry(str(error)) from error
    if known is not None:
        raise BadEntry(f"the entry {known} is the same schedule")
    data = {"fault": fault, "reports": list(reports), "rules": [failure.rule], **to_json(failure.schedule)}
    begun = path.with_suffix(".begun")
    try:
        begun.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        begun.replace(path)
    except OSError as error:
        begun.unlink(missing_ok=True)  # half an entry would stop every check
        raise BadEntry(f"cannot write {path}: {error.strerror}") from error
    return path


@lru_cache(maxsize=1)
def load() -> tuple[Entry, ...]:
    """Every entry, by name. Raises ValueError naming the file that is damaged."""
    directory = next((p for p in _PLACES if p.is_dir()), None)
    return tuple(_entry(path) for path in sorted(directory.glob("*.json"))) if directory else ()


def _entry(path: Path) -> Entry:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Entry(path.stem, data["fault"], tuple(data["reports"]), tuple(data["rules"]), from_json(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"damaged corpus file {path.name}: {error}") from error
