"""What a server answered, as a file that can be kept: JSON lines, the server first, then an exchange each.

Times, ids of requests, addresses, paths and whatever else is somebody's own are taken
out, and lists are cut: what is left says how a server behaves, and nothing of whose it is.
The form is ``spec/schemas/recording.schema.json``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.probes import LOADS, Probed
from harness.wire import Exchange, reading

KEPT = 6
"""Entries of a list, characters of a text."""
MODEL = "MODEL"
TELLING: dict[str, tuple[str, ...]] = {
    "/get_server_info": (
        *("version", "model_path", "context_length", "max_total_num_tokens", "max_req_input_len", "weight_version"),
        *("max_running_requests", "max_queued_requests", "incremental_streaming_output", "allow_auto_truncate"),
        *("stream_output", "stream_interval"),
    ),
    "/get_model_info": ("model_path", "tokenizer_path", "is_generation", "weight_version", "preferred_sampling_params"),
    "/v1/models": ("object", "data", "id", "owned_by", "max_model_len"),
    LOADS: ("version", "loads", "num_running_reqs", "num_waiting_reqs", "max_running_requests", "max_total_num_tokens"),
}
"""What is kept of a server's descriptions: hundreds of keys, some of them its owner's."""

_PASSING = re.compile(r"id|timestamp|created|.*(_ts|_latency|_time)|ts_tic")
_OURS = re.compile(r"rolloutcheck-[0-9a-f]{16}-\d+-")
_NUMBER = re.compile(r"\d{1,6}(\.\d{1,6}){0,2}((\.post|\.dev|rc)\d{1,6})*")
"""A version, of SGLang or of weights, that names nobody."""
_WEIGHTS = ("default", "next")
_KINDS = re.compile(r"(application/json|text/(event-stream|plain|html))(; ?charset=utf-8)?", re.IGNORECASE)
_FIELD = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_QUOTED = re.compile("|".join(rf"(?<!\w){a}(?=\S)[^{b}\n]*(?<=\S){b}" for a, b in ('""', "''", "``", "“”", "‘’", "«»")))
_AROUND = "\"'`“”‘’«»()[]{}<>,.;!?"
"""Quotation marks, brackets and punctuation beside a word; a colon begins many an address of six."""
_LONGEST = 200
"""Letters of a word that can be looked at; a longer one is none."""
_PRIVATE = (
    ("PATH", re.compile(r"[/\\]|(?<!\w)~\w|%2f|%5c", re.IGNORECASE)),
    ("MAIL", re.compile(r"\S@\S")),
    ("HOST", re.compile(r"(?<!\d)\d+(\.\d+){3}(?!\d)")),
    ("HOST", re.compile(r"(?<![\w:])[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7}(?!\w)", re.IGNORECASE)),
    ("HOST", re.compile(r"[^\W\d][\w-]*(\.[\w-]+)*:\d{2,5}(?!\d)")),
    ("HOST", re.compile(r"(?=[\w-]+(\.[\w-]+){2})([\w-]+\.)*[^\W\d][\w-]*\.([\w-]+\.)*[^\W\d]")),
    ("KEY", re.compile(r"(?<!\w)sk-\w|[0-9a-f]{8}-[0-9a-f]{4}-|(?=[a-z]*\d)[a-z0-9]{20,}", re.IGNORECASE)),
)
"""What a word holds that may be somebody's own, and what stands in its place. A path may be a URL."""
_PATH = re.compile(r"[/\\~]")
_DEEPEST = 32
"""Lists and objects within each other; SGLang's are six deep."""
_MOST = 1 << 24
"""Tokens of an answer."""


class BadRecording(Exception):
    """A file that holds no recording. The message is one line."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, and the server's options that matter (see `harness.server.Server`)."""

    sglang: str
    context: int
    pool: int
    incremental: bool
    truncates: bool
    running: int | None
    queue: int | None
    exchanges: tuple[Exchange, ...]

    @property
    def behaviours(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.behaviour for one in self.exchanges))


def recording(probed: Probed) -> Recording:
    """What a server answered, without what is its own. Raises NoServer for what could not be compared."""
    server = probed.server
    with reading(server.url):
        return Recording(
            version_of(server.version),
            server.context,
            server.pool,
            server.incremental,
            server.truncates,
            server.running,
            server.queue,
            tuple(kept(one, server.model) for one in probed.exchanges),
        )


def version_of(text: str) -> str:
    """A version without what its builder has added: letters, digits and dots."""
    number = text.partition("+")[0]
    return number if _NUMBER.fullmatch(number) else "other"


def kept(exchange: Exchange, model: str = "") -> Exchange:
    """An exchange as it may be kept. ``model``: the server's own path of it."""
    events = exchange.events
    if events is not None:
        events = (*events[:2], *events[2:][-2:])
    body = exchange.body
    if exchange.path in TELLING and isinstance(body, dict):
        body = _named(body, TELLING[exchange.path])
    request = exchange.request
    if isinstance(request, dict) and isinstance(request.get("input_ids"), list):
        request = request | {"input_ids": len(request["input_ids"])}
    return replace(
        exchange,
        request=_clean(request, model),
        kind=_kind(exchange.kind),
        body=_clean(body, model),
        events=None if events is None else tuple(_clean(event, model) for event in events),
    )


def _kind(kind: str | None) -> str | None:
    return kind if kind is None or _KINDS.fullmatch(kind) else "other"


def _named(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    if isinstance(value, dict):
        given = {name: inner for name, inner in value.items() if name in names and not _is_an_owner(name, inner)}
        return {name: MODEL if name == "id" else _named(inner, names) for name, inner in given.items()}
    return value


def _is_an_owner(name: str, value: Any) -> bool:
    return name == "owned_by" and value != "sglang"


def _clean(value: Any, model: str, name: str = "", depth: int = 0) -> Any:
    if depth > _DEEPEST or _is_odd(name, value):
        raise ValueError(f"{name or 'an answer'} is {value!r:.60}")
    if isinstance(value, dict):
        left = {k: v for k, v in value.items() if v == MODEL or not _PASSING.fullmatch(k)}
        return {_key(k, model): _clean(v, model, k, depth + 1) for k, v in left.items()}
    if isinstance(value, list):
        inner = [_clean(one, model, "", depth + 1) for one in value]
        return inner if len(inner) <= KEPT else {"n": len(inner), "head": inner[:1], "tail": inner[-1:]}
    if isinstance(value, float):
        return round(value, 4)
    return _said(value, model, name) if isinstance(value, str) else value


def _is_odd(name: str, value: Any) -> bool:
    """Whether a comparison, which reads so much of an answer, could not read it."""
    if name == "finish_reason":
        return not isinstance(value, dict | None)
    if name == "output_token_logprobs_length":
        return type(value) is not int or value > _MOST
    if isinstance(value, list) and value and isinstance(value[0], dict) and "version" in value[0]:
        return not all(isinstance(one, dict) and "version" in one for one in value)
    return False


def _key(name: str, model: str) -> str:
    return name if _FIELD.fullmatch(name) else _said(name, model, "")


def _said(value: str, model: str, name: str) -> str:
    """A text as it may be kept. ``name``: of the field that it is in."""
    value = value.encode(errors="replace").decode()  # half a letter cannot be written
    if name == "text":
        return value[:KEPT]
    if name in ("model_path", "tokenizer_path"):
        return MODEL
    if name in ("weight_version", "version", "new_version"):
        return value if value in _WEIGHTS else version_of(value)
    return _hidden(_OURS.sub("", _unnamed(value, model)))


def _unnamed(text: str, model: str) -> str:
    """Without the model's name. One that is a mere word ("model") tells nothing, and is part of many a sentence."""
    if re.fullmatch("[a-z]*", model):
        return text
    return re.sub(rf"(?<!\w){re.escape(model)}(?!\w)", MODEL, text)


def _hidden(text: str) -> str:
    """Without paths, addresses and keys. In quotation marks a path may have blanks in it."""
    text = _QUOTED.sub(lambda found: f"{found[0][0]}PATH{found[0][-1]}" if _PATH.search(found[0]) else found[0], text)
    return re.sub(r"\S+", lambda found: _public(found[0]), text)


def _public(word: str) -> str:
    """The word, or what stands for it, with the punctuation around it."""
    core = word.strip(_AROUND) if len(word) <= _LONGEST else word
    before, _, after = word.partition(core) if core else (word, "", "")
    return f"{before}{_stands_for(core)}{after}"


def _stands_for(word: str) -> str:
    if len(word) > _LONGEST:
        return "KEY"
    if _NUMBER.fullmatch(word):
        return word
    return next((name for name, own in _PRIVATE if own.search(word)), word)


# the file


def text(one: Recording) -> str:
    """The recording as JSON lines."""
    server = {f.name: getattr(one, f.name) for f in fields(one) if f.name != "exchanges"}
    lines = [{"server": server}, *(_line(exchange) for exchange in one.exchanges)]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def _line(exchange: Exchange) -> dict[str, Any]:
    line = asdict(exchange)
    if exchange.events is None:
        for name in ("events", "of", "done"):
            del line[name]
    else:
        del line["body"]
        line["events"] = list(exchange.events)
    for name in ("part", "during"):
        if not line[name]:
            del line[name]
    return line


def write(path: Path, one: Recording) -> None:
    """Puts the whole file in place at once, or leaves what is there as it is. Raises OSError."""
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        path.write_text(text(one), encoding="utf-8")
        return
    path = path.resolve()  # of a link, what it leads to
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text(one))
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> Recording:
    """Raises BadRecording."""
    try:
        first, *rest = list(_lines(path))
        exchanges = tuple(Exchange(**{"part": "", **line, "events": _events(line)}) for line in rest)
        return Recording(**first["server"], exchanges=exchanges)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecording(f"cannot read {path}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadRecording(f"{path} holds no recording: {error}") from error


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _events(line: dict[str, Any]) -> tuple[Any, ...] | None:
    return tuple(line["events"]) if "events" in line else None
