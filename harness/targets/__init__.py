"""Targets: the clients under test.

A target is everything the harness knows about a client: how to make one of
its samples, how to call its generate function, how to look at a sample, and
how to raise its abort flag. A target never imports an engine; it is told an
address (`Environment`) and speaks HTTP to it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.history import SampleView
from harness.scenario import Scenario


class CannotJudge(Exception):
    """The target cannot be put under test; the message is one line that names what failed.

    Leads to exit status 125. ``not_applicable`` tells a client that lacks the
    mode apart from one that is broken.
    """

    def __init__(self, message: str, *, not_applicable: bool = False) -> None:
        super().__init__(message)
        self.not_applicable = not_applicable


class Tokenizer(Protocol):
    """The subset of a Hugging Face tokenizer that rollout clients use."""

    eos_token_id: int

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class Environment:
    """What a run tells the target: where the engine is and what the limits are.

    ``context`` is in tokens, prompt and response together; None is unknown.
    """

    host: str
    port: int
    tokenizer: Tokenizer
    budget: int
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The sample to make: a prompt, and the response it already carries (a sample from a buffer).

    With ``tokens`` empty the sample is fresh (status pending). Otherwise
    ``tokens`` is prompt and response, ``logprobs`` and ``response`` belong to
    the response, and the status is aborted. ``images`` counts images in the prompt.
    """

    prompt: str
    tokens: tuple[int, ...] = ()
    response_length: int = 0
    response: str = ""
    logprobs: tuple[float, ...] = ()
    images: int = 0


class Target(Protocol):
    """A client under test. One instance serves many runs, one after the other, on one event loop."""

    name: str
    """As shown in reports, e.g. ``slime@1eed24931``."""

    modes: tuple[str, ...]
    """The subset of ("plain", "stream") that the client has."""

    @property
    def absent(self) -> Mapping[str, CannotJudge]:
        """Why a mode is not in `modes`."""

    @property
    def stubbed(self) -> frozenset[str]:
        """Packages that were replaced by stubs to import the client."""

    def reset(self, env: Environment) -> None:
        """Forget everything of the run before: singletons, flags, counters. Called inside the running loop."""

    def new_sample(self, start: Start) -> Any: ...

    async def generate(self, sample: Any, params: dict[str, Any], *, stream: bool) -> Any:
        """One attempt. Returns the sample (a client may return another object than it was given).

        ``params`` is the very dict the caller owns: it is passed on as it is, not copied.
        Like `new_sample` and `round_trip` it may raise CannotJudge.
        """

    def view(self, sample: Any) -> SampleView: ...

    def round_trip(self, sample: Any) -> Any:
        """The sample after to_dict, JSON text and from_dict, as a buffer on disk would give it back."""

    def set_abort(self, on: bool) -> None:
        """Raise or lower the client's own abort flag (slime: ``GenerateState.aborted``)."""

    def writes(self) -> tuple[str, ...]:
        """Fields of ``args`` that the client has set since the last reset (`Args.written`)."""

    async def close(self) -> None:
        """Release what belongs to the running loop (HTTP clients)."""


@dataclass(frozen=True, slots=True)
class LoopEnvironment:
    """What a scenario tells a loop. ``prompts`` are its data set, taken from the first on and round again.

    ``stream``: it generates by streaming. The limits are the scenario's.
    """

    host: str
    port: int
    tokenizer: Tokenizer
    scenario: Scenario
    prompts: tuple[str, ...]
    stream: bool


class Watch(Protocol):
    """What a loop target tells while it runs."""

    async def call(self, sample: Any, params: dict[str, Any], proceed: Callable[[], Awaitable[Any]]) -> Any:
        """To be wrapped around every call of the client's generate function; gives what ``proceed`` gives."""

    def saved(self) -> None:
        """The loop is at rest, and its data source is about to be saved."""

    def taken(self, groups: Sequence[Sequence[Any]]) -> None:
        """The loop took these groups from its data source."""


class LoopTarget(Protocol):
    """A rollout loop under test: what `Target` is for one sample. Groups are sequences of members.

    A member is a sample, or the list of samples that a generate function made of one.
    """

    name: str
    modes: tuple[str, ...]

    stoppable: bool
    """`stop` may be called while a rollout runs; otherwise the rollout is brought to its end first."""

    @property
    def absent(self) -> Mapping[str, CannotJudge]: ...

    @property
    def stubbed(self) -> frozenset[str]: ...

    def reset(self, env: LoopEnvironment, watch: Watch) -> None:
        """A new process: an empty buffer, the first prompt, nothing running. Called inside the running loop.

        Raises CannotJudge (not applicable) when the client lacks what the scenario asks for.
        """

    async def rollout(self, number: int) -> Sequence[Sequence[Any]]:
        """One rollout, with the unfinished groups put into the buffer. Gives the groups to train on."""

    def buffer(self) -> Sequence[Sequence[Any]]:
        """The groups that wait in the data source."""

    async def restart(self, budget: int) -> None:
        """Ends what runs, saves the data source, and loads it in a new one, as a new process with this budget would.

        ``saved`` of the watch is called in between, when nothing changes any more.
        """

    async def stop(self) -> None:
        """Shuts the loop down; a later rollout starts it again. Does nothing where there is no such thing."""

    def aborting(self) -> bool:
        """The client's abort flag is up."""

    def permits(self) -> tuple[int, int] | None:
        """How many of its permits to generate are free, of how many."""

    def index(self, sample: Any) -> int:
        """The sample's own number, as its data source gave it."""

    def view(self, sample: Any) -> SampleView: ...

    def scored(self, sample: Any) -> bool:
        """The sample has a reward."""

    def versions(self, sample: Any) -> tuple[str, ...] | None:
        """The weights that the client lists for the sample; None if it lists none."""

    def spans(self, sample: Any) -> tuple[tuple[str, int], ...] | None:
        """The sample's (weights, tokens); None if the client keeps none."""

    async def close(self) -> None:
        """Release what belongs to the running loop (HTTP clients)."""


class Args(Namespace):
    """slime's ``args`` for a target: strict, so that ``getattr(args, name, default)`` keeps its meaning.

    Writes are recorded by name. A read of a field that is not there raises AttributeError.
    """

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_writes", set())
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no field {name!r}")

    def written(self) -> tuple[str, ...]:
        """Names of the fields that were set after construction, sorted."""
        return tuple(sorted(self._writes))

    def __setattr__(self, name: str, value: Any) -> None:
        self._writes.add(name)
        object.__setattr__(self, name, value)
