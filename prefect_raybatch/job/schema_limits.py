"""Limits for JSON Schemas of answers, checked before any library processes the schema.

A schema is untrusted text from which grammars are built and with which answers are validated. A
huge or self-referring one would never finish, and engines do not enforce integers beyond 2^53.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

MOST_SCHEMA_BYTES = 1 << 20
MOST_DEPTH = 100  # nested objects and lists; the grammar libraries stop at about 120
MOST_PARTS = 2_000  # objects in the schema: checking 3,000 takes jsonschema 5 s
MOST_ITEMS = 10_000  # a grammar of 100,000 list items takes seconds, one of 100 million never ends
MOST_CHARACTERS = 1_000_000
EXACT = 1 << 53  # beyond it, float64, which grammars use, lacks some integers

VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, not schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
NUMERIC_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = {
    **dict.fromkeys(
        ("minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"),
        MOST_ITEMS,
    ),
    **dict.fromkeys(("minLength", "maxLength"), MOST_CHARACTERS),
}
# Keywords whose schemas are about the same value, not about a part of it.
SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


def check_schema_limits(schema: object) -> None:
    """Raise ValueError if a JSON Schema is too large or deep, or checking it might never end.

    Checks the depth, the number of schemas, counts such as maxItems, numbers beyond 2^53, and $refs
    that lead back to themselves.
    """
    _check_depth(schema)
    for number, (place, part) in enumerate(parts_of(schema), 1):
        if number > MOST_PARTS:
            raise ValueError(
                f"contains over {MOST_PARTS:,} schemas; make it smaller, or split it between "
                "several jobs"
            )
        _check_part(place, part)
    words = {word for _, part in parts_of(schema) for word in part}
    if {"patternProperties", "unevaluatedProperties"} <= words:
        raise ValueError(
            "has both patternProperties and unevaluatedProperties, which cannot be checked in "
            "bounded time; use additionalProperties"
        )
    _check_references(schema)


def parts_of(
    part: Any, place: str = "", by_name: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, schema) of `part`, if it is a schema, and of each schema nested in it.

    `part` is a schema, a list of schemas, or with `by_name` a mapping of names to schemas such as
    `properties`. `place` is the dotted path of `part` in the whole schema, "" for the root.
    """
    if isinstance(part, dict) and not by_name:
        yield place or "the root", part
    inner = part.items() if isinstance(part, dict) else enumerate(part)
    for name, item in inner:
        if (not by_name and name in VALUES) or not isinstance(item, (dict, list)):
            continue
        yield from parts_of(item, f"{place}.{name}", not by_name and name in BY_NAME)


def target_of(schema: object, reference: str) -> Any:
    """Return the part of `schema` to which a $ref refers; raise ValueError if there is none.

    `reference` is a path within the schema, such as #/$defs/Item.
    """
    at: Any = schema
    for name in reference.lstrip("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(name)] if isinstance(at, list) else at[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(
                f"$ref {reference!r} has no target in this schema; correct it"
            ) from None
    return at


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"is nested too deeply: over {MOST_DEPTH} levels; use $ref, or flatten it")


def _check_part(place: str, part: Mapping[str, object]) -> None:
    for name, most in COUNTS.items():
        value = part.get(name)
        if isinstance(value, (int, float)) and value > most:
            raise ValueError(
                f"{place}: {name} {_shown(value)} exceeds {most:,}, the maximum for a grammar; "
                "lower it, or remove it and limit sampling.max_tokens"
            )
    for name in NUMERIC_KEYWORDS:
        _check_number(f"{place}: {name}", part.get(name))
    for name in ("const", "enum"):
        for value in _values_in(part.get(name)):
            _check_number(f"{place}: {name}", value)


def _check_number(where: str, value: Any) -> None:
    if not _is_number(value) or abs(value) <= EXACT:  # false for NaN and the infinities
        return
    raise ValueError(
        f"{where} {_shown(value)} is beyond 2^53 ({EXACT}), where engines do not enforce numbers "
        "exactly; use text for such values (type: string), or remove the limit and check it in "
        "output.postprocess"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: int | float) -> str:
    # Python refuses to write integers of some thousand digits.
    if isinstance(value, int) and value.bit_length() > 1_000:
        return f"(of {value.bit_length():,} bits)"
    return str(value)


def _values_in(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _values_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values_in(inner)
    else:
        yield value


def _check_references(schema: object) -> None:
    """Raise ValueError if a $ref leads back to its own schema without entering a property or item.

    Validating any answer with such a schema would never end.
    """
    done: set[int] = set()
    for place, part in parts_of(schema):
        path: set[int] = set()
        stack: list[tuple[object, bool]] = [(part, False)]
        while stack:
            at, left = stack.pop()
            if left:
                path.discard(id(at))
                done.add(id(at))
                continue
            if id(at) in path:
                raise ValueError(
                    f"{place}: its $ref leads back to itself without entering a property or an "
                    "item, so no answer could be checked; remove that $ref"
                )
            if id(at) in done or not isinstance(at, dict):
                continue
            path.add(id(at))
            stack.append((at, True))
            stack += [(inner, False) for inner in _about_same_value(schema, at)]


def _about_same_value(schema: object, part: Mapping[str, object]) -> Iterator[object]:
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        with suppress(ValueError):  # a $ref without a target is reported where it is resolved
            yield target_of(schema, reference)
    for name in SAME_VALUE:
        inner = part.get(name)
        yield from inner if isinstance(inner, list) else [inner]
