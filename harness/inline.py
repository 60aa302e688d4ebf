"""Runs schedules in this process: for clients of our own, which need no process to contain them."""

from __future__ import annotations

from typing import Any

from harness.isolation import Ready
from harness.runner import Runner
from harness.stage import Stage
from harness.targets.spec import TargetSpec, load, load_loop
from harness.work import ROLLOUT, SAMPLE, Run, Work

TRUSTED = ("reference", "mutant")


class Inline:
    """As `harness.isolation.Worker`, without the process and the JSON between."""

    def __init__(
        self, spec: TargetSpec, front: str = "inproc", tokenizer: str | None = None, *, level: str = SAMPLE
    ) -> None:
        from harness import tokenizer as tokenizers

        vocabulary = tokenizers.load(tokenizer)
        self._runner: Any = (
            Stage(load_loop(spec), vocabulary, front)
            if level == ROLLOUT
            else Runner(load(spec, lambda target: None), front, vocabulary)
        )
        target = self._runner.target
        absent = {mode: str(error) for mode, error in target.absent.items()}
        self.ready = Ready(target.name, target.modes, absent, ())

    def ahead(self, wanted: Work, mode: str) -> None:
        """Nothing to do: there is nobody who could begin."""

    def run(self, wanted: Work, mode: str) -> Run:
        history: Run = self._runner.run(wanted, mode)
        return history

    def close(self) -> None:
        self._runner.close()
