"""The Hypothesis profile `crosshair`: the properties of the pure parts by symbolic execution (docs/proof.md)."""

from __future__ import annotations

import pytest


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
