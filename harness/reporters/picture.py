"""A counterexample as a picture in numbers: every request on an axis of response tokens, beside the budget.

Derived from the recorded history; how it is drawn is up to who draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from harness.checkers import LOOP_RULE_IDS, Finding
from harness.checkers.trace import Exchange, Trace, Turn
from harness.history import Called
from harness.reporters import failure, rollouts
from harness.reporters.calls import after, ended, flag, planned
from harness.rollouts import Began, RolloutHistory
from harness.work import Run

FAR = 2
"""What is more than this many times as long as the rest would leave nothing of the rest to see."""

FIRST, LAST = 8, 18
"""Of a section with more rows, the first and the last are shown, and what is wrong between them."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A request, or ``times`` of them that are alike; ``times`` 0: the call asks nothing.

    With ``start`` response tokens in its input it asked for ``asked`` more (None: no limit), and got ``got``.
    ``after``: how many are on the sample when the call is over; None where it goes on, or had no end.
    """

    label: str
    start: int
    asked: int | None
    got: int
    end: str
    times: int = 1
    after: int | None = None
    said: str = ""
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something between the requests, such as an abort or new weights."""

    said: str
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under one budget. ``room``: how many response tokens the context leaves; None where it is unknown."""

    title: str
    budget: int
    room: int | None
    rows: tuple[Lane | Mark, ...]

    @property
    def limit(self) -> int:
        """Where nothing more may be asked for."""
        return self.budget if self.room is None else max(min(self.budget, self.room), 0)


@dataclass(frozen=True, slots=True)
class Picture:
    """``extent``: the number of response tokens at the end of the axis. ``wrong``: what is so of the whole run."""

    setting: str
    extent: int
    sections: tuple[Section, ...]
    wrong: str = ""

    def share(self, tokens: int) -> float:
        """Where on the axis so many tokens are, in percent; what lies beyond is at its end."""
        return round(100 * min(max(tokens, 0), self.extent) / self.extent, 2)

    def past(self, section: Section, lane: Lane) -> tuple[int, int] | None:
        """From where to where on the axis a request asks for, or gets, what is not its to have."""
        if not lane.times:
            return None
        begin = max(section.limit, lane.start)
        end = self.extent if lane.asked is None else lane.start + max(lane.asked, lane.got)
        return (begin, min(end, self.extent)) if end > begin else None


def of(run: Run, rule: str = "", finding: Finding | None = None) -> Picture:
    """The picture of a run, with the finding at its place. Without one nothing is marked."""
    if isinstance(run, RolloutHistory):
        sections, setting = tuple(_rollouts(run, rule, finding)), rollouts.setting(run)
    else:
        sections, setting = (_sample(Trace(run), finding),), failure.setting(run)
    whole = finding is not None and finding.attempt is None and rule not in LOOP_RULE_IDS
    wrong = finding.message if finding is not None and whole else ""
    return Picture(setting, _extent(sections), sections, wrong)


def _extent(sections: Sequence[Section]) -> int:
    """Where the axis ends: behind all that was got, and behind what was asked or has room if that is not too far."""
    lanes = [row for section in sections for row in section.rows if isinstance(row, Lane)]
    got = [n for lane in lanes for n in (lane.start + lane.got, lane.after or 0)]
    reach = max([1, *got, *(section.budget for section in sections)])
    asked = [inf if lane.asked is None else lane.start + lane.asked for lane in lanes]
    far = [*asked, *(section.room or 0 for section in sections)]
    seen = max([reach, *(int(n) for n in far if n <= FAR * reach)])
    gone = any(n > FAR * reach for n in asked)
    return max(seen, reach + (reach + 1) // 2) if gone else seen  # one should see such a request go on


def _sample(trace: Trace, finding: Finding | None) -> Section:
    room = None if trace.context is None else trace.context - trace.prompt
    rows: list[Lane | Mark] = []
    for sample, turn in sorted(trace.all_turns, key=lambda pair: (pair[1].index, pair[0])):
        here = finding is not None and (turn.index, sample) == (finding.attempt, finding.sample)
        label = f"attempt {turn.index + 1}" + (f", sample {sample + 1}" if trace.schedule.samples > 1 else "")
        rows += _lanes(trace, turn, label, finding.message if finding is not None and here else "")
    return Section("", trace.budget, room, _shortened(rows))


def _lanes(trace: Trace, turn: Turn, label: str, wrong: str) -> Iterator[Lane]:
    """The requests of a call; what is said of the whole call stands with the last."""
    held = None if turn.after is None else turn.after.response_length
    alike = [(key, len(list(group))) for key, group in groupby(turn.exchanges, lambda e: _numbers(trace, turn, e))]
    if not alike:
        yield Lane(label, turn.entry.response_length, 0, 0, flag(turn), 0, held, after(turn), wrong)
    for number, ((start, asked, got, end), times) in enumerate(alike):
        name = "then" if number else label
        if number < len(alike) - 1:
            yield Lane(name, start, asked, got, end, times)
        else:
            end = f"{', '.join(filter(None, [end, flag(turn)]))} {planned(turn)}".rstrip()
            yield Lane(name, start, asked, got, end, times, held, after(turn), wrong)


def _numbers(trace: Trace, turn: Turn, exchange: Exchange) -> tuple[int, int | None, int, str]:
    return trace.kept_at(turn, exchange), exchange.asked, len(exchange.ids), ended(exchange)


def _rollouts(run: RolloutHistory, rule: str, finding: Finding | None) -> Iterator[Section]:
    """A section a rollout, and one before the first if something happened there."""
    calls = rollouts.calls_of(run)
    title, number, budget = "", 0, run.scenario.budget
    rows: list[Lane | Mark] = []

    def section() -> Section:
        wrong = finding is not None and rule in LOOP_RULE_IDS and finding.rollout == number
        last = [Mark("", _of_whom(finding))] if finding is not None and wrong else []
        return Section(title, budget, None, _shortened([*rows, *last]))

    for event in run.events:
        if isinstance(event, Began):
            if rows or title:
                yield section()
            title, number, budget, rows = f"rollout {event.rollout}", event.rollout, event.budget, []
        elif isinstance(event, Called):
            place = (event.sample, event.attempt)
            here = finding is not None and rule not in LOOP_RULE_IDS and place == (finding.sample, finding.attempt)
            label, wrong = f"sample {event.sample + 1}", finding.message if finding is not None and here else ""
            rows += _lanes(*calls[place], label, wrong)
        elif said := rollouts.said(event).strip():
            rows.append(Mark(said))
    yield section()


def _of_whom(finding: Finding) -> str:
    who = f"sample {finding.sample + 1}: " if finding.sample >= 0 else ""
    return who + finding.message


def _shortened(rows: list[Lane | Mark]) -> tuple[Lane | Mark, ...]:
    if len(rows) <= FIRST + LAST + 1:
        return tuple(rows)
    between = rows[FIRST:-LAST]
    wrong = [row for row in between if row.wrong]
    return (*rows[:FIRST], Mark(f"... {len(between) - len(wrong)} rows more"), *wrong, *rows[-LAST:])
