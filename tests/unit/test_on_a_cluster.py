"""Spreading over a Ray cluster, with a cluster of one core that is stood in for; tests/ray has a real one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness import on_ray, pool
from harness.options import Options
from harness.pool import Plan, Portion
from harness.targets import CannotJudge
from harness.targets.spec import TargetSpec


class Cluster(SimpleNamespace):
    """What is used of ray: a task is run when somebody waits for it. ``said`` is what it was told."""

    def __init__(self, cores: int, *, initialized: bool = False) -> None:
        super().__init__(cores=cores, initialized=initialized, said=list[Any](), waiting=0, most=0)

    def is_initialized(self) -> bool:
        return bool(self.initialized)

    def init(self, **options: Any) -> None:
        self.said.append(options["address"])

    def shutdown(self) -> None:
        self.said.append("shut down")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cores)} if self.cores else {}

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        assert options == {"num_cpus": 1, "max_retries": 1}

        def made(work: Callable[..., Any]) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self._submit(work, arguments))

        return made

    def _submit(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return (work, arguments)

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return references[-num_returns:], references[:-num_returns]  # the last to begin is the first to end

    def get(self, reference: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        self.waiting -= 1
        work, arguments = reference
        return work(*arguments)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    def made(cores: int, **options: bool) -> Cluster:
        one = Cluster(cores, **options)
        monkeypatch.setitem(sys.modules, "ray", one)  # type: ignore[arg-type]
        return one

    return made


def double(number: int) -> int:
    if number == 13:
        raise ValueError("not this one")
    return 2 * number


def tasks(numbers: range) -> Iterator[tuple[str, tuple[int]]]:
    return ((f"task {n}", (n,)) for n in numbers)


@pytest.mark.parametrize(("cores", "most"), [(0, 2), (1, 2), (3, 4), (9, 6)])
def test_every_task_comes_back_by_its_name(cluster: Callable[..., Cluster], cores: int, most: int) -> None:
    made = cluster(cores)
    assert dict(on_ray.spread(double, tasks(range(6)), "auto")) == {f"task {n}": 2 * n for n in range(6)}
    assert made.most == most  # a core each, and one that waits
    assert made.said == ["auto", "shut down"]


def test_a_cluster_that_is_in_use_is_left_as_it_is(cluster: Callable[..., Cluster]) -> None:
    made = cluster(1, initialized=True)
    assert len(list(on_ray.spread(double, tasks(range(3)), "auto"))) == 3
    assert made.said == []


def test_what_a_task_raises_is_raised_here_and_the_cluster_is_left(cluster: Callable[..., Cluster]) -> None:
    made = cluster(1)
    with pytest.raises(ValueError, match="not this one"):
        list(on_ray.spread(double, tasks(range(13, 14)), "auto"))
    assert made.said == ["auto", "shut down"]


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_is_called_before_ray_is(cluster: Callable[..., Cluster], form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = form.format(listener.getsockname()[1])
        made = cluster(1)
        assert len(list(on_ray.spread(double, tasks(range(2)), address))) == 2
        assert made.said == [address, "shut down"]


def test_a_cluster_that_nobody_answers_for_is_one_line(cluster: Callable[..., Cluster]) -> None:
    made = cluster(1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CannotJudge, match=f"^no Ray cluster at {address}: Connection refused$"):
            list(on_ray.spread(double, tasks(range(1)), address))
    with pytest.raises(CannotJudge, match=r"^no Ray cluster at here: give auto, host:port or ray://host:port$"):
        list(on_ray.spread(double, tasks(range(1)), "here"))
    assert made.said == []


@pytest.mark.parametrize(("said", "line"), [("no head node\nat all", "no head node"), ("", "")])
def test_what_ray_says_of_a_cluster_is_one_line(cluster: Callable[..., Cluster], said: str, line: str) -> None:
    made = cluster(1)

    def init(**options: Any) -> None:
        raise ConnectionError(said)

    made.init = init  # type: ignore[method-assign]
    with pytest.raises(CannotJudge, match=f"^no Ray cluster at auto: {line}$"):
        list(on_ray.spread(double, tasks(range(1)), "auto"))
    assert made.said == []


def test_portions_go_to_the_cluster_that_is_named(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster(1)
    monkeypatch.setattr(pool, "run", lambda options, engine, modes, portion: (portion.size, [engine, *modes]))
    plan = Plan("scope", (Portion("scope", 0, 3), Portion("scope", 1, 2)), 5)
    options = Options(TargetSpec("reference"), scope=0, ray="auto")
    found = sorted(pool.explore(options, "inproc", ("plain",), plan))
    assert found == [(2, ["inproc", "plain"]), (3, ["inproc", "plain"])]
    assert made.said == ["auto", "shut down"]
