"""Work spread over a Ray cluster of two nodes on this machine; `tox -e ray` runs it where ray is installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is installed by tox -e ray")

from ray.cluster_utils import Cluster  # noqa: E402

from harness import on_ray, pool, scope  # noqa: E402
from harness.check import Covered, check  # noqa: E402
from harness.options import Options  # noqa: E402
from harness.schedule import Attempt, Schedule  # noqa: E402
from harness.targets import CannotJudge  # noqa: E402
from harness.targets.spec import TargetSpec  # noqa: E402
from harness.verdict import INVALID, VALID  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made.address
    made.shutdown()


def where(number: int) -> tuple[int, str]:
    time.sleep(0.5)  # long enough for the other node to take one
    return number, ray.get_runtime_context().get_node_id()


def refuses() -> None:
    raise CannotJudge("not here")


def test_both_nodes_work(cluster: str) -> None:
    found = dict(on_ray.spread(where, ((i, (i,)) for i in range(6)), cluster))
    assert {i: number for i, (number, _) in found.items()} == {i: i for i in range(6)}
    assert len({node for _, node in found.values()}) == 2
    assert not ray.is_initialized()


def test_what_a_task_raises_is_raised_here(cluster: str) -> None:
    with pytest.raises(CannotJudge, match="not here"):
        list(on_ray.spread(refuses, [(0, ())], cluster))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:1"])
def test_no_cluster_is_one_line(address: str) -> None:
    with pytest.raises(CannotJudge, match=f"no Ray cluster at {address}: ") as error:
        list(on_ray.spread(where, [(0, (0,))], address))
    assert "\n" not in str(error.value)


def test_a_whole_scope_on_a_cluster(cluster: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options: dict[str, Any] = {"scope": 0, "ray": cluster, "journal": str(journal)}
    report = check(Options(TargetSpec("reference"), **options))
    assert {r.verdict for r in report.results} == {VALID}
    assert report.covered == Covered(scope.count(0), scope.count(0))
    assert len(journal.read_text().splitlines()) == 1 + len(
        pool.plan(Options(TargetSpec("reference"), scope=0)).portions
    )


def test_a_fault_that_is_found_on_a_cluster(cluster: str) -> None:
    target = TargetSpec("mutant", function="completes-aborted")
    report = check(Options(target, modes=("plain",), rules=("STATUS",), scope=0, ray=cluster))
    (result,) = (r for r in report.results if not r.faulty_engine)
    assert result.verdict == INVALID and result.counterexample is not None
    assert result.counterexample.schedule == Schedule(budget=1, attempts=(Attempt("abort"),))
