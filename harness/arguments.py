"""The words of the command line: which there are, and what they mean. A wrong one ends the command in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.schedule import VERSIONS
from harness.targets.spec import LATER, TargetSpec
from harness.verdict import USAGE

if TYPE_CHECKING:
    from harness.options import Options
    from harness.replay import Failure


class Mode(StrEnum):
    plain = "plain"
    stream = "stream"
    incremental = "incremental"
    both = "both"


class Level(StrEnum):
    sample = "sample"
    rollout = "rollout"
    both = "both"


class Profile(StrEnum):
    quick = "quick"
    ci = "ci"
    deep = "deep"


class SGLang(StrEnum):
    new = VERSIONS[0]
    old = VERSIONS[1]


class Failed(Exception):
    """Ends the command with one line and a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


TargetOption = Annotated[str, typer.Option(help="reference, slime, your own pkg.mod:function, or mutant:ID.")]
ReplayTargetOption = Annotated[
    str | None, typer.Option(help="As for check. Default: the reference, for failures of the reference and the corpus.")
]
PathOption = Annotated[
    Path | None, typer.Option(help="slime: a checkout or bare repository. A function: a folder to import from.")
]
RevOption = Annotated[str | None, typer.Option(help="slime: the revision; its tree is read from git.")]
TwinOption = Annotated[str | None, typer.Option(help="pkg.mod:function, the target's counterpart in the other mode.")]
TokenizerOption = Annotated[Path | None, typer.Option(help="A local tokenizer directory instead of the small BPE.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the report as JSON; - is standard output.")]
FailuresOption = Annotated[Path, typer.Option(help="Where violations are written.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Same seed, same schedules.")]
ProfileOption = Annotated[Profile, typer.Option(help="Schedules: 30, 300 or 800,000. Scenarios: 30, 300 or 200,000.")]
LevelOption = Annotated[
    Level, typer.Option(help="Single samples, whole rollouts (GROUP, ABORT-LIVE, PROVENANCE too), or both.")
]
CacheOption = Annotated[
    Path | None, typer.Option(help="Where what is known is kept for the next run. Default: the user's cache folder.")
]
JobsOption = Annotated[int | None, typer.Option(min=1, max=1024, help="Processes. Default: one a core.")]
LimitOption = Annotated[float, typer.Option(min=1, max=3600, help="Seconds after which a hanging call is stopped.")]


def rules_of(wanted: list[str], levels: tuple[str, ...]) -> tuple[str, ...]:
    import spec
    from harness.checkers import ROLLOUT_RULE_IDS, RULE_IDS
    from harness.work import ROLLOUT, SAMPLE

    judged = {SAMPLE: RULE_IDS, ROLLOUT: ROLLOUT_RULE_IDS}
    known = [rule for rule in spec.RULES if any(rule in judged[level] for level in levels)]
    for name in wanted:
        if name not in spec.RULES:
            meant = f"did you mean {name.upper()}?" if name.upper() in known else f"the rules are {', '.join(known)}"
            raise Failed(USAGE, f"unknown rule {name!r}; {meant}")
        if name not in known:
            other = ROLLOUT if name in ROLLOUT_RULE_IDS else SAMPLE
            what = "whole rollouts" if other == ROLLOUT else "single samples"
            raise Failed(USAGE, f"rule {name} is judged on {what}: give --level {other}")
    return tuple(r for r in spec.RULES if r in wanted)


def engines_of(text: str, levels: tuple[str, ...] = ()) -> tuple[str, ...]:
    from harness.engines import FRONTS, is_url
    from harness.options import ROLLOUT_ENGINE
    from harness.work import ROLLOUT

    names = FRONTS if text == "all" else tuple(dict.fromkeys(name.rstrip("/") for name in text.split(",")))
    for name in names:
        if name not in FRONTS and not is_url(name):
            raise Failed(
                USAGE,
                f"unknown engine {name!r}; the engines are {', '.join(FRONTS)}, all, or a server's http://host:port",
            )
    if levels == (ROLLOUT,) and not all(name == ROLLOUT_ENGINE or is_url(name) for name in names):
        raise Failed(USAGE, f"whole rollouts are run on the engine {ROLLOUT_ENGINE} or a server: leave --engine out")
    if "aioresponses" in names:
        try:
            import aioresponses  # noqa: F401
        except ImportError as error:
            raise Failed(USAGE, "--engine aioresponses needs the package aioresponses") from error
    return names


def elsewhere(stored: list[tuple[Path, Failure]]) -> None:
    """A file is data: it does not choose whom this machine talks to. Raises Failed."""
    from harness.engines import is_url

    for file, failure in stored:
        if is_url(failure.engine):
            raise Failed(USAGE, f"{file} was found on a server: give --engine URL to name one, or --engine inproc")


def not_under_load(options: Options) -> None:
    """A server may be somebody's: it is asked one thing after another. Raises Failed."""
    from harness.engines import is_url

    if options.spread and any(map(is_url, options.engines)):
        raise Failed(
            USAGE,
            "a server is asked by one process: --profile deep, --scope, --jobs, --time-limit, --journal and --ray "
            "are for the mock",
        )


def needs_ray(address: str | None) -> None:
    from importlib.util import find_spec

    if address is not None and find_spec("ray") is None:
        raise Failed(USAGE, "--ray needs the package ray")


def tokenizer_of(path: Path | None) -> str | None:
    """The directory, absolute, after it was seen to load."""
    if path is None:
        return None
    from harness import tokenizer as tokenizers

    try:
        tokenizers.load(str(path))
    except ImportError as error:
        raise Failed(USAGE, "--tokenizer needs the package transformers") from error
    except ValueError as error:
        raise Failed(USAGE, str(error)) from error
    return str(path.resolve())


@contextlib.contextmanager
def target_of(target: str, path: Path | None, rev: str | None, twin: str | None) -> Iterator[TargetSpec]:
    """The target as data; a revision's tree lies in a folder of its own as long as the context is open."""
    if not target:
        raise Failed(USAGE, "--target is empty; give reference, slime or pkg.mod:function")
    if twin and ":" not in target:
        raise Failed(USAGE, "--twin belongs to a target pkg.mod:function")
    if target == "slime":
        from harness.targets.checkout import checkout

        if path is None:
            raise Failed(USAGE, "--target slime needs --path DIR")
        with usage_errors(), checkout(path, rev) as tree:
            yield TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        return
    if rev is not None:
        raise Failed(USAGE, "--rev belongs to --target slime")
    if target == "reference":
        if path is not None:
            raise Failed(USAGE, "--path does not belong to --target reference")
        yield TargetSpec("reference")
        return
    if target.startswith("mutant:"):
        if path is not None or twin:
            raise Failed(USAGE, "--path and --twin do not belong to a mutant")
        (name,) = mutants_of([target.removeprefix("mutant:")])
        yield TargetSpec("mutant", function=name)
        return
    for name in filter(None, (target, twin)):
        module, _, function = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            later = f"; {target} is planned" if target in LATER else ""
            raise Failed(USAGE, f"unknown target {name!r}; give reference, slime or pkg.mod:function{later}")
    if path is not None and not path.is_dir():
        raise Failed(USAGE, f"no folder {path}")
    yield TargetSpec("function", root=str((path or Path.cwd()).resolve()), function=target, twin=twin or "")


def words(target: str, path: Path | None, rev: str | None, twin: str | None, tokenizer: Path | None) -> list[str]:
    """The options that name the target, as they were given."""
    given = {"--target": target, "--path": path, "--rev": rev, "--twin": twin, "--tokenizer": tokenizer}
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def mutants_of(wanted: list[str]) -> list[str]:
    """The ids, checked; all of them when none is given."""
    from difflib import get_close_matches

    from harness.mutants import load

    known = list(load())
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else "; `rolloutcheck mutants --list` shows them"
            raise Failed(USAGE, f"unknown mutant {name!r}{meant}")
    return list(dict.fromkeys(wanted)) or known


def writable(json_file: Path | None) -> None:
    """Says at once what would be found out after the work. Raises Failed."""
    if json_file is not None and str(json_file) != "-" and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise Failed(USAGE, f"cannot write {json_file}: {'it is a folder' if json_file.is_dir() else 'no such folder'}")


def recordable(where: Path) -> None:
    """As `writable`, and the folder takes a file: a recording takes a minute, and is put in place at its end."""
    import tempfile

    writable(where)
    if str(where) == "-" or (where.exists() and not where.is_file()):
        return
    try:
        tempfile.TemporaryFile(dir=where.resolve().parent).close()  # of a link, where it leads to
    except OSError as error:
        raise Failed(USAGE, f"cannot write {where}: {error.strerror}") from error


def apart(*files: Path | None) -> None:
    """Each form of the report needs a place of its own. Raises Failed."""
    given = [str(file) for file in files if file is not None]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise Failed(USAGE, f"two forms of the report cannot both go to {'standard output' if twice == '-' else twice}")


def write(path: Path, text: str) -> None:
    """Writes a file; ``-`` is standard output. Raises Failed."""
    try:
        if str(path) == "-":
            print(text, end="")
        else:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        name = "standard output" if str(path) == "-" else path
        raise Failed(USAGE, f"cannot write {name}: {error.strerror}") from error


def stored_of(files: list[Path], levels: tuple[str, ...] | None = None) -> list[tuple[Path, Failure]]:
    """The failures in files; of these levels, if any are given."""
    from harness.replay import BadFile, read
    from harness.work import ROLLOUT, level

    try:
        stored = [(file, read(file)) for file in files]
    except BadFile as error:
        raise Failed(USAGE, str(error)) from error
    for file, failure in stored:
        on = level(failure.schedule)
        if levels is not None and on not in levels:
            what = "whole rollouts" if on == ROLLOUT else "a single sample"
            raise Failed(USAGE, f"{file} is of {what}: give --level {on}")
    return stored


def repository_of(target: str, path: Path | None) -> Path:
    """The repository of a target that has a history."""
    from harness import revisions

    if target != "slime":
        raise Failed(USAGE, f"only slime's history can be searched, not that of {target!r}; see `git bisect run`")
    if path is None:
        raise Failed(USAGE, "--target slime needs --path DIR")
    with usage_errors():
        return revisions.repository(path)


def cache_of(given: Path | None) -> Path:
    """The folder for what is known from before."""
    from platformdirs import user_cache_path

    try:
        if given is not None and given.exists() and not given.is_dir():
            raise Failed(USAGE, f"--cache {given} is no folder")
    except OSError as error:
        raise Failed(USAGE, f"--cache {given}: {error.strerror}") from error
    return given or user_cache_path("rolloutcheck", appauthor=False)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What git has no revision or repository for is a wrong word of the command line."""
    from harness.targets.checkout import UsageError

    try:
        yield
    except UsageError as error:
        raise Failed(USAGE, str(error)) from error
