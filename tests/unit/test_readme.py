"""The documents are true: commands, options, numbers, links, and the example on the first page."""

from __future__ import annotations

import configparser
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

import spec
from harness import check, inline, mutants, verdict
from harness import options as asked
from harness.bisect import FIRST_GOOD, Bisection
from harness.checkers import RULE_IDS
from harness.cli import app, main
from harness.engines import FRONTS
from harness.history import STREAM
from harness.judged import Broken
from harness.reporters import history
from harness.revisions import Revision
from harness.schedule import Schedule
from harness.targets.reference_loop import ReferenceLoop
from harness.targets.spec import TargetSpec
from reference_impl.rollout import Rollout
from reference_impl.source import Group
from tests.unit.test_levels import InProcess

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
DOCUMENTS = [p.relative_to(PROJECT) for pattern in ("*.md", "spec/*.md", "docs/*.md") for p in PROJECT.glob(pattern)]


def block(name: str) -> str:
    """The console block behind a marker."""
    found = re.search(rf"<!-- {name} -->\n```console\n(.*?)```", README, re.S)
    assert found, name
    return found[1]


def options() -> set[str]:
    command = typer.main.get_command(app)
    commands = [command, *getattr(command, "commands", {}).values()]
    return {name for c in commands for p in c.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def test_every_option_that_is_named_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README + ARCHITECTURE))
    assert {"--target", "--profile", "--seed", "--strict"} <= named
    assert named <= options()


def test_exit_statuses() -> None:
    rows = {int(n): text for n, text in re.findall(r"^\| (\d+) \| (.+?) \|$", README, re.M)}
    assert set(rows) == {
        verdict.CONFORMS,
        verdict.VIOLATES,
        verdict.USAGE,
        verdict.CANNOT,
        verdict.FAULT,
        130,
    }
    for status, word in (
        (verdict.CONFORMS, "conforms"),
        (verdict.VIOLATES, "violates"),
        (verdict.USAGE, "usage"),
        (verdict.CANNOT, "cannot be judged"),
        (verdict.FAULT, "a fault of rolloutcheck"),
        (130, "interrupted"),
    ):
        assert rows[status].startswith(word)


def test_profiles() -> None:
    names, numbers = "|".join(asked.PROFILES), ", ".join(f"{n:,}" for n in asked.PROFILES.values())
    assert f"`--profile {names}` sets how many schedules ({numbers})" in README.replace("\n", " ")
    assert asked.Options.__dataclass_fields__["profile"].default == "ci"


def test_engines() -> None:
    assert f"`--engine {'|'.join((*FRONTS, 'all'))}`" in README


def test_the_number_of_rules() -> None:
    assert f"{len(RULE_IDS)} of the contract's {len(spec.RULES)} rules" in README


def test_the_test_command_is_what_gates() -> None:
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8")
    (line,) = re.findall(r"^command=\$\((.+)\)$", script, re.M)
    done = subprocess.run(["sh", "-c", line], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=30)
    assert "$ " + done.stdout.strip() == block("tests").strip()
    assert 'sh -euc "$command"' in script


def test_environments_of_tox() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(PROJECT / "tox.ini")
    named = set(re.findall(r"tox (?:-q )?-e (\w+)", README))
    assert named == {"property", "tests", "bench", "real"}
    assert {f"testenv:{name}" for name in named} <= set(tox.sections())
    extras = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    for section in tox.sections():
        for extra in tox.get(section, "extras", fallback="").split():
            assert re.search(rf"^{extra} = \[", extras, re.M), extra
    assert "python -m harness check {posargs" in tox["testenv:property"]["commands"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_relative_links_exist(document: Path) -> None:
    text = (PROJECT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (PROJECT / document).parent / name if name else PROJECT / document
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            linked = file.read_text(encoding="utf-8")
            heads = {
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", linked, re.M)
            }
            assert f'<a id="{anchor}"></a>' in linked or anchor in heads, target


@pytest.mark.parametrize("text", [README, ARCHITECTURE], ids=["README", "ARCHITECTURE"])
def test_paths_exist(text: str) -> None:
    named = set(re.findall(r"`((?:harness|spec|tests|benchmarks|reference_impl)/[\w./-]*)`", text))
    for name in named - {"tests/regressions/corpus/NAME.json"}:
        assert (PROJECT / name).exists(), name
    for name in re.findall(r"`python (\S+\.py)`", text):
        assert (PROJECT / name).exists(), name


def test_the_folders_of_the_table_exist() -> None:
    rows = re.findall(r"^\| (`.+?) \|", ARCHITECTURE, re.M)
    assert len(rows) >= 8
    for row in rows:
        prefix = ""
        for name in re.findall(r"`([\w./]+)`", row):
            path = prefix + name if "/" not in name.rstrip("/") and prefix else name
            prefix = f"{Path(path.rstrip('/')).parent}/"
            assert (PROJECT / path).exists() or (PROJECT / f"{path}.py").exists(), path


def test_no_machine_path() -> None:
    for document in DOCUMENTS:
        assert not re.search(
            r"(?<![\w.])/(?:home|root|Users|tmp|work)/", (PROJECT / document).read_text(encoding="utf-8")
        )


def normal(text: str, target: str) -> list[str]:
    """Without what differs from run to run: the target's name, the seconds, the number of schedules, the command."""
    text = text.replace(target, "TARGET")
    text = re.sub(r"\d+\.\d s$", "SECONDS", text, flags=re.M)
    text = re.sub(r"invalid \d+", "invalid N", text)
    text = re.sub(r"(replay failures/\S+) .+", r"\1", text)
    text = re.sub(r"^\d+ runs left out: .+\n\n", "", text, flags=re.M)  # our loops have everything
    return [line.rstrip().rstrip("─") for line in text.strip().splitlines()]


def test_the_example_is_real_output(tmp_path: Path) -> None:
    """slime at the revision of the issue forgets the same subtraction as a client of ours."""
    command, _, shown = block("example").partition("\n")
    target = "tests.function_targets:forgets_subtraction"
    assert command.startswith("$ rolloutcheck check --target slime")
    options = ("--rule", "BUDGET")
    assert command.endswith(" ".join(options))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "check", "--target", target, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == verdict.VIOLATES
    real = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    real = re.sub(r"\n\n\n+", "\n\n", real)
    assert normal(real, target) == normal(shown, "slime@1eed24931")


class OneTry(Rollout):
    """Tries each group once a rollout, as slime does; the reference tries again when an engine has aborted it."""

    async def _run(self, group: Group) -> bool:
        for place in range(len(group)):
            await self._member(group, place)
        return not self.aborting


def like_slime(spec: TargetSpec) -> ReferenceLoop:
    """The loop of slime at the revision of the issue, as far as BUDGET sees it."""
    made = mutants.load()[spec.function].loop()
    made._loop_class = OneTry
    made.stoppable = False
    return made


def test_the_example_of_whole_rollouts_is_real_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, shown = block("rollouts").partition("\n")
    assert command.startswith("$ rolloutcheck check --target slime")
    options = ("--level", "rollout", "--rule", "BUDGET")
    assert command.endswith(" ".join(options))
    monkeypatch.setattr(check, "Worker", InProcess)
    monkeypatch.setattr(InProcess, "ran", [], raising=False)
    monkeypatch.setattr(inline, "load_loop", like_slime)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as ended:
        main(["check", "--target", "mutant:forgets-subtraction", "--mode", "plain", *options])
    assert ended.value.code == verdict.VIOLATES
    real = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert normal(re.sub(r"\n\n\n+", "\n\n", real), "client") == normal(shown, "slime@1eed24931")


def test_the_commands_of_the_block_for_continuous_integration_parse() -> None:
    (line,) = re.findall(r"^\$ tox -e property -- (.+)$", README, re.M)
    command = typer.main.get_command(app)
    group = getattr(command, "commands")  # noqa: B009 - typer's type does not know it
    context = group["check"].make_context("check", line.split())
    assert context.params["rule"] == ["BUDGET"]


@pytest.mark.parametrize(
    "line",
    re.findall(r"`?(?:\$ )?(?:git bisect run )?(rolloutcheck (?:bisect|scan|replay|promote|check) [^`\n]+)", README),
)
def test_every_command_parses(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    group = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typer's type does not know it
    assert group[name].make_context(name, [word for word in words if word != "--help"])


def test_the_example_of_a_bisection_looks_like_one() -> None:
    """tests/slime/test_history.py compares it with the real one where there is a checkout."""
    _, *lines = block("bisect").splitlines()
    found = Bisection(
        ("BUDGET", STREAM),
        FIRST_GOOD,
        *(Revision("", short, "", "") for short in ("35e8767f9", "624b824a8")),
        revisions=187,
        found=Revision(
            "", "26e859afc", "2026-08-12", "fix(rollout): restore partial continuation token budget (#2261)"
        ),
        before=Revision("", "f033ebfc0", "", ""),
        candidates=(),
        steps=8,
        skipped=(),
        bad=Revision("", "f033ebfc0", "", ""),
        broken=Broken(Schedule(), (*lines[2:6], lines[7]), "", lines[6].removeprefix("  replay   ")),
        holds=tuple(lines[9:]),
        duration_s=20.5,
    )
    out = io.StringIO()
    history.show_bisection(Console(file=out, width=100), found)
    assert out.getvalue() == block("bisect")
