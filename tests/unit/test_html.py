"""The pages: what they say, that they escape it, and that they need nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import spec
from harness.adapt import BECOMES
from harness.check import INTERRUPTED, Covered, Report
from harness.checkers import Finding
from harness.engines.proxy import CARRIED
from harness.history import INCREMENTAL, PLAIN, STREAM
from harness.options import Options
from harness.reporters import verdicts, violations
from harness.reporters.html import Coverage, coverage, figures, page, scan_page
from harness.revisions import Revision
from harness.scan import Broken, Range, Scan
from harness.scenario import STEPS
from harness.schedule import FAULTY_ENGINE, KINDS, Schedule
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result
from tests.unit import loop_histories as loops
from tests.unit.histories import Ask, Life, view
from tests.unit.reports import HOSTILE, report, result

VOID = {"meta", "link", "br", "col", "rect", "line", "path"}


class Tree(HTMLParser):
    """A page read back. ``texts`` are by the element they stand in; fails where tags do not pair."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def example(mode: str = PLAIN, asked: int = 2, *others: Life, budget: int = 2) -> Counterexample:
    """A resume that asks for the whole budget, or for ``asked``."""
    life = Life(budget=budget, mode=mode).call(Ask(2, (5,), "abort"), after=view((5,)))
    life.call(Ask(asked, (6,), "length"), after=view((5, 6)))
    finding = Finding(1, "may ask at most 1")
    return Counterexample(Schedule(budget=budget), finding, life.history, tuple(o.history for o in others))


def broken(rule: str = "BUDGET", mode: str = PLAIN, **more: Any) -> Result:
    return result(rule, mode, INVALID, "may ask at most 1", **{"counterexample": example(mode), **more})


def shown(told: Report, **options: bool) -> Tree:
    found = {place: replace(v, replay=f"rolloutcheck replay {place}.json") for place, v in violations.of(told).items()}
    return Tree(page(told, found, **options))


# the page of a report


def test_what_was_checked() -> None:
    told = replace(report(result("BUDGET")), covered=Covered(5, 10), skipped=(("no worker", 1), ("no lists", 2)))
    tree = shown(told)
    assert tree.said("dt")[:7] == ["target", "revision", "engine", "profile", "seed", "duration", "covered"]
    assert tree.said("dd")[:7] == ["slime", "1eed249", "inproc", "quick", "4", "1.2 s", "5 of 10 schedules drawn, 50%"]
    assert {"1 run left out: no worker", "2 runs left out: no lists"} <= set(tree.said("p"))
    assert "Interrupted:" not in tree.said("strong")


@pytest.mark.parametrize(
    ("told", "strict", "badge"),
    [
        (report(result("BUDGET")), False, "✓ conforms"),
        (report(broken()), False, "✗ violates"),
        (report(result("BUDGET"), broken("RETRY")), False, "✓ conforms"),
        (report(result("BUDGET"), broken("RETRY")), True, "✗ violates"),
        (report(result("BUDGET", PLAIN, UNKNOWN, "hang")), False, "? cannot be judged"),
        (replace(report(broken()), complete=False), False, "? interrupted"),
    ],
)
def test_the_headline_says_what_the_exit_status_says(told: Report, strict: bool, badge: str) -> None:
    assert badge in shown(told, strict=strict).said("span")


def test_an_interruption_and_what_is_unknown_are_said() -> None:
    told = report(result("BUDGET", PLAIN, UNKNOWN, INTERRUPTED), result("STATUS", PLAIN, UNKNOWN, "hang"))
    tree = shown(replace(told, complete=False))
    assert "Interrupted:" in tree.said("strong")
    assert tree.said("li") == ["unknown: what was not finished: interrupted", "unknown: STATUS plain: hang"]
    assert "? unknown 9" in tree.said("td")


def test_a_verdict_leads_to_its_violation_and_a_rule_to_its_statement() -> None:
    told = report(broken(), result("STATUS", STREAM), broken(faulty_engine=True), result("BUDGET", on="rollout"))
    tree = shown(told)
    links, ids = [a["href"] for a in tree.all("a")], [a["id"] for _, a in tree.tags if "id" in a]
    assert {"#rule-BUDGET", "#rule-STATUS", "#broken-BUDGET", "#broken-BUDGET-faulty-engine"} <= set(links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert len(ids) == len(set(ids))
    assert spec.RULES["BUDGET"].statement in tree.said("p")
    assert {source.url for source in spec.RULES["BUDGET"].sources} <= set(links)
    assert tree.said("td").count("not judged") == 2


def test_a_violation_has_its_screen_its_command_and_its_picture() -> None:
    tree = shown(report(broken(), broken(mode=STREAM), result("STATUS")))
    assert tree.said("pre") == [
        "prompt 3, budget 2, context unknown attempt 1 asked 2 got 1 abort aborted with 1 "
        "attempt 2 asked 2 got 1 length aborted with 2 <- may ask at most 1 "
        "also stream inproc why spec/README.md#BUDGET, THUDM/slime#2260, THUDM/slime#2003"
    ]
    assert "rolloutcheck replay 0.json" in tree.said("code")
    assert len(tree.all("figure")) == 1
    assert tree.said("strong")[0] == "plain, stream: ✗ broken"
    labels = [a["aria-label"] for a in tree.all("svg") if a.get("class") == "plot"]
    assert labels == [
        "attempt 1: 0 kept, asked 2, got 1; afterwards 1 on the sample",
        "attempt 2: 1 kept, asked 2, got 1, past the limit of 2; afterwards 2 on the sample",
    ]


def test_each_schedule_that_breaks_a_rule_has_its_own_picture() -> None:
    other = example(STREAM, 2, budget=1)
    tree = shown(report(broken(), broken(mode=STREAM, counterexample=other), broken(mode=INCREMENTAL)))
    assert [a["id"] for a in tree.all("article")] == ["broken-BUDGET", "broken-BUDGET-2"]
    assert [text for text in tree.said("code") if text.startswith("rolloutcheck")] == [
        "rolloutcheck replay 0.json",
        "rolloutcheck replay 1.json",
    ]
    first, second = tree.said("pre")
    assert "also stream inproc, incremental inproc" in first and "also" not in second


def test_without_violations_there_is_no_such_section() -> None:
    tree = shown(report(result("BUDGET")))
    assert not tree.all("article") and "Violations" not in tree.said("h2")


ODD = {
    "no limit": (Ask(params={"max_new_tokens": None}), "asked no limit, got 0, past the limit of 4"),
    "more than all there is": (Ask(2**32), "asked 4294967296, got 0, past the limit of 4"),
    "less than nothing": (Ask(-1), "asked -1, got 0"),
    "more got than asked": (Ask(4, (1,) * 6, "length"), "asked 4, got 6, past the limit of 4"),
    "nothing": (None, "asks nothing"),
}


@pytest.mark.parametrize(("ask", "label"), ODD.values(), ids=ODD)
def test_odd_requests_are_drawn(ask: Ask | None, label: str) -> None:
    life = Life(budget=4, context=9).call(*([ask] if ask else []), after=view((1,) * len(ask.got if ask else ())))
    one = Counterexample(Schedule(), Finding(0, "no"), life.history)
    tree = shown(report(broken(counterexample=one)))
    (found,) = [a["aria-label"] for a in tree.all("svg") if a.get("class") == "plot"]
    assert found.startswith(f"attempt 1: 0 kept, {label}")
    beyond = any(a.get("class") == "beyond" for a in tree.all("path"))
    assert beyond == (ask is not None and ask.finish is None and label[6] in "n4")
    for attrs in [*tree.all("rect"), *tree.all("line")]:
        places = [float(v[:-1]) for v in attrs.values() if re.fullmatch(r"[\d.]+%", v)]
        assert all(0 <= place <= 100 for place in places), attrs


@pytest.mark.parametrize(
    ("context", "lines", "said"),
    [(9, 3, ["context full at 6"]), (1, 3, ["context full before"]), (9000, 0, []), (None, 0, [])],
)
def test_the_context_is_drawn_where_it_is_near(context: int | None, lines: int, said: list[str]) -> None:
    life = Life(budget=4, context=context).call(Ask(4), Ask(3))
    tree = shown(report(broken(counterexample=Counterexample(Schedule(), Finding(0, "no"), life.history))))
    assert sum(a["class"] == "context" for a in tree.all("line")) == lines + 1  # one is the legend's
    assert tree.said("text") == ["budget 4", *said]


def test_what_the_sample_holds_past_the_limit_is_drawn_thick() -> None:
    life = Life(budget=2).call(Ask(2, (5, 6, 7), "length"), after=view((5, 6, 7)))
    tree = shown(report(broken(counterexample=Counterexample(Schedule(), Finding(0, "no"), life.history))))
    _, thick = [a for a in tree.all("rect") if a["class"] == "beyond"] or [{}, {}]
    assert (thick["x"], thick["width"], thick["height"]) == ("66.67%", "33.33%", "5")


def test_whole_rollouts_are_drawn() -> None:
    run = loops.history(loops.began(), loops.call(0), loops.ended(), loops.began(2), loops.call(1))
    one = Counterexample(Schedule(), Finding(None, "is lost", 0, 2), run)
    tree = shown(report(result("GROUP", PLAIN, INVALID, "is lost", counterexample=one, on="rollout")))
    assert [t for t in tree.said("p") if t.startswith("rollout ")] == ["rollout 1", "rollout 2"]
    assert "✗ sample 1: is lost" in tree.said("strong")


def test_it_is_escaped_whatever_a_target_says() -> None:
    evil = f"</pre><script>alert(1)</script><img src=x onerror=1> {{{{ 7 * 7 }}}} {HOSTILE}"
    hurt = example()
    life = Life(budget=2).call(Ask(2, (5,), fault=evil, code=400), raises=evil)
    hurt = Counterexample(Schedule(), Finding(0, evil), life.history)
    told = report(
        broken(counterexample=hurt), result("STATUS", PLAIN, UNKNOWN, evil), name=f"{evil}@{evil}", revision=evil
    )
    text = page(replace(told, skipped=((evil, 1),)), violations.of(told))
    tree = Tree(text)
    assert not tree.all("script") and not tree.all("img")
    assert "49" not in text.replace("1eed249", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", text)
    text.encode()


@pytest.mark.parametrize(
    "text", [page(report(result("BUDGET")), {}), page(report(broken()), violations.of(report(broken())))]
)
def test_it_needs_no_network_and_no_script(text: str) -> None:
    tree = Tree(text)
    assert not {tag for tag, _ in tree.tags} & {"script", "img", "iframe", "object", "form"}
    assert [a["href"] for a in tree.all("link")] == ["data:,"]
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert {a["href"].partition(":")[0] for a in tree.all("a")} <= {"https"} | {
        a["href"] for a in tree.all("a") if a["href"].startswith("#")
    }


def test_every_picture_has_a_name_and_every_heading_cell_its_scope() -> None:
    for text in (page(report(broken()), violations.of(report(broken()))), scan_page(SCAN)):
        tree = Tree(text)
        for attrs in tree.all("svg"):
            assert "aria-label" in attrs or "aria-hidden" in attrs or "overflow" in attrs  # nested in one that has
        assert all(a.get("scope") for a in tree.all("th"))


# figures


def drawn(rule: str, examples: dict[str, Counterexample]) -> Iterator[tuple[str, bool, str]]:
    for one in figures(rule, examples):
        yield ", ".join(one.modes), one.broken, "".join(row.wrong for s in one.drawn.sections for row in s.rows)


def test_a_picture_that_is_the_same_in_several_modes_is_drawn_once() -> None:
    right = [Life(budget=2, mode=m).call(Ask(2, (5, 6), "length")) for m in (STREAM, INCREMENTAL)]
    assert list(drawn("BUDGET", {PLAIN: example(PLAIN, 2, *right)})) == [
        ("plain", True, "may ask at most 1"),
        ("stream, incremental", False, ""),
    ]


def test_the_modes_of_a_schedule_have_one_axis() -> None:
    right = Life(budget=2, mode=STREAM).call(Ask(2, (5, 6), "length"))
    assert [one.drawn.extent for one in figures("BUDGET", {PLAIN: example(PLAIN, 2, right)})] == [3, 3]


def test_a_mode_in_which_the_rule_is_broken_too_is_drawn_so() -> None:
    right = Life(budget=2, mode=INCREMENTAL).call(Ask(2, (5, 6), "length"))
    wrong = Life(budget=2, mode=PLAIN).call(Ask(3))
    examples = {STREAM: example(STREAM, 2, wrong, right), PLAIN: example(PLAIN, 3)}
    assert list(drawn("BUDGET", examples)) == [
        ("plain", True, "may ask at most 1"),
        ("stream", True, "may ask at most 1"),
        ("incremental", False, ""),
    ]


# coverage


def test_the_kinds_that_interrupted_a_rule() -> None:
    results = [
        result("BUDGET", kinds=(("abort", 3), ("http", 1))),
        result("BUDGET", STREAM, kinds=(("abort", 2),)),
        result("STATUS", kinds=(("flag", 1),)),
    ]
    found = coverage(verdicts.SAMPLES, results)
    kinds = list(found.kinds)
    assert kinds == [kind for kind in KINDS if kind not in FAULTY_ENGINE and kind not in BECOMES.values()]
    assert {k: n for k, n in zip(kinds, found.rows["BUDGET"], strict=True) if n} == {"abort": 5, "http": 1}
    assert {k: n for k, n in zip(kinds, found.rows["STATUS"], strict=True) if n} == {"flag": 1}
    assert found.never == tuple(kind for kind in kinds if kind not in ("abort", "http", "flag"))


def test_of_a_server_is_expected_what_it_can_be_made_to_do() -> None:
    """And what was seen is shown, whether it was expected or not."""
    one = result("BUDGET", kinds=(("abort-request", 3), ("abort-late", 1)))
    results = [replace(one, engine="http://127.0.0.1:1")]
    found = coverage(verdicts.SAMPLES, results)
    assert set(found.kinds) == CARRIED | {"abort-late"}
    assert set(found.never) == CARRIED - {"abort-request"}
    both = coverage(verdicts.SAMPLES, [*results, result("BUDGET", kinds=(("abort", 1),))])
    assert set(both.kinds) == CARRIED | {"abort-late", "abort"}


def test_of_a_faulty_engine_its_faults_are_looked_for() -> None:
    found = coverage(verdicts.FAULTY, [result("ALIGN", kinds=(("abort", 1), ("missing", 2)))])
    assert found == Coverage(
        {kind: KINDS[kind] for kind in ("abort", "missing", "over-deliver", "lost-ids")},
        {"ALIGN": (1, 2, 0, 0)},
        ("over-deliver", "lost-ids"),
    )


def test_of_whole_rollouts_the_steps() -> None:
    found = coverage(verdicts.ROLLOUTS, [result("GROUP", kinds=(("abort", 1),))])
    assert found.kinds == STEPS and len(found.never) == len(STEPS) - 1


def test_what_never_happened_is_marked() -> None:
    tree = shown(report(result("BUDGET", kinds=(("abort", 3),))))
    assert "abort" in tree.said("span") and "http (never)" in tree.said("span")
    assert any(text.startswith("In no schedule: run, abort-late") for text in tree.said("p"))
    all_of_them = tuple((kind, 1) for kind in STEPS)
    assert not any(
        "In no schedule" in t for t in shown(report(result("GROUP", on="rollout", kinds=all_of_them))).said("p")
    )


# the page of a timeline

EVIL = "<img src=x onerror=alert(1)> \x1b \ud800"
REVISIONS = tuple(
    Revision(f"{i:x}" * 40, f"{i:x}" * 7, f"2025-0{1 + i // 5}-1{i % 5}", f"change {i}" if i else EVIL)
    for i in range(9)
)
BROKEN = Broken(Schedule(), ("BUDGET violated", EVIL), "x.json", "rolloutcheck replay x.json")
SCAN = Scan(
    Options(TargetSpec("slime")),
    REVISIONS,
    20,
    {
        ("BUDGET", PLAIN): (Range(0, 5, VALID), Range(6, 7, INVALID, "", (BROKEN, BROKEN)), Range(8, 8, VALID)),
        ("BUDGET", STREAM): (Range(0, 7, UNKNOWN, EVIL), Range(8, 8, "absent", "no streaming")),
        ("STATUS", PLAIN): (Range(0, 8, VALID),),
        ("ALIGN", PLAIN): (Range(0, 8, INVALID, "", (replace(BROKEN, replay=""),)),),
        ("TEXT", PLAIN): (Range(0, 0, UNKNOWN, "it hangs"), Range(1, 8, VALID)),
    },
    12.34,
)


def test_a_timeline() -> None:
    tree = Tree(scan_page(SCAN))
    assert tree.said("h1") == ["slime through 20 revisions"]
    assert tree.said("dd")[:2] == ["0000000 (2025-01-10)", "8888888 (2025-02-13)"] and "12.3 s" in tree.said("dd")
    months = [(a["title"], a["colspan"]) for a in tree.all("th") if a.get("class") == "month"]
    assert months == [("2025-01", "5"), ("2025-02", "4")]
    cells = [(a["class"], a["colspan"], a["title"]) for a in tree.all("td") if "colspan" in a]
    assert cells[:3] == [
        ("stretch valid", "6", "BUDGET plain: valid, 0000000 (2025-01-10) to 5555555 (2025-02-10), 6 revisions"),
        ("stretch invalid", "2", "BUDGET plain: invalid, 6666666 (2025-02-11) to 7777777 (2025-02-12), 2 revisions"),
        ("stretch valid", "1", "BUDGET plain: valid, 8888888 (2025-02-13)"),
    ]
    assert sum(int(colspan) for _, colspan, _ in cells) == 5 * 9
    assert "Valid throughout: STATUS plain." in tree.said("p")
    assert {"✗ invalid", "? unknown", "✓ valid", "– absent"} <= set(tree.said("td"))


def test_the_ranges_of_a_timeline_lead_to_what_breaks_them() -> None:
    tree = Tree(scan_page(SCAN))
    links, ids = {a["href"] for a in tree.all("a")}, [a["id"] for _, a in tree.tags if "id" in a]
    assert {"#broken-BUDGET-plain-6", "#broken-ALIGN-plain-0", "#revision-9", "#rule-TEXT"} <= links
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids) and len(ids) == len(set(ids))
    assert tree.said("a").count(str(Schedule())) == 3
    assert "it hangs" in tree.said("td")
    assert tree.said("code").count("rolloutcheck replay x.json") == 2
    assert tree.said("h3")[:2] == [
        "BUDGET plain: 6666666 (2025-02-11) to 7777777 (2025-02-12), 2 revisions",
        "ALIGN plain: 0000000 (2025-01-10) to 8888888 (2025-02-13), 9 revisions",
    ]


def test_a_timeline_is_escaped() -> None:
    text = scan_page(SCAN)
    assert not Tree(text).all("img") and r"alert(1)&gt; \x1b \ud800" in text
    text.encode()


def test_a_timeline_on_which_nothing_changes() -> None:
    tree = Tree(scan_page(replace(SCAN, rows={("STATUS", PLAIN): (Range(0, 8, VALID),)}, complete=False)))
    assert "Interrupted:" in tree.said("strong")
    assert "What is broken" not in tree.said("h2") and len(tree.all("table")) == 2


def test_a_timeline_that_was_interrupted_before_anything_was_known() -> None:
    tree = Tree(scan_page(replace(SCAN, revisions=(), rows={}, complete=False)))
    assert tree.said("h1") == ["slime through 20 revisions"]


def test_a_timeline_without_anything_steady() -> None:
    rows = {("BUDGET", PLAIN): SCAN.rows["BUDGET", PLAIN]}
    assert not any("throughout" in text for text in Tree(scan_page(replace(SCAN, rows=rows))).said("p"))
