"""Checkers: one pure function a rule, from histories to a verdict. One module a rule, named after it.

A checker is given a `Case` and returns a `Finding` where the rule is broken,
`HOLDS` where it was put to the test and held, and None where the history holds
nothing to judge. It knows no target and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.checkers.trace import Trace
from harness.history import MODES, Called, Flagged, Halted, History
from harness.rollouts import Aborting, Began, Broke, Ended, Event, Restarted, RolloutHistory, Taken

if TYPE_CHECKING:
    from harness.checkers.whole import Life


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: in which call (0-based; None: the whole run), of which sample, and what is wrong.

    ``message`` is short: it stands beside the attempt on one screen. ``rollout``
    (1-based) is where it was noticed, in a loop; 0 elsewhere.
    """

    attempt: int | None
    message: str
    sample: int = 0
    rollout: int = 0


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


class RolloutCase:
    """One scenario's history in one mode. ``samples``: only these are looked at one by one; None: all."""

    def __init__(self, mode: str, history: RolloutHistory, samples: frozenset[int] | None = None) -> None:
        self.mode, self.history, self.samples = mode, history, samples

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Every sample's calls (`harness.checkers.whole`)."""
        from harness.checkers import whole

        return tuple(whole.lives(self.history, self.samples))

    def finding(self, event: Event, message: str, sample: int | None) -> Finding:
        """What is wrong as of an event, with the call that the sample was last in and the rollout."""
        attempt, rollout = None, 0
        for known in self.history.events:
            if isinstance(known, Called) and known.sample == sample:
                attempt = known.attempt
            elif isinstance(known, Began):
                rollout = known.rollout
            if known is event:
                break
        return Finding(attempt, message, -1 if sample is None else sample, rollout)

    def lost(self, event: Broke) -> list[int]:
        """The samples that a rollout which raised has left nowhere: a loop may give up, but not lose them.

        None where it may drop groups, or have them in flight until the next rollout.
        """
        if self.history.scenario.spanning or not self.history.scenario.partial:
            return []
        taken, handed = set[int](), set[int]()
        for known in self.history.events:
            if known is event:
                break
            if isinstance(known, Taken):
                taken |= {sample for group in known.groups for sample in group}
            elif isinstance(known, Ended):
                handed |= {member.sample for group in known.groups for member in group}
            elif isinstance(known, Restarted):
                taken = {member.sample for group in known.after for member in group}
        return sorted(taken - handed - {member.sample for group in event.buffer for member in group})

    def rollout_of(self, sample: int, attempt: int | None) -> int:
        """The rollout that a call was made in; of no call in particular, the last one."""
        rollout = 0
        for event in self.history.events:
            if isinstance(event, Began):
                rollout = event.rollout
            elif isinstance(event, Called) and (event.sample, event.attempt) == (sample, attempt):
                break
        return rollout

    def aborting(self, event: Event) -> bool:
        """The loop of the event's rollout had begun to abort by then."""
        found = False
        for known in self.history.events:
            if known is event:
                break
            found = isinstance(known, Flagged | Aborting) or (found and not isinstance(known, Began | Ended))
        return found


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
RolloutChecker = Callable[[RolloutCase], Judgement]

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


ROLLOUT_RULE_IDS = (
    "BUDGET",
    "MAXIMAL",
    "EXHAUSTED",
    "PREFIX",
    "STATUS",
    "ALIGN",
    "ABORT-LIVE",
    "GROUP",
    "PROVENANCE",
)
"""The rules that are judged on whole rollouts; the last three on nothing else."""

LOOP_RULE_IDS = ROLLOUT_RULE_IDS[-3:]


def rollout_checker(rule_id: str) -> RolloutChecker:
    """The checker of a rule over whole rollouts."""
    if rule_id in LOOP_RULE_IDS:
        check: RolloutChecker = _module(rule_id).check
        return check
    from harness.checkers import whole

    return partial(whole.check, checker(rule_id))


def checker(rule_id: str) -> Checker:
    """The checker of a rule, e.g. ``harness.checkers.no_alias.check`` of NO-ALIAS."""
    check: Checker = _module(rule_id).check
    return check


def _module(rule_id: str) -> Any:
    return import_module(f"harness.checkers.{rule_id.lower().replace('-', '_')}")


def halt(history: History | RolloutHistory) -> Halted | None:
    """How the run broke off, if it did: then what is not invalid is unknown."""
    last = history.events[-1] if history.events else None
    return last if isinstance(last, Halted) else None
