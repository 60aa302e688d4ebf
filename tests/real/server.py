"""Starts and stops a server, by default SGLang 0.5.23 on a CPU; see `serving`.

What it takes to run SGLang without a GPU: four environment variables, the flags of `FLAGS`, and `stubs/`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.real import guard

HERE = Path(__file__).parent
HOST = "127.0.0.1"
VERSION = "0.5.23"
PATIENCE_S = 300.0
"""Half a minute to one and a half on two cores; the first time, when Python compiles what is imported, twice that."""

GRACE_S = 1.0
"""From SIGTERM to SIGKILL. SGLang first finishes what it is doing, which nobody waits for any more."""

STEP_S = 0.2
SHOWN = 4000
"""So many characters of a log's end are shown."""

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "20000"),
    "--sleep-on-idle",  # else its scheduler takes a whole core for ever
)

SMALL = ("--context-length", "256")
INCREMENTAL = ("--incremental-streaming-output",)
ONE_PLACE = ("--max-running-requests", "1", "--max-queued-requests", "1")
"""One request runs, one waits, the next is refused."""


class NotServing(Exception):
    """The server did not come to answer; with the end of what it wrote."""


@dataclass(frozen=True)
class Server:
    """A server that answers. ``group``: its process group, None when it is somebody else's."""

    url: str
    group: int | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    @cached_property
    def context(self) -> int:
        """The most tokens that input and answer may have together."""
        models = self.get("/v1/models")["data"]
        context: int = models[0]["max_model_len"]
        return context

    def get(self, path: str) -> Any:
        """What the server says about itself. Raises httpx.HTTPError."""
        return client(timeout=30).get(self.url + path).raise_for_status().json()

    def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer to a plain request. Raises httpx.HTTPError."""
        return client(timeout=120).post(f"{self.url}/generate", json=body).raise_for_status().json()


def client(timeout: float) -> httpx.Client:
    return httpx.Client(timeout=timeout, trust_env=False)  # not through a proxy


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """The real server with the model of a folder (`tests.real.model`) and further flags. Raises NotServing."""
    command = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS, *flags)
    environment = {
        "PYTHONPATH": str(HERE / "stubs"),
        "PYTHONDONTWRITEBYTECODE": "",  # compiling all of it again would double every start
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with running((*command, "--host", HOST), log, environment) as server:
        yield server


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    patience: float = PATIENCE_S,
    grace: float = GRACE_S,
) -> Iterator[Server]:
    """A server of this machine for as long as the block runs; ``command`` is given ``--port N`` as well.

    Raises NotServing when it ends, or does not answer within ``patience`` seconds. Afterwards its process
    group is gone, and so are its temporary files; if this process is killed, `tests.real.guard` sees to it.
    """
    with (
        held_port() as port,
        guarded((*command, "--port", str(port)), log, environment or {}, grace) as (process, group),
    ):
        server = Server(f"http://{HOST}:{port}", group)
        wait(server.url, process, log, patience)
        yield server


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is given to nobody else: it stays bound here, and whoever sets SO_REUSEADDR may listen on it.

    A port that is merely free now could be taken before the server has come so far as to want it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        port: int = holder.getsockname()[1]
        yield port


@contextmanager
def guarded(
    command: Sequence[str], log: Path, environment: Mapping[str, str], grace: float
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process that guards the command, and the command's process group. Raises NotServing."""
    folder = tempfile.mkdtemp(prefix="rolloutcheck-")
    caches = {"TMPDIR": folder, "XDG_CACHE_HOME": folder, "HF_HOME": folder, "SGLANG_CACHE_DIR": folder}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, guard.__file__, str(grace), folder, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, **caches, **environment},
            start_new_session=True,
        )
    with process:  # which closes its input, and waits for it to end
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise NotServing(f"it cannot be started\n{tail(log)}")
        yield process, int(said)


def wait(url: str, process: subprocess.Popen[bytes], log: Path, patience: float) -> None:
    """Until the server answers. Raises NotServing."""
    deadline = time.monotonic() + patience
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with client(timeout=min(10, patience)) as http:
        while process.stdout.read() is None:  # b"" at the end: the server is no more
            with suppress(httpx.TransportError):
                if http.get(f"{url}/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise NotServing(f"no answer within {patience:g} s\n{tail(log)}")
            time.sleep(STEP_S)
    raise NotServing(f"it has ended\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-SHOWN:]


def other_flags(*flags: str) -> pytest.MarkDecorator:
    """The fixture `other` of the test is a server with these flags."""
    return pytest.mark.parametrize("other", [flags], ids=[" ".join(flags)], indirect=True)
