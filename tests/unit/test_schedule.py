"""Schedules as JSON: what is written is read back, and whatever else comes in is refused in one line."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.adapt import BECOMES
from harness.schedule import (
    FAULTY_ENGINE,
    FIELDS,
    KINDS,
    MAX_ATTEMPTS,
    MAX_LENGTH,
    TRANSPORT,
    VERSIONS,
    Attempt,
    Schedule,
    ScheduleError,
    from_json,
    to_json,
)
from harness.strategies import CONFORMING, FAULTY, schedules

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "spec/schemas/schedule.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


MINIMAL: dict[str, Any] = {"prompt": "a", "budget": 2, "script": [65]}

attempts = st.builds(
    Attempt,
    kind=st.sampled_from(sorted(KINDS.keys() - {"http", "missing"})),
    after=st.integers(0, MAX_LENGTH),
    at=st.integers(0, MAX_LENGTH),
    code=st.none() | st.integers(400, 599),
    times=st.integers(1, MAX_LENGTH),
    field=st.sampled_from(("", *FIELDS)),
    round_trip=st.booleans(),
) | st.sampled_from((Attempt("http", code=503), Attempt("missing", field="text")))
anything = st.builds(
    Schedule,
    prompt=st.text(min_size=1),
    budget=st.integers(0, MAX_LENGTH),
    context=st.none() | st.integers(0, 2 * MAX_LENGTH),
    script=st.lists(st.integers(0, 10_000_000), min_size=1).map(tuple),
    natural=st.none() | st.integers(0, 2 * MAX_LENGTH),
    preload=st.integers(0, MAX_LENGTH),
    samples=st.integers(1, 3),
    images=st.integers(0, 2),
    min_new_tokens=st.integers(0, MAX_LENGTH),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    skip_special_tokens=st.booleans(),
    sglang=st.sampled_from(VERSIONS),
    chunks=st.lists(st.integers(1, 1 << 20), min_size=1).map(tuple),
    split=st.integers(0, MAX_LENGTH),
    attempts=st.lists(attempts, max_size=4).map(tuple),
)


class TestRoundTrip:
    @settings(deadline=None)
    @given(anything)
    def test_what_is_written_is_read_back(self, schedule: Schedule) -> None:
        data = json.loads(json.dumps(to_json(schedule)))
        assert from_json(data) == schedule
        VALIDATOR.validate(data)

    @settings(deadline=None)
    @given(schedules() | schedules(faulty=True))
    def test_what_is_drawn_is_valid(self, schedule: Schedule) -> None:
        assert from_json(to_json(schedule)) == schedule
        VALIDATOR.validate(to_json(schedule))
        assert schedule.faulty_engine == bool(set(schedule.kinds) & FAULTY_ENGINE)

    def test_defaults_are_left_out(self) -> None:
        assert to_json(Schedule()) == {"prompt": "a", "budget": 1, "script": [65], "attempts": []}
        data = to_json(Schedule(attempts=(Attempt("abort", after=2), Attempt())))
        assert data["attempts"] == [{"kind": "abort", "after": 2}, {"kind": "run"}]

    def test_any_mapping_is_an_object(self) -> None:
        assert from_json(MappingProxyType(MINIMAL)) == from_json(UserDict(MINIMAL)) == from_json(MINIMAL)

    def test_the_data_is_not_changed(self) -> None:
        data = to_json(Schedule(stop=("x",), chunks=(2, 3), attempts=(Attempt("abort", after=1),)))
        before = json.dumps(data)
        from_json(data)
        assert json.dumps(data) == before


WRONG: list[Any] = [True, False, -1, 1.0, 0.5, float("nan"), float("inf"), 10**400, "3", "", [], [1], {}, {"a": 1}]
"""Values that are no length: each is wrong for at least every integer field."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def each(names: tuple[str, ...], *values: Any) -> list[Any]:
    """The minimal schedule with one field of ``names`` replaced by one of ``values``."""
    return [MINIMAL | {name: value} for name in names for value in values]


def struck(kind: Any, names: tuple[str, ...], *values: Any) -> list[Any]:
    """A schedule of one attempt with one field of ``names`` replaced by one of ``values``."""
    return [MINIMAL | {"attempts": [{"kind": kind} | {name: value}]} for name in names for value in values]


NUMBERS = ("budget", "preload", "split", "min_new_tokens", "context", "natural", "samples", "images")
LISTS = ("script", "chunks", "stop", "attempts")
MALFORMED: list[Any] = [
    *[None, [], "x", 3, True, float("nan"), [MINIMAL], {}],
    *[{k: v for k, v in MINIMAL.items() if k != name} for name in MINIMAL],
    *each(NUMBERS, *WRONG),
    *each(("budget",), None, MAX_LENGTH + 1, nested(50)),
    *each(("seed",), *[v for v in WRONG if v != -1], 2**63, -(2**63) - 1),
    *each(LISTS, None, True, 1, "ab", {}, nested(50), [None], [{}], [[]]),
    *each(("script", "chunks"), [], *[[v] for v in WRONG]),
    *each(("script",), [10_000_001], (65,)),
    *each(("chunks",), [0], [(1 << 20) + 1], [1, 0]),
    *each(("samples",), 0, 4),
    *each(("images",), 3),
    *each(("prompt",), None, "", 1, ["a"], {}),
    *each(("stop",), [""], [1], [["x"]], "x"),
    *each(("sglang",), None, "0.5.10", 0.5, ["0.5.9"], {}),
    *each(("skip_special_tokens",), None, 0, 1, "true", []),
    *each(("Budget", "rule", "__class__", "x" * 10_000, "a\nb"), 1),
    *each(("attempts",), [{"kind": "run"}] * (MAX_ATTEMPTS + 1)),
    *each(("attempts",), *[[a] for a in ({"after": 1}, {"kind": "run", "before": 1}, {"kind": "http"}, "run")]),
    *struck("abort", ("after", "at", "times", "code"), *WRONG, MAX_LENGTH + 1),
    *struck("abort", ("times",), 0),
    *struck("http", ("code",), None, 200, 399, 600),
    *struck("missing", ("field",), None, "", "id", 1, [], ["text"]),
    *struck("run", ("field",), None, 1, []),
    *struck("run", ("round_trip",), None, 0, 1, "yes"),
    *[MINIMAL | {"attempts": [{"kind": kind}]} for kind in ("", "Run", "explode", "a\nb")],
    *[MINIMAL | {"attempts": [{"kind": kind}]} for kind in (None, 1, True)],
]


class TestMalformed:
    @pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data)[-60:].replace("\n", " "))
    def test_one_line_that_names_the_field(self, data: Any) -> None:
        with pytest.raises(ScheduleError) as caught:
            from_json(data)
        message = str(caught.value)
        assert message.startswith("schedule")
        assert "\n" not in message
        assert len(message) < 400

    @pytest.mark.parametrize("kind", [[], ["run"], {}])
    def test_a_kind_that_cannot_be_hashed(self, kind: Any) -> None:
        with pytest.raises(ScheduleError):
            from_json(MINIMAL | {"attempts": [{"kind": kind}]})

    @pytest.mark.parametrize("data", [{1: 2}, {("a",): 1}])
    def test_keys_that_are_no_strings(self, data: Any) -> None:
        """Not possible in JSON, but in Python."""
        with pytest.raises(ScheduleError):
            from_json(MINIMAL | data)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )

    @settings(deadline=None)
    @given(st.dictionaries(st.sampled_from([*Schedule.__dataclass_fields__, "x"]), json_values))
    def test_any_json_is_a_schedule_or_an_error(self, data: dict[str, Any]) -> None:
        self._read(MINIMAL | data)

    @settings(deadline=None)
    @given(st.dictionaries(st.sampled_from([*sorted(set(Attempt.__dataclass_fields__) - {"kind"}), "x"]), json_values))
    def test_any_attempt_is_one_or_an_error(self, data: dict[str, Any]) -> None:
        self._read(MINIMAL | {"attempts": [{"kind": "abort"} | data]})

    def _read(self, data: dict[str, Any]) -> None:
        """Either an error in one line, or a schedule that the schema knows too."""
        try:
            schedule = from_json(data)
        except ScheduleError as error:
            lines = len(str(error).splitlines())
            assert lines == 1
        else:
            VALIDATOR.validate(to_json(schedule))

    def test_the_error_is_a_value_error(self) -> None:
        assert issubclass(ScheduleError, ValueError)


class TestText:
    @settings(deadline=None)
    @given(anything)
    def test_one_line(self, schedule: Schedule) -> None:
        assert len(str(schedule).splitlines()) == 1

    def test_says_what_is_not_the_default(self) -> None:
        assert str(Schedule()) == "prompt 'a', budget 1: run"
        text = str(Schedule(budget=3, context=9, attempts=(Attempt("abort", after=2), Attempt("run", round_trip=True))))
        assert text == "prompt 'a', budget 3, context 9: abort after 2; round trip, run"
        assert str(Schedule(script=(128,))) == "prompt 'a', budget 1, script [128]: run"
        assert str(Attempt("http", code=503, times=2)) == "http 503 x2"
        assert str(Attempt("drop-inside", after=1, at=7)) == "drop-inside after 1 at byte 7"
        assert str(Attempt("missing", field="text")) == "missing text"

    def test_a_prompt_of_several_lines(self) -> None:
        assert "\n" not in str(Schedule(prompt="a\nb\u2028c"))


class TestValues:
    def test_kinds_are_accounted_for(self) -> None:
        """Every kind is drawn, or what is drawn becomes it on a server; the sets that name kinds name real ones."""
        assert {*CONFORMING, *FAULTY, *BECOMES.values()} == KINDS.keys()
        assert KINDS.keys() >= FAULTY_ENGINE | TRANSPORT
        assert SCHEMA["$defs"]["attempt"]["properties"]["kind"]["enum"] == list(KINDS)

    def test_the_schema_knows_every_field(self) -> None:
        assert SCHEMA["properties"].keys() == Schedule.__dataclass_fields__.keys()

    def test_the_schema_knows_every_field_of_an_attempt(self) -> None:
        assert SCHEMA["$defs"]["attempt"]["properties"].keys() == Attempt.__dataclass_fields__.keys()

    def test_the_script_is_cycled(self) -> None:
        assert [Schedule(script=(1, 2, 3)).token(i) for i in range(5)] == [1, 2, 3, 1, 2]

    @settings(deadline=None)
    @given(schedules())
    def test_uninterrupted(self, schedule: Schedule) -> None:
        plain = schedule.uninterrupted()
        assert (plain.attempts, plain.split) == ((), 0)
        assert (plain.budget, plain.script, plain.natural) == (schedule.budget, schedule.script, schedule.natural)

    def test_frozen_and_hashable(self) -> None:
        assert len({Schedule(), Schedule(), Schedule(budget=2)}) == 2
        with pytest.raises(AttributeError):
            Schedule().budget = 3  # type: ignore[misc]
