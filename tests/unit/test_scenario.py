"""Scenarios as data: what they say in a line, what JSON holds of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.scenario import AIMED, COUNTED, MAX_NUMBER, MAX_STEPS, STEPS, Scenario, Step, from_json, to_json
from harness.schedule import ScheduleError

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "spec/schemas/scenario.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
MINIMAL: dict[str, Any] = {"budget": 4, "steps": []}
EVERYTHING = Scenario(
    budget=3,
    members=2,
    batch=3,
    over=4,
    permits=5,
    partial=False,
    mask=True,
    spanning=True,
    fan_out=True,
    late=True,
    lengths=(None, 2),
    steps=(Step("tokens", 1, 9), Step("rollout"), Step("kill", 2)),
)


@pytest.mark.parametrize("scenario", [Scenario(), EVERYTHING], ids=["nothing", "everything"])
def test_a_round_trip(scenario: Scenario) -> None:
    data = json.loads(json.dumps(to_json(scenario)))
    VALIDATOR.validate(data)
    assert from_json(data) == scenario


def test_defaults_are_left_out() -> None:
    assert to_json(Scenario()) == MINIMAL
    assert to_json(Scenario(late=True, steps=(Step("tokens"), Step("pass", 1, 2)))) == {
        "budget": 4,
        "late": True,
        "steps": [{"kind": "tokens"}, {"kind": "pass", "which": 1, "count": 2}],
    }


@pytest.mark.parametrize("kind", STEPS)
def test_every_kind_of_step_is_read(kind: str) -> None:
    data = {**MINIMAL, "steps": [{"kind": kind}]}
    VALIDATOR.validate(data)
    assert from_json(data).kinds == (kind,)


REFUSED: list[tuple[Any, str]] = [
    ([], "scenario must be an object, not list"),
    ({**MINIMAL, "colour": 1}, "scenario has an unknown field: 'colour'"),
    ({"steps": []}, "scenario lacks 'budget'"),
    ({"budget": 1}, "scenario lacks 'steps'"),
    ({**MINIMAL, "lengths": 3}, "scenario.lengths must be a non-empty list"),
    ({**MINIMAL, "lengths": []}, "scenario.lengths must be a non-empty list"),
    ({**MINIMAL, "lengths": [1] * (MAX_NUMBER + 1)}, "scenario.lengths must be a non-empty list"),
    *(
        ({**MINIMAL, "lengths": [value]}, "scenario.lengths must hold null or integers from 0 to 1000")
        for value in (-1, MAX_NUMBER + 1, True, "1")
    ),
    ({**MINIMAL, "steps": {}}, "scenario.steps must be a list of at most 200"),
    ({**MINIMAL, "steps": [{"kind": "wait"}] * (MAX_STEPS + 1)}, "scenario.steps must be a list of at most 200"),
    ({**MINIMAL, "steps": [3]}, "scenario.steps[0] must be an object, not int"),
    ({**MINIMAL, "steps": [{}]}, "scenario.steps[0].kind must be one of tokens, hold"),
    ({**MINIMAL, "steps": [{"kind": ["wait"]}]}, "scenario.steps[0].kind must be one of tokens, hold"),
    ({**MINIMAL, "steps": [{"kind": "wait"}, {"kind": "nap"}]}, "scenario.steps[1].kind must be one of tokens, hold"),
    *(
        ({**MINIMAL, "steps": [{"kind": "wait", name: value}]}, f"scenario.steps[0].{name} must be an integer")
        for name in ("which", "count")
        for value in (-1, MAX_NUMBER + 1)
    ),
    *(({**MINIMAL, name: value}, f"scenario.{name} must be") for name, value in (("budget", -1), ("budget", 1001))),
    *(
        ({**MINIMAL, name: value}, f"scenario.{name} must be")
        for name, most in (("members", 4), ("batch", 4), ("over", 4), ("permits", 64))
        for value in (0, most + 1, None)
    ),
    *(
        ({**MINIMAL, name: 1}, f"scenario.{name} must be true or false")
        for name in ("partial", "mask", "spanning", "fan_out", "late")
    ),
]


@pytest.mark.parametrize(("data", "said"), REFUSED)
def test_what_is_no_scenario_is_refused_in_one_line(data: Any, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_json(data)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert not VALIDATOR.is_valid(data)


def test_the_bounds_are_those_of_the_schema() -> None:
    for name, most in (("members", 4), ("batch", 4), ("over", 4), ("permits", 64), ("budget", MAX_NUMBER)):
        data = {**MINIMAL, name: most}
        VALIDATOR.validate(data)
        assert getattr(from_json(data), name) == most
    assert SCHEMA["$defs"]["step"]["properties"]["kind"]["enum"] == list(STEPS)


def test_sets_of_kinds_name_real_ones() -> None:
    assert STEPS.keys() >= COUNTED | AIMED


def test_one_line_that_says_what_is_not_the_default() -> None:
    assert str(Scenario()) == "budget 4: run"
    assert str(Scenario(budget=2, over=2, steps=(Step("abort", 1), Step("end")))) == "budget 2, over 2: abort of 1; end"
    assert [str(Step(kind, 2, 3)) for kind in ("tokens", "hold", "pass", "kill", "wait", "budget")] == [
        "tokens 3 of 2",
        "hold 3",
        "pass 3 of 2",
        "kill 3 of 2",
        "wait",
        "budget 3",
    ]


def test_lengths_go_round() -> None:
    assert [Scenario(lengths=(1, None, 3)).length(answer) for answer in range(5)] == [1, None, 3, 1, None]


def test_it_is_run_as_it_is() -> None:
    one = EVERYTHING
    assert one.in_one_piece() == one.on_conforming_engine() == one.uninterrupted() == one
    assert not one.faulty_engine
    assert one.kinds == ("tokens", "rollout", "kill")
