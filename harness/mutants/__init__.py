"""Planted faults: small faulty clients, one for each fault that somebody reported, that the suite must find.

Each is the reference, or its loop, with one part replaced (`parts`), in our own words, and
cites the public reports it models. `load` gives them all; ``reports.toml`` says
which reports the engine models as an interruption, and which cannot be planted and why.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import spec
from harness.mutants.parts import Mutant, declared

MODULES = ("asking", "resuming", "streams", "status", "arrays", "calling", "aborting", "groups", "weights")


@lru_cache(maxsize=1)
def load() -> dict[str, Mutant]:
    """Every mutant by its id, in the order of the rules that must find them."""
    for module in MODULES:
        import_module(f"harness.mutants.{module}")
    return dict(sorted(declared.items(), key=lambda item: list(spec.RULES).index(item[1].rule)))


def _ledger() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("reports.toml").read_text(encoding="utf-8"))


def quirks() -> dict[str, str]:
    """Reports about engines by the interruption that models them; every client meets it in drawn schedules."""
    return _ledger()["quirks"]


def not_planted() -> dict[str, str]:
    """Reports that no mutant can carry, with the reason."""
    return _ledger()["not_planted"]
