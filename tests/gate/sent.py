"""The bodies that a client sends in the runs of drawn schedules; `python -m tests.gate.sent ROOT REVISION` for slime.

A slime has to be loaded in a process of its own (`harness.targets.slime.load`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from typing import Any
from unittest import mock

from harness.engines.sglang import Engine, Reply
from harness.history import PLAIN, STREAM
from harness.runner import Runner
from harness.strategies import drawn
from harness.targets import Target

SCHEDULES = 80


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """All bodies that reach an engine meanwhile, each once."""
    bodies: dict[str, Any] = {}
    answer = Engine.answer

    def recording(engine: Engine, body: Any, *rest: Any) -> Reply:
        bodies.setdefault(dumps(body), body)
        return answer(engine, body, *rest)

    found: list[Any] = []
    with mock.patch.object(Engine, "answer", recording):
        yield found
    found += bodies.values()


def sent(target: Target) -> list[Any]:
    """What the client sends in plain and in streaming mode."""
    runner = Runner(target)
    try:
        with recorded() as bodies:
            for schedule in drawn(SCHEDULES, seed=0):
                for mode in (PLAIN, STREAM):
                    runner.run(schedule, mode)
    finally:
        runner.close()
    return bodies


def slime(root: str, revision: str) -> None:
    """Writes what slime sends, a line a body."""
    from harness.targets.slime import load

    for body in sent(load(root, revision)):
        print(dumps(body), file=sys.__stdout__)


if __name__ == "__main__":
    slime(*sys.argv[1:])
