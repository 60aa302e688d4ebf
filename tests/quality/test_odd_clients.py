"""No rule speaks of a client that is odd but right."""

from __future__ import annotations

import pytest

from harness.schedule import Attempt, Schedule
from harness.targets.function import FunctionTarget
from tests.odd_clients import ODD, Odd
from tests.quality.search import drawn, findings


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_no_rule_speaks_of_an_odd_client(odd: Odd) -> None:
    target = FunctionTarget(odd.name, odd.plain, odd.stream)
    assert findings(target, drawn(21, 300)) == [], odd.liberty


@pytest.mark.parametrize("odd", [odd for odd in ODD if not odd.conforming_only], ids=lambda odd: odd.name)
def test_no_rule_speaks_of_an_odd_client_on_a_faulty_engine(odd: Odd) -> None:
    target = FunctionTarget(odd.name, odd.plain, odd.stream)
    assert findings(target, drawn(22, 75, faulty=True)) == [], odd.liberty


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
@pytest.mark.parametrize("token", [0xA5, 0xC3], ids=["continuation byte", "leading byte"])
def test_bytes_that_are_no_character_raise_no_alarm(odd: Odd, token: int) -> None:
    """[TEXT] The engine holds them back while it streams, and an interruption can lose them."""
    kinds = [Attempt("flag"), Attempt("flag", after=1), Attempt("close", after=1), Attempt("abort", after=1)]
    among = tuple(Schedule(budget=3, script=(token,), attempts=(a, b)) for a in kinds for b in kinds)
    assert findings(FunctionTarget(odd.name, odd.plain, odd.stream), among) == [], odd.liberty
