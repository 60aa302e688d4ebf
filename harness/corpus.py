"""The regression corpus: one schedule or scenario per known fault, run against every target before any search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.work import Work, from_json

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


@lru_cache(maxsize=1)
def load() -> tuple[Entry, ...]:
    """Every entry, by name. Raises ValueError naming the file that is damaged."""
    directory = next((p for p in _PLACES if p.is_dir()), None)
    return tuple(_entry(path) for path in sorted(directory.glob("*.json"))) if directory else ()


def _entry(path: Path) -> Entry:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Entry(path.stem, data["fault"], tuple(data["reports"]), tuple(data["rules"]), from_json(data))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"damaged corpus file {path.name}: {error}") from error
