"""`rolloutcheck record`: asking a server, what is kept of its answers, and servers that cannot be asked."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from aiohttp import web

from harness import probes, record, wire
from harness.cli import main
from harness.conformance import Difference, Matrix, Row
from harness.engines.live import Options
from harness.engines.standalone import Server as Mock
from harness.engines.standalone import serving
from harness.loop import VirtualLoop
from harness.probes import Known, Probe, Probed, learn, probe
from harness.record import BadRecording, Recording, kept, recording
from harness.reporters import conformance as table
from harness.server import NoServer, Server, describe
from harness.verdict import CANNOT, CONFORMS, USAGE
from harness.wire import Asked, Exchange, Missed, Wire

PROJECT = Path(__file__).resolve().parents[2]
FEW = ("plain_logprob", "stream_logprob", "abort_running", "GET_get_server_info", "abort_all", "abort_queued")
QUICK = Options(rate=500.0, length=8)
INFO = {"version": "0.5.23", "model_path": "/models/mine", "max_req_input_len": 250}
MODELS = {"data": [{"id": "/models/mine", "max_model_len": 256}]}
HERE = Server("http://x", "0.5.23", 256, 999)


def run(main: Any) -> Any:
    """In virtual time, on a loop with sockets."""
    loop = VirtualLoop(sockets=True)
    try:
        return loop.run(main)
    finally:
        loop.close()


@contextmanager
def elsewhere(started: Callable[[], Any]) -> Iterator[str]:
    """A server on a loop of another thread: its URL. ``started`` gives an async context manager of the URL."""
    loop, told, url = asyncio.new_event_loop(), threading.Event(), list[str]()
    end = asyncio.Event()

    async def live() -> None:
        async with started() as address:
            url.append(address)
            told.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    assert told.wait(10)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)
        loop.close()


@asynccontextmanager
async def answering(answers: dict[str, Any]) -> AsyncIterator[str]:
    """A server that answers paths with values, responses, or in its own way."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        value = answers.get(request.path, web.Response(status=404))
        if callable(value):
            value = value(request)
        if isinstance(value, web.Response):
            return value
        return web.json_response(value)

    made = web.Server(handle, access_log=None)
    listener = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await made.shutdown(0.01)


def broken(request: web.BaseRequest) -> web.Response:
    """The connection breaks."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def on_the_wire(answers: dict[str, Any], use: Callable[[Wire], Any]) -> Any:
    """What ``use`` gives, with a wire to such a server."""

    async def ask() -> Any:
        timeout = aiohttp.ClientTimeout(total=1.0)
        async with answering(answers) as url, aiohttp.ClientSession(timeout=timeout) as session:
            return await use(Wire(session, replace(HERE, url=url), "ours-"))

    return run(ask())


def streaming(*pieces: bytes) -> web.Response:
    return web.Response(body=b"".join(pieces), content_type="text/event-stream")


class TestWire:
    def test_answers_are_json_text_or_events(self) -> None:
        async def use(one: Wire) -> list[Exchange]:
            await one.get("/json")
            await one.call("/text", {"a": 1}, "part")
            await one.ended(one.start("s", {"stream": True}))
            return one.exchanges

        stream = streaming(b'data: {"a": 1}\n\ndata: {"a"', b": 2}\n\ndata: [DONE]\n\n")
        json_, text, events = on_the_wire(
            {"/json": {"x": 1}, "/text": web.Response(text="hm", status=400), "/generate": stream}, use
        )
        assert (json_.method, json_.request, json_.status, json_.body) == ("GET", None, 200, {"x": 1})
        assert (text.part, text.method, text.request, text.status, text.body) == ("part", "POST", {"a": 1}, 400, "hm")
        assert (events.events, events.of, events.done) == (({"a": 1}, {"a": 2}), 2, True)
        assert events.request == {"stream": True, "rid": "ours-0-s"}

    def test_a_connection_that_breaks_while_the_server_lives_is_an_answer(self) -> None:
        exchange = on_the_wire({"/x": broken, wire.ALIVE: {}}, lambda one: one.call("/x", {}))
        assert (exchange.status, exchange.kind, exchange.body) == (None, None, None)

    def test_a_server_that_is_gone_ends_it(self) -> None:
        with pytest.raises(NoServer, match=r"^the server at \S+ died \(b\): "):
            on_the_wire({"/x": broken, wire.ALIVE: broken}, lambda one: one.behave("b", lambda w: w.call("/x", {})))

    def test_what_is_no_utf_8_is_kept_as_far_as_it_can_be(self) -> None:
        async def use(one: Wire) -> list[Exchange]:
            for path in ("/bytes", "/charset", "/deep"):
                await one.get(path)
            await one.ended(one.start("s", {"stream": True}))
            return one.exchanges

        answers = {
            "/bytes": web.Response(body=b"\xff\xfe", content_type="text/plain"),
            "/charset": web.Response(body=b"{}", headers={"Content-Type": "application/json; charset=nonsense"}),
            "/deep": web.Response(body=b"[" * 100_000),
            "/generate": streaming(b'data: {"a": "\xff"}\n\n'),
        }
        bytes_, charset, deep, events = on_the_wire(answers, use)
        assert (bytes_.body, charset.body, deep.body) == ("\ufffd\ufffd", {}, "[" * 100_000)
        assert events.events == ({"a": "\ufffd"},)

    def test_a_server_that_hangs_ends_it(self) -> None:
        async def use(one: Wire) -> None:
            listener = await asyncio.start_server(lambda reader, writer: asyncio.sleep(9), "127.0.0.1", 0)
            async with listener:
                one.server = replace(HERE, url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
                await one.call("/x", {})

        with pytest.raises(NoServer, match="gave no answer in 60 s"):
            on_the_wire({}, use)

    def test_the_load(self) -> None:
        loads = {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}, {"num_running_reqs": 3}]}
        assert on_the_wire({"/v1/loads": loads}, lambda one: one.load()) == (4, 2)
        assert on_the_wire({}, lambda one: one.load()) == (0, 0)

    def test_waiting_for_a_load_ends(self) -> None:
        seen = []

        def never(running: int, waiting: int) -> bool:
            seen.append(running)
            return len(seen) == 30

        on_the_wire({}, lambda one: one.until(never, 1.0))
        assert len(seen) == round(1.0 / wire.EVERY_S)
        on_the_wire({}, lambda one: one.until(never, 9.0))
        assert len(seen) == 30

    def test_what_a_behaviour_leaves_is_aborted_by_its_id(self) -> None:
        """And what had been recorded of one that missed its moment is forgotten."""
        aborted = []

        def abort(request: web.BaseRequest) -> web.Response:
            aborted.append(request.content_length)
            return web.Response()

        async def use(one: Wire) -> list[Exchange]:
            async def missed(w: Wire) -> None:
                await w.get(wire.ALIVE)
                w.start("long", {})
                raise Missed

            with pytest.raises(Missed):
                await one.behave("b", missed)
            return one.exchanges

        hangs = streaming(b"")
        assert on_the_wire({"/abort_request": abort, wire.ALIVE: {}, "/generate": hangs}, use) == []
        assert aborted == [len('{"rid": "ours-1-long"}')]

    def test_what_cannot_be_aborted_any_more_is_left(self) -> None:
        async def use(one: Wire) -> str:
            async def leaves(w: Wire) -> None:
                w.start("long", {})

            await one.behave("b", leaves)
            return "left"

        assert on_the_wire({"/abort_request": broken, wire.ALIVE: broken, "/generate": streaming()}, use) == "left"

    def test_a_stream_that_ends_before_it_has_begun_missed_its_moment(self) -> None:
        async def use(one: Wire) -> None:
            await one.start("s", {"stream": True}).begun()

        with pytest.raises(Missed):
            on_the_wire({"/generate": streaming(b"data: {}\n\n")}, use)


def told(answer: Any, behaviour: Callable[[Wire, Known], Any], **more: Any) -> list[Exchange]:
    """What a behaviour records of a server that answers so."""
    known = Known(7, "the", None)
    return on_the_wire({"/generate": answer, **more}, lambda one: _recorded(one, behaviour, known))


async def _recorded(one: Wire, behaviour: Callable[[Wire, Known], Any], known: Known) -> list[Exchange]:
    await behaviour(one, known)
    return one.exchanges


class TestProbes:
    def test_names_are_those_of_requests_and_each_is_there_once(self) -> None:
        names = [one.name for one in probes.PROBES]
        assert len(names) == len(set(names)) > 120
        assert {"plain_logprob", "stream_logprob", "max0", "max0_stream", "exact_total_stream"} <= set(names)

    def test_nothing_out_of_a_vocabulary_and_no_empty_text_is_sent(self) -> None:
        """A CPU server dies of either (0.5.23d `misc`)."""
        for asked in probes.requests(HERE, Known(7, "the", 9)).values():
            assert set(asked.get("input_ids", ())) <= {7}
            assert asked.get("text", "x")
            assert set(asked["sampling_params"].get("logit_bias", ())) <= {"7", "9"}

    def test_what_disturbs_others_is_asked_for_only_when_told(self) -> None:
        async def ask(disruptive: bool) -> Probed:
            async with serving(QUICK) as url:
                found = await probe(await asyncio.to_thread(describe, url), disruptive=disruptive, only=FEW)
                return found

        quiet, loud = run(ask(False)), run(ask(True))
        assert dict(quiet.skipped)["abort_all"] == "it would disturb others: --disruptive"
        asked = {x.path for x in quiet.exchanges if x.method == "POST"}
        assert asked == {"/generate", "/abort_request"}
        assert all(x.request["rid"].startswith("rolloutcheck-") for x in quiet.exchanges if x.method == "POST")
        assert "abort_all" in {x.behaviour for x in loud.exchanges}
        disruptive = {one.name for one in probes.PROBES if one.disruptive}
        assert {"pause_abort", "flush_busy", "weight_version_mid", "weights_from_disk"} <= disruptive

    @pytest.mark.parametrize(
        ("name", "server", "known", "reason"),
        [
            ("exact_total", replace(HERE, pool=99), Known(7, "the", 9), "its KV pool is smaller than its context"),
            ("exact_total", HERE, Known(7, "the", 9), ""),
            ("eos_first", HERE, Known(7, "the", None), "its EOS is not known"),
            ("eos_first", HERE, Known(7, "the", 9), ""),
            ("stopstr_trim", HERE, Known(7, " t", 9), "no token of plain text is known"),
            ("stopstr_trim", HERE, Known(7, "the", 9), ""),
            ("max0", HERE, Known(7, "", None), ""),
            ("rid_reused", HERE, Known(7, "the", 9), "it needs room for 3000 tokens"),
            ("rid_reused", replace(HERE, context=9999, pool=9999), Known(7, "the", 9), ""),
            ("abort_queued", HERE, Known(7, "", 9), "it needs --max-running-requests of at most 4, and a queue"),
            ("abort_queued", replace(HERE, running=2), Known(7, "", 9), ""),
            ("queue_full", HERE, Known(7, "", 9), "it needs --max-running-requests of at most 4, and a queue"),
            ("queue_full", replace(HERE, running=2), Known(7, "", 9), "it needs --max-queued-requests of at most 4"),
            ("queue_full", replace(HERE, running=2, queue=1), Known(7, "", 9), ""),
            ("pause_retract", replace(HERE, queue=1), Known(7, "", 9), "its queue is too short for what is retracted"),
            ("pause_retract", HERE, Known(7, "", 9), ""),
        ],
    )
    def test_a_behaviour_that_needs_options(self, name: str, server: Server, known: Known, reason: str) -> None:
        (one,) = [x for x in probes.PROBES if x.name == name]
        assert one.needs(server, known) == reason

    def test_what_misses_its_moment_is_tried_again_and_then_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tries = []

        async def late(one: Wire, known: Known) -> None:
            tries.append(one.last)
            raise Missed

        async def ask() -> Probed:
            async with serving(QUICK) as url:
                return await probe(await asyncio.to_thread(describe, url))

        monkeypatch.setattr(probes, "PROBES", (Probe("late", late),))
        found = run(ask())
        assert tries == [False, False, True]
        assert found.skipped == (("late", "its requests ended too soon, 3 times"),)

    @pytest.mark.parametrize("last", [False, True])
    def test_what_had_no_token_when_it_was_aborted_is_tried_again(self, last: bool) -> None:
        async def aborted(one: Wire, known: Known) -> None:
            one.last = last
            await probes._ended_running(one, one.start("a", {}))

        empty = {"meta_info": {"completion_tokens": 0}}
        if last:
            assert len(told(empty, aborted)) == 1
        else:
            with pytest.raises(Missed):
                told(empty, aborted)
        for answer in ({"meta_info": {"completion_tokens": 1}}, {"error": "x"}, web.Response(text="hm")):
            assert len(told(answer, aborted)) == 1

    def test_a_server_without_an_end_of_its_own(self) -> None:
        async def ask() -> Known:
            async with serving(replace(QUICK, length=1_000_000)) as url, aiohttp.ClientSession() as session:
                return await learn(Wire(session, await asyncio.to_thread(describe, url), "ours-"))

        known = run(ask())
        assert (known.text, known.eos) == ("the", None)

    @pytest.mark.parametrize("answer", [web.Response(status=500, text="down"), [1]])
    def test_a_server_that_answers_nothing_of_use(self, answer: Any) -> None:
        with pytest.raises(NoServer, match="answers a small request with"):
            on_the_wire({"/generate": answer}, learn)

    @pytest.mark.parametrize("context", [10**15, (1 << 24) + 1, 0, -5])
    def test_a_context_that_nobody_could_fill(self, context: int) -> None:
        with pytest.raises(NoServer, match=rf"http://x has a context of {context} tokens"):
            asyncio.run(probe(replace(HERE, context=context)))

    @pytest.mark.parametrize("run", [probes.weights_from_disk, probes._versions(abort=False)])
    def test_weights_without_a_name_are_left_alone(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """They could not be put back."""

        async def nothing(*_: Any) -> None:
            pass

        async def use(one: Wire) -> set[str]:
            with pytest.raises(KeyError, match="weight_version"):
                await run(one, Known(7, "the", None))
            return {x.path for x in one.exchanges}

        async def both(*_: Any) -> tuple[Asked, Asked]:
            return Asked(), Asked()

        monkeypatch.setattr(Asked, "begun", nothing)
        monkeypatch.setattr(probes, "_both", both)
        assert on_the_wire({"/get_model_info": {"model_path": "m"}, "/generate": {}}, use) == {"/get_model_info"}


ANSWER = {"text": "the", "output_ids": [7], "meta_info": {"input_token_logprobs": [[0.0, 7, None]]}}
ENDED = ANSWER | {"meta_info": ANSWER["meta_info"] | {"finish_reason": {"type": "length", "length": 1}}}  # type: ignore[operator]


def plain_of(answer: Any) -> Callable[[web.BaseRequest], Any]:
    """Answers what is learned from as SGLang does, and then so."""
    asked = []

    def answered(request: web.BaseRequest) -> Any:
        asked.append(request)
        return ENDED if len(asked) <= 8 else answer

    return answered


class TestOddAnswers:
    """Whatever a server answers, it is its own fault and one line."""

    @pytest.mark.parametrize(
        "answers",
        [
            {"/generate": {"text": "a", "meta_info": {"input_token_logprobs": "abc"}}},
            {"/generate": {"text": "a", "meta_info": {"input_token_logprobs": []}}},
            {"/generate": {"text": "a", "meta_info": {"input_token_logprobs": [[0, {}]]}}},
            {"/generate": {"text": "a", "meta_info": 5}},
            {"/generate": {"text": "a"}},
            {"/generate": {"meta_info": ENDED["meta_info"]}},
            {"/generate": ENDED | {"text": 5}},
            {"/generate": ENDED | {"meta_info": ANSWER["meta_info"]}},
            {"/generate": plain_of(ENDED | {"meta_info": {"finish_reason": "length"}})},
            {"/generate": plain_of(ENDED | {"meta_info": {"output_token_logprobs_length": 10**15}})},
            {"/generate": plain_of(ENDED | {"meta_info": {"output_token_logprobs_length": "x"}})},
            {"/generate": plain_of(ENDED | {"meta_info": {"weight_versions": [{"version": "1"}, 5]}})},
            {"/generate": plain_of(web.Response(body=b"[" * 90 + b"]" * 90))},
            {"/generate": ENDED, "/v1/loads": {"loads": 5}},
            {"/generate": ENDED, "/v1/loads": {"loads": [5]}},
            {"/generate": ENDED, "/v1/loads": {}},
        ],
    )
    def test_they_end_the_recording(
        self,
        answers: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        async def loads(one: Wire, known: Known) -> None:
            await one.load()

        singles = [one for one in probes.PROBES if one.name == "plain_logprob"]
        monkeypatch.setattr(probes, "PROBES", (*singles, Probe("loads", loads)))
        known = {"/get_server_info": INFO, "/v1/models": MODELS, "/v1/loads": {"loads": []}}
        with elsewhere(lambda: answering(known | answers)) as url:
            assert command("--engine", url, "--out", str(tmp_path / "x")) == CANNOT
            said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rolloutcheck:")]
            assert len(said) == 1
            assert said[0].startswith(f"rolloutcheck: the server at {url} answers as no SGLang does: ")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "answer",
        [
            web.Response(body=b"\xff\xfe", content_type="text/plain"),
            web.Response(body=b"hm\nhm", headers={"Content-Type": "application/json; charset=nonsense"}),
        ],
    )
    def test_what_is_no_json_is_said_in_one_line(
        self, answer: web.Response, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known = {"/get_server_info": INFO, "/v1/models": MODELS, "/generate": answer}
        with elsewhere(lambda: answering(known)) as url:
            assert command("--engine", url, "--out", "-") == CANNOT
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rolloutcheck:")]
        assert "answers a small request with 200: " in line and line.endswith(("\ufffd\ufffd", "hm hm"))

    def test_a_context_that_nobody_could_fill(self, capsys: pytest.CaptureFixture[str]) -> None:
        with elsewhere(lambda: answering({"/get_server_info": INFO | {"max_req_input_len": 10**15}})) as url:
            assert command("--engine", url, "--out", "-") == CANNOT
        assert "has a context of 1000000000000006 tokens" in capsys.readouterr().err


class TestKept:
    def test_what_is_somebodys_own_is_taken_out(self) -> None:
        one = Exchange(
            *("b", "p", "POST", "/generate"),
            {"rid": "rolloutcheck-0123456789abcdef-12-plain", "input_ids": [1] * 9, "model_path": "/models/mine"},
            *(400, "application/json"),
            {
                "id": "x",
                "e2e_latency": 0.123456,
                "text": "abcdefghij",
                "value": 0.123456,
                "list": list(range(9)),
                "short": [1, 2],
                "weight_version": "alice-7",
                "version": "0.5.23",
                "new_version": "next",
                "message": "File /home/alice/x.py at 10.0.0.7:31000, /models/mine, a/b",
            },
        )
        found = kept(one, "/models/mine")
        assert found.request == {"rid": "plain", "input_ids": 9, "model_path": "MODEL"}
        assert found.body == {
            "text": "abcdef",
            "value": 0.1235,
            "list": {"n": 9, "head": [0], "tail": [8]},
            "short": [1, 2],
            "weight_version": "other",
            "version": "0.5.23",
            "new_version": "next",
            "message": "File PATH at HOST, MODEL, PATH",
        }

    @pytest.mark.parametrize(
        ("said", "left"),
        [
            ("at /home/Jane: no", "at PATH no"),
            ("C:\\Users\\jane, (/secretdir), [~jane]", "PATH, (PATH), [PATH]"),
            ("path='/home/jane',n=5 path=/home/jane,n=5 %2Fhome%2Fjane", "path='PATH',n=5 PATH PATH"),
            ("'/home/Jane Doe/x y' “C:\\Jane Doe” \"~/Jane Doe\"", "'PATH' “PATH” \"PATH\""),
            ("'a.' and '/home/Jane Doe/x', rock 'n roll '/home/Jane Doe'", "'a.' and 'PATH', rock 'n roll 'PATH'"),
            ("/home/Jane Doe/x", "PATH PATH"),
            ("<http://jane:pw@host.corp:30000/x?y=z>.", "<PATH>."),
            ("by jane.doe@corp.com, jane@host", "by MAIL, MAIL"),
            ("10.0.0.7 (10.0.0.7:31000) ::1 [fe80::1%eth0]:80 2001:db8::7", "HOST (HOST) HOST [HOST HOST"),
            ("node7.jane.corp, 7node.jane.corp gpu-7:30000 localhost:80", "HOST, HOST HOST HOST"),
            ("'sk-abc' hf_abcdefghij0123456789 00000000000000000000", "'KEY' KEY KEY"),
            ("rid 123e4567-e89b-12d3-a456-426614174000 " + "x" * 201, "rid KEY KEY"),
            ("half \ud800 a letter", "half ? a letter"),
            *(
                (text, text)
                for text in (
                    "SGLang 0.5.23, 0.5.23.post1 and v0.5.23 (torch==2.4.0+cu124)...",
                    "invalid type: floating point `3.7`, expected i64",
                    "min_new_tokens must be in [0, max_new_tokens(3)], got 5.\n  The model's !!",
                    "`spaces_between_special_tokens`, std::bad_alloc",
                )
            ),
        ],
    )
    def test_of_a_text_what_tells_whose_it_is(self, said: str, left: str) -> None:
        one = Exchange("b", "", "POST", "/generate", {}, 400, None, {"message": said, said: 1})
        assert kept(one).body == {"message": left, left: 1}
        assert kept(replace(one, body=said)).body == left
        assert kept(replace(one, body=None, events=(said,), of=1)).events == (left,)

    @pytest.mark.parametrize(
        ("version", "left"),
        [
            *((v, v) for v in ("0.5.23", "0.5.23.post1", "0.5.23rc1", "0.5.23.post1.dev20", "7")),
            *(("0.5.23+jane.doe.corp", "0.5.23"), ("0.5.9.post2+cu124", "0.5.9.post2")),
            *((v, "other") for v in ("x/../../evil", "0.5.23-jane", "10.0.0.7", "jane", "", "491701234567", "0.5.")),
        ],
    )
    def test_of_a_version_what_names_nobody(self, version: str, left: str) -> None:
        body = {"version": version, "weight_version": version, "new_version": version}
        one = Exchange("b", "", "GET", "/get_server_info", None, 200, "application/json", body)
        assert kept(one).body == {"version": left, "weight_version": left}
        probed = Probed(replace(HERE, version=version), (), ())
        assert recording(probed).sglang == left

    @pytest.mark.parametrize(
        ("kind", "left"),
        [
            *(
                (k, k)
                for k in (None, "application/json", "text/event-stream; charset=utf-8", "text/html;charset=UTF-8")
            ),
            *((k, "other") for k in ("text/plain; boundary=jane", "application/vnd.jane+json", "jane")),
        ],
    )
    def test_of_a_content_type_what_is_known(self, kind: str | None, left: str | None) -> None:
        assert kept(Exchange("b", "", "GET", "/health", None, 200, kind)).kind == left

    @pytest.mark.parametrize(("owner", "left"), [("sglang", {"owned_by": "sglang"}), ("jane", {}), (["sglang"], {})])
    def test_an_owner_is_sglang_or_none(self, owner: Any, left: dict[str, Any]) -> None:
        one = Exchange("b", "", "GET", "/v1/models", None, 200, "application/json", {"data": [{"owned_by": owner}]})
        assert kept(one).body == {"data": [left]}

    def test_fields_are_named_as_they_are(self) -> None:
        body = {"a_field_of_more_than_20_letters": 1}
        assert kept(Exchange("b", "", "POST", "/generate", {}, 200, None, body)).body == body

    @pytest.mark.parametrize("model", ["mine-7B", "org/mine", "/models/mine"])
    def test_a_model_is_hidden_by_its_whole_name(self, model: str) -> None:
        one = Exchange("b", "", "POST", "/generate", {}, 400, None, {"message": f"{model}: no {model}2, '{model}'"})
        assert kept(one, model).body["message"].count("MODEL") == 2
        assert kept(replace(one, body={"of": model}), model).body == {"of": "MODEL"}

    def test_a_model_that_has_a_mere_word_for_a_name(self) -> None:
        """`--model-path model`: it would be a difference to the mock wherever a server speaks of the model."""
        body = {"message": "the model's context", "model_path": "model"}
        assert kept(Exchange("b", "", "POST", "/generate", {}, 400, None, body), "model").body == {
            "message": "the model's context",
            "model_path": "MODEL",
        }

    def test_of_a_description_only_what_tells_of_behaviour(self) -> None:
        body = {"version": "0.5.23", "model_path": "/x", "launch_command": "secret", "context_length": None}
        one = Exchange("b", "", "GET", "/get_server_info", None, 200, "application/json", body)
        assert kept(one).body == {"version": "0.5.23", "model_path": "MODEL", "context_length": None}
        assert kept(replace(one, body="text")).body == "text"
        listed = replace(one, path="/v1/models", body={"object": "list", "data": [{"id": "/x/me", "root": "/x/me"}]})
        assert kept(listed).body == {"object": "list", "data": [{"id": "MODEL"}]}

    @pytest.mark.parametrize(("there", "left"), [(0, []), (1, [0]), (3, [0, 1, 2]), (9, [0, 1, 7, 8])])
    def test_of_a_stream_the_first_two_events_and_the_last_two(self, there: int, left: list[int]) -> None:
        events = tuple({"n": n} for n in range(there))
        one = Exchange("b", "", "POST", "/generate", {}, 200, "text/event-stream", events=events, of=there)
        found = kept(one)
        assert [e["n"] for e in found.events or ()] == left
        assert found.of == there


EXCHANGES = (
    Exchange("a", "p", "POST", "/generate", {"input_ids": 3}, 200, "application/json", {"text": "é"}, during="paused"),
    Exchange("a", "", "GET", "/health", None, 200, None, ""),
    Exchange("b", "", "POST", "/generate", {}, 200, "text/event-stream", events=({"text": ""},), of=1, done=True),
)
MADE = Recording("0.5.23", 256, 999, True, False, 2, None, EXCHANGES)


class TestFile:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "x.jsonl"
        record.write(file, MADE)
        assert record.read(file) == MADE
        assert MADE.behaviours == ("a", "b")
        schema = json.loads((PROJECT / "spec/schemas/recording.schema.json").read_text(encoding="utf-8"))
        for line in file.read_text(encoding="utf-8").splitlines():
            jsonschema.validate(json.loads(line), schema)
        assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]

    def test_a_good_one_stays_when_writing_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "x.jsonl"
        record.write(file, MADE)
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            record.write(file, replace(MADE, sglang="0.5.9"))
        assert record.read(file) == MADE
        assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]

    def test_what_is_no_file_is_written_to_and_not_replaced(self, tmp_path: Path) -> None:
        pipe, got = tmp_path / "pipe", list[str]()
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")))
        reader.start()
        record.write(pipe, MADE)
        reader.join(10)
        assert got == [record.text(MADE)] and pipe.is_fifo()

    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("x.jsonl")
        record.write(tmp_path / "link", MADE)
        assert (tmp_path / "link").is_symlink() and record.read(tmp_path / "x.jsonl") == MADE

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server": {}}', "hm", '{"server": 3}\n{"a": 1}'])
    def test_a_file_that_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x").write_text(text)
        with pytest.raises(BadRecording, match="holds no recording"):
            record.read(tmp_path / "x")

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\xff\xfe")
        for name in ("x", "none"):
            with pytest.raises(BadRecording, match="cannot read"):
                record.read(tmp_path / name)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PROBES", tuple(one for one in probes.PROBES if one.name in FEW))


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["record", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("few")
class TestCommand:
    def test_a_server_is_recorded_and_the_mock_beside_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "x.jsonl"
        with elsewhere(lambda: serving(QUICK)) as url:
            assert command("--engine", url, "--out", str(file)) == CONFORMS
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == [
            f"{file}: 4 behaviours of SGLang 0.5.23",
            "the mock engine: 4 agree, 0 differ on purpose, 0 differ",
        ]
        assert "  not asked, it would disturb others: --disruptive: abort_all" in said
        assert record.read(file).behaviours == (
            "plain_logprob",
            "stream_logprob",
            "abort_running",
            "GET_get_server_info",
        )

    def test_where_it_goes_by_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with elsewhere(lambda: serving(replace(QUICK, sglang="0.5.9"))) as url:
            assert command("--engine", url, "--disruptive") == CONFORMS
        assert record.read(tmp_path / "sglang-0.5.9.jsonl").sglang == "0.5.9"
        assert "abort_all" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("version", "name"),
        [("x/../../evil", "other"), ("0.5.23+jane.doe.corp", "0.5.23"), ("0.5.23.post1", "0.5.23.post1")],
    )
    def test_the_name_of_a_file_is_not_the_servers(
        self, version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @asynccontextmanager
        async def renamed() -> AsyncIterator[str]:
            server = Mock(QUICK)
            told = server._server_info

            async def info(request: web.BaseRequest) -> Any:
                reply = await told(request)
                (part,) = reply.parts
                return replace(
                    reply,
                    parts=(replace(part, data=json.dumps(json.loads(part.data) | {"version": version}).encode()),),
                )

            server._paths["/get_server_info"]["GET"] = info
            await server.start()
            yield server.url
            await server.stop()

        (tmp_path / "in").mkdir()
        monkeypatch.chdir(tmp_path / "in")
        with elsewhere(renamed) as url:
            assert command("--engine", url) == CONFORMS
        assert [p.name for p in tmp_path.rglob("*")] == ["in", f"sglang-{name}.jsonl"]
        assert "jane" not in (tmp_path / "in" / f"sglang-{name}.jsonl").read_text()

    @pytest.mark.parametrize("words", [(), ("--out", "x")])
    def test_a_folder_that_takes_no_file_is_found_out_before_anything_is_asked(
        self,
        words: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def full(**_: Any) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.TemporaryFile", full)
        with elsewhere(lambda: answering({"/get_server_info": INFO, "/v1/models": MODELS})) as url:
            assert command("--engine", url, *words) == USAGE
        name = words[-1] if words else "sglang-0.5.23.jsonl"
        assert capsys.readouterr().err.endswith(f"cannot write {name}: Read-only file system\n")

    def test_a_folder_in_the_place_of_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sglang-0.5.23.jsonl").mkdir()
        with elsewhere(lambda: answering({"/get_server_info": INFO, "/v1/models": MODELS})) as url:
            assert command("--engine", url) == USAGE
        assert "cannot write sglang-0.5.23.jsonl: it is a folder" in capsys.readouterr().err

    def test_a_pipe_is_written_to(self, tmp_path: Path) -> None:
        pipe, got = tmp_path / "pipe", list[str]()
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")))
        reader.start()
        with elsewhere(lambda: serving(QUICK)) as url:
            assert command("--engine", url, "--out", str(pipe)) == CONFORMS
        reader.join(10)
        assert got[0].startswith('{"server":') and [p.name for p in tmp_path.iterdir()] == ["pipe"]

    def test_standard_output_is_the_recording_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with elsewhere(lambda: serving(replace(QUICK, max_running=2))) as url:
            assert command("--engine", url, "--out", "-") == CONFORMS
        (tmp_path / "x").write_text(capsys.readouterr().out)
        assert "abort_queued" in record.read(tmp_path / "x").behaviours

    @pytest.mark.parametrize(
        ("answers", "said"),
        [
            ({}, "no SGLang at"),
            ({"/get_server_info": web.Response(status=401)}, "wants an API key"),
            ({"/get_server_info": INFO, "/v1/models": MODELS, "/generate": broken, wire.ALIVE: broken}, "died"),
        ],
    )
    def test_a_server_that_cannot_be_asked_leaves_a_good_file_as_it_is(
        self, answers: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "x.jsonl"
        file.write_text("good")
        with elsewhere(lambda: answering(answers)) as url:
            assert command("--engine", url, "--out", str(file)) == CANNOT
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rolloutcheck:")]
        assert said in line
        assert file.read_text() == "good"
        assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]

    def test_a_server_that_dies_in_the_middle(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started = list[Mock]()

        @asynccontextmanager
        async def mortal() -> AsyncIterator[str]:
            started.append(Mock(QUICK))
            await started[0].start()
            yield started[0].url

        async def death(one: Wire, known: Known) -> None:
            asked = one.start("", {"input_ids": [7], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}})
            await asyncio.sleep(0.1)
            asyncio.run_coroutine_threadsafe(started[0].stop(), started[0]._web._loop)
            await one.ended(asked)

        monkeypatch.setattr(probes, "PROBES", (*probes.PROBES, Probe("death", death)))
        with elsewhere(mortal) as url:
            assert command("--engine", url, "--out", str(tmp_path / "x")) == CANNOT
        assert "died (death)" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_nothing_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("--engine", "http://127.0.0.1:1") == CANNOT
        assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--engine", "loopback"), "--engine loopback is no address such as http://127.0.0.1:30000"),
            (("--engine", "http://x", "--out", "no/such/x"), "cannot write no/such/x: no such folder"),
            ((), "Missing option '--engine'"),
        ],
    )
    def test_wrong_words(self, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert command(*words) == USAGE
        assert said in capsys.readouterr().err

    def test_a_folder_that_takes_no_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(record, "write", full)
        with elsewhere(lambda: serving(QUICK)) as url:
            assert command("--engine", url, "--out", str(tmp_path / "x")) == USAGE
        assert "cannot write" in capsys.readouterr().err


def test_what_differs_is_said_field_by_field(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = (
        Row("a", (Difference("", "status", 1, 2),)),
        Row("b", (Difference("p", "kind", 1, 2, "so it is"), Difference("", "x", 1, 2, "so it is"))),
        Row("c", ()),
    )
    table.show(Console(width=200), Matrix(MADE, rows, (("d", "why"), ("e", "why"))), Path("x"))
    assert capsys.readouterr().out.splitlines() == [
        "x: 3 behaviours of SGLang 0.5.23",
        "the mock engine: 1 agree, 1 differ on purpose, 1 differ",
        "  a differs: status is 1, and 2 on the server",
        "  b differs on purpose: so it is",
        "  not asked, why: d, e",
    ]


def test_a_request_that_runs_says_nothing() -> None:
    async def ask() -> None:
        asked = Asked()
        asked.task = asyncio.ensure_future(asyncio.sleep(9))  # type: ignore[arg-type]
        asked.runs()
        await asked.leave()
        with pytest.raises(Missed):
            asked.runs()

    run(ask())


def test_a_recording_says_with_which_options() -> None:
    probed = Probed(Server("http://x", "0.5.9", 256, 400, True, False, 2, 1, "/m"), (), ())
    assert recording(probed) == Recording("0.5.9", 256, 400, True, False, 2, 1, ())
