"""The judge of a mutation run (tests/mutation/survivors.py): it passes only what is listed, all of it and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutation.survivors import LIST, Mutant, listed, mutant, place, problems, table

NAME = "harness.checkers.trace.xǁTraceǁroom__mutmut_12"
SHOWN = f"""\
# {NAME}: survived
--- harness/checkers/trace.py
+++ harness/checkers/trace.py
@@ -1,4 +1,4 @@
 def room(self, kept: int) -> int:
-    return self.budget - kept
+    return self.budget + kept
"""
ROOM = Mutant("harness.checkers.trace", "Trace.room", "return self.budget - kept", "return self.budget + kept")
LISTED = """
[[mutant]]
module = "harness.checkers.trace"
function = "Trace.room"
before = "return self.budget - kept"
after = "return self.budget + kept"
why = "a reason"
"""


def test_a_mutant_is_its_function_and_its_lines() -> None:
    assert mutant(NAME, SHOWN) == ROOM
    assert place("reference_impl.client.x_ask__mutmut_1") == ("reference_impl.client", "ask")
    assert place("reference_impl.generate.x__whole__mutmut_1") == ("reference_impl.generate", "_whole")
    with pytest.raises(ValueError, match="names a mutant 'what'"):
        place("what")


def test_a_change_of_several_lines_keeps_them_all() -> None:
    shown = SHOWN.replace("+    return self.budget + kept", "-    # and more\n+    a\n+    b")
    assert mutant(NAME, shown)[2:] == ("return self.budget - kept\n# and more", "a\nb")


def test_what_is_listed_is_read_with_its_reason() -> None:
    assert listed(LISTED) == Counter([ROOM])
    assert listed(LISTED * 2) == Counter([ROOM, ROOM])
    assert listed("") == Counter()
    with pytest.raises(AssertionError, match="without a reason"):
        listed(LISTED.replace("a reason", " "))


@pytest.mark.parametrize("status", ["survived", "no tests"])
def test_all_that_lives_must_be_listed_as_often_as_it_lives(status: str) -> None:
    assert problems(Counter([ROOM]), Counter([ROOM]), {NAME: status}) == []
    for lived, known, said in ((2, 1, "lives, and is not listed: "), (1, 2, "is listed, but was killed or is gone: ")):
        assert problems(Counter([ROOM] * lived), Counter([ROOM] * known), {NAME: status}) == [f"{said}{ROOM}"]
    assert "harness.checkers.trace.Trace.room\n    - return self.budget - kept\n    + return" in str(ROOM)


@pytest.mark.parametrize("status", ["killed", "caught by type check", "timeout"])
def test_what_is_dead_is_no_problem(status: str) -> None:
    assert problems(Counter(), Counter(), {NAME: status}) == []


@pytest.mark.parametrize(
    "status", ["not checked", "suspicious", "segfault", "skipped", "check was interrupted by user"]
)
def test_what_was_not_judged_is_a_problem(status: str) -> None:
    assert problems(Counter(), Counter(), {NAME: status}) == [f"{status}: {NAME}"]


def test_no_mutants_are_a_problem() -> None:
    assert problems(Counter(), Counter(), {}) == ["there is no mutant at all"]


def test_the_score_is_counted_by_module() -> None:
    statuses = {
        "a.x_f__mutmut_1": "killed",
        "a.x_f__mutmut_2": "caught by type check",
        "a.x_f__mutmut_3": "survived",
        "b.x_f__mutmut_1": "timeout",
        "b.x_f__mutmut_2": "no tests",
    }
    rows = [line.split() for line in table(statuses).splitlines()]
    assert rows == [
        ["module", "killed", "timeout", "equivalent", "total"],
        ["a", "2", "0", "1", "3"],
        ["b", "0", "1", "1", "2"],
        ["all", "2", "1", "2", "5"],
    ]


def test_the_list_can_be_read() -> None:
    assert all(m.before != m.after for m in listed(LIST.read_text(encoding="utf-8")))
