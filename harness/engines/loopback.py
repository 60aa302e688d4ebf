"""The engine as a real HTTP server on 127.0.0.1, in the client's own event loop."""

from __future__ import annotations

import asyncio

from harness.engines import HOST, Session
from harness.engines.web import Handler


class LoopbackFront:
    name = "loopback"
    host = HOST
    cannot: frozenset[str] = frozenset()
    sockets = True
    greedy = False
    broken = ""

    def __init__(self) -> None:
        self.port = 0
        self._handler = Handler()
        self._listener: asyncio.Server | None = None

    def attach(self, session: Session | None) -> None:
        self._handler.session = session

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(await self._handler.server(), self.host, 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        self._listener = None
        await self._handler.close()
