"""Runs schedules in a worker process, and survives what the target does to it.

A target that hangs is stopped after a limit, one that leaves the process is
noticed, and both become part of the history (`Halted`). The worker is then
started again for the next schedule.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from harness import work
from harness.history import Halted, History
from harness.rollouts import RolloutHistory
from harness.scenario import Scenario
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.work import SAMPLE, Run, Work

RUN_LIMIT_S = 20.0
IMPORT_FACTOR = 3  # importing may take that many times as long
MAX_REPLY = 1 << 28  # bytes; a history of the longest schedule allowed is far below
EXIT_CHECK_S = 0.5
LAST_WORDS_S = 0.5  # something that left the process's group may keep the pipe open
MAX_AHEAD = 48  # small enough for the requests to fit into a pipe
MAX_RESTARTS = 3  # each may have cost RUN_LIMIT_S


class HarnessFault(Exception):
    """The harness itself failed: exit status 3. The message is a traceback."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the worker says of its target once it is loaded."""

    name: str
    modes: tuple[str, ...]
    absent: dict[str, str]
    stubbed: tuple[str, ...]


class Worker:
    """A target behind a front, in its own process. Use as a context manager."""

    def __init__(
        self,
        spec: TargetSpec,
        front: str = "inproc",
        tokenizer: str | None = None,
        *,
        run_limit_s: float = RUN_LIMIT_S,
        level: str = SAMPLE,
    ) -> None:
        self.spec, self.front, self.tokenizer, self.run_limit_s = spec, front, tokenizer, run_limit_s
        self.level = level
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sent: deque[tuple[Work, str]] = deque()
        self._early: dict[tuple[Work, str], Run | CannotJudge] = {}
        self._said: deque[str] = deque(maxlen=20)
        self._draining: threading.Thread | None = None
        self._restarts = 0
        self._temporary = ""
        self.ready = Ready("", (), {}, ())

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Ready:
        """Starts the process and waits until the target is loaded. Raises CannotJudge or HarnessFault."""
        self.launch()
        try:
            return self.wait()
        except BaseException:  # Ctrl-C as well: nobody else would end it
            self.close()
            raise

    def launch(self) -> None:
        """Starts the process and does not wait: `wait` must follow."""
        # The package's own folder is named, so that a target's `harness` on sys.path is not taken for ours.
        command = [sys.executable, "-c", _BOOT, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        self._temporary = tempfile.mkdtemp(prefix="rolloutcheck-")
        self._process = process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": self._temporary},  # what it leaves there goes with it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what the target starts is stopped with it
        )
        # Made anew, since the threads of the process before may still be at theirs.
        self._lines, self._said = queue.SimpleQueue(), deque(maxlen=20)
        self._draining = threading.Thread(target=self._drain, args=(process, self._said), daemon=True)
        self._draining.start()
        threading.Thread(target=self._read, args=(process, self._lines), daemon=True).start()
        target = self.spec.to_json()
        self._send({"target": target, "front": self.front, "tokenizer": self.tokenizer, "level": self.level})

    def wait(self) -> Ready:
        """What a launched worker says of its target. Raises CannotJudge or HarnessFault."""
        doing = f"importing {self.spec.function.partition(':')[0] or self.spec.kind}"
        limit_s = IMPORT_FACTOR * self.run_limit_s
        answer = self._receive(limit_s)
        while not isinstance(answer, str) and "trial" in answer:
            doing, limit_s = f"a first call of {answer['trial']}", self.run_limit_s
            answer = self._receive(limit_s)
        if isinstance(answer, str):
            what = {"hang": f"does not end within {limit_s:.0f} s", "exit": "ends its process"}[answer]
            self.close()
            raise CannotJudge(f"{doing} {what}{self._last_words()}")
        self._raise_unless(answer, "ready")
        given = answer["ready"]
        self.ready = Ready(given["name"], tuple(given["modes"]), given["absent"], tuple(given["stubbed"]))
        return self.ready

    def ahead(self, wanted: Work, mode: str) -> None:
        """Sends a run whose result `run` will want later, so that target and checkers work side by side."""
        if self._process is not None and len(self._sent) < MAX_AHEAD and (wanted, mode) not in self._sent:
            self._sent.append((wanted, mode))
            self._send({**work.to_json(wanted), "mode": mode})

    def run(self, wanted: Work, mode: str) -> Run:
        """The history of a run. Raises CannotJudge or HarnessFault."""
        key = (wanted, mode)
        while key in self._sent:  # answers come in the order of the requests
            first = self._sent.popleft()
            if first == key:
                return self._answer(wanted, mode)
            try:
                self._early[first] = self._answer(*first)
            except CannotJudge as error:
                self._early[first] = error
        early = self._early.pop(key, None)
        if isinstance(early, CannotJudge):
            raise early
        if early is not None:
            return early
        if self._process is None:
            if self._restarts >= MAX_RESTARTS:
                raise CannotJudge(
                    f"{self.ready.name} hung or left its process {MAX_RESTARTS + 1} times; no more schedules are run"
                )
            self._restarts += 1
            self.start()
        while self._sent:  # what was sent ahead and is not wanted yet
            first = self._sent[0]
            with contextlib.suppress(CannotJudge):
                self._early[first] = self.run(*first)
        if self._process is None:
            return self.run(wanted, mode)
        self._send({**work.to_json(wanted), "mode": mode})
        return self._answer(wanted, mode)

    def _answer(self, wanted: Work, mode: str) -> Run:
        """The next answer, which is that of this run. A hang or an exit takes the runs behind it along."""
        answer = self._receive(self.run_limit_s)
        if isinstance(answer, str):
            message = f"no end within {self.run_limit_s:.0f} s" if answer == "hang" else "the target left its process"
            self.close()
            events = (Halted(0, 0, answer, message + self._last_words()),)
            if isinstance(wanted, Scenario):
                return RolloutHistory(wanted, mode, -1, {}, events)
            return History(wanted, mode, (), -1, events)
        self._raise_unless(answer, "rollouts" if isinstance(wanted, Scenario) else "history")
        return work.run_from_json(answer)

    def modules(self) -> tuple[str, ...] | None:
        """The client's modules that were asked for so far. None when the process is gone and cannot tell."""
        while self._sent:  # what was sent ahead and is not wanted any more
            with contextlib.suppress(CannotJudge):
                self.run(*self._sent[0])
        if self._process is None or self._restarts:
            return None
        self._send({"modules": True})
        answer = self._receive(self.run_limit_s)
        return None if isinstance(answer, str) else tuple(answer["modules"])

    def twin(self) -> Worker:
        """Another worker for the same target, not started."""
        return Worker(self.spec, self.front, self.tokenizer, run_limit_s=self.run_limit_s, level=self.level)

    def close(self) -> None:
        """Ends the process and everything it started."""
        process, self._process = self._process, None
        self._sent.clear()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _raise_unless(self, answer: dict[str, Any], key: str) -> None:
        if "cannot" in answer:
            if key == "ready":
                self.close()
            raise CannotJudge(answer["cannot"], not_applicable=answer["not_applicable"])
        if key not in answer:
            self.close()
            raise HarnessFault(answer.get("broken", f"unexpected answer: {str(answer)[:200]}"))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, limit_s: float) -> dict[str, Any] | str:
        """The next answer, or "hang" or "exit"."""
        assert self._process is not None
        end, ended = time.monotonic() + limit_s, False
        while True:  # once more after the process has ended: what it said may still be on its way
            try:
                line = self._lines.get(timeout=max(min(end - time.monotonic(), EXIT_CHECK_S), 0.001))
                break
            except queue.Empty:
                if ended:
                    return "exit"
                ended = self._process.poll() is not None  # a child of it may keep the pipe open
                if time.monotonic() >= end:
                    return "hang"
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            return "exit"  # the end, or cut off in the middle of an answer
        return answer

    def _read(self, process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            while line := process.stdout.readline(MAX_REPLY):
                lines.put(line)
        lines.put(b"")

    def _drain(self, process: subprocess.Popen[bytes], said: deque[str]) -> None:
        assert process.stderr is not None
        with process.stderr as stream, contextlib.suppress(ValueError, OSError):
            while line := stream.readline(4096):
                said.append(line.decode("utf-8", "replace").rstrip())

    def _last_words(self) -> str:
        """What the process that was closed said last; its pipe may hold more than was read so far."""
        assert self._draining is not None
        self._draining.join(LAST_WORDS_S)
        said = next((line for line in reversed(self._said) if line.strip()), "")
        return f" (last output: {said[:120]})" if said else ""


_BOOT = """
import sys
sys.path[0] = sys.argv.pop(1)
import runpy
runpy.run_module("harness.worker", run_name="__main__", alter_sys=True)
"""
