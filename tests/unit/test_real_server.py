"""How the tests of the real server start and stop it (tests/real/server.py), shown with small servers of our own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.real.server import NotServing, client, held_port, running

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import http.server, os, signal, subprocess, sys, tempfile

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, {handler})
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
tempfile.mkstemp()
print(tempfile.gettempdir(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
POLITE, STUBBORN = (SERVER.format(handler=f"signal.{name}") for name in ("SIG_DFL", "SIG_IGN"))
SILENT = "import time; print('loading', flush=True); time.sleep(600)"
DEAF = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
print("listening", flush=True)
time.sleep(600)
"""
RUN = """
import sys, time
from pathlib import Path
from tests.real.server import running
with running((sys.executable, "-c", sys.argv[1]), Path(sys.argv[2]), grace=0.3) as server:
    print(server.group, flush=True)
    time.sleep(600)
"""


def command(script: str) -> tuple[str, ...]:
    return sys.executable, "-c", script


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(group)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize("script", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_nothing_is_left(script: str, log: Path) -> None:
    """The server and its child end with the block, and its temporary files go, with or without its consent."""
    with running(command(script), log, grace=0.3) as server:
        assert server.group is not None and alive(server.group)
        with client(5) as http:
            assert http.get(server.url).status_code == 200
        folder = Path(log.read_text().split()[0])
        assert list(folder.iterdir())
    assert not alive(server.group)
    assert not folder.exists()


def test_a_polite_server_is_not_killed(log: Path) -> None:
    script = POLITE.replace("signal.SIG_DFL", "lambda *_: (print('farewell', flush=True), os._exit(0))")
    with running(command(script), log):
        pass
    assert "farewell" in log.read_text()


def test_what_fails_inside_is_passed_on_and_the_server_stopped(log: Path) -> None:
    groups = []
    with pytest.raises(KeyboardInterrupt), running(command(POLITE), log, grace=0.3) as server:  # noqa: PT012
        groups.append(server.group or 0)
        raise KeyboardInterrupt
    wait_until_gone(*groups)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("script", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_it_ends_with_whoever_started_it(number: int, script: str, log: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", RUN, script, str(log)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with starter:
        assert starter.stdout is not None
        group = int(starter.stdout.readline())
        assert alive(group)
        starter.send_signal(number)
    wait_until_gone(group)
    deadline = time.monotonic() + 20
    folder = Path(log.read_text().split()[0])
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_a_server_that_dies_is_noticed_and_its_last_words_shown(log: Path) -> None:
    begun = time.monotonic()
    script = "import sys; print('x' * 9000, 'begin', flush=True); sys.exit('no such device')"
    with (
        pytest.raises(NotServing, match=r"^it has ended\n(?s:.*)no such device\n$") as error,
        running(command(script), log),
    ):
        pass
    assert len(str(error.value)) < 5000
    assert time.monotonic() - begun < 60  # of 300


def test_a_command_that_is_not_there(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(NotServing, match=r"^it cannot be started\n(?s:.*)No such file"), running(("./nowhere",), log):
        pass
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(("script", "said"), [(SILENT, "loading"), (DEAF, "listening")], ids=["silent", "deaf"])
def test_a_server_that_never_answers_is_waited_for_so_long(script: str, said: str, log: Path) -> None:
    message = f"^no answer within 2 s\n{said}\n$"
    with pytest.raises(NotServing, match=message), running(command(script), log, patience=2, grace=0.3):
        pass


def test_a_server_that_is_not_well_yet_is_waited_for(log: Path) -> None:
    script = POLITE.replace("send_response(200)", "send_response(503)")
    with pytest.raises(NotServing, match="no answer within 1 s"), running(command(script), log, patience=1, grace=0.3):
        pass


def test_two_at_once(tmp_path: Path) -> None:
    """They have a port and a folder each."""
    with ExitStack() as both:
        first, second = (
            both.enter_context(running(command(POLITE), tmp_path / name, grace=0.3)) for name in ("first", "second")
        )
        assert (first.host, second.host) == ("127.0.0.1", "127.0.0.1")
        assert first.port != second.port and first.group != second.group
        folders = {(tmp_path / name).read_text().split()[0] for name in ("first", "second")}
        assert len(folders) == 2


def test_a_held_port_is_given_to_nobody_else() -> None:
    with held_port() as port, closing(socket.socket()) as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
