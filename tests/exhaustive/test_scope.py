"""Every schedule of a small scope: which there are, and that the reference keeps every rule on each."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate

import pytest

from harness import scope, tokenizer
from harness.checkers import RULE_IDS
from harness.engines.sglang import Engine, Place
from harness.history import MODES
from harness.inline import Inline
from harness.mutants import load
from harness.options import Options
from harness.schedule import FAULTY_ENGINE, FIELDS, KINDS, Attempt, Schedule, from_json, to_json
from harness.search import Search, applies
from harness.targets.spec import TargetSpec

COUNTS = {0: 973, 1: 4687, 2: 18077, 3: 58335}
"""Counted on 2026-11-29. A change of the scope must be meant."""


def test_a_scope_is_counted_and_holds_nothing_twice() -> None:
    for size, count in COUNTS.items():
        found = list(scope.schedules(size))
        assert len(found) == len(set(found)) == scope.count(size) == count


def test_a_larger_scope_holds_the_smaller_one() -> None:
    assert set(scope.schedules(1)) <= set(scope.schedules(2))


def test_every_schedule_of_a_scope_is_one_that_can_be_written_down() -> None:
    for schedule in scope.schedules(1):
        assert from_json(to_json(schedule)) == schedule


def test_the_prompt_has_two_tokens_and_the_script_as_many_as_it_says() -> None:
    words = tokenizer.load()
    assert len(words.encode(scope.PROMPT, add_special_tokens=False)) == scope.PROMPT_TOKENS
    assert len(set(scope.SCRIPT)) == len(scope.SCRIPT) == scope.MAX_SIZE


def test_every_kind_stands_at_every_position() -> None:
    found = list(scope.interruptions(2))
    assert {a.kind for a in found} == KINDS.keys() - {"run"} - scope.ONLY_SERVERS
    for kind in ("abort", "abort-retracted", "flag", "close", "error-event"):
        assert {a.after for a in found if a.kind == kind} == {0, 1, 2}
    assert {a.field for a in found} - {""} == set(FIELDS)
    assert {a.code for a in found if a.kind == "http"} == {400, 429, 500, 503}


def test_two_interruptions_stand_in_every_order() -> None:
    pairs = {s.kinds for s in scope.schedules(1) if len(s.attempts) == 2}
    kinds = KINDS.keys() - {"run"} - scope.ONLY_SERVERS
    assert {(one, two) for one in kinds for two in kinds} - pairs == set()
    assert ("abort", "run") in pairs  # the way through the buffer


@pytest.mark.parametrize(("tokens", "ways"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 8)])
def test_every_way_to_cut_tokens_into_events(tokens: int, ways: int) -> None:
    found = scope.chunkings(tokens)
    assert len(set(found)) == len(found) == ways
    ends = {tuple(accumulate(sizes)) for sizes in found}
    assert len(ends) == ways and all(e[-1] == max(tokens, 1) for e in ends)


@pytest.mark.parametrize(
    ("budget", "natural", "attempts", "longest"),
    [
        (3, None, (), 3),
        (3, 0, (), 1),
        (3, None, (Attempt("abort", after=1),), 2),
        (3, None, (Attempt("abort-late", after=2),), 3),
        (3, None, (Attempt("close", after=2),), 3),  # a plain reply keeps none of it
        (3, None, (Attempt("flag", after=1), Attempt("abort", after=3)), 3),
        (3, None, (Attempt("abort", after=2), Attempt("abort", after=1)), 2),
        (3, None, (Attempt("over-deliver", after=1),), 4),
        (3, 1, (Attempt("abort", after=2),), 2),
    ],
)
def test_tokens_are_cut_as_far_as_an_answer_goes(
    budget: int, natural: int | None, attempts: tuple[Attempt, ...], longest: int
) -> None:
    assert scope._longest(budget, natural, attempts) == longest


def test_the_reference_keeps_every_rule_on_every_schedule_of_a_small_scope() -> None:
    """In all modes, on both kinds of engine; each rule is put to the test wherever it applies."""
    options = Options(TargetSpec("reference"), scope=1)
    with closing(Inline(options.target)) as worker:
        search = Search(worker, MODES, options, "inproc")
        assert search.observe_all(scope.schedules(1)) == COUNTS[1]
    assert {key: t.broken or t.reason for key, t in search.tallies.items() if t.broken or t.reason} == {}
    judged = {(rule, mode) for (rule, mode, faulty), t in search.tallies.items() if t.judged and not faulty}
    assert judged == {(r, m) for r in RULE_IDS for m in MODES if applies(r, m, MODES)}


def test_a_small_scope_shows_most_mutants() -> None:
    """The small scope hypothesis, on our own faults: the smallest schedules of most lie within size 3."""
    shown = [m.shows for m in load().values() if isinstance(m.shows, Schedule)]
    inside = [schedule for schedule in shown if schedule.budget <= 3 and len(schedule.attempts) <= 2]
    assert len(inside) / len(shown) > 0.85
    assert {a.kind for a in scope.interruptions(1)} >= FAULTY_ENGINE


def test_what_only_servers_are_for_is_what_others_are() -> None:
    """The mock's bytes are the same: the scope would hold every schedule twice."""
    engine = [Engine(Schedule(prompt=scope.PROMPT, script=scope.SCRIPT), tokenizer.load()) for _ in range(4)]
    body = {"input_ids": [80, 113], "stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    kinds = ("abort-late", "abort-request", "run", "delay")
    late, request, run, delay = (
        [part.data for part in one.answer(body, Attempt(kind, 2, times=9), Place(1, 0, 1)).parts]
        for one, kind in zip(engine, kinds, strict=True)
    )
    assert late == request != run == delay
    assert {"abort-request", "delay"} == scope.ONLY_SERVERS
