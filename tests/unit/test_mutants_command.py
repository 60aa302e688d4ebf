"""`rolloutcheck mutants`: the list, the table, its files and its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import jsonschema
import pytest

from harness import scenario_strategies
from harness.cli import main
from harness.mutants import load, measure
from harness.mutants.measure import Measured
from harness.options import SCENARIOS
from harness.verdict import CONFORMS, USAGE, VIOLATES

SCHEMA = Path(__file__).resolve().parents[2] / "spec" / "schemas" / "mutants.schema.json"
Inside = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Inside:
    """Runs the command in this process, in an empty folder; every mutant takes 4, 2 and 9 schedules, one is missed."""

    def measured(
        ids: Iterable[str], seeds: int, profile: str, jobs: int | None, tell: Callable[[int, int], None]
    ) -> list[Measured]:
        tell(seeds, seeds)
        return [Measured(load()[i], (4, None, 9) if i == "drops-seed" else (4, 2, 9)) for i in ids]

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["mutants", *arguments])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def test_the_list_names_every_mutant_and_runs_none(inside: Inside) -> None:
    status, out, _ = inside("--list")
    assert status == CONFORMS
    assert all(name in out for name in load()) and "median" not in out


def test_all_found_is_a_success(inside: Inside) -> None:
    status, out, _ = inside("forgets-subtraction", "drops-stop")
    assert status == CONFORMS
    assert "3 of 3" in out and "2 of 2 mutants found in every seed; median 4 schedules" in out


def test_one_that_is_missed_in_a_seed_is_a_failure(inside: Inside) -> None:
    status, out, _ = inside("drops-seed")
    assert status == VIOLATES
    assert "2 of 3" in out and "0 of 1 mutants found in every seed; median 6.5 schedules" in out


def test_nothing_found_has_no_median() -> None:
    missed = Measured(load()["drops-seed"], (None,))
    assert (missed.median, missed.worst, missed.detected) == (None, None, False)
    assert not Measured(load()["drops-seed"], ()).detected


def test_the_json_fits_its_schema(inside: Inside) -> None:
    assert inside("drops-seed", "drops-stop", "--json", "out.json")[0] == VIOLATES
    data = json.loads(Path("out.json").read_text())
    jsonschema.validate(data, json.loads(SCHEMA.read_text()))
    names = ("id", "detected", "seeds", "median_schedules", "worst_schedules")
    assert [tuple(m[name] for name in names) for m in data["mutants"]] == [
        ("drops-seed", False, 3, 6.5, 9),
        ("drops-stop", True, 3, 4, 9),
    ]


def test_json_takes_standard_output(inside: Inside) -> None:
    _, out, _ = inside("drops-stop", "--json", "-")
    assert json.loads(out)["mutants"][0]["rule"] == "PARAMS"


def test_the_docs_are_a_markdown_table(inside: Inside) -> None:
    assert inside("drops-stop", "--docs", "table.md")[0] == CONFORMS
    text = Path("table.md").read_text()
    assert "| `drops-stop` | Stop strings do not reach the engine. | [PARAMS](../spec/README.md#PARAMS) |" in text
    assert "Made by `rolloutcheck mutants drops-stop --docs table.md` (Hypothesis " in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("drops-stopp",), "unknown mutant 'drops-stopp'; did you mean drops-stop?"),
        (("zzz",), "unknown mutant 'zzz'; `rolloutcheck mutants --list` shows them"),
        (("--list", "--json", "-"), "--list runs nothing, so there is nothing to write"),
        (("--docs", "no/where.md"), "cannot write no/where.md: no such folder"),
    ],
)
def test_bad_input_gets_one_line(inside: Inside, arguments: tuple[str, ...], line: str) -> None:
    status, out, err = inside(*arguments)
    assert (status, out, err) == (USAGE, "", f"rolloutcheck: {line}\n")


def test_the_measure_runs_seeds_in_processes_of_their_own() -> None:
    told: list[tuple[int, int]] = []
    (found,) = measure.measure(["forgets-subtraction"], 2, "quick", 2, lambda done, total: told.append((done, total)))
    assert found.detected and len(found.schedules) == 2
    assert told == [(1, 2), (2, 2)]
    alone = [measure.of_seed(("forgets-subtraction",), seed, "quick")["forgets-subtraction"] for seed in (0, 1)]
    assert list(found.schedules) == alone


def test_a_mutant_of_the_loop_is_measured_on_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = load()["aborts-nothing"]
    among = measure.drawn(mutant, "quick", 3)
    assert among == tuple(scenario_strategies.drawn(SCENARIOS["quick"], 3)) and len(among) == SCENARIOS["quick"]
    monkeypatch.setattr(measure, "detect", lambda found, works: dict.fromkeys(found.modes, (len(works), works[0])))
    assert measure.of_seed((mutant.id,), 3, "quick") == {mutant.id: SCENARIOS["quick"]}


def test_a_mutant_that_is_not_found_in_one_of_its_modes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "detect", lambda mutant, among: {"plain": (1, among[0])})
    assert measure.of_seed(("forgets-subtraction",), 0, "quick") == {"forgets-subtraction": None}
