"""Runs a server while its standard input is open, then ends it: `python guard.py SECONDS FOLDER COMMAND...`.

Whoever wants the server holds the other end of that pipe. However a test run ends, even by SIGKILL, the kernel
closes it, and the guard sees to it that nothing of the server is left: no process of its group, no file in FOLDER,
which is the server's folder for temporary files. SECONDS lie between SIGTERM and SIGKILL. The guard has a session
of its own, so Ctrl-C does not reach it.

It says the server's process group in one line on standard output, which it closes when the server has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

STEP_S = 0.05


def main(seconds: str, folder: str, *command: str) -> None:
    try:
        run(command, float(seconds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(command: Sequence[str], seconds: float) -> None:
    adopt()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    print(server.pid, flush=True)
    select.select([0, os.pidfd_open(server.pid)], [], [])
    if server.poll() is not None:
        os.close(1)
        select.select([0], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        if gone(server.pid, seconds):
            break


def adopt() -> None:
    """The server's orphans become children of this process, which buries them: a zombie would keep the group alive."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def gone(group: int, seconds: float) -> bool:
    """Whether every process of the group ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(STEP_S)
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
