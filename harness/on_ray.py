"""Spreads work over a Ray cluster (extra ``ray``): slime's users have one.

rolloutcheck must be importable on every node, and the target's folder must be
there under the same path.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from harness.targets import CannotJudge

CONNECT_S = 5.0
T = TypeVar("T")


def spread(
    work: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]], address: str
) -> Iterator[tuple[Any, T]]:
    """As `harness.pool.spread`, on the cluster at ``address``, one task a core at a time. Raises CannotJudge."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        _reach(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # what ray raises depends on the form of the address
            raise CannotJudge(f"no Ray cluster at {address}: {(str(error).splitlines() or [''])[0][:200]}") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=1)(work)
        names: dict[Any, Any] = {}
        for name, arguments in tasks:
            names[remote.remote(*arguments)] = name
            if len(names) > int(ray.cluster_resources().get("CPU", 1)):
                yield from _ended(ray, names)
        while names:
            yield from _ended(ray, names)
    finally:
        if ours:
            ray.shutdown()


def _reach(address: str) -> None:
    """Ray itself would try for minutes. Raises CannotJudge."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:  # ValueError: no host:port
        reason = getattr(error, "strerror", None) or "give auto, host:port or ray://host:port"
        raise CannotJudge(f"no Ray cluster at {address}: {reason}") from error


def _ended(ray: Any, names: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for reference in ray.wait(list(names), num_returns=1)[0]:
        yield names.pop(reference), ray.get(reference)
