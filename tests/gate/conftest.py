"""`gate`: the request gate of SGLang 0.5.23, installed from its wheel for these tests alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.5.23"
FILE = "sglang/api/v1/api_types.py"
ANSWERS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from api_types import GenerateRequest, JsonContractError, SamplingParams
print(json.dumps([GenerateRequest.__struct_fields__, SamplingParams.__struct_fields__]), flush=True)
for line in sys.stdin:
    try:
        GenerateRequest.from_json_value(json.loads(line))
        print("null", flush=True)
    except JsonContractError as error:
        print(json.dumps(str(error)), flush=True)
"""


class Gate:
    """The server's own gate, in a process of its own: what it needs cannot be imported by the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.request, self.sampling = self._read()
        """The names of all fields."""

    def violation(self, body: Any) -> str | None:
        """What it says against a body, or None."""
        assert self._process.stdin is not None
        self._process.stdin.write(dumps(body) + "\n")
        self._process.stdin.flush()
        said: str | None = self._read()
        return said

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = installed(tmp_path_factory)
    command = [sys.executable, "-I", "-c", ANSWERS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Gate(process)


def installed(factory: pytest.TempPathFactory) -> Path:
    """A folder with the file and what it imports. Tox keeps it as long as its environment."""
    kept = os.environ.get("TOX_ENV_DIR")
    folder = Path(kept or factory.mktemp("gate")) / f"sglang-gate-{VERSION}"
    if not folder.is_dir():
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            install(made)
            with suppress(OSError):  # another worker was there first
                made.rename(folder)
        except subprocess.CalledProcessError as error:
            message = f"pip cannot install it: {error.stderr.strip()[-300:]}"
            if kept or os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def install(folder: Path) -> None:
    """Of SGLang one file is taken, for its packages import each other; of msgspec, which that file needs, all."""
    wheels = folder / "wheels"
    what = ("--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"sglang=={VERSION}", "msgspec")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "download", *what]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("sglang-"):
                (folder / "api_types.py").write_bytes(archive.read(FILE))
            else:
                archive.extractall(folder)
    shutil.rmtree(wheels)
