"""Which target to load, as data that crosses to its process; and the loading there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from harness.targets import CannotJudge, LoopTarget, Target

LATER = ("verl", "areal", "miles", "xtuner")
"""Frameworks whose adapters are planned; until then only `pkg.mod:function` reaches them."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """``kind`` is "reference", "slime", "mutant" or "function".

    For slime ``root`` is the folder to import from and ``revision`` its name in
    reports. For a function ``function`` is ``pkg.mod:name``, ``twin`` its
    counterpart in the other mode, ``root`` a folder to put on ``sys.path``. For
    a mutant ``function`` is its id.
    """

    kind: str
    root: str = ""
    revision: str = ""
    function: str = ""
    twin: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def load(spec: TargetSpec, asks_stream: Callable[[Target], bool | None]) -> Target:
    """The target, in this process. Raises CannotJudge.

    ``asks_stream`` runs a target once and tells whether its request asked for
    a stream: a function is judged in the mode that it asks the engine for.
    """
    if spec.kind == "reference":
        from harness.targets.function import reference

        return reference()
    if spec.kind == "mutant":
        from harness import mutants

        return mutants.load()[spec.function].target()
    if spec.kind == "slime":
        from harness.targets import slime

        return slime.load(spec.root, spec.revision)
    return _function(spec, asks_stream)


def load_loop(spec: TargetSpec) -> LoopTarget:
    """The target's rollout loop, in this process. Raises CannotJudge (not applicable) for one that has none."""
    if spec.kind == "reference":
        from harness.targets.reference_loop import ReferenceLoop

        return ReferenceLoop()
    if spec.kind == "mutant":
        from harness import mutants

        return mutants.load()[spec.function].loop()
    if spec.kind == "slime":
        from harness.targets import slime_loop

        return slime_loop.load(spec.root, spec.revision)
    raise CannotJudge(f"{spec.function} is a generate function: it has no rollout loop", not_applicable=True)


def _function(spec: TargetSpec, asks_stream: Callable[[Target], bool | None]) -> Target:
    import sys

    from harness.targets.function import FunctionTarget, find

    if spec.root and spec.root not in sys.path:
        sys.path.insert(0, spec.root)
    by_mode: dict[bool, Any] = {}
    for name in filter(None, (spec.function, spec.twin)):
        function = find(name)
        stream = asks_stream(FunctionTarget(name, function, None))
        if stream is None:
            raise CannotJudge(
                f"{name} sent no /generate request; it finds the engine at args.sglang_router_ip and "
                "args.sglang_router_port (without a socket only httpx and aiohttp are seen: try --engine loopback)"
            )
        if stream in by_mode:
            raise CannotJudge(
                f"{spec.function} and {spec.twin} both ask for {'a stream' if stream else 'plain replies'}"
            )
        by_mode[stream] = function
    return FunctionTarget(spec.function, by_mode.get(False), by_mode.get(True))
