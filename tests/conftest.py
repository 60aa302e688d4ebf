"""What counts for coverage, and the Hypothesis profile `crosshair`.

The profile runs the properties of the pure parts by symbolic execution (docs/proof.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEARCHES = ("browser", "exhaustive", "gate", "property", "quality", "ray", "real", "slime")
"""Folders whose tests draw or search, or need what may not be there."""


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Coverage pauses where code is met by chance: a branch that only a draw reaches would come and go.

    It also costs nothing there, and these are the tests that take long.
    """
    if not config.pluginmanager.hasplugin("_cov"):
        return
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in SEARCHES or item.get_closest_marker("hypothesis"):
            item.add_marker("no_cover")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads the profile that the command line names
def pytest_configure(config: pytest.Config) -> None:
    """Made only when it is asked for: Hypothesis refuses a profile whose back end is not installed."""
    if config.getoption("--hypothesis-profile", None) != "crosshair":
        return
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS

    if "crosshair" not in AVAILABLE_PROVIDERS:
        raise pytest.UsageError("the profile crosshair needs hypothesis-crosshair: tox -e crosshair")
    AVAILABLE_PROVIDERS["crosshair"] = "tests.proof.crosshair.Provider"
    settings.register_profile(
        "crosshair",
        backend="crosshair",
        max_examples=200,  # paths; each property here has fewer
        deadline=None,  # a path costs what the solver costs
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
