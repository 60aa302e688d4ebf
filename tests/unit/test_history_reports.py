"""What a bisection and a scan look like, on the terminal and as JSON."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.bisect import FIRST_BAD, FIRST_GOOD, Bisection
from harness.history import PLAIN, STREAM
from harness.judged import ABSENT, Broken
from harness.options import Options
from harness.reporters import history
from harness.revisions import Revision
from harness.scan import Range, Scan
from harness.schedule import Schedule
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID

LINE = [Revision(f"{i:040x}", f"{i:09x}", f"2026-01-{i + 1:02}", f"subject [{i}]") for i in range(30)]
BROKEN = Broken(
    Schedule(), ("BUDGET violated   slime@x", "  call", "  why      spec"), "f/B.json", "rolloutcheck replay f/B.json"
)
FOUND = Bisection(
    row=("BUDGET", PLAIN),
    direction=FIRST_BAD,
    old=LINE[0],
    new=LINE[29],
    revisions=30,
    found=LINE[5],
    before=LINE[4],
    candidates=(),
    steps=7,
    skipped=((LINE[8], "no disk"), (LINE[9], "no disk")),
    bad=LINE[5],
    broken=BROKEN,
    holds=("BUDGET holds   slime@y", "  call"),
    duration_s=12.34,
)


def shown(found: Bisection | Scan) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100)
    if isinstance(found, Scan):
        history.show_scan(console, found)
    else:
        history.show_bisection(console, found)
    return out.getvalue()


def test_a_bisection_on_one_screen() -> None:
    assert shown(FOUND) == (
        "BUDGET   plain   000000000 .. 00000001d   30 revisions, 7 run   12.3 s\n"
        "first bad: 000000005 2026-01-06 subject [5]\n"
        "skipped 000000008, 000000009: no disk\n"
        "\n"
        "BUDGET violated   slime@x\n"
        "  call\n"
        "  replay   rolloutcheck replay f/B.json\n"
        "  why      spec\n"
        "\n"
        "BUDGET holds   slime@y\n"
        "  call\n"
    )


def test_what_nothing_tells_apart_is_listed() -> None:
    found = replace(FOUND, found=None, candidates=tuple(LINE[5:28]), direction=FIRST_GOOD, skipped=(), holds=())
    text = shown(replace(found, broken=replace(BROKEN, replay="")))
    assert "first good: one of the 23 revisions after 000000004\n  000000005 2026-01-06 subject [5]\n" in text
    assert "  ... 3 more\n" in text and "holds" not in text and "replay" not in text
    data = history.bisection(found)
    assert (data["revision"], data["commit"], data["date"], data["subject"]) == (None,) * 4
    assert len(data["candidates"]) == 23
    assert (data["old"]["verdict"], data["new"]["verdict"]) == (INVALID, VALID)


def test_few_that_nothing_tells_apart_are_all_listed() -> None:
    text = shown(replace(FOUND, found=None, candidates=tuple(LINE[5:7])))
    assert "one of the 2 revisions after 000000004\n" in text and "more" not in text


def test_a_fault_that_was_followed_is_said_to_be_one_of_several() -> None:
    text = shown(replace(FOUND, follows=True))
    assert f"both ends break BUDGET; this is where [{Schedule()}] changed\n" in text


SCAN = Scan(
    Options(TargetSpec("slime"), profile="quick", seed=3),
    tuple(LINE),
    45,
    {
        ("BUDGET", PLAIN): (
            Range(0, 9, VALID),
            Range(10, 19, INVALID, "", (BROKEN, replace(BROKEN, file=""))),
            Range(20, 29, UNKNOWN, "it hangs"),
        ),
        ("BUDGET", STREAM): (Range(0, 29, ABSENT, "no streaming"),),
    },
    65.4,
)


def test_a_timeline_has_a_line_each_time_something_changes() -> None:
    assert shown(SCAN) == (
        "slime   000000000 2026-01-01 .. 00000001d 2026-01-30   30 clients in 45 revisions   "
        "profile quick   seed 3   65.4 s\n"
        "\n"
        "BUDGET plain\n"
        "  2026-01-01 000000000   valid      10   subject [0]\n"
        "  2026-01-11 00000000a   invalid    10   subject [10]\n"
        f"      [{Schedule()}]   f/B.json\n"
        f"      [{Schedule()}]\n"
        "  2026-01-21 000000014   unknown    10   subject [20]\n"
        "      it hangs\n"
        "\n"
        "BUDGET stream\n"
        "  2026-01-01 000000000   absent     30   subject [0]\n"
        "      no streaming\n"
    )


def test_a_timeline_that_was_interrupted_before_there_was_any() -> None:
    assert shown(replace(SCAN, revisions=(), rows={})) == "no revision\n"


@pytest.mark.parametrize("complete", [True, False])
def test_a_timeline_as_data(complete: bool) -> None:
    data = history.scan(replace(SCAN, complete=complete))
    assert data["complete"] is complete and data["commits"] == 45 and len(data["revisions"]) == 30
    valid, invalid, unknown = data["rules"]["BUDGET"]["plain"]
    assert (valid["from"], valid["to"], valid["revisions"]) == ("000000000", "000000009", 10)
    assert [example["replay"] for example in invalid["counterexamples"]] == ["rolloutcheck replay f/B.json"] * 2
    assert unknown["reason"] == "it hangs" and unknown["counterexamples"] == []
