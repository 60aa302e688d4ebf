"""The engine as an aiohttp request handler, for the loopback server."""

from __future__ import annotations

import logging

from aiohttp import web

from harness.engines import Session, content_type

_QUIET = logging.Logger("rolloutcheck.engine", logging.CRITICAL)  # a broken connection is often the point


class Handler:
    """Serves the attached session. Breaks connections where the reply says so."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._server: web.Server | None = None

    async def server(self) -> web.Server:
        self._server = web.Server(self._handle, access_log=None, logger=_QUIET)
        return self._server

    async def close(self) -> None:
        assert self._server is not None
        await self._server.shutdown(0.01)  # 0 would mean: wait for clients that keep their connection
        self._server = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self.session
        if session is None:
            return web.Response(status=503)
        reply = session.open(request.path_qs, await request.read())
        if reply.status is None:
            session.ended(reply)
            _cut(request)
            return web.Response()
        length = sum(len(p.data) for p in reply.parts)
        response = web.StreamResponse(status=reply.status, headers={"Content-Type": content_type(reply)})
        if not reply.stream:
            # A broken plain reply promises more bytes than it brings.
            response.content_length = length + (reply.ending == "drop" and reply.lost is not None)
        await response.prepare(request)
        try:
            async for piece in session.send(reply, lambda: request.transport is None or request.transport.is_closing()):
                await response.write(piece)
            if reply.ending == "drop":
                _cut(request)
            else:
                await response.write_eof()
        except ConnectionResetError:
            pass  # the client has left; that is its right
        return response


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.close()  # what was written still arrives; then the connection is gone
