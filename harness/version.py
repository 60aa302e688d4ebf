"""Which suite this is."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

PACKAGES = ("spec", "reference_impl", "harness")


def version() -> str:
    """The suite's version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("rolloutcheck")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+checkout"


@lru_cache(maxsize=1)
def digest() -> str:
    """A hash of the suite's own source: what one run found another one may use only if it is the same."""
    root = Path(__file__).resolve().parent.parent
    found = sha256()
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
