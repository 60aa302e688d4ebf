"""The list of rules as it is read: what is in it, and one line for whatever contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

import spec

ENTRY: dict[str, Any] = {
    "id": "SOME-RULE",
    "level": "MUST",
    "statement": "One line.",
    "scope": "sample",
    "needs": "history",
    "modes": ["plain", "stream"],
    "sources": [{"ref": "a/b#1", "url": "https://example.org/1"}],
}


def toml(value: Any) -> str:
    """A value as TOML writes it inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return '"' + value.replace("\n", "\\n") + '"' if isinstance(value, str) else str(value)


def listed(*entries: dict[str, Any]) -> str:
    return "\n".join("[[rule]]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in e.items()) for e in entries)


def test_a_rule_is_what_its_entry_says() -> None:
    (rule,) = spec.load(listed(ENTRY)).values()
    assert (rule.id, rule.level, rule.statement, rule.scope) == ("SOME-RULE", "MUST", "One line.", "sample")
    assert (rule.modes, rule.needs, rule.needs_pair) == (("plain", "stream"), "history", False)
    assert rule.sources == (spec.Source("a/b#1", "https://example.org/1"),)
    assert spec.load(listed({**ENTRY, "needs": "pair"}))["SOME-RULE"].needs == "pair"


def test_rules_keep_their_order() -> None:
    assert list(spec.load(listed(*({**ENTRY, "id": name} for name in ("B", "A"))))) == ["B", "A"]


WHERE = "rules.toml: SOME-RULE: "
WRONG: dict[str, tuple[str, str]] = {
    "no TOML": ("[[rule", "rules.toml: "),
    "empty": ("", "rules.toml: must hold [[rule]] tables and nothing else"),
    "more than rules": (listed(ENTRY) + "\n[other]", "rules.toml: must hold [[rule]] tables and nothing else"),
    "one table": ("[rule]\na = 1", "rules.toml: must hold [[rule]] tables and nothing else"),
    "none": ("rule = []", "rules.toml: must hold [[rule]] tables and nothing else"),
    "no table": ("rule = [1]", "rules.toml: rule 1: must be a table"),
    "twice": (listed(ENTRY, ENTRY), "rules.toml: SOME-RULE is listed twice"),
    **{
        f"id {value!r}": (listed(ENTRY, {**ENTRY, "id": value}), f"rules.toml: rule 2: id {value!r} must be upper-case")
        for value in ("", "rule", "A--B", "A-", 3)
    },
    "unknown field": (listed({**ENTRY, "more": 1}), WHERE + "field 'more' is unknown"),
    "missing field": (listed({k: v for k, v in ENTRY.items() if k != "level"}), WHERE + "field 'level' is missing"),
    **{
        f"statement {value!r}": (listed({**ENTRY, "statement": value}), WHERE + "statement must be one line of text")
        for value in (3, " ", "a\nb")
    },
    **{
        f"modes {value!r}": (listed({**ENTRY, "modes": value}), WHERE + "modes must be some of plain, stream")
        for value in ("plain", [], ["both"], ["stream", "plain"])
    },
    **{
        f"sources {value!r}": (listed({**ENTRY, "sources": value}), WHERE + "sources must name at least one")
        for value in ("a", [])
    },
    **{
        f"source {value!r}": (listed({**ENTRY, "sources": [value]}), WHERE + "a source must have ref and url")
        for value in ("a", {"ref": "a"}, {"ref": "a", "url": "https://a", "more": 1})
    },
    **{
        f"source of {ref!r} {url!r}": (listed({**ENTRY, "sources": [{"ref": ref, "url": url}]}), f"source {ref!r} must")
        for ref, url in ((1, "https://a"), ("", "https://a"), ("a", 1), ("a", "http://a"))
    },
    **{
        f"{key} {value!r}": (listed({**ENTRY, key: value}), WHERE + f"{key} {value!r} must be one of ")
        for key, value in (("level", "MAY"), ("scope", "run"), ("needs", "both"))
    },
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_contradicts_itself_is_one_line(text: str, said: str) -> None:
    with pytest.raises(spec.SpecError) as caught:
        spec.load(text)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("rules.toml: ") and said in line


def test_an_anchor_is_for_rules_only() -> None:
    assert spec.anchor("BUDGET") == "spec/README.md#BUDGET"
    with pytest.raises(KeyError):
        spec.anchor("NOPE")


def test_the_rules_are_all_that_is_made_at_first_use() -> None:
    assert spec.RULES is spec.RULES
    with pytest.raises(AttributeError, match="'spec' has no attribute 'RULE'"):
        spec.RULE  # noqa: B018 - the attribute is what is asked for


def test_the_rules_are_those_of_the_file() -> None:
    spec._rules.cache_clear()
    assert spec._rules() == spec.load(spec._FILE.read_text(encoding="utf-8"))
