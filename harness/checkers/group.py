"""GROUP: groups stay whole, finished members are left alone, no sample is lost, doubled or handed over unfinished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.checkers import HOLDS, Judgement, RolloutCase
from harness.history import (
    ABORTED,
    COMPLETED,
    PENDING,
    TERMINAL,
    TRUNCATED,
    Called,
    Raised,
    Requested,
    Returned,
    SampleView,
)
from harness.rollouts import Began, Broke, Ended, Event, Group, Member, Restarted, Stopped, Taken

Problem = tuple[str, int | None]
UNFINISHED = frozenset({PENDING, ABORTED})


def check(case: RolloutCase) -> Judgement:
    ledger = _Ledger(case)
    for event in case.history.events:
        for problem, sample in ledger.book(event):
            return case.finding(event, problem, sample)
    return HOLDS if ledger.judged else None


class _Ledger:
    """Where every sample is, as the events come: taken, in the buffer, or handed to training."""

    def __init__(self, case: RolloutCase) -> None:
        self.case, self.scenario = case, case.history.scenario
        self.taken: set[int] = set()
        self.handed: dict[int, int] = {}
        self.finished: set[int] = set()
        self.budget = self.scenario.budget
        self.left: dict[int, str] = {}
        """The status in which a sample's last call has left it."""
        self.raised: dict[int, str] = {}
        """The samples whose last call raised, with the error's name."""
        self.judged = False

    def book(self, event: Event) -> Iterator[Problem]:
        """Notes an event; gives what is wrong with it."""
        if isinstance(event, Began):
            self.budget = event.budget
        elif isinstance(event, Taken):
            yield from self._taken(event)
        elif isinstance(event, Called):
            yield from self._called(event)
        elif isinstance(event, Requested):
            if event.sample in self.finished:
                yield "had finished, and is generated again", event.sample
        elif isinstance(event, Returned | Raised):
            self.left[event.sample] = event.view.status
            self.raised.pop(event.sample, None)
            if isinstance(event, Raised) and event.error != "CancelledError":
                self.raised[event.sample] = event.error
            elif event.view.status in TERMINAL:
                self.finished.add(event.sample)
        elif isinstance(event, Ended):
            self.judged = True
            yield from self._ended(event)
        elif isinstance(event, Stopped):
            yield from self._kept(event.buffer, "the loop is shut down")
            yield from self._given_up(event)
        elif isinstance(event, Restarted):
            yield from self._restarted(event)
        elif isinstance(event, Broke):
            yield from self._broke(event)

    def _taken(self, event: Taken) -> Iterator[Problem]:
        for group in event.groups:
            if len(group) != self.scenario.members:
                yield (
                    f"a group of {len(group)} is generated, not of {self.scenario.members}",
                    group[0] if group else None,
                )
            for sample in group:
                if sample in self.handed:
                    yield f"is generated again, though rollout {self.handed[sample]} handed it over", sample
        self.taken |= {sample for group in event.groups for sample in group}

    def _called(self, event: Called) -> Iterator[Problem]:
        kept = event.view.response_length
        if not self.scenario.partial and kept and event.view.status not in TERMINAL:
            yield f"goes on from {kept} kept tokens, though partial rollout is off", event.sample

    def _ended(self, event: Ended) -> Iterator[Problem]:
        for group in (*event.groups, *event.buffer):
            if len(group) != self.scenario.members:
                yield f"comes back in a group of {len(group)}, not of {self.scenario.members}", _first(group)
        for member in _members((*event.groups, *event.buffer)):
            if member.scored and _unfinished(member):
                yield f"has a reward, though it is {_status(member)}", member.sample
        yield from self._kept((*event.groups, *event.buffer), "the rollout has ended")
        for member in _members(event.groups):
            if _unfinished(member):
                yield f"is handed to training {_status(member)}", member.sample
            elif self.left.get(member.sample) in UNFINISHED and self._relabelled(member.views[-1]):
                status, left = member.views[-1].status, self.left[member.sample]
                yield f"is handed to training {status}, but its last call left it {left}", member.sample
            self.handed[member.sample] = event.rollout

    def _relabelled(self, view: SampleView) -> bool:
        """Called finished, though nothing says so: no stop token, and room left (spec/README.md, items 1 and 2)."""
        stopped = view.tokens[-1:] == (self.case.history.eos,)
        early = view.status == TRUNCATED and view.response_length < self.budget
        return not stopped and (view.status == COMPLETED or early)

    def _kept(self, groups: Iterable[Group], when: str) -> Iterator[Problem]:
        """What there is when the loop is at rest: every sample that was taken, once."""
        seen: set[int] = set()
        for member in _members(groups):
            if member.sample in seen:
                yield f"is there twice when {when}", member.sample
            if member.sample in self.handed:
                yield f"comes back, though rollout {self.handed[member.sample]} handed it over", member.sample
            seen.add(member.sample)
        if self.scenario.partial and not self.scenario.spanning:
            for sample in sorted(self.taken - seen - self.handed.keys()):
                yield "is lost: neither handed to training nor in the buffer", sample

    def _restarted(self, event: Restarted) -> Iterator[Problem]:
        after = {member.sample: member for member in _members(event.after)}
        for member in _members(event.before):
            found = after.get(member.sample)
            if found is None:
                yield "was in the buffer when it was saved, and is not when it is loaded", member.sample
            elif _tokens(found) != _tokens(member):
                yield "was saved with other tokens than are loaded", member.sample
        self.taken = after.keys() | self.handed.keys()
        self.raised.clear()
        self.left.clear()
        self.finished = {s for s, m in after.items() if all(v.status in TERMINAL for v in m.views)}

    def _given_up(self, event: Stopped) -> Iterator[Problem]:
        """A loop may not lose what a call of generate has failed on."""
        there = {member.sample for member in _members(event.buffer)}
        for sample in sorted(self.raised.keys() - there - self.handed.keys()) if self.scenario.partial else ():
            yield f"is lost: its call raised {self.raised[sample]}, and nobody tries again", sample

    def _broke(self, event: Broke) -> Iterator[Problem]:
        """What a call of generate raised may be passed on; what the loop itself raises must not lose samples."""
        lost = self.case.lost(event)
        if lost and not event.passed_on and not self.case.aborting(event):
            yield f"is lost: rollout {event.rollout} raises {event.error}: {event.message}", lost[0]


def _members(groups: Iterable[Group]) -> Iterator[Member]:
    for group in groups:
        yield from group


def _first(group: Group) -> int | None:
    return group[0].sample if group else None


def _unfinished(member: Member) -> bool:
    return any(view.status in UNFINISHED for view in member.views)


def _status(member: Member) -> str:
    view = next(view for view in member.views if view.status in UNFINISHED)
    return f"{view.status} with {view.response_length}"


def _tokens(member: Member) -> list[tuple[int, ...]]:
    return [view.tokens for view in member.views]
