"""The fronts carry one engine: what a client is told does not depend on how the bytes reach it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness import tokenizer
from harness.engines import FRONTS, HOST, _segments, front
from harness.engines.sglang import Engine, Part, Place
from harness.history import (
    INCREMENTAL,
    MODES,
    PLAIN,
    STREAM,
    Called,
    Delivered,
    Faulted,
    History,
    Raised,
    Requested,
    Returned,
)
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.strategies import schedules
from harness.targets import Target
from harness.targets.function import FunctionTarget, Generate, reference

DRAWN = 100
SOCKETLESS = ("inproc", "aioresponses")
BREAKING = ("inproc", "loopback")
"""Fronts that can break a connection inside a body."""


@contextmanager
def running(target: Target, name: str) -> Iterator[Runner]:
    """A runner that is closed whatever happens: one may be open at a time."""
    runner = Runner(target, name)
    try:
        yield runner
    finally:
        runner.close()


def drawn(count: int) -> list[Schedule]:
    """Schedules as Hypothesis draws them, the same every time."""
    found: list[Schedule] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def collect(schedule: Schedule) -> None:
        found.append(schedule)

    collect()
    return found


def summary(history: History) -> list[Any]:
    """What must not depend on the front: calls, requests by value, and how each call ended."""
    lines: list[Any] = []
    for event in history.events:
        if isinstance(event, Called):
            lines.append(("called", event.attempt, event.sample, event.view))
        elif isinstance(event, Requested):
            lines.append(event)
        elif isinstance(event, Returned):
            lines.append(("returned", event.view, event.params, event.others, event.writes))
        elif isinstance(event, Raised):
            lines.append(("raised", event.error, event.view, event.params, event.others, event.writes))
        elif not isinstance(event, Faulted) and hasattr(event, "kind"):
            lines.append(("halted", event.kind))
    return lines


@pytest.fixture(scope="module")
def histories() -> dict[str, dict[tuple[int, str], History]]:
    """The reference on every front, in every mode, by number of the schedule and mode."""
    plans, found = drawn(DRAWN), {}
    for name in FRONTS:
        with running(reference(), name) as runner:
            found[name] = {
                (i, mode): runner.run(plan, mode)
                for i, plan in enumerate(plans)
                for mode in MODES
                if runner.can_run(plan, mode)
            }
    return found


class TestOneEngine:
    @pytest.mark.parametrize("other", ["loopback", "aioresponses"])
    def test_same_history(self, histories: dict[str, dict[tuple[int, str], History]], other: str) -> None:
        compared = histories[other]
        assert len(compared) > DRAWN
        for key, history in compared.items():
            expected = histories["inproc"][key]
            assert summary(history) == summary(expected), f"{key[1]} {history.schedule}"

    def test_in_process_runs_are_the_same_every_time(
        self, histories: dict[str, dict[tuple[int, str], History]]
    ) -> None:
        with running(reference(), "inproc") as runner:
            for (index, mode), history in histories["inproc"].items():
                if index % 10 == 0:
                    assert runner.run(history.schedule, mode) == history

    def test_what_a_front_cannot_carry_is_left_out(self, histories: dict[str, dict[tuple[int, str], History]]) -> None:
        carried = {kind for h in histories["aioresponses"].values() for kind in h.schedule.kinds}
        assert not carried & front("aioresponses").cannot
        assert len(histories["inproc"]) == len(histories["loopback"]) == DRAWN * len(MODES)


# Clients of our own, as different from the reference as can be


def _payload(sample: Any, params: dict[str, Any], *, stream: bool, tokens: list[int]) -> dict[str, Any]:
    limit = params["max_new_tokens"] - sample.response_length
    return {
        "input_ids": tokens,
        "sampling_params": {**params, "max_new_tokens": limit},
        "return_logprob": True,
        "stream": stream,
    }


def _prompted(args: Any, sample: Any) -> list[int]:
    return list(sample.tokens) or args.tokenizer.encode(sample.prompt, add_special_tokens=False)


def _keep(args: Any, sample: Any, tokens: list[int], event: dict[str, Any]) -> None:
    sample.tokens = tokens
    entries = event["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[e[1] for e in entries], log_probs=[e[0] for e in entries], meta_info=event["meta_info"]
    )


def _url(args: Any) -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


def _last_event(text: str) -> dict[str, Any]:
    lines = [x.removeprefix("data: ") for x in text.split("\n\n") if x.startswith("data: ")]
    last: dict[str, Any] = json.loads([x for x in lines if x != "[DONE]"][-1])
    return last


async def httpx_plain(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    tokens = _prompted(args, sample)
    async with httpx.AsyncClient() as client:
        reply = await client.post(_url(args), json=_payload(sample, params, stream=False, tokens=tokens))
    _keep(args, sample, tokens, reply.json())
    return sample


async def httpx_stream(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    tokens, text = _prompted(args, sample), ""
    payload = _payload(sample, params, stream=True, tokens=tokens)
    async with httpx.AsyncClient() as client, client.stream("POST", _url(args), json=payload) as reply:
        async for piece in reply.aiter_text():
            text += piece
    _keep(args, sample, tokens, _last_event(text))
    return sample


async def aiohttp_plain(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    tokens = _prompted(args, sample)
    payload = _payload(sample, params, stream=False, tokens=tokens)
    async with aiohttp.ClientSession() as session, session.post(_url(args), json=payload) as reply:
        _keep(args, sample, tokens, await reply.json())
    return sample


async def aiohttp_stream(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    tokens, data = _prompted(args, sample), b""
    payload = _payload(sample, params, stream=True, tokens=tokens)
    async with aiohttp.ClientSession() as session, session.post(_url(args), json=payload) as reply:
        async for line in reply.content:
            data += line
    _keep(args, sample, tokens, _last_event(data.decode()))
    return sample


CLIENTS = {"httpx": (httpx_plain, httpx_stream), "aiohttp": (aiohttp_plain, aiohttp_stream)}
RESUMED = Schedule(prompt="日é", budget=4, script=(65, 97, 98), attempts=(Attempt("abort", after=1),))


@pytest.mark.parametrize(
    ("library", "name"),
    [("httpx", "inproc"), ("httpx", "loopback"), *(("aiohttp", name) for name in FRONTS)],
)
def test_clients_of_both_libraries_reach_the_engine(library: str, name: str) -> None:
    """A client made for each call is served like one that is kept."""
    with running(FunctionTarget(library, *CLIENTS[library]), name) as runner:
        for mode in (PLAIN, STREAM):
            history = runner.run(RESUMED, mode)
            ends = [e for e in history.events if isinstance(e, Returned)]
            assert [e.view.response_length for e in ends[:2]] == [1, 4]
            assert [e.view.status for e in ends[:2]] == ["aborted", "truncated"]
            asked = [(e.params["max_new_tokens"], e.stream) for e in history.events if isinstance(e, Requested)][:2]
            assert asked == [(4, mode == STREAM), (3, mode == STREAM)]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/x+json", True),
        (None, True),
        ("application/octet-stream", False),
        ("application/x-www-form-urlencoded", False),
        ("text/json", False),
    ],
)
@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
@pytest.mark.parametrize("name", ["inproc", "loopback"])
def test_a_body_that_does_not_say_it_is_json_is_not_read(name: str, library: str, kind: str | None, read: bool) -> None:
    """As SGLang 0.5.23 refuses it, by FastAPI."""

    async def sends(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        body = json.dumps(_payload(sample, params, stream=False, tokens=_prompted(args, sample))).encode()
        headers = {} if kind is None else {"Content-Type": kind}
        if library == "httpx":
            async with httpx.AsyncClient() as client:
                assert ((await client.post(_url(args), content=body, headers=headers)).status_code == 200) == read
        else:
            skip = {"skip_auto_headers": ["Content-Type"]}
            async with (
                aiohttp.ClientSession() as session,
                session.post(_url(args), data=body, headers=headers, **skip) as reply,
            ):
                assert (reply.status == 200) == read
        return sample

    with running(FunctionTarget(library, sends, None), name) as runner:
        history = runner.run(Schedule(), PLAIN)
    assert not [e for e in history.events if isinstance(e, Raised)]
    assert [e.code for e in history.events if isinstance(e, Faulted)][:1] == ([] if read else [400])


@pytest.mark.parametrize("name", FRONTS)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_server_is_asked_to_do_the_mock_does_on_every_front(name: str, mode: str) -> None:
    """What comes late comes all the same, and an abort is heard a token later."""
    attempts = (Attempt("delay", after=2), Attempt("abort-request", after=2))
    with running(reference(), name) as runner:
        late = runner.run(Schedule(prompt="ab", budget=5, attempts=attempts[:1]), mode)
        cut = runner.run(Schedule(prompt="ab", budget=5, attempts=attempts[1:]), mode)
    told = [e for e in late.events if isinstance(e, Delivered)]
    assert sum(len(e.ids) for e in told) == 5 and told[-1].finish == "length"
    first, second = (e for e in cut.events if isinstance(e, Delivered) and e.finish)
    assert (first.finish, second.finish) == ("abort", "length")
    ends = [e.view.response_length for e in cut.events if isinstance(e, Returned)]
    assert ends[:2] == [3, 5]


def test_what_comes_late_begins_a_segment_of_its_own() -> None:
    events = [Part(b"a"), Part(b"b"), Part(b"c", late=True), Part(b"d")]
    assert [data for data, _ in _segments(events, 0)] == [b"a", b"b", b"cd"]
    assert [data for data, _ in _segments(events[2:], 0)] == [b"c", b"d"]
    assert [data for data, _ in _segments([Part(b"x" * 6), Part(b"y" * 3, late=True)], 4)] == [b"xxxx", b"xx", b"yyy"]


class TestRefused:
    """A target under test does not reach the network."""

    ELSEWHERE = ("http://192.0.2.1/generate", f"http://{HOST}:9/generate", "https://example.invalid/", "http://[::1]/")

    @pytest.mark.parametrize("url", ELSEWHERE)
    @pytest.mark.parametrize("name", SOCKETLESS)
    def test_aiohttp(self, monkeypatch: pytest.MonkeyPatch, name: str, url: str) -> None:
        async def visit(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            async with aiohttp.ClientSession() as session, session.post(url, json={}) as reply:
                await reply.read()
            return sample

        self._refused(monkeypatch, visit, name, aiohttp.ClientError)

    @pytest.mark.parametrize("url", ELSEWHERE)
    def test_httpx(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        async def visit(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            async with httpx.AsyncClient() as client:
                await client.post(url, json={})
            return sample

        self._refused(monkeypatch, visit, "inproc", httpx.ConnectError)

    def _refused(self, monkeypatch: pytest.MonkeyPatch, visit: Generate, name: str, kind: type[Exception]) -> None:
        seen: list[BaseException] = []

        async def client(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            try:
                return await visit(args, sample, params)
            except Exception as error:
                seen.append(error)
                raise

        monkeypatch.setattr(socket.socket, "connect", _no_socket)
        with running(FunctionTarget("visitor", client, client), name) as runner:
            history = runner.run(Schedule(), PLAIN)
        assert seen
        assert all(isinstance(e, kind) for e in seen), seen
        assert not [e for e in history.events if isinstance(e, Requested)]


def _no_socket(*_: Any) -> None:
    raise AssertionError("a socket was used")


# Bytes


async def _httpx_bytes(url: str, payload: dict[str, Any]) -> AsyncIterator[bytes]:
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=payload) as reply:
        async for piece in reply.aiter_raw():
            yield piece


async def _aiohttp_bytes(url: str, payload: dict[str, Any]) -> AsyncIterator[bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as reply:
        async for piece in reply.content.iter_any():
            yield piece


BYTES = {"httpx": _httpx_bytes, "aiohttp": _aiohttp_bytes}
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, aiohttp.ClientError)


class Received:
    """A client that keeps what it reads, piece by piece, and how the connection ended."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.pieces: list[list[bytes]] = []
        self.errors: list[BaseException | None] = []

    def target(self) -> FunctionTarget:
        async def plain(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            return await self._read(args, sample, params, stream=False)

        async def stream(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            return await self._read(args, sample, params, stream=True)

        return FunctionTarget(f"{self.library} bytes", plain, stream)

    async def _read(self, args: Any, sample: Any, params: dict[str, Any], *, stream: bool) -> Any:
        payload = _payload(sample, params, stream=stream, tokens=_prompted(args, sample))
        self.pieces.append([])
        self.errors.append(None)
        try:
            async for piece in BYTES[self.library](_url(args), payload):
                self.pieces[-1].append(piece)
        except BROKEN as error:
            self.errors[-1] = error
        return sample

    def first(self) -> tuple[bytes, BaseException | None]:
        return b"".join(self.pieces[0]), self.errors[0]


def sent(schedule: Schedule, mode: str) -> bytes:
    """All bytes of the first attempt's body, as the engine gives them."""
    engine = Engine(schedule, tokenizer.load(), incremental=mode == INCREMENTAL)
    payload = {
        "input_ids": list(engine.prompt_ids),
        "sampling_params": {"max_new_tokens": schedule.budget},
        "return_logprob": True,
        "stream": mode != PLAIN,
    }
    return b"".join(p.data for p in engine.answer(payload, schedule.attempts[0], Place(0, 0, 0)).parts)


SUN = tokenizer.load().encode("日")  # one token, three bytes


def broken_at(mode: str) -> list[Schedule]:
    """Schedules that break the second event (of a plain reply: the body) at its start, in a character, near the end."""
    whole = Schedule(prompt="日", budget=3, script=(*SUN, 65), attempts=(Attempt("run"),))
    data = sent(whole, mode)
    event = data if mode == PLAIN else data.split(b"\n\n")[1] + b"\n\n"
    inside = event.index("日".encode()) if mode != INCREMENTAL else len(event) // 2
    places = sorted({1, 7, inside, inside + 1, inside + 2, len(event) - 1})
    after = 0 if mode == PLAIN else 1
    return [
        Schedule(prompt="日", budget=3, script=(*SUN, 65), attempts=(Attempt("drop-inside", after=after, at=at),))
        for at in places
    ]


@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.parametrize("library", list(BYTES))
class TestBrokenConnections:
    def test_before_any_answer(self, library: str, name: str) -> None:
        received = Received(library)
        with running(received.target(), name) as runner:
            for mode in (PLAIN, STREAM):
                history = runner.run(Schedule(budget=2, attempts=(Attempt("drop-before"),)), mode)
                assert [e.kind for e in history.events if isinstance(e, Faulted)] == ["drop-before"]
        data, error = received.first()
        assert data == b""
        assert isinstance(error, BROKEN)

    @pytest.mark.parametrize("mode", MODES)
    def test_inside(self, library: str, name: str, mode: str) -> None:
        """Inside a UTF-8 character, inside an SSE line, one byte before the end: the client gets exactly that much."""
        for schedule in broken_at(mode):
            received = Received(library)
            with running(received.target(), name) as runner:
                history = runner.run(schedule, mode)
            data, error = received.first()
            assert isinstance(error, BROKEN), schedule
            assert data == sent(schedule, mode), schedule
            assert [e.kind for e in history.events if isinstance(e, Faulted)] == ["drop-inside"]

    def test_after_a_stream(self, library: str, name: str) -> None:
        """The whole body arrives; only the end of the chunked message is missing."""
        schedule, received = Schedule(budget=2, attempts=(Attempt("drop-after"),)), Received(library)
        with running(received.target(), name) as runner:
            runner.run(schedule, STREAM)
        data, error = received.first()
        assert data == sent(schedule, STREAM)
        assert data.endswith(b"data: [DONE]\n\n")
        assert isinstance(error, BROKEN)

    def test_after_a_plain_reply(self, library: str, name: str) -> None:
        """The reply is as long as it says: a client cannot tell that the connection broke after it."""
        schedule, received = Schedule(budget=2, attempts=(Attempt("drop-after"),)), Received(library)
        with running(received.target(), name) as runner:
            runner.run(schedule, PLAIN)
        data, error = received.first()
        assert data == sent(schedule, PLAIN)
        assert error is None

    @pytest.mark.parametrize("split", [1, 5, 64])
    def test_split(self, library: str, name: str, split: int) -> None:
        """The same bytes in smaller segments."""
        schedule = Schedule(prompt="日", budget=3, script=(*SUN, 65), split=split, attempts=(Attempt("run"),))
        received = Received(library)
        with running(received.target(), name) as runner:
            for mode in MODES:
                runner.run(schedule, mode)
        data, error = received.first()
        assert error is None
        assert data == sent(schedule, PLAIN)
        if name == "inproc" and library == "httpx":  # elsewhere a reader may be given several at once
            assert len(received.pieces[0]) > 1


# What is left behind


def _seams() -> list[Any]:
    return [
        httpx.AsyncHTTPTransport.handle_async_request,
        httpx.HTTPTransport.handle_request,
        aiohttp.TCPConnector._create_connection,
        aiohttp.ClientSession._request,
        aiohttp.ClientSession.__init__,
    ]


@pytest.mark.parametrize("name", FRONTS)
def test_nothing_is_left_patched(name: str) -> None:
    before = _seams()
    with running(reference(), name) as runner:
        runner.run(RESUMED, STREAM)
    assert _seams() == before
    if name in SOCKETLESS:  # the loopback front waits 5 real seconds for bytes before it calls a hang a hang
        with running(FunctionTarget("hangs", _hang, _hang), name) as runner:
            runner.run(RESUMED, PLAIN)
        assert _seams() == before


async def _hang(args: Any, sample: Any, params: dict[str, Any]) -> Any:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("name", SOCKETLESS)
def test_a_task_that_outlives_its_run_is_not_in_the_next_history(name: str) -> None:
    left: list[asyncio.Task[Any]] = []

    async def later(args: Any, sample: Any, params: dict[str, Any]) -> None:
        await asyncio.sleep(3600)
        await aiohttp_plain(args, sample, params)

    async def leaves(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        left.append(asyncio.create_task(later(args, type(sample)(prompt=sample.prompt), params)))
        return await aiohttp_plain(args, sample, params)

    with running(FunctionTarget("tidy", aiohttp_plain, aiohttp_plain), name) as runner:
        expected = runner.run(RESUMED, PLAIN)
    with running(FunctionTarget("leaves", leaves, leaves), name) as runner:
        histories = [runner.run(RESUMED, PLAIN) for _ in range(3)]
    assert all(t.cancelled() for t in left)
    assert histories == [expected] * 3


def test_the_loopback_server_listens_on_this_machine_only() -> None:
    with running(reference(), "loopback") as runner:
        listener: Any = runner.front
        names = [s.getsockname() for s in listener._listener.sockets]
        assert [n[0] for n in names] == [HOST] == ["127.0.0.1"]
        assert runner.front.port == names[0][1] > 0
    assert listener._listener is None


@pytest.mark.parametrize("name", SOCKETLESS)
def test_the_other_fronts_open_no_socket(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with running(reference(), name) as runner:
        for method in ("connect", "bind", "listen"):
            monkeypatch.setattr(socket.socket, method, _no_socket)
        for mode in MODES:
            history = runner.run(RESUMED, mode)
            assert [e for e in history.events if isinstance(e, Requested)]


@pytest.mark.parametrize("name", FRONTS)
def test_other_paths_get_small_fixed_answers(name: str) -> None:
    """The paths a client may ask besides /generate; they are no requests in the history."""
    seen: dict[str, int] = {}

    async def visit(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session:
            for path in ("/v1/loads?include=core", "/workers", "/health", "/get_load"):
                async with session.get(_url(args).replace("/generate", path)) as reply:
                    seen[path] = reply.status
            async with session.post(_url(args).replace("/generate", "/abort_request"), json={}) as reply:
                seen["/abort_request"] = reply.status
                assert await reply.read() == b""
        sample.status = type(sample).Status.TRUNCATED
        return sample

    with running(FunctionTarget("visitor", visit, visit), name) as runner:
        history = runner.run(Schedule(), PLAIN)
    assert not [e for e in history.events if isinstance(e, Requested | Raised)]
    assert {p for p, status in seen.items() if status != 200} == {"/get_load"}


def test_an_unknown_front_is_a_key_error() -> None:
    made: Callable[[str], Any] = front
    with pytest.raises(KeyError):
        made("carrier pigeon")
