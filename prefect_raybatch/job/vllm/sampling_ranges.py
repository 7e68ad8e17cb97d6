"""Valid values of vLLM's sampling fields, checked without importing it.

vLLM checks them request by request, so a wrong one would fail every row once the engines are up.
The ranges are those of `SamplingParams._verify_args` in vLLM; tests compare them. vLLM does not
check the seed: one over 64 bits crashes the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

QUOTED = "quote text that YAML reads as another type: 'no', '1', 'null'"
MOST_ANSWERS = 2**20  # more than any row asks for
RangeCheck = tuple[Callable[[Any], bool], str]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _between(low: float, high: float) -> RangeCheck:
    return lambda v: _number(v) and low <= v <= high, f"a number, {low:g} to {high:g}"


def _texts(value: object) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, (list, tuple)) and all(isinstance(v, str) and v for v in values)


def _token_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_whole, value))


def _biases(value: object) -> bool:
    """Return whether `value` is a valid logit_bias; its token ids may be text, as JSON requires."""
    return isinstance(value, Mapping) and all(
        (_whole(token) or (isinstance(token, str) and token.isdecimal())) and _number(bias)
        for token, bias in value.items()
    )


_PENALTY = _between(-2, 2)
RANGES: dict[str, RangeCheck] = {
    "n": (lambda v: _whole(v) and v >= 1, "a whole number, at least 1"),
    "temperature": _between(0, 2),
    "top_p": (lambda v: _number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": (lambda v: _whole(v) and v >= -1, "a whole number, at least 1 (0 or -1: off)"),
    "min_p": _between(0, 1),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (lambda v: _number(v) and v > 0, "a number above 0"),
    "min_tokens": (lambda v: _whole(v) and v >= 0, "a whole number, at least 0"),
    # vLLM stores it in 64 bits without a check; n answers have consecutive seeds.
    "seed": (
        lambda v: _whole(v) and -(2**63) <= v < 2**63 - MOST_ANSWERS,
        "a signed 64-bit whole number (take a longer hash modulo 2**62)",
    ),
    "logit_bias": (_biases, "a mapping of token ids to numbers, such as {100: -5.0}"),
    "allowed_token_ids": (
        lambda v: _token_ids(v) and bool(v),
        "a list of whole numbers, at least one",
    ),
    "stop": (_texts, f"text or a list of texts, none of them empty ({QUOTED})"),
    "bad_words": (
        lambda v: not isinstance(v, str) and _texts(v),
        f"a list of texts, none of them empty ({QUOTED})",
    ),
    "stop_token_ids": (_token_ids, "a list of whole numbers"),
}


def wrong(sampling: Mapping[str, Any], job: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Return a message about the first sampling field that vLLM would reject, or None.

    `sampling` is {field: value}. A value of None means vLLM's default and is always valid. If
    `sampling` holds the fields of one row, `job` holds the valid fields of its job, and the row's
    values replace them.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    for name, (fits, what) in RANGES.items():
        if name in given and not fits(given[name]):
            return f"{name} must be {what}, and is {str(given[name])[:80]!r}"
    given = {name: value for name, value in {**job, **sampling}.items() if value is not None}
    fewest, most = given.get("min_tokens", 0), given.get("max_tokens")
    if most is not None and fewest > most:
        return f"min_tokens ({fewest}) exceeds max_tokens ({most}); lower it"
    if given.get("n", 1) > 1 and not given.get("temperature", 1.0):
        return (
            f"n is {given['n']}, but all answers are the same at temperature 0; raise temperature, "
            "or remove n"
        )
    return None
