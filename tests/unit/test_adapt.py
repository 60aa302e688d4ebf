"""What was made for the mock, as a server that runs can take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness import corpus, tokenizer
from harness.adapt import BECOMES, LONGEST_BUDGET, LOOPS_CANNOT, MARGIN, SCALE, adapt
from harness.engines.proxy import CARRIED, ProxyFront
from harness.scenario import STEPS, Scenario, Step
from harness.schedule import FAULTY_ENGINE, KINDS, Attempt, Schedule
from harness.server import Server

VOCABULARY = tokenizer.load()
SERVER = Server("http://h", context=256)


def adapted(server: Server = SERVER, **schedule: Any) -> Schedule | None:
    made = adapt(Schedule(**schedule), server, VOCABULARY)
    assert made is None or isinstance(made, Schedule)
    return made


def tokens(text: str) -> int:
    return len(VOCABULARY.encode(text, add_special_tokens=False))


def test_every_kind_is_carried_becomes_another_or_is_left_out() -> None:
    assert set(BECOMES.values()) <= CARRIED
    assert set(KINDS) == CARRIED | set(BECOMES) | FAULTY_ENGINE
    assert not CARRIED & (set(BECOMES) | FAULTY_ENGINE)
    assert ProxyFront("u").cannot == set(KINDS) - CARRIED


@pytest.mark.parametrize("kind", sorted(set(KINDS) - FAULTY_ENGINE))
def test_an_attempt(kind: str) -> None:
    attempt = Attempt(kind, 2, at=3, code=500, round_trip=True, times=4)
    made = adapted(budget=3, attempts=(attempt,))
    assert made is not None
    assert made.attempts == (replace(attempt, kind=BECOMES.get(kind, kind), after=2 * SCALE),)
    assert set(made.kinds) <= CARRIED


@pytest.mark.parametrize(("kind", "comes"), [("abort", 12), ("abort-request", 12), ("close", 24), ("flag", 24)])
def test_an_abort_comes_while_there_is_something_to_abort(kind: str, comes: int) -> None:
    """The mock aborts at the last token too; a server has ended by then."""
    made = adapted(budget=3, attempts=(Attempt(kind, 3),))
    assert made is not None and made.attempts[0].after == comes


def test_faults_of_the_engine_are_left_out() -> None:
    for kind in FAULTY_ENGINE:
        fault = Attempt(kind, 1, field="meta_info") if kind == "missing" else Attempt(kind, 1)
        assert adapted(attempts=(fault,)) is None
        made = adapted(attempts=(fault, Attempt("abort", 1)))
        assert made is not None and [a.kind for a in made.attempts] == ["abort-request"]


def test_lengths_are_longer_and_what_a_model_has_is_left_to_it() -> None:
    made = adapted(
        prompt="ab",
        budget=6,
        preload=2,
        min_new_tokens=1,
        script=(65, 300, 97),
        natural=3,
        images=2,
        seed=5,
        stop=("x",),
        chunks=(2, 3),
        split=4,
        samples=2,
    )
    assert made == Schedule(
        prompt="ab",
        budget=6 * SCALE,
        preload=2 * SCALE,
        min_new_tokens=SCALE,
        script=(65, 97),
        natural=3 * SCALE,
        stop=("x",),
        chunks=(2, 3),
        split=4,
        samples=2,
        sglang=SERVER.version,
    )
    assert adapted(script=(300,)) == Schedule(budget=Schedule().budget * SCALE, script=(97,))
    old = adapted(Server("u", version="0.5.9", context=256))
    assert old is not None and old.sglang == "0.5.9"


def test_what_fits_into_the_servers_context_and_what_does_not() -> None:
    room = SERVER.context - MARGIN - 1
    assert adapted(prompt="a", budget=room // SCALE) is not None
    assert adapted(prompt="a", budget=room // SCALE + 1) is None
    assert adapted(Server("u", context=1 << 20), budget=LONGEST_BUDGET) is not None
    assert adapted(Server("u", context=1 << 20), budget=LONGEST_BUDGET + 1) is None


@pytest.mark.parametrize("prompt", ["a", "ab", "日é", "a b ", " the", "..."])
@pytest.mark.parametrize("room", [0, 3, 20])
def test_a_context_limit_is_the_servers_own_with_as_much_room(prompt: str, room: int) -> None:
    made = adapted(prompt=prompt, budget=9, context=tokens(prompt) + room)
    assert made is not None and made.context == SERVER.context
    assert tokens(made.prompt) == SERVER.context - room and made.prompt.startswith(prompt)


def test_a_context_limit_that_cannot_be_had() -> None:
    assert adapted(prompt="a", context=300) is None  # more room than the server has
    assert adapted(Server("u", context=1 << 16), prompt="a", context=30) is None  # a prompt that long takes too long
    long = "a" * 100
    assert adapted(prompt=long, context=tokens(long) + SERVER.context - tokens(long) + 1) is None  # it would not fit
    assert adapted(prompt=long, context=tokens(long) + SERVER.context - tokens(long)) is not None


def test_a_tokenizer_that_cannot_fill_a_prompt() -> None:
    class Merging:
        """One token, whatever the text."""

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1]

    class Doubling:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1] * (2 * len(text))

    assert adapt(Schedule(prompt="a", context=5), SERVER, Merging()) is None
    assert adapt(Schedule(prompt="a", context=5), SERVER, Doubling()) is None  # an odd number of tokens


def test_a_scenario() -> None:
    steps = tuple(Step(kind, 1, 2) for kind in STEPS)
    made = adapt(Scenario(budget=3, late=True, lengths=(1, 2), steps=steps, over=3), SERVER, VOCABULARY)
    assert isinstance(made, Scenario)
    assert (made.budget, made.late, made.lengths, made.over) == (3 * SCALE, False, (None,), 3)
    assert made.steps[-2:] == (Step("budget"), Step("rollout"))
    kept = [step for step in steps if step.kind not in LOOPS_CANNOT]
    assert made.steps[:-2] == tuple(Step("tokens", 1, 2 * SCALE) if s.kind == "tokens" else s for s in kept)
    assert adapt(Scenario(budget=LONGEST_BUDGET + 1), SERVER, VOCABULARY) is None


def test_most_of_the_corpus_can_be_had() -> None:
    entries = corpus.load()
    made = [adapt(entry.work, SERVER, VOCABULARY) for entry in entries]
    assert sum(one is not None for one in made) > len(entries) / 2
