"""The engine as a server of its own: SGLang's paths over HTTP, for whoever develops a client.

Requests live in `harness.engines.live`; this module reads and writes HTTP.
Shapes of the control paths are those of the recorded cases named after them
(0.5.23, 0.5.9 `GET_...` and `POST_...`), cut down to what a client looks at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from json import JSONDecoder, dumps
from math import isfinite
from typing import Any

from aiohttp import web

from harness import tokenizer as tokenizers
from harness.engines import HOST, is_json
from harness.engines.live import Options, Scheduler
from harness.engines.sglang import RESERVE, Part, Reply
from harness.engines.web import QUIET, carry, cut

BEHIND = 1 << 18
"""Bytes that wait for a slow client; beyond them its events are merged, as the real server's are."""
MAX_BODY = 1 << 26
MODEL = "mock"
POOL = 1 << 20
"""Tokens that a KV cache without a limit says it holds."""
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
MODES = ("abort", "retract", "in_place")
TAKES = {
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
}
"""What the real server makes of a body; it names it in a refusal (0.5.23, by hand)."""

Handler = Callable[[web.BaseRequest], Awaitable[Reply]]


class Wire:
    """A stream's connection. Its events are written without waiting, each in an HTTP chunk of its own."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        """What there is to say before the answer's head is out."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def open(self, request: web.BaseRequest) -> None:
        """Raises ConnectionResetError where the client has left."""
        if request.transport is None:
            raise ConnectionResetError
        self._transport = request.transport
        self._transport.write(self._early)

    def behind(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > BEHIND

    def send(self, data: bytes) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if self._transport is None:
            self._early += chunk
        else:
            self._transport.write(chunk)

    def end(self, ending: str) -> None:
        """Nothing where the client has just left: whoever waited is cancelled and has not yet said so."""
        if not self.ended.done():
            self.ended.set_result(ending)


class Server:
    """Serves on ``host`` and ``port`` (0: a free one) of the running loop, from `start` to `stop`."""

    def __init__(self, options: Options, host: str = HOST, port: int = 0, tokenizer: Any = None) -> None:
        self.options, self.host, self.port = options, host, port
        self.scheduler = Scheduler(options, tokenizer or tokenizers.load())
        self.old = options.sglang == "0.5.9"
        self._web = web.Server(
            self._handle,
            access_log=None,
            logger=QUIET,
            handler_cancellation=True,
            request_factory=_request,
        )
        self._paths = self._known()

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def _pool(self) -> int:
        return self.options.pool or POOL

    async def start(self) -> None:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._web, self.host, self.port, backlog=4096)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.clock = asyncio.create_task(self.scheduler.run())

    async def stop(self) -> None:
        self._listener.close()
        self.clock.cancel()
        await self._web.shutdown(0.01)

    # HTTP

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/generate" and request.method == "POST":
            return await self._generate(request)
        return await self._carry(request, await self._control(request))

    async def _control(self, request: web.BaseRequest) -> Reply:
        handlers = self._paths.get(request.path)
        if handlers is None:
            return _json({"detail": "Not Found"}, 404)
        if request.method not in handlers:
            return _json({"detail": "Method Not Allowed"}, 405)
        try:
            return await handlers[request.method](request)
        except Refused as error:
            return _bad(str(error))

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = await _asked(request)
        except Refused as error:
            return await self._carry(request, _bad(str(error)))
        wire = Wire() if body.get("stream") is True else None
        made = await self.scheduler.accept(body, wire)
        if isinstance(made, Reply):
            return await self._carry(request, made)
        try:
            if wire is None:
                return await self._carry(request, await made.reply)
            return await self._stream(request, wire)
        except (asyncio.CancelledError, ConnectionResetError):
            self.scheduler.leave(made)
            raise

    async def _stream(self, request: web.BaseRequest, wire: Wire) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        wire.open(request)
        if await wire.ended == "drop":
            cut(request)
        else:
            await response.write_eof()
        return response

    async def _carry(self, request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for part in reply.parts:
                yield part.data

        return await carry(request, reply, pieces())

    # control

    def _known(self) -> dict[str, dict[str, Handler]]:
        get: dict[str, Handler] = {
            "/health": self._empty,
            "/health_generate": self._empty,
            "/workers": self._workers,
            "/list_workers": self._list_workers,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
            "/get_model_info": self._model_info,
            "/model_info": self._model_info,
            "/get_server_info": self._server_info,
            "/server_info": self._server_info,
            "/flush_cache": self._flush,
            **({"/get_load": self._get_load} if self.old else {"/ready": self._empty}),
        }
        post: dict[str, Handler] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/tokenize": self._tokenize,
            "/update_weights_from_disk": self._update_weights,
            "/update_weight_version": self._update_version,
        }
        paths: dict[str, dict[str, Handler]] = {"/generate": {}}
        for method, handlers in (("GET", get), ("POST", post)):
            for path, handler in handlers.items():
                paths.setdefault(path, {})[method] = handler
        return paths

    async def _empty(self, request: web.BaseRequest) -> Reply:
        return _text("")

    async def _workers(self, request: web.BaseRequest) -> Reply:
        """A router's, which slime asks for the engines behind it."""
        return _json({"workers": [{"url": self.url}]})

    async def _list_workers(self, request: web.BaseRequest) -> Reply:
        return _json({"urls": [self.url]})

    async def _loads(self, request: web.BaseRequest) -> Reply:
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        used = sum(job.size for job in self.scheduler.running)
        load: dict[str, Any] = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": used}
        load |= {"max_running_requests": self.options.max_running, "max_total_num_tokens": self._pool}
        said = {"timestamp": datetime.now(UTC).isoformat(), "version": self.options.sglang}
        if self.old:
            sums = {"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting}
            load["num_total_reqs"] = running + waiting
            return _json({**said, "dp_rank_count": 1, "loads": [load], "aggregate": sums})
        return _json({**said, "accelerator": None, "num_accelerators": 1, "loads": [{"dp_rank": 0, **load}]})

    async def _get_load(self, request: web.BaseRequest) -> Reply:
        waiting = len(self.scheduler.waiting)
        load = {"dp_rank": None, "num_reqs": len(self.scheduler.running) + waiting, "num_waiting_reqs": waiting}
        return _json([{**load, "num_tokens": sum(job.size for job in self.scheduler.running)}])

    async def _model_info(self, request: web.BaseRequest) -> Reply:
        known = {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}
        return _json({**known, "preferred_sampling_params": None, "weight_version": self.scheduler.version})

    async def _models(self, request: web.BaseRequest) -> Reply:
        known = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sglang", "root": MODEL, "parent": None}
        return _json({"object": "list", "data": [{**known, "max_model_len": self.options.context}]})

    async def _server_info(self, request: web.BaseRequest) -> Reply:
        return _json(
            {
                "model_path": MODEL,
                "tokenizer_path": MODEL,
                "context_length": self.options.context,
                "max_running_requests": self.options.max_running,
                "max_queued_requests": self.options.max_queued,
                "max_total_tokens": self.options.pool,
                "max_total_num_tokens": self._pool,
                "max_req_input_len": min(self.options.context, self._pool) - RESERVE,
                "allow_auto_truncate": False,
                "stream_interval": 1,
                "stream_output" if self.old else "incremental_streaming_output": self.options.incremental,
                "random_seed": self.options.seed,
                "weight_version": self.scheduler.version,
                "version": self.options.sglang,
            }
        )

    async def _tokenize(self, request: web.BaseRequest) -> Reply:
        asked = await _asked(request)
        if not isinstance(asked.get("prompt"), str):
            return _bad("prompt: Field required")
        ids = list(self.scheduler.tokenizer.encode(asked["prompt"], add_special_tokens=False))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.options.context})

    async def _flush(self, request: web.BaseRequest) -> Reply:
        try:
            timeout_s = float(request.query.get("timeout", 0))
        except ValueError:
            return _bad("timeout must be a number")
        return _text(FLUSHED) if await self.scheduler.flush(timeout_s) else _text("Flush cache failed.\n", 400)

    async def _abort(self, request: web.BaseRequest) -> Reply:
        asked = await _asked(request)
        if asked.get("abort_all") is True:
            self.scheduler.abort_all()
        else:
            self.scheduler.abort(str(asked.get("rid") or ""))
        return _text("")

    async def _pause(self, request: web.BaseRequest) -> Reply:
        mode = (await _asked(request)).get("mode", "abort")
        if mode not in MODES:
            return _bad(f"mode must be one of {', '.join(MODES)}")
        await self.scheduler.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.BaseRequest) -> Reply:
        await _asked(request)
        self.scheduler.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.BaseRequest) -> Reply:
        asked = await _asked(request)
        if not isinstance(asked.get("model_path"), str):
            return _bad("model_path: Field required")
        version = asked.get("weight_version")
        if asked.get("abort_all_requests") is True:
            self.scheduler.abort_all()
        await self.scheduler.update(None if version is None else str(version))
        message = "Succeeded to update model weights."
        message += "" if version is None else f" Weight version updated to {version}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def _update_version(self, request: web.BaseRequest) -> Reply:
        """`weight_version_mid`, `weight_version_abort`: at once, also under the requests that run."""
        asked = await _asked(request)
        if not isinstance(asked.get("new_version"), str):
            return _bad("new_version: Field required")
        version = asked["new_version"]
        if asked.get("abort_all_requests", True) is True:
            self.scheduler.abort_all()
        self.scheduler.rename(version)
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


@contextlib.asynccontextmanager
async def serving(options: Options, tokenizer: Any = None) -> AsyncIterator[str]:
    """A server on a free port of the loopback, on the running loop: its URL."""
    server = Server(options, tokenizer=tokenizer)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """As aiohttp makes one, but for the body's limit: a long input has megabytes of ids."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY)


# bodies


class Refused(Exception):
    """A body that does not get as far as its handler. The message is the real server's, up to where it tells the body.

    All of it by hand, on 0.5.23.
    """


async def _asked(request: web.BaseRequest) -> dict[str, Any]:
    """The object that a request's body is. Raises Refused."""
    data, kind = await request.read(), request.content_type
    if request.path == "/tokenize" and kind != "application/json":
        unsupported = "Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(f"1 validation error:\n  {{'loc': ['header', 'content-type'], 'msg': {unsupported!r}")
    if not data:
        raise Refused("1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required'")
    value = _parsed(data) if is_json(kind) else None
    if not isinstance(value, dict):
        raise Refused(_no_object(request.path))
    return value


def _no_object(path: str) -> str:
    """What is said of a body that is no object, or that nobody has read as JSON."""
    if path in TAKES:
        what = TAKES[path]
        where = f"'loc': ('body', 'is-instance[{what}]'), 'msg': 'Input should be an instance of {what}'"
        return f"2 validation errors:\n  {{'type': 'is_instance_of', {where}"
    if path == "/tokenize":
        kind, should = "model_attributes_type", "a valid dictionary or object to extract fields from"
    else:
        kind, should = "dataclass_type", "a dictionary or an instance of GenerateReqInput"
    return f"1 validation error:\n  {{'type': '{kind}', 'loc': ('body',), 'msg': 'Input should be {should}'"


def _parsed(data: bytes) -> Any:
    """The JSON of a body, read as strictly as the real server does. Raises Refused."""
    try:
        value = _JSON.decode(data.decode())
        if b"\\u" in data:  # half a letter, which could not be written again
            dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        where = f"'loc': ('body', {getattr(error, 'pos', 0)}), 'msg': 'JSON decode error'"
        raise Refused(f"1 validation error:\n  {{'type': 'json_invalid', {where}") from error
    return value


def _finite(text: str) -> float:
    """NaN, Infinity and what is too large for a number are no JSON."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return value


_JSON = JSONDecoder(parse_float=_finite, parse_constant=_finite)


# replies


def _text(text: str, status: int = 200) -> Reply:
    return Reply(status, False, (Part(text.encode()),))


def _json(value: Any, status: int = 200) -> Reply:
    return _text(dumps(value), status)


def _bad(message: str) -> Reply:
    """`POST_pause_generation_mode-bogus`, with fewer words."""
    return _json({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400)
