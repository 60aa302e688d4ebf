"""One plain attempt: ask for what is left of the budget, keep all of the reply or nothing.

`generate` has the signature of THUDM/slime's custom generate functions. The
engine is at ``args.sglang_router_ip`` and ``args.sglang_router_port``; optional
fields of ``args``: ``rollout_max_context_len`` (C, None: unknown), ``tokenizer``
(else the one of ``hf_checkpoint``), ``rollout_abort`` (an object with ``is_set()``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import aiohttp

from reference_impl import budget, client
from reference_impl.sample import Sample, Status


@dataclass(frozen=True, slots=True)
class Ask:
    """What an attempt sends, fixed before it is sent. ``limit`` is m, in tokens."""

    prompt_ids: list[int]
    limit: int
    payload: dict[str, Any]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continues ``sample`` by one request. ``sampling_params["max_new_tokens"]`` is the sample's whole budget B.

    Returns the sample, its status as the engine said. Raises `client.EngineError`
    with the sample as it was.
    """
    ask = prepare(args, sample, sampling_params, stream=False)
    if ask is None:
        return sample
    try:
        reply = await client.ask(args, ask.payload, _whole)
    except client.InputTooLong:
        sample.status = Status.TRUNCATED
        return sample
    meta = reply.get("meta_info") or {}
    tokens, log_probs = pairs(reply)
    keep(args, sample, ask, tokens, log_probs, meta)
    return sample


async def _whole(response: aiohttp.ClientResponse) -> dict[str, Any]:
    reply = await response.json(content_type=None)
    if not isinstance(reply, dict):
        raise client.MalformedReply(f"the reply is no object: {str(reply)[:80]}")
    return reply


def prepare(args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, stream: bool) -> Ask | None:
    """The request of this attempt, or None if there must be none; then the status says why.

    The caller's dict is copied, never changed: it may serve a whole group (NO-ALIAS).
    """
    if sample.finished:
        return None
    prompt_ids = sample.prompt_ids or list(tokenizer(args).encode(sample.prompt, add_special_tokens=False))
    limit = budget.allowance(
        budget=sampling_params["max_new_tokens"],
        context=getattr(args, "rollout_max_context_len", None),
        prompt=len(prompt_ids),
        kept=sample.response_length,
    )
    if limit == 0:
        sample.status = Status.TRUNCATED
        return None
    if aborted(args):
        sample.status = Status.ABORTED
        return None
    params = {**sampling_params, "max_new_tokens": limit}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = budget.remaining_minimum(params["min_new_tokens"], sample.response_length, limit)
    payload: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
    if stream:
        payload["stream"] = True
    images = (sample.multimodal_inputs or {}).get("images")
    if images:
        payload["image_data"] = list(images)
    if images and not sample.response_length:
        payload["text"] = sample.prompt  # the engine expands the placeholders
    else:
        payload["input_ids"] = [*prompt_ids, *sample.tokens[len(prompt_ids) :]]
    return Ask(prompt_ids, limit, payload)


def pairs(event: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and log probabilities of a reply or event, equally many.

    They are read from one list, output_token_logprobs, and so cannot disagree:
    SGLang 0.5.9 loses ids from output_ids when stream chunks pile up. Raises
    `client.MalformedReply` when there are tokens without log probabilities.
    """
    entries = (event.get("meta_info") or {}).get("output_token_logprobs")
    if entries is None:
        if event.get("output_ids") or (event.get("meta_info") or {}).get("completion_tokens"):
            raise client.MalformedReply("tokens came without log probabilities")
        entries = []
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def keep(
    args: Any,
    sample: Sample,
    ask: Ask,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    meta: Mapping[str, Any],
) -> None:
    """Puts the attempt's tokens on the sample, all lists at once, and its status.

    Without a finish_reason nobody said that the answer ended: the sample is ABORTED,
    never COMPLETED, and can be resumed (STATUS).

    The text is decoded from all response ids: engine texts, joined, would show
    U+FFFD where an interruption fell inside a character (TEXT).
    """
    count = budget.clip(len(tokens), ask.limit)
    if not sample.tokens:
        sample.tokens = list(ask.prompt_ids)
    sample.append_response_tokens(args, tokens=tokens[:count], log_probs=log_probs[:count], meta_info=meta)
    if count < len(tokens):
        sample.status = Status.TRUNCATED
    elif not meta.get("finish_reason"):
        sample.status = Status.ABORTED
    sample.response = tokenizer(args).decode(
        sample.tokens[len(ask.prompt_ids) :],
        skip_special_tokens=ask.payload["sampling_params"].get("skip_special_tokens", True),
    )


def aborted(args: Any) -> bool:
    """Whether the trainer has asked for all rollouts to stop."""
    flag = getattr(args, "rollout_abort", None)
    return flag is not None and bool(flag.is_set())


def tokenizer(args: Any) -> Any:
    """``args.tokenizer``, or the one of ``args.hf_checkpoint`` (loaded once; imports transformers)."""
    given = getattr(args, "tokenizer", None)
    return given if given is not None else _load(args.hf_checkpoint)


@lru_cache(maxsize=1)
def _load(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
