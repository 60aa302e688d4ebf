"""What a running server says of itself, before anything is asked of it on a client's behalf.

A server is judged as one of the versions whose behaviour is known (spec/sglang.md);
what answers otherwise, or not at all, gives no verdict.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from json import loads
from typing import Any
from urllib.parse import urlsplit

from harness.history import INCREMENTAL, STREAM
from harness.schedule import VERSIONS

ANSWER_S = 10.0
"""The most seconds that an answer to a small question may take."""

LONGEST_ANSWER = 1 << 24
"""Bytes; what answers more was not asked for it."""

WAITS_S = (0.5, 1.0, 2.0)
"""Seconds before a server that is too busy is asked again."""

RESERVE = 6  # both versions say of C = 256 that an input may have 250 tokens (`GET_get_server_info`)
SAID = " the ab é 12"
TRIED = 8
"""Tokens of the one answer that is asked for, to learn how fast it is."""


Ask = Callable[..., dict[str, Any]]
"""Method, path and perhaps a body, to an object in JSON."""


class NoServer(Exception):
    """There is none that can be judged on. The message is one line."""


class Busy(NoServer):
    """It is there, and takes no request now."""


@dataclass(frozen=True, slots=True)
class Server:
    """``running`` and ``queue``: requests that may run and wait, None without a limit. ``model`` is its own path of it.

    ``context`` and ``pool`` are in tokens: the model's limit, and what its KV cache holds.
    ``first_s`` and ``token_s``: how long the first token takes, and each of the others.
    """

    url: str
    version: str = VERSIONS[0]
    context: int = 0
    pool: int = 1 << 30
    incremental: bool = False
    truncates: bool = False
    running: int | None = None
    queue: int | None = None
    model: str = ""
    first_s: float = 0.0
    token_s: float = 0.0

    @property
    def limit(self) -> int:
        """The most tokens that input and answer can have together."""
        return min(self.context, self.pool)

    @property
    def lacks(self) -> str:
        """The kind of stream that it does not have: it is started with the one or the other."""
        return STREAM if self.incremental else INCREMENTAL

    def until(self, tokens: int) -> float:
        """Seconds until so many tokens are there."""
        return self.first_s + tokens * self.token_s


def describe(url: str) -> Server:
    """The server at ``url`` by its own words. Raises NoServer, with one line, for what is none."""
    with _asking(url) as ask:
        said = ask("GET", "/get_server_info")
        version, longest = str(said.get("version", "")), said.get("max_req_input_len")
        if not version:
            raise NoServer(f"no SGLang at {url}: /get_server_info names no version")
        if type(longest) is not int:
            raise NoServer(f"the server at {url} does not say how long an input may be (max_req_input_len)")
        limit = longest + RESERVE
        context = _model_length(ask) or limit
    return Server(
        url,
        version,
        context,
        _whole(said.get("max_total_num_tokens")) or limit,
        bool(said.get("incremental_streaming_output") or said.get("stream_output")),
        bool(said.get("allow_auto_truncate")),
        _whole(said.get("max_running_requests")),
        _whole(said.get("max_queued_requests")),
        str(said.get("model_path", "")),
    )


def judged_as(server: Server) -> Server:
    """The server, by the name of the version that it is judged as. Raises NoServer."""
    for version in VERSIONS:
        if re.fullmatch(rf"{re.escape(version)}(\.post\d+|\+.*)?", server.version):
            return replace(server, version=version)
    raise NoServer(f"the server at {server.url} is SGLang {server.version[:40]}; known are {' and '.join(VERSIONS)}")


def _model_length(ask: Ask) -> int | None:
    """What the model takes, where the KV cache holds less."""
    try:
        return _whole(ask("GET", "/v1/models")["data"][0]["max_model_len"])
    except (NoServer, KeyError, IndexError, TypeError):
        return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def same_tokens(server: Server, tokenizer: Any) -> None:
    """Sees that the server has the tokenizer: other ids would be nonsense to it, or end it. Raises NoServer."""
    with _asking(server.url) as ask:
        theirs = _ids(ask)
    if theirs != list(tokenizer.encode(SAID, add_special_tokens=False)):
        raise NoServer(f"the server at {server.url} has another tokenizer: give --tokenizer DIR, the one of its model")


def fitting(url: str, tokenizer: Any) -> Server:
    """The server at ``url``, which has the tokenizer. Raises NoServer."""
    server = judged_as(describe(url))
    same_tokens(server, tokenizer)
    return server


def end(server: Server, rids: Iterable[str]) -> None:
    """Ends requests that nobody waits for any more. One that has ended by itself is no matter."""
    with suppress(NoServer), _asking(server.url) as ask:
        for rid in rids:
            ask("POST", "/abort_request", {"rid": rid})


def timed(server: Server) -> Server:
    """The server with how fast it answers. Raises NoServer where it does not."""
    took = []
    with _asking(server.url) as ask:
        ids = _ids(ask)
        for count in (1, 1, TRIED):  # the first answer is not like the others
            params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
            took.append(_took(ask, {"input_ids": ids, "sampling_params": params}))
    return replace(server, first_s=took[1], token_s=max(took[2] - took[1], 0.0) / (TRIED - 1))


def _took(ask: Ask, body: Any) -> float:
    """The seconds that a request takes, on a server that may be too busy for it at first."""
    for wait in WAITS_S:
        with suppress(Busy):
            return _took_once(ask, body)
        time.sleep(wait)
    return _took_once(ask, body)


def _took_once(ask: Ask, body: Any) -> float:
    begin = time.monotonic()
    ask("POST", "/generate", body)
    return time.monotonic() - begin


def _ids(ask: Ask) -> Any:
    return ask("POST", "/tokenize", {"prompt": SAID, "add_special_tokens": False}).get("tokens")


@contextmanager
def _asking(url: str) -> Iterator[Ask]:
    """A way to ask the server, on one connection. Raises NoServer from within for whatever is no proper answer."""
    import httpx

    try:
        parts = urlsplit(url)
        reachable = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is none, half an IPv6 address
        reachable = False
    if not reachable:
        raise NoServer(f"{url[:200]} is no address of a server: give http://HOST:PORT")
    secure = url.startswith("https:")  # else no certificates are read, which takes longer than all the rest
    with httpx.Client(trust_env=False, timeout=ANSWER_S, verify=secure) as client:

        def ask(method: str, path: str, body: Any = None) -> dict[str, Any]:
            begin, data = time.monotonic(), bytearray()
            try:
                with client.stream(method, url + path, json=body) as response:
                    for piece in response.iter_bytes():
                        data += piece
                        if time.monotonic() - begin > ANSWER_S or len(data) > LONGEST_ANSWER:
                            raise httpx.ReadTimeout("no end")
                return _read(url, path, response.status_code, bytes(data))
            except httpx.TimeoutException as error:
                raise NoServer(f"the server at {url} does not answer {path} within {ANSWER_S:.0f} s") from error
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: no name of a host
                said = str(error) or type(error).__name__
                raise NoServer(f"nothing answers at {url}: {said}"[:300]) from error

        yield ask


def _read(url: str, path: str, status: int, data: bytes) -> dict[str, Any]:
    if status in (401, 403):
        raise NoServer(f"the server at {url} wants an API key, which no client under test would send")
    if status in (429, 503):
        raise Busy(f"the server at {url} is too busy: {path} answers HTTP {status}")
    if status != 200:
        raise NoServer(f"no SGLang at {url}: {path} answers HTTP {status}")
    try:
        said = loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise NoServer(f"no SGLang at {url}: {path} answers no JSON") from error
    if not isinstance(said, dict):
        raise NoServer(f"no SGLang at {url}: {path} answers no object")
    return said
