"""HTTP to SGLang's /generate: one shared session, bounded retries, server-sent events.

What is retried is the same in every mode (RETRY): connection faults and HTTP
429 and 5xx, a bounded number of times, and only while nothing of the answer
is kept. A 4xx is the engine's last word: asking the same again gives the same
answer (THUDM/slime#2260 was retried 60 times).
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp

RETRIES = 4
BACKOFF_S = 0.5
CONTROL_S = 5.0
"""The most seconds that a question about an engine may take: a machine that is gone does not even refuse."""

_TOO_LONG = (  # SGLang 0.5.9 and 0.5.23, the three ways to refuse an input near or over the context limit
    "maximum context length",
    "maximum allowed length",
    "longer than the model's context length",
)

T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine gave no answer that can be kept. The sample is as it was before the call."""


class Refused(EngineError):
    """A deterministic refusal (4xx)."""


class InputTooLong(Refused):
    """Refused because prompt and response fill the context."""


class MalformedReply(EngineError):
    """A 200 whose content cannot be kept aligned, e.g. tokens without log probabilities."""


class Transient(EngineError):
    """A fault that may be gone at the next try."""


_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


def session() -> aiohttp.ClientSession:
    """The running loop's session. One for all calls: connections are reused."""
    loop = asyncio.get_running_loop()
    found = _sessions.get(loop)
    if found is None or found.closed:
        found = _sessions[loop] = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    return found


async def close() -> None:
    """Closes the running loop's session, if there is one."""
    found = _sessions.pop(asyncio.get_running_loop(), None)
    if found is not None:
        await found.close()


async def ask(args: Any, payload: Mapping[str, Any], consume: Callable[[aiohttp.ClientResponse], Awaitable[T]]) -> T:
    """Posts ``payload`` and gives what ``consume`` makes of the answer.

    ``consume`` raises `Transient` when nothing it has seen is kept. Raises
    `Refused`, `InputTooLong`, `MalformedReply`, or `Transient` after `RETRIES` more tries.
    """
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for last in (*(False,) * RETRIES, True):
        try:
            async with session().post(url, json=payload) as response:
                if response.status != 200:
                    raise error(response.status, await response.text())
                return await consume(response)
        except aiohttp.ClientError as fault:
            if last:
                raise Transient(f"no answer from {url}: {fault}") from fault
        except Transient:
            if last:
                raise
        await asyncio.sleep(BACKOFF_S)
    raise AssertionError("unreachable: the last try returns or raises")  # pragma: no cover - mypy cannot know it


async def get_json(url: str) -> Any:
    """What a router or an engine says about itself. Raises aiohttp.ClientError or TimeoutError; tries once."""
    async with session().get(url, timeout=aiohttp.ClientTimeout(total=CONTROL_S)) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


async def post_json(url: str, body: Mapping[str, Any]) -> None:
    """An order whose answer is empty, e.g. /abort_request. Raises aiohttp.ClientError or TimeoutError; tries once."""
    async with session().post(url, json=body, timeout=aiohttp.ClientTimeout(total=CONTROL_S)) as response:
        response.raise_for_status()


async def abort_engines(args: Any) -> None:
    """Asks every engine that the router names to drop everything, once. Raises nothing."""
    try:
        reply = await get_json(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
        urls = [worker["url"] for worker in reply["workers"]]
    except Exception as error:
        log.warning("the router names no engines: %r", error)
        return
    await asyncio.gather(*map(_abort_engine, urls))


async def _abort_engine(url: str) -> None:
    """One that does not answer must not take the others with it (THUDM/slime#1632, #811)."""
    try:
        await post_json(f"{url}/abort_request", {"abort_all": True})
    except Exception as error:
        log.warning("%s cannot be aborted: %r", url, error)


def error(code: int | None, message: str) -> EngineError:
    """The exception for an HTTP error, or for an error event inside a stream.

    An error event of SGLang 0.5.9 has no code; it stands for the 400 of the plain mode.
    """
    if any(phrase in message for phrase in _TOO_LONG):
        return InputTooLong(message)
    if code is not None and (code == 429 or code >= 500):
        return Transient(f"HTTP {code}: {message}")
    return Refused(f"HTTP {code or 400}: {message}")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, read to its end so that the connection can be reused.

    Bytes are cut at line ends only, never decoded before a line is whole: a
    network segment may end inside a character. ``readline`` is not used because
    it limits a line to 128 KiB, and a cumulative event of a long answer is longer.
    """
    buffer = bytearray()
    async for segment in response.content.iter_any():
        buffer += segment
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data != b"[DONE]":
                yield json.loads(data)
