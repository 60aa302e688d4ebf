"""One prompt's response while it is being generated: what is kept between attempts.

Field and method names are those of THUDM/slime's ``Sample``, so that a custom
generate function written for slime works on it. Per-token lists (loss_mask,
rollout_log_probs) have exactly ``response_length`` entries at all times (ALIGN).
``weight_spans`` is ours: (version, tokens), in order, summing to ``response_length``
once a token was appended; "" is a version that nobody told (PROVENANCE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import groupby, repeat
from typing import Any


@dataclass
class Sample:
    """``tokens`` is prompt and response ids together, empty until the first attempt has an answer."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    weight_spans: list[tuple[str, int]] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's part of ``tokens``; empty as long as there are no tokens."""
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def finished(self) -> bool:
        """Terminal statuses are absorbing (STATUS): nothing is generated any more."""
        return self.status in (self.Status.COMPLETED, self.Status.TRUNCATED)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Adds tokens to every per-token list at once, then takes the status from ``meta_info``.

        Tokens a tool or environment wrote are not trainable: mask 0, log
        probability 0. Raises ValueError, and changes nothing, when a trainable
        token lacks its log probability.
        """
        new = [int(t) for t in tokens or ()]
        probs = [float(p) for p in log_probs or ()] if trainable else [0.0] * len(new)
        if len(probs) != len(new):
            raise ValueError(f"{len(new)} tokens came with {len(probs)} log probabilities")
        versions = _versions(meta_info or {}, len(new))
        if new:
            mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
            before = self.rollout_log_probs if self.rollout_log_probs is not None else []
            if len(before) != self.response_length:
                raise ValueError(f"{self.response_length} tokens are kept with {len(before)} log probabilities")
            self.loss_mask = [*mask, *([int(trainable)] * len(new))]
            self.rollout_log_probs = [*before, *probs]
            self.weight_spans = self._spans(versions)
            self.tokens = [*self.tokens, *new]
            self.response_length += len(new)
        self.response += text or ""
        if meta_info and update_terminal_info:
            self._finish(meta_info)

    def _finish(self, meta_info: Mapping[str, Any]) -> None:
        reason = meta_info.get("finish_reason") or {}
        self.status = _BY_FINISH.get(str(reason.get("type")), self.status)
        if "weight_version" in meta_info:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]

    def _spans(self, versions: Sequence[str]) -> list[tuple[str, int]]:
        """The spans with one version more for each new token. Tokens kept before anyone counted have version ""."""
        known = [version for version, count in self.weight_spans for _ in range(count)]
        known = [*repeat("", self.response_length - len(known)), *known, *versions]
        return [(version, len(list(same))) for version, same in groupby(known)]

    def restart(self) -> None:
        """Begins again from the prompt: nothing of the response survives (spec/README.md, Restarts)."""
        self.tokens, self.response, self.response_length = [], "", 0
        self.loss_mask, self.rollout_log_probs, self.reward = None, None, None
        self.weight_versions, self.weight_spans = [], []
        self.status = self.Status.PENDING

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, as a rollout buffer stores it."""
        return {**self.__dict__, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys become attributes, as slime does."""
        known = {f.name for f in fields(cls)}
        sample = cls(**{k: v for k, v in data.items() if k in known} | {"status": cls.Status(data["status"])})
        sample.weight_spans = [(version, count) for version, count in sample.weight_spans]  # JSON has no tuples
        for name in data.keys() - known:
            setattr(sample, name, data[name])
        return sample


def _versions(meta_info: Mapping[str, Any], count: int) -> list[str]:
    """Which weights made each of the first ``count`` tokens of a request, as SGLang says it.

    0.5.23 ends with spans of tokens, sgl-project/sglang#17610; before that one
    version stands for the whole answer. What no span covers has that one too.
    """
    versions = [str(meta_info.get("weight_version", ""))] * count
    for span in meta_info.get("weight_versions") or ():
        for place in range(count)[span["start"] : span["end"]]:
            versions[place] = str(span["version"])
    return versions


Status = Sample.Status
_BY_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
