"""Failure files: a violation as data that any later version can run against any target.

A file is readable JSON (``spec/schemas/failure.schema.json``). It is only ever
parsed; nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkers import ROLLOUT_RULE_IDS, RULE_IDS
from harness.engines import FRONTS, is_url
from harness.history import MODES
from harness.schedule import ScheduleError
from harness.version import version
from harness.work import ROLLOUT, Work, from_json, level, to_json

FORMAT = "rolloutcheck-failure-1"
MAX_BYTES = 16 << 20


class BadFile(Exception):
    """The file is no failure file. One line; exit status 2."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failure file says. ``summary`` is the screen it was reported with, for readers."""

    rule: str
    mode: str
    engine: str
    schedule: Work
    target: str = ""
    revision: str = ""
    summary: str = ""


def name(failure: Failure) -> str:
    """``BUDGET-3f9a2c.json``: the same violation has the same name, on the mock and on a server one each."""
    (data,) = to_json(failure.schedule).values()
    server = [failure.engine] if is_url(failure.engine) else []  # whose address its replay is not given by the file
    text = json.dumps([failure.rule, failure.mode, data, *server], sort_keys=True)
    return f"{failure.rule}-{hashlib.sha256(text.encode()).hexdigest()[:6]}.json"


def write(directory: Path, failure: Failure, seed: int) -> Path:
    """Stores a violation. Raises OSError."""
    path = directory / name(failure)
    data = {
        "format": FORMAT,
        "rule": failure.rule,
        "mode": failure.mode,
        "engine": failure.engine,
        "target": failure.target,
        "revision": failure.revision,
        "summary": failure.summary,
        **to_json(failure.schedule),
        "version": version(),
        "seed": seed,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
    return path


def load(path: Path) -> Any:
    """The JSON in a file that somebody names. Raises BadFile."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(f"{path} is no file")
        if path.stat().st_size > MAX_BYTES:
            raise BadFile(f"{path} is larger than {MAX_BYTES >> 20} MiB: no failure file")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is no JSON: {str(error).splitlines()[0]}") from error


def read(path: Path) -> Failure:
    """The failure in a file; a corpus entry will do too. Raises BadFile."""
    data = load(path)
    try:
        return _parse(data)
    except ScheduleError as error:
        raise BadFile(f"{path}: {error}") from error


def _parse(data: Any) -> Failure:
    if not isinstance(data, dict) or not isinstance(data.get("schedule", data.get("scenario")), dict):
        raise ScheduleError("no failure file: it has neither a schedule nor a scenario")
    if data.get("format", FORMAT) != FORMAT:
        raise ScheduleError(f"format {str(data['format'])[:40]!r} is not known; this version reads {FORMAT}")
    rules = data.get("rules")
    rule = data.get("rule", rules[0] if isinstance(rules, list) and rules else None)
    work = from_json(data)
    known = ROLLOUT_RULE_IDS if level(work) == ROLLOUT else RULE_IDS
    if not isinstance(rule, str) or rule not in known:
        raise ScheduleError(f"unknown rule {str(rule)[:40]!r}")
    mode, engine = data.get("mode", MODES[0]), data.get("engine", "inproc")
    if mode not in MODES:
        raise ScheduleError(f"unknown mode {str(mode)[:40]!r}")
    if not isinstance(engine, str) or not (engine in FRONTS or is_url(engine)):
        raise ScheduleError(f"unknown engine {str(engine)[:40]!r}")
    texts = [data.get(key, "") for key in ("target", "revision", "summary")]
    if not all(isinstance(t, str) for t in texts):
        raise ScheduleError("a field has the wrong type")
    return Failure(rule, mode, engine, work, *texts)
