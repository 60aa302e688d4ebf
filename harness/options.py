"""What a check is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from harness.history import INCREMENTAL, PLAIN, STREAM
from harness.isolation import RUN_LIMIT_S
from harness.targets.spec import TargetSpec
from harness.work import ROLLOUT, SAMPLE, Work

PROFILES = {"quick": 30, "ci": 300, "deep": 800_000}
"""Schedules drawn on a conforming engine; a quarter as many again on a faulty one."""

QUICK_BUDGET = 1_000
"""Corpus entries with larger budgets (an issue's own numbers) cost a second and are left to the longer profiles."""

LEVEL_SETS = {"sample": (SAMPLE,), "rollout": (ROLLOUT,), "both": (SAMPLE, ROLLOUT)}

SCENARIOS = {"quick": 30, "ci": 300, "deep": 200_000}
"""Scenarios drawn for whole rollouts."""

ROLLOUT_ENGINE = "inproc"
"""The engine of whole rollouts: only there is it known which message arrives when."""

MODE_SETS = {"plain": (PLAIN,), "stream": (STREAM,), "incremental": (INCREMENTAL,), "both": (PLAIN, STREAM)}

EVERYTHING, UNTIL_BROKEN = "everything", "until broken"
"""How far a check looks: at all there is, or no further than until all that was asked for is broken."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to check. ``modes`` None: all that the target has. ``rules`` empty: all.

    ``levels``: on single samples, on whole rollouts, or both.

    With ``scope`` every schedule of that size is run instead of drawn ones
    (`harness.scope`). ``jobs``, ``limit_s``, ``journal`` and ``ray`` spread the
    work over processes (`harness.pool`): how many, for how long at most in
    seconds, the file to go on from, and the address of a Ray cluster.

    ``first`` is run before anything else: rules, and what is known to have broken them before.
    ``depth`` says how far to look beyond it. A ``lenient`` check leaves out the modes that the target lacks.
    """

    target: TargetSpec
    engines: tuple[str, ...] = ("inproc",)
    modes: tuple[str, ...] | None = None
    rules: tuple[str, ...] = ()
    profile: str = "ci"
    seed: int = 0
    tokenizer: str | None = None
    run_limit_s: float = RUN_LIMIT_S
    scope: int | None = None
    jobs: int | None = None
    limit_s: float | None = None
    journal: str | None = None
    ray: str | None = None
    levels: tuple[str, ...] = (SAMPLE,)
    first: tuple[tuple[str, Work], ...] = ()
    depth: str = EVERYTHING
    lenient: bool = False

    @property
    def spread(self) -> bool:
        """Whether the work is cut into portions."""
        asked = (self.scope, self.jobs, self.limit_s, self.journal, self.ray)
        return self.profile == "deep" or any(option is not None for option in asked)


def faulty_count(profile: str) -> int:
    """Schedules drawn on a faulty engine."""
    return max(PROFILES[profile] // 4, 10)
