"""Bodies of /generate: listed ones with what the gate says of them, and drawn ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from harness.engines import gate

_PARAMS = "a value or an array of values for SamplingParamsOrList"
_IDS = "a value or an array of values for TokenIdsOrList"
_KNOWN = ", ".join(f"`{name}`" for name in gate.SAMPLING)

HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"colour": 1}}, f"unknown field `colour`, expected one of {_KNOWN}"),
    (
        {"sampling_params": {"watermark": {"colour": 1}}},
        "unknown field `colour`, expected one of `enabled`, `key`, `context_window`",
    ),
    *(
        ({"sampling_params": {"max_new_tokens": value}}, f"invalid type: {seen}, expected i64")
        for value, seen in (
            (3.0, "floating point `3.0`"),
            ("3", 'string "3"'),
            (True, "boolean `true`"),
            (False, "boolean `false`"),
            ([3], "sequence"),
            ({"a": 3}, "map"),
        )
    ),
    ({"sampling_params": {"temperature": "hot"}}, 'invalid type: string "hot", expected f64'),
    ({"sampling_params": {"temperature": True}}, "invalid type: boolean `true`, expected f64"),
    ({"sampling_params": {"stop_token_ids": 7}}, "invalid type: integer `7`, expected a sequence"),
    ({"sampling_params": {"stop_token_ids": [7, "8"]}}, 'invalid type: string "8", expected i64'),
    (
        {"sampling_params": {"stop": 7}},
        "invalid type: integer `7`, expected a value or an array of values for StringOrList",
    ),
    ({"sampling_params": {"stop": ["a", None]}}, "invalid type: null, expected a string"),
    ({"sampling_params": {"ignore_eos": 1}}, "invalid type: integer `1`, expected a boolean"),
    ({"sampling_params": {"logit_bias": {"5": "much"}}}, 'invalid type: string "much", expected f64'),
    ({"sampling_params": {"logit_bias": [1]}}, "invalid type: sequence, expected a map"),
    ({"sampling_params": {"watermark": 1}}, "invalid type: integer `1`, expected struct WatermarkRequestConfig"),
    ({"sampling_params": "x"}, f'invalid type: string "x", expected {_PARAMS}'),
    ({"sampling_params": [1]}, "invalid type: integer `1`, expected struct SamplingParams"),
    ({"sampling_params": [{"max_new_tokens": "1"}]}, 'invalid type: string "1", expected i64'),
    ({"input_ids": "zz"}, f'invalid type: string "zz", expected {_IDS}'),
    ({"input_ids": {}}, f"invalid type: map, expected {_IDS}"),
    ({"input_ids": [1.0]}, "invalid type: floating point `1.0`, expected i64"),
    ({"input_ids": [97, True]}, "invalid type: boolean `true`, expected i64"),
    ({"input_ids": [True]}, "invalid type: boolean `true`, expected a sequence"),
    ({"input_ids": ["z"]}, 'invalid type: string "z", expected a sequence'),
    ({"input_ids": [[97], ["z"]]}, 'invalid type: string "z", expected i64'),
    ({"stream": "yes"}, 'invalid type: string "yes", expected a boolean'),
    ({"stream": 1}, "invalid type: integer `1`, expected a boolean"),
    ({"return_logprob": 1}, "invalid type: integer `1`, expected a value or an array of values for BoolOrList"),
    ({"text": 5}, "invalid type: integer `5`, expected a value or an array of values for StringOrList"),
    ({"rid": 5}, "invalid type: integer `5`, expected a value or an array of values for StringOrList"),
]
"""Bodies that are refused, and the refusal."""

HARMLESS: list[dict[str, Any]] = [
    {"foo": 1},  # only among the sampling parameters is an unknown name refused
    {"stream": None, "return_logprob": None, "rid": None, "sampling_params": None},
    {"sampling_params": dict.fromkeys(gate.SAMPLING) | {"max_new_tokens": 2}},
    {"sampling_params": {"temperature": 1, "top_p": 0.5, "stop": [], "stop_token_ids": [], "logit_bias": {"5": 1}}},
    {"sampling_params": {"custom_params": ["anything"], "watermark": {"enabled": True, "key": None}, "choice": ["a"]}},
]
"""Bodies that are let through."""

_NAMES = st.sampled_from(("enabled", "key", "5"))
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 300),
    st.none(),
    st.booleans(),
    st.sampled_from((0.0, 3.0, -1.5, 1e30)),
    st.sampled_from(("", "3", "é")),
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(_NAMES, values, max_size=2),
    max_leaves=4,
)
_UNKNOWN = ("colour", "max_tokens", "MAX_NEW_TOKENS")


def _some(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the fields, with whatever JSON can say."""
    return st.dictionaries(st.sampled_from(names), _VALUES, max_size=3)


_PARAMS_DRAWN = _some((*gate.SAMPLING, *_UNKNOWN)) | st.just({"max_new_tokens": 1})


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Mostly objects of which one or two fields are wrong."""
    body = draw(_some((*gate.REQUEST, *_UNKNOWN)))
    body.setdefault("input_ids", draw(st.lists(st.integers(97, 122), min_size=1, max_size=3)))
    if draw(st.booleans()):
        body["sampling_params"] = draw(_PARAMS_DRAWN | st.lists(_PARAMS_DRAWN, max_size=2))
    return body
