"""Stand-ins for packages that a checkout imports but a rollout client does not need.

A slime checkout imports torch, ray, sglang and more at the top of its modules
and uses next to none of it to talk to an engine. `install` adds import hooks
that fabricate such packages, but only for an ``import`` statement in a file of
the checkout: everybody else sees the packages as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from os.path import realpath, sep
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any, Self

HEAVY = frozenset(
    {
        "datasets",
        "matplotlib",
        "mbridge",
        "megatron",
        "pandas",
        "pyarrow",
        "pylatexenc",
        "ray",
        "sglang",
        "sglang_router",
        "sympy",
        "tensorboard",
        "torch",
        "torchvision",
        "transformers",
        "wandb",
    }
)
"""Stubbed although installed, unless somebody imported them before: seconds to import, and a
client with an injected tokenizer touches none of them while it generates."""

SET_ASIDE = "transformers"
"""Stubbed even if imported before: it would take the stubbed torch for a real one."""

NEEDED = frozenset({"httpx"})
"""Never stubbed: what the client talks through. Without it nothing could be judged."""

VERSION = "99.0"
"""Every stub's ``__version__``: parses, and takes the branch for recent releases."""


class Stub:
    """Whatever was asked of it, it is another stub: falsy, empty, zero, callable.

    Works as a decorator (gives back what it decorates), base class, annotation,
    context manager, awaitable and in ``isinstance`` (never an instance).
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<stub {self._path}>"

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, self._path, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _is_definition(args[0]):
            return args[0]  # used as @decorator
        return Stub(f"{self._path}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        first = next(base for base in bases if isinstance(base, Stub))
        return (StubBase,) if first is self else ()  # a class cannot have one base twice

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, cls: type) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __float__(self) -> float:
        return 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, item: Any) -> bool:
        return False

    def __getitem__(self, key: Any) -> Stub:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def _same(self, *_: Any) -> Stub:
        return self

    # Attribute access on a stub must not look like an operator, so these are spelled out.
    __or__ = __ror__ = __and__ = __rand__ = _same
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __neg__ = __invert__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _same
    __copy__ = __deepcopy__ = __enter__ = _same

    def _false(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _false

    def __exit__(self, *_: object) -> None:
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from ()
        return self


class StubBase:
    """What a class gets for a base that is a stub."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class StubModule(ModuleType):
    """A package made of stubs."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "A stub: this package was not imported.")
        self.__path__: list[str] = []
        self.__version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, self.__name__, name)

    def __bool__(self) -> bool:
        return False


def _attribute(owner: Any, path: str, name: str) -> Any:
    """Makes an attribute once, so that ``torch.int32 is torch.int32``."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"the stub {path} has no {name}")
    made: Any
    if name.endswith(("Error", "Exception", "Warning")):
        made = type(name, (Exception,), {"__module__": path})  # ``except`` takes classes only
    else:
        made = Stub(f"{path}.{name}")
    owner.__dict__[name] = made
    return made


def _is_definition(thing: Any) -> bool:
    return isinstance(thing, type | staticmethod | classmethod) or hasattr(thing, "__code__")


def _is_machinery(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == __name__ or name.partition(".")[0] == "importlib"


class _Shared(Loader):
    """Makes the modules, the same one again when a name is imported again."""

    def __init__(self, root: str, heavy: frozenset[str]) -> None:
        self.root = root
        self.heavy = heavy
        self.modules: dict[str, StubModule] = {}
        self._inside: dict[str, bool] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules.setdefault(spec.name, StubModule(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        pass

    def spec(self, name: str) -> ModuleSpec | None:
        """A stub's spec if one may stand for ``name``, whose import is under way."""
        top, parent = name.partition(".")[0], name.rpartition(".")[0]
        if top in NEEDED or top in sys.stdlib_module_names or not self._asked_by_checkout():
            return None
        if parent and not isinstance(sys.modules.get(parent), StubModule):
            return None  # part of a real package is missing: fail as always
        return ModuleSpec(name, self, is_package=True)

    def _asked_by_checkout(self) -> bool:
        """Whether the statement that imports stands in a file of the checkout."""
        asking = next((f for f, _ in walk_stack(sys._getframe(1)) if not _is_machinery(f)), None)
        return asking is not None and self._is_inside(asking.f_code.co_filename)

    def _is_inside(self, file: str) -> bool:
        if file not in self._inside:
            self._inside[file] = realpath(file).startswith(self.root + sep)
        return self._inside[file]


class _Heavy(MetaPathFinder):
    """First in line: packages that may be there and shall not be imported."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        return self._shared.spec(fullname) if top in self._shared.heavy else None


class _Missing(MetaPathFinder):
    """Last in line: what nobody else found."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return self._shared.spec(fullname)


class Hooks:
    """The installed import hooks."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._replaced: set[str] = set()
        self._aside: dict[str, ModuleType] = {}

    @property
    def stubbed(self) -> frozenset[str]:
        """The top-level packages that were stubbed so far, and the replaced modules."""
        packages = {name for name in self._shared.modules if "." not in name}
        return frozenset(packages | self._replaced)

    def replace(self, name: str) -> None:
        """Puts a stub in the place of one of the checkout's own modules, not yet imported."""
        sys.modules[name] = StubModule(name)
        self._replaced.add(name)

    def set_aside(self, package: str) -> None:
        """Takes an imported package out of the checkout's sight until `withdraw`."""
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            self._aside[name] = sys.modules.pop(name)

    def withdraw(self) -> None:
        """Takes the stubs of packages out of ``sys.modules``; the checkout keeps what it holds.

        Otherwise other libraries would take a stub for the package: many look
        for ``"torch" in sys.modules``. Later imports in the checkout's own
        functions find the same stubs again.
        """
        for name, module in self._shared.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._aside)
        self._aside.clear()


def install(root: str, heavy: frozenset[str] = HEAVY) -> Hooks:
    """Lets imports in files below ``root`` find a stub for each missing or ``heavy`` package."""
    shared = _Shared(realpath(root), heavy)
    hooks = Hooks(shared)
    if SET_ASIDE in heavy:
        hooks.set_aside(SET_ASIDE)
    sys.meta_path.insert(0, _Heavy(shared))
    sys.meta_path.append(_Missing(shared))
    return hooks
