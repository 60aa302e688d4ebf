"""Checkers: one pure function a rule, from histories to a verdict. One module a rule, named after it.

A checker is given a `Case` and returns a `Finding` where the rule is broken,
`HOLDS` where it was put to the test and held, and None where the history holds
nothing to judge. It knows no target and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module

from harness.checkers.trace import Trace
from harness.history import MODES, Halted, History


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: in which call (0-based; None: the whole run), of which sample, and what is wrong.

    ``message`` is short: it stands beside the attempt on one screen.
    """

    attempt: int | None
    message: str
    sample: int = 0


class Held(Enum):
    HOLDS = "holds"


HOLDS = Held.HOLDS
Judgement = Finding | Held | None


class Case:
    """One schedule's histories: ``mode`` is judged; ``others`` and ``baseline`` are to compare with.

    ``others`` maps modes to histories of the same schedule, ``baseline`` is the
    run in the same mode that nothing interrupted.
    """

    def __init__(self, mode: str, histories: Mapping[str, History], baseline: History | None = None) -> None:
        self.mode, self._histories, self._baseline = mode, histories, baseline

    @property
    def history(self) -> History:
        return self._histories[self.mode]

    @cached_property
    def trace(self) -> Trace:
        return _trace(self.history)

    @cached_property
    def compared(self) -> Trace | None:
        """The history MODE-EQ and RETRY compare with: the first mode before this one that was run."""
        for mode in MODES[: MODES.index(self.mode)]:
            if mode in self._histories:
                return _trace(self._histories[mode])
        return None

    @cached_property
    def baseline(self) -> Trace | None:
        return None if self._baseline is None else _trace(self._baseline)


_traces: dict[int, Trace] = {}


def _trace(history: History) -> Trace:
    """The trace of a history, made once: three cases look at one plain run, and many at one baseline.

    A trace holds its history, so no other history can have its id while it is here.
    """
    found = _traces.get(id(history))
    if found is None:
        if len(_traces) >= 256:
            _traces.clear()
        found = _traces[id(history)] = Trace(history)
    return found


Checker = Callable[[Case], Judgement]

RULE_IDS = (
    "BUDGET",
    "MAXIMAL",
    "CONTEXT",
    "EXHAUSTED",
    "PREFIX",
    "RESUME-EQ",
    "MODE-EQ",
    "STATUS",
    "ALIGN",
    "TEXT",
    "NO-ALIAS",
    "RETRY",
    "PARAMS",
)


def checker(rule_id: str) -> Checker:
    """The checker of a rule, e.g. ``harness.checkers.no_alias.check`` of NO-ALIAS."""
    module = import_module(f"harness.checkers.{rule_id.lower().replace('-', '_')}")
    check: Checker = module.check
    return check


def halt(history: History) -> Halted | None:
    """How the run broke off, if it did: then what is not invalid is unknown."""
    last = history.events[-1] if history.events else None
    return last if isinstance(last, Halted) else None
