"""THUDM/slime as a target, at any revision that has a partial rollout.

`load` imports a checkout's own code and picks the callables by what is there
and by their signatures. It may be called once per process: two ``slime``
packages do not fit into one interpreter.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import ssl
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.history import ABORTED, PLAIN, STREAM, SampleView
from harness.targets import Args, CannotJudge, Environment, Start, stubs

ROLLOUTS = ("slime.rollout.sglang_rollout", "slime.rollout.sglang_example")
"""Where plain generation lives, the present name first."""

STREAMING = "slime.rollout.sglang_streaming_rollout"
REWARDS = "slime.rollout.rm_hub"
"""Never imported: no part of generating. Two days' revisions clone a repository there at import."""

PLAIN_NAMES = ("generate", "generate_one_sample_vanilla")
STREAM_NAMES = ("generate_streaming",)

IMAGE = "data:image/png;base64,iVBORw0KGgo="
"""An image in a prompt. A string, so that a sample survives JSON; `_encode_image` lets it pass."""

_PER_TOKEN = ("teacher_log_probs",)  # fields of Sample with one entry a response token
_LOGPROBS = "rollout_log_probs"


def load(
    root: str | os.PathLike[str],
    revision: str,
    *,
    heavy: frozenset[str] = stubs.HEAVY,
    also: Sequence[str] = (),
) -> SlimeTarget:
    """The slime package below ``root``, imported into this process; modules in ``also`` too, those that it has.

    Packages it imports that are not installed, and those in ``heavy``, are
    replaced by stubs. Raises CannotJudge if it does not import, holds no
    generate function that can be called, or another slime is loaded already.
    """
    if "slime" in sys.modules:
        raise CannotJudge("a slime package is already loaded in this process")
    base = Path(root).resolve()
    plain_name = next((name for name in ROLLOUTS if _file(base, name).is_file()), None)
    if plain_name is None:
        raise CannotJudge(
            f"no {ROLLOUTS[0]} or {ROLLOUTS[1].rpartition('.')[2]} at {revision}",
            not_applicable=True,
        )
    sys.dont_write_bytecode = True  # the tree may be the user's own
    sys.path.insert(0, str(base))
    importlib.invalidate_caches()
    hooks = stubs.install(str(base), heavy)
    hooks.replace(REWARDS)
    try:
        rollout = _import(plain_name, base)
        types = _import("slime.utils.types", base)
        http = _import("slime.utils.http_utils", base)
        misc = _import("slime.utils.misc", base)
        absent: dict[str, CannotJudge] = {}
        streaming = None
        if _file(base, STREAMING).is_file():
            try:
                streaming = _import(STREAMING, base)
            except CannotJudge as error:  # plain mode can still be judged
                absent[STREAM] = error
        others = {name: _import(name, base) for name in also if _file(base, name).is_file()}
    finally:
        hooks.withdraw()
    target = SlimeTarget(revision, rollout, streaming, types=types, http=http, misc=misc, absent=absent, hooks=hooks)
    target.others = others
    target.probed += tuple(also)
    return target


class SlimeTarget:
    """A loaded revision of slime. See `harness.targets.Target` for what its methods promise."""

    def __init__(
        self,
        revision: str,
        rollout: ModuleType,
        streaming: ModuleType | None,
        *,
        types: ModuleType,
        http: ModuleType,
        misc: ModuleType,
        absent: Mapping[str, CannotJudge],
        hooks: stubs.Hooks,
    ) -> None:
        self.name = f"slime@{revision}"
        self.absent: dict[str, CannotJudge] = dict(absent)
        """Why a mode is not in `modes`: raise it to say so."""
        self.probed: tuple[str, ...] = (*ROLLOUTS, STREAMING)
        """Modules whose being there or not makes a difference, although they may never be imported."""
        self.others: dict[str, ModuleType] = {}
        """The modules that `load` was asked for beside those of a single sample."""
        self.rollout: Any = rollout
        self._hooks = hooks
        self._http: Any = http
        self._sample_class: Any = getattr(types, "Sample", None)
        if self._sample_class is None or not hasattr(self._sample_class, "Status"):
            raise CannotJudge(
                f"Sample has no Status at {revision}: there is no partial rollout yet",
                not_applicable=True,
            )
        self._fields = frozenset(self._sample_class.__dataclass_fields__)
        self.keeps_logprobs = _LOGPROBS in self._fields
        """Whether samples of this revision carry log probabilities at all."""
        self._singletons = getattr(misc, "SingletonMeta", None)
        self._calls: dict[str, _Call] = {}
        self._find_call(PLAIN, rollout, PLAIN_NAMES)
        self._find_call(STREAM, streaming, STREAM_NAMES)
        self.modes = tuple(mode for mode in (PLAIN, STREAM) if mode in self._calls)
        if not self.modes:
            raise self.absent[PLAIN]

        self.args = Args()
        """The namespace that the present run passes, with its reads and writes."""
        self._missing: set[str] = set()
        self._state: Any = SimpleNamespace(aborted=False, processor=None)
        self._tokenizer: Any = None
        self._client_loop: asyncio.AbstractEventLoop | None = None
        self._patch()

    @property
    def stubbed(self) -> frozenset[str]:
        """The packages that were replaced by stubs."""
        return self._hooks.stubbed

    def missing_args(self) -> tuple[str, ...]:
        """The fields of ``args`` that slime read, that are not there and that made a call fail."""
        return tuple(sorted(self._missing))

    def reset(self, env: Environment) -> None:
        """Forget everything of the run before. Called inside the running loop."""
        self.args = Args(**_args(env))
        self._tokenizer = env.tokenizer
        if hasattr(self.rollout, "prepare_model_inputs"):
            self._tokenizer = _NoTemplate(env.tokenizer)
        for name, empty in (("TOKENIZER", None), ("SEMAPHORE", None)):  # before GenerateState
            if hasattr(self.rollout, name):
                setattr(self.rollout, name, empty)
        cached = getattr(self.rollout, "EVAL_PROMPT_DATASET", None)
        if isinstance(cached, dict):
            cached.clear()
        self._open_client()
        self.renew_state()

    @property
    def state(self) -> Any:
        """The revision's GenerateState, or what stands for it where there is none yet."""
        return self._state

    def renew_state(self) -> None:
        """Makes GenerateState from the present ``args``."""
        if self._singletons is not None:
            self._singletons._instances.clear()
        state_class = getattr(self.rollout, "GenerateState", None)
        if self._singletons is not None and isinstance(state_class, self._singletons):
            assert state_class is not None
            self._state = state_class(self.args)
        else:
            self._state = SimpleNamespace(aborted=False, processor=None)

    def function(self, mode: str) -> Callable[..., Awaitable[Any]] | None:
        """The revision's generate function of a mode, called by the parameters' names."""
        return self._calls.get(mode)

    def new_sample(self, start: Start) -> Any:
        known: dict[str, Any] = {"index": 0, "group_index": 0, "prompt": start.prompt}
        # Spelled out because early revisions default these to None.
        known |= {"tokens": list(start.tokens), "response": start.response}
        known |= {"response_length": start.response_length, "metadata": {}}
        if start.images:
            self._require_images()
            known["multimodal_inputs"] = {"images": [IMAGE] * start.images}
        if start.tokens:
            known["status"] = self._sample_class.Status(ABORTED)
            known[_LOGPROBS] = list(start.logprobs)
            if start.images:
                known["multimodal_train_inputs"] = _pixels(start.images)
        return self._sample_class(**{k: v for k, v in known.items() if k in self._fields})

    async def generate(self, sample: Any, params: dict[str, Any], *, stream: bool) -> Any:
        """One attempt by the revision's own function.

        Raises CannotJudge if the revision lacks the mode or reads a field of
        ``args`` that is not there.
        """
        mode = STREAM if stream else PLAIN
        if mode not in self._calls:
            raise self.absent[mode]
        # Per call, not per run: some revisions hand every sample to a processor that is there.
        images = (getattr(sample, "multimodal_inputs", None) or {}).get("images")
        self._state.processor = self._processor if images else None
        try:
            return await self._calls[mode](
                args=self.args,
                sample=sample,
                sampling_params=params,
                tokenizer=self._tokenizer,
                rollout_id=0,
            )
        except AttributeError as error:
            if str(error).startswith("args has no field"):
                self._missing.add(str(error).split("'")[1])
                raise CannotJudge(f"{self.name} wants more: {error}") from error
            raise

    def view(self, sample: Any) -> SampleView:
        arrays = {name: len(values) for name in _PER_TOKEN if (values := getattr(sample, name, None)) is not None}
        offsets = getattr(sample, "rollout_top_p_token_offsets", None)
        if offsets is not None:
            arrays["rollout_top_p_token_offsets"] = len(offsets) - 1  # r spans have r + 1 ends
        mask, logprobs = sample.loss_mask, getattr(sample, _LOGPROBS, None)
        prompt = sample.prompt
        return SampleView(
            tokens=tuple(sample.tokens or ()),
            response_length=sample.response_length or 0,
            response=sample.response or "",
            loss_mask=None if mask is None else tuple(mask),
            logprobs=None if logprobs is None else tuple(logprobs),
            status=str(sample.status.value),
            prompt=prompt if isinstance(prompt, str) else json.dumps(prompt),
            arrays=arrays,
            has_logprobs=self.keeps_logprobs,
        )

    def round_trip(self, sample: Any) -> Any:
        """As in the Target protocol; CannotJudge for a revision whose samples have no JSON form."""
        if not (hasattr(sample, "to_dict") and hasattr(self._sample_class, "from_dict")):
            raise CannotJudge(f"{self.name} has no to_dict and from_dict", not_applicable=True)
        try:
            text = json.dumps(sample.to_dict())
        except TypeError as error:  # slime itself stores samples with torch.save
            raise CannotJudge(f"{self.name} has no JSON form of a sample: {error}", not_applicable=True) from error
        return self._sample_class.from_dict(json.loads(text))

    def set_abort(self, on: bool) -> None:
        self._state.aborted = on

    def writes(self) -> tuple[str, ...]:
        return self.args.written()

    async def close(self) -> None:
        client = getattr(self._http, "_http_client", None)
        if client is not None and self._client_loop is asyncio.get_running_loop():
            self._http._http_client = None
            await client.aclose()
        self._client_loop = None

    def _find_call(self, mode: str, module: ModuleType | None, names: Sequence[str]) -> None:
        if mode in self.absent:
            return
        found = next((f for name in names if callable(f := getattr(module, name, None))), None)
        if found is None:
            self.absent[mode] = CannotJudge(f"{self.name} has no {mode} mode", not_applicable=True)
            return
        try:
            self._calls[mode] = _Call(found)
        except CannotJudge as error:
            self.absent[mode] = error

    def _patch(self) -> None:
        """Gives the revision our tokenizer, processor and cheap HTTP clients, and silences it."""
        replacements = {
            "load_tokenizer": lambda *_, **__: self._tokenizer,
            "load_processor": lambda *_, **__: None,
            "AutoTokenizer": SimpleNamespace(from_pretrained=lambda *_, **__: self._tokenizer),
            "AutoProcessor": SimpleNamespace(from_pretrained=lambda *_, **__: None),
            "encode_image_for_rollout_engine": _encode_image,
        }
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "slime" or module is None:
                continue
            for attribute, replacement in replacements.items():
                if attribute in vars(module):
                    setattr(module, attribute, replacement)
            module.print = _silent  # type: ignore[attr-defined]  # old revisions print retries
        # A retry storm writes 60 lines an attempt. Its loggers are children of this one.
        logging.getLogger("slime").setLevel(logging.CRITICAL + 1)
        if isinstance(getattr(self._http, "httpx", None), ModuleType):
            self._http.httpx = _cheap_httpx(self._http.httpx)

    def _open_client(self) -> None:
        """The revision's global HTTP client, made by its own code once per event loop."""
        loop = asyncio.get_running_loop()
        if not hasattr(self._http, "_http_client"):
            return  # it opens a client per call
        if self._client_loop is loop and self._http._http_client is not None:
            return
        self._http._http_client = None
        init = self._http.init_http_client
        wants = next(iter(inspect.signature(init).parameters), "")
        # One revision range takes the number of connections.
        init(self.args if wants == "args" else self.args.sglang_server_concurrency)
        self._client_loop = loop

    def _require_images(self) -> None:
        takes = "multimodal_inputs" in self._fields
        # These read images out of a prompt that is a list of chat messages.
        if not takes or hasattr(self.rollout, "prepare_model_inputs"):
            raise CannotJudge(f"{self.name} takes no images beside a prompt", not_applicable=True)

    def _processor(self, text: str, images: Sequence[Any] = (), **_: Any) -> dict[str, Any]:
        """As a Hugging Face processor answers for one prompt, without expanding placeholders."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        mask = [1] * len(ids)
        return {"input_ids": [ids], "attention_mask": [mask], **_pixels(len(images))}


class _Call:
    """A generate function, called with the parameters that its signature names."""

    KNOWN = ("args", "sample", "sampling_params", "tokenizer", "rollout_id")

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        self._names = [p.name for p in named if p.name in self.KNOWN or p.default is p.empty]
        unknown = [name for name in self._names if name not in self.KNOWN]
        if unknown or not inspect.iscoroutinefunction(function):
            raise CannotJudge(f"{function.__name__} is not called the way that is known: {inspect.signature(function)}")
        self._function = function

    def __call__(self, **values: Any) -> Awaitable[Any]:
        return self._function(**{name: values[name] for name in self._names})


class _NoTemplate:
    """A tokenizer whose chat template adds nothing.

    For the revisions of December 2025 that put every prompt through the chat
    template: the prompt stays the text that the schedule says.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, prompt: str, *_: Any, **__: Any) -> str:
        return prompt


def _args(env: Environment) -> dict[str, Any]:
    """The fields that revisions read without a default, made anew for every run.

    Fields read by ``getattr`` with a default are left out on purpose.
    """
    return {
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "ci_test": False,
        "custom_generate_function_path": None,
        "dynamic_sampling_filter_path": None,
        "enable_off_policy_correction": True,  # its first revision fails on every sample without
        "eval_input_key": None,
        "eval_label_key": None,
        "eval_max_prompt_len": None,
        "eval_max_response_len": env.budget,
        "eval_prompt_data": None,
        "eval_reward_key": None,
        "eval_temperature": 0.0,
        "eval_tool_key": None,
        "eval_top_k": 1,
        "eval_top_p": 1.0,
        "group_rm": False,
        "hf_checkpoint": "checkpoint",
        "input_key": "input",
        "label_key": None,
        "mask_offpolicy_in_partial_rollout": False,
        "metadata_key": "metadata",
        "moe_router_topk": 2,
        "multimodal_keys": None,
        "n_samples_per_eval_prompt": 1,
        "n_samples_per_prompt": 1,
        "num_gpus_per_node": 8,
        "num_layers": 2,
        "over_sampling_batch_size": 1,
        "over_sampling_filter_path": None,
        "partial_rollout": True,
        "reward_key": None,
        "rm_type": None,
        "rollout_all_samples_process_path": None,
        "rollout_batch_size": 1,
        "rollout_global_dataset": True,
        "rollout_max_context_len": env.context,
        "rollout_max_prompt_len": None,
        "rollout_max_response_len": env.budget,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 1,
        "rollout_sample_filter_path": None,
        "rollout_seed": 42,
        "rollout_skip_special_tokens": False,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "sglang_dp_size": 1,
        "sglang_router_ip": env.host,
        "sglang_router_policy": None,
        "sglang_router_port": env.port,
        "sglang_server_concurrency": 512,
        "sglang_speculative_algorithm": None,
        "slime_router_middleware_paths": [],
        "tool_key": None,
        "use_distributed_post": False,
        "use_http2": False,
        "use_rollout_routing_replay": False,
        "use_slime_router": False,
        "use_token_output": True,  # August 2025; the default soon after
    }


def _file(base: Path, module: str) -> Path:
    return base.joinpath(*module.split(".")).with_suffix(".py")


def _import(name: str, base: Path) -> ModuleType:
    try:
        with warnings.catch_warnings(), _no_processes():
            warnings.simplefilter("ignore")  # slime's own, such as invalid escapes
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        said = str(error).strip().split("\n")[0]
        raise CannotJudge(f"importing {name} failed: {type(error).__name__}: {said}") from error
    file = Path(module.__file__ or "").resolve()
    if not file.is_relative_to(base):
        raise CannotJudge(f"{name} was imported from {file} instead of the checkout")
    return module


@contextmanager
def _no_processes() -> Iterator[None]:
    """An import that starts a program (git, pip) fails instead, as without that program."""
    real = subprocess.Popen

    class Refused(real):  # type: ignore[misc,valid-type]
        def __init__(self, *_: Any, **__: Any) -> None:
            raise OSError("no program is started while a checkout is imported")

    subprocess.Popen = Refused  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = real  # type: ignore[misc]


def _cheap_httpx(httpx: ModuleType) -> Any:
    """The module's names, with an AsyncClient that neither reads certificates nor the environment.

    A plain client costs some 20 ms for its TLS context, and engines are spoken to without TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    class AsyncClient(httpx.AsyncClient):  # type: ignore[name-defined,misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{"verify": context, **options, "trust_env": False})

    return SimpleNamespace(**{**vars(httpx), "AsyncClient": AsyncClient})


def _encode_image(image: Any) -> Any:
    return image


def _pixels(images: int) -> dict[str, Any]:
    return {"pixel_values": [[0.0]] * images}


def _silent(*_: Any, **__: Any) -> None:
    """Stands for ``print``."""
