"""The engine behind aioresponses, for clients that speak aiohttp.

aioresponses hands a body over in one piece and cannot break a connection in
the middle, so schedules that need this are left out (`AioresponsesFront.cannot`).
aioresponses 0.7.9 builds responses without the ``stream_writer`` argument that
aiohttp 3.14 made mandatory; `_Response` supplies it, so that users need not
stay on an aiohttp with known vulnerabilities (pnuckowski/aioresponses#289).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from json import dumps
from typing import Any
from unittest.mock import Mock

from aiohttp import ClientResponse, ServerDisconnectedError, StreamReader
from aiohttp.client_proto import ResponseHandler
from aioresponses import CallbackResult, aioresponses
from yarl import URL

from harness.engines import HOST, NOBODY, Session, content_type

_WANTED = {"stream_writer"} & set(inspect.signature(ClientResponse.__init__).parameters)


class _Response(ClientResponse):
    def __init__(self, method: str, url: URL, **given: Any) -> None:
        super().__init__(method, url, **{**{name: Mock(output_size=0) for name in _WANTED}, **given})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "content":
            # aioresponses feeds the body to a reader that wants its connection paused beyond
            # 128 KiB, and there is no connection: give it one that holds any body.
            loop = asyncio.get_running_loop()
            value = StreamReader(ResponseHandler(loop), limit=1 << 40, loop=loop)
        super().__setattr__(name, value)


class AioresponsesFront:
    name = "aioresponses"
    host, port = HOST, NOBODY
    cannot = frozenset({"drop-inside", "drop-after", "flag"})
    sockets = False
    greedy = False
    broken = ""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._mock = aioresponses()

    def attach(self, session: Session | None) -> None:
        self._session = session
        self._mock.requests.clear()  # its log of requests grows without bound

    async def start(self) -> None:
        self._mock.start()
        pattern = re.compile(rf"^http://(localhost|{re.escape(self.host)}):{self.port}/.*$")
        for method in (self._mock.get, self._mock.post):
            method(pattern, callback=self._answer, repeat=True, response_class=_Response)

    async def stop(self) -> None:
        self._mock.stop()

    async def _answer(self, url: URL, **kwargs: Any) -> CallbackResult:
        session = self._session
        if session is None:
            raise ServerDisconnectedError
        body = kwargs["data"] if kwargs.get("data") is not None else dumps(kwargs.get("json")).encode()
        reply = session.open(url.raw_path_qs, body)
        if reply.status is None:
            session.ended(reply)
            raise ServerDisconnectedError
        data = b"".join([piece async for piece in session.send(reply)])
        return CallbackResult(
            status=reply.status, body=data, content_type=content_type(reply), response_class=_Response
        )
