"""The engine as an aiohttp request handler, for the loopback server and the proxy; `carry` for `serve` too."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from harness.engines import Session, as_sent, content_type
from harness.engines.sglang import Reply

QUIET = logging.Logger("rolloutcheck.engine", logging.CRITICAL)  # a broken connection is often the point


class Handler:
    """Serves the attached session. Breaks connections where the reply says so."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._server: web.Server | None = None

    async def server(self, *, cancels: bool = False) -> web.Server:
        """``cancels``: a client that leaves takes its request along."""
        self._server = web.Server(self._handle, access_log=None, logger=QUIET, handler_cancellation=cancels)
        return self._server

    async def close(self) -> None:
        assert self._server is not None
        await self._server.shutdown(0.01)  # 0 would mean: wait for clients that keep their connection
        self._server = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self.session
        if session is None:
            return web.Response(status=503)
        return await self.answer(session, request)

    async def answer(self, session: Session, request: web.BaseRequest) -> web.StreamResponse:
        body = as_sent(request.headers.get("Content-Type"), await request.read())
        return await deliver(session, request, session.open(request.path_qs, body))


async def deliver(
    session: Session, request: web.BaseRequest, reply: Reply, headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Sends a session's reply."""
    if reply.status is None:
        session.ended(reply)
    return await carry(request, reply, session.send(reply, lambda: left(request)), headers)


async def carry(
    request: web.BaseRequest, reply: Reply, pieces: AsyncIterator[bytes], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Sends a reply in these pieces. Breaks the connection where the reply says so.

    ``headers``: instead of those that the mock sends.
    """
    if reply.status is None:
        cut(request)
        return web.Response()
    length = sum(len(p.data) for p in reply.parts)
    response = web.StreamResponse(status=reply.status, headers=headers or {"Content-Type": content_type(reply)})
    if not reply.stream:
        # A broken plain reply promises more bytes than it brings.
        response.content_length = length + (reply.ending == "drop" and reply.lost is not None)
    try:
        await response.prepare(request)
        async for piece in pieces:
            await response.write(piece)
        if reply.ending == "drop":
            cut(request)
        else:
            await response.write_eof()
    except ConnectionResetError:
        pass  # the client has left; that is its right
    return response


def left(request: web.BaseRequest) -> bool:
    """The client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.close()  # what was written still arrives; then the connection is gone
