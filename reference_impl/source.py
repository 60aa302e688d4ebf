"""Where groups of samples come from, and where they wait to be continued.

A group is the answers to one prompt. A member of it is a sample, or a list of
samples where a custom generate function makes several of one.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Sequence
from pathlib import Path

from reference_impl.sample import Sample

Member = Sample | list[Sample]
Group = list[Member]


def samples(member: Member) -> list[Sample]:
    """The samples of one member."""
    return member if isinstance(member, list) else [member]


def finished(member: Member) -> bool:
    """Whether nothing is generated for this member any more."""
    return all(sample.finished for sample in samples(member))


def restarted(member: Member) -> Sample:
    """The member as it began: one sample without a response. What it was fanned out into is part of the response."""
    sample = samples(member)[0]
    sample.restart()
    return sample


class DataSource:
    """Groups of samples: unfinished ones from the buffer first, then new ones from the prompts, over and over."""

    def __init__(self, prompts: Sequence[str], group_size: int) -> None:
        if not prompts or group_size < 1:
            raise ValueError(f"{len(prompts)} prompts for groups of {group_size}")
        self.prompts, self.group_size = prompts, group_size
        self.buffer: list[Group] = []
        self._position = self._index = 0  # groups and samples made so far

    def get_samples(self, count: int) -> list[Group]:
        """``count`` groups. New samples have an ``index`` that no other sample of this source has."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken + [self._new() for _ in range(count - len(taken))]

    def _new(self) -> Group:
        prompt, first = self.prompts[self._position % len(self.prompts)], self._index
        self._index += self.group_size
        self._position += 1
        return [Sample(self._position - 1, index, prompt) for index in range(first, self._index)]

    def add_samples(self, groups: list[Group]) -> None:
        """Puts groups behind those that wait. Raises ValueError, and takes none, when one has a wrong size."""
        for group in groups:
            if len(group) != self.group_size:
                raise ValueError(f"a group of {len(group)} among groups of {self.group_size}")
        self.buffer.extend(groups)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything as JSON, to a file beside ``path`` first: no crash leaves half of it."""
        buffer = [[[s.to_dict() for s in m] if isinstance(m, list) else m.to_dict() for m in g] for g in self.buffer]
        text = json.dumps({"position": self._position, "index": self._index, "buffer": buffer})
        beside = Path(f"{os.fspath(path)}.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """The inverse of `save`. Raises ValueError, and changes nothing, when the file is damaged."""
        read, fresh = Sample.from_dict, type(self)(self.prompts, self.group_size)
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            position, index = operator.index(data["position"]), operator.index(data["index"])
            saved = data["buffer"]
            fresh.add_samples([[[read(s) for s in m] if isinstance(m, list) else read(m) for m in g] for g in saved])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)} holds no saved samples: {type(error).__name__}: {error}") from error
        self._position, self._index, self.buffer = position, index, fresh.buffer
