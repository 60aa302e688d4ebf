"""The command line: ``rolloutcheck`` and ``python -m harness``.

Exit statuses: 0 conforms, 1 violates, 2 usage, 125 cannot be judged, 3 a fault
of the harness itself.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.targets.spec import LATER, TargetSpec
from harness.verdict import CANNOT, CONFORMS, FAULT, INTERRUPTED, USAGE, VIOLATES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Checks RL rollout clients against the contract in spec/README.md.",
)


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
JobsOption = Annotated[int | None, typer.Option(min=1, max=1024, help="Processes. Default: one a core.")]
LimitOption = Annotated[float, typer.Option(min=1, max=3600, help="Seconds after which a hanging call is stopped.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from harness.version import version as installed

        typer.echo(f"rolloutcheck {installed()}")
        raise typer.Exit


@app.command()
def check(
    target: TargetOption = "reference",
    path: PathOption = None,
    rev: RevOption = None,
    twin: TwinOption = None,
    mode: Annotated[Mode | None, typer.Option(help="Default: every mode the target has.")] = None,
    engine: Annotated[
        str, typer.Option(help="inproc, loopback, aioresponses, several with commas, or all.")
    ] = "inproc",
    level: Annotated[
        Level, typer.Option(help="Single samples, whole rollouts (GROUP, ABORT-LIVE, PROVENANCE too), or both.")
    ] = Level.sample,
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule id; may be repeated. Default: all of the level.")
    ] = None,
    profile: Annotated[
        Profile, typer.Option(help="Schedules: 30, 300 or 800,000. Scenarios: 30, 300 or 200,000.")
    ] = Profile.ci,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same schedules.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="SHOULD rules and faulty engines gate too.")] = False,
    json_file: JsonOption = None,
    failures: Annotated[Path, typer.Option(help="Where violations are written.")] = Path("failures"),
    tokenizer: TokenizerOption = None,
    limit: LimitOption = 20.0,
    scope: Annotated[
        int | None, typer.Option(min=0, max=8, help="Run every schedule of a scope of this size instead of drawing.")
    ] = None,
    jobs: JobsOption = None,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which no more work is begun.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Keep what is known here, and go on from it.")] = None,
    ray: Annotated[str | None, typer.Option(help="Spread the work over the Ray cluster at this address.")] = None,
) -> None:
    """Search for schedules on which the target breaks a rule."""
    from harness.check import check as run
    from harness.options import LEVEL_SETS, MODE_SETS, Options
    from harness.pool import BadJournal
    from harness.reporters import jsonfile, terminal, violations
    from harness.verdict import exit_status

    levels = LEVEL_SETS[level.value]
    if scope is not None and level is Level.rollout:
        raise Failed(USAGE, "a scope holds single samples; whole rollouts are drawn")
    rules = _rules(rule or [], levels)
    engines = _engines(engine, levels)
    _writable(json_file)
    _writable(journal)
    _has_ray(ray)
    with _target(target, path, rev, twin) as spec:
        options = Options(
            target=spec,
            engines=engines,
            modes=MODE_SETS[mode.value] if mode else None,
            rules=rules,
            profile=profile.value,
            seed=seed,
            tokenizer=_tokenizer(tokenizer),
            run_limit_s=limit,
            scope=scope,
            jobs=jobs,
            limit_s=time_limit,
            journal=None if journal is None else str(journal),
            ray=ray,
            levels=levels,
        )
        err, out = _consoles(json_file)
        try:
            with _progress(err) as tell:
                report = run(options, tell)
        except BadJournal as error:
            raise Failed(USAGE, str(error)) from error
    broken = violations.store(violations.of(report), failures, _arguments(target, path, rev, twin, tokenizer), _say)
    if out is not None:
        with contextlib.suppress(OSError):  # a full disk or a reader that left changes no verdict
            terminal.show(out, report, broken)
    if json_file is not None:
        _write(lambda: jsonfile.write(json_file, jsonfile.data(report, broken)), json_file)
    if not report.complete:
        raise Failed(INTERRUPTED, "interrupted; the verdicts above are what was known by then")
    raise typer.Exit(exit_status(list(report.results), strict=strict))


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(help="Failure files, or entries of the corpus.")],
    target: ReplayTargetOption = None,
    path: PathOption = None,
    rev: RevOption = None,
    twin: TwinOption = None,
    mode: Annotated[Mode | None, typer.Option(help="Default: the mode of the failure.")] = None,
    engine: Annotated[str | None, typer.Option(help="Default: the engine of the failure.")] = None,
    json_file: JsonOption = None,
    tokenizer: TokenizerOption = None,
    limit: LimitOption = 20.0,
) -> None:
    """Run stored violations again: STILL FAILS, FIXED or CANNOT RUN."""
    from harness import again
    from harness import replay as stored
    from harness.reporters import jsonfile

    try:
        read = [(file, stored.read(file)) for file in files]
    except stored.BadFile as error:
        raise Failed(USAGE, str(error)) from error
    if target is None:
        others = sorted({stored_.target for _, stored_ in read} - {"", "reference"})
        if others:
            raise Failed(USAGE, f"this failure is one of {others[0]}: name the --target to run it against")
        target = "reference"
    if mode is Mode.both:
        raise Failed(USAGE, "replay runs one mode: plain, stream or incremental")
    engines = _engines(engine) if engine else None
    _, out = _consoles(json_file)
    with _target(target, path, rev, twin) as spec:
        answers = again.run(
            spec,
            read,
            mode=mode.value if mode else None,
            engine=engines[0] if engines else None,
            tokenizer=_tokenizer(tokenizer),
            limit_s=limit,
        )
    for answer in answers:
        if out is not None:
            out.print(
                f"{answer.answer.upper().replace('-', ' ')}   {answer.file}",
                style="bold",
                markup=False,
                highlight=False,
            )
            for line in answer.lines:
                out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        data = [{"file": str(a.file), "target": a.target, "answer": a.answer, "reason": a.reason} for a in answers]
        _write(lambda: jsonfile.write(json_file, data), json_file)
    said = {a.answer for a in answers}
    raise typer.Exit(VIOLATES if again.STILL_FAILS in said else CANNOT if again.CANNOT_RUN in said else CONFORMS)


@app.command()
def mutants(
    mutant: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Default: all.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List them, without running anything.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds 0 to N - 1.")] = 20,
    profile: Annotated[Profile, typer.Option(help="Draws as many schedules as a check would.")] = Profile.ci,
    jobs: JobsOption = None,
    json_file: JsonOption = None,
    docs: Annotated[Path | None, typer.Option(help="Write the table as Markdown, as in docs/mutants.md.")] = None,
) -> None:
    """Run the planted faults: each must be found by its rule, in every seed."""
    from harness.events import Progress
    from harness.mutants import load
    from harness.mutants.measure import measure
    from harness.reporters import jsonfile
    from harness.reporters import mutants as table

    wanted = _mutants(mutant or [])
    if only_list and (json_file or docs):
        raise Failed(USAGE, "--list runs nothing, so there is nothing to write")
    for file in (json_file, docs):
        _writable(file)
    err, out = _consoles(json_file)
    if only_list:
        with contextlib.suppress(OSError):
            table.listing(out, [load()[name] for name in wanted])
        raise typer.Exit(CONFORMS)
    with _progress(err) as tell:
        measured = measure(
            wanted, seeds, profile.value, jobs, lambda done, total: tell(Progress("mutants", "seeds", done, total))
        )
    if out is not None:
        with contextlib.suppress(OSError):
            table.show(out, measured)
    if json_file is not None:
        _write(lambda: jsonfile.write(json_file, table.data(measured)), json_file)
    if docs is not None:
        given = [*(mutant or []), *(() if seeds == 20 else ("--seeds", str(seeds)))]
        given += [] if profile is Profile.ci else ["--profile", profile.value]
        command = shlex.join(["rolloutcheck", "mutants", *given])
        text = table.markdown(measured, f"{command} --docs {docs}", profile.value, _versions())
        _write(lambda: _store(docs, text), docs)
    raise typer.Exit(CONFORMS if all(m.detected for m in measured) else VIOLATES)


def _mutants(wanted: list[str]) -> list[str]:
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


def _versions() -> str:
    from importlib.metadata import version

    return f"Hypothesis {version('hypothesis')}"


def _store(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _rules(wanted: list[str], levels: tuple[str, ...]) -> tuple[str, ...]:
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


def _engines(text: str, levels: tuple[str, ...] = ()) -> tuple[str, ...]:
    from harness.engines import FRONTS
    from harness.options import ROLLOUT_ENGINE
    from harness.work import ROLLOUT

    if levels == (ROLLOUT,) and text != ROLLOUT_ENGINE:
        raise Failed(USAGE, f"whole rollouts are run on the engine {ROLLOUT_ENGINE}: leave --engine out")
    names = FRONTS if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name.startswith(("http://", "https://")):
            raise Failed(USAGE, "a running server as --engine is not supported yet")
        if name not in FRONTS:
            raise Failed(USAGE, f"unknown engine {name!r}; the engines are {', '.join(FRONTS)}, all")
    if "aioresponses" in names:
        try:
            import aioresponses  # noqa: F401
        except ImportError as error:
            raise Failed(USAGE, "--engine aioresponses needs the package aioresponses") from error
    return names


def _has_ray(address: str | None) -> None:
    from importlib.util import find_spec

    if address is not None and find_spec("ray") is None:
        raise Failed(USAGE, "--ray needs the package ray")


def _tokenizer(path: Path | None) -> str | None:
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
def _target(target: str, path: Path | None, rev: str | None, twin: str | None) -> Iterator[TargetSpec]:
    """The target as data; a revision's tree lies in a folder of its own as long as the context is open."""
    if not target:
        raise Failed(USAGE, "--target is empty; give reference, slime or pkg.mod:function")
    if twin and ":" not in target:
        raise Failed(USAGE, "--twin belongs to a target pkg.mod:function")
    if target == "slime":
        from harness.targets.checkout import UsageError, checkout

        if path is None:
            raise Failed(USAGE, "--target slime needs --path DIR")
        try:
            with checkout(path, rev) as tree:
                yield TargetSpec("slime", root=str(tree.root), revision=tree.revision)
        except UsageError as error:
            raise Failed(USAGE, str(error)) from error
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
        (name,) = _mutants([target.removeprefix("mutant:")])
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


def _arguments(target: str, path: Path | None, rev: str | None, twin: str | None, tokenizer: Path | None) -> list[str]:
    """The options that name the target, as they were given."""
    given = {"--target": target, "--path": path, "--rev": rev, "--twin": twin, "--tokenizer": tokenizer}
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def _consoles(json_file: Path | None) -> tuple[Any, Any]:
    """For progress, and for the report; none for the report when JSON takes standard output."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """A reader that left early changes no verdict (rich would exit with 1, "violates")."""
            _discard(self.file)

    width = None if sys.stdout.isatty() else 120
    out = None if json_file is not None and str(json_file) == "-" else Patient(width=width)
    return Patient(stderr=True), out


@contextlib.contextmanager
def _progress(console: Any) -> Iterator[Callable[[Any], None]]:
    """Progress on standard error: a bar on a terminal, otherwise a line a phase."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    seen: set[tuple[str, str]] = set()
    if not console.is_terminal:

        def line(state: Any) -> None:
            if (state.where, state.phase) not in seen:
                seen.add((state.where, state.phase))
                with contextlib.suppress(OSError):
                    console.print(f"{state.where}: {state.phase}, {state.total}", markup=False, highlight=False)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(state: Any) -> None:
            bar.update(task, description=f"{state.where} {state.phase}", completed=state.done, total=state.total)

        yield update


def _writable(json_file: Path | None) -> None:
    """Says at once what would be found out after the work. Raises Failed."""
    if json_file is not None and str(json_file) != "-" and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise Failed(USAGE, f"cannot write {json_file}: {'it is a folder' if json_file.is_dir() else 'no such folder'}")


def _write(action: Callable[[], None], path: Path) -> None:
    try:
        action()
    except OSError as error:
        name = "standard output" if str(path) == "-" else path
        raise Failed(USAGE, f"cannot write {name}: {error.strerror}") from error


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error that is not the harness's own is one line on standard error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    status = _status(arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _discard(stream)
    raise SystemExit(status)


def _status(arguments: list[str] | None) -> int:
    from harness.isolation import HarnessFault
    from harness.targets import CannotJudge

    try:
        status: int = app(arguments, prog_name="rolloutcheck", standalone_mode=False) or CONFORMS
        return _say("interrupted", INTERRUPTED) if status == INTERRUPTED else status  # typer's own Ctrl-C
    except Failed as error:
        return _say(str(error), error.status)
    except CannotJudge as error:
        return _say(f"cannot be judged: {error}", CANNOT)
    except HarnessFault as error:
        return _say(f"a fault of rolloutcheck itself, please report it:\n{error}", FAULT)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own, whichever click it carries
        if usage is not None:
            message = str(usage()).strip().replace("\n", " ")
            return _say(message, USAGE) if message else USAGE
        import traceback

        return _say(f"a fault of rolloutcheck itself, please report it:\n{traceback.format_exc()}", FAULT)


def _say(message: str, status: int = 0) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"rolloutcheck: {message}", file=sys.stderr, flush=True)
    return status


def _discard(stream: Any) -> None:
    """From here on, and at exit, what is written there goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminated(*_: object) -> None:
    """SIGTERM ends the work like Ctrl-C, so that workers and folders of its own go with it."""
    raise KeyboardInterrupt
