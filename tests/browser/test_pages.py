"""The pages in a real browser: in dark and in light, on a phone and on a desk, with a keyboard and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.check import Report
from harness.checkers import Finding
from harness.history import COMPLETED, MODES, PLAIN, STREAM
from harness.isolation import Ready
from harness.options import Options
from harness.reporters import html, violations
from harness.revisions import Revision
from harness.rollouts import Aborting, Updated
from harness.scan import Broken, Range, Scan
from harness.schedule import Schedule
from harness.targets.spec import TargetSpec
from harness.verdict import INVALID, UNKNOWN, VALID, Counterexample, Result
from tests.unit import loop_histories as loops
from tests.unit.histories import Ask, Life, view
from tests.unit.reports import HOSTILE

api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs an installed Chromium or Chrome")

PHONE, DESK = 360, 1180
SIZES = {"phone": PHONE, "desk": DESK}


# what is shown


def counterexample(mode: str = PLAIN, message: str = "may ask at most 5375") -> Counterexample:
    """The numbers of the issue, and beside them a mode that keeps the rule."""
    life = Life(budget=24576, context=40960, mode=mode).call(
        Ask(24576, (7,) * 19201, "abort"), after=view((7,) * 19201)
    )
    life.call(*[Ask(24576, fault="http", code=400)] * 60, raises="HTTPStatusError")
    right = Life(budget=24576, context=40960, mode=STREAM)
    right.call(Ask(24576, (7,) * 19201, "abort"), after=view((7,) * 19201))
    right.call(Ask(5375, (7,) * 5, "stop"), after=view((7,) * 19206, COMPLETED))
    return Counterexample(Schedule(budget=24576), Finding(1, message), life.history, (right.history,))


def odd() -> Counterexample:
    """Two samples: no limit, several requests in a call, less than nothing."""
    life = Life(budget=4, samples=2).call(Ask(params={"max_new_tokens": None}), flag=True)
    life.call(Ask(4, (1,), fault="drop-inside"), Ask(2**32 - 1), Ask(-1), sample=1, attempt=0, after=view((1,)))
    return Counterexample(Schedule(budget=4), Finding(0, "asks for no limit " + "x" * 90, 1), life.history)


def rollouts() -> Counterexample:
    one = view((5,))
    first = [loops.began(), *loops.call(0), Updated("1"), Aborting(1), *loops.call(1, finish="abort"), loops.ended()]
    run = loops.history(first, loops.began(2), loops.call(1, 1, before=one, asked=4, ids=(6,)))
    return Counterexample(Schedule(), Finding(1, "is lost", 1, 2), run)


def report(*results: Result, name: str = "slime@1eed249", **more: Any) -> Report:
    made = Report(Ready(name, MODES, {}, ()), Options(TargetSpec("slime", revision="1eed249")), results, 9.9)
    return replace(made, **more)


def valid(*rules: str, **more: Any) -> list[Result]:
    kinds = (("abort", 120), ("flag", 7), ("drop-inside", 31))
    return [Result(rule, "MUST", mode, "inproc", VALID, 300, kinds=kinds, **more) for rule in rules for mode in MODES]


def broken(rule: str, example: Counterexample, mode: str = PLAIN, **more: Any) -> Result:
    return Result(rule, "MUST", mode, "inproc", INVALID, 91, example.finding.message, example, **more)


MANY = ("MAXIMAL", "CONTEXT", "EXHAUSTED", "PREFIX", "RESUME-EQ", "STATUS", "ALIGN", "TEXT", "NO-ALIAS")
REPORTS = {
    "one violation": report(broken("BUDGET", counterexample()), *valid(*MANY)),
    "ten violations": report(broken("BUDGET", odd()), *(broken(rule, counterexample()) for rule in MANY)),
    "whole rollouts": report(broken("GROUP", rollouts(), on="rollout"), *valid("BUDGET", on="rollout")),
    "all valid": report(*valid("BUDGET", *MANY), *valid("ALIGN", faulty_engine=True)),
    "interrupted": report(
        Result("BUDGET", "MUST", PLAIN, "inproc", UNKNOWN, 3, "interrupted"), *valid("STATUS"), complete=False
    ),
    "hostile": report(
        broken("BUDGET", counterexample(message=f"<script>x()</script>{HOSTILE}")),
        Result("STATUS", "MUST", PLAIN, "inproc", UNKNOWN, 3, "y" * 400 + HOSTILE),
        name="x" * 120 + f"<img src=http://example.invalid/x>{HOSTILE}",
    ),
}


def scan(size: int = 150) -> Scan:
    revisions = tuple(
        Revision(
            f"{i:040x}", f"{i * 7919:09x}", f"2025-{1 + i // 15:02}-{1 + i % 15:02}", f"change {i} " + "y" * (i % 70)
        )
        for i in range(size)
    )
    why = Broken(
        Schedule(),
        ("BUDGET violated   slime", "  " + "attempt " * 30),
        "failures/x.json",
        "rolloutcheck replay " + "z" * 90,
    )
    rows: dict[tuple[str, str], tuple[Range, ...]] = {
        (rule, mode): (Range(0, size - 1, VALID),) for rule in ("BUDGET", *MANY) for mode in MODES
    }
    rows["BUDGET", PLAIN] = (
        Range(0, 59, VALID),
        Range(60, 99, INVALID, "", (why, why)),
        Range(100, 149, VALID),
    )
    rows["STATUS", PLAIN] = (
        Range(0, 3, "absent", "no streaming"),
        Range(4, 4, INVALID, "", (why,)),
        Range(5, 149, VALID),
    )
    return Scan(Options(TargetSpec("slime")), revisions, 400, rows, 99.0)


PAGES = (*REPORTS, "timeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    for name, told in REPORTS.items():
        found = {i: replace(v, replay="rolloutcheck replay " + "f" * 80) for i, v in violations.of(told).items()}
        (made / f"{name}.html").write_text(html.page(told, found), encoding="utf-8")
    (made / "timeline.html").write_text(html.scan_page(scan()), encoding="utf-8")
    return made


# how it is looked at


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


class Opened:
    """A page, and what it asked for and complained of."""

    def __init__(self, browser: Any, file: Path, width: int = DESK, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(api.Error):
            self.page.close()

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


CONTRAST = """() => {
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const front = numbers(element instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [luminance(front), luminance(behind(element))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push([element.tagName, element.className, walker.currentNode.data, ratio]);
  }
  return poor;
}"""

OUTSIDE = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
  const plot = svg.getBoundingClientRect();
  if (!plot.width || !plot.height) return svg.getAttribute("y") || svg.getAttribute("x") ? [] : ["empty"];
  return [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < plot.left - 0.5 || box.right > plot.right + 0.5
      || box.top < plot.top - 1 || box.bottom > plot.bottom + 1;
  }).map(text => text.textContent);
})"""

OVERLAPS = """() => [...document.querySelectorAll("figure li.lane")].flatMap(lane => {
  const [name, plot, words] = ["name", "cell", "words"].map(c => lane.querySelector("." + c).getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return meet(name, plot) || meet(plot, words) || meet(name, words) ? [lane.textContent] : [];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page(browser: Any, folder: Path, name: str, size: str, scheme: str) -> None:
    with Opened(browser, folder / f"{name}.html", SIZES[size], scheme) as opened:
        assert opened.said == []
        assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []
        assert len(opened.asked) <= 2
        assert opened.run("document.documentElement.scrollWidth") <= SIZES[size]
        assert opened.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)"
        )
        assert opened.run(CONTRAST) == []
        assert opened.run(OUTSIDE) == []
        assert opened.run(OVERLAPS) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_within_a_page_leads_somewhere(browser: Any, folder: Path, name: str) -> None:
    with Opened(browser, folder / f"{name}.html") as opened:
        dead = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById(a.hash.slice(1)))"
        assert opened.run(f"{dead}.map(a => a.hash)") == []


def test_a_verdict_leads_to_its_violation(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "ten violations.html", PHONE) as opened:
        opened.page.click("td a[href='#broken-STATUS']")
        top = opened.run("document.getElementById('broken-STATUS').getBoundingClientRect().top")
        assert 0 <= top < 100


@pytest.mark.parametrize("name", ["one violation", "timeline"])
def test_the_keyboard_reaches_links_and_what_scrolls_and_one_sees_where_it_is(
    browser: Any, folder: Path, name: str
) -> None:
    with Opened(browser, folder / f"{name}.html", PHONE) as opened:
        seen = set()
        for _ in range(12):
            opened.page.keyboard.press("Tab")
            tag, width = opened.run(
                "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineWidth]"
            )
            seen.add(tag)
            assert width == "3px"
        assert {"A", "DIV"} <= seen
        unreachable = """[...document.querySelectorAll("*")].filter(e => e.scrollWidth > e.clientWidth + 1
          && ["auto", "scroll"].includes(getComputedStyle(e).overflowX) && e.tabIndex < 0).map(e => e.tagName)"""
        assert opened.run(unreachable) == []


def test_a_request_past_the_budget_is_drawn_past_its_line(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "one violation.html") as opened:
        left, right = opened.run("""["plain", "stream"].map((_, i) => {
          const figure = document.querySelectorAll("figure")[i];
          const box = name => figure.querySelector("li.lane:last-child .plot ." + name)?.getBoundingClientRect();
          return [box("kept").right, box("asked").left, box("asked").right, box("budget").x, box("over")?.left];
        })""")
        kept, begin, end, budget, over = left
        assert kept == pytest.approx(begin, abs=2) and begin < budget < end
        assert over == pytest.approx(budget, abs=3)
        kept, begin, end, budget, over = right
        assert kept == pytest.approx(begin, abs=2) and end == pytest.approx(budget, abs=3) and over is None


def test_the_budget_is_one_line_from_the_axis_to_the_last_row(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "one violation.html") as opened:
        boxes = opened.run("""[...document.querySelector("figure ol").querySelectorAll("svg > line.budget")]
          .map(line => line.getBoundingClientRect()).map(box => [box.x, box.top, box.bottom])""")
        assert len(boxes) == 3
        for (x, _, bottom), (below, top, _) in pairwise(boxes):
            assert x == pytest.approx(below, abs=0.5) and bottom == pytest.approx(top, abs=1)


def test_a_timeline_scrolls_sideways_and_keeps_its_names(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "timeline.html", PHONE) as opened:
        before, after, right, word, cell = opened.run("""(() => {
          const region = document.querySelector(".scroll"), name = region.querySelector("tbody th");
          const before = name.getBoundingClientRect().left;
          region.scrollLeft = 300;
          const cell = region.querySelector("tbody td.invalid"), box = name.getBoundingClientRect();
          const word = region.querySelector("td.valid .fill span").getBoundingClientRect().left;
          return [before, box.left, box.right, word, cell.getBoundingClientRect().width / cell.colSpan];
        })()""")
        assert before == after and right < PHONE / 2
        assert right <= word < right + 20  # what a long range is stays beside its name
        assert cell >= 14


@pytest.mark.parametrize("name", PAGES)
def test_it_can_be_printed(browser: Any, folder: Path, name: str) -> None:
    with Opened(browser, folder / f"{name}.html") as opened:
        opened.page.emulate_media(media="print", color_scheme="dark")
        assert opened.run("document.documentElement.scrollWidth") <= DESK
        assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert opened.run(CONTRAST) == []
        assert opened.page.pdf()[:5] == b"%PDF-"
