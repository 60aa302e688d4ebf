"""The engine in the client's own process: no socket, real client libraries.

Whatever client a target builds, it ends in one of two seams: httpx's transport
or aiohttp's connector. Both are replaced while the front runs, so a target is
not told about it. For httpx the reply is handed to the transport's caller. For
aiohttp the client's real protocol object is joined by memory to `Connection`,
which writes HTTP/1.1 bytes: what the client does with chunks and broken
connections is aiohttp's own doing. Any other address is refused: a target under
test does not reach the network.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from harness.engines import HOST, NOBODY, Served, as_sent, content_type


class InprocFront:
    name = "inproc"
    host, port = HOST, NOBODY
    cannot: frozenset[str] = frozenset()
    sockets = False
    greedy = False
    broken = ""

    def __init__(self) -> None:
        self._session: Served | None = None
        self._undo: list[Any] = []

    def attach(self, session: Served | None) -> None:
        self._session = session

    async def start(self) -> None:
        self._patch_httpx()
        self._patch_aiohttp()

    async def stop(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _ours(self, host: str | None, port: int | None) -> bool:
        return host in (self.host, "localhost") and port == self.port

    # httpx

    def _patch_httpx(self) -> None:
        import httpx

        front = self

        class Body(httpx.AsyncByteStream):
            def __init__(self, session: Served, reply: Any, request: httpx.Request) -> None:
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
            body = as_sent(request.headers.get("content-type"), await request.aread())
            reply = await session.answer(request.url.raw_path.decode(), body)
            await asyncio.sleep(0)
            if reply.status is None:
                session.ended(reply)
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
            headers = {"content-type": content_type(reply)}
            return httpx.Response(reply.status, headers=headers, stream=Body(session, reply, request))

        self._replace(httpx.AsyncHTTPTransport, "handle_async_request", handle)

    # aiohttp

    def _patch_aiohttp(self) -> None:
        import aiohttp
        from aiohttp.client_proto import ResponseHandler

        front, before = self, aiohttp.TCPConnector._create_connection

        async def create(connector: Any, req: Any, *given: Any) -> ResponseHandler:
            if getattr(connector, "outward", False):  # the harness's own way to a real server
                return await before(connector, req, *given)
            if not front._ours(req.url.host, req.url.port):
                raise aiohttp.ClientError(f"rolloutcheck allows no connection to {req.url.host}")
            loop = asyncio.get_running_loop()
            client = ResponseHandler(loop)
            join(client, Connection(lambda: front._session, loop), loop)
            return client

        self._replace(aiohttp.TCPConnector, "_create_connection", create)


class Connection(asyncio.Protocol):
    """The engine's end of a connection in memory: reads requests, writes replies as HTTP/1.1.

    Written out because a general server costs as much as all the rest of an
    example. It reads what HTTP clients write to it in this process, no more.
    """

    def __init__(self, session: Callable[[], Served | None], loop: asyncio.AbstractEventLoop) -> None:
        self._session, self._loop = session, loop
        self._buffer = bytearray()
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := _take(self._buffer)) is not None:
            self._task = self._loop.create_task(self._reply(*request))

    def connection_lost(self, exc: Exception | None) -> None:
        session = self._session()
        if session is not None and self._task is not None and not self._task.done():
            session.left(self._task)

    async def _reply(self, path: str, body: bytes) -> None:
        session, transport = self._session(), self._transport
        if session is None:  # no run is in progress
            transport.close()
            return
        reply = await session.answer(path, body)
        if reply.status is None:
            session.ended(reply)
            transport.close()
            return
        head = f"HTTP/1.1 {reply.status} {_REASONS.get(reply.status, '')}\r\nContent-Type: {content_type(reply)}\r\n"
        # A broken plain reply promises more bytes than it brings.
        length = sum(len(p.data) for p in reply.parts) + (reply.ending == "drop" and reply.lost is not None)
        head += "Transfer-Encoding: chunked\r\n\r\n" if reply.stream else f"Content-Length: {length}\r\n\r\n"
        pending = head.encode()
        async for piece in session.send(reply, transport.is_closing):
            transport.write(pending + (b"%x\r\n%b\r\n" % (len(piece), piece) if reply.stream else piece))
            pending = b""
        if reply.ending == "drop":
            transport.write(pending)
            transport.close()
        else:
            transport.write(pending + (b"0\r\n\r\n" if reply.stream else b""))


_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_KIND = re.compile(rb"\r\ncontent-type: *([^\r]*)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


def _take(buffer: bytearray) -> tuple[str, bytes] | None:
    """The path and body of a whole request, taken off the buffer; None while it is not whole."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head, start = bytes(buffer[:end]), end + 4
    if _CHUNKED.search(head):
        body, start = _dechunk(buffer, start)
        if start < 0:
            return None
    else:
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(buffer) < start + length:
            return None
        body, start = bytes(buffer[start : start + length]), start + length
    del buffer[:start]
    kind = _KIND.search(head)
    return head.split(b" ", 2)[1].decode(), as_sent(None if kind is None else kind[1].decode("latin-1"), body)


def _dechunk(buffer: bytearray, start: int) -> tuple[bytes, int]:
    """A chunked body and where it ends, -1 while it is not whole."""
    body = b""
    while (line := buffer.find(b"\r\n", start)) >= 0:
        size = int(buffer[start:line].partition(b";")[0], 16)
        start = line + 2 + size + 2
        if len(buffer) < start:
            break
        if size == 0:
            return body, start
        body += bytes(buffer[line + 2 : line + 2 + size])
    return b"", -1


class MemoryTransport(asyncio.Transport):
    """One end of a connection that lives in memory. Bytes arrive in order, on the loop's next turn."""

    peer: MemoryTransport

    def __init__(self, loop: asyncio.AbstractEventLoop, peer_protocol: Any, protocol: Any) -> None:
        super().__init__({"peername": (HOST, 0), "sockname": (HOST, 0)})
        self._loop, self._peer_protocol, self._protocol = loop, peer_protocol, protocol
        self._closing = False

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self._loop.call_soon(self._arrive, bytes(data))

    def _arrive(self, data: bytes) -> None:
        if not self.peer._closing:
            self._peer_protocol.data_received(data)

    def close(self) -> None:
        self._end()

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, None)
        self._loop.call_soon(self.peer._peer_closed)

    def _peer_closed(self) -> None:
        if not self._closing:
            self._closing = True
            self._protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return None

    def resume_reading(self) -> None:
        return None


def join(client: Any, server: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Connects two protocols by a pair of memory transports."""
    near, far = MemoryTransport(loop, server, client), MemoryTransport(loop, client, server)
    near.peer, far.peer = far, near
    server.connection_made(far)
    client.connection_made(near)
