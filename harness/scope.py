"""Every schedule of a small scope, without sampling.

A scope of size N holds budgets 0 to N, a prompt of two tokens, an engine that
stops by itself after any number of tokens or never, at most two interruptions
of every kind at every position, and every way to cut the tokens into events;
and with at most one interruption every context limit from one that leaves
nothing to one that does not bind. Most faults show on less (the small scope
hypothesis): see the smallest schedules in docs/mutants.md.

Two kinds are for a real server and left out: to a client of the mock `abort-request`
is `abort-late`, and a `delay` only time that passes.

What has no position is represented by one of each sort that the wire tells
apart: bytes of an event (none, some), HTTP codes, and how often a fault comes
(once, or more often than any client should try: of the codes that pass one stands for all).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from harness.schedule import FIELDS, Attempt, Schedule

PROMPT, PROMPT_TOKENS = "Pq", 2
SCRIPT = (65, 66, 67, 68, 69, 70, 71, 72)
"""All different, so that no token can stand in for another."""

ONLY_SERVERS = frozenset({"abort-request", "delay"})
KEEPS = frozenset({"abort", "abort-late", "abort-retracted"})
CUTS_SHORT = KEEPS | {"abort-queued", "queue-full", "close", "error-event"}
"""What ends an answer after `after` tokens; of these a plain reply and a stream both leave those that `KEEPS`."""

ONCE, ALWAYS = 1, 1000
CODES, LASTING = (400, 429, 500, 503), (400, 503)
MAX_SIZE = len(SCRIPT)


def schedules(size: int) -> Iterator[Schedule]:
    """Every schedule of the scope, each once, always in the same order. ``size`` is from 0 to `MAX_SIZE`."""
    for budget in range(size + 1):
        for natural in (None, *range(budget)):  # the stop token is one of the tokens
            for attempts in _attempts(budget):
                for chunks in chunkings(_longest(budget, natural, attempts)):
                    yield _schedule(budget, natural, None, attempts, chunks)
            for context in range(PROMPT_TOKENS, PROMPT_TOKENS + budget + 9):
                for attempts in ((), *((one,) for one in interruptions(budget))):
                    yield _schedule(budget, natural, context, attempts, (1,))


def count(size: int) -> int:
    """How many schedules the scope holds."""
    return sum(1 for _ in schedules(size))


def _longest(budget: int, natural: int | None, attempts: tuple[Attempt, ...]) -> int:
    """Tokens that the longest answer brings at most: how they are cut beyond that makes no difference."""
    longest, left = 0, budget if natural is None else min(natural + 1, budget)
    for attempt in attempts:
        if attempt.kind not in CUTS_SHORT:
            return max(longest, left) + (attempt.kind == "over-deliver")
        longest = max(longest, min(attempt.after + (attempt.kind == "abort-late"), left))
        if attempt.kind in KEEPS:
            left -= min(attempt.after, left)
    return max(longest, left)


def chunkings(tokens: int) -> list[tuple[int, ...]]:
    """Every way to cut ``tokens`` into events, as the sizes that a schedule repeats."""
    if tokens <= 1:
        return [(1,)]
    cuts = product((False, True), repeat=tokens - 1)
    return [_sizes(cut) for cut in cuts]


def _sizes(cut: tuple[bool, ...]) -> tuple[int, ...]:
    sizes, size = [], 1
    for here in cut:
        if here:
            sizes.append(size)
            size = 0
        size += 1
    return (*sizes, size)


def interruptions(left: int) -> Iterator[Attempt]:
    """Every interruption of an attempt that may bring ``left`` tokens."""
    for after in range(left + 1):
        yield Attempt("abort", after=after)
        yield Attempt("abort-retracted", after=after)
        yield Attempt("flag", after=after)
        yield Attempt("close", after=after)
        for code in (400, 500, None):
            yield Attempt("error-event", after=after, code=code)
        if after:
            yield Attempt("retract", after=after)
        if after < left:
            yield Attempt("abort-late", after=after)
            for at in (0, 12):
                yield Attempt("drop-inside", after=after, at=at)
    yield Attempt("abort-queued")
    yield Attempt("queue-full")
    yield Attempt("drop-after")
    for times in (ONCE, ALWAYS):
        yield Attempt("drop-before", times=times)
        for code in CODES if times == ONCE else LASTING:
            yield Attempt("http", code=code, times=times)
    for field in FIELDS:
        yield Attempt("missing", field=field)
    yield Attempt("lost-ids")
    yield Attempt("over-deliver", after=1)


def _attempts(budget: int) -> Iterator[tuple[Attempt, ...]]:
    """Nothing, one interruption, or two; the way through the buffer is one."""
    yield ()
    yield (Attempt(), Attempt(round_trip=True))
    for first in interruptions(budget):
        yield (first,)
        yield (first, Attempt(round_trip=True))
        kept = first.after if first.kind in KEEPS else 0  # of the others one mode keeps nothing
        for second in interruptions(budget - kept):
            yield (first, second)


def _schedule(
    budget: int, natural: int | None, context: int | None, attempts: tuple[Attempt, ...], chunks: tuple[int, ...]
) -> Schedule:
    return Schedule(
        prompt=PROMPT,
        budget=budget,
        context=context,
        script=SCRIPT,
        natural=natural,
        chunks=chunks,
        attempts=attempts,
    )
