"""What a command tells while it works. Its last word, the outcome, is what every reporter makes its form of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the work stands: ``done`` of ``total`` schedules, revisions or seeds of this phase."""

    where: str
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Said:
    """A line worth reading while the work goes on, such as a step of a bisection."""

    line: str


Event = Progress | Said
Tell = Callable[[Event], None]


def ignore(event: Event) -> None:
    """For callers that do not listen."""
