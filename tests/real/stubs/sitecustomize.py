"""Stands in for the packages that SGLang 0.5.23 imports and a text model on a CPU never uses.

Python imports a module of this name before anything else, in the server's children as well. What SGLang does
with these packages while it is imported (take names, subclass, decorate, annotate) comes to nothing here. So
the server starts without them: triton alone is as large as all the rest.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WHY = {
    "triton": "compiles kernels for GPUs",
    "tvm_ffi": "calls compiled GPU kernels",
    "compressed_tensors": "reads quantized weights",
    "gguf": "reads quantized weights",
    "einops": "layers of models that are not Llama",
    "scipy": "layers of models that are not Llama",
    "sentencepiece": "tokenizers of another kind",
    "tiktoken": "tokenizers of another kind",
    "xgrammar": "answers that follow a grammar",
    "llguidance": "answers that follow a grammar",
    "interegular": "answers that follow a grammar",
    "openai_harmony": "the chat interface",
    "partial_json_parser": "the chat interface",
    "IPython": "notebooks",
    "PIL": "images",
    "torchvision": "images",
    "torchaudio": "sound",
    "soundfile": "sound",
    "torchcodec": "films",
    "decord": "films",
    "av": "films",
    "prometheus_client": "metrics, which are off",
}
"""The packages, and what each would be for."""

ABSENT = frozenset({"active"})
"""``triton.runtime.driver.active`` raises on a machine without a GPU, and SGLang learns from it that there is none."""


class Kind(type):
    """The type of whatever is taken from such a package: its attributes are of that type as well."""

    def __getattr__(cls, name: str) -> Any:
        return kind(name)


class Inert(metaclass=Kind):
    """Can be made from anything, called with anything and subclassed; cannot compute."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> Inert:
        return self

    def __getattr__(self, name: str) -> Any:
        return kind(name)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        """As a field's type in a request of the chat interface."""
        from pydantic_core import core_schema

        return core_schema.any_schema()


def kind(name: str) -> Any:
    if name.startswith("__") or name in ABSENT:
        raise AttributeError(name)
    return Kind(name, (Inert,), {})


class InertModule(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 - a module's is a list
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        return kind(name)


class Finder(MetaPathFinder, Loader):
    """Finds an inert module for every name below a package of the list."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(name, self, is_package=True) if listed(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def listed(name: str) -> bool:
    return name.partition(".")[0] in WHY


def honest(name: str, package: str | None = None) -> ModuleSpec | None:
    """For those who ask first whether a package is there (transformers does): it is not."""
    return None if listed(name) else _find_spec(name, package)


_find_spec = importlib.util.find_spec
importlib.util.find_spec = honest
sys.meta_path.insert(0, Finder())
