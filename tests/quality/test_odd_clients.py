"""No rule speaks of a client that is odd but right."""

from __future__ import annotations

import pytest

from harness.targets.function import FunctionTarget
from tests.odd_clients import ODD, Odd
from tests.quality.search import drawn, findings


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_no_rule_speaks_of_an_odd_client(odd: Odd) -> None:
    target = FunctionTarget(odd.name, odd.plain, odd.stream)
    assert findings(target, drawn(21, 300)) == [], odd.liberty


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_no_rule_speaks_of_an_odd_client_on_a_faulty_engine(odd: Odd) -> None:
    target = FunctionTarget(odd.name, odd.plain, odd.stream)
    assert findings(target, drawn(22, 75, faulty=True)) == [], odd.liberty
