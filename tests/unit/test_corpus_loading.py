"""The corpus as the harness reads it: in order, once, and a damaged file is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import corpus

SCHEDULE = {"prompt": "a", "budget": 1, "script": [65]}
ENTRY = {"fault": "A fault.", "reports": ["a/b#1"], "rules": ["BUDGET"], "schedule": SCHEDULE}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty corpus in place of the real one."""
    monkeypatch.setattr(corpus, "_PLACES", (tmp_path / "absent", tmp_path))
    corpus.load.cache_clear()
    yield tmp_path
    corpus.load.cache_clear()


def test_the_corpus_is_there_by_name() -> None:
    names = [entry.name for entry in corpus.load()]
    assert "slime-2260-minimal" in names
    assert names == sorted(names)


def test_entries_are_read_in_order(folder: Path) -> None:
    for name in ("b", "a"):
        (folder / f"{name}.json").write_text(json.dumps(ENTRY))
    (folder / "notes.txt").write_text("not an entry")
    assert [(e.name, e.rules, e.work.budget) for e in corpus.load()] == [
        ("a", ("BUDGET",), 1),
        ("b", ("BUDGET",), 1),
    ]


def test_an_installation_without_a_corpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_PLACES", (tmp_path / "absent",))
    corpus.load.cache_clear()
    assert corpus.load() == ()
    corpus.load.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({**ENTRY, "schedule": {}}),
        json.dumps({**ENTRY, "schedule": None}),
        json.dumps({**ENTRY, "schedule": {**SCHEDULE, "attempts": [{"kind": "nope"}]}}),
        json.dumps({k: v for k, v in ENTRY.items() if k != "rules"}),
        json.dumps({**ENTRY, "reports": 3}),
    ],
    ids=["empty", "cut", "list", "null", "schedule", "no-schedule", "kind", "no-rules", "reports"],
)
def test_a_damaged_file_is_named(folder: Path, text: str) -> None:
    (folder / "good.json").write_text(json.dumps(ENTRY))
    (folder / "hurt.json").write_text(text)
    with pytest.raises(ValueError, match=r"^damaged corpus file hurt\.json: "):
        corpus.load()


def test_a_file_of_bytes_is_named(folder: Path) -> None:
    (folder / "hurt.json").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"^damaged corpus file hurt\.json: "):
        corpus.load()
