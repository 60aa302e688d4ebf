"""Runs schedules in this process: for clients of our own, which need no process to contain them."""

from __future__ import annotations

from harness.history import History
from harness.isolation import Ready
from harness.runner import Runner
from harness.schedule import Schedule
from harness.targets.spec import TargetSpec, load

TRUSTED = ("reference", "mutant")


class Inline:
    """As `harness.isolation.Worker`, without the process and the JSON between."""

    def __init__(self, spec: TargetSpec, front: str = "inproc", tokenizer: str | None = None) -> None:
        from harness import tokenizer as tokenizers

        target = load(spec, lambda target: None)
        self._runner = Runner(target, front, tokenizers.load(tokenizer))
        absent = {mode: str(error) for mode, error in target.absent.items()}
        self.ready = Ready(target.name, target.modes, absent, ())

    def ahead(self, wanted: Schedule, mode: str) -> None:
        """Nothing to do: there is nobody who could begin."""

    def run(self, wanted: Schedule, mode: str) -> History:
        return self._runner.run(wanted, mode)

    def close(self) -> None:
        self._runner.close()
