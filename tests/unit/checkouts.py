"""A slime checkout in small, and this interpreter made ready for one: it takes one slime only."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import httpx

FILES = {
    "slime/__init__.py": "",
    "slime/rollout/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/utils/misc.py": """
        class SingletonMeta(type):
            _instances = {}

            def __call__(cls, *args):
                if cls not in cls._instances:
                    cls._instances[cls] = super().__call__(*args)
                return cls._instances[cls]
        """,
    "slime/utils/types.py": """
        from dataclasses import asdict, dataclass, field
        from enum import Enum

        import torch


        @dataclass
        class Sample:
            index: int | None = None
            prompt: str = ""
            tokens: list[int] = field(default_factory=list)
            response: str = ""
            response_length: int = 0
            loss_mask: list[int] | torch.Tensor | None = None
            rollout_log_probs: list[float] | None = None
            teacher_log_probs: list[float] | None = None
            metadata: dict = field(default_factory=dict)

            class Status(Enum):
                PENDING = "pending"
                TRUNCATED = "truncated"
                ABORTED = "aborted"

            status: Status = Status.PENDING

            def to_dict(self):
                return {**asdict(self), "status": self.status.value}

            @staticmethod
            def from_dict(data):
                return Sample(**{**data, "status": Sample.Status(data["status"])})
        """,
    "slime/utils/http_utils.py": """
        import httpx

        _http_client = None


        def init_http_client(args):
            global _http_client
            _http_client = httpx.AsyncClient(timeout=httpx.Timeout(None))


        async def post(url, payload):
            print("noise")
            response = await _http_client.post(url, json=payload)
            response.raise_for_status()
            return response.json()
        """,
    "slime/rollout/sglang_rollout.py": """
        import ray
        import sglang_router
        import torch
        from packaging.version import parse
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from torch import nn
        from transformers import AutoTokenizer

        from slime.utils.http_utils import post
        from slime.utils.misc import SingletonMeta
        from slime.utils.types import Sample

        assert parse(sglang_router.__version__) > parse("0.2.1")


        @ray.remote
        def task():
            return "task"


        @ray.remote(num_gpus=1)
        class Actor(nn.Module, ray.Base):
            @torch.no_grad()
            def step(self):
                return "step"


        assert task() == "task" and Actor(1, a=2).step() == "step"


        class GenerateState(metaclass=SingletonMeta):
            def __init__(self, args):
                self.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
                self.aborted = False


        async def generate(args, sample, sampling_params):
            state = GenerateState(args)
            sampling_params["max_new_tokens"] -= sample.response_length
            sample.tokens = sample.tokens or state.tokenizer.encode(sample.prompt)
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
            payload = {"input_ids": sample.tokens, "sampling_params": sampling_params}
            meta = (await post(url, payload))["meta_info"]
            sample.rollout_log_probs = sample.rollout_log_probs or []
            for logprob, token, _ in meta["output_token_logprobs"]:
                assert not torch.is_tensor(token)
                sample.tokens = sample.tokens + [token]
                sample.rollout_log_probs.append(logprob)
                sample.response_length += 1
            ended = meta["finish_reason"]["type"]
            sample.status = Sample.Status.ABORTED if ended == "abort" else Sample.Status.TRUNCATED
            return sample
        """,
}

PRELUDE = """
import asyncio, json, sys
import httpx
from harness.targets import CannotJudge, Environment, Start
from harness.targets.slime import load


class Letters:
    eos_token_id = 0
    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]
    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(map(chr, token_ids))


asked = []

async def answer(transport, request):
    body = json.loads(await request.aread())
    asked.append(body)
    tokens, ended = (2, "abort") if len(asked) == 1 else (1, "length")
    entries = [[-0.5, 7, None]] * tokens
    meta = {"finish_reason": {"type": ended}, "output_token_logprobs": entries}
    return httpx.Response(200, json={"text": "x", "meta_info": meta})

httpx.AsyncHTTPTransport.handle_async_request = answer
environment = Environment("127.0.0.1", 1, Letters(), budget=8)
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))


def git(where: Path, *command: str, **more: str) -> str:
    """What a git command prints; ``more`` is for its environment."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | more
    done = subprocess.run(
        ["git", "-C", str(where), *identity, *command],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


PRETENDED = {"slime", "pybase65", "ray", "sglang_router", "torch", "transformers"}
"""Packages that a test may load from a folder of its own, or as stubs."""


def pretended() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] in PRETENDED}


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """This interpreter as one that has imported nothing of PRETENDED; afterwards it is as it was before."""
    kept = {name: sys.modules.pop(name) for name in pretended()}
    path, hooks, writes, arguments = sys.path[:], sys.meta_path[:], sys.dont_write_bytecode, sys.argv
    answers = httpx.AsyncHTTPTransport.handle_async_request
    sys.dont_write_bytecode = False
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in pretended():
            del sys.modules[name]
        sys.modules.update(kept)
        sys.path[:], sys.meta_path[:], sys.dont_write_bytecode, sys.argv = path, hooks, writes, arguments
        httpx.AsyncHTTPTransport.handle_async_request = answers  # type: ignore[method-assign]
        logging.getLogger("slime").setLevel(logging.NOTSET)


def python(script: str, *arguments: object) -> str:
    """What a script prints that loads a checkout."""
    code, said = compile(PRELUDE + dedent(script), "<script>", "exec"), io.StringIO()
    with fresh(), contextlib.redirect_stdout(said):
        sys.argv = ["script", *map(str, arguments)]
        exec(code, {"__name__": "__main__"})
    return said.getvalue().strip()
