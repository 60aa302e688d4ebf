"""The fixtures: `real`, a server with the default flags, and `other`, one with the flags of `other_flags`.

A server is started when the first test asks for it. It takes 2 GB of memory, so there are never more than two:
pytest sorts the tests by the flags of `other` and ends one before it starts the next.

With ROLLOUTCHECK_REAL=URL `real` is the server that is there already, and none is started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.real.server import VERSION, Server, serving

ROOT = Path(__file__).resolve().parents[2]
URL = os.environ.get("ROLLOUTCHECK_REAL", "").rstrip("/")


def installed() -> bool:
    """Looks for no module: a test may have put a stub of that name in its place."""
    try:
        return version("sglang") == VERSION
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _there() -> None:
    if not (URL or installed()):
        pytest.skip(f"SGLang {VERSION} is installed by tox -e real")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model. Another process makes it: this one need not hold torch."""
    if URL:
        pytest.skip("ROLLOUTCHECK_REAL names a server, so none is started")
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-m", "tests.real.model", str(folder)], cwd=ROOT, check=True, timeout=180)
    return folder


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if URL:
        yield Server(URL)
        return
    with started(request.getfixturevalue("model"), tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.fixture(scope="session")
def other(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(model, tmp_path_factory.mktemp("other"), *request.param) as server:
        yield server


@contextmanager
def started(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """A real server, of which nothing may be left at the end: that would be an error of the last test it served."""
    with serving(model, folder / "log", *flags) as server:
        yield server
    assert server.group is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(server.group, 0)
