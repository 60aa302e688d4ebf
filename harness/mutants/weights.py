"""Which weights made a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.mutants.parts import Reference, mutant
from harness.scenario import Scenario, Step
from reference_impl.generate import Ask, keep
from reference_impl.rollout import Rollout
from reference_impl.sample import Sample
from reference_impl.source import Member


@mutant("PROVENANCE", "vllm-project/vllm#54443", shows=Scenario(budget=2, steps=(Step("tokens"), Step("update"))))
class OneVersionPerRequest(Reference):
    """A request has one version of the weights, the last."""

    def settle(
        self,
        args: Any,
        sample: Sample,
        ask: Ask,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        meta: Mapping[str, Any],
    ) -> None:
        keep(args, sample, ask, tokens, log_probs, {**meta, "weight_versions": ()})


@mutant("PROVENANCE", "rllm-org/rllm#622", shows=Scenario(budget=2, steps=(Step("tokens"), Step("update"))))
class StampsAtTheEnd(Reference):
    """When an answer ends all its tokens are stamped with the weights of that moment."""

    def settle(self, args: Any, sample: Sample, ask: Ask, *answer: Any) -> None:
        keep(args, sample, ask, *answer)
        if sample.finished and sample.weight_spans:
            sample.weight_spans = [(sample.weight_versions[-1], sample.response_length)]


@mutant(
    "PROVENANCE", "ai-dynamo/dynamo#10699", shows=Scenario(budget=2, over=2, steps=(Step("tokens", 1), Step("update")))
)
class StaleVersionsOnAbort(Rollout):
    """What is known of the answer before overwrites what an abort says of the weights."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        generate, last = self.generate, list[str]()

        async def stale(args: Any, sample: Sample, params: dict[str, Any]) -> Member:
            before, kept = sample.weight_spans, sample.response_length
            made = await generate(args, sample, params)
            told = sample.weight_versions[-1:]
            if not sample.finished and last and sample.response_length > kept:
                sample.weight_spans = [*before, (last[0], sample.response_length - kept)]
            last[:] = told or last
            return made

        self.generate = stale
