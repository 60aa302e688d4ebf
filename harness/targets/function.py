"""Function targets: a user's own generate function, and the reference.

A function has the signature of slime's custom generate functions,
``async def generate(args, sample, sampling_params) -> sample``. It is given
`reference_impl.sample.Sample`, which has slime's field and method names, and
finds the engine at ``args.sglang_router_ip`` and ``args.sglang_router_port``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

from harness.history import SampleView
from harness.targets import Args, CannotJudge, Environment, Start
from reference_impl import client
from reference_impl.sample import Sample, Status

Generate = Callable[[Any, Any, dict[str, Any]], Awaitable[Any]]


class Flag:
    """The abort flag a function finds at ``args.rollout_abort``."""

    def __init__(self) -> None:
        self.on = False

    def is_set(self) -> bool:
        return self.on


class FunctionTarget:
    """One generate function a mode. Modes without a function are absent."""

    def __init__(self, name: str, plain: Generate | None, stream: Generate | None) -> None:
        self.name = name
        self._functions = {"plain": plain, "stream": stream}
        self.modes = tuple(mode for mode, function in self._functions.items() if function is not None)
        self.absent = {
            mode: CannotJudge(f"{name} has no {mode} mode", not_applicable=True)
            for mode in self._functions
            if mode not in self.modes
        }
        self.stubbed: frozenset[str] = frozenset()
        self._flag = Flag()
        self._args = Args()

    def reset(self, env: Environment) -> None:
        self._flag.on = False
        self._args = Args(
            sglang_router_ip=env.host,
            sglang_router_port=env.port,
            tokenizer=env.tokenizer,
            hf_checkpoint=None,
            rollout_max_response_len=env.budget,
            rollout_max_context_len=env.context,
            rollout_abort=self._flag,
            partial_rollout=True,
            mask_offpolicy_in_partial_rollout=False,
        )

    def new_sample(self, start: Start) -> Any:
        sample = Sample(prompt=start.prompt, index=0)
        if start.images:
            sample.multimodal_inputs = {"images": ["data:image/png;base64,"] * start.images}
        if start.tokens:
            sample.tokens = list(start.tokens)
            sample.response, sample.response_length = start.response, start.response_length
            sample.rollout_log_probs = list(start.logprobs)
            sample.loss_mask = [1] * start.response_length
            sample.status = Status.ABORTED
        return sample

    async def generate(self, sample: Any, params: dict[str, Any], *, stream: bool) -> Any:
        function = self._functions["stream" if stream else "plain"]
        if function is None:
            raise self.absent["stream" if stream else "plain"]
        result = await function(self._args, sample, params)
        if not hasattr(result, "response_length"):
            raise CannotJudge(f"{self.name} returned {type(result).__name__}, not a sample")
        return result

    def view(self, sample: Any) -> SampleView:
        return view(sample)

    def round_trip(self, sample: Any) -> Any:
        return type(sample).from_dict(json.loads(json.dumps(sample.to_dict())))

    def set_abort(self, on: bool) -> None:
        self._flag.on = on

    def writes(self) -> tuple[str, ...]:
        return self._args.written()

    async def close(self) -> None:
        await client.close()


def view(sample: Any) -> SampleView:
    """A sample with the reference's field names, by value."""
    mask, probs = sample.loss_mask, sample.rollout_log_probs
    return SampleView(
        tuple(sample.tokens),
        sample.response_length,
        sample.response,
        None if mask is None else tuple(mask),
        None if probs is None else tuple(probs),
        sample.status.value,
        sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt),
    )


def reference() -> FunctionTarget:
    """The reference implementation, both modes."""
    from reference_impl.generate import generate
    from reference_impl.generate_streaming import generate_streaming

    return FunctionTarget("reference", generate, generate_streaming)


def find(spec: str) -> Generate:
    """The function ``pkg.mod:function``, with its signature checked. Raises CannotJudge."""
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # a module may even exit
        raise CannotJudge(f"importing {module_name} failed: {type(error).__name__}: {_line(error)}") from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise CannotJudge(f"{module_name} has no function {name!r}")
    if not inspect.iscoroutinefunction(function):
        raise CannotJudge(f"{spec} is no async function; expected async def {name}(args, sample, sampling_params)")
    try:
        inspect.signature(function).bind(None, None, {})
    except TypeError as error:
        raise CannotJudge(f"{spec} cannot be called with (args, sample, sampling_params): {error}") from error
    found: Generate = function
    return found


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
