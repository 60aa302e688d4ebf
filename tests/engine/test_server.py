"""What is asked of a server before it is judged on, and what is said of one that cannot be."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness import server
from harness.engines import HOST
from harness.engines.live import Options
from harness.engines.standalone import POOL
from harness.history import INCREMENTAL, STREAM
from harness.server import NoServer, Server, describe, end, fitting, judged_as, same_tokens, timed
from tests.engine.upstreams import FAST, INFO, VOCABULARY, Mock, Say, answer, http, mock, nobody, silence, spoken, stub


@pytest.fixture(scope="module", name="one")
def _one() -> Iterator[Mock]:
    with mock() as made:
        yield made


def problem(url: str) -> str:
    with pytest.raises(NoServer) as error:
        fitting(url, VOCABULARY)
    said = str(error.value)
    assert "\n" not in said and len(said) <= 300
    return said


# Those that can be judged on


@pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
@pytest.mark.parametrize("incremental", [False, True])
def test_a_server_by_its_own_words(version: str, incremental: bool) -> None:
    with mock(Options(context=300, sglang=version, incremental=incremental)) as one:
        found = fitting(one.url, VOCABULARY)
        assert found == Server(one.url, version, 300, POOL, incremental, False, 4096, None, "mock")
        assert found.limit == 300
        assert found.lacks == (STREAM if incremental else INCREMENTAL)
        assert not one.seen  # nothing is generated for it


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("0.5.23", "0.5.23"),
        ("0.5.23.post1", "0.5.23"),
        ("0.5.23.post12", "0.5.23"),
        ("0.5.23+cu128", "0.5.23"),
        ("0.5.9.post2", "0.5.9"),
    ],
)
def test_a_version_that_was_mended_is_that_version(said: str, version: str) -> None:
    with stub({"/get_server_info": http({**INFO, "version": said})}) as one:
        assert describe(one.url).version == said
        assert judged_as(describe(one.url)) == Server(one.url, version, 256, 256)


def test_what_it_may_say_besides() -> None:
    """A KV cache that holds less than the model takes, and the options that matter."""
    more = {"max_total_num_tokens": 99, "incremental_streaming_output": True, "allow_auto_truncate": True}
    more |= {"max_req_input_len": 93, "max_running_requests": 2, "max_queued_requests": 1, "model_path": "/mine"}
    models = {"data": [{"id": "x", "max_model_len": 256}]}
    with stub({"/get_server_info": http({**INFO, **more}), "/v1/models": http(models)}) as one:
        found = describe(one.url)
    assert found == Server(one.url, "0.5.23", 256, 99, True, True, 2, 1, "/mine")
    assert found.limit == 99


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"max_model_len": "256"}]}, {"data": [7]}])
def test_a_model_that_is_not_described_takes_what_the_server_does(models: Any) -> None:
    with stub({"/get_server_info": http(INFO), "/v1/models": http(models)}) as one:
        assert describe(one.url).context == 256


def test_how_long_tokens_take() -> None:
    async def slowly(body: Any, say: Say) -> None:
        count = body["sampling_params"]["max_new_tokens"]
        await asyncio.sleep(0.01 * count)
        await say(http(answer([97] * count, finish="length")))

    with stub({"/generate": slowly}) as one:
        found = timed(describe(one.url))
        assert one.asked == ["/get_server_info", "/v1/models", "/tokenize", *["/generate"] * 3]
    assert found.first_s >= 0.01 and found.token_s > 0
    assert found.until(10) == found.first_s + 10 * found.token_s


def test_a_server_that_is_faster_with_more_tokens_takes_no_time_for_them() -> None:
    waits = iter((0.0, 0.2, 0.0))

    async def unsteadily(body: Any, say: Say) -> None:
        await asyncio.sleep(next(waits))
        await say(http(answer([97], finish="length")))

    with stub({"/generate": unsteadily}) as one:
        found = timed(describe(one.url))
    assert found.token_s == 0.0 and found.until(99) == found.first_s >= 0.2


def test_it_is_asked_on_one_connection(one: Mock) -> None:
    before = one.server._web.requests_count
    known = len(one.server._web.connections)
    timed(describe(one.url))
    assert one.server._web.requests_count == before + 6
    assert len(one.server._web.connections) <= known + 2


def test_the_requests_that_are_ended_end() -> None:
    with stub() as one:
        end(describe(one.url), ["a", "b"])
        assert one.asked == ["/get_server_info", "/v1/models", "/abort_request", "/abort_request"]
    with nobody() as url:
        end(Server(url), ["a"])  # it has gone, and all that it had


# Those that cannot


def test_nothing_listens() -> None:
    with nobody() as url:
        assert problem(url).startswith(f"nothing answers at {url}: ")
        with pytest.raises(NoServer, match=r"^nothing answers at"):
            timed(Server(url))


def test_a_host_without_an_address() -> None:
    assert problem("http://nowhere.invalid:1").startswith("nothing answers at http://nowhere.invalid:1: ")
    assert problem(f"http://{'a' * 70}.invalid").startswith("nothing answers at http://aaa")


@pytest.mark.parametrize(
    "url", ["http://[", "http://", "https://", f"http://{HOST}:99999", "http://:80", f"http://{HOST}:-1", "http://h:x"]
)
def test_what_is_no_address(url: str) -> None:
    assert problem(url) == f"{url} is no address of a server: give http://HOST:PORT"


def test_characters_that_no_address_has() -> None:
    assert problem("http://a\x00b:1").startswith("nothing answers at http://a")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (http({**INFO, "version": "0.5.12"}), "the server at {} is SGLang 0.5.12; known are 0.5.23 and 0.5.9"),
        (http({**INFO, "version": "0.5.231"}), "the server at {} is SGLang 0.5.231; known are 0.5.23 and 0.5.9"),
        (http({**INFO, "version": "0.5.23rc1"}), "the server at {} is SGLang 0.5.23rc1; known are 0.5.23 and 0.5.9"),
        (http({**INFO, "version": 5}), "the server at {} is SGLang 5; known are 0.5.23 and 0.5.9"),
        (http({}), "no SGLang at {}: /get_server_info names no version"),
        (http(), "no SGLang at {}: /get_server_info names no version"),
        (
            http({"version": "0.5.23"}),
            "the server at {} does not say how long an input may be (max_req_input_len)",
        ),
        (
            http({**INFO, "max_req_input_len": "250"}),
            "the server at {} does not say how long an input may be (max_req_input_len)",
        ),
        (http({}, 401), "the server at {} wants an API key, which no client under test would send"),
        (http({}, 403), "the server at {} wants an API key, which no client under test would send"),
        (http({}, 404), "no SGLang at {}: /get_server_info answers HTTP 404"),
        (http({}, 500), "no SGLang at {}: /get_server_info answers HTTP 500"),
        (http(b"<html>"), "no SGLang at {}: /get_server_info answers no JSON"),
        (http(b"\xff\xfe\x00"), "no SGLang at {}: /get_server_info answers no JSON"),
        (http(b"[" * 99_999), "no SGLang at {}: /get_server_info answers no JSON"),
        (http([INFO]), "no SGLang at {}: /get_server_info answers no object"),
    ],
)
def test_what_is_no_server_for_us(reply: bytes, said: str) -> None:
    with stub({"/get_server_info": reply}) as one:
        assert problem(one.url) == said.format(one.url)


def test_what_breaks_off() -> None:
    with stub({"/get_server_info": http(json.dumps(INFO).encode(), length=999)}) as one:
        assert problem(one.url).startswith(f"nothing answers at {one.url}: ")
    with stub({"/get_server_info": b"220 mail.example ESMTP\r\n"}) as one:
        assert problem(one.url).startswith(f"nothing answers at {one.url}: ")
    with stub({"/get_server_info": b""}) as one:
        assert problem(one.url).startswith(f"nothing answers at {one.url}: ")


@pytest.mark.parametrize("path", ["/get_server_info", "/tokenize"])
def test_what_does_not_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.2)
    with stub({path: silence}) as one:
        assert problem(one.url) == f"the server at {one.url} does not answer {path} within 0 s"


def test_what_answers_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps every timer of a connection from running out."""

    async def drips(body: Any, say: Say) -> None:
        await say(http(b"{", length=99_999))
        while True:
            await say(b" ")
            await asyncio.sleep(0.02)

    async def floods(body: Any, say: Say) -> None:
        await say(http(b"{", length=1 << 40))
        while True:
            await say(b" " * 9999)

    monkeypatch.setattr(server, "ANSWER_S", 0.3)
    with stub({"/get_server_info": drips}) as one:
        assert problem(one.url) == f"the server at {one.url} does not answer /get_server_info within 0 s"
    monkeypatch.setattr(server, "ANSWER_S", 60.0)
    monkeypatch.setattr(server, "LONGEST_ANSWER", 100_000)
    with stub({"/get_server_info": floods}) as one:
        assert "does not answer" in problem(one.url)


def test_another_tokenizer(one: Mock) -> None:
    class Other:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [1, 2, 3]

    with pytest.raises(NoServer) as error:
        same_tokens(describe(one.url), Other())
    said = f"the server at {one.url} has another tokenizer: give --tokenizer DIR, the one of its model"
    assert str(error.value) == said
    with stub({"/tokenize": http({"tokens": None})}) as strange:
        assert problem(strange.url).endswith("give --tokenizer DIR, the one of its model")


def test_a_server_that_does_not_generate() -> None:
    with stub({"/generate": http({"error": "x"}, 500)}) as one, pytest.raises(NoServer) as error:
        timed(describe(one.url))
    assert str(error.value) == f"no SGLang at {one.url}: /generate answers HTTP 500"


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_server_that_is_busy_is_asked_again(status: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAITS_S", (0.0, 0.0))
    left = iter(range(times))

    async def busy(body: Any, say: Say) -> None:
        if next(left, None) is None:
            await spoken(body, say)
        else:
            await say(http({"error": "x"}, status))

    with stub({"/generate": busy}) as one:
        if times < 3:
            assert timed(describe(one.url)).first_s > 0
        else:
            with pytest.raises(NoServer) as error:
                timed(describe(one.url))
            assert str(error.value) == f"the server at {one.url} is too busy: /generate answers HTTP {status}"


def test_a_compressed_answer_is_read() -> None:
    data = gzip.compress(json.dumps(INFO).encode())
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    with stub({"/get_server_info": head.encode() + data}) as one:
        assert describe(one.url).version == "0.5.23"


def test_no_proxy_of_the_environment_is_asked(one: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as elsewhere:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, elsewhere)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert fitting(one.url, VOCABULARY).context == FAST.context
