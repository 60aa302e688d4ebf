"""SGLang 0.5.23's request gate: the JSON types that a body of /generate may have.

The server's routes are typed, and whatever their parser lets through is then decoded by
`GenerateRequest.from_json_value` of sglang/api/v1/api_types.py (called by srt/entrypoints/http_server.py). What that
refuses is a 400 with its text, before a stream is begun. tests/gate installs that file and compares.

Only the fields that a rollout client may want are here. Media, bootstrapping and hints are let through unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], None]


class Violation(ValueError):
    """A value is not of its field's type; in the server's words."""


_KINDS: dict[str, Callable[[Any], bool]] = {
    "i64": lambda value: type(value) is int,  # never a bool
    "f64": lambda value: type(value) in (int, float),
    "a boolean": lambda value: type(value) is bool,
    "a string": lambda value: type(value) is str,
    "a sequence": lambda value: type(value) is list,
    "a map": lambda value: type(value) is dict,
}


def _expect(value: Any, kind: str, told: str | None = None) -> None:
    if not _KINDS[kind](value):
        raise Violation(f"invalid type: {_seen(value)}, expected {told or kind}")


def _seen(value: Any) -> str:
    """How the server names a value of the wrong type."""
    if value is None:
        return "null"
    if type(value) is bool:
        return f"boolean `{'true' if value else 'false'}`"
    if type(value) is int:
        return f"integer `{value}`"
    if type(value) is float:
        return f"floating point `{value}`"
    if type(value) is str:
        return f'string "{value}"'
    return "sequence" if type(value) is list else "map"


def _one(kind: str) -> Check:
    return lambda value: _expect(value, kind)


def _many(kind: str) -> Check:
    def check(value: Any) -> None:
        _expect(value, "a sequence")
        fits = _KINDS[kind]
        for wrong in (element for element in value if not fits(element)):
            _expect(wrong, kind)

    return check


def _one_or_many(kind: str, name: str) -> Check:
    """One value, or a list of them, as for a batch."""
    many = _many(kind)

    def check(value: Any) -> None:
        if type(value) is list:
            many(value)
        else:
            _expect(value, kind, f"a value or an array of values for {name}")

    return check


def _ids(value: Any) -> None:
    """Token ids, or a list of lists of them."""
    _expect(value, "a sequence", "a value or an array of values for TokenIdsOrList")
    if not value or _KINDS["f64"](value[0]):
        _many("i64")(value)
    else:
        for ids in value:
            _many("i64")(ids)


def _numbers(value: Any) -> None:
    _expect(value, "a map")
    for number in value.values():
        _expect(number, "f64")


def _anything(_: Any) -> None:
    pass


def _watermark(value: Any) -> None:
    _expect(value, "a map", "struct WatermarkRequestConfig")
    _fields(value, WATERMARK, strict=True)


def _params(value: Any) -> None:
    """Sampling parameters, or a list of them. An unknown name is refused here, and nowhere else."""
    if type(value) is list:
        for one in value:
            _expect(one, "a map", "struct SamplingParams")
            _fields(one, SAMPLING, strict=True)
    else:
        _expect(value, "a map", "a value or an array of values for SamplingParamsOrList")
        _fields(value, SAMPLING, strict=True)


_STRINGS, _WHOLE_NUMBERS = _one_or_many("a string", "StringOrList"), _one_or_many("i64", "Int64OrList")
_BOOLEANS = _one_or_many("a boolean", "BoolOrList")

WATERMARK: dict[str, Check] = {
    "enabled": _one("a boolean"),
    "key": _one("a string"),
    "context_window": _one("i64"),
}
SAMPLING: dict[str, Check] = {
    "max_new_tokens": _one("i64"),
    "stop": _STRINGS,
    "stop_token_ids": _many("i64"),
    "stop_regex": _STRINGS,
    "temperature": _one("f64"),
    "top_p": _one("f64"),
    "top_k": _one("i64"),
    "min_p": _one("f64"),
    "frequency_penalty": _one("f64"),
    "presence_penalty": _one("f64"),
    "repetition_penalty": _one("f64"),
    "min_new_tokens": _one("i64"),
    "n": _one("i64"),
    "json_schema": _one("a string"),
    "regex": _one("a string"),
    "ebnf": _one("a string"),
    "structural_tag": _one("a string"),
    "ignore_eos": _one("a boolean"),
    "skip_special_tokens": _one("a boolean"),
    "spaces_between_special_tokens": _one("a boolean"),
    "no_stop_trim": _one("a boolean"),
    "stream_interval": _one("i64"),
    "logit_bias": _numbers,
    "sampling_seed": _one("i64"),
    "custom_params": _anything,
    "beam_width": _one("i64"),
    "watermark": _watermark,
    "choice": _many("a string"),
}
REQUEST: dict[str, Check] = {
    "rid": _STRINGS,
    "text": _STRINGS,
    "input_ids": _ids,
    "stream": _one("a boolean"),
    "sampling_params": _params,
    "return_logprob": _BOOLEANS,
    "logprob_start_len": _WHOLE_NUMBERS,
    "top_logprobs_num": _WHOLE_NUMBERS,
    "token_ids_logprob": _ids,
    "return_hidden_states": _BOOLEANS,
    "return_text_in_logprobs": _one("a boolean"),
    "extra_key": _STRINGS,
    "priority": _one("i64"),
    "routing_key": _one("a string"),
    "session_id": _one("a string"),
}


def violation(body: Any) -> str | None:
    """What the gate says against a body, or None. An unknown field of the body itself is ignored."""
    try:
        _expect(body, "a map", "struct GenerateRequest")
        _fields(body, REQUEST, strict=False)
    except Violation as error:
        return str(error)
    return None


def _fields(value: Mapping[str, Any], known: Mapping[str, Check], *, strict: bool) -> None:
    """Checks the fields in the order in which they were sent. Null is no value, whatever the type."""
    for name, held in value.items():
        check = known.get(name)
        if check is None and strict:
            listed = ", ".join(f"`{field}`" for field in known)
            raise Violation(f"unknown field `{name}`, expected one of {listed}")
        if check is not None and held is not None:
            check(held)
