"""The command line: ``rolloutcheck`` and ``python -m harness``.

Exit statuses: 0 conforms, 1 violates, 2 usage, 125 cannot be judged, 3 a fault
of the harness itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.arguments import (
    CacheOption,
    Failed,
    FailuresOption,
    JobsOption,
    JsonOption,
    Level,
    LevelOption,
    LimitOption,
    Mode,
    PathOption,
    Profile,
    ProfileOption,
    ReplayTargetOption,
    RevOption,
    SeedOption,
    SGLang,
    TargetOption,
    TokenizerOption,
    TwinOption,
    apart,
    cache_of,
    elsewhere,
    engines_of,
    mutants_of,
    needs_ray,
    not_under_load,
    recordable,
    repository_of,
    rules_of,
    stored_of,
    target_of,
    tokenizer_of,
    usage_errors,
    words,
    writable,
    write,
)
from harness.console import consoles, discard, progress, say
from harness.targets.spec import TargetSpec
from harness.verdict import CANNOT, CONFORMS, FAULT, INTERRUPTED, USAGE, VIOLATES

if TYPE_CHECKING:
    from harness.judged import Broken
    from harness.options import Options
    from harness.revisions import Revision

OUTSIDE = {errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EMFILE}
"""What the system refuses is the caller's affair, in a line."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Checks RL rollout clients against the contract in spec/README.md.",
)


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
        str, typer.Option(help="inproc, loopback, aioresponses, several with commas, all, or http://HOST:PORT.")
    ] = "inproc",
    level: LevelOption = Level.sample,
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule id; may be repeated. Default: all of the level.")
    ] = None,
    profile: ProfileOption = Profile.ci,
    seed: SeedOption = 0,
    strict: Annotated[bool, typer.Option("--strict", help="SHOULD rules and faulty engines gate too.")] = False,
    replay: Annotated[list[Path] | None, typer.Option(help="A failure file to run first; may be repeated.")] = None,
    json_file: JsonOption = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    github: Annotated[
        bool | None, typer.Option(help="Annotations and a job summary. Default: where GITHUB_ACTIONS is true.")
    ] = None,
    git_bisect: Annotated[
        bool, typer.Option("--git-bisect", help="For `git bisect run`: other statuses end it (128).")
    ] = False,
    failures: FailuresOption = Path("failures"),
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
    from harness.reporters import files, terminal, violations
    from harness.verdict import exit_status

    levels = LEVEL_SETS[level.value]
    if scope is not None and level is Level.rollout:
        raise Failed(USAGE, "a scope holds single samples; whole rollouts are drawn")
    rules = rules_of(rule or [], levels)
    engines = engines_of(engine, levels)
    first = [(failure.rule, failure.schedule) for _, failure in stored_of(replay or [], levels)]
    for file in (json_file, junit, html, journal):
        writable(file)
    apart(json_file, junit, html)
    needs_ray(ray)
    with target_of(target, path, rev, twin) as spec:
        options = Options(
            target=spec,
            engines=engines,
            modes=MODE_SETS[mode.value] if mode else None,
            rules=rules,
            profile=profile.value,
            seed=seed,
            tokenizer=tokenizer_of(tokenizer),
            run_limit_s=limit,
            scope=scope,
            jobs=jobs,
            limit_s=time_limit,
            journal=None if journal is None else str(journal),
            ray=ray,
            levels=levels,
            first=tuple(first),
        )
        not_under_load(options)
        err, out = consoles(json_file, junit, html)
        try:
            with progress(err) as tell:
                report = run(options, tell)
        except BadJournal as error:
            raise Failed(USAGE, str(error)) from error
    broken = violations.store(
        violations.of(report), violations.Shelf(failures, say), words(target, path, rev, twin, tokenizer)
    )
    if out is not None:
        with contextlib.suppress(OSError):  # a full disk or a reader that left changes no verdict
            terminal.show(out, report, broken, strict=strict)
    for file, text in files.of(report, broken, strict=strict, json=json_file, junit=junit, html=html):
        write(file, text)
    if github if github is not None else os.environ.get("GITHUB_ACTIONS") == "true":
        files.tell_github(report, broken, strict=strict)
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
    from harness.reporters import jsonfile

    read = stored_of(files)
    if engine is None:
        elsewhere(read)
    if target is None:
        others = sorted({stored_.target for _, stored_ in read} - {"", "reference"})
        if others:
            raise Failed(USAGE, f"this failure is one of {others[0]}: name the --target to run it against")
        target = "reference"
    if mode is Mode.both:
        raise Failed(USAGE, "replay runs one mode: plain, stream or incremental")
    engines = engines_of(engine) if engine else None
    _, out = consoles(json_file)
    with target_of(target, path, rev, twin) as spec:
        answers = again.run(
            spec,
            read,
            mode=mode.value if mode else None,
            engine=engines[0] if engines else None,
            tokenizer=tokenizer_of(tokenizer),
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
        write(json_file, jsonfile.text(data))
    said = {a.answer for a in answers}
    raise typer.Exit(VIOLATES if again.STILL_FAILS in said else CANNOT if again.CANNOT_RUN in said else CONFORMS)


@app.command()
def bisect(
    old: Annotated[str, typer.Option(help="The older end.")],
    rule: Annotated[str, typer.Option(help="A rule id.")],
    target: TargetOption = "slime",
    path: PathOption = None,
    new: Annotated[str, typer.Option(help="The newer end.")] = "HEAD",
    mode: Annotated[Mode, typer.Option(help="plain, stream or incremental.")] = Mode.plain,
    level: LevelOption = Level.sample,
    profile: ProfileOption = Profile.ci,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    failures: FailuresOption = Path("failures"),
    tokenizer: TokenizerOption = None,
    limit: LimitOption = 20.0,
    cache: CacheOption = None,
) -> None:
    """Find the revision that broke a rule, or the one that mended it."""
    import spec
    from harness import revisions
    from harness.bisect import bisect as run
    from harness.known import Known
    from harness.options import UNTIL_BROKEN
    from harness.reporters import history, jsonfile
    from harness.search import modes_for
    from harness.targets import CannotJudge

    if mode is Mode.both or level is Level.both:
        raise Failed(USAGE, "bisect searches one mode and one level")
    options = _history_options(level, [rule], modes_for(rule, mode.value), profile, seed, tokenizer, limit)
    options = replace(options, depth=UNTIL_BROKEN)
    judged = spec.RULES[options.rules[0]].modes
    if mode.value not in judged:
        raise Failed(USAGE, f"rule {rule} is judged in {' and '.join(judged)}: give --mode")
    where = repository_of(target, path)
    writable(json_file)
    with usage_errors():
        line = revisions.between(where, revisions.find(where, old), revisions.find(where, new))
        _say_what_is_left_out(where)
    ends = (line[0].commit, line[-1].commit)
    known = Known(cache_of(cache), options, "-".join(("bisect", rule, mode.value, *(end[:9] for end in ends))))
    err, out = consoles(json_file)
    try:
        with progress(err) as tell:
            found = run(where, line, (options.rules[0], mode.value), options, known, tell)
    except CannotJudge:  # there is nothing to go on from
        known.forget()
        raise
    keep = _Keep(options, failures, path, tokenizer)
    found = replace(found, broken=keep(found.row, found.bad, found.broken))
    if out is not None:
        with contextlib.suppress(OSError):
            history.show_bisection(out, found)
    if json_file is not None:
        write(json_file, jsonfile.text(history.bisection(found)))
    if not found.complete:
        raise Failed(INTERRUPTED, "interrupted; the same command goes on from here")
    known.forget()
    if found.found is None:
        raise Failed(CANNOT, "cannot be judged: no revision in between tells which of them it is")
    raise typer.Exit(CONFORMS)


@app.command()
def scan(
    target: TargetOption = "slime",
    path: PathOption = None,
    rev: Annotated[str, typer.Option(help="The newest revision.")] = "HEAD",
    since: Annotated[str | None, typer.Option(help="The oldest: a revision, or a day such as 2026-04-01.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule id; may be repeated. Default: all of the level.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="plain, stream, incremental, or the first two.")] = Mode.both,
    level: LevelOption = Level.sample,
    profile: ProfileOption = Profile.quick,
    seed: SeedOption = 0,
    jobs: JobsOption = None,
    json_file: JsonOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as one HTML page.")] = None,
    failures: FailuresOption = Path("failures"),
    tokenizer: TokenizerOption = None,
    limit: LimitOption = 20.0,
    cache: CacheOption = None,
) -> None:
    """Judge every revision of a history: where each rule held, and where it was broken."""
    from harness import revisions
    from harness.known import Known
    from harness.options import MODE_SETS
    from harness.reporters import history, jsonfile
    from harness.scan import scan as run
    from harness.scan import with_broken

    options = _history_options(level, rule or [], MODE_SETS[mode.value], profile, seed, tokenizer, limit)
    options = replace(options, lenient=True, jobs=jobs)
    where = repository_of(target, path)
    for file in (json_file, html):
        writable(file)
    apart(json_file, html)
    with usage_errors():
        line = revisions.touching(where, revisions.find(where, rev), since)
        _say_what_is_left_out(where)
    if not line:
        raise Failed(USAGE, f"no revision{f' since {since}' if since else ''} touches {target}")
    err, out = consoles(json_file, html)
    with progress(err) as tell:
        found = run(where, line, options, Known(cache_of(cache), options, "scan"), tell)
    found = with_broken(found, _Keep(options, failures, path, tokenizer))
    if out is not None:
        with contextlib.suppress(OSError):
            history.show_scan(out, found)
    if json_file is not None:
        write(json_file, jsonfile.text(history.scan(found)))
    if html is not None:
        from harness.reporters import html as page

        write(html, page.scan_page(found))
    if not found.complete:
        raise Failed(INTERRUPTED, "interrupted; the same command goes on from here")
    if all(one.verdict not in ("valid", "invalid") for ranges in found.rows.values() for one in ranges):
        raise Failed(CANNOT, "cannot be judged: no revision could be")
    raise typer.Exit(CONFORMS)


def _history_options(
    level: Level,
    rule: list[str],
    modes: tuple[str, ...],
    profile: Profile,
    seed: int,
    tokenizer: Path | None,
    limit: float,
) -> Options:
    from harness.options import LEVEL_SETS, Options

    levels = LEVEL_SETS[level.value]
    return Options(
        target=TargetSpec("slime"),
        modes=modes,
        rules=rules_of(rule, levels),
        profile=profile.value,
        seed=seed,
        tokenizer=tokenizer_of(tokenizer),
        run_limit_s=limit,
        levels=levels,
    )


class _Keep:
    """Stores what breaks a rule at a revision."""

    def __init__(self, options: Options, failures: Path, path: Path | None, tokenizer: Path | None) -> None:
        from harness.reporters.violations import Shelf

        self.options, self.path, self.tokenizer = options, path, tokenizer
        self.shelf = Shelf(failures, say)

    def __call__(self, row: tuple[str, str], revision: Revision, broken: Broken) -> Broken:
        from harness.replay import Failure

        summary = "\n".join(broken.lines)
        failure = Failure(*row, self.options.engines[0], broken.work, "slime", revision.short, summary)
        named = words("slime", self.path, revision.short, None, self.tokenizer)
        file, replay = self.shelf.put(failure, self.options.seed, named)
        return replace(broken, file=file, replay=replay)


def _say_what_is_left_out(where: Path) -> None:
    """What a reader of the result may not expect."""
    from harness import revisions

    if revisions.is_shallow(where):
        say("this clone is shallow: revisions before its beginning are not looked at")
    if revisions.is_dirty(where):
        say("the working tree has changes that are not committed; they are not looked at")


@app.command()
def promote(
    file: Annotated[Path, typer.Argument(help="A failure file.")],
    name: Annotated[str, typer.Option(help="The entry's name, such as slime-2260-minimal.")],
    fault: Annotated[str, typer.Option(help="What goes wrong, in a sentence.")],
    report: Annotated[
        list[str], typer.Option(help="Where it was reported, such as THUDM/slime#2260; may be repeated.")
    ],
    corpus: Annotated[Path, typer.Option(help="The folder of the corpus.")] = Path("tests/regressions/corpus"),
) -> None:
    """Make a failure file an entry of the regression corpus, which every check runs first."""
    from harness import again
    from harness.corpus import BadEntry, add

    read = stored_of([file])
    ((_, failure),) = read
    (answer,) = again.run(TargetSpec("reference"), read, mode=None, engine=None, tokenizer=None, limit_s=20.0)
    if answer.answer != again.FIXED or answer.reason:
        raise Failed(USAGE, f"{file} is no test of {failure.rule}: on the reference, {answer.reason}")
    try:
        path = add(corpus, name, fault, report, failure)
    except BadEntry as error:
        raise Failed(USAGE, str(error)) from error
    typer.echo(f"{path}: {failure.rule} on [{failure.schedule}]")


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

    wanted = mutants_of(mutant or [])
    if only_list and (json_file or docs):
        raise Failed(USAGE, "--list runs nothing, so there is nothing to write")
    for file in (json_file, docs):
        writable(file)
    err, out = consoles(json_file)
    if only_list:
        with contextlib.suppress(OSError):
            table.listing(out, [load()[name] for name in wanted])
        raise typer.Exit(CONFORMS)
    with progress(err) as tell:
        measured = measure(
            wanted, seeds, profile.value, jobs, lambda done, total: tell(Progress("mutants", "seeds", done, total))
        )
    if out is not None:
        with contextlib.suppress(OSError):
            table.show(out, measured)
    if json_file is not None:
        write(json_file, jsonfile.text(table.data(measured)))
    if docs is not None:
        given = [*(mutant or []), *(() if seeds == 20 else ("--seeds", str(seeds)))]
        given += [] if profile is Profile.ci else ["--profile", profile.value]
        command = shlex.join(["rolloutcheck", "mutants", *given])
        text = table.markdown(measured, f"{command} --docs {docs}", profile.value, _versions())
        write(docs, text)
    raise typer.Exit(CONFORMS if all(m.detected for m in measured) else VIOLATES)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 30000,
    sglang: Annotated[SGLang, typer.Option(help="The version whose shapes are answered.")] = SGLang.new,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Streams tell what is new, not all so far.")
    ] = False,
    scenario: Annotated[
        Path | None, typer.Option(help="A failure file, a schedule, or a list of them: what their prompts meet.")
    ] = None,
    faults: Annotated[float, typer.Option(min=0, max=1, help="The share of requests that are interrupted.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same answers and interruptions.")] = 0,
    rate: Annotated[float, typer.Option(min=0.001, max=1e9, help="Tokens a second, of each request.")] = 50.0,
    length: Annotated[int, typer.Option(min=1, help="How long answers are on average, in tokens.")] = 256,
    context: Annotated[int, typer.Option(min=16, max=10_000_000, help="The context limit, in tokens.")] = 4096,
    pool: Annotated[int | None, typer.Option(min=16, help="Tokens the KV cache holds. Default: any number.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run at once; others wait.")] = 4096,
    max_queued: Annotated[int | None, typer.Option(min=1, help="Requests that may wait. Default: any number.")] = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Be an SGLang server that says what it is told to, for a client to talk to."""
    from harness import serve as server
    from harness.engines.live import Options
    from harness.replay import BadFile

    try:
        options = Options(
            sglang=sglang.value,
            context=context,
            incremental=incremental,
            rate=rate,
            length=length,
            max_running=max_running,
            max_queued=max_queued,
            pool=pool,
            seed=seed,
            faults=faults,
            schedules=() if scenario is None else server.schedules_in(scenario),
        )
        loopback = server.is_loopback(host)

        def listens(where: str) -> None:
            typer.echo(where)
            if not loopback:
                say(f"{host} can be reached from other machines, and this server lets anyone in")

        server.serve(options, host, port, tokenizer_of(tokenizer), listens)
    except (BadFile, server.CannotListen) as error:
        raise Failed(USAGE, str(error)) from error


@app.command()
def record(
    engine: Annotated[str, typer.Option(help="A running SGLang server, such as http://127.0.0.1:30000.")],
    out: Annotated[Path | None, typer.Option(help="Default: sglang-VERSION.jsonl; - is standard output.")] = None,
    disruptive: Annotated[
        bool, typer.Option("--disruptive", help="Also pause it, flush it, abort all and rename its weights.")
    ] = False,
) -> None:
    """Ask a running server how it behaves, keep its answers, and compare the mock engine with them."""
    from harness import conformance
    from harness import record as recordings
    from harness.reporters import conformance as table
    from harness.server import NoServer, describe

    if not engine.startswith(("http://", "https://")):
        raise Failed(USAGE, f"--engine {engine} is no address such as http://127.0.0.1:30000")
    writable(out)
    err, console = consoles(out)
    url = engine.rstrip("/")
    try:
        where = out or Path(f"sglang-{recordings.version_of(describe(url).version)}.jsonl")
        recordable(where)
        with progress(err) as tell:
            matrix = conformance.matrix(url, disruptive=disruptive, tell=tell)
    except NoServer as error:
        raise Failed(CANNOT, str(error)) from error
    if str(where) == "-":
        write(where, recordings.text(matrix.real))
    else:
        try:
            recordings.write(where, matrix.real)
        except OSError as error:
            raise Failed(USAGE, f"cannot write {where}: {error.strerror}") from error
    if console is not None:
        with contextlib.suppress(OSError):
            table.show(console, matrix, where)
    raise typer.Exit(CONFORMS)


def _versions() -> str:
    from importlib.metadata import version

    return f"Hypothesis {version('hypothesis')}"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error that is not the harness's own is one line on standard error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        with contextlib.suppress(AttributeError):  # somebody's own stream
            getattr(sys, name).reconfigure(errors="backslashreplace")  # a terminal that knows few letters
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    status = _status(arguments)
    if "--git-bisect" in (sys.argv[1:] if arguments is None else arguments) and status not in (
        CONFORMS,
        VIOLATES,
        CANNOT,
    ):
        status = 128  # `git bisect run` takes everything up to 127 for a verdict
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)
    raise SystemExit(status)


def _status(arguments: list[str] | None) -> int:
    from harness.isolation import HarnessFault
    from harness.targets import CannotJudge

    try:
        status: int = app(arguments, prog_name="rolloutcheck", standalone_mode=False) or CONFORMS
        return say("interrupted", INTERRUPTED) if status == INTERRUPTED else status  # typer's own Ctrl-C
    except Failed as error:
        return say(str(error), error.status)
    except CannotJudge as error:
        return say(f"cannot be judged: {error}", CANNOT)
    except HarnessFault as error:
        return say(f"a fault of rolloutcheck itself, please report it:\n{error}", FAULT)
    except (KeyboardInterrupt, typer.Abort):
        return say("interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OUTSIDE:
            return say(f"{error.strerror}: {error.filename}", USAGE)
        usage = getattr(error, "format_message", None)  # typer's own, whichever click it carries
        if usage is not None:
            message = str(usage()).strip().replace("\n", " ")
            return say(message, USAGE) if message else USAGE
        import traceback

        return say(f"a fault of rolloutcheck itself, please report it:\n{traceback.format_exc()}", FAULT)


def _terminated(*_: object) -> None:
    """SIGTERM ends the work like Ctrl-C, so that workers and folders of its own go with it."""
    raise KeyboardInterrupt
