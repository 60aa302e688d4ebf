"""The rules, their checkers, their tests and the file formats agree.

A test cites a rule by its id, in its name (``test_RESUME_EQ_...``, with ``_`` for
``-``) or in brackets in its docstring (``[RESUME-EQ]``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import spec
from harness import scenario, scenario_strategies
from harness.checkers import LOOP_RULE_IDS, ROLLOUT_RULE_IDS, RULE_IDS, checker, rollout_checker
from harness.scenario import Scenario, Step
from harness.schedule import Schedule, from_json, to_json
from tests.quality.search import drawn

PROJECT = Path(__file__).resolve().parents[2]
SCHEMAS = sorted((PROJECT / "spec" / "schemas").glob("*.schema.json"))
CHECKED = (*RULE_IDS, *LOOP_RULE_IDS)

_IN_NAME = re.compile(r"test_([A-Z]{2,}(?:_[A-Z]{2,})*)(?=_|$)")
_IN_DOCSTRING = re.compile(r"\[([A-Z]+(?:-[A-Z]+)*)\]")


def cited_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The rule ids that a test cites."""
    named = {m.replace("_", "-") for m in _IN_NAME.findall(function.name)}
    return named | set(_IN_DOCSTRING.findall(ast.get_docstring(function) or "")) - {"DONE"}  # a stream's last event


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every test function under tests/, with the file it is in."""
    for path in sorted((PROJECT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.name, node


def test_every_rule_has_a_checker() -> None:
    assert tuple(spec.RULES) == CHECKED
    assert set(LOOP_RULE_IDS) == {r.id for r in spec.RULES.values() if r.scope == "loop"}
    assert [rule for rule in spec.RULES if rule in ROLLOUT_RULE_IDS] == list(ROLLOUT_RULE_IDS)


@pytest.mark.parametrize("rule", ROLLOUT_RULE_IDS)
def test_over_whole_rollouts_a_rule_of_single_samples_keeps_its_checker(rule: str) -> None:
    found: Any = rollout_checker(rule)
    assert found is checker(rule) if rule in LOOP_RULE_IDS else found.args == (checker(rule),)


@pytest.mark.parametrize("rule", CHECKED)
def test_a_checker_is_the_module_named_after_its_rule(rule: str) -> None:
    check = checker(rule)
    assert check.__module__ == f"harness.checkers.{rule.lower().replace('-', '_')}"
    assert (__import__(check.__module__, fromlist=["check"]).__doc__ or "").startswith(f"{rule}:")


def test_no_checker_is_without_a_rule() -> None:
    files = {p.stem for p in (PROJECT / "harness" / "checkers").glob("*.py")} - {
        "__init__",
        "trace",
        "whole",
        "determinism",
    }
    assert files == {rule.lower().replace("-", "_") for rule in CHECKED}


def test_every_rule_is_cited_by_a_test_and_no_test_cites_another() -> None:
    cited = {(file, node.name, rule) for file, node in functions() for rule in cited_by(node)}
    unknown = sorted(c for c in cited if c[2] not in spec.RULES)
    assert not unknown, f"there are no such rules: {unknown}"
    assert set(CHECKED) - {rule for _, _, rule in cited} == set()


def test_a_citation_is_found_in_names_and_docstrings() -> None:
    code = ast.parse('def test_NO_ALIAS_x():\n    "See [MODE-EQ] and [a]."\ndef test_A_b(): pass\ndef test_b(): pass')
    functions = [node for node in code.body if isinstance(node, ast.FunctionDef)]
    assert [cited_by(f) for f in functions] == [{"NO-ALIAS", "MODE-EQ"}, set(), set()]


def test_every_rule_is_explained_where_its_anchor_points() -> None:
    text = (PROJECT / spec.DOCUMENT).read_text(encoding="utf-8")
    for rule in spec.RULES.values():
        section = text.partition(f'<a id="{rule.id}"></a>\n## {rule.id}\n')[2].partition('<a id="')[0]
        assert f"**{rule.level}** {rule.statement}" in section, rule.id


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda p: p.name)
def test_a_schema_is_a_schema(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("faulty", [False, True], ids=["conforming", "faulty"])
def test_every_schedule_fits_its_schema(faulty: bool) -> None:
    schema = json.loads((PROJECT / "spec" / "schemas" / "schedule.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    for schedule in drawn(31, 100, faulty=faulty):
        data = json.loads(json.dumps(to_json(schedule)))
        validator.validate(data)
        assert from_json(data) == schedule


def test_the_schema_knows_every_field_of_a_schedule_with_its_default() -> None:
    schema = json.loads((PROJECT / "spec" / "schemas" / "schedule.schema.json").read_text(encoding="utf-8"))
    fields = {name: field.default for name, field in Schedule.__dataclass_fields__.items()}
    assert set(schema["properties"]) == set(fields)
    for name, property_ in schema["properties"].items():
        if name not in schema["required"]:
            default = fields[name]
            assert property_["default"] == (list(default) if isinstance(default, tuple) else default), name


def test_every_scenario_fits_its_schema() -> None:
    schema = json.loads((PROJECT / "spec" / "schemas" / "scenario.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    for one in scenario_strategies.drawn(100, 31):
        data = json.loads(json.dumps(scenario.to_json(one)))
        validator.validate(data)
        assert scenario.from_json(data) == one


@pytest.mark.parametrize(("name", "form"), [("scenario", Scenario), ("step", Step)])
def test_the_schema_knows_every_field_of_a_scenario_with_its_default(name: str, form: Any) -> None:
    schema = json.loads((PROJECT / "spec" / "schemas" / "scenario.schema.json").read_text(encoding="utf-8"))
    part = schema if name == "scenario" else schema["$defs"]["step"]
    fields = {name: field.default for name, field in form.__dataclass_fields__.items()}
    assert set(part["properties"]) == set(fields)
    for name, property_ in part["properties"].items():
        if name not in part["required"]:
            default = fields[name]
            assert property_["default"] == (list(default) if isinstance(default, tuple) else default), name
