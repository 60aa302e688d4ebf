"""CrossHair as a back end of Hypothesis that tells whether it saw every path.

Hypothesis asks its own generator for the rest when CrossHair is done, and also when CrossHair gives
up on too many paths. Both end as a pass, and only the first is worth more than drawing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from hypothesis.errors import BackendCannotProceed
from hypothesis_crosshair_provider.crosshair_provider import CrossHairPrimitiveProvider


class Provider(CrossHairPrimitiveProvider):
    """Counts in ``confirmed`` the properties of which every path was explored and none failed."""

    confirmed: ClassVar[int] = 0

    @contextmanager
    def per_test_case_context_manager(self) -> Iterator[None]:
        try:
            with super().per_test_case_context_manager():
                yield
        except BackendCannotProceed as stopped:
            Provider.confirmed += stopped.scope == "verified"
            raise
