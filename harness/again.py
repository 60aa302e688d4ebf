"""Runs stored violations against a target once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.checkers import Case, Finding, checker, halt
from harness.checkers.trace import Trace
from harness.engines import front
from harness.history import INCREMENTAL, MODES, PLAIN, STREAM, History, Raised
from harness.isolation import Worker
from harness.replay import Failure
from harness.reporters import failure
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec

STILL_FAILS, FIXED, CANNOT_RUN = "still-fails", "fixed", "cannot-run"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one stored violation; ``lines`` is the screen to show with it."""

    file: Path
    target: str
    answer: str
    reason: str
    lines: tuple[str, ...] = ()


def run(
    spec: TargetSpec,
    files: Sequence[tuple[Path, Failure]],
    *,
    mode: str | None,
    engine: str | None,
    tokenizer: str | None,
    limit_s: float,
) -> list[Answer]:
    """An answer a file, in order. Raises CannotJudge when the target does not load."""
    answers: dict[int, Answer] = {}
    fronts = [engine or stored.engine for _, stored in files]
    for name in dict.fromkeys(fronts):
        with Worker(spec, name, tokenizer, run_limit_s=limit_s) as worker:
            for index, (file, stored) in enumerate(files):
                if fronts[index] == name:
                    answers[index] = _one(worker, name, file, stored, mode or stored.mode)
    return [answers[i] for i in range(len(files))]


def _one(worker: Worker, engine: str, file: Path, stored: Failure, mode: str) -> Answer:
    target = worker.ready.name

    def cannot(reason: str) -> Answer:
        return Answer(file, target, CANNOT_RUN, reason, (reason,))

    kinds = front(engine).cannot & set(stored.schedule.kinds)
    if kinds:
        return cannot(f"engine {engine} cannot carry {', '.join(sorted(kinds))}")
    modes = [m for m in MODES if (STREAM if m == INCREMENTAL else m) in worker.ready.modes]
    if mode not in modes:
        return cannot(worker.ready.absent.get(PLAIN if mode == PLAIN else STREAM, f"{target} has no {mode} mode"))
    try:
        histories = {m: worker.run(stored.schedule, m) for m in dict.fromkeys((modes[0], mode))}
        baseline = worker.run(stored.schedule.uninterrupted(), mode)
    except CannotJudge as error:
        return cannot(str(error))
    finding = checker(stored.rule)(Case(mode, histories, baseline))
    if isinstance(finding, Finding):
        return Answer(
            file, target, STILL_FAILS, finding.message, _screen(stored, target, mode, engine, finding, histories)
        )
    stopped = halt(histories[mode])
    if stopped is not None:
        return cannot(f"call {stopped.attempt + 1}: {stopped.kind}: {stopped.message}")
    if finding is None:  # as where the right client sends no request, and CONTEXT has none to judge
        turns = Trace(histories[mode]).turns
        raised = next((t.outcome for t in turns if isinstance(t.outcome, Raised) and t.live), None)
        if raised is not None:
            return cannot(f"{stored.rule} has nothing to judge: the target raises {raised.error}: {raised.message}")
        reason = f"{stored.rule} is not broken, and is no longer put to the test"
        return Answer(file, target, FIXED, reason, (f"{reason}   {target}   {mode}   {engine}",))
    return Answer(file, target, FIXED, "", (f"{stored.rule} holds   {target}   {mode}   {engine}",))


def _screen(
    stored: Failure, target: str, mode: str, engine: str, finding: Finding, histories: dict[str, History]
) -> tuple[str, ...]:
    faulty = stored.schedule.faulty_engine
    return tuple(failure.lines(stored.rule, target, mode, engine, finding, histories[mode], faulty_engine=faulty))
