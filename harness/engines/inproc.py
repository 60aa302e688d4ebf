"""The engine in the client's own process: no socket, real client libraries.

Whatever client a target builds, it ends in one of two seams: httpx's transport
or aiohttp's connector. Both are replaced while the front runs, so a target is
not told about it. For httpx the reply is handed to the transport's caller. For
aiohttp the client's real protocol object is joined to aiohttp's own server
protocol by a pair of in-memory transports, so that parsing, chunking and
broken connections are aiohttp's, byte for byte. Any other address is refused:
a target under test does not reach the network.
"""

from __future__ import annotations

import asyncio
from typing import Any

from harness.engines import HOST, NOBODY, Session, content_type
from harness.engines.web import Handler


class InprocFront:
    name = "inproc"
    host, port = HOST, NOBODY
    cannot: frozenset[str] = frozenset()
    sockets = False

    def __init__(self) -> None:
        self._session: Session | None = None
        self._handler = Handler()
        self._undo: list[Any] = []

    def attach(self, session: Session | None) -> None:
        self._session = session
        self._handler.session = session

    async def start(self) -> None:
        self._patch_httpx()
        self._patch_aiohttp()

    async def stop(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        await self._handler.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _ours(self, host: str | None, port: int | None) -> bool:
        return host in (self.host, "localhost") and port == self.port

    # httpx

    def _patch_httpx(self) -> None:
        try:
            import httpx
        except ImportError:  # the target cannot use it either
            return
        front = self

        class Body(httpx.AsyncByteStream):
            def __init__(self, session: Session, reply: Any, request: httpx.Request) -> None:
                self.session, self.reply, self.request = session, reply, request

            async def __aiter__(self) -> Any:
                async for piece in self.session.send(self.reply):
                    yield piece
                if self.reply.ending == "drop" and (self.reply.stream or self.reply.lost):
                    raise httpx.RemoteProtocolError(
                        "peer closed connection without sending complete message body (incomplete chunked read)",
                        request=self.request,
                    )

        async def handle(_: Any, request: httpx.Request) -> httpx.Response:
            if not front._ours(request.url.host, request.url.port):
                raise httpx.ConnectError(f"rolloutcheck allows no connection to {request.url.host}", request=request)
            session = front._session
            if session is None:
                raise httpx.ConnectError("no run is in progress", request=request)
            reply = session.open(request.url.raw_path.decode(), await request.aread())
            await asyncio.sleep(0)
            if reply.status is None:
                session.ended(reply)
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
            headers = {"content-type": content_type(reply)}
            return httpx.Response(reply.status, headers=headers, stream=Body(session, reply, request))

        self._replace(httpx.AsyncHTTPTransport, "handle_async_request", handle)

    # aiohttp

    def _patch_aiohttp(self) -> None:
        try:
            import aiohttp
        except ImportError:
            return
        front = self
        from aiohttp.client_proto import ResponseHandler

        async def create(connector: Any, req: Any, *_: Any) -> ResponseHandler:
            if not front._ours(req.url.host, req.url.port):
                raise aiohttp.ClientError(f"rolloutcheck allows no connection to {req.url.host}")
            loop = asyncio.get_running_loop()
            client = ResponseHandler(loop)
            join(client, await front._handler.protocol(), loop)
            return client

        self._replace(aiohttp.TCPConnector, "_create_connection", create)


class MemoryTransport(asyncio.Transport):
    """One end of a connection that lives in memory. Bytes arrive in order, on the loop's next turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer_protocol: Any, protocol: Any) -> None:
        super().__init__({"peername": (HOST, 0), "sockname": (HOST, 0)})
        self._loop, self._peer_protocol, self._protocol = loop, peer_protocol, protocol
        self.peer: MemoryTransport | None = None
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self._loop.call_soon(self._arrive, bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def _arrive(self, data: bytes) -> None:
        if self.peer is not None and not self.peer._closing:
            self._peer_protocol.data_received(data)

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, error)
        if self.peer is not None:
            self._loop.call_soon(self.peer._peer_closed)

    def _peer_closed(self) -> None:
        if not self._closing:
            self._closing = True
            self._protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return None

    def pause_reading(self) -> None:
        return None

    def resume_reading(self) -> None:
        return None

    def is_reading(self) -> bool:
        return True


def join(client: Any, server: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Connects two protocols by a pair of memory transports."""
    near, far = MemoryTransport(loop, server, client), MemoryTransport(loop, client, server)
    near.peer, far.peer = far, near
    server.connection_made(far)
    client.connection_made(near)
