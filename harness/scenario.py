"""A scenario: whole rollouts of a loop, with what happens while they run and between them.

Frozen, JSON-able, one line to read, and it says nothing about the client: what
`harness.schedule` is for one sample, this is for the loop around many. Its JSON
form (``spec/schemas/scenario.schema.json``) leaves out what has its default value.

The first rollout begins with the first step that needs one. Whatever the steps
leave undone (a rollout that has not ended, requests that still run) is brought to
an end in the plainest order: messages arrive, requests run to their natural end
one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from harness.schedule import ScheduleError, read_integer, read_object

STEPS: dict[str, str] = {
    "tokens": "the engine brings `count` tokens of the `which`-th request that runs",
    "hold": "the next `count` messages between client and engine stay on their way",
    "pass": "`count` messages on their way arrive in one moment, from the `which`-th on",
    "wait": "nothing happens until the loop's next timer",
    "kill": "the connection of the `which`-th request that runs breaks, and those of its sample's next `count` - 1",
    "abort": "the engine aborts the `which`-th request that runs, for a reason of its own",
    "update": "the weights are updated, and requests that run go on with the new ones",
    "end": "the present rollout ends",
    "rollout": "the present rollout ends, and the next one begins",
    "restart": "the present rollout ends, the data source is saved, and a new process loads it",
    "budget": "as restart, and the new process has the budget `count`",
    "stop": "the loop is shut down, whatever it is doing",
}
"""Every kind of step."""

COUNTED = frozenset({"tokens", "hold", "pass", "kill", "budget"})
AIMED = frozenset({"tokens", "pass", "kill", "abort"})
MAX_STEPS, MAX_NUMBER = 200, 1_000
FLAGS = ("partial", "mask", "spanning", "fan_out")


@dataclass(frozen=True, slots=True)
class Step:
    """``which`` counts from 0 among what there is, and goes round; ``count`` is tokens, messages or a budget."""

    kind: str
    which: int = 0
    count: int = 1

    def __str__(self) -> str:
        words = [self.kind]
        words += [str(self.count)] if self.kind in COUNTED else []
        words += [f"of {self.which}"] if self.kind in AIMED else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Scenario:
    """See the module.

    A rollout gathers ``batch`` groups of ``members`` samples, taking ``over``
    groups at a time; at most ``permits`` samples are generated at once.
    ``lengths`` are the natural lengths in tokens of the engine's answers in the
    order of their first request, cycled (None: the engine never ends by itself).
    ``late``: an abort lets one more token through. ``spanning``: the loop is
    fully asynchronous, requests run on from one rollout to the next. ``fan_out``:
    the generate function returns a list of samples.
    """

    budget: int = 4
    members: int = 1
    batch: int = 1
    over: int = 1
    permits: int = 8
    partial: bool = True
    mask: bool = False
    spanning: bool = False
    fan_out: bool = False
    late: bool = False
    lengths: tuple[int | None, ...] = (None,)
    steps: tuple[Step, ...] = ()

    @property
    def faulty_engine(self) -> bool:
        """Never: the engine of a scenario keeps its own contract."""
        return False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(step.kind for step in self.steps)

    def length(self, answer: int) -> int | None:
        """The natural length of the ``answer``-th answer."""
        return self.lengths[answer % len(self.lengths)]

    def in_one_piece(self) -> Scenario:
        return self

    def on_conforming_engine(self) -> Scenario:
        return self

    def uninterrupted(self) -> Scenario:
        return self

    def __str__(self) -> str:
        """One line; what has its default value is left out."""
        words = [f"budget {self.budget}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("budget", "steps") and value != f.default:
                words.append(f"{f.name} {value}")
        return ", ".join(words) + ": " + ("; ".join(map(str, self.steps)) or "run")


def to_json(scenario: Scenario) -> dict[str, Any]:
    """The scenario as JSON data: budget and steps always, the rest where it is not the default."""
    data: dict[str, Any] = {
        f.name: list(value) if isinstance(value := getattr(scenario, f.name), tuple) else value
        for f in fields(scenario)
        if f.name != "steps" and (f.name == "budget" or getattr(scenario, f.name) != f.default)
    }
    data["steps"] = [
        {f.name: getattr(step, f.name) for f in fields(step) if f.name == "kind" or getattr(step, f.name) != f.default}
        for step in scenario.steps
    ]
    return data


def from_json(data: Any) -> Scenario:
    """The scenario in JSON data. Raises ScheduleError; never executes anything."""
    body = read_object(data, Scenario, "scenario")
    for name in ("budget", "steps"):
        if name not in body:
            raise ScheduleError(f"scenario lacks {name!r}")
    read_integer(body, "budget", 0, MAX_NUMBER, where="scenario")
    for name, most in (("members", 4), ("batch", 4), ("over", 4), ("permits", 64)):
        read_integer(body, name, 1, most, where="scenario")
    for name in (*FLAGS, "late"):
        if not isinstance(body.get(name, False), bool):
            raise ScheduleError(f"scenario.{name} must be true or false")
    lengths = body.get("lengths", [None])
    if not isinstance(lengths, list) or not lengths or len(lengths) > MAX_NUMBER:
        raise ScheduleError("scenario.lengths must be a non-empty list")
    if not all(n is None or (type(n) is int and 0 <= n <= MAX_NUMBER) for n in lengths):
        raise ScheduleError(f"scenario.lengths must hold null or integers from 0 to {MAX_NUMBER}")
    steps = body["steps"]
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise ScheduleError(f"scenario.steps must be a list of at most {MAX_STEPS}")
    body["lengths"], body["steps"] = tuple(lengths), tuple(_step(s, i) for i, s in enumerate(steps))
    return Scenario(**body)


def _step(data: Any, index: int) -> Step:
    where = f"scenario.steps[{index}]"
    body = read_object(data, Step, where)
    if not isinstance(body.get("kind"), str) or body["kind"] not in STEPS:
        raise ScheduleError(f"{where}.kind must be one of {', '.join(STEPS)}")
    for name in ("which", "count"):
        read_integer(body, name, 0, MAX_NUMBER, where=where)
    return Step(**body)
