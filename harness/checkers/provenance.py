"""PROVENANCE: a sample's weight versions say which weights chose its tokens."""

from __future__ import annotations

from itertools import groupby, pairwise

from harness.checkers import HOLDS, Judgement, RolloutCase
from harness.history import Called, Delivered, Raised, Requested, Returned
from harness.rollouts import Ended, Member


def check(case: RolloutCase) -> Judgement:
    """Judged on the spans where the client keeps some, else on the order of the versions it lists."""
    served: dict[int, list[str]] = {}  # by sample: the weights that chose each token on it
    told: dict[int, list[str]] = {}  # by sample: those of the request under way
    judged = False
    for event in case.history.events:
        if isinstance(event, Called):
            del served.setdefault(event.sample, [])[event.view.response_length :]
        elif isinstance(event, Requested):
            told[event.sample] = []  # a call that asks again keeps the tokens of its last request
            if event.input_ids == case.history.prompts.get(event.sample):
                served[event.sample] = []  # it begins again from the prompt
        elif isinstance(event, Delivered):
            told.setdefault(event.sample, []).extend(event.versions)
        elif isinstance(event, Returned | Raised):
            before = served.setdefault(event.sample, [])
            before += told.pop(event.sample, [])[: max(event.view.response_length - len(before), 0)]
        elif isinstance(event, Ended):
            for member in (m for group in (*event.groups, *event.buffer) for m in group):
                if len(member.views) == 1 and (member.spans is not None or member.versions is not None):
                    judged = True
                    problem = _problem(member, served.get(member.sample, []))
                    if problem is not None:
                        return case.finding(event, problem, member.sample)
    return HOLDS if judged else None


def _problem(member: Member, served: list[str]) -> str | None:
    if member.spans is None:
        return _disorder(member.versions or ())
    length = member.views[0].response_length
    total = sum(count for _, count in member.spans)
    if total != length:
        return f"its weight spans hold {total} tokens of {length}"
    said = [version for version, count in member.spans for _ in range(count)]  # two spans may name one version
    if len(served) == length and said != served:
        return f"its weight spans are {_shown(said)}, but the engine's were {_shown(served)}"
    return None


def _disorder(versions: tuple[str, ...]) -> str | None:
    for before, after in pairwise(version for version in versions if version.isdigit()):
        if int(before) > int(after):
            return f"lists the weights {after} after {before}"
    return None


def _shown(versions: list[str]) -> str:
    return ", ".join(f"{version}: {len(list(run))}" for version, run in groupby(versions)) or "none"
