"""A real server behind the proxy: what passes is recorded, what interrupts is caused, nothing else is touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import httpx
import pytest

from harness.adapt import adapt
from harness.engines import proxy, upstream
from harness.engines.proxy import ASKS, CARRIED, ProxyFront
from harness.history import (
    INCREMENTAL,
    PLAIN,
    STREAM,
    Delivered,
    Faulted,
    Flagged,
    Halted,
    History,
    Requested,
    Returned,
)
from harness.inline import Inline
from harness.loop import VirtualLoop
from harness.options import Options as Checking
from harness.runner import Runner
from harness.schedule import Attempt, Schedule
from harness.search import Search
from harness.server import Server, describe
from harness.targets import CannotJudge
from harness.targets.function import FunctionTarget, reference
from harness.targets.spec import TargetSpec
from tests.engine.upstreams import (
    END,
    FAST,
    HEAD,
    SLOW,
    VOCABULARY,
    Mock,
    Say,
    answer,
    chunk,
    event,
    http,
    mock,
    nobody,
    silence,
    stub,
)

Client = Callable[[Any, Any, dict[str, Any]], Awaitable[Any]]
KINDS = sorted(CARRIED)
CODES = {"http": 500, "error-event": 500}
BUDGET = 48


@pytest.fixture(scope="module", name="one")
def _one() -> Iterator[Mock]:
    with mock() as made:
        yield made


@pytest.fixture(scope="module", name="steady")
def _steady() -> Iterator[Mock]:
    """Its events have two tokens each, however busy the machine is."""
    with mock(replace(FAST, schedules=(Schedule(prompt="ab", script=(65, 66, 67), chunks=(2,)),))) as made:
        yield made


@pytest.fixture(scope="module", name="deltas")
def _deltas() -> Iterator[Mock]:
    with mock(replace(FAST, incremental=True)) as made:
        yield made


@contextmanager
def behind(url: str, client: Client | None = None) -> Iterator[Runner]:
    """A runner of a client of our own, else of the reference."""
    target = reference() if client is None else FunctionTarget("client", client, client)
    with closing(Runner(target, url, VOCABULARY)) as runner:
        yield runner


def run(url: str, client: Client | None = None, mode: str = PLAIN, **schedule: Any) -> History:
    with behind(url, client) as runner:
        return runner.run(Schedule(**{"prompt": "ab", "budget": BUDGET, **schedule}), mode)


def of(kind: type[Any], history: History) -> list[Any]:
    return [one for one in history.events if isinstance(one, kind)]


def address(args: Any, path: str = "/generate") -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{path}"


def body(most: int = 8, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": most, "ignore_eos": True, "temperature": 0.0}
    return {"input_ids": [97, 98], "sampling_params": params, "return_logprob": True, "stream": stream} | more


JSON = {"Content-Type": "application/json"}


class Raw:
    """A client that sends what it is told to, and keeps what it gets, byte for byte."""

    def __init__(self, *sends: Any, path: str = "/generate", method: str = "POST", **headers: str) -> None:
        self.sends, self.path, self.method = sends, path, method
        self.headers = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
        self.got: list[tuple[int, dict[str, str], bytes]] = []
        self.chunks: list[bytes] = []
        self.failed: list[BaseException] = []

    async def __call__(self, args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            for one in self.sends:
                data = one if isinstance(one, bytes) else json.dumps(one).encode()
                try:
                    async with session.request(
                        self.method, address(args, self.path), data=data, headers=self.headers
                    ) as response:
                        whole, piece = b"", b""
                        async for part, ends in response.content.iter_chunks():
                            whole, piece = whole + part, piece + part
                            if ends:
                                self.chunks.append(piece)
                                piece = b""
                        self.got.append((response.status, dict(response.headers), whole))
                except aiohttp.ClientError as error:
                    self.failed.append(error)
        return sample


def raw(client: Raw) -> Client:
    async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        return await client(args, sample, params)

    return generate


def once(client: Raw) -> Client:
    """In its first call only."""
    calls = iter([True])

    async def generate(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        return await client(args, sample, params) if next(calls, False) else sample

    return generate


# Interruptions


def interrupted(kind: str, after: int = 8) -> Attempt:
    return Attempt(kind, after, at=30, code=CODES.get(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [PLAIN, STREAM, INCREMENTAL])
def test_the_reference_keeps_every_rule_whatever_interrupts_it(
    kind: str, mode: str, one: Mock, deltas: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.DELAY_S", 0.02)
    url = deltas.url if mode == INCREMENTAL else one.url
    inline = Inline(TargetSpec("reference"), url, None)
    try:
        search = Search(inline, (PLAIN, *({mode} - {PLAIN})), Checking(TargetSpec("reference")), url)
        for after, split, chunks in ((0, 0, (1,)), (8, 7, (5, 2))):
            attempts = (interrupted(kind, after), Attempt("abort-request", 16), Attempt(round_trip=True))
            search.observe(Schedule(prompt="ab", budget=BUDGET, attempts=attempts, split=split, chunks=chunks))
    finally:
        inline.close()
    assert search.greedy
    assert not {key: t.reason for key, t in search.tallies.items() if t.unknown}
    assert not {key: t.broken for key, t in search.tallies.items() if t.broken}
    judged = {rule for (rule, _, _), tally in search.tallies.items() if tally.judged}
    assert {"BUDGET", "ALIGN", "PREFIX", "STATUS", "RESUME-EQ"} <= judged
    assert one.wait(lambda: not one.running) and deltas.wait(lambda: not deltas.running)


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
@pytest.mark.parametrize("kind", KINDS)
def test_what_interrupts_is_what_was_meant(kind: str, mode: str, steady: Mock) -> None:
    history = run(steady.url, mode=mode, attempts=(interrupted(kind),))
    first = [e for e in history.events if getattr(e, "attempt", None) == 0]
    faults = [(e.kind, e.code) for e in first if isinstance(e, Faulted)]
    told = [e for e in first if isinstance(e, Delivered) and e.number == 0]
    tokens = sum(len(e.ids) for e in told)
    instead = kind in ("drop-before", "http", "queue-full") or (mode == PLAIN and kind in ("close", "error-event"))
    if mode == PLAIN:
        meant = {
            "close": [("drop-before", None)],
            "drop-before": [("drop-before", None)],
            "drop-inside": [("drop-inside", None)],
            "error-event": [("http", 500)],
            "http": [("http", 500)],
            "queue-full": [("http", 503)],
        }
        assert faults == meant.get(kind, [])
        if instead or kind == "drop-inside":
            assert not told
    else:
        meant = {
            "close": [("close", None)],
            "drop-before": [("drop-before", None)],
            "drop-inside": [("drop-inside", None)],
            "error-event": [("error-event", 500)],
            "http": [("http", 500)],
        }
        assert faults == meant.get(kind, [])
        if kind in ("close", "error-event", "drop-inside"):
            assert 8 <= tokens < BUDGET and all(e.finish is None for e in told)
        if kind == "queue-full":
            assert [(e.finish, e.status_code) for e in told] == [("abort", 503)]
    if kind == "flag":
        (flagged,) = of(Flagged, history)
        before = history.events[: history.events.index(flagged)]
        seen = sum(len(e.ids) for e in before if isinstance(e, Delivered))
        assert flagged.number == 0 and (seen == 0 if mode == PLAIN else 8 <= seen < BUDGET)
    if kind in ("run", "delay", "drop-after"):
        assert tokens == BUDGET and told[-1].finish == "length"
    if kind == "abort-request" and mode == STREAM:
        assert tokens >= 8
    assert of(Returned, history)[-1].view.response_length == BUDGET


def test_a_flag_before_the_call_is_no_matter_of_the_proxy(one: Mock) -> None:
    history = run(one.url, attempts=(Attempt("flag"),))
    assert of(Flagged, history)[0].number is None


def test_what_is_delayed_comes_late_and_whole() -> None:
    """Those tokens that were there before come first, in a piece of their own."""
    client = Raw(body(6, stream=True))
    events = [event([97] * n, n) for n in range(1, 7)]

    async def talk(_: Any, say: Say) -> None:
        await say(HEAD + chunk(b"".join(events) + event([97] * 6, 6, "length")) + END)

    with stub({"rid": talk}) as two, behind(two.url, raw(client)) as runner:
        begin = runner.loop.time()
        runner.run(Schedule(prompt="ab", chunks=(9,), attempts=(Attempt("delay", 3),)), STREAM)
        assert runner.loop.time() - begin >= 0.2
    assert client.chunks[:2] == [b"".join(events[:3]), b"".join(events[3:]) + event([97] * 6, 6, "length")]


@pytest.mark.parametrize("at", [0, 3, 10**6])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_inside_is_never_whole(at: int, stream: bool, steady: Mock) -> None:
    client = Raw(body(16, stream=stream, input_ids=VOCABULARY.encode("ab")))
    history = run(steady.url, raw(client), attempts=(Attempt("drop-inside", 4, at=at),))
    assert len(client.failed) == 1
    assert [e.kind for e in of(Faulted, history)] == ["drop-inside"]


def test_a_stream_that_has_ended_is_not_cut(one: Mock) -> None:
    for kind in ("close", "drop-inside", "error-event", "abort-request", "flag", "delay"):
        history = run(one.url, mode=STREAM, budget=8, attempts=(interrupted(kind, 99),))
        assert not of(Faulted, history) and not of(Flagged, history)
        assert of(Delivered, history)[-1].finish == "length"


# What passes is what was sent

ODD = [event([97], 1), b": comment\n\n", event([97, 98], 2), event([97, 98], 2, "length"), b"data: [DONE]\n\n", b"left"]


async def _odd(_: Any, say: Say) -> None:
    whole = b"".join(ODD)
    await say(HEAD.replace(b"Connection", b"X-Mine: 1\r\nSet-Cookie: a=b\r\nConnection"))
    for start in range(0, len(whole), 11):
        await say(chunk(whole[start : start + 11]))
    await say(END)


@pytest.mark.parametrize("split", [0, 1, 7])
@pytest.mark.parametrize("chunks", [(1,), (3,), (2, 1)])
def test_a_stream_passes_byte_for_byte(split: int, chunks: tuple[int, ...]) -> None:
    client = Raw(body(stream=True))
    with stub({"rid": _odd}) as two:
        history = run(two.url, raw(client), mode=STREAM, split=split, chunks=chunks)
        direct = httpx.post(f"{two.url}/generate", json=body(stream=True, rid="x"))
    ((status, headers, data),) = client.got
    assert data == direct.content == b"".join(ODD) and status == 200
    assert headers["Content-Type"] == "text/event-stream" and headers["X-Mine"] == "1"
    assert [(e.ids, e.finish) for e in of(Delivered, history)] == [((97,), None), ((98,), None), ((), "length")]
    assert not of(Faulted, history)


def test_the_mocks_stream_passes_byte_for_byte() -> None:
    planned = Schedule(prompt="a", budget=8, script=(65, 66, 0xE6), chunks=(2, 3))
    asked = body(stream=True, rid="mine", input_ids=[97])
    for incremental in (False, True):
        with mock(replace(FAST, schedules=(planned,), incremental=incremental)) as two:
            client = Raw(asked, {**asked, "stream": False})
            run(two.url, raw(client))
            for (status, headers, data), sent in zip(client.got, (asked, {**asked, "stream": False}), strict=True):
                direct = httpx.post(f"{two.url}/generate", json=sent)
                assert (status, data) == (direct.status_code, direct.content)
                assert headers["Content-Type"] == direct.headers["Content-Type"]


@pytest.mark.parametrize(
    "reply",
    [http(answer([97], finish="length")), http({"error": {"message": "no"}}, 400), http(b"busy", 503, "text/plain")],
)
def test_a_plain_answer_passes_byte_for_byte(reply: bytes) -> None:
    client = Raw(body())
    with stub({"rid": reply}) as two:
        history = run(two.url, raw(client))
    ((status, headers, data),) = client.got
    head, _, sent = reply.partition(b"\r\n\r\n")
    assert data == sent and f"{status}".encode() == head.split()[1]
    assert headers["Content-Type"].encode() in head and headers["Content-Length"] == str(len(sent))
    if status == 200:
        assert [e.ids for e in of(Delivered, history)] == [(97,)]
    else:
        assert [(e.kind, e.code) for e in of(Faulted, history)] == [("http", status)]


def test_pieces_are_merged_and_split_as_the_schedule_says() -> None:
    async def talk(_: Any, say: Say) -> None:
        for n in range(1, 10):
            await say((HEAD if n == 1 else b"") + chunk(event([97] * n, n, "length" if n == 9 else None)))
        await say(END)

    def pieces(**schedule: Any) -> list[bytes]:
        client = Raw(body(9, stream=True))
        with stub({"rid": talk}) as two:
            run(two.url, raw(client), mode=STREAM, **schedule)
        return client.chunks

    assert [one.count(b"data:") for one in pieces(chunks=(1,))] == [1] * 9
    assert [one.count(b"data:") for one in pieces(chunks=(4, 2))] == [4, 2, 3]
    assert [one.count(b"data:") for one in pieces(chunks=(100,))] == [9]
    small = pieces(chunks=(1,), split=5)
    assert len(small) > 20 and small[0] == b"data:"


# Ids


@pytest.mark.parametrize("given", [None, ""])
def test_a_request_is_given_an_id(given: str | None, one: Mock) -> None:
    one.seen.clear()
    sent = body()
    run(one.url, raw(Raw(sent, {}, {**sent, "rid": given})))
    with_it, empty, replaced = (b for b in one.seen if isinstance(b, dict) and len(b.get("rid") or "") > 40)
    assert {k: v for k, v in with_it.items() if k != "rid"} == sent == {k: v for k, v in replaced.items() if k != "rid"}
    assert list(empty) == ["rid"] and len({b["rid"] for b in (with_it, empty, replaced)}) == 3


def test_only_the_id_is_added() -> None:
    """Not a byte of the rest changes, whatever the client's way to write JSON is."""
    client = Raw(
        b'\n { "input_ids" :[97], "text":"\\u00e9"}', b"{ }", b"\xef\xbb\xbf{}", '{"text": "é"}'.encode("utf-16")
    )

    with stub({"rid": http(answer([97], finish="length"))}) as two:
        run(two.url, raw(client))
        first, second, third, fourth = two.bodies[3:]  # by the others it was timed
    start = b'{"rid": "rolloutcheck-'
    assert first.startswith(b"\n " + start) and first.endswith(b'",  "input_ids" :[97], "text":"\\u00e9"}')
    assert second.startswith(start) and second.endswith(b'" }')
    assert third.startswith(b"\xef\xbb\xbf" + start)
    assert json.loads(fourth)["text"] == "é" and json.loads(fourth)["rid"]


def test_an_id_of_the_clients_is_kept(one: Mock) -> None:
    one.seen.clear()
    run(one.url, raw(Raw(body(rid="mine"))))
    assert body(rid="mine") in one.seen


@pytest.mark.parametrize("sent", [b"", b"[1]", b"nonsense", b'"a"', b"5", b'{"rid": ["a"]}', b'{"rid": 7}'])
def test_what_is_no_request_passes_as_it_is(sent: bytes, one: Mock) -> None:
    client = Raw(sent)
    with behind(one.url, raw(client)) as runner:
        history = runner.run(Schedule(attempts=(Attempt("abort-request"),)), PLAIN)
        assert not runner.front._relay.upstream.live  # type: ignore[attr-defined]
    direct = httpx.post(f"{one.url}/generate", content=sent, headers=JSON)
    assert {(status, data) for status, _, data in client.got} == {(direct.status_code, direct.content)}
    assert [e.input_ids for e in of(Requested, history)] == [None, None]
    assert {e.code for e in of(Faulted, history)} == {direct.status_code}


def test_nothing_is_compressed_on_its_way_here() -> None:
    """What is recorded must be read: a server is told to send it plainly, whatever the client takes."""

    client = Raw(body(), Accept_Encoding="gzip, br", X_Mine="1", Authorization="Bearer x")
    with stub() as two:
        run(two.url, raw(client))
        (head,) = (h for h in two.heads if "x-mine: 1" in h.lower())
    assert "accept-encoding: identity\r\n" in head.lower() and "gzip" not in head
    assert "authorization: bearer x\r\n" in head.lower() and head.lower().count("\r\nhost:") == 1


# Aborts


def test_only_the_request_that_is_meant_is_aborted() -> None:
    """Another client's request on the same server goes on, and so does the proxy's next one."""
    with mock(replace(SLOW, rate=20.0)) as two:

        async def other() -> httpx.Response:
            async with httpx.AsyncClient(timeout=30) as client:
                return await client.post(f"{two.url}/generate", json=body(200, rid="theirs"))

        theirs = asyncio.run_coroutine_threadsafe(other(), two.thread.loop)
        assert two.wait(lambda: two.running == ["theirs"])
        for stream in (False, True):
            history = run(two.url, once(Raw(body(200, stream=stream))), attempts=(Attempt("abort-request", 2),))
            ends = [e.finish for e in of(Delivered, history) if e.finish is not None]
            assert ends == ["abort"]
        run(two.url, raw(_AbortsAll()))
        assert "theirs" in two.running and "theirs" not in two.aborts
        httpx.post(f"{two.url}/abort_request", json={"rid": "theirs"})
        assert theirs.result(20).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert two.wait(lambda: not two.running)


class _AbortsAll(Raw):
    """Two requests side by side, and then everything is aborted, or what ``ends`` says."""

    def __init__(self, **ends: Any) -> None:
        super().__init__()
        self.ends: dict[str, Any] = ends or {"abort_all": True}
        self.finishes: list[Any] = []
        self.said: list[bytes] = []

    async def __call__(self, args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session:

            async def ask(stream: bool, rid: str) -> Any:
                asked = body(200, stream=stream, rid=rid)
                async with session.post(address(args), json=asked) as response:
                    first = await response.content.readuntil(b"\n\n") if stream else b""
                    begun.set()
                    data = first + await response.read()
                last = [x for x in data.split(b"\n\n") if b"[DONE]" not in x and x][-1]
                return json.loads(last.removeprefix(b"data: "))["meta_info"]["finish_reason"]["type"]

            begun = asyncio.Event()
            tasks = [asyncio.create_task(ask(True, "one")), asyncio.create_task(ask(False, "one-more"))]
            await begun.wait()
            async with session.post(address(args, "/abort_request"), json=self.ends) as response:
                self.said.append(await response.read())
            await asyncio.wait(tasks, timeout=30)
            self.finishes = [task.result() for task in tasks]
        return sample


@pytest.mark.parametrize(
    ("ends", "finishes"),
    [
        ({"abort_all": True}, ["abort", "abort"]),
        ({"rid": "one"}, ["abort", "abort"]),
        ({"rid": "one-more"}, ["length", "abort"]),
        ({"rid": "on"}, ["length", "length"]),
        ({"rid": ""}, ["length", "length"]),
        ({"abort_all": "yes"}, ["length", "length"]),
    ],
)
def test_a_client_aborts_what_it_names(ends: dict[str, Any], finishes: list[str]) -> None:
    """As on the server itself: an id that is there names those that begin with it too, and no other does."""
    with mock(replace(SLOW, rate=100.0 if "abort" in finishes else 2000.0)) as two:
        client = _AbortsAll(**ends)
        run(two.url, raw(client))
        assert client.finishes == finishes and client.said == [b""]
        assert all(two.aborts)


@pytest.mark.parametrize("sent", [b"", b"[1]", b"nonsense", b"[" * 99_999, b"{}"])
def test_an_abort_that_names_nothing(sent: bytes, one: Mock) -> None:
    one.aborts.clear()
    client = Raw(sent, path="/abort_request")
    run(one.url, raw(client))
    assert [(status, data) for status, _, data in client.got] == [(200, b"")] and not one.aborts


def test_an_abort_that_comes_too_early_is_sent_again() -> None:
    """Before its request has arrived an abort does nothing; the server is told until it has ended."""
    heard: list[str] = []
    told = asyncio.Event()

    async def aborted(asked: Any, say: Say) -> None:
        heard.append(asked["rid"])
        if len(heard) >= 3:
            told.set()
        await say(http())

    async def talk(asked: Any, say: Say) -> None:
        await told.wait()
        await say(http(answer([97], finish="abort")))

    with stub({"rid": talk, "/abort_request": aborted}) as two:
        history = run(two.url, once(Raw(body())), attempts=(Attempt("abort-request"),))
    assert len(heard) >= 3 and len(set(heard)) == 1
    assert [e.finish for e in of(Delivered, history)] == ["abort"]


def test_an_abort_that_fails_is_told_by_the_answer() -> None:
    with stub({"/abort_request": b""}) as two:
        history = run(two.url, raw(Raw(body())), attempts=(Attempt("abort-request"),))
    assert of(Delivered, history)[0].finish == "length"


def test_an_abort_that_was_meant_for_later_does_not_outlive_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hit the next request of a client that uses one id for all, and time would be real meanwhile."""
    monkeypatch.setattr("harness.server.Server.until", lambda self, tokens: 30.0)
    with mock() as two, behind(two.url, raw(Raw(body(rid="mine")))) as runner:
        history = runner.run(Schedule(attempts=(Attempt("abort-request", 4),)), PLAIN)
        assert [e.finish for e in of(Delivered, history)] == ["length"] * 2 and not two.aborts
        assert runner.loop._virtual.outside == 0 and not runner.front._relay.upstream._aborts  # type: ignore[attr-defined]


# Everything that is not /generate


def test_the_proxy_is_the_router(one: Mock) -> None:
    said: dict[str, Any] = {}

    async def ask(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session:
            for path in ("/workers", "/list_workers", "/get_model_info", "/health", "/v1/loads?x=1", "/v1/models"):
                async with session.get(address(args, path)) as response:
                    said[path] = response.status, await response.read(), response.content_type
            for method, path in (
                ("GET", "/flush_cache"),
                ("GET", "/release_memory_occupation"),
                ("POST", "/flush_cache"),
                ("POST", "/pause_generation"),
                ("POST", "/update_weights_from_disk"),
                ("PUT", "/health"),
                ("GET", "/nowhere"),
            ):
                async with session.request(method, address(args, path), json={}) as response:
                    assert response.status == 404
            said["url"] = address(args, "")
        return sample

    before = one.server._web.requests_count
    run(one.url, ask)
    assert json.loads(said["/workers"][1]) == {"workers": [{"url": said["url"]}]}
    assert json.loads(said["/list_workers"][1]) == {"urls": [said["url"]]}
    direct = httpx.get(f"{one.url}/get_model_info")
    assert said["/get_model_info"] == (200, direct.content, "application/json")
    assert said["/health"][:2] == (200, b"") and said["/v1/loads?x=1"][0] == said["/v1/models"][0] == 200
    # 7 to describe it (twice: once for its tokenizer), fit and time it; those four; and the direct one
    assert one.server._web.requests_count - before == 7 + 4 + 3
    assert "/flush_cache" not in ASKS


# A server that fails gives no verdict


def test_a_stream_that_ends_too_early_is_told_as_it_was() -> None:
    """The server has ended it properly, without a word of why: that is a fault, and no failure of the proxy's."""
    client = Raw(body(stream=True))
    with stub({"rid": HEAD + chunk(event([97], 1)) + END}) as two:
        history = run(two.url, raw(client))
    assert [e.kind for e in of(Faulted, history)] == ["close"] and [e.ids for e in of(Delivered, history)] == [(97,)]
    assert not client.failed and client.got[0][2] == event([97], 1)


def cannot(url: str, client: Client | None = None, mode: str = PLAIN, **schedule: Any) -> str:
    with pytest.raises(CannotJudge) as error:
        run(url, client, mode, **schedule)
    said = str(error.value)
    assert "\n" not in said and len(said) <= 300 and not error.value.not_applicable
    return said


@pytest.mark.parametrize("mode", [PLAIN, STREAM])
def test_a_server_that_is_gone_before_a_request(mode: str) -> None:
    with mock() as two, behind(two.url) as runner:
        assert runner.run(Schedule(), mode).events
        two.die()
        for _ in range(2):
            with pytest.raises(CannotJudge, match=f"^the server at {two.url} is gone: Cannot connect to host"):
                runner.run(Schedule(), mode)


def test_a_server_that_comes_back_is_judged_on_again() -> None:
    replies = iter([b"", http(answer([97], finish="length"))])

    async def talk(asked: Any, say: Say) -> None:
        await say(next(replies))

    with stub({"rid": talk}) as two, behind(two.url, raw(Raw(body()))) as runner:
        with pytest.raises(CannotJudge, match="is gone: Server disconnected"):
            runner.run(Schedule(), PLAIN)
        assert of(Delivered, runner.run(Schedule(), PLAIN))


HALF = HEAD + chunk(event([97], 1))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "is gone: Server disconnected"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "is gone: "),
        (http(answer([97]), length=9999), "is gone: Response payload is not completed"),
        (HALF, "is gone: "),
        (HALF + b"zz\r\ngarbage", "is gone: "),
        (HALF + chunk(b'data: {"a": 1}\n\n') + END, "answers as no SGLang does: an answer has a"),
        (http(b"<html>"), "answers as no SGLang does: an answer begins with b'<html>'"),
        (http([answer([97])]), "answers as no SGLang does: an answer begins with b'[{"),
        (http({"text": "a"}), "answers as no SGLang does: an answer has text"),
        (http(b"", 302), "answers as no SGLang does: HTTP 302"),
    ],
)
def test_a_server_that_fails_in_an_answer(reply: bytes, said: str) -> None:
    with stub({"rid": reply}) as two:
        for client in (None, raw(Raw(body()))):
            for mode in (PLAIN, STREAM):
                assert cannot(two.url, client, mode).startswith(f"the server at {two.url} {said}")


@pytest.mark.parametrize(
    ("reply", "mode", "said"),
    [
        (http(answer([97])), PLAIN, "an answer without an end"),
        (http(answer([97], finish="length")), STREAM, "a whole answer where a stream was asked for"),
    ],
)
def test_an_answer_of_the_wrong_kind(reply: bytes, mode: str, said: str) -> None:
    with stub({"rid": reply}) as two:
        assert cannot(two.url, None, mode) == f"the server at {two.url} answers as no SGLang does: {said}"


def test_a_server_is_not_followed_elsewhere() -> None:
    """What a client says is for the server that was named."""
    moved = b"HTTP/1.1 307 X\r\nLocation: %b/generate\r\nContent-Length: 0\r\n\r\n"
    with stub({}) as other, stub({"rid": moved % other.url.encode()}) as two:
        assert cannot(two.url).endswith("answers as no SGLang does: HTTP 307") and not other.asked


@pytest.mark.parametrize("begins", [b"", HALF])
def test_a_server_that_falls_silent(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(asked: Any, say: Say) -> None:
        await say(begins)
        await silence(asked, say)

    monkeypatch.setattr(upstream, "SILENCE_S", 0.2)
    monkeypatch.setattr(upstream, "SLOWER", 0)
    with stub({"rid": talk}) as two:
        assert cannot(two.url) == f"the server at {two.url} is gone: it says nothing any more"


def test_a_question_that_is_not_answered(one: Mock) -> None:
    with stub({"/health": b""}) as two:
        said = cannot(two.url, raw(Raw(b"", path="/health", method="GET")))
        assert said == f"the server at {two.url} is gone: Server disconnected"


def test_a_plain_answer_may_take_as_long_as_its_tokens() -> None:
    async def ask() -> None:
        server = replace(describe(one.url), first_s=1.0, token_s=0.5)
        there = upstream.Upstream(server)
        patience = there.patience
        assert patience(None) == patience([1]) == patience({}) == patience({"stream": True}) == 15.0
        assert patience({"stream": True, "sampling_params": {"max_new_tokens": 100}}) == 15.0
        assert patience({"sampling_params": {"max_new_tokens": 100}}) == 15.0 + 4 * 51.0
        whole = 15.0 + 4 * 129.0
        for most in (None, 1 << 30, 0, "many"):
            assert patience({"sampling_params": {"max_new_tokens": most}}) == whole
        assert patience({"sampling_params": [1]}) == whole
        assert there.gone(aiohttp.ClientError()).endswith("is gone: ClientError")
        assert there.gone(aiohttp.ClientError("a\nb")).endswith("is gone: a")
        await there.close()

    with mock() as one:
        asyncio.run(ask())


def test_what_does_not_run_is_not_aborted() -> None:
    async def ask() -> None:
        there = upstream.Upstream(Server("http://127.0.0.1:1"))
        there.begins("")  # what has no id: on 0.5.9 an empty one would name everything on the server
        there.abort_in("", 0.0)
        there.abort_in("gone", 0.0)
        assert not there.live and not there._aborts
        there.begins("here")
        there.abort_in("here", 60.0)
        there.abort_in("here", 60.0)
        (task,) = there._aborts.values()
        there.ends("here", heard=True)
        await asyncio.wait([task])
        assert task.cancelled() and not there._aborts and not there.orphans
        await there.close()

    asyncio.run(ask())


def test_an_abort_is_sent_until_the_request_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes before its request does nothing (0.5.23 `abort_noop`)."""
    monkeypatch.setattr(upstream, "AGAIN_S", 0.0)

    async def ask() -> int:
        there = upstream.Upstream(Server("http://127.0.0.1:1"))
        sent: list[str] = []

        async def abort(rid: str) -> None:
            sent.append(rid)
            if len(sent) == 3:
                there.live.discard(rid)

        monkeypatch.setattr(there, "_abort", abort)
        there.begins("here")
        there.abort_in("here", 0.0)
        await there._aborts["here"]
        await there.close()
        return len(sent)

    assert asyncio.run(ask()) == 3


def test_there_is_none_to_judge_on() -> None:
    with nobody() as url, pytest.raises(CannotJudge, match=f"^nothing answers at {url}: "):
        Runner(reference(), url)
    with pytest.raises(CannotJudge, match=r"^http://\[ is no address of a server"):
        Runner(reference(), "http://[")


def test_a_server_with_another_tokenizer_is_sent_no_ids() -> None:
    with stub({"/tokenize": http({"tokens": [1]})}) as two:
        with pytest.raises(CannotJudge, match="has another tokenizer"):
            Runner(reference(), two.url)
        assert "/generate" not in two.asked


# Clients that leave, and such as never do


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.03])
def test_a_client_that_leaves(stream: bool, after: float) -> None:
    """That is its right: the run goes on, and nothing of it is left on the server."""
    with mock(SLOW) as two:
        said: list[Any] = []

        async def leaves(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            async with aiohttp.ClientSession() as session:

                async def ask() -> None:
                    async with session.post(address(args), json=body(200, stream=stream)) as response:
                        await response.read()

                task = asyncio.create_task(ask())
                while not two.running:  # noqa: ASYNC110 - on another loop
                    await asyncio.sleep(0.001)
                await asyncio.sleep(after)
                task.cancel()
                await asyncio.wait([task])
                async with session.post(address(args), json=body(2)) as response:
                    said.append(await response.json())
            return sample

        history = run(two.url, leaves)
        assert len(of(Requested, history)) == 2 and not of(Halted, history)
        assert of(Delivered, history)[-1].finish == "length" and not of(Faulted, history)
        assert two.wait(lambda: not two.running)
        assert two.aborts


def test_a_client_that_leaves_takes_its_request_along() -> None:
    """The server is told at once, as by a client that talks to it directly, and not when it answers."""
    with mock(replace(SLOW, rate=10.0)) as two:
        gone: list[Any] = []
        leave = two.server.scheduler.leave
        two.server.scheduler.leave = lambda job: (gone.append(job), leave(job))[1]  # type: ignore[func-returns-value, method-assign]

        async def leaves(args: Any, sample: Any, params: dict[str, Any]) -> Any:
            async with aiohttp.ClientSession() as session:
                task = asyncio.create_task(session.post(address(args), json=body(200)))
                while not two.running:  # noqa: ASYNC110 - on another loop
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait([task])
                with upstream.outside():
                    for _ in range(1000):
                        if gone:
                            break
                        await asyncio.sleep(0.005)
            sample.response = f"{len(gone)} gone"
            return sample

        history = run(two.url, leaves)
        assert of(Returned, history)[0].view.response == "1 gone"


@pytest.mark.parametrize("reply", [HEAD + chunk(event([97], 1, "length")) + END, http(answer([97], finish="length"))])
@pytest.mark.parametrize("cancels", [False, True])
def test_a_client_that_leaves_before_the_answer_begins(
    reply: bytes, cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the proxy hears of it only when it answers."""
    gone = asyncio.Event()

    async def talk(asked: Any, say: Say) -> None:
        await gone.wait()
        await say(reply)

    async def leaves(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        with suppress(TimeoutError):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.02)) as session:
                await session.post(address(args), json=body())
        await asyncio.sleep(0.01)
        two.thread.loop.call_soon_threadsafe(gone.set)
        await asyncio.sleep(0.1)
        return sample

    if not cancels:
        server = proxy.Relay.server
        monkeypatch.setattr(proxy.Relay, "server", lambda relay, **_: server(relay))
    with stub({"rid": talk}) as two:
        history = run(two.url, leaves)
    assert len(of(Requested, history)) == len(of(Returned, history)) == 1
    assert not of(Delivered, history) and not of(Faulted, history)


def test_a_client_that_asks_without_end(one: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_REQUESTS", 5)
    one.seen.clear()

    async def again(args: Any, sample: Any, params: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.post(address(args), json=body(1)) as response:
                        await response.read()

    history = run(one.url, again)
    assert isinstance(history.events[-1], Halted) and history.events[-1].kind == "storm"
    assert len([b for b in one.seen if "rid" in b]) == 5


def test_a_request_when_no_run_is_in_progress(one: Mock) -> None:
    async def ask() -> int:
        front = ProxyFront(one.url)
        await front.start()
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{front.host}:{front.port}/") as reply:
                return reply.status
        finally:
            await front.stop()

    assert asyncio.run(ask()) == 503  # and on a loop with a clock of its own, too


# Errors of the server's own


def test_an_input_that_is_too_long(one: Mock) -> None:
    full = {**body(), "input_ids": [97] * 251}
    client = Raw(full, {**full, "stream": True})
    history = run(one.url, raw(client))
    (plain, stream) = client.got
    assert plain[0] == 400 and stream[0] == 200 and b'"error"' in stream[2] and b"[DONE]" in stream[2]
    faults = of(Faulted, history)
    assert [(e.number, e.kind, e.code) for e in faults] == [(0, "http", 400), (1, "error-event", 400)]
    assert all("250" in e.message or "length" in e.message for e in faults)
    assert plain[2] == httpx.post(f"{one.url}/generate", json=full).content


def test_a_sample_that_fills_the_context(one: Mock) -> None:
    """The reference on a prompt that leaves less than its budget, as `adapt` makes it."""
    made = adapt(
        Schedule(prompt="ab", budget=9, context=30, attempts=(Attempt("abort", 1),)), describe(one.url), VOCABULARY
    )
    assert isinstance(made, Schedule) and made.context == 256
    for mode in (PLAIN, STREAM):
        with behind(one.url) as runner:
            history = runner.run(made, mode)
        assert of(Returned, history)[-1].view.status == "truncated"


def test_what_the_front_says_of_itself(one: Mock) -> None:
    front = ProxyFront(one.url)
    assert (front.name, front.sockets, front.greedy) == (one.url, True, True)
    assert {"abort", "retract", "missing"} <= front.cannot and not front.cannot & CARRIED
    with behind(one.url) as runner:
        params = [e.params for e in runner.run(Schedule(), PLAIN).events if isinstance(e, Requested)]
        assert params[0]["temperature"] == 0.0
        assert isinstance(runner.loop, VirtualLoop) and not runner.front.broken
