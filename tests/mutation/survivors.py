"""Judges a run of mutmut: what lived must be listed in equivalent.toml with a reason, and nothing else may be.

Run by ``tox -e mutation`` after ``mutmut run``. A mutant is known by its function and by the lines it changes, not
by mutmut's running number, which moves with every edit above it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("equivalent.toml")
DEAD, TIMEOUT = ("killed", "caught by type check"), "timeout"
LIVED = ("survived", "no tests")
"""Everything else (not checked, suspicious, a crash of the worker) is no verdict, and fails."""

_NAME = re.compile(r"(?P<module>[\w.]+)\.x(?:_|ǁ(?P<owner>\w+)ǁ)(?P<function>\w+)__mutmut_\d+")


class Mutant(NamedTuple):
    """One change of one function; ``before`` and ``after`` are the lines it changes, without their indentation."""

    module: str
    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}\n    - {self.before}\n    + {self.after}"


def place(name: str) -> tuple[str, str]:
    """Module and function of one of mutmut's names."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"mutmut names a mutant {name!r}")
    owner = found["owner"]
    return found["module"], f"{owner}.{found['function']}" if owner else found["function"]


def mutant(name: str, diff: str) -> Mutant:
    """``diff`` is what ``mutmut show`` prints: a line with the name, then a unified diff."""
    lines = [line for line in diff.splitlines() if line[:3] not in ("---", "+++")]
    before, after = ("\n".join(x[1:].strip() for x in lines if x.startswith(sign)) for sign in "-+")
    return Mutant(*place(name), before, after)


def listed(text: str) -> Counter[Mutant]:
    """The mutants that equivalent.toml holds; each with a reason."""
    entries = tomllib.loads(text).get("mutant", [])
    assert all(entry["why"].strip() for entry in entries), "a mutant is listed without a reason"
    return Counter(Mutant(e["module"], e["function"], e["before"], e["after"]) for e in entries)


def problems(lived: Counter[Mutant], known: Counter[Mutant], statuses: Mapping[str, str]) -> list[str]:
    """What keeps the run from passing."""
    unjudged = [f"{status}: {n}" for n, status in statuses.items() if status not in (*DEAD, TIMEOUT, *LIVED)]
    return [
        *(["there is no mutant at all"] if not statuses else []),
        *unjudged,
        *(f"lives, and is not listed: {m}" for m in (lived - known).elements()),
        *(f"is listed, but was killed or is gone: {m}" for m in (known - lived).elements()),
    ]


def table(statuses: Mapping[str, str]) -> str:
    """The score, module by module. What lives is equivalent where `problems` has nothing to say."""
    modules = sorted({place(name)[0] for name in statuses})
    rows = [_row(m, [s for name, s in statuses.items() if place(name)[0] == m]) for m in modules]
    return "\n".join(
        [_line("module", "killed", "timeout", "equivalent", "total"), *rows, _row("all", statuses.values())]
    )


def _row(name: str, statuses: Iterable[str]) -> str:
    of = Counter(statuses)
    return _line(name, sum(of[s] for s in DEAD), of[TIMEOUT], sum(of[s] for s in LIVED), of.total())


def _line(name: str, *cells: object) -> str:
    return f"{name:36}" + "".join(f"{cell!s:>12}" for cell in cells)


def mutmut(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments], capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    lines = mutmut("results", "--all", "true").split("\n")
    statuses = dict(line.strip().rsplit(": ", 1) for line in lines if ": " in line)
    lived = Counter(mutant(n, mutmut("show", n)) for n, status in statuses.items() if status in LIVED)
    wrong = problems(lived, listed(LIST.read_text(encoding="utf-8")), statuses)
    print(table(statuses), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
