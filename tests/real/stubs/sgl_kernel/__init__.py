"""SGLang's own kernels, which are built for GPUs: every name is there to import, and raises when it is called.

Of all kernels a text model on a CPU needs none, unless a request brings a sampling seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no GPU")

    return missing
