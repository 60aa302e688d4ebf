"""The mock beside the real server, asked the same: no difference that has no reason (spec/sglang.md)."""

from __future__ import annotations

from harness.conformance import DIFFERS, matrix
from tests.real.conftest import URL
from tests.real.server import INCREMENTAL, ONE_PLACE, SMALL, Server, other_flags

STREAMS = ("stream_logprob", "stream_nologprob", "max0_stream", "eos_first_stream", "stopstr_trim_stream")
ABORTS = ("abort_all", "pause_retract", "pause_retract_then_abort_all", "weight_version_mid")
QUEUE = ("abort_queued", "queue_full", "retract_queue_full")
"""What a server with the usual flags has not. `rolloutcheck record` asks such a server about everything."""


def unexplained(server: Server, *only: str) -> list[str]:
    """What differs, in words. A server that others use is not paused, flushed or aborted as a whole."""
    found = matrix(server.url, disruptive=not URL, only=only)
    rows = found.rows
    assert len(rows) == len(only) or (not only and len(rows) > 100), found.skipped
    return [f"{row.behaviour}: {one}" for row in rows if row.verdict == DIFFERS for one in row.differences]


def test_by_default(real: Server) -> None:
    assert unexplained(real) == []


@other_flags(*SMALL)
def test_in_a_small_context(other: Server) -> None:
    assert unexplained(other) == []


@other_flags(*INCREMENTAL)
def test_incremental_streams(other: Server) -> None:
    assert unexplained(other, *STREAMS, *ABORTS) == []


@other_flags(*ONE_PLACE)
def test_a_full_queue(other: Server) -> None:
    assert unexplained(other, *QUEUE) == []
