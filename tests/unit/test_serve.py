"""The stand-alone server over real HTTP: every path, every way to end, and the command around it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness import serve as command
from harness.cli import main
from harness.engines import standalone
from harness.engines.live import Options, Scheduler
from harness.engines.standalone import Server, Wire, serving
from harness.replay import BadFile, Failure, write
from harness.schedule import KINDS, VERSIONS, Attempt, Schedule, to_json
from harness.serve import CannotListen, is_loopback, schedules_in
from harness.verdict import USAGE

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")

FAST = Options(rate=5000.0)
PROMPT = [97, 98]
JSON = "application/json"
SOON_S = 5.0


@dataclass
class Client:
    """An HTTP client of a server."""

    url: str
    session: aiohttp.ClientSession

    async def ask(
        self, method: str, path: str, body: Any = None, data: bytes | None = None, kind: str | None = JSON
    ) -> tuple[int, Any]:
        """``kind``: the content type, None for a request without one."""
        data = data if body is None else json.dumps(body).encode()
        headers, skip = ({}, ("Content-Type",)) if kind is None else ({"Content-Type": kind}, ())
        url = self.url + path
        async with self.session.request(method, url, data=data, headers=headers, skip_auto_headers=skip) as response:
            text = await response.text()
            plain = not text or text[0] not in '[{"'
            return response.status, text if plain else json.loads(text)

    async def generate(self, most: int = 4, **body: Any) -> tuple[int, Any]:
        return await self.ask("POST", "/generate", request(most, **body))

    async def stream(self, most: int = 4, **body: Any) -> list[Any]:
        """The events, the last of which may be "[DONE]"; an exception that breaks the stream is the last."""
        found: list[Any] = []
        try:
            async with self.session.post(self.url + "/generate", json=request(most, stream=True, **body)) as response:
                if response.content_type != "text/event-stream":
                    return [response.status]
                async for line in response.content:
                    if line.startswith(b"data: "):
                        text = line.decode().removeprefix("data: ").strip()
                        found.append(text if text == "[DONE]" else json.loads(text))
        except (aiohttp.ClientError, ValueError) as error:
            found.append(error)
        return found


def request(most: int, **body: Any) -> dict[str, Any]:
    params = {"max_new_tokens": most, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": params, **body}


@asynccontextmanager
async def connected(options: Options = FAST) -> AsyncIterator[Client]:
    async with serving(options) as url, aiohttp.ClientSession() as session:
        yield Client(url, session)


async def until(condition: Any) -> None:
    async with asyncio.timeout(SOON_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# /generate


@pytest.mark.asyncio
async def test_a_plain_answer_and_both_kinds_of_stream() -> None:
    async with connected() as client:
        status, reply = await client.generate(return_logprob=True)
        events = await client.stream(return_logprob=True)
        assert status == 200 and events.pop() == "[DONE]"
        assert events[-1]["output_ids"] == reply["output_ids"] and events[-1]["text"] == reply["text"]
        assert events[-1]["meta_info"]["output_token_logprobs"] == reply["meta_info"]["output_token_logprobs"]
    async with connected(replace(FAST, incremental=True)) as client:
        events = (await client.stream())[:-1]
        assert [token for event in events for token in event["output_ids"]] == reply["output_ids"]
        assert "".join(event["text"] for event in events) == reply["text"]


@pytest.mark.asyncio
async def test_the_readme_shows_its_answer() -> None:
    """With the options that are the defaults."""
    command, shown = README.partition("<!-- curl -->\n```console\n")[2].partition("\n```")[0].splitlines()
    words = shlex.split(command)
    assert words[:3] == ["$", "curl", "-s"] and "http://127.0.0.1:30000/generate" in words and shown.endswith("...")
    header, body = (words[words.index(option) + 1] for option in ("-H", "-d"))
    name, _, value = header.partition(": ")
    async with connected(Options()) as client:
        asked = client.session.post(f"{client.url}/generate", data=body.encode(), headers={name: value})
        async with asked as response:
            assert (await response.text()).startswith(shown.removesuffix("..."))


@pytest.mark.asyncio
async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with connected() as client:
        client.session.connector._limit = 1  # type: ignore[union-attr]
        for _ in range(3):
            assert (await client.stream())[-1] == "[DONE]"
            assert (await client.generate())[0] == 200


GENERATE = (
    "1 validation error:\n  {'type': 'dataclass_type', 'loc': ('body',), 'msg': 'Input should be a dictionary or "
)
GENERATE += "an instance of GenerateReqInput'"
UNSUPPORTED = "1 validation error:\n  {'loc': ['header', 'content-type'], 'msg': \"Unsupported Media Type: "
UNSUPPORTED += "Only 'application/json' is allowed\""
NO_JSON = "1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', %d), 'msg': 'JSON decode error'"
EMPTY = "1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required'"
NESTED = b"[" * 100_000


def no_instance(name: str) -> str:
    where = f"'loc': ('body', 'is-instance[{name}]'), 'msg': 'Input should be an instance of {name}'"
    return f"2 validation errors:\n  {{'type': 'is_instance_of', {where}"


def refusal(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", EMPTY),
        (b"{", NO_JSON % 1),
        (b"nope", NO_JSON % 0),
        (b"[]", GENERATE),
        (b'"a"', GENERATE),
        (NESTED, NO_JSON % 0),
        (b'{"input_ids": [97], "sampling_params": {"max_new_tokens": "\\ud800"}}', NO_JSON % 0),
        (b'{"rid": "\\uD83D"}', NO_JSON % 0),
        (b'{"\\udc00": 1}', NO_JSON % 0),
        (b'{"rid": "\xed\xa0\x80"}', NO_JSON % 0),
        (b'{"rid": "\xff"}', NO_JSON % 0),
        ('{"text": "a"}'.encode("utf-16"), NO_JSON % 0),
        (b'{"sampling_params": {"max_new_tokens": NaN}}', NO_JSON % 0),
        (b'{"sampling_params": {"max_new_tokens": -Infinity}}', NO_JSON % 0),
        (b'{"sampling_params": {"max_new_tokens": 1e999}}', NO_JSON % 0),
    ],
)
@pytest.mark.asyncio
async def test_a_body_that_is_no_request(body: bytes, said: str) -> None:
    """By hand, on 0.5.23. Where an error is in half a letter or in no number is not found out."""
    async with connected() as client:
        assert await client.ask("POST", "/generate", data=body) == refusal(said)


@pytest.mark.parametrize("path", ["/tokenize", "/abort_request", "/update_weight_version"])
@pytest.mark.asyncio
async def test_half_a_letter_is_no_json_anywhere(path: str) -> None:
    body = b'{"prompt": "\\ud800", "rid": "\\ud800", "new_version": "\\ud800"}'
    async with connected() as client:
        assert await client.ask("POST", path, data=body) == refusal(NO_JSON % 0)


@pytest.mark.asyncio
async def test_whole_letters_may_be_written_as_halves() -> None:
    async with connected() as client:
        asked = b'{"prompt": "\\ud83d\\ude00", "temperature": 0.5}'
        assert await client.ask("POST", "/tokenize", data=asked) == await client.ask(
            "POST", "/tokenize", data='{"prompt": "\U0001f600"}'.encode()
        )


@pytest.mark.parametrize(
    "kind",
    [
        *(None, "application/x-www-form-urlencoded", "text/plain", "text/json", "nonsense", "application/"),
        *("application/jsonx", "application/json, text/plain", "application /json", "x/application/json"),
    ],
)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/generate", GENERATE),
        ("/tokenize", UNSUPPORTED),
        ("/abort_request", no_instance("AbortReq")),
        ("/pause_generation", no_instance("PauseGenerationReqInput")),
        ("/continue_generation", no_instance("ContinueGenerationReqInput")),
        ("/update_weights_from_disk", no_instance("UpdateWeightFromDiskReqInput")),
        ("/update_weight_version", no_instance("UpdateWeightVersionReqInput")),
    ],
)
@pytest.mark.asyncio
async def test_a_body_that_is_not_said_to_be_json(path: str, said: str, kind: str | None) -> None:
    """By hand, on 0.5.23; `curl -d` says a form unless it is told."""
    bodies: tuple[dict[str, Any], ...] = (request(1), request(1, stream=True)) if path == "/generate" else ({},)
    async with connected() as client:
        for body in bodies:
            assert await client.ask("POST", path, body, kind=kind) == refusal(said)
        if path != "/tokenize":
            assert await client.ask("POST", path, kind=kind, data=b"") == refusal(EMPTY)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "application/JSON", "application/json;", "application/vnd.x+json"]
)
@pytest.mark.asyncio
async def test_a_body_that_is_said_to_be_json(kind: str) -> None:
    """By hand, on 0.5.23: of all paths only /tokenize wants it to be called so and no other way."""
    async with connected() as client:
        for stream in (False, True):
            assert (await client.ask("POST", "/generate", request(1, stream=stream), kind=kind))[0] == 200
        assert (await client.ask("POST", "/abort_request", {"rid": "x"}, kind=kind))[0] == 200
        status, _ = await client.ask("POST", "/tokenize", {"prompt": "a"}, kind=kind)
        assert status == (400 if kind.endswith("+json") else 200)


@pytest.mark.parametrize("kind", [None, "text/plain"])
@pytest.mark.asyncio
async def test_what_reads_no_body_takes_any(kind: str | None) -> None:
    async with connected() as client:
        assert await client.ask("POST", "/flush_cache", {}, kind=kind) == (200, standalone.FLUSHED)


@pytest.mark.parametrize("asked", [{}, {"prompt": 3}])
@pytest.mark.asyncio
async def test_text_to_tokenize_is_text(asked: Any) -> None:
    async with connected() as client:
        status, reply = await client.ask("POST", "/tokenize", asked)
        assert status == 400 and "prompt: Field required" in str(reply)
        status, reply = await client.ask("POST", "/tokenize", [])
        assert status == 400 and "'type': 'model_attributes_type'" in reply["message"]


@pytest.mark.asyncio
async def test_refusals_have_their_shapes() -> None:
    async with connected(replace(FAST, context=16)) as client:
        status, plain = await client.generate(99)
        (event, done) = await client.stream(99)
        assert status == 400 and plain["error"]["message"] == event["error"]["message"] and done == "[DONE]"


@pytest.mark.asyncio
async def test_a_body_larger_than_a_mebibyte() -> None:
    async with connected(replace(FAST, context=400_000)) as client:
        status, reply = await client.generate(1, input_ids=[12345] * 200_000)
        assert status == 200 and reply["meta_info"]["prompt_tokens"] == 200_000


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.asyncio
async def test_every_kind_of_interruption(kind: str) -> None:
    """As the schedule's own engine answers; what breaks off breaks off for the client."""
    attempt = Attempt(kind, after=2, at=9, code=503, field="output_ids" if kind == "missing" else "")
    schedule = Schedule(prompt="ab", budget=4, script=(65, 66), attempts=(attempt,))
    async with connected(replace(FAST, schedules=(schedule,))) as client:
        ids = command.tokenizers.load().encode("ab", add_special_tokens=False)
        events = await client.stream(input_ids=ids)
        following = await client.stream(input_ids=ids)
    assert following[-2]["output_ids"] == [65, 66, 65, 66] and following[-1] == "[DONE]"
    errors = [event for event in events if isinstance(event, Exception)]
    assert bool(errors) == (kind in ("drop-before", "drop-inside", "drop-after"))
    if kind == "http" or kind == "drop-before":
        assert events == [503] or len(errors) == len(events) == 1
        return
    told = [event for event in events if isinstance(event, dict)]
    assert ("[DONE]" in events) == (kind not in ("drop-inside", "close"))
    tokens = {
        "abort": 2,
        "abort-late": 3,
        "abort-request": 3,
        "abort-queued": 0,
        "abort-retracted": 2,
        "close": 2,
        "drop-inside": 2,
    }
    if kind == "error-event":
        assert told[-1]["error"]["code"] == 503
    elif kind == "queue-full":
        assert told[-1]["meta_info"]["finish_reason"]["status_code"] == 503
    elif kind == "missing":
        assert all("output_ids" not in event for event in told)
    else:
        assert len(told[-1]["output_ids"]) == tokens.get(kind, {"over-deliver": 6, "lost-ids": 3}.get(kind, 4))


@pytest.mark.parametrize(
    ("kind", "broken"), [("drop-before", True), ("drop-inside", True), ("close", True), ("run", False)]
)
@pytest.mark.asyncio
async def test_a_plain_reply_that_breaks(kind: str, broken: bool) -> None:
    schedule = Schedule(prompt="ab", budget=4, script=(65,), attempts=(Attempt(kind, at=5),))
    async with connected(replace(FAST, schedules=(schedule,))) as client:
        ids = command.tokenizers.load().encode("ab", add_special_tokens=False)
        try:
            assert (await client.generate(input_ids=ids))[0] == 200 and not broken
        except aiohttp.ClientError:
            assert broken


async def running(client: Client) -> tuple[int, int]:
    _, said = await client.ask("GET", "/v1/loads?include=core")
    return said["loads"][0]["num_running_reqs"], said["loads"][0]["num_waiting_reqs"]


@pytest.mark.asyncio
async def test_a_client_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engines.live.ORPHAN_S", 0.01)
    async with connected(Options(rate=100.0)) as client:
        for stream in (True, False):
            task = asyncio.create_task(client.ask("POST", "/generate", request(4000, stream=stream)))
            await until(lambda: _is(client, (1, 0)))
            task.cancel()
            await until(lambda: _is(client, (0, 0)))


async def _is(client: Client, wanted: tuple[int, int]) -> bool:
    return await running(client) == wanted


@pytest.mark.asyncio
async def test_a_stream_that_ends_as_its_client_leaves_ends_nothing_else() -> None:
    """The clock that brings everybody's tokens ended with it."""
    wire = Wire()
    wire.ended.cancel()
    wire.end("end")


@pytest.mark.asyncio
async def test_events_told_before_the_head_is_out_come_behind_it() -> None:
    class Transport:
        def __init__(self) -> None:
            self.written, self.size = b"", 0

        def write(self, data: bytes) -> None:
            self.written += data

        def get_write_buffer_size(self) -> int:
            return self.size

    class Request:
        transport: Any = Transport()

    wire = Wire()
    wire.send(b"abc")
    assert not wire.behind()
    wire.open(Request())  # type: ignore[arg-type]
    wire.send(b"de")
    assert Request.transport.written == b"3\r\nabc\r\n2\r\nde\r\n" and not wire.behind()
    Request.transport.size = standalone.BEHIND + 1
    assert wire.behind()
    Request.transport = None
    with pytest.raises(ConnectionResetError):
        Wire().open(Request())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_an_answer_that_ends_as_its_client_leaves() -> None:
    """Whoever waited has just been cancelled, and the one ticker of all requests goes on."""
    wire = Wire()
    wire.ended.cancel()
    wire.end("end")
    assert wire.ended.cancelled()


# control


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.asyncio
async def test_what_it_tells_of_itself(version: str) -> None:
    old = version == "0.5.9"
    async with connected(replace(FAST, sglang=version, max_running=7)) as client:
        for path in ("/health", "/health_generate"):
            assert await client.ask("GET", path) == (200, "")
        assert (await client.ask("GET", "/ready"))[0] == (404 if old else 200)
        assert await client.ask("GET", "/workers") == (200, {"workers": [{"url": client.url}]})
        assert await client.ask("GET", "/list_workers") == (200, {"urls": [client.url]})
        for path in ("/get_model_info", "/model_info"):
            assert (await client.ask("GET", path))[1]["weight_version"] == "default"
        for path in ("/get_server_info", "/server_info"):
            said = (await client.ask("GET", path))[1]
            assert (said["version"], said["max_running_requests"], said["context_length"]) == (version, 7, 4096)
        status, load = await client.ask("GET", "/get_load")
        assert status == (200 if old else 404) and (
            load[0]["num_reqs"] == 0 if old else load == {"detail": "Not Found"}
        )
        _, said = await client.ask("GET", "/v1/loads?include=core")
        assert said["version"] == version and said["loads"][0]["max_running_requests"] == 7
        assert ("aggregate" in said) == old == ("num_accelerators" not in said)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.asyncio
async def test_the_load(version: str) -> None:
    async with connected(Options(rate=20.0, sglang=version, max_running=1)) as client:
        tasks = [asyncio.create_task(client.generate(400)) for _ in range(2)]
        await until(lambda: _is(client, (1, 1)))
        _, said = await client.ask("GET", "/v1/loads")
        assert 2 <= said["loads"][0]["num_used_tokens"] < 100
        if version == "0.5.9":
            assert said["aggregate"]["total_reqs"] == said["loads"][0]["num_total_reqs"] == 2
            _, (load,) = await client.ask("GET", "/get_load")
            assert (load["num_reqs"], load["num_waiting_reqs"]) == (2, 1) and load["num_tokens"] >= 2
        await client.ask("POST", "/abort_request", {"abort_all": True})
        assert {reply["meta_info"]["finish_reason"]["type"] for _, reply in await asyncio.gather(*tasks)} == {"abort"}


@pytest.mark.asyncio
async def test_paths_and_methods_that_are_none() -> None:
    async with connected() as client:
        assert await client.ask("GET", "/nothing") == (404, {"detail": "Not Found"})
        for method, path in (("GET", "/generate"), ("POST", "/health"), ("GET", "/abort_request")):
            assert await client.ask(method, path) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.asyncio
async def test_an_abort_by_id_and_what_aborts_nothing() -> None:
    async with connected(Options(rate=100.0)) as client:
        task = asyncio.create_task(client.generate(4000, rid="one"))
        await until(lambda: _is(client, (1, 0)))
        for body in ({}, {"rid": ""}, {"rid": "other"}, {"abort_all": False}):
            assert await client.ask("POST", "/abort_request", body) == (200, "")
        assert (await client.ask("POST", "/abort_request", data=b""))[0] == 400
        assert not task.done()
        assert await client.ask("POST", "/abort_request", {"rid": "one"}) == (200, "")
        assert (await task)[1]["meta_info"]["finish_reason"]["message"] == "Aborted"


@pytest.mark.parametrize("mode", standalone.MODES)
@pytest.mark.asyncio
async def test_a_pause(mode: str) -> None:
    async with connected(Options(rate=200.0)) as client:
        early = asyncio.create_task(client.generate(20))
        await until(lambda: _is(client, (1, 0)))
        said = {"message": "Generation paused successfully.", "status": "ok"}
        assert await client.ask("POST", "/pause_generation", {"mode": mode}) == (200, said)
        late = asyncio.create_task(client.generate(2))
        flushed, text = await client.ask("POST", "/flush_cache", {})
        assert flushed == (400 if mode == "in_place" else 200)
        assert text == ("Flush cache failed.\n" if mode == "in_place" else standalone.FLUSHED)
        await asyncio.sleep(0.1)
        assert not late.done() and early.done() == (mode == "abort")
        said = {"message": "Generation continued successfully.", "status": "ok"}
        assert await client.ask("POST", "/continue_generation", {}) == (200, said)
        assert len((await late)[1]["output_ids"]) == 2
        reply = (await early)[1]
        assert reply["meta_info"]["num_retractions"] == (mode == "retract")
        assert reply["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")


@pytest.mark.asyncio
async def test_the_default_pause_aborts_and_others_are_refused() -> None:
    async with connected() as client:
        for data in (b'{"mode": "bogus"}', b"[]", b""):
            status, said = await client.ask("POST", "/pause_generation", data=data)
            assert status == said["code"] == 400 and said["type"] == "Bad Request"
        assert (await client.ask("POST", "/continue_generation", data=b""))[0] == 400
        assert (await client.ask("POST", "/pause_generation", {}))[0] == 200
        assert (await client.ask("POST", "/continue_generation", {}))[0] == 200


@pytest.mark.asyncio
async def test_the_cache() -> None:
    async with connected(Options(rate=200.0)) as client:
        assert await client.ask("GET", "/flush_cache") == (200, standalone.FLUSHED)
        task = asyncio.create_task(client.generate(40))
        await until(lambda: _is(client, (1, 0)))
        assert await client.ask("POST", "/flush_cache") == (400, "Flush cache failed.\n")
        assert (await client.ask("GET", "/flush_cache?timeout=soon"))[0] == 400
        assert (await client.ask("GET", "/flush_cache?timeout=20"))[0] == 200
        assert (await task)[0] == 200


@pytest.mark.asyncio
async def test_new_weights() -> None:
    async with connected() as client:
        for path in ("/update_weights_from_disk", "/update_weight_version"):
            for body in ({}, {"model_path": 1, "new_version": 1}, []):
                assert (await client.ask("POST", path, body))[0] == 400
        asked = {"model_path": "m", "weight_version": "5", "abort_all_requests": True}
        said = {"success": True, "message": "Succeeded to update model weights. Weight version updated to 5."}
        said["num_paused_requests"] = 0  # type: ignore[assignment]
        assert await client.ask("POST", "/update_weights_from_disk", asked) == (200, said)
        said["message"] = "Succeeded to update model weights."
        assert await client.ask("POST", "/update_weights_from_disk", {"model_path": "m"}) == (200, said)
        assert (await client.generate())[1]["meta_info"]["weight_version"] == "5"
        said = {"success": True, "message": "Weight version updated to 6", "new_version": "6"}
        assert await client.ask("POST", "/update_weight_version", {"new_version": "6"}) == (200, said)
        assert (await client.ask("GET", "/model_info"))[1]["weight_version"] == "6"


@pytest.mark.parametrize("abort", [True, False])
@pytest.mark.asyncio
async def test_a_new_version_in_mid_request(abort: bool) -> None:
    """0.5.23p `weight_version_mid`, `weight_version_abort`; without a word it aborts (source)."""
    async with connected(Options(rate=200.0)) as client:
        task = asyncio.create_task(client.generate(60))
        await until(lambda: _is(client, (1, 0)))
        await asyncio.sleep(0.05)
        asked = {"new_version": "2"} if abort else {"new_version": "2", "abort_all_requests": False}
        await client.ask("POST", "/update_weight_version", asked)
        _, reply = await task
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if abort else "length")
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "2"]
    assert meta["weight_versions"][1]["end"] == len(reply["output_ids"])


@pytest.mark.asyncio
async def test_weights_from_a_disk_abort_what_runs_if_they_are_told_to() -> None:
    async with connected(Options(rate=100.0)) as client:
        task = asyncio.create_task(client.generate(4000))
        await until(lambda: _is(client, (1, 0)))
        await client.ask("POST", "/update_weights_from_disk", {"model_path": "m", "abort_all_requests": True})
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


# files


class TestFiles:
    def put(self, folder: Path, data: Any) -> Path:
        file = folder / "f.json"
        file.write_text(json.dumps(data))
        return file

    def test_a_schedule_a_failure_or_a_list(self, tmp_path: Path) -> None:
        one, two = Schedule(prompt="a"), Schedule(prompt="b", attempts=(Attempt("abort", after=1),))
        assert schedules_in(self.put(tmp_path, to_json(two))) == (two,)
        assert schedules_in(self.put(tmp_path, [to_json(one), {"schedule": to_json(two)}])) == (one, two)
        failure = Failure("BUDGET", "plain", "inproc", two)
        assert schedules_in(write(tmp_path, failure, 0)) == (two,)

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            ([], "the list of schedules is empty"),
            (7, "schedule must be an object, not int"),
            ([{"prompt": "a"}], "schedule lacks 'budget'"),
            ([to_json(Schedule()), to_json(Schedule())], "two schedules have the prompt 'a'"),
            ({"scenario": {}}, "a scenario of whole rollouts"),
        ],
    )
    def test_what_is_wrong_with_a_file(self, tmp_path: Path, data: Any, says: str) -> None:
        with pytest.raises(BadFile, match="f.json: .*" + says.replace("'", ".")):
            schedules_in(self.put(tmp_path, data))

    def test_every_corpus_entry_of_a_sample_can_be_served(self) -> None:
        folder = Path(__file__).parents[1] / "regressions" / "corpus"
        found = [file for file in sorted(folder.glob("*.json")) if "schedule" in json.loads(file.read_text())]
        assert len(found) > 20 and all(len(schedules_in(file)) == 1 for file in found)


# the command


class TestCommand:
    @pytest.fixture(autouse=True)
    def _signals(self) -> Iterator[None]:
        """The command leaves its signals ignored, for its process ends; this one goes on."""
        kept = {number: signal.getsignal(number) for number in command.ENDS}
        yield
        for number, handler in kept.items():
            signal.signal(number, handler)

    def run(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    @pytest.mark.parametrize("number", command.ENDS)
    def test_it_says_where_it_listens_and_ends_cleanly(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        start = Server.start

        async def start_and_end(server: Server) -> None:
            await start(server)
            loop = asyncio.get_running_loop()
            for delay in (0.01, 0.02):  # `timeout` sends two
                loop.call_later(delay, os.kill, os.getpid(), number)

        monkeypatch.setattr(Server, "start", start_and_end)
        assert self.run("--port", "0", "--seed", "3", "--sglang", "0.5.9", "--pool", "400") == 0
        out, err = capsys.readouterr()
        assert out.startswith("listens on http://127.0.0.1:") and out.count("\n") == 1 and err == ""
        os.kill(os.getpid(), number)

    def test_options_reach_the_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        monkeypatch.setattr(command, "serve", lambda *arguments: given.extend(arguments))
        file = TestFiles().put(tmp_path, to_json(Schedule(prompt="x")))
        words = ["--port", "5", "--sglang", "0.5.9", "--incremental", "--scenario", str(file), "--faults", "0.5"]
        words += ["--seed", "7", "--rate", "9", "--length", "5", "--context", "99", "--pool", "50"]
        assert self.run(*words, "--max-running", "3", "--max-queued", "2") == 0
        options = Options("0.5.9", 99, True, 9.0, 5, 3, 2, 50, 7, 0.5, (Schedule(prompt="x"),))
        assert given[:4] == [options, "127.0.0.1", 5, None]

    @pytest.mark.parametrize("option", ["--rate", "--faults"])
    @pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
    def test_numbers_without_an_end(self, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(option, value) == USAGE
        assert capsys.readouterr().err.startswith(f"rolloutcheck: Invalid value for '{option}': ")

    @pytest.mark.asyncio
    async def test_the_highest_rate(self) -> None:
        async with connected(Options(rate=1e9)) as client:
            await client.generate()
            await asyncio.sleep(0.1)
            assert len((await client.generate(300))[1]["output_ids"]) == 300

    def test_a_port_in_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert self.run("--port", str(port)) == USAGE
        assert capsys.readouterr().err == f"rolloutcheck: port {port} of 127.0.0.1 is in use\n"

    def test_a_file_that_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--scenario", str(tmp_path / "no.json")) == USAGE
        assert capsys.readouterr().err.startswith("rolloutcheck: cannot read ")

    def test_a_host_of_others_is_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "serve", lambda *given: given[-1]("listens"))
        assert self.run("--host", "0.0.0.0") == 0
        assert capsys.readouterr().err.count("can be reached from other machines") == 1
        assert self.run("--host", "localhost") == 0 and capsys.readouterr().err == ""

    def test_an_address_that_is_not_this_machines(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--host", "192.0.2.1") == USAGE
        assert "port 30000 of 192.0.2.1 cannot be listened on: " in capsys.readouterr().err

    def test_a_host_that_is_none(self) -> None:
        with pytest.raises(CannotListen, match=r"no address for --host a\.\.b"):
            is_loopback("a..b")

    def test_the_addresses_of_this_machine(self) -> None:
        assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0")

    def test_a_clock_that_stops_is_not_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def run(scheduler: Scheduler) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Scheduler, "run", run)
        with pytest.raises(ZeroDivisionError):
            command.serve(FAST, "127.0.0.1", 0, None, lambda _: None)

    def test_an_address_of_six(self) -> None:
        async def url() -> str:
            return Server(FAST, "::1", 80).url

        assert asyncio.run(url()) == "http://[::1]:80"
