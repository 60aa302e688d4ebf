"""The forms of a report that are files, each made only if it is asked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.check import Report
from harness.reporters.violations import Violations


def of(
    report: Report, violations: Violations, *, strict: bool, json: Path | None, junit: Path | None, html: Path | None
) -> Iterator[tuple[Path, str]]:
    """Each file that is asked for, and its text."""
    if json is not None:
        from harness.reporters import jsonfile

        yield json, jsonfile.text(jsonfile.data(report, violations))
    if junit is not None:
        from harness.reporters import junit as xml

        yield junit, xml.text(report, violations, strict=strict)
    if html is not None:
        from harness.reporters.html import page

        yield html, page(report, violations, strict=strict)


def tell_github(report: Report, violations: Violations, *, strict: bool) -> None:
    """Annotations, on standard error since the report may have the other stream; and the job's summary."""
    from harness.reporters import github

    with contextlib.suppress(OSError):  # a runner whose disk is full changes no verdict
        for line in github.annotations(report, violations, strict=strict):
            print(line, file=sys.stderr)
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(github.summary(report, violations, strict=strict))
