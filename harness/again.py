"""Runs stored violations against a target once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import tokenizer as tokenizers
from harness.adapt import LOOPS_CANNOT, adapt
from harness.checkers import Case, Finding, Judgement, RolloutCase, checker, halt, rollout_checker
from harness.checkers.determinism import COMPARING, incomparable
from harness.checkers.trace import Trace
from harness.engines import front, is_url
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM, History, Raised
from harness.isolation import Worker
from harness.options import ROLLOUT_ENGINE
from harness.replay import Failure
from harness.reporters import failure
from harness.rollouts import Broke, RolloutHistory
from harness.scenario import Scenario
from harness.search import RETRIES
from harness.server import NoServer, fitting
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec
from harness.work import ROLLOUT, Run, Work, level

STILL_FAILS, FIXED, CANNOT_RUN = "still-fails", "fixed", "cannot-run"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one stored violation; ``lines`` is the screen to show with it.

    ``stopped``: it cannot be run because the target hangs, leaves its process or is refused by the harness: in a
    check that leaves the rule unknown, where other reasons do not.
    """

    file: Path
    target: str
    answer: str
    reason: str
    lines: tuple[str, ...] = ()
    stopped: bool = False


def run(
    spec: TargetSpec,
    files: Sequence[tuple[Path, Failure]],
    *,
    mode: str | None,
    engine: str | None,
    tokenizer: str | None,
    limit_s: float,
    asked: Callable[[tuple[str, ...] | None], None] = lambda modules: None,
) -> list[Answer]:
    """An answer a file, in order. Raises CannotJudge when the target does not load.

    ``asked`` is told the modules that the target asked for (`harness.isolation.Worker.modules`).
    """
    answers: dict[int, Answer] = {}
    places = [_place(engine, stored) for _, stored in files]
    for place in dict.fromkeys(places):
        on, name = place
        with Worker(spec, name, tokenizer, run_limit_s=limit_s, level=on) as worker:
            for index, (file, stored) in enumerate(files):
                if places[index] == place:
                    answers[index] = _one(worker, name, file, stored, mode or stored.mode, tokenizer)
            asked(worker.modules())
    return [answers[i] for i in range(len(files))]


def _place(engine: str | None, stored: Failure) -> tuple[str, str]:
    """The level and the engine to run on: whole rollouts have one mock."""
    on, wanted = level(stored.schedule), engine or stored.engine
    return on, ROLLOUT_ENGINE if on == ROLLOUT and not is_url(wanted) else wanted


def _one(worker: Worker, engine: str, file: Path, stored: Failure, mode: str, tokenizer: str | None = None) -> Answer:
    target = worker.ready.name

    def cannot(reason: str, *, stopped: bool = False) -> Answer:
        return Answer(file, target, CANNOT_RUN, reason, (reason,), stopped)

    unable = LOOPS_CANNOT if is_url(engine) and isinstance(stored.schedule, Scenario) else front(engine).cannot
    kinds = unable & set(stored.schedule.kinds)
    if kinds:
        try:
            made = _to_fit(stored, engine, tokenizer)
        except CannotJudge as error:
            return cannot(str(error), stopped=True)
        if made is None or unable & set(made.kinds):
            return cannot(f"engine {engine} cannot carry {', '.join(sorted(kinds))}")
        stored = replace(stored, schedule=made)
    modes = [m for m in MODES if (STREAM if m == INCREMENTAL else m) in worker.ready.modes]
    if mode not in modes:
        return cannot(worker.ready.absent.get(PLAIN if mode == PLAIN else STREAM, f"{target} has no {mode} mode"))
    try:
        for _ in range(RETRIES + 1 if is_url(engine) else 1):  # a server's timing is its own
            run = worker.run(stored.schedule, mode)
            case = _case(worker, stored, modes[0], run)
            finding, unlike = _judge(stored.rule, case), None
            if isinstance(finding, Finding) and is_url(engine) and stored.rule in COMPARING and isinstance(case, Case):
                unlike = incomparable(case.trace, case.baseline, case.compared)
            if isinstance(finding, Finding) and unlike is None:
                break
    except CannotJudge as error:
        return cannot(str(error), stopped=not error.not_applicable)
    if unlike is not None:
        return cannot(unlike)
    screen = failure.lines(
        stored.rule,
        target,
        mode,
        engine,
        finding if isinstance(finding, Finding) else None,
        run,
        faulty_engine=stored.schedule.faulty_engine,
    )
    if isinstance(finding, Finding):
        return Answer(file, target, STILL_FAILS, finding.message, tuple(screen))
    stopped = halt(run)
    if stopped is not None:
        return cannot(f"call {stopped.attempt + 1}: {stopped.kind}: {stopped.message}", stopped=True)
    if kinds:
        return cannot("it does not fail as a server can take it, with other lengths and aborts, which shows nothing")
    if is_url(stored.engine) and not is_url(engine):
        return cannot(
            "it was found on a server: that it does not fail on the mock, which stops elsewhere, shows nothing"
        )
    if finding is None:  # as where the right client sends no request, and CONTEXT has none to judge
        raised = _raised(run)
        if raised is not None:
            return cannot(f"{stored.rule} has nothing to judge: the target raises {raised.error}: {raised.message}")
        reason = f"{stored.rule} is not broken, and is no longer put to the test"
        if isinstance(run, RolloutHistory):
            return cannot(f"{stored.rule} has nothing to judge: the rollouts do not put it to the test")
        return Answer(file, target, FIXED, reason, (*screen, f"  {reason}"))
    return Answer(file, target, FIXED, "", tuple(screen))


def _to_fit(stored: Failure, engine: str, tokenizer: str | None) -> Work | None:
    """What was found on the mock as a server can take it. Raises CannotJudge."""
    if not is_url(engine) or is_url(stored.engine):
        return None
    words = tokenizers.load(tokenizer)
    try:
        return adapt(stored.schedule, fitting(engine, words), words)
    except NoServer as error:
        raise CannotJudge(str(error)) from error


def _judge(rule: str, case: Case | RolloutCase) -> Judgement:
    """What the stored rule says."""
    return rollout_checker(rule)(case) if isinstance(case, RolloutCase) else checker(rule)(case)


def _case(worker: Worker, stored: Failure, first: str, run: Run) -> Case | RolloutCase:
    """The run, with those that it is to be compared with. Raises CannotJudge."""
    if isinstance(run, RolloutHistory):
        return RolloutCase(run.mode, run)
    others = {m: worker.run(stored.schedule, m) for m in (first,) if m != run.mode}
    histories = {m: other for m, other in others.items() if isinstance(other, History)} | {run.mode: run}
    baseline = worker.run(stored.schedule.uninterrupted(), run.mode)
    assert isinstance(baseline, History)
    return Case(run.mode, histories, baseline)


def _raised(run: Run) -> Raised | Broke | None:
    """What the client raised although there was something to do."""
    if isinstance(run, RolloutHistory):
        return next((event for event in run.events if isinstance(event, Broke)), None)
    outcomes = ((turn.outcome, turn.live) for turn in Trace(run).turns)
    return next((outcome for outcome, live in outcomes if isinstance(outcome, Raised) and live), None)
