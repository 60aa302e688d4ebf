"""Cuts long work into portions and has them run by other processes, here or on a Ray cluster.

A portion is named by its number alone, so that any process can run it, in any
order and at any time: a journal on disk keeps what was found, and the next
run goes on where this one ended.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

from harness import scope
from harness.options import PROFILES, SCENARIOS, Options, faulty_count
from harness.search import ROW, Search, to_json
from harness.targets import CannotJudge
from harness.version import digest, version
from harness.work import ROLLOUT, SAMPLE, Work

SCOPE_PART = 240
LEAVE_S = 3.0
MAX_FILES = 20_000
T = TypeVar("T")
Found = tuple[int, list[Any]]
"""How many schedules were run, and the tallies (`harness.search.to_json`)."""


@dataclass(frozen=True, slots=True)
class Portion:
    """``kind``: "drawn", "faulty engine", "scope" or "rollouts"; ``size``: at most so many of its schedules."""

    kind: str
    number: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All portions of a check. ``schedules``: how many they hold together."""

    name: str
    portions: tuple[Portion, ...]
    schedules: int


def plan(options: Options, level: str = SAMPLE) -> Plan:
    """What there is to run besides the corpus. A scope has single samples only; whole rollouts are drawn."""
    if level == ROLLOUT:
        from harness.strategies import PART

        total = SCENARIOS[options.profile]
        return Plan("whole rollouts", tuple(_cut("rollouts", total, PART)), total)
    if options.scope is not None:
        total = scope.count(options.scope)
        return Plan("scope", tuple(_cut("scope", total, SCOPE_PART)), total)
    from harness.strategies import PART

    drawn, faulty = PROFILES[options.profile], faulty_count(options.profile)
    parts = (*_cut("drawn", drawn, PART), *_cut("faulty engine", faulty, PART))
    return Plan("drawn", parts, drawn + faulty)


def _cut(kind: str, total: int, size: int) -> Iterator[Portion]:
    for number, begin in enumerate(range(0, total, size)):
        yield Portion(kind, number, min(size, total - begin))


def explore(
    options: Options, engine: str, modes: tuple[str, ...], plan: Plan, until: float | None = None
) -> Generator[Found, None, None]:
    """What each portion found, in any order. No portion is begun after ``until`` (monotonic seconds)."""
    journal = Journal(options, engine, modes) if options.journal is not None else None
    known = {p: journal.known[p] for p in plan.portions if p in journal.known} if journal is not None else {}
    yield from known.values()
    left: Iterable[Portion] = (portion for portion in plan.portions if portion not in known)
    if until is not None:
        left = takewhile(lambda portion: time.monotonic() < until, left)
    tasks = ((portion, (options, engine, modes, portion)) for portion in left)
    if options.ray is not None:
        from harness import on_ray

        results = on_ray.spread(run, tasks, options.ray)
    else:
        results = spread(run, tasks, options.jobs)
    for portion, found in results:
        if journal is not None:
            try:
                journal.add(portion, found)
            except BadJournal as error:  # a full disk must not cost what was found
                print(f"rolloutcheck: {error}; going on without a journal", file=sys.stderr)
                journal = None
        yield found


# in the other process

_search: tuple[tuple[Options, str, str], Search] | None = None
_scope: tuple[int, int, Iterator[Work]] = (-1, 0, iter(()))


def run(options: Options, engine: str, modes: tuple[str, ...], portion: Portion) -> Found:
    """Runs one portion. The target stays loaded for the next one."""
    global _search
    level = ROLLOUT if portion.kind == "rollouts" else SAMPLE
    if _search is None or _search[0] != (options, engine, level):
        _leave()  # a front is the only one of its process
        _search = ((options, engine, level), Search(_worker(options, engine, level), modes, options, engine, level))
    search = _search[1]
    search.clear()
    count = search.observe_all(_schedules(options, portion))
    return count, to_json(search.tallies)


def _leave() -> None:
    """Ends the worker, and with it what the target has started."""
    global _search
    if _search is not None:
        _search[1].worker.close()
        _search = None


atexit.register(_leave)


def _worker(options: Options, engine: str, level: str) -> Any:
    from harness.inline import TRUSTED, Inline
    from harness.isolation import Worker

    if options.target.kind in TRUSTED:
        return Inline(options.target, engine, options.tokenizer, level=level)
    limit = options.run_limit_s
    return Worker(options.target, engine, options.tokenizer, run_limit_s=limit, level=level).__enter__()


def _schedules(options: Options, portion: Portion) -> Sequence[Work]:
    if portion.kind == "scope":
        return _of_scope(options.scope or 0, portion)
    if portion.kind == "rollouts":
        from harness import scenario_strategies

        return scenario_strategies.part(options.seed, portion.number)[: portion.size]
    from harness.strategies import part

    return part(options.seed, portion.number, faulty=portion.kind == "faulty engine")[: portion.size]


def _of_scope(size: int, portion: Portion) -> list[Work]:
    """Goes on from where the portion before ended: portions come in order, and counting is cheap but not free."""
    global _scope
    begin = portion.number * SCOPE_PART
    known, place, rest = _scope
    if known != size or place > begin:
        place, rest = 0, scope.schedules(size)
    found = list(islice(rest, begin - place, begin - place + portion.size))
    _scope = (size, begin + portion.size, rest)
    return found


# processes of this machine


def spread(
    work: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]], jobs: int | None = None
) -> Generator[tuple[Any, T], None, None]:
    """``work(*arguments)`` for each named task, in processes; (name, result) as they come. None: one a core.

    Tasks are taken one by one as processes become free. What a task raises is raised here.
    """
    jobs = jobs or cores()
    with processes(jobs) as pool:
        names: dict[Future[T], Any] = {}
        for name, arguments in tasks:
            with _in_one_piece():
                names[pool.submit(work, *arguments)] = name
            if len(names) > jobs:  # one is always waiting, so that no process is idle
                yield from _ended(names)
        while names:
            yield from _ended(names)


@contextmanager
def _in_one_piece() -> Iterator[None]:
    """Ctrl-C waits: a process that is begun and not told what to do would say so on the terminal as it dies."""
    came: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _ended(names: dict[Future[T], Any]) -> Iterator[tuple[Any, T]]:
    for future in wait(names, return_when=FIRST_COMPLETED).done:
        yield names.pop(future), future.result()


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this block, whatever ends it, and with this process.

    Spawned, not forked: the parent may have threads, and a front patches the HTTP libraries of its process.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        end = time.monotonic() + LEAVE_S
        for child in children:
            child.join(max(end - time.monotonic(), 0))
            child.kill()
        if isinstance(error, BrokenProcessPool):
            raise CannotJudge("a process that ran portions was ended from outside; is there enough memory?") from error
        raise


def _begin(parent: int) -> None:
    from harness.worker import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that `_leave` is run
    die_with_parent()
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os._exit(1)


def cores() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# what is known from before


class BadJournal(ValueError):
    """The file cannot be gone on from. The message is one line."""


class Journal:
    """A file of JSON lines: what the work is, then what each portion found."""

    def __init__(self, options: Options, engine: str, modes: tuple[str, ...]) -> None:
        """Reads what is there. Raises BadJournal when it belongs to other work, or cannot be read or written."""
        self.path, self.engine = Path(options.journal or ""), engine
        self.known: dict[Portion, Found] = {}
        head = {"rolloutcheck": version(), "suite": digest(), "work": _work(options, modes)}
        if self.path.exists() and not self.path.is_file():  # a device may have no end
            raise BadJournal(f"cannot use {self.path}: it is no file")
        with self._readable():
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            if not lines:
                self.path.write_text(json.dumps(head) + "\n", encoding="utf-8")
                return
            if json.loads(lines[0]) != json.loads(json.dumps(head)):
                raise BadJournal(f"{self.path} is the journal of other work; name another file, or remove it")
            whole = lines
            if len(lines) > 1 and not _is_json(lines[-1]):  # cut off while it was written
                whole = lines[:-1]
                self.path.write_text("\n".join(whole) + "\n", encoding="utf-8")
            for line in whole[1:]:
                self._read(json.loads(line))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except BadJournal:
            raise
        except OSError as error:
            raise BadJournal(f"cannot use {self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadJournal(f"{self.path} is no journal of rolloutcheck") from error

    def _read(self, data: dict[str, Any]) -> None:
        portion, count, found = Portion(**data["portion"]), data["schedules"], data["found"]
        if not 0 <= count <= portion.size or any(len(row) != len(ROW) for row in found):
            raise ValueError(f"no portion: {data}")
        if data["engine"] == self.engine:
            self.known[portion] = (count, found)

    def add(self, portion: Portion, found: Found) -> None:
        """Writes a line, at once. Raises BadJournal."""
        data = {"engine": self.engine, "portion": asdict(portion), "schedules": found[0], "found": found[1]}
        with self._readable(), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _work(options: Options, modes: tuple[str, ...]) -> dict[str, Any]:
    """What must be the same for two runs to be parts of one. Where the target lies may differ, its revision not."""
    target = options.target
    return {
        "source": _source(target.root) if target.root else None,
        "limit": options.run_limit_s,
        "target": [target.kind, target.function, target.twin, target.revision],
        "modes": list(modes),
        "rules": list(options.rules),
        "profile": options.profile,
        "seed": options.seed,
        "scope": options.scope,
        "tokenizer": options.tokenizer,
        "hypothesis": None if options.scope is not None else _hypothesis(),
    }


def _source(root: str) -> str:
    """A hash of the Python files below the target's folder: what was found of other code is not known of this one."""
    found = sha256()
    for number, path in enumerate(sorted(Path(root).rglob("*.py"))):
        if number >= MAX_FILES:
            raise BadJournal(f"{root} holds more than {MAX_FILES:,} Python files; --path may name a smaller folder")
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _hypothesis() -> str:
    from importlib.metadata import version

    return version("hypothesis")
