"""What a server is asked to find out how it behaves: each behaviour a small script of requests.

Behaviours are named after the cases of spec/sglang.md. Requests are relative to the
server's own limits, so that any server can be asked. All ids of tokens are the
server's own, learned from a text; every request's id begins with a prefix of ours.
Only what is marked as ``disruptive`` touches what others might have running.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from harness.events import Progress, Tell, ignore
from harness.server import NoServer, Server
from harness.wire import PATIENCE_S, Asked, Exchange, Missed, Wire, one_line, reading

TEXT = " the the the the the the"
"""Words of few tokens, the same again and again, so that one of them fills an input of any length."""
SHORT, SOME, LONG = 5, 200, 3000
"""Tokens: of an answer that is looked at, of one that something happens to, and of one that outlasts a wait."""
TAIL = 246
"""Tokens of the answers that reach the context limit: 10 and 246 make 256 (0.5.23 `exact_total`)."""
FEW = 4
"""A queue can only be filled where no more requests may run, and no more wait."""
QUEUED_S, RUNNING_S = 0.15, 0.3
"""Seconds in which a request reaches the queue, and has its first tokens; those before it do not end meanwhile."""
TOLD = 70
"""Events after which a plain request has more tokens than the 50 that a scheduler keeps to itself."""
LOADS = "/v1/loads?include=core"
PAUSE_S = 0.7
TRIES = 3
LONGEST = 1 << 24
"""Tokens of a context; inputs as long as a longer one would not fit into this process."""
FORCE = 100.0
"""A logit bias behind which no other token is chosen."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was learned from a server's own tokens: one with its text, and the token its answers end with."""

    token: int
    text: str
    eos: int | None


@dataclass(frozen=True, slots=True)
class Probe:
    """A behaviour. ``needs`` says why a server cannot be asked, or nothing."""

    name: str
    run: Callable[[Wire, Known], Awaitable[None]]
    disruptive: bool = False
    needs: Callable[[Server, Known], str] = lambda server, known: ""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a server answered. ``skipped``: behaviours it was not asked about, each with the reason."""

    server: Server
    exchanges: tuple[Exchange, ...]
    skipped: tuple[tuple[str, str], ...]


async def probe(server: Server, *, disruptive: bool = False, only: Sequence[str] = (), tell: Tell = ignore) -> Probed:
    """Asks the server about every behaviour, or ``only`` some, that can be asked about. Raises NoServer."""
    if not 0 < server.context <= LONGEST:
        raise NoServer(f"the server at {server.url} has a context of {server.context} tokens, which cannot be filled")
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    with reading(server.url):
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await _probed(Wire(session, server, f"rolloutcheck-{secrets.token_hex(8)}-"), disruptive, only, tell)


async def _probed(wire: Wire, disruptive: bool, only: Sequence[str], tell: Tell) -> Probed:
    server, known = wire.server, await learn(wire)
    disturbs = "" if disruptive else "it would disturb others: --disruptive"
    wanted = [one for one in PROBES if not only or one.name in only]
    reasons = {one.name: disturbs * one.disruptive or one.needs(server, known) for one in wanted}
    asked = [one for one in wanted if not reasons[one.name]]
    for number, one in enumerate(asked):
        tell(Progress(server.url, "behaviours", number, len(asked)))
        reasons[one.name] = await _tried(wire, one, known)
    return Probed(server, tuple(wire.exchanges), tuple((name, why) for name, why in reasons.items() if why))


async def _tried(wire: Wire, one: Probe, known: Known) -> str:
    """Why nothing came of it, if so."""
    for number in range(TRIES):
        wire.last = number == TRIES - 1
        with contextlib.suppress(Missed):
            await wire.behave(one.name, lambda w: one.run(w, known))
            return ""
    return f"its requests ended too soon, {TRIES} times"


async def learn(wire: Wire) -> Known:
    """A token of the server's own with its text, and its EOS if an answer ends with it. Raises NoServer."""
    read = await _learned(wire, body(TEXT, max_new_tokens=1) | {"logprob_start_len": 0})
    ids = sorted({entry[1] for entry in read["meta_info"]["input_token_logprobs"]})
    texts = {
        token: (await _learned(wire, body([token], max_new_tokens=1, logit_bias={str(token): FORCE})))["text"]
        for token in ids[:6]
    }
    token = max(texts, key=lambda one: len(texts[one].strip()))
    asked: dict[str, Any] = {"ignore_eos": False, "max_new_tokens": min(SOME, wire.server.limit - 20)}
    for length in range(1, 7):
        end = (await _learned(wire, body([token] * length, **asked)))["meta_info"]["finish_reason"].get("matched")
        if type(end) is int:
            return Known(token, texts[token], end)
    return Known(token, texts[token], None)


async def _learned(wire: Wire, asked: dict[str, Any]) -> dict[str, Any]:
    wire.behaviour = "learning"
    answer = wire.start("", asked)
    exchange = await answer.task
    if exchange.status != 200 or not isinstance(exchange.body, dict):
        said = one_line(str(exchange.body))
        raise NoServer(f"{wire.server.url} answers a small request with {exchange.status}: {said}")
    return exchange.body


def body(prompt: str | Sequence[int] | None, *, logprob: bool = True, **params: Any) -> dict[str, Any]:
    """A request. It goes on past a natural end, so that it has as many tokens as are asked for."""
    given: dict[str, Any] = {} if prompt is None else {"text" if isinstance(prompt, str) else "input_ids": prompt}
    return given | {"sampling_params": {"ignore_eos": True} | params} | ({"return_logprob": True} if logprob else {})


# behaviours of one request


def requests(server: Server, known: Known) -> dict[str, dict[str, Any]]:
    """The behaviours of one request, each with its request; asked about in plain and in a stream."""
    ten = [known.token] * 10
    forced: dict[str, Any] = {"logit_bias": {str(known.token): FORCE}, "ignore_eos": False}
    stop: dict[str, Any] = forced | {"stop_token_ids": [known.token]}
    eos: dict[str, Any] = {"logit_bias": {str(known.eos): FORCE}, "ignore_eos": False}
    twice: dict[str, Any] = forced | {"max_new_tokens": SHORT, "stop": [known.text * 2]}
    inside: dict[str, Any] = twice | {"stop": [known.text[-1:]]}
    return {
        "logprob": body(ten, max_new_tokens=SHORT),
        "nologprob": body(ten, max_new_tokens=SHORT, logprob=False),
        "logprob_rid": body(ten, max_new_tokens=3),
        "logprob_start0": body(ten, max_new_tokens=2) | {"logprob_start_len": 0},
        "text_prompt": body(TEXT, max_new_tokens=3),
        "unknown_toplevel": body(ten, max_new_tokens=3) | {"foo": 1},
        "unknown_param": body(ten, max_new_tokens=3, foo=1),
        "no_input": body(None, max_new_tokens=3),
        "empty_ids": body([], max_new_tokens=3),
        "max0": body(ten, max_new_tokens=0),
        "max1": body(ten, max_new_tokens=1),
        "max_neg": body(ten, max_new_tokens=-1),
        "max_omitted": body(ten),
        "max_float": body(ten, max_new_tokens=3.7),
        "max_floatint": body(ten, max_new_tokens=3.0),
        "max_string": body(ten, max_new_tokens="3"),
        "max_bool": body(ten, max_new_tokens=True),
        "min_gt_max": body(ten, max_new_tokens=3, min_new_tokens=5),
        "stop_id_before_budget": body(ten, max_new_tokens=3, **stop),
        "stop_id_at_budget1": body(ten, max_new_tokens=1, **stop),
        "stop_id_no_trim": body(ten, max_new_tokens=3, no_stop_trim=True, **stop),
        "stop_id_min_new": body(ten, max_new_tokens=3, min_new_tokens=3, **stop),
        "ignore_eos_and_stop_id": body(ten, **stop | {"max_new_tokens": 3, "ignore_eos": True}),
        "stopstr_trim": body(ten, **twice),
        "stopstr_notrim": body(ten, no_stop_trim=True, **twice),
        "stopstr_partial": body(ten, no_stop_trim=True, **inside),
        "stopstr_partial_trim": body(ten, **inside),
        "stopstr_at_budget": body(ten, **twice | {"max_new_tokens": 2, "no_stop_trim": True}),
        "eos_first": body(ten, max_new_tokens=4, **eos),
        "eos_at_budget1": body(ten, max_new_tokens=1, **eos),
        "eos_ignore": body(ten, **eos | {"max_new_tokens": 3, "ignore_eos": True, "skip_special_tokens": False}),
        **limits(server, known),
    }


def limits(server: Server, known: Known) -> dict[str, dict[str, Any]]:
    """Inputs and answers of ``C`` tokens together, and of a few less and more."""
    limit = server.context

    def asks(length: int, want: int | None) -> dict[str, Any]:
        return body([known.token] * length, max_new_tokens=want)

    return {
        "over_total": asks(10, limit),
        "exact_total": asks(limit - TAIL, TAIL),
        "exact_total_minus1": asks(limit - TAIL, TAIL - 1),
        "max_null": asks(limit - TAIL, None),
        "input_ctx_minus8_max8": asks(limit - 8, 8),
        "input_ctx_minus7_max1": asks(limit - 7, 1),
        "input_ctx_minus7_max6": asks(limit - 7, 6),
        "input_ctx_minus7_max7": asks(limit - 7, 7),
        "input_ctx_minus7_null": asks(limit - 7, None),
        "input_ctx_minus6_max0": asks(limit - 6, 0),
        "input_ctx_minus6_max5": asks(limit - 6, 5),
        "input_ctx_minus6_max6": asks(limit - 6, 6),
        "input_ctx_minus6_max7": asks(limit - 6, 7),
        "input_ctx_minus5_null": asks(limit - 5, None),
        "input_ctx_minus1_max0": asks(limit - 1, 0),
        "input_ctx_minus1_max1": asks(limit - 1, 1),
        "input_ctx_minus1_null": asks(limit - 1, None),
        "input_eq_ctx": asks(limit, 0),
        "input_too_long": asks(limit + 44, 3),
    }


def _one(name: str, *, stream: bool) -> Probe:
    async def run(wire: Wire, known: Known) -> None:
        asked = requests(wire.server, known)[name]
        await wire.ended(wire.start("", asked | ({"stream": True} if stream else {})))

    if name in ("logprob", "nologprob", "logprob_rid", "logprob_start0", "text_prompt"):
        full = f"{'stream' if stream else 'plain'}_{name}"
    else:
        full = f"{name}_stream" if stream else name
    return Probe(full, run, needs=_needed(name))


def _needed(name: str) -> Callable[[Server, Known], str]:
    if name in limits(Server("", "", 0, 0), Known(0, "", None)):
        return lambda server, known: "its KV pool is smaller than its context" if server.pool < server.context else ""
    if name.startswith("eos_"):
        return lambda server, known: "its EOS is not known" if known.eos is None else ""
    if name.startswith("stopstr_"):
        return lambda server, known: "no token of plain text is known" if len(known.text.strip()) < 2 else ""
    return lambda server, known: ""


def _singles() -> Iterator[Probe]:
    for name in requests(Server("", "", 0, 0), Known(0, "", None)):
        yield _one(name, stream=False)
        yield _one(name, stream=True)


# behaviours of several requests


def _long(wire: Wire, known: Known, most: int, *, stream: bool = False) -> dict[str, Any]:
    """A request of ``most`` tokens, or as many as there is room for."""
    asked = body([known.token] * 10, max_new_tokens=min(most, wire.server.limit - 16))
    return asked | ({"stream": True} if stream else {})


async def _both(wire: Wire, known: Known, most: int, plain: str = "", stream: str = "") -> tuple[Asked, Asked]:
    """A plain request and a stream that run, with their ids. One by one, as there may be room for one in the queue."""
    streaming = wire.start("stream", _long(wire, known, most, stream=True), stream)
    await streaming.begun()
    waiting = wire.start("plain", _long(wire, known, most), plain)
    await asyncio.sleep(RUNNING_S)
    streaming.runs()
    waiting.runs()
    return waiting, streaming


async def _ended_running(wire: Wire, *asked: Asked) -> None:
    """As `Wire.ended`; what had no token yet was not running, which is tried again."""
    await wire.ended(*asked)
    if any(_is_empty(one) for one in wire.exchanges[-len(asked) :]) and not wire.last:
        raise Missed


def _is_empty(one: Exchange) -> bool:
    """Whether it is an answer without a token."""
    told = one.events[-1] if one.events else one.body
    meta = told.get("meta_info", {}) if isinstance(told, dict) else {}
    return bool(meta.get("completion_tokens") == 0)


async def abort_running(wire: Wire, known: Known) -> None:
    plain, stream = await _both(wire, known, LONG)
    await wire.abort("plain")
    await wire.abort("stream")
    await _ended_running(wire, plain, stream)


async def abort_rid_prefix(wire: Wire, known: Known) -> None:
    plain, stream = await _both(wire, known, LONG, "xx-1", "xx-12")
    await wire.abort("xx-1")
    await _ended_running(wire, plain, stream)


async def abort_immediate(wire: Wire, known: Known) -> None:
    for wait in (0.0, 0.01, 0.03):
        part = f"after {wait * 1000:.0f} ms"
        asked = wire.start(part, _long(wire, known, SOME))
        await asyncio.sleep(wait)
        await wire.abort(part)
        await wire.ended(asked)


async def abort_noop(wire: Wire, known: Known) -> None:
    stream = wire.start("stream", _long(wire, known, SOME, stream=True))
    await stream.begun()
    await wire.abort("nobody")
    await wire.ended(stream)


async def abort_noop_empty(wire: Wire, known: Known) -> None:
    """Disruptive: a server of another version could take an empty id for the beginning of every id."""
    stream = wire.start("stream", _long(wire, known, SOME, stream=True))
    await stream.begun()
    await wire.call("/abort_request", {"rid": ""}, "empty rid")
    await wire.call("/abort_request", {}, "no rid")
    await wire.ended(stream)


async def abort_all(wire: Wire, known: Known) -> None:
    plain, stream = await _both(wire, known, LONG)
    await wire.call("/abort_request", {"abort_all": True}, "abort")
    await _ended_running(wire, plain, stream)


async def dup_rid(wire: Wire, known: Known) -> None:
    first = wire.start("first", _long(wire, known, SOME, stream=True), "dup")
    await first.begun()
    await wire.ended(wire.start("second", body([known.token] * 10, max_new_tokens=3), "dup"))
    first.runs()
    await wire.ended(first)


async def dup_rid_stream(wire: Wire, known: Known) -> None:
    """What the refused stream leaves behind aborts the one whose id it had (see `rid_reused`)."""
    first = wire.start("first", _long(wire, known, LONG), "dup")
    await asyncio.sleep(RUNNING_S)
    await wire.ended(wire.start("second", body([known.token] * 10, max_new_tokens=3) | {"stream": True}, "dup"))
    await wire.ended(first)


async def rid_reused(wire: Wire, known: Known) -> None:
    """0.5.23 sends an abort 2 s after every stream, for its id, whoever has it by then."""
    asked = body([known.token] * 10, max_new_tokens=1)
    await wire.ended(wire.start("first", asked | {"stream": True}, "again"))
    await wire.ended(wire.start("second", _long(wire, known, LONG), "again"))


async def disconnect_stream(wire: Wire, known: Known) -> None:
    stream = wire.start("", _long(wire, known, LONG, stream=True))
    await stream.begun()
    await stream.leave()
    await _left(wire)


async def disconnect_plain(wire: Wire, known: Known) -> None:
    plain = wire.start("", _long(wire, known, LONG))
    await wire.until(lambda running, waiting: running > 0)
    await plain.leave()
    await _left(wire)


async def _left(wire: Wire) -> None:
    """What runs after 1 s and 5 s: a stream stops within 0.4 s, a plain request after 3; a load can be 0.5 s old."""
    await asyncio.sleep(1.0)
    await wire.get(LOADS, "after 1 s")
    await asyncio.sleep(4.0)
    await wire.get(LOADS, "after 5 s")


async def _full(wire: Wire, known: Known, name: str = "fill") -> list[Asked]:
    """As many requests as may run, and they run."""
    asked = _long(wire, known, LONG, stream=True)
    return [await _begun(wire.start(f"{name}-{n}", asked)) for n in range(wire.server.running or 0)]


async def _begun(asked: Asked) -> Asked:
    await asked.begun()
    return asked


async def abort_queued(wire: Wire, known: Known) -> None:
    await _aborted_waiting(wire, known, "plain", stream=False)
    await _aborted_waiting(wire, known, "stream", stream=True)


async def _aborted_waiting(wire: Wire, known: Known, part: str, *, stream: bool) -> None:
    filling = await _full(wire, known, f"{part}-fill")
    asked = wire.start(part, _long(wire, known, SOME, stream=stream), f"wait-{part}")
    await asyncio.sleep(QUEUED_S)
    for one in filling:
        one.runs()
    await wire.abort(f"wait-{part}")
    await wire.ended(asked)
    await wire.end(filling)


async def queue_full(wire: Wire, known: Known) -> None:
    filling = await _full(wire, known)
    for n in range(wire.server.queue or 0):
        wire.start(f"wait-{n}", _long(wire, known, SOME))
    await asyncio.sleep(QUEUED_S)
    for part, stream in (("plain", False), ("stream", True)):
        for one in filling:
            one.runs()
        await wire.ended(wire.start(part, _long(wire, known, SHORT, stream=stream)))


def _paused(mode: str, *, then_abort: bool = False) -> Callable[[Wire, Known], Awaitable[None]]:
    async def run(wire: Wire, known: Known) -> None:
        plain, stream = await _both(wire, known, SOME)
        if then_abort:
            await stream.begun(len(stream.events) + TOLD)
        late = []
        async with _pause(wire, mode):
            if then_abort:
                await wire.call("/abort_request", {"abort_all": True}, "abort")
            else:
                late.append(wire.start("late", _long(wire, known, SHORT)))
            await asyncio.sleep(PAUSE_S)
        await _ended_running(wire, plain, stream, *late)

    return run


async def retract_queue_full(wire: Wire, known: Known) -> None:
    """More requests are retracted than may wait."""
    plain, stream = await _both(wire, known, SOME)
    async with _pause(wire, "retract"):
        await asyncio.sleep(PAUSE_S)
    await wire.ended(plain, stream)


@contextlib.asynccontextmanager
async def _pause(wire: Wire, mode: str) -> AsyncIterator[None]:
    """What ends in between, or while the pause begins, is recorded as ended while paused."""
    wire.during = "paused"
    try:
        await wire.call("/pause_generation", {"mode": mode}, "pause")
        yield
    finally:
        wire.during = ""
        await wire.call("/continue_generation", {}, "continue")


async def flush_busy(wire: Wire, known: Known) -> None:
    stream = wire.start("stream", _long(wire, known, SOME, stream=True))
    await stream.begun()
    await wire.call("/flush_cache", {}, "busy")
    await wire.ended(stream)
    await wire.until(lambda running, waiting: running == 0)
    await wire.call("/flush_cache", {}, "idle")


def _versions(*, abort: bool) -> Callable[[Wire, Known], Awaitable[None]]:
    """New weights, told to the server by their name alone, under a request that runs; then the old name again."""

    async def run(wire: Wire, known: Known) -> None:
        plain, stream = await _both(wire, known, SOME)
        await _renamed(wire, "next", abort, plain, stream)

    return run


async def _renamed(wire: Wire, name: str, abort: bool, *asked: Asked) -> None:
    old = (await wire.get("/get_model_info", "before")).body["weight_version"]  # else it could not be put back
    try:
        await wire.call("/update_weight_version", {"new_version": name, "abort_all_requests": abort}, "update")
        for one in () if abort else asked:
            one.runs()
        await wire.get("/get_model_info", "after")
        await wire.ended(*asked)
    finally:
        await wire.call("/update_weight_version", {"new_version": old, "abort_all_requests": False}, "back")


async def weights_from_disk(wire: Wire, known: Known) -> None:
    """The model's own weights again, under another name, while requests are paused where they are."""
    stream = wire.start("stream", _long(wire, known, SOME, stream=True))
    await stream.begun()
    info = await wire.get("/get_model_info", "before")
    asked = {"model_path": info.body["model_path"], "abort_all_requests": False, "flush_cache": False}
    old = info.body["weight_version"]
    async with _pause(wire, "in_place"):
        await wire.call("/update_weights_from_disk", asked | {"weight_version": "next"}, "update")
    await wire.ended(stream)
    await wire.call("/update_weights_from_disk", asked | {"weight_version": old}, "back")


def _path(path: str) -> Probe:
    async def run(wire: Wire, known: Known) -> None:
        await wire.get(path)

    return Probe("GET_" + path[1:].replace("/", "_").replace("?", "_"), run)


def _queues(server: Server, known: Known) -> str:
    few = server.running is not None and server.running <= FEW and server.queue != 0
    return "" if few else f"it needs --max-running-requests of at most {FEW}, and a queue"


def _fills(server: Server, known: Known) -> str:
    few = server.queue is not None and 0 < server.queue <= FEW
    return _queues(server, known) or ("" if few else f"it needs --max-queued-requests of at most {FEW}")


def _waits(server: Server, known: Known) -> str:
    return "" if server.queue is None or server.queue > FEW else "its queue is too short for what is retracted"


def _lasts(server: Server, known: Known) -> str:
    return "" if server.limit > LONG else f"it needs room for {LONG} tokens"


PATHS = (
    *("/health", "/get_model_info", "/get_server_info", "/v1/models", LOADS, "/get_load"),
    "/nowhere",
)

PROBES: tuple[Probe, ...] = (
    *_singles(),
    Probe("abort_running", abort_running),
    Probe("abort_rid_prefix", abort_rid_prefix),
    Probe("abort_immediate", abort_immediate),
    Probe("abort_noop", abort_noop),
    Probe("abort_queued", abort_queued, needs=_queues),
    Probe("queue_full", queue_full, needs=_fills),
    Probe("dup_rid", dup_rid),
    Probe("dup_rid_stream", dup_rid_stream, needs=_lasts),
    Probe("rid_reused", rid_reused, needs=_lasts),
    Probe("disconnect_stream", disconnect_stream, needs=_lasts),
    Probe("disconnect_plain", disconnect_plain, needs=_lasts),
    Probe("abort_noop_empty", abort_noop_empty, disruptive=True),
    Probe("abort_all", abort_all, disruptive=True),
    Probe("pause_abort", _paused("abort"), disruptive=True),
    Probe("pause_in_place", _paused("in_place"), disruptive=True),
    Probe("pause_retract", _paused("retract"), True, _waits),
    Probe("pause_in_place_then_abort_all", _paused("in_place", then_abort=True), disruptive=True),
    Probe("pause_retract_then_abort_all", _paused("retract", then_abort=True), True, _waits),
    Probe("retract_queue_full", retract_queue_full, True, _fills),
    Probe("flush_busy", flush_busy, disruptive=True),
    Probe("weight_version_mid", _versions(abort=False), disruptive=True),
    Probe("weight_version_abort", _versions(abort=True), disruptive=True),
    Probe("weights_from_disk", weights_from_disk, disruptive=True),
    *(_path(path) for path in PATHS),
)
