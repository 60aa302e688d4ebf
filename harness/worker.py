"""The process a target lives in: ``python -m harness.worker``.

Targets are other people's code. They print, exit, hang and break their
interpreter, so they get one of their own. It reads one JSON object a line from
what was its standard input and answers on what was its standard output; both
are taken away before the target is loaded, and whatever it prints goes to
standard error, which the parent drains.

    -> {"target": {...}, "front": "inproc", "tokenizer": null, "level": "sample"}
    <- {"trial": name}, before a function is called to see what it asks for
    <- {"ready": {"name", "modes", "absent", "stubbed"}} | {"cannot": message, "not_applicable": bool}
    -> {"modules": true}, for the client's modules that were asked for so far, there or not
    <- {"modules": [...]}
    -> {"schedule": {...}, "mode": "plain"}, or with a "scenario" on a worker for whole rollouts
    <- {"history": {...}} or {"rollouts": {...}} | {"cannot": ...} | {"broken": traceback of the harness itself}
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from json import dumps, loads
from types import ModuleType
from typing import Any, TextIO

from harness import work
from harness.history import PLAIN, Halted, Raised, Requested
from harness.runner import Runner
from harness.schedule import Schedule
from harness.stage import Stage
from harness.targets import CannotJudge, Target
from harness.targets.checkout import PACKAGES
from harness.targets.spec import TargetSpec, load, load_loop


def take_streams() -> tuple[TextIO, TextIO]:
    """The protocol's two streams, out of the target's reach; its own are empty and standard error."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    return requests, replies


def serve(requests: TextIO, replies: TextIO) -> None:
    """Loads the target that the first line names, then runs a schedule a line until the input ends."""

    def say(answer: dict[str, Any]) -> None:
        replies.write(dumps(answer) + "\n")
        replies.flush()

    die_with_parent()
    asked = _Asked()
    sys.meta_path.insert(0, asked)
    try:
        runner = prepare(loads(requests.readline()), lambda name: say({"trial": name}))
    except CannotJudge as error:
        return say(_cannot(error))
    except Exception:
        return say({"broken": traceback.format_exc()})
    target = runner.target
    absent = {mode: str(error) for mode, error in target.absent.items()}
    say(
        {
            "ready": {
                "name": target.name,
                "modes": list(target.modes),
                "absent": absent,
                "stubbed": sorted(target.stubbed),
            }
        }
    )
    for line in requests:
        request = loads(line)
        if "modules" in request:
            say({"modules": sorted(asked.names.union(getattr(target, "probed", ())))})
            continue
        try:
            run = runner.run(work.from_json(request), request["mode"])
            say(work.run_to_json(run))
        except CannotJudge as error:
            say(_cannot(error))
        except Exception:
            say({"broken": traceback.format_exc()})


class _Asked(MetaPathFinder):
    """Finds nothing, and remembers which of the client's modules were looked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in PACKAGES:
            self.names.add(name)


def prepare(first: dict[str, Any], trial: Callable[[str], None]) -> Any:
    """The runner, or stage, for the target and front that the first line names. Raises CannotJudge.

    A function is tried on the very loop it will be judged on: it may keep a session per loop, or a global one.
    """
    from harness import tokenizer as tokenizers

    tokenizer, front = tokenizers.load(first["tokenizer"]), first["front"]
    if first["level"] == work.ROLLOUT:
        return Stage(load_loop(TargetSpec(**first["target"])), tokenizer, front)
    runner: Runner | None = None

    def asks_stream(target: Target) -> bool | None:
        nonlocal runner
        trial(target.name)
        runner = runner or Runner(target, front, tokenizer)
        runner.target = target
        return first_request(runner)

    target = load(TargetSpec(**first["target"]), asks_stream)
    runner = runner or Runner(target, front, tokenizer)
    runner.target = target
    return runner


def first_request(runner: Runner) -> bool | None:
    """Whether the target's first request asks for a stream; None if it sends none. Raises CannotJudge."""
    name = runner.target.name
    for event in runner.run(Schedule(budget=2), PLAIN).events:
        if isinstance(event, Requested):
            return event.stream
        if isinstance(event, Raised):
            raise CannotJudge(f"{name} raises before it asks: {event.error}: {event.message}"[:300])
        if isinstance(event, Halted):
            raise CannotJudge(f"{name} does not come back from its first call: {event.message}"[:300])
    return None


def die_with_parent() -> None:
    """Asks the kernel to end this process with its parent, however that ends (Linux; elsewhere nothing)."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _cannot(error: CannotJudge) -> dict[str, Any]:
    return {"cannot": str(error).split("\n")[0], "not_applicable": error.not_applicable}


if __name__ == "__main__":
    serve(*take_streams())
    os._exit(0)  # threads and exit handlers of the target have no say
