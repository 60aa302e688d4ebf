"""The recorded servers: SGLang 0.5.23 with four sets of options, and 0.5.9 with --stream-output, which cannot run here.

Those of 0.5.23 were written by ``rolloutcheck record --disruptive``; 0.5.9 was put into the same form from what was
recorded before there was that command. Two small random Llamas served them on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from harness import record
from harness.record import Recording

FOLDER = Path(__file__).with_name("recorded")
SERVERS = ("0.5.23", "0.5.23-context256", "0.5.23-incremental", "0.5.23-queue", "0.5.9")


@lru_cache
def recording(name: str) -> Recording:
    return record.read(FOLDER / f"{name}.jsonl")
