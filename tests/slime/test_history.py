"""Bisections and a scan of slime's own history, around issue #2260.

Needs a checkout with the history (tests/slime/test_revisions.py).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from tests.slime.test_revisions import CHECKOUT, LOST, NEWEST, RESTORED, STREAMING, pytestmark  # noqa: F401
from tests.unit.test_readme import README, block


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("old", "new", "mode", "direction", "revision", "before"),
    [
        ("v0.2.4", "f033ebfc0", "plain", "first-bad", LOST, "2a89c169c"),
        (STREAMING, NEWEST, "stream", "first-good", RESTORED, "f033ebfc0"),
    ],
)
def test_the_revisions_of_the_issue_are_found(
    old: str, new: str, mode: str, direction: str, revision: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ("--old", old, "--new", new, "--mode", mode)
    status, out = run(capsys, "bisect", "--path", CHECKOUT, "--rule", "BUDGET", *ends, "--json", "-")
    found: dict[str, Any] = json.loads(out)
    assert (status, found["direction"], found["revision"], found["before"]) == (0, direction, revision, before)
    assert found["duration_s"] < 120 and found["complete"]


def test_the_bisection_of_the_first_page_is_real_output(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^\$ rolloutcheck (bisect .+)$", README, re.M)
    words = [CHECKOUT if word == "../slime" else word for word in shlex.split(command)]
    status, out = run(capsys, *words)

    def normal(text: str) -> list[str]:
        text = re.sub(r"\d+ run   \d+\.\d s$", "N run   SECONDS", text, flags=re.M)
        return re.sub(r"(replay failures/\S+) .+", r"\1", text).splitlines()

    assert status == 0 and normal(out) == normal(block("bisect"))


def test_a_scan_has_every_boundary_of_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    since = ("--since", "2a89c169c", "--rule", "BUDGET")
    status, out = run(capsys, "scan", "--path", CHECKOUT, *since, "--json", "-")
    assert status == 0
    ranges = json.loads(out)["rules"]["BUDGET"]
    assert [(one["from"], one["verdict"]) for one in ranges["plain"]] == [
        ("2a89c169c", "invalid"),  # of a text that is empty, it thinks that nothing was generated
        (LOST, "invalid"),
        (RESTORED, "valid"),
    ]
    assert [(one["from"], one["verdict"]) for one in ranges["stream"]] == [
        ("2a89c169c", "absent"),
        (STREAMING, "invalid"),
        (RESTORED, "valid"),
    ]
