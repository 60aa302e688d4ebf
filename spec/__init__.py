"""The specification: what a rollout client owes, and the machine-readable list of its rules.

``rules.toml`` is the one list of rules; ``README.md`` explains each of them.
The list is read at first use and kept. Nothing here imports the rest of the
project.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

Level = Literal["MUST", "SHOULD"]
Scope = Literal["sample", "loop"]
Needs = Literal["history", "pair"]

DOCUMENT = "spec/README.md"
"""The document whose headings are the rule ids, relative to the project's root."""

MODES = ("plain", "stream", "incremental")
"""Plain JSON; SSE with cumulative events; SSE with incremental events."""

_FILE = Path(__file__).with_name("rules.toml")
_ID = re.compile(r"[A-Z]+(-[A-Z]+)*")
_KEYS = {"id", "level", "statement", "scope", "needs", "modes", "sources"}


class SpecError(ValueError):
    """rules.toml contradicts itself. The message is one line that names the rule and the field."""


@dataclass(frozen=True, slots=True)
class Source:
    """A public report of the rule being broken."""

    ref: str
    url: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``needs_pair``: judged on two histories of one schedule instead of one."""

    id: str
    level: Level
    statement: str
    scope: Scope
    modes: tuple[str, ...]
    sources: tuple[Source, ...]
    needs_pair: bool

    @property
    def needs(self) -> Needs:
        return "pair" if self.needs_pair else "history"


if TYPE_CHECKING:
    RULES: dict[str, Rule]
    """Every rule by its id, in the order of the document."""
else:

    def __getattr__(name: str) -> Any:
        if name == "RULES":
            return _rules()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def anchor(rule_id: str) -> str:
    """Where the rule is explained, e.g. ``spec/README.md#BUDGET``. Raises KeyError for an unknown id."""
    return f"{DOCUMENT}#{_rules()[rule_id].id}"


def load(text: str) -> dict[str, Rule]:
    """The rules in the text of a rules.toml. Raises SpecError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"rules.toml: {error}") from error
    entries = data.get("rule")
    if set(data) != {"rule"} or not isinstance(entries, list) or not entries:
        raise SpecError("rules.toml: must hold [[rule]] tables and nothing else")
    rules: dict[str, Rule] = {}
    for index, entry in enumerate(entries):
        rule = _rule(entry, f"rules.toml: rule {index + 1}")
        if rule.id in rules:
            raise SpecError(f"rules.toml: {rule.id} is listed twice")
        rules[rule.id] = rule
    return rules


@lru_cache(maxsize=1)
def _rules() -> dict[str, Rule]:
    return load(_FILE.read_text(encoding="utf-8"))


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: must be a table")
    name = entry.get("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise SpecError(f"{where}: id {name!r} must be upper-case words joined by hyphens")
    where = f"rules.toml: {name}"
    odd = sorted(_KEYS ^ set(entry))
    if odd:
        raise SpecError(f"{where}: field {odd[0]!r} is {'missing' if odd[0] in _KEYS else 'unknown'}")
    statement, modes, sources = entry["statement"], entry["modes"], entry["sources"]
    if not isinstance(statement, str) or not statement.strip() or "\n" in statement:
        raise SpecError(f"{where}: statement must be one line of text")
    if not isinstance(modes, list) or not modes or modes != [m for m in MODES if m in modes]:
        raise SpecError(f"{where}: modes must be some of {', '.join(MODES)}, in this order")
    if not isinstance(sources, list) or not sources:
        raise SpecError(f"{where}: sources must name at least one public report")
    return Rule(
        id=name,
        level=cast(Level, _one_of(entry, "level", ("MUST", "SHOULD"), where)),
        statement=statement,
        scope=cast(Scope, _one_of(entry, "scope", ("sample", "loop"), where)),
        modes=tuple(modes),
        sources=tuple(_source(s, where) for s in sources),
        needs_pair=_one_of(entry, "needs", ("history", "pair"), where) == "pair",
    )


def _source(entry: Any, where: str) -> Source:
    if not isinstance(entry, dict) or set(entry) != {"ref", "url"}:
        raise SpecError(f"{where}: a source must have ref and url, and nothing else")
    ref, url = entry["ref"], entry["url"]
    if not isinstance(ref, str) or not ref or not isinstance(url, str) or not url.startswith("https://"):
        raise SpecError(f"{where}: source {ref!r} must have a ref and an https:// url")
    return Source(ref=ref, url=url)


def _one_of(entry: dict[str, Any], key: str, allowed: tuple[str, ...], where: str) -> str:
    value = entry[key]
    if value not in allowed:
        raise SpecError(f"{where}: {key} {value!r} must be one of {', '.join(allowed)}")
    return cast(str, value)
