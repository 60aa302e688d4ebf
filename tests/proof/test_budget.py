"""The budget arithmetic, proved for all integers; `tox -e proof` runs it where z3 is installed.

What is claimed stands in `reference_impl/budget.py`, next to the functions; docs/proof.md says what that is worth.
"""

from __future__ import annotations

from typing import Any

import pytest

z3 = pytest.importorskip("z3", reason="z3 is installed by tox -e proof")

from reference_impl import budget  # noqa: E402
from tests.proof.faults import FAULTS  # noqa: E402
from tests.proof.symbolic import NotUnderstood, symbolic  # noqa: E402

B, C, P, r, g, k, n, more = z3.Ints("B C P r g k n more")
SIZES = z3.And(B >= 0, C >= 0, P >= 0, r >= 0, g >= 0, n >= 0)

clip = symbolic(budget.clip)
remaining_minimum = symbolic(budget.remaining_minimum)


def proved(claim: Any) -> None:
    """The claim holds for all integers; fails with a counterexample."""
    solver = z3.Solver()
    solver.set("timeout", 20_000)
    solver.add(z3.Not(claim))
    answer = solver.check()
    assert answer == z3.unsat, f"{answer}: {solver.model() if answer == z3.sat else solver.reason_unknown()}"


def claims(allowance: Any, context: Any) -> dict[str, Any]:
    """What is claimed of an allowance function, by rule; ``context`` is C, or None for an unknown limit."""
    m = allowance(B, context, P, r)
    kept = z3.And(SIZES, k >= 0, k <= clip(g, m))
    fits = z3.BoolVal(True) if context is None else P + r + more <= C
    room = B - r if context is None else z3.If(B - r <= C - P - r, B - r, C - P - r)
    found = {
        "BUDGET": z3.Implies(kept, z3.And(z3.Implies(r <= B, r + k <= B), z3.Implies(r > B, k == 0))),
        "MAXIMAL": z3.Implies(z3.And(SIZES, m > 0, more > m), z3.Not(z3.And(r + more <= B, fits))),
        "EXHAUSTED": z3.Implies(SIZES, (m == 0) == (room <= 0)),
        "PARAMS": z3.Implies(
            z3.And(SIZES, m >= 0),
            z3.And(
                remaining_minimum(n, r, m) >= 0,
                remaining_minimum(n, r, m) <= m,
                z3.Implies(z3.And(n - r >= 0, n - r <= m), remaining_minimum(n, r, m) == n - r),
            ),
        ),
    }
    if context is not None:
        found["CONTEXT"] = z3.Implies(z3.And(kept, P + r <= C), P + r + k <= C)
    return found


@pytest.mark.parametrize("rule", ["BUDGET", "MAXIMAL", "EXHAUSTED", "PARAMS", "CONTEXT"])
@pytest.mark.parametrize("known", [True, False], ids=["C known", "C unknown"])
def test_the_arithmetic_is_proved(rule: str, known: bool) -> None:
    """[BUDGET] [MAXIMAL] [EXHAUSTED] [PARAMS] [CONTEXT] for all integers."""
    found = claims(symbolic(budget.allowance), C if known else None)
    if rule in found:
        proved(found[rule])


def test_any_number_of_attempts_stays_within_the_budget() -> None:
    """[BUDGET] by induction over attempts: it holds at the start, and every attempt keeps it."""
    m = symbolic(budget.allowance)(B, C, P, r)
    start = z3.Implies(z3.And(SIZES, r == 0), r <= B)
    step = z3.Implies(z3.And(SIZES, r <= B, k >= 0, k <= clip(g, m)), z3.And(r + k >= 0, r + k <= B))
    proved(start)
    proved(step)


@pytest.mark.parametrize(("fault", "rule"), FAULTS)
def test_a_planted_fault_is_refuted(fault: Any, rule: str) -> None:
    """[BUDGET] [MAXIMAL] [CONTEXT] [EXHAUSTED] The proof bites: each fault has a counterexample."""
    with pytest.raises(AssertionError, match=r"sat: \["):
        proved(claims(symbolic(fault), C)[rule])


def test_only_what_is_understood_is_translated() -> None:
    def squares(kept: int) -> int:
        return kept * kept

    with pytest.raises(NotUnderstood):
        symbolic(squares)(r)
