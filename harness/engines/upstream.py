"""The way to a real server: what is sent there, what of it still runs, and how that alone is aborted."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from json import detect_encoding, dumps, loads
from typing import Any

import aiohttp

from harness.engines.hearing import Unheard
from harness.server import Server, end

SILENCE_S = 15.0
"""Seconds without a byte after which a server counts as gone."""

SLOWER = 4
"""Times as long as one token after the other that a plain answer may take, on a server that others use too."""

AGAIN_S = 0.02
"""Seconds until an abort that may have come too early is sent once more."""

_HOP = frozenset({"accept-encoding", "connection", "content-length", "host", "keep-alive", "transfer-encoding"})


class _Outward(aiohttp.TCPConnector):
    """A connection out of the harness, which the front without sockets lets pass (`harness.engines.inproc`).

    Each is used once. The real server breaks the next request on a connection after an
    error in a stream (0.5.23, spec/sglang.md#errors), and that would look like our fault.
    """

    outward = True

    def __init__(self) -> None:
        super().__init__(limit=0, force_close=True)


class Upstream:
    """One server. Made, used and closed on one loop."""

    def __init__(self, server: Server, *, timers: bool = True) -> None:
        """``timers``: whether a server that says nothing is noticed here, and not by whoever waits."""
        self.server, self._timers = server, timers
        self.live: set[str] = set()
        """The ids of the requests that run."""
        self.orphans: set[str] = set()
        """The ids of those whose end nobody has waited for."""
        self._client = aiohttp.ClientSession(
            connector=_Outward(),
            timeout=self._limits(SILENCE_S),
            headers={"Accept-Encoding": "identity"},  # what is recorded must be read
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=1 << 20,
        )
        self._aborts: dict[str, asyncio.Task[None]] = {}

    def _limits(self, silence_s: float) -> aiohttp.ClientTimeout:
        limit = silence_s if self._timers else None
        return aiohttp.ClientTimeout(total=None, sock_connect=limit, sock_read=limit)

    async def close(self) -> None:
        await self._client.close()

    # requests

    def generate(self, payload: Any, body: bytes, headers: Mapping[str, str]) -> Any:
        """The context of a /generate request; entering it raises aiohttp.ClientError or TimeoutError."""
        url, limits = f"{self.server.url}/generate", self._limits(self.patience(payload))
        return self._client.post(url, data=body, headers=kept(headers), timeout=limits, allow_redirects=False)

    def begins(self, rid: str) -> None:
        """Without an id it cannot be aborted: an empty one would name everything on the server (0.5.9)."""
        if rid:
            self.live.add(rid)

    def ends(self, rid: str, *, heard: bool) -> None:
        """``heard``: to its very end."""
        if rid in self.live and not heard:
            self.orphans.add(rid)
        self.live.discard(rid)
        abort = self._aborts.pop(rid, None)
        if abort is not None:
            abort.cancel()

    def end_orphans(self) -> None:
        """A run is over: what it has left on the server would run on, beside the next one and others' requests."""
        orphans, self.orphans = self.orphans, set()
        if orphans:
            end(self.server, orphans)

    def patience(self, payload: Any) -> float:
        """The most seconds without a word: a plain answer comes only once it is whole."""
        asked = payload.get("sampling_params") if isinstance(payload, dict) else None
        if asked is None or streams(payload):
            return SILENCE_S
        most = asked.get("max_new_tokens") if isinstance(asked, dict) else None
        count = min(most, self.server.context) if type(most) is int and most > 0 else self.server.context
        return SILENCE_S + SLOWER * self.server.until(count)

    def get(self, path: str) -> Any:
        return self._client.get(self.server.url + path, allow_redirects=False)

    def gone(self, error: Exception) -> str:
        """What a failure of the server's is called."""
        if isinstance(error, Unheard):
            return f"the server at {self.server.url} answers as no SGLang does: {error}"[:300]
        said = "it says nothing any more" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return f"the server at {self.server.url} is gone: {said}".split("\n")[0][:300]

    # aborts

    def asked_to_abort(self, body: bytes) -> list[str]:
        """What an /abort_request names of all that came through here.

        0.5.23 `abort_all`, `abort_rid_prefix`: an id that is there names those that begin with it too.
        """
        with suppress(ValueError, RecursionError):
            asked = loads(body)
            if isinstance(asked, dict):
                rid, everything = str(asked.get("rid") or ""), asked.get("abort_all") is True
                return [one for one in self.live if everything or (rid in self.live and one.startswith(rid))]
        return []

    def abort_in(self, rid: str, seconds: float) -> None:
        """Aborts a request after a while, until it runs no more."""
        if rid in self.live and rid not in self._aborts:
            self._aborts[rid] = asyncio.get_running_loop().create_task(self._abort_until_gone(rid, seconds))

    async def abort(self, rids: Iterable[str]) -> None:
        await asyncio.gather(*map(self._abort, rids))

    async def _abort_until_gone(self, rid: str, seconds: float) -> None:
        """An abort that comes before its request does nothing (0.5.23 `abort_noop`), so it is sent again."""
        with outside():
            await asyncio.sleep(seconds)
            while rid in self.live:
                await self._abort(rid)
                await asyncio.sleep(AGAIN_S)

    async def _abort(self, rid: str) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):  # a server that is gone is told by its reply
            async with self._client.post(f"{self.server.url}/abort_request", json={"rid": rid}):
                pass


def streams(payload: Any) -> bool:
    """Whether a request asks for a stream."""
    return isinstance(payload, dict) and payload.get("stream") is True


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that are not about one connection."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def named(payload: Any, body: bytes) -> tuple[str, bytes]:
    """The id of a request, and its body with that id in it. What is no request is passed on as it is."""
    if not isinstance(payload, dict):
        return "", body
    given = payload.get("rid")
    if given:
        return given if isinstance(given, str) else "", body
    rid = f"rolloutcheck-{uuid.uuid4().hex}"
    if "rid" in payload or not detect_encoding(body).startswith("utf-8"):  # of two ids in one body the last would count
        return rid, dumps({**payload, "rid": rid}).encode()
    start = body.index(b"{") + 1
    return rid, body[:start] + b'"rid": "' + rid.encode() + (b'", ' if payload else b'"') + body[start:]


def outside() -> AbstractContextManager[None]:
    """On the harness's loop: time is real as long as the server is at work."""
    block = getattr(asyncio.get_running_loop(), "outside", None)
    return block() if block is not None else nullcontext()
