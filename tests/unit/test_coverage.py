"""What coverage leaves out: a line with its reason, and four kinds of line that never run."""

from __future__ import annotations

import io
import re
import sys
import tokenize
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SEARCHES, pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spec", "harness", "reference_impl")
MAX_EXCLUDED = 1
"""Raise it with a reason that is better than a test."""

CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["coverage"]


def pragmas(text: str) -> list[str]:
    """Comments that mean to tell coverage something, however they are spelled."""
    comments = (t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT)
    return [comment for comment in comments if re.search(r"pragma|no\s*cover|no\s*branch", comment, re.I)]


def found() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), pragma)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for pragma in pragmas(path.read_text(encoding="utf-8"))
    ]


def excludes(line: str) -> bool:
    return any(re.search(pattern, line) for pattern in CONFIG["report"]["exclude_lines"])


def test_every_exclusion_has_its_reason() -> None:
    for where, pragma in found():
        assert re.fullmatch(r"# pragma: no (cover|branch) - \S+( \S+)+", pragma), f"{where}: {pragma}"


def test_exclusions_are_few() -> None:
    assert len(found()) <= MAX_EXCLUDED


def test_a_pragma_is_seen_however_it_is_spelled() -> None:
    assert pragmas("x = 1  # pragma: no cover\ny = '# pragma: no cover'\n#PRAGMA:NOCOVER\nz = 2  # no branch\n") == [
        "# pragma: no cover",
        "#PRAGMA:NOCOVER",
        "# no branch",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "    if x:  # pragma: no cover - only there",
        "    if TYPE_CHECKING:",
        'if __name__ == "__main__":',
        "    async def stop(self) -> None: ...",
    ],
)
def test_what_is_left_out(line: str) -> None:
    assert excludes(line)


@pytest.mark.parametrize(
    "line",
    [
        "    if x:  # pragma: no cover",
        "    if x:  # pragma: no cover - ",
        "    raise NotImplementedError",
        "    assert x",
        "    def __repr__(self) -> str:",
        "    x: Any = ...",
        '    if __name__ == "__main__":',
    ],
)
def test_what_is_not_left_out(line: str) -> None:
    assert not excludes(line)


def test_nothing_else_is_configured_away() -> None:
    assert {
        "run": {"branch": True, "source": list(PACKAGES)},
        "report": {
            "fail_under": 100,
            "exclude_lines": CONFIG["report"]["exclude_lines"],
            "partial_branches": [r"# pragma: no branch - \S"],
        },
    } == CONFIG
    assert len(CONFIG["report"]["exclude_lines"]) == 4


class Item:
    """A test as far as the hook looks at it."""

    def __init__(self, folder: str, *markers: str) -> None:
        self.path, self.markers = ROOT / "tests" / folder / "test_x.py", list(markers)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers

    def add_marker(self, name: str) -> None:
        self.markers.append(name)


@pytest.mark.parametrize("measured", [True, False])
def test_searches_and_draws_do_not_count(measured: bool) -> None:
    items: Any = [Item("unit"), Item("unit", "hypothesis"), *map(Item, SEARCHES)]
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(hasplugin=lambda name: measured and name == "_cov"))
    pytest_collection_modifyitems(config, items)
    assert ["no_cover" in item.markers for item in items] == [False, *[measured] * (1 + len(SEARCHES))]


def test_a_folder_that_does_not_count_is_there() -> None:
    assert all((ROOT / "tests" / folder).is_dir() for folder in SEARCHES)


CACHED: dict[str, list[tuple[Any, ...]]] = {
    "harness.corpus.load": [()],
    "harness.mutants.load": [()],
    "harness.mutants.measure._draw": [("sample", False, "quick", 0), ("rollout", False, "quick", 0)],
    "harness.scenario_strategies.part": [(0, 0)],
    "harness.strategies.part": [(0, 0)],
    "harness.tokenizer.load": [(None,), ("/",)],
    "harness.version.digest": [()],
    "reference_impl.generate._load": [("/",)],
    "spec._rules": [()],
}
"""Functions that run once a process, with arguments that take every way through them."""


@pytest.mark.parametrize("name", CACHED)
def test_what_runs_once_is_measured_whichever_test_came_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is not measured may have filled the cache in this process."""
    tokenizers = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda *_, **__: "a tokenizer"))
    monkeypatch.setitem(sys.modules, "transformers", tokenizers)
    module, _, function = name.rpartition(".")
    for arguments in CACHED[name]:
        assert getattr(import_module(module), function).__wrapped__(*arguments)


def test_every_function_that_runs_once_is_known() -> None:
    decorated = re.compile(r"@(?:lru_cache|cache)\b.*\ndef (\w+)")
    found = {
        ".".join([*path.relative_to(ROOT).with_suffix("").parts, function]).replace(".__init__", "")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function in decorated.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set(CACHED)


def test_the_test_command_measures_what_it_runs_in_full() -> None:
    """And a part of the tests, named behind ``--``, is not held to it."""
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    command = "python -m pytest -n auto {posargs:--cov --cov-report=term-missing:skip-covered}"
    assert f"commands = {command}\n" in tox.partition("[testenv:tests]")[2].partition("[testenv:")[0]
