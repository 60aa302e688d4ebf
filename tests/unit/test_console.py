"""Progress: a bar with a rate where somebody watches, lines now and then where nobody does."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness import console
from harness.console import _Lines, duration, progress, rate_of
from harness.events import Progress, Said


def test_a_phase_has_a_line_and_then_one_every_half_minute() -> None:
    lines = _Lines()
    told = [
        lines.of(Progress("scan", "revisions", done, 100), now) for done, now in ((0, 0), (10, 10), (20, 31), (29, 45))
    ]
    assert told == ["scan: revisions, 100", None, "scan: revisions, 20 of 100, 39/min, about 2 min left", None]
    assert lines.of(Progress("scan", "counterexamples", 0, 7), 46) == "scan: counterexamples, 7"
    assert lines.of(Progress("scan", "counterexamples", 0, 7), 80) == "scan: counterexamples, 0 of 7"


@pytest.mark.parametrize(("rate", "said"), [(0, ""), (None, ""), (0.05, "3/min"), (1.5, "90/min"), (12.4, "12/s")])
def test_a_rate_is_said_in_the_unit_that_says_more(rate: float | None, said: str) -> None:
    assert rate_of(rate) == said


@pytest.mark.parametrize(("seconds", "said"), [(7, "7 s"), (99, "99 s"), (100, "2 min"), (3600, "60 min")])
def test_how_long(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_steps_are_lines_between_the_phases() -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=40)) as tell:
        tell(Progress("bisect", "revisions", 0, 3))
        tell(Said("valid    [abc] " + "x" * 60))
        tell(Progress("bisect", "revisions", 1, 3))
    assert out.getvalue() == "bisect: revisions, 3\nvalid    [abc] " + "x" * 60 + "\n"


def test_a_bar_shows_the_rate_of_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=100, force_terminal=True)) as tell:
        for done in range(5):
            tell(Progress("inproc", "drawn", done, 5))
        tell(Said("a step"))
        tell(Progress("inproc", "shrinking", 1, 2))
    assert "a step" in out.getvalue() and "inproc shrinking" in out.getvalue() and "1/2" in out.getvalue()


def test_a_reader_of_progress_that_left_is_no_reason_to_stop() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("gone")

    with progress(Console(file=Gone())) as tell:
        tell(Said("nobody hears"))


def test_one_line_is_said_and_the_status_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.say("a line", 7) == 7
    assert capsys.readouterr().err == "rolloutcheck: a line\n"
