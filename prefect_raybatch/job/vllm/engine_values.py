"""Checks values of vLLM's engine arguments against its own annotations, without importing it.

vLLM checks them when an engine starts: after half a minute, once for each of its restarts. This
module reads the source of the installed vLLM instead: the annotation of each argument, the bounds
in its configuration class, and the fields of such a class. What cannot be derived from there (a
class of torch, a callable) is not checked.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from prefect_raybatch.job.faults import explain
from prefect_raybatch.job.vllm import fields as vllm_fields

log = logging.getLogger(__name__)

ENGINE_ARGS = ("engine/arg_utils.py", "EngineArgs")
CONFIGS = "config"  # the folder of the configuration classes and the names of their types
ATOMS = {"int": int, "float": float, "bool": bool, "str": str, "Any": Any}
HOLDING: dict[str, Any] = {"list": list, "set": set, "dict": dict, "tuple": tuple}
BOUNDS = {"gt", "ge", "lt", "le"}
# Arguments that are annotated as any mapping, and the class that vLLM makes of it.
MAPPINGS = {"speculative_config": "SpeculativeConfig"}


class _Unknown(Exception):
    """Raised for an annotation or class from which no type can be derived."""


def wrong_values(given: Mapping[str, Any]) -> str | None:
    """Return errors about `given` ({engine argument: value}) that vLLM would raise, one per line.

    Returns None if there are no errors, or if vLLM is not installed. A value of None (YAML's null)
    is always valid.
    """
    fields = {
        name: (kind | None, None) for name, kind in types_of_arguments(tuple(sorted(given))).items()
    }
    if not fields:
        return None
    loose = ConfigDict(extra="ignore", protected_namespaces=())
    model: type[BaseModel] = create_model("Arguments", __config__=loose, **fields)  # type: ignore[call-overload]
    try:
        model.model_validate(dict(given))
    except ValidationError as error:
        return "\n".join(f"engine.{line}" for line in explain(error, model, "").splitlines())
    return None


@cache
def types_of_arguments(names: tuple[str, ...]) -> dict[str, Any]:
    """Return {name: type} of the arguments in `names` whose type vLLM's source code shows."""
    found = {}
    for item in vllm_fields.annotated(vllm_fields.class_body(*ENGINE_ARGS)):
        name = item.target.id
        if name in names:
            try:
                if name in MAPPINGS:
                    found[name] = _named(MAPPINGS[name])
                else:
                    found[name] = _bounded(_type(item.annotation), _default_of(item.value))
            except _Unknown:
                continue
            except Exception as error:  # another vLLM may write its types in another way
                log.warning("engine.%s: vLLM's type of it cannot be read (%s)", name, error)
    return found


def _default_of(value: ast.expr | None) -> ast.expr | None:
    """Return the default that a vLLM config class gives to the field to which `value` refers.

    `value` is the default of an engine argument in vLLM's source, such as `Class.name` or
    `get_field(Class, "name")`. Returns None if it has another form, or the field has no default.
    """
    match value:
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            pass
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(name)]):
            pass
        case _:
            return None
    found = vllm_fields.definition(CONFIGS, owner)
    for item in vllm_fields.annotated(found.body if isinstance(found, ast.ClassDef) else []):
        if item.target.id == name:
            return cast(ast.expr | None, item.value)
    return None


def _bounded(kind: Any, default: ast.expr | None) -> Any:
    """Return a number type with the bounds (such as ge=0) that a `Field(...)` in `default` sets.

    Returns `kind` unchanged if it is no number type or `default` sets no bounds.
    """
    match default:
        case ast.Call(func=ast.Name(id="Field"), keywords=given):
            bounds = {one.arg: ast.literal_eval(one.value) for one in given if one.arg in BOUNDS}
            if bounds and kind in (int, float, int | None, float | None):
                return Annotated[kind, Field(**bounds)]
    return kind


def _type(node: ast.expr) -> Any:
    """Return the type that an annotation names; raise `_Unknown` if that is impossible."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return _named(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return reduce(or_, [kind or type(None) for kind in (_type(left), _type(right))])
        case ast.Subscript(value=ast.Name(id="Literal"), slice=part):
            parts = part.elts if isinstance(part, ast.Tuple) else [part]
            return Literal[tuple(value for one in parts for value in _values(one))]
        case ast.Subscript(value=ast.Name(id=name), slice=part) if name in HOLDING:
            parts = part.elts if isinstance(part, ast.Tuple) else [part]
            return HOLDING[name][tuple(_type_or_any(one) for one in parts)]
    raise _Unknown


def _values(node: ast.expr) -> tuple[Any, ...]:
    return (node.value,) if isinstance(node, ast.Constant) else get_args(_type(node))


def _type_or_any(node: ast.expr) -> Any:
    try:
        return _type(node)
    except _Unknown:
        return Any


@cache
def _named(name: str) -> Any:
    if name in ATOMS or name in HOLDING:
        return ATOMS.get(name, HOLDING.get(name))
    match vllm_fields.definition(CONFIGS, name):
        case ast.ClassDef() as found if not found.bases and "config" in _decorators(found):
            return _class(found)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _type(value)
    raise _Unknown


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> dict[str, ast.expr]:
    """Return {name: expression} of the decorators of a class or function."""
    return {re.sub(r"\(.*", "", ast.unparse(one), flags=re.S): one for one in node.decorator_list}


def _class(node: ast.ClassDef) -> type[BaseModel]:
    """Return a pydantic model with the public fields of a vLLM configuration class.

    Any value is valid for a field that a validator of the class converts first.
    """
    made_fit = set(_made_fit(node))
    fields: dict[str, Any] = {}
    for item in vllm_fields.annotated(node.body):
        name = item.target.id
        if not name.startswith("_"):
            kind = Any if {name, "*"} & made_fit else _type_or_any(item.annotation)
            fields[name] = (Any if kind is Any else _bounded(kind, item.value) | None, None)
    only = ConfigDict(extra="forbid", protected_namespaces=())
    made: type[BaseModel] = create_model(node.name, __config__=only, **fields)
    return made


def _made_fit(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields (* for all) that a validator of the class converts before the check.

    Raises `_Unknown` for a validator of the whole class.
    """
    for item in node.body:
        if not isinstance(item, ast.FunctionDef):
            continue
        for name, call in _decorators(item).items():
            if isinstance(call, ast.Call) and "before" in ast.unparse(call):
                if name == "model_validator":
                    raise _Unknown
                yield from (str(one.value) for one in call.args if isinstance(one, ast.Constant))
