"""What the commands say on a terminal: the consoles, progress, and one line for what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.events import Event, Progress, Tell
from harness.reporters.plain import clean

EVERY_S = 30.0
"""Where nobody watches, long work says so often how far it is."""


def consoles(*files: Path | None) -> tuple[Any, Any]:
    """For progress, and for the report; none for the report when one of its files is standard output."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """A reader that left early changes no verdict (rich would exit with 1, "violates")."""
            discard(self.file)

    width = None if sys.stdout.isatty() else 120
    out = None if any(str(file) == "-" for file in files) else Patient(width=width)
    return Patient(stderr=True), out


@contextlib.contextmanager
def progress(console: Any) -> Iterator[Tell]:
    """Events on standard error: a bar with a rate on a terminal, otherwise a line a phase and then one now and then."""
    with _bar(console) if console.is_terminal else contextlib.nullcontext(_lines(console)) as tell:
        yield tell


def _lines(console: Any) -> Tell:
    lines = _Lines()

    def tell(event: Event) -> None:
        text = event.line if not isinstance(event, Progress) else lines.of(event, time.monotonic())
        if text is not None:
            with contextlib.suppress(OSError):
                console.print(clean(text), markup=False, highlight=False, soft_wrap=True)

    return tell


class _Lines:
    """When a phase deserves a line, and what it says. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.begun: dict[tuple[str, str], tuple[float, int]] = {}
        self.said = 0.0

    def of(self, state: Progress, now: float) -> str | None:
        key = (state.where, state.phase)
        if key not in self.begun:
            self.begun[key], self.said = (now, state.done), now
            return f"{state.where}: {state.phase}, {state.total}"
        if now - self.said < EVERY_S:
            return None
        self.said = now
        begin, done = self.begun[key]
        rate = (state.done - done) / (now - begin)
        left = f", {rate_of(rate)}, about {duration((state.total - state.done) / rate)} left" if rate else ""
        return f"{state.where}: {state.phase}, {state.done} of {state.total}{left}"


def rate_of(per_second: float | None) -> str:
    """``12/s``, or ``3/min`` where that says more."""
    if not per_second:
        return ""
    return f"{per_second:.0f}/s" if per_second >= 2 else f"{60 * per_second:.0f}/min"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextlib.contextmanager
def _bar(console: Any) -> Iterator[Tell]:
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(rate_of(task.finished_speed or task.speed))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        shown = ""

        def tell(event: Event) -> None:
            nonlocal shown
            if not isinstance(event, Progress):
                bar.console.print(clean(event.line), markup=False, highlight=False, soft_wrap=True)
                return
            name = f"{event.where} {event.phase}"
            if name != shown:  # its rate is not the last phase's
                bar.reset(task, description=name, total=event.total)
                shown = name
            bar.update(task, completed=event.done, total=event.total)

        yield tell


def say(message: str, status: int = 0) -> int:
    """One line on standard error; gives the status back."""
    with contextlib.suppress(OSError, ValueError):
        print(clean(f"rolloutcheck: {message}"), file=sys.stderr, flush=True)
    return status


def discard(stream: Any) -> None:
    """From here on, and at exit, what is written there goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
