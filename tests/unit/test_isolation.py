"""The worker process: what its target does is survived, bounded in time, and ends with it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from harness import isolation
from harness.history import PLAIN, STREAM, Halted, Requested
from harness.isolation import HarnessFault, Worker
from harness.schedule import Attempt, Schedule
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec

PROJECT = Path(__file__).resolve().parents[2]
SCHEDULE = Schedule(budget=2, attempts=(Attempt("abort", after=1),))
DROPPED = Schedule(budget=2, prompt="drop")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetSpec:
    """A function target whose module is written by the test; it is the reference where it does nothing else."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    return TargetSpec("function", root=str(tmp_path), function="client:f")


def write(spec: TargetSpec, body: str, head: str = "") -> None:
    text = f"""
        import os, signal, sys, time
        from reference_impl.generate import generate
        {head}

        async def f(args, sample, params):
            {body}
            return await generate(args, sample, params)
        """
    Path(spec.root, "client.py").write_text(dedent(text))


def test_a_worker_serves_many_runs_and_then_ends() -> None:
    with Worker(TargetSpec("reference")) as worker:
        process = pid(worker)
        assert (worker.ready.name, worker.ready.modes, worker.ready.absent) == ("reference", (PLAIN, STREAM), {})
        for mode in (PLAIN, STREAM, PLAIN):
            history = worker.run(SCHEDULE, mode)
            assert (history.schedule, history.mode) == (SCHEDULE, mode)
            assert [e.params["max_new_tokens"] for e in history.events if isinstance(e, Requested)] == [2, 1]
        assert pid(worker) == process
    assert not alive(process)
    worker.close()  # may be called again


def test_a_twin_is_another_process_for_the_same_target() -> None:
    with Worker(TargetSpec("reference"), run_limit_s=7.0) as worker:
        twin = worker.twin()
        assert (twin.spec, twin.front, twin.run_limit_s) == (worker.spec, worker.front, 7.0)
        twin.launch()
        try:
            assert pid(twin) != pid(worker)
            assert twin.wait() == worker.ready
            assert twin.run(SCHEDULE, PLAIN) == worker.run(SCHEDULE, PLAIN)
        finally:
            twin.close()


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        ("time.sleep(1e6)", "hang", "no end within 1 s"),
        (
            "print('last words', file=sys.stderr); os._exit(3)",
            "exit",
            "the target left its process (last output: last w",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit", "the target left its process"),
    ],
    ids=["hang", "exit", "kill"],
)
def test_a_lost_worker_is_noted_and_started_again(function: TargetSpec, act: str, kind: str, words: str) -> None:
    write(function, f"if sample.prompt == 'drop': {act}")
    with Worker(function, run_limit_s=1.0) as worker:
        first = pid(worker)
        history = worker.run(DROPPED, PLAIN)
        (halted,) = history.events
        assert isinstance(halted, Halted)
        assert halted.kind == kind and halted.message.startswith(words)
        assert not alive(first)
        worker.run_limit_s = 30.0
        assert any(isinstance(e, Requested) for e in worker.run(SCHEDULE, PLAIN).events)
        assert pid(worker) != first


def test_restarts_are_bounded(function: TargetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MAX_RESTARTS", 1)
    write(function, "if sample.prompt == 'drop': os._exit(3)")
    with Worker(function) as worker:
        for _ in range(2):
            worker.run(DROPPED, PLAIN)
        with pytest.raises(CannotJudge, match=r"client:f .* 2 times"):
            worker.run(SCHEDULE, PLAIN)


def test_it_tells_modules_behind_what_was_sent_ahead() -> None:
    with Worker(TargetSpec("reference")) as worker:
        worker.ahead(SCHEDULE, PLAIN)
        worker.ahead(DROPPED, PLAIN)
        assert worker.modules() == ()
        assert worker.run(SCHEDULE, PLAIN).schedule == SCHEDULE  # type: ignore[union-attr]


def test_a_worker_that_was_started_again_does_not_know_all_modules(function: TargetSpec) -> None:
    write(function, "if sample.prompt == 'drop': os._exit(3)")
    with Worker(function) as worker:
        worker.run(DROPPED, PLAIN)
        assert worker.modules() is None
        worker.run(SCHEDULE, PLAIN)
        assert worker.modules() is None


def test_what_a_target_leaves_in_the_temporary_folder_goes_with_it(
    function: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    write(function, "import tempfile; open(tempfile.mkdtemp() + '/x', 'w').close()")
    with Worker(function) as worker:
        worker.run(SCHEDULE, PLAIN)
        assert list((tmp_path / "temporary").rglob("x"))
    assert not list((tmp_path / "temporary").iterdir())


def test_a_target_that_hangs_at_import_is_given_up(function: TargetSpec) -> None:
    write(function, "", head="time.sleep(1e6)")
    worker = Worker(function, run_limit_s=0.4)
    began = time.monotonic()
    with pytest.raises(CannotJudge, match="does not end within 1 s"):
        worker.start()
    assert time.monotonic() - began < 20
    assert worker._process is None


def test_a_target_that_ends_at_import_is_given_up(function: TargetSpec) -> None:
    write(function, "", head="print('so long', file=sys.stderr); sys.stderr.flush(); os._exit(0)")
    with pytest.raises(CannotJudge, match=r"ends its process.*so long"):
        Worker(function).start()


def test_a_target_that_does_not_import_has_its_process_ended(function: TargetSpec) -> None:
    worker = Worker(function)
    with pytest.raises(CannotJudge, match="importing client failed: ModuleNotFoundError"):
        worker.start()
    assert worker._process is None


def test_what_a_target_prints_is_no_answer(function: TargetSpec) -> None:
    """Not on its standard output, and not in great amounts."""
    write(function, """print('{"history": {}}', flush=True); print('x' * 10**6); os.write(1, b'y' * 10**5)""")
    with Worker(function) as worker:
        assert any(isinstance(e, Requested) for e in worker.run(SCHEDULE, PLAIN).events)


def test_a_package_of_the_target_is_not_taken_for_ours(function: TargetSpec) -> None:
    write(function, "")
    Path(function.root, "harness.py").write_text("raise RuntimeError('not this one')")
    with Worker(function) as worker:
        assert worker.ready.modes == (PLAIN,)


def test_a_fault_of_the_harness_is_no_verdict() -> None:
    with pytest.raises(HarnessFault, match="no-such-front"):
        Worker(TargetSpec("reference"), "no-such-front").start()


@pytest.mark.parametrize("act", ["", "if sample.prompt == 'drop': raise KeyboardInterrupt"], ids=["idle", "in a run"])
def test_what_the_target_starts_ends_with_it(function: TargetSpec, act: str, tmp_path: Path) -> None:
    child = "child = os.fork()\nif child == 0: time.sleep(1e6)\nopen({!r}, 'w').write(str(child))"
    head = f"exec({child.format(str(tmp_path / 'pid'))!r})"
    write(function, act or "pass", head=head)
    with Worker(
        function, run_limit_s=1.0
    ) as worker:  # the child keeps the pipe open, so that the exit looks like a hang
        if act:
            assert isinstance(worker.run(DROPPED, PLAIN).events[-1], Halted)
        child_pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while alive(child_pid) and _state(child_pid) != "Z" and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child_pid) or _state(child_pid) == "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_last_words_are_those_of_the_process_that_ended(function: TargetSpec) -> None:
    act = "if sample.prompt == 'drop': os._exit(3)\n            elif sample.prompt == 'talk': "
    write(function, act + "print('old news', file=sys.stderr); os._exit(3)")
    with Worker(function) as worker:
        worker.run(Schedule(budget=2, prompt="talk"), PLAIN)
        (halted,) = worker.run(DROPPED, PLAIN).events
    assert isinstance(halted, Halted)
    assert "old news" not in halted.message


def test_runs_that_were_sent_ahead_keep_their_places() -> None:
    schedules = [Schedule(budget=n, attempts=(Attempt("abort", after=1),)) for n in range(2, 8)]
    with Worker(TargetSpec("reference")) as worker:
        alone = [worker.run(s, mode) for s in schedules for mode in (PLAIN, STREAM)]
        for s in schedules:
            for mode in (PLAIN, STREAM):
                worker.ahead(s, mode)
        last = worker.run(schedules[-1], STREAM)
        between = worker.run(Schedule(budget=9), PLAIN)
        assert [worker.run(s, mode) for s in schedules for mode in (PLAIN, STREAM)] == alone
    assert last == alone[-1] and between.schedule.budget == 9


def test_a_hang_takes_nothing_along_but_itself(function: TargetSpec) -> None:
    write(function, "if sample.prompt == 'drop': time.sleep(1e6)")
    good, bad = Schedule(prompt="a", budget=2), Schedule(prompt="drop", budget=2)
    with Worker(function, run_limit_s=1) as worker:
        for schedule in (good, bad, good, Schedule(budget=3)):
            worker.ahead(schedule, PLAIN)
        assert not isinstance(worker.run(good, PLAIN).events[-1], Halted)
        halted = worker.run(bad, PLAIN).events[-1]
        assert isinstance(halted, Halted) and halted.kind == "hang"
        assert not isinstance(worker.run(Schedule(budget=3), PLAIN).events[-1], Halted)


def test_a_schedule_that_cannot_be_judged_is_so_wherever_it_stands(function: TargetSpec) -> None:
    """Asked for at once, behind others, and while others are still to come."""
    write(function, "if sample.prompt == 'drop': return None")
    good = [Schedule(prompt="a", budget=n) for n in (2, 3)]
    with Worker(function) as worker:
        for schedule in (good[0], DROPPED, good[1]):
            worker.ahead(schedule, PLAIN)
        assert worker.run(good[1], PLAIN).schedule == good[1]
        for _ in range(2):  # the first answer was kept, the second is a new one
            with pytest.raises(CannotJudge, match="returned NoneType, not a sample"):
                worker.run(DROPPED, PLAIN)
        worker.ahead(DROPPED, PLAIN)
        assert worker.run(Schedule(budget=4), PLAIN).schedule.budget == 4
        with pytest.raises(CannotJudge, match="returned NoneType"):
            worker.run(DROPPED, PLAIN)


def test_a_hang_of_what_was_sent_ahead_is_met_on_the_way(function: TargetSpec) -> None:
    write(function, "if sample.prompt == 'drop': os._exit(3)")
    with Worker(function) as worker:
        first = pid(worker)
        worker.ahead(DROPPED, PLAIN)
        assert not isinstance(worker.run(SCHEDULE, PLAIN).events[-1], Halted)
        assert pid(worker) != first
        assert isinstance(worker.run(DROPPED, PLAIN).events[-1], Halted)


def test_an_answer_that_is_none_is_a_fault_of_the_harness() -> None:
    with Worker(TargetSpec("reference")) as worker:
        worker._lines.put(b'{"neither": 1}\n')
        with pytest.raises(HarnessFault, match=r"unexpected answer: \{'neither': 1\}"):
            worker.run(SCHEDULE, PLAIN)
        assert worker._process is None


def test_an_answer_that_is_cut_off_is_the_end_of_its_process() -> None:
    with Worker(TargetSpec("reference")) as worker:
        worker._lines.put(b'{"history": {"sched')
        (halted,) = worker.run(SCHEDULE, PLAIN).events
        assert isinstance(halted, Halted) and halted.kind == "exit"


def test_last_words_are_waited_for(function: TargetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be there long before the thread that drains standard error comes to its turn."""
    real = Worker._drain

    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        real(*arguments)

    monkeypatch.setattr(Worker, "_drain", late)
    monkeypatch.setattr(isolation, "LAST_WORDS_S", 30.0)
    write(function, "if sample.prompt == 'drop': print('so long', file=sys.stderr, flush=True); os._exit(3)")
    with Worker(function) as worker:
        (halted,) = worker.run(DROPPED, PLAIN).events
    assert isinstance(halted, Halted) and halted.message.endswith("(last output: so long)")
