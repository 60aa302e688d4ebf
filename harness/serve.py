"""``rolloutcheck serve``: the engine as a stand-alone server, until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import schedule
from harness import tokenizer as tokenizers
from harness.engines.live import Options
from harness.engines.standalone import Server
from harness.replay import BadFile, load
from harness.schedule import Schedule, ScheduleError

ENDS = (signal.SIGINT, signal.SIGTERM)
"""The first one ends it; `timeout` sends a second."""


class CannotListen(Exception):
    """The address is not to be had. One line; exit status 2."""


def schedules_in(path: Path) -> tuple[Schedule, ...]:
    """The schedules in a file: one, or a list of them; each bare or, as in a failure file, under ``schedule``.

    Raises BadFile.
    """
    data = load(path)
    several = data if isinstance(data, list) else [data]
    try:
        found = tuple(_schedule(one) for one in several)
        if not found:
            raise ScheduleError("the list of schedules is empty")
        prompts = [one.prompt for one in found]
        twice = next((prompt for prompt in prompts if prompts.count(prompt) > 1), None)
        if twice is not None:
            raise ScheduleError(f"two schedules have the prompt {twice[:40]!r}")
    except ScheduleError as error:
        raise BadFile(f"{path}: {error}") from error
    return found


def _schedule(data: Any) -> Schedule:
    if isinstance(data, dict) and "scenario" in data:
        raise ScheduleError("a scenario of whole rollouts has steps of the loop, which a server does not take")
    return schedule.from_json(data["schedule"] if isinstance(data, dict) and "schedule" in data else data)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Raises CannotListen for a name that is none."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"there is no address for --host {host}") from error
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def serve(options: Options, host: str, port: int, tokenizer: str | None, tell: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; ``tell`` is told the address. Raises CannotListen."""
    asyncio.run(_serve(options, host, port, tokenizer, tell))


async def _serve(options: Options, host: str, port: int, tokenizer: str | None, tell: Callable[[str], None]) -> None:
    loop, told_to_end = asyncio.get_running_loop(), asyncio.Event()
    for number in ENDS:
        loop.add_signal_handler(number, told_to_end.set)
    server = Server(options, host, port, tokenizers.load(tokenizer))
    try:
        await server.start()
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        raise CannotListen(f"port {port} of {host} {reason}") from error
    tell(f"listens on {server.url}")
    ended = asyncio.create_task(told_to_end.wait())
    await asyncio.wait((ended, server.clock), return_when=asyncio.FIRST_COMPLETED)
    if server.clock.done():
        server.clock.result()
    for number in ENDS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    await server.stop()
