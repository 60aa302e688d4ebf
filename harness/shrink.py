"""Makes a schedule as small as it can be while it still breaks a rule.

Works on schedules, not on the choices they were drawn from, so that a corpus
entry or a failure file shrinks as well as a drawn one, and the same fault
gives the same counterexample whatever found it. Greedy: the first simpler
schedule that is still broken is taken, until none is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from harness.scenario import Scenario
from harness.schedule import Attempt, Schedule
from harness.shrink_rollouts import simpler as simpler_scenarios
from harness.shrink_rollouts import size as size_of_scenario
from harness.work import Work

MAX_TRIES, MAX_S = 900, 60.0
"""Enough for every fault seen; a schedule of an issue's own numbers may cost a second a try."""

_PLAIN = Schedule()
_FIELDS = tuple(f.name for f in fields(Schedule) if f.name not in ("budget", "attempts"))
_NUMBERS = ("budget", "context", "natural", "preload", "min_new_tokens")
_CODES = (400, 429, 500)
_SORTS = (0x80, 256, 273)
"""A token of each sort that is not a plain letter: a byte that is no character, two letters, one without text."""


def shrink(schedule: Work, broken: Callable[[Work], bool]) -> Work:
    """The smallest schedule, or scenario, found with ``broken`` true, ``schedule`` itself if there is none smaller.

    Calls ``broken`` at most `MAX_TRIES` times and for `MAX_S` seconds, never twice with the same schedule.
    """
    current: Work = schedule
    seen, end = {schedule}, time.monotonic() + MAX_S
    found = True
    while found:
        found = False
        found_simpler = simpler_scenarios(current) if isinstance(current, Scenario) else _simpler(current)
        for simpler in found_simpler:
            if simpler in seen or size(simpler) >= size(current):
                continue
            seen.add(simpler)
            if len(seen) > MAX_TRIES or time.monotonic() > end:
                return current
            if broken(simpler):
                current, found = simpler, True
                break
    return current


def size(schedule: Work) -> tuple[int, ...]:
    """What smaller means, for `min` and comparisons of two of a kind.

    Of a schedule: no mistake of the caller's, less that is unusual, fewer attempts, smaller numbers, in this order.
    A sample from a buffer weighs more than the aborted attempt that explains how it got there.
    """
    if isinstance(schedule, Scenario):
        return size_of_scenario(schedule)
    unusual = sum(getattr(schedule, n) != getattr(_PLAIN, n) for n in _FIELDS) + 2 * bool(schedule.preload)
    attempts = schedule.attempts
    interrupted = sum((a.kind != "run") + (a.kind not in ("run", "abort")) + a.round_trip for a in attempts)
    numbers = sum(getattr(schedule, n) or 0 for n in _NUMBERS) + schedule.samples + schedule.images
    numbers += sum(a.after + a.at + a.times + (a.code or 0) for a in attempts)
    rest = len(schedule.prompt) + len(schedule.script) + len(schedule.chunks) + sum(schedule.chunks)
    unlike = unusual + len(attempts) + interrupted
    return (_odd(schedule), unlike, len(attempts), numbers, rest, sum(a.after for a in attempts), _order(schedule))


def _odd(schedule: Schedule) -> int:
    """How many of the caller's own mistakes a schedule holds: they persuade nobody."""
    too_long = schedule.context is not None and schedule.context < len(schedule.prompt)
    past_end = schedule.natural is not None and schedule.preload > schedule.natural  # no engine gave these tokens
    return too_long + past_end + (schedule.min_new_tokens > schedule.budget)


def _order(schedule: Schedule) -> int:
    """Breaks ties, so that a prompt of other letters or another token can become the plain one."""
    kinds = sum(len(a.kind + a.field) for a in schedule.attempts)
    letters = sum(abs(ord(letter) - ord(_PLAIN.prompt)) for letter in schedule.prompt)
    return letters + sum(schedule.script) + kinds + (schedule.seed or 0)


def _simpler(s: Schedule) -> Iterator[Schedule]:
    """Simpler schedules, the boldest first."""
    attempts = s.attempts
    yield replace(s, attempts=())
    for i in reversed(range(len(attempts))):
        yield replace(s, attempts=(*attempts[:i], *attempts[i + 1 :]))
    for name in _FIELDS:
        yield _with(s, **{name: getattr(_PLAIN, name)})
    yield s.from_the_start()
    for i, attempt in enumerate(attempts):
        for simple in _simpler_attempts(attempt):
            yield replace(s, attempts=(*attempts[:i], simple, *attempts[i + 1 :]))
    yield from _lower_numbers(s)
    if s.seed:
        yield _with(s, seed=0)
    for cut in (s.prompt[: len(s.prompt) // 2], s.prompt[1:], s.prompt[:-1], _PLAIN.prompt * len(s.prompt)):
        if cut:
            yield replace(s, prompt=cut)
            if s.context:
                yield replace(s, prompt=cut, context=max(s.context - len(s.prompt) + len(cut), 0))
    for script in (s.script[:1], s.script[: len(s.script) // 2], s.script[1:], s.script[:-1]):
        if script:
            yield replace(s, script=script)
    for i, token in enumerate(s.script):
        for other in (*_PLAIN.script, *_SORTS):
            if other < token:
                yield replace(s, script=(*s.script[:i], other, *s.script[i + 1 :]))
    if s.script != _PLAIN.script and s.natural is None:
        yield _with(s, script=_PLAIN.script, natural=0)  # the stop token is an odd one too
    for name in _FIELDS:  # one odd token may do what another field did
        if name != "script" and getattr(s, name) != getattr(_PLAIN, name):
            for other in _SORTS:
                yield _with(s, **{name: getattr(_PLAIN, name), "script": (other,)})
    yield _with(s, chunks=s.chunks[:1], samples=2 if s.samples > 2 else s.samples, images=min(s.images, 1))


def _simpler_attempts(a: Attempt) -> Iterator[Attempt]:
    yield Attempt()
    yield Attempt(round_trip=a.round_trip)
    yield Attempt("abort", after=a.after)
    yield Attempt("abort", after=a.after + 1)  # what a late abort brings
    if a.kind in ("error-event", "drop-inside", "close"):  # what ends a stream, the simplest first
        for kind in ("flag", "close", "drop-inside"):
            yield Attempt(kind, after=a.after)
    if a.kind == "http":  # no answer at all is a simpler fault than one with a code
        yield Attempt("drop-before", times=a.times)
    for name in ("round_trip", "times", "at"):
        yield replace(a, **{name: getattr(_RUN, name)})
    for code in _CODES:
        if a.code is not None and code < a.code:
            yield replace(a, code=code)
    if a.times > 2:
        yield replace(a, times=2)


def _lower_numbers(s: Schedule) -> Iterator[Schedule]:
    """Each number alone to 0, 1, a half or one less; then any two of them by the same amount."""
    numbers = _numbers(s)
    for key, value in numbers.items():
        for lower in dict.fromkeys((0, 1, value // 2, value - 1)):
            if 0 <= lower < value:
                yield _set(s, {key: lower})
    for one, two in combinations(numbers, 2):
        least = min(numbers[one], numbers[two])
        for step in dict.fromkeys((least, least // 2, 1)):
            if 0 < step <= least:
                yield _set(s, {one: numbers[one] - step, two: numbers[two] - step})
    if numbers:
        yield _set(s, {key: max(value - 1, 0) for key, value in numbers.items()})
    for key, value in numbers.items():  # what interrupts comes earlier, and the budget makes up for it
        if isinstance(key, int) and value > 1:
            yield _set(s, {key: 1, "budget": s.budget + value - 1})


def _numbers(s: Schedule) -> dict[str | int, int]:
    """Numbers of the schedule by field, and ``after`` of its attempts by position."""
    found: dict[str | int, int] = {n: v for n in _NUMBERS if (v := getattr(s, n))}
    return found | {i: a.after for i, a in enumerate(s.attempts) if a.after}


def _set(s: Schedule, values: dict[Any, int]) -> Schedule:
    attempts = tuple(replace(a, after=values[i]) if i in values else a for i, a in enumerate(s.attempts))
    return _with(s, attempts=attempts, **{n: v for n, v in values.items() if isinstance(n, str)})


def _with(s: Schedule, **values: Any) -> Schedule:
    return replace(s, **values)


_RUN = Attempt()
