"""What was found out of the clients of a history, and the file that keeps it for the next run.

Two revisions whose client is the same, file by file, share what is known.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness import work
from harness.judged import Broken, Judged, Modules, Row, Said, rows, union
from harness.options import Options
from harness.revisions import Tree, client
from harness.verdict import UNKNOWN
from harness.version import digest, version
from harness.work import Work

MAX_BYTES = 1 << 28


class Known:
    """What was found so far, by client; in a file of JSON lines if one is given.

    A file of other work (another suite, seed or choice of rules) is not read; one that
    is cut off or cannot be written costs nothing but time.
    """

    def __init__(self, folder: Path | None, options: Options, name: str) -> None:
        self._clients: dict[Modules, dict[str, Judged]] = {}
        self._wider: dict[tuple[Modules, str], Modules] = {}
        self._replays: dict[str, Said] = {}
        self._rows = rows(options)
        self.file = None if folder is None else folder / f"{name}-{_work(options)}.jsonl"
        if self.file is not None:
            self._read(self.file)

    def judged(self, tree: Tree) -> Judged | None:
        """What is known of the client in this tree."""
        for modules, clients in self._clients.items():
            found = clients.get(client(tree, modules))
            if found is not None:
                return found
        return None

    def add(self, tree: Tree, judged: Judged) -> None:
        key = client(tree, judged.modules)
        while (judged.modules, key) in self._wider:
            judged = replace(judged, modules=self._wider[judged.modules, key])
            key = client(tree, judged.modules)
        self._clients.setdefault(judged.modules, {})[key] = judged
        if all(said.verdict != UNKNOWN for said in judged.rows.values()):  # the next run may fare better
            self._write({"client": key, "modules": judged.modules, "rows": _to_json(judged.rows)})

    def widen(self, tree: Tree, judged: Judged, modules: Modules) -> bool:
        """Takes note that the client in the tree asked for more modules than when it was judged.

        From then on only trees with the same of those as well are known to hold it. Returns whether it did.
        """
        wider = union((judged.modules, modules))
        if modules is None or wider == judged.modules:
            return False
        self._widen(judged.modules, client(tree, judged.modules), wider)
        self._write({"gone": client(tree, judged.modules), "modules": judged.modules, "wider": wider})
        self.add(tree, judged)
        return True

    def _widen(self, modules: Modules, key: str, wider: Modules) -> None:
        self._clients.get(modules, {}).pop(key, None)
        self._wider[modules, key] = wider

    def replay(self, tree: Tree, judged: Judged, row: Row, wanted: Work) -> Said | None:
        """What a violation showed when it was replayed on the client in this tree. None: it was not."""
        return self._replays.get(self._replay(tree, judged, row, wanted))

    def add_replay(self, tree: Tree, judged: Judged, row: Row, wanted: Work, said: Said) -> None:
        key = self._replay(tree, judged, row, wanted)
        self._replays[key] = said
        if said.verdict != UNKNOWN:
            self._write({"replay": key, "said": _said_to_json(said)})

    def forget(self) -> None:
        """Removes the file."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _replay(self, tree: Tree, judged: Judged, row: Row, wanted: Work) -> str:
        data = [client(tree, judged.modules), *row, work.to_json(wanted)]
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]

    def _read(self, file: Path) -> None:
        try:
            if not file.is_file() or file.stat().st_size > MAX_BYTES:  # a pipe or a device has no end
                return
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # cut off while it was written, or by another hand

    def _take(self, data: dict[str, Any]) -> None:
        if "replay" in data:
            self._replays[data["replay"]] = _said_from_json(data["said"])
            return
        modules = None if data["modules"] is None else tuple("" + name for name in data["modules"])
        if "gone" in data:
            self._widen(modules, data["gone"], tuple("" + name for name in data["wider"]))
            return
        found = _from_json(data["rows"])
        self._clients.setdefault(modules, {})[data["client"]] = Judged({row: found[row] for row in self._rows}, modules)

    def _write(self, data: dict[str, Any]) -> None:
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")
        except OSError:
            self.file = None


def _work(options: Options) -> str:
    """A name for everything besides the client that a verdict hangs on."""
    from importlib.metadata import distributions

    data = asdict(options) | {"target": None, "first": None, "jobs": None}
    packages = sorted(f"{found.name} {found.version}" for found in distributions())
    data["suite"] = [version(), digest(), sys.version, packages, _content(options.tokenizer)]
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _content(folder: str | None) -> list[str]:
    """What identifies the files of a folder."""
    files = sorted(Path(folder).iterdir()) if folder is not None else []
    return [f"{file.name} {sha256(file.read_bytes()).hexdigest()}" for file in files if file.is_file()]


def _to_json(rows: dict[Row, Said]) -> list[Any]:
    return [[*row, _said_to_json(said)] for row, said in rows.items()]


def _from_json(data: list[Any]) -> dict[Row, Said]:
    return {(rule, mode): _said_from_json(said) for rule, mode, said in data}


def _said_to_json(said: Said) -> list[Any]:
    broken = None if said.broken is None else [work.to_json(said.broken.work), list(said.broken.lines)]
    return [said.verdict, said.reason, broken]


def _said_from_json(data: list[Any]) -> Said:
    verdict, reason, broken = data
    return Said(verdict, reason, None if broken is None else Broken(work.from_json(broken[0]), tuple(broken[1])))
