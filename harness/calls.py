"""Which call of generate the running task is inside.

A loop generates many samples at once, and their requests look alike. Targets
set `CURRENT` around each call; it travels with the task, and with whatever that
task starts or writes, to the engine's front.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Call:
    """The ``attempt``-th call on ``sample``; ``requests`` counts what it has sent."""

    attempt: int
    sample: int
    requests: int = 0


NOBODY = -1
"""The sample of a request that no call of generate made."""

CURRENT: ContextVar[Call | None] = ContextVar("CURRENT", default=None)
