"""Histories by hand: a small life of one sample, told call by call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.checkers import Case, Finding, Judgement, checker
from harness.history import (
    ABORTED,
    PLAIN,
    Called,
    Delivered,
    Event,
    Faulted,
    Flagged,
    Halted,
    History,
    Raised,
    Requested,
    Returned,
    SampleView,
)
from harness.schedule import Attempt, Schedule

PROMPT = (1, 2, 3)
EOS = 99


def probability(position: int) -> float:
    return -float(position + 1)


def view(response: tuple[int, ...] = (), status: str = ABORTED, /, **other: Any) -> SampleView:
    """A sample whose arrays agree. The text of a token is its number and a space."""
    given: dict[str, Any] = {
        "tokens": PROMPT + response,
        "response_length": len(response),
        "response": text(response),
        "loss_mask": (1,) * len(response),
        "logprobs": tuple(map(probability, range(len(response)))),
        "status": status,
        "prompt": "p",
    }
    return SampleView(**(given | other))


def text(response: tuple[int, ...]) -> str:
    return "".join(f"{token} " for token in response)


NEW = SampleView(prompt="p")
"""A sample before its first call."""


@dataclass(frozen=True)
class Ask:
    """A request for ``m`` tokens and its answer. ``kept`` are the response tokens in its input (None: all)."""

    m: Any = None
    got: tuple[int, ...] = ()
    finish: str | None = None
    kept: tuple[int, ...] | None = None
    fault: str = ""
    code: int | None = None
    message: str = ""
    status_code: int | None = None
    ids: tuple[int, ...] | None = None
    text: str | None = None
    images: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    logprobs: tuple[float, ...] | None = None
    asks_logprobs: bool = True
    each: bool = False
    """Every token comes in an event of its own, the finish with the last."""


class Life:
    """A run while it is written down; keyword arguments are the schedule's."""

    def __init__(self, *, mode: str = PLAIN, start: SampleView = NEW, **schedule: Any) -> None:
        self.schedule = Schedule(prompt="p", **schedule)
        self.mode, self.events = mode, list[Event]()
        self.views = [start] + [NEW] * (self.schedule.samples - 1)
        self.calls = 0

    def call(
        self,
        *asks: Ask,
        after: SampleView | None = None,
        raises: str = "",
        flag: bool = False,
        sample: int = 0,
        attempt: int | None = None,
        given: Mapping[str, Any] | None = None,
        left: Mapping[str, Any] | None = None,
        decoded: tuple[str, ...] | None = None,
        others: tuple[SampleView, ...] | None = None,
        writes: tuple[str, ...] = (),
        halts: str = "",
        torn: tuple[str, ...] = (),
    ) -> Life:
        """One call: what it asks, and the sample after it (None: as it was)."""
        index = self.calls if attempt is None else attempt
        self.calls = index + 1
        before = self.views[sample]
        params = {"max_new_tokens": self.schedule.budget, **(given or {})}
        place = (index, sample)
        self.events.append(Called(*place, params, before))
        if flag:
            self.events.append(Flagged(*place, None))
        response = before.tokens[len(before.tokens) - before.response_length :]
        for number, ask in enumerate(asks):
            self._ask(ask, (*place, number), response)
        if halts:
            self.events.append(Halted(*place, halts, "it goes on and on"))
            return self
        now = self.views[sample] = before if after is None else after
        rest: Any = (
            now,
            params if left is None else left,
            (text(now.tokens[len(now.tokens) - now.response_length :]),) if decoded is None else decoded,
            tuple(v for i, v in enumerate(self.views) if i != sample) if others is None else others,
            writes,
            torn,
        )
        self.events.append(Raised(*place, raises, "", *rest) if raises else Returned(*place, *rest))
        return self

    def _ask(self, ask: Ask, place: tuple[int, int, int], response: tuple[int, ...]) -> None:
        kept = response if ask.kept is None else ask.kept
        ids = None if ask.text is not None else PROMPT + kept if ask.ids is None else ask.ids
        wire = dict(ask.params) if ask.m is None else {"max_new_tokens": ask.m, **ask.params}
        stream = self.mode != PLAIN
        self.events.append(Requested(*place, stream, ids, ask.text, ask.images, wire, ask.asks_logprobs))
        probs = ask.logprobs
        if probs is None:
            probs = tuple(probability(len(kept) + i) for i in range(len(ask.got)))
        if ask.got or ask.finish:
            size = 1 if ask.each else max(len(ask.got), 1)
            for start in range(0, max(len(ask.got), 1), size):
                end = start + size
                last = end >= len(ask.got)
                finish, status_code = (ask.finish, ask.status_code) if last else (None, None)
                self.events.append(Delivered(*place, ask.got[start:end], probs[start:end], finish, status_code))
        if ask.fault:
            self.events.append(Faulted(*place, ask.fault, ask.code, ask.message))

    @property
    def history(self) -> History:
        return History(self.schedule, self.mode, PROMPT, EOS, tuple(self.events))


def judge(rule: str, life: Life, *others: Life, baseline: Life | None = None) -> Judgement:
    """What the rule's checker says of a life; ``others`` are the same schedule in other modes."""
    histories = {one.mode: one.history for one in (life, *others)}
    return checker(rule)(Case(life.mode, histories, None if baseline is None else baseline.history))


def problem(rule: str, life: Life, *others: Life, baseline: Life | None = None) -> str:
    """The message of the finding; fails where there is none."""
    finding = judge(rule, life, *others, baseline=baseline)
    assert isinstance(finding, Finding), f"{rule} says {finding}"
    return finding.message


def attempts(*kinds: str) -> tuple[Attempt, ...]:
    return tuple(Attempt(kind, code=400 if kind == "http" else None) for kind in kinds)
