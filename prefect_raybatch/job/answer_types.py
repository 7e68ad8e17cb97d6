"""A JSON Schema as typed columns: the Arrow type of each property of an answer.

Text, integers, numbers, booleans, lists, objects with known properties and objects whose values
have one type get types of their own. Everything else (unions, recursion, objects with further
properties) is kept as JSON text, and the plan says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.answer_schema import FIELD
from prefect_raybatch.job.schema_limits import target_of

if TYPE_CHECKING:
    import pyarrow as pa

AnswerKind = Literal["text", "integer", "number", "boolean", "list", "struct", "map", "json"]
SIMPLE: dict[object, AnswerKind] = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
}
MOST_SHAPES = 10_000  # columns, and fields nested in them
# Keywords that say something of a value beyond its own type: what they allow is a union.
COMPOSED = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas")
MIXED = ("patternProperties", "unevaluatedProperties", "dependencies", *COMPOSED)


@dataclass(frozen=True)
class AnswerShape:
    """Type of one value of an answer.

    `names` holds a struct's properties, `item` is the type of the values in a list or map. `why`
    says why a value of kind json is stored as JSON text instead of a column type of its own. If the
    schema lists the allowed values, `values` holds those that are not null; otherwise it is empty.
    """

    kind: AnswerKind
    nullable: bool = False
    names: tuple[tuple[str, AnswerShape], ...] = ()
    item: AnswerShape | None = None
    why: str = ""
    values: tuple[bool | int | float | str, ...] = ()

    def type(self) -> pa.DataType:
        import pyarrow as pa

        if self.kind == "struct":
            return pa.struct([shape.field(name) for name, shape in self.names])
        if self.item is not None and self.kind == "list":
            return pa.list_(self.item.field("item"))
        if self.item is not None:
            return pa.map_(pa.string(), self.item.field("value"))
        simple = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
        return simple.get(self.kind, pa.string())

    def field(self, name: str) -> pa.Field:
        import pyarrow as pa

        return pa.field(name, self.type(), nullable=self.nullable)

    def texts(self, place: str) -> Iterator[tuple[str, str]]:
        """Yield (path, reason) for each part of this value that is kept as JSON text.

        Paths begin with `place`, the dotted name of the value itself, e.g. `person.names[]`.
        """
        if self.kind == "json":
            yield place, self.why
        if self.item is not None:
            yield from self.item.texts(f"{place}[]")
        for name, shape in self.names:
            yield from shape.texts(f"{place}.{name}")


@lru_cache(maxsize=8)
def columns_of(text: str) -> dict[str, AnswerShape]:
    """Return {column: type} of the properties of a JSON Schema's root object, in order.

    `text` is the schema. Raises `ConfigError` if the root is not an object with known properties.
    """
    schema = _Schema(json.loads(text))
    shape = _shape(schema, schema.root, ())
    if shape.kind != "struct" or shape.nullable:
        reason = f" ({shape.why})" if shape.why else ""
        raise ConfigError(
            f"{FIELD}: the root must be an object with named properties, which become the columns "
            f"of the result{reason}; wrap it as a property of an object"
        )
    return dict(shape.names)


@dataclass
class _Schema:
    """A JSON Schema, with the number of column types (shapes) created from it so far.

    Each $ref creates the type of its target once more, so a short schema of nested references could
    have more columns than memory holds.
    """

    root: dict[str, Any]
    shapes: int = 0

    def count_shape(self) -> None:
        self.shapes += 1
        if self.shapes > MOST_SHAPES:
            raise ConfigError(
                f"{FIELD} has over {MOST_SHAPES:,} columns and nested fields, including those that "
                "$ref repeats; make it smaller"
            )


def _shape(schema: _Schema, part: object, path: tuple[str, ...]) -> AnswerShape:
    """Return the type of `part` of a schema; `path` holds the $ref targets that led to it."""
    schema.count_shape()
    if not isinstance(part, dict):
        return AnswerShape(
            "json", True, why="any value is allowed" if part else "no value is allowed"
        )
    target = part.get("$ref")
    if target is not None:
        if target in path or target == "#":
            return AnswerShape("json", True, why="it refers to itself")
        if any(word in part for word in ("type", "properties", "items", *MIXED)):
            return AnswerShape("json", True, why="$ref stands beside other rules")
        return _shape(schema, target_of(schema.root, target), (*path, target))
    only = _only_member(part)
    if only is not None:
        member, nullable = only
        inner = _shape(schema, member, path)
        return replace(inner, nullable=inner.nullable or nullable)
    odd = [word for word in COMPOSED if word in part]
    if odd:
        return AnswerShape("json", True, why=f"it is made up by {odd[0]}")
    if "enum" in part or "const" in part:
        return _of_values(part.get("enum", [part.get("const")]))
    return _of_type(schema, part, path)


def _only_member(part: dict[str, Any]) -> tuple[object, bool] | None:
    """Return (the only non-null member of a union, whether the union allows null).

    A union is an anyOf, oneOf or allOf, or a list of types. Returns None in three cases:
    - `part` is not a union,
    - the union has several non-null members,
    - an anyOf, oneOf or allOf stands beside a type or other rules.
    """
    composed = [word for word in COMPOSED if word in part]
    if len(composed) == 1 and composed[0] in ("anyOf", "oneOf", "allOf"):
        members = part[composed[0]]
        own = any(word in part for word in ("type", "properties", "items", "enum", "const"))
        rest = [m for m in members if composed[0] == "allOf" or m != {"type": "null"}]
        return None if own or len(rest) != 1 else (rest[0], len(rest) < len(members))
    kinds = part.get("type")
    if isinstance(kinds, list) and not composed:
        some = [kind for kind in kinds if kind != "null"]
        if len(some) == 1:
            return {**part, "type": some[0]}, len(some) < len(kinds)
    return None


def _of_values(values: Sequence[object]) -> AnswerShape:
    nullable = None in values
    simple = tuple(value for value in values if isinstance(value, bool | int | float | str))
    kinds = {_kind_of(value) for value in values if value is not None}
    if kinds == {"integer", "number"}:
        kinds = {"number"}
    if len(kinds) != 1 or None in kinds:
        return AnswerShape("json", True, why="its values are of several types")
    return AnswerShape(kinds.pop() or "json", nullable, values=simple)


def _kind_of(value: object) -> AnswerKind | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int):
        return "integer"
    return "number" if isinstance(value, float) else None


def _of_type(schema: _Schema, part: dict[str, Any], path: tuple[str, ...]) -> AnswerShape:
    kind = part.get("type")
    if kind is None and isinstance(part.get("properties"), dict):
        kind = "object"
    if isinstance(kind, str) and kind in SIMPLE:
        return AnswerShape(SIMPLE[kind])
    if kind == "array":
        if "prefixItems" in part or not isinstance(part.get("items"), dict):
            return AnswerShape("json", True, why="its items are not of one type")
        return AnswerShape("list", item=_shape(schema, part["items"], path))
    if kind == "object":
        return _of_object(schema, part, path)
    if isinstance(kind, list):
        return AnswerShape("json", True, why=f"it is one of {', '.join(map(str, kind))}")
    return AnswerShape("json", True, why="any type is allowed" if kind is None else f"it is {kind}")


def _of_object(schema: _Schema, part: dict[str, Any], path: tuple[str, ...]) -> AnswerShape:
    if any(word in part for word in MIXED):
        return AnswerShape("json", True, why="its properties follow from rules")
    properties, others = part.get("properties") or {}, part.get("additionalProperties", False)
    if not properties and isinstance(others, dict):
        return AnswerShape("map", item=_shape(schema, others, path))
    if not properties or others is not False:
        return AnswerShape("json", True, why="it may have properties that are not named")
    required = set(part.get("required", ()))
    names = []
    for name, inner in properties.items():
        shape = _shape(schema, inner, path)
        names.append((name, replace(shape, nullable=shape.nullable or name not in required)))
    return AnswerShape("struct", names=tuple(names))
