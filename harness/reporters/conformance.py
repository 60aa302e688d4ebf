"""Where the mock engine is like a real server: for the terminal, and as a table for spec/sglang.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.conformance import AGREES, DIFFERS, ON_PURPOSE, Matrix, Row
from harness.probes import PROBES


def show(out: Any, matrix: Matrix, file: Path) -> None:
    """What was recorded, and every behaviour in which the mock differs."""
    found = Counter(row.verdict for row in matrix.rows)
    lines = [
        f"{file}: {len(matrix.rows)} behaviours of SGLang {matrix.real.sglang}",
        f"the mock engine: {found[AGREES]} agree, {found[ON_PURPOSE]} differ on purpose, {found[DIFFERS]} differ",
    ]
    for row in matrix.rows:
        if row.verdict == ON_PURPOSE:
            lines.append(f"  {row.behaviour} differs on purpose: {'; '.join(row.reasons)}")
        lines += [f"  {row.behaviour} differs: {one}" for one in row.differences if not one.reason]
    reasons: dict[str, list[str]] = {}
    for name, reason in matrix.skipped:
        reasons.setdefault(reason, []).append(name)
    lines += [f"  not asked, {reason}: {', '.join(names)}" for reason, names in reasons.items()]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(columns: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """A table: a row for each behaviour that was recorded anywhere, a column for each set of rows; then the reasons."""
    verdicts = {(row.behaviour, title): row for title, rows in columns for row in rows}
    reasons: list[str] = []
    lines = [
        "| behaviour | " + " | ".join(title for title, _ in columns) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for names in _pairs():
        cells = [_cell([verdicts[n, title] for n in names if (n, title) in verdicts], reasons) for title, _ in columns]
        if any(cells):
            lines.append(" | ".join(["| " + ", ".join(f"`{name}`" for name in names), *cells]) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _pairs() -> list[tuple[str, ...]]:
    """The behaviours; a plain request's beside the stream's."""
    pairs: dict[str, list[str]] = {}
    for one in PROBES:
        pairs.setdefault(one.name.removesuffix("_stream").replace("stream_", "plain_"), []).append(one.name)
    return [tuple(names) for names in pairs.values()]


def _cell(rows: Sequence[Row], reasons: list[str]) -> str:
    """The verdict on a pair; a reason is its number among those before, which grow."""
    said = []
    for row in rows:
        for reason in row.reasons:
            if reason not in reasons:
                reasons.append(reason)
        numbers = ", ".join(str(reasons.index(reason) + 1) for reason in row.reasons)
        said.append(row.verdict + (f" ({numbers})" if numbers else ""))
    return "; ".join(dict.fromkeys(said))
