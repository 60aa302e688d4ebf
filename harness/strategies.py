"""Hypothesis strategies for schedules.

Simple values come first in every strategy, for Hypothesis's own shrinking in
tests. Kinds and lengths are weighted so that most schedules have something to
resume; up to four `FEATURES` come on top.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from harness.schedule import FIELDS, VERSIONS, Attempt, Schedule

PIECES = ("a", "ab", " the", "b", "é", "12", "日", "<|im_end|>")
"""Prompt pieces: several merge with what follows, so a prompt re-tokenised has another length."""

TOKENS = (65, 97, 98, 256, 32, 0xC3, 0xA9, 230, 151, 165, 273)
"""Response tokens: letters that merge ("a" + "b"), halves of é, thirds of 日, and a special token."""

CACHED_PARTS = 4

LENGTHS = st.integers(0, 9)
AFTER = st.integers(0, 4)  # mostly below the budget, so that something is left to resume
BYTES = st.sampled_from((0, 1, 7, 12, 40, 99))

_ROUND_TRIP = st.sampled_from((False, False, False, True))
_TIMES = st.sampled_from((1, 2, 1, 1000))  # the last: more than any client should try
_COUNTED = ("abort", "abort-late", "abort-retracted", "retract", "flag", "close")


@st.composite
def attempts(draw: st.DrawFn, kinds: tuple[str, ...]) -> Attempt:
    kind = draw(st.sampled_from(kinds))
    given: dict[str, Any] = {"kind": kind, "round_trip": draw(_ROUND_TRIP)}
    if kind in _COUNTED:
        given["after"] = draw(AFTER)
    elif kind == "drop-inside":
        given["after"], given["at"] = draw(AFTER), draw(BYTES)
    elif kind == "error-event":
        given["after"], given["code"] = draw(AFTER), draw(st.sampled_from((500, 400, 503, None)))
    elif kind == "http":
        given["code"] = draw(st.sampled_from((400, 429, 500, 503)))
        given["times"] = draw(_TIMES)
    elif kind == "drop-before":
        given["times"] = draw(_TIMES)
    elif kind == "missing":
        given["field"] = draw(st.sampled_from(FIELDS))
    elif kind == "over-deliver":
        given["after"] = draw(st.integers(1, 3))
    return Attempt(**given)


CONFORMING = (
    "run",  # first, so that shrinking ends here
    *("abort",) * 8,  # most often: what a resumed sample does wrong needs one
    "abort-late",
    "abort-queued",
    "abort-retracted",
    "retract",
    "flag",
    "close",
    "drop-inside",
    "drop-before",
    "drop-after",
    "error-event",
    *("http",) * 2,
    "queue-full",
)
FAULTY = ("over-deliver", "missing", "lost-ids", "abort")

FEATURES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    # Drawn as room beyond the prompt; the larger budgets let a limit outside the engine's reserve bind.
    "context": st.builds(
        lambda n, b: {"context": n, "more": b}, st.sampled_from((*range(21), 40, 40)), st.sampled_from((0, 8, 16))
    ),
    "preload": st.builds(lambda n: {"preload": n}, st.integers(1, 12)),
    "shared": st.builds(lambda n: {"samples": n}, st.just(2)),
    "images": st.builds(lambda n: {"images": n}, st.integers(1, 2)),
    "params": st.builds(
        lambda m, s, t: {"min_new_tokens": m, "seed": s, "stop": t},
        st.integers(0, 6),
        st.sampled_from((None, 0, 7)),
        st.sampled_from(((), ("\u2603",))),
    ),
    "wire": st.builds(
        lambda c, s: {"chunks": tuple(c), "split": s},
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
        st.sampled_from((0, 1, 5, 64)),
    ),
    "version": st.builds(lambda v: {"sglang": v}, st.just(VERSIONS[1])),
    # Tokens without any text, at times nothing but these.
    "special": st.builds(lambda s: {"skip_special_tokens": True, **s}, st.sampled_from(({}, {"script": (273,)}))),
}

_FEATURES = st.lists(st.one_of(FEATURES["context"], *FEATURES.values()), max_size=4)
_PROMPTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
_SCRIPTS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5).map(tuple)
_NATURAL = st.one_of(st.none(), st.none(), LENGTHS)


@st.composite
def schedules(draw: st.DrawFn, *, faulty: bool = False) -> Schedule:
    """Schedules on a conforming engine, or with ``faulty`` on one that breaks its own contract."""
    given: dict[str, Any] = {
        "budget": draw(LENGTHS),
        "attempts": tuple(draw(_FAULTY_ATTEMPTS if faulty else _ATTEMPTS)),
        "script": draw(_SCRIPTS),
        "natural": draw(_NATURAL),
        "prompt": draw(_PROMPTS),
    }
    for feature in draw(_FEATURES):
        given |= feature
    if "context" in given:
        given["context"] += len(given["prompt"])
        given["budget"] += given.pop("more")
    if "preload" in given and given["natural"] is not None:  # the engine would have ended there
        given["preload"] = min(given["preload"], given["natural"])
    if "min_new_tokens" in given:  # a minimum above the budget would be the caller's own mistake
        given["min_new_tokens"] = min(given["min_new_tokens"], given["budget"])
    return Schedule(**given)


_ATTEMPTS = st.lists(attempts(CONFORMING), min_size=1, max_size=4)
_FAULTY_ATTEMPTS = st.lists(attempts(FAULTY), min_size=1, max_size=3)

BATCH, BATCHES = 20, 9
PART = BATCH * BATCHES
T = TypeVar("T", bound=Hashable)


def batches(values: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of values, as `distinct` draws them."""
    return st.lists(values, min_size=BATCH, max_size=BATCH)


_BATCHES = {faulty: batches(schedules(faulty=faulty)) for faulty in (False, True)}
_CONFIG = settings(
    max_examples=BATCHES,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


def drawn(count: int, seed: int, *, faulty: bool = False) -> Iterator[Schedule]:
    """``count`` different schedules, the same for the same seed."""
    return sample_parts(lambda number: part(seed, number, faulty=faulty), count)


def sample_parts(part: Callable[[int], Sequence[T]], count: int) -> Iterator[T]:
    """The first ``count`` different values of parts 0, 1 and so on."""
    seen: set[T] = set()
    number = 0
    while len(seen) < count:
        for value in part(number):
            if value not in seen and len(seen) < count:
                seen.add(value)
                yield value
        number += 1


@lru_cache(maxsize=CACHED_PARTS)
def part(seed: int, number: int, *, faulty: bool = False) -> tuple[Schedule, ...]:
    """The ``number``-th part of what is drawn for a seed: different schedules, `PART` at most.

    The last few are kept: one process often checks many revisions on the same schedules.
    """
    return distinct(_BATCHES[faulty], seed, number)


def distinct(batches: st.SearchStrategy[list[T]], seed: int, number: int) -> tuple[T, ...]:
    """The different values of the ``number``-th part for a seed.

    They are drawn in lists, a few lists at a time: behind its tenth example
    Hypothesis mutates five for each it draws anew, which serves coverage-guided
    search and here gives near-duplicates (a sixth as many ideas, measured).
    """
    found: list[T] = []

    def collect(batch: list[T]) -> bool:
        found.extend(batch)
        return False

    callbacks = gc.callbacks[:]
    with suppress(NoSuchExample):
        find(batches, collect, settings=_CONFIG, random=_random(seed, number))
    gc.callbacks[:] = callbacks  # Hypothesis times collections, and a Ctrl-C that comes in there is lost
    return tuple(dict.fromkeys(found))


def _random(seed: int, part: int) -> random.Random:
    return random.Random(seed * 1_000_003 + part)
