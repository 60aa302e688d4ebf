"""The report as JSON (``spec/schemas/report.schema.json``)."""

from __future__ import annotations

import json
from typing import Any

from harness.check import Report
from harness.reporters.violations import Violations
from harness.version import version
from harness.work import to_json


def data(report: Report, violations: Violations) -> dict[str, Any]:
    """The report as JSON data."""
    options = report.options
    return {
        "tool": "rolloutcheck",
        "version": version(),
        "target": report.ready.name.partition("@")[0],
        "revision": options.target.revision or None,
        "engine": ",".join(options.engines),
        "profile": options.profile,
        "seed": options.seed,
        "complete": report.complete,
        "covered": None
        if report.covered is None
        else {"schedules": report.covered.schedules, "of": report.covered.of, "scope": options.scope},
        "skipped": [{"reason": reason, "runs": runs} for reason, runs in report.skipped],
        "stubbed": list(report.ready.stubbed),
        "results": [
            {
                "rule": r.rule,
                "level": r.level,
                "mode": r.mode,
                "engine": r.engine,
                "verdict": r.verdict,
                "schedules": r.schedules,
                "counterexample": None
                if r.counterexample is None
                else {
                    **to_json(r.counterexample.schedule),
                    "summary": violations[i].summary,
                    "replay": violations[i].replay,
                },
                "reason": r.reason,
                "faulty_engine": r.faulty_engine,
                "on": r.on,
                "kinds": dict(r.kinds),
            }
            for i, r in enumerate(report.results)
        ],
        "duration_s": round(report.duration_s, 3),
    }


def text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
