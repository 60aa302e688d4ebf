"""Some mutants as module-level functions, so that ``tests.function_targets:NAME`` is a target of its own."""

from __future__ import annotations

from typing import Any

from harness.mutants import load
from harness.mutants.parts import Reference


def _client(id_: str) -> Any:
    return load()[id_].client()


same = Reference().plain
forgets_subtraction, forgets_subtraction_streaming = (
    _client("forgets-subtraction").plain,
    _client("forgets-subtraction").streaming,
)
drops_stop, keeps_more_than_asked = _client("drops-stop").plain, _client("keeps-more-than-asked").plain
lowers_shared_cap = _client("lowers-shared-cap").plain
