"""A history, grouped: calls in order, each with its requests and what they brought.

Derived from the events alone; the checkers read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from harness.history import (
    TERMINAL,
    Called,
    Delivered,
    Faulted,
    Halted,
    History,
    Raised,
    Requested,
    Returned,
    SampleView,
)
from harness.schedule import Attempt

DEFAULT_MAX_NEW = 128  # SGLang 0.5.23 without max_new_tokens (`max_omitted`)
RESERVE = 6  # SGLang refuses input >= C - 6 (spec/README.md, item 7)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and all the client was told in answer."""

    request: Requested
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None
    status_code: int | None
    fault: Faulted | None
    ends: tuple[int, ...]
    """How many ids there were after each event; of a plain reply one number."""

    @property
    def asked(self) -> int | None:
        """m: max_new_tokens on the wire, the engine's default if absent, None for no limit."""
        value = self.request.params.get("max_new_tokens", DEFAULT_MAX_NEW)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def refused(self) -> bool:
        """A deterministic 4xx, as a status or as an error event (spec/README.md#RETRY)."""
        code = self.fault.code if self.fault is not None else None
        return code is not None and 400 <= code < 500 and code != 429


@dataclass(frozen=True)
class Turn:
    """One call of generate."""

    index: int
    plan: Attempt
    entry: SampleView
    params: Mapping[str, Any]
    exchanges: tuple[Exchange, ...]
    flagged: bool
    outcome: Returned | Raised | Halted | None
    siblings: tuple[SampleView, ...]

    @property
    def after(self) -> SampleView | None:
        """The sample after the call; None when the call had no end."""
        return self.outcome.view if isinstance(self.outcome, Returned | Raised) else None

    @property
    def returned(self) -> SampleView | None:
        return self.outcome.view if isinstance(self.outcome, Returned) else None

    @property
    def live(self) -> bool:
        """The sample was not finished when the call began."""
        return self.entry.status not in TERMINAL

    @property
    def last(self) -> Exchange | None:
        return self.exchanges[-1] if self.exchanges else None


def response_ids(view: SampleView) -> tuple[int, ...]:
    """The response's part of the tokens, by the sample's own response_length."""
    r = view.response_length
    return view.tokens[len(view.tokens) - r :] if r <= len(view.tokens) else ()


class Trace:
    """A history with its turns. ``budget``, ``context`` and ``prompt`` are B, C and P."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.schedule = history.schedule
        self.budget, self.context = history.schedule.budget, history.schedule.context
        self.prompt_ids = history.prompt_ids
        self.prompt = len(history.prompt_ids)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The calls on the sample under test."""
        return self.by_sample[0]

    @cached_property
    def all_turns(self) -> tuple[tuple[int, Turn], ...]:
        """(sample, turn) of every sample, siblings included."""
        return tuple((n, t) for n, turns in enumerate(self.by_sample) for t in turns)

    @cached_property
    def by_sample(self) -> tuple[tuple[Turn, ...], ...]:
        """The calls on each sample. Apart from how they are found: mutmut leaves a decorated function as it is."""
        return self._grouped()

    def _grouped(self) -> tuple[tuple[Turn, ...], ...]:
        samples: list[list[Turn]] = [[] for _ in range(self.schedule.samples)]
        views: dict[int, SampleView] = {}
        events = self.history.events
        starts = [i for i, e in enumerate(events) if isinstance(e, Called)]
        for begin, end in pairwise([*starts, len(events)]):
            called = events[begin]
            assert isinstance(called, Called)
            known = {n: v for n, v in views.items() if n != called.sample}
            turn = self._turn(called, events[begin + 1 : end], tuple(v for _, v in sorted(known.items())))
            samples[called.sample].append(turn)
            if turn.after is not None:
                views[called.sample] = turn.after
        return tuple(map(tuple, samples))

    def _turn(self, called: Called, events: Any, siblings: tuple[SampleView, ...]) -> Turn:
        requests: dict[int, Requested] = {}
        told: dict[int, list[Delivered]] = {}
        faults: dict[int, Faulted] = {}
        flagged, outcome = False, None
        for event in events:
            if outcome is not None:
                break  # what a left connection still brings reaches nobody
            if isinstance(event, Returned | Raised | Halted):
                outcome = event
            elif (event.attempt, event.sample) != (called.attempt, called.sample):
                continue
            elif isinstance(event, Requested):
                requests[event.number] = event
            elif isinstance(event, Delivered):
                told.setdefault(event.number, []).append(event)
            elif isinstance(event, Faulted):
                faults[event.number] = event
            else:
                flagged = True
        exchanges = tuple(_exchange(r, told.get(n, []), faults.get(n)) for n, r in sorted(requests.items()))
        attempts = self.schedule.attempts
        plan = attempts[called.attempt] if called.attempt < len(attempts) else Attempt()
        return Turn(called.attempt, plan, called.view, called.params, exchanges, flagged, outcome, siblings)

    def room(self, kept: int) -> int:
        """min(B - r, C - P - r); may be negative."""
        room = self.budget - kept
        return room if self.context is None else min(room, self.context - self.prompt - kept)

    def kept_at(self, turn: Turn, exchange: Exchange) -> int:
        """r of a request: the response tokens in its input, if it is one the rules know, else those on the sample."""
        ids = exchange.request.input_ids
        if ids is None:  # text: the prompt again, either as a restart or with the kept tokens forgotten (PREFIX)
            restarts = exchange.request.text == turn.entry.prompt and exchange.asked == self.room(0)
            return 0 if restarts else turn.entry.response_length
        entry = response_ids(turn.entry)
        rest = ids[self.prompt :]
        if ids[: self.prompt] == self.prompt_ids and (not rest or rest[: len(entry)] == entry):
            return len(rest)
        return turn.entry.response_length

    def in_reserve(self, kept: int) -> bool:
        """Whether an input with ``kept`` response tokens falls into the engine's reserve below C."""
        return self.context is not None and self.prompt + kept >= self.context - RESERVE

    def near_limit(self) -> bool:
        """Whether a call came into the engine's reserve below C, where its answers are its own affair."""
        return any(
            self.in_reserve(kept)
            for turn in self.turns
            for kept in (turn.entry.response_length, *(self.kept_at(turn, e) for e in turn.exchanges))
        )


def _exchange(request: Requested, told: list[Delivered], fault: Faulted | None) -> Exchange:
    end = told[-1] if told else None
    return Exchange(
        request,
        tuple(i for d in told for i in d.ids),
        tuple(p for d in told for p in d.logprobs),
        end.finish if end else None,
        end.status_code if end else None,
        fault,
        tuple(accumulate(len(d.ids) for d in told)),
    )
