"""Who may import whom (ARCHITECTURE.md), and that the common path stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    *("harness.schedule", "harness.history", "harness.verdict", "harness.checkers", "harness.shrink"),
    *("harness.scenario", "harness.rollouts", "harness.calls", "harness.work", "harness.shrink_rollouts"),
)
PUTTING_TOGETHER = (
    *("harness.cli", "harness.check", "harness.again", "harness.worker", "harness.isolation"),
    *("harness.options", "harness.search", "harness.pool", "harness.inline", "harness.on_ray", "harness.stage"),
)


def modules(*packages: str) -> Iterator[tuple[str, Path]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def below(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize(
    ("name", "path"), list(modules("spec", "reference_impl", "harness")), ids=lambda v: str(v)[-40:]
)
def test_import_direction(name: str, path: Path) -> None:
    used = imports(path)
    ours = {u for u in used if below(u, "spec", "reference_impl", "harness", "tests")}
    if below(name, "spec"):
        assert not {u for u in ours if not below(u, "spec")}
    if below(name, "reference_impl"):
        assert not {u for u in ours if below(u, "harness", "tests")}
    if below(name, *CORE):
        assert not {u for u in ours - {"harness"} if not below(u, "spec", *CORE)}
        outside = {u.partition(".")[0] for u in used - ours} - set(sys.stdlib_module_names) - {"harness"}
        assert not outside
    if below(name, "harness.targets"):
        assert not {u for u in ours if below(u, "harness.engines", "harness.runner", *PUTTING_TOGETHER)}
    if below(name, "harness.engines"):
        assert not {u for u in ours if below(u, "harness.targets", "reference_impl", *PUTTING_TOGETHER)}
    assert not {u for u in ours if below(u, "tests")}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("harness.cli", "transformers torch z3 hypothesis aiohttp httpx jinja2 junitparser"),
        ("harness.reporters.html", "jinja2"),
        ("harness.check", "transformers torch z3 aiohttp httpx"),
        ("harness.worker", "transformers torch z3 hypothesis rich typer"),
        ("reference_impl.generate_streaming", "transformers torch"),
    ],
)
def test_no_heavy_import_on_the_common_path(module: str, unwanted: str) -> None:
    script = f"import sys, {module}; print(*sorted(set('{unwanted}'.split()) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
