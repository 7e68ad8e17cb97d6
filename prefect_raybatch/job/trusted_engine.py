"""Checks which engine arguments and environment variables a job may set.

A value is allowed if vLLM's own type for it limits it to harmless values; otherwise the policy must
allow the argument by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.vllm.engine_values import types_of_arguments
from prefect_raybatch.policy.allowed import (
    ENGINE_CODE,
    ENGINE_TEXTS,
    OWNER_TEXTS,
    VARIABLE_VALUE,
    VARIABLE_VALUES,
)
from prefect_raybatch.policy.in_force import POLICY_FILE
from prefect_raybatch.policy.policy import JobPolicy, matches_any

NAMES_CODE = frozenset(("custom_class",))  # vLLM allows the word, and imports a class


def check_engine_trust(engine: Engine, policy: JobPolicy) -> None:
    """Raise `ConfigError` for the first engine argument or environment variable not allowed.

    Also rejects a variable whose value may be a path or URL, unless the operator allows the
    variable.
    """
    file = f"the file of {POLICY_FILE}" + (f", {policy.title}" if policy.limited else "")
    for name, value in engine.env.items():
        if not policy.may_set_variable(name):
            raise ConfigError(
                f"engine.env: a job may not set {name}, since a variable can decide which code the "
                "engine loads; set it on the cluster's nodes, or add it to engine_variables in "
                f"{file}"
            )
        if not may_have_value(name, value, policy):
            raise ConfigError(
                f"engine.env: {name} may not contain a path, a URL or control characters in a job, "
                "since a library may open what it names; correct it, or add the variable to "
                f"engine_variables in {file}"
            )
    extra = engine.model_extra or {}
    kinds = types_of_arguments(tuple(sorted(extra)))
    for name, value in sorted(extra.items()):
        for place in refused_parts(name, value, kinds.get(name, Any), policy):
            raise ConfigError(
                f"engine.{place} may name code, a file or a host, so a job may not set it; if you "
                f"trust it, add {place} to engine_arguments in {file}"
            )


def may_have_value(name: str, value: str, policy: JobPolicy) -> bool:
    """Return whether a job may set environment variable `name` to `value`.

    Checks only the value; that the job may set this variable is checked before. A path, a URL and
    control characters are allowed only if the policy names the variable.
    """
    pattern = VARIABLE_VALUES.get(name, VARIABLE_VALUE)
    return bool(re.fullmatch(pattern, value)) or matches_any(name, policy.engine_variables)


def refused_parts(name: str, value: object, kind: object, policy: JobPolicy) -> Iterator[str]:
    """Yield the dotted names of the parts of an engine argument that the policy does not allow.

    `name` is the dotted name of `value`; `kind` is its type in vLLM, Any if unknown.
    """
    yield from _runs_code(name, value, policy)
    if _is_harmless(value) or policy.may_set_argument(name):
        return
    if isinstance(value, str):
        if not _is_known_text(name, value, kind, policy):
            yield name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            inner_kind = _kind_in(kind, str(key))
            if inner_kind is None:
                yield name
                return
            yield from refused_parts(f"{name}.{key}", inner, inner_kind, policy)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            for part in refused_parts(name, inner, _items_of(kind), policy):
                yield part
                return
    else:
        yield name


def _runs_code(name: str, value: object, policy: JobPolicy) -> Iterator[str]:
    """Yield the dotted names of dangerous switches that are on and that the policy does not allow.

    The switches are those in ENGINE_CODE, for example because they run code of a model. Looks at
    the argument `name` itself, and at all mappings in its `value`.
    """
    last = name.rpartition(".")[2]
    if last in ENGINE_CODE and value not in (None, False, 0, "") and not _allows(policy, name):
        yield name
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if str(key) in ENGINE_CODE or isinstance(inner, Mapping):
                yield from _runs_code(f"{name}.{key}", inner, policy)


def _allows(policy: JobPolicy, name: str) -> bool:
    """Return whether the policy lists the dotted `name` itself, or the last part of it.

    A mapping around the argument is not enough, nor is a `*`.
    """
    return bool({name, name.rpartition(".")[2]} & set(policy.engine_arguments))


def _is_harmless(value: object) -> bool:
    """Return whether a value cannot name code, a file or a host: a number, a boolean, or empty."""
    return value in (None, "") or isinstance(value, (bool, int, float)) or value in ([], {}, ())


def _is_known_text(name: str, value: str, kind: object, policy: JobPolicy) -> bool:
    if value in NAMES_CODE:
        return False
    texts = {**ENGINE_TEXTS, **({} if policy.limited else OWNER_TEXTS)}
    pattern = texts.get(name)
    if pattern is not None and re.fullmatch(pattern, value):
        return True
    return _is_word_list(kind)


def _options(kind: object) -> Iterator[object]:
    """Yield the members of a union; for any other type, yield the type itself.

    A type within `Annotated` is yielded without its annotations.
    """
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is not None and get_origin(kind) not in (list, set, dict, tuple, Literal):
        for option in get_args(kind):
            yield from _options(option)
    else:
        yield kind


def _is_word_list(kind: object) -> bool:
    """Return whether the only texts that a type allows are those of a `Literal`.

    vLLM then rejects any other text.
    """
    options = [option for option in _options(kind) if option is not type(None)]
    literals = [option for option in options if get_origin(option) is Literal]
    plain = [option for option in options if option in (int, float, bool)]
    return bool(literals) and len(literals) + len(plain) == len(options)


def _kind_in(kind: object, key: str) -> object:
    """Return the type of the value at `key`, where `kind` is the type of the mapping around it.

    `kind` is a dict type, a pydantic class or a union with one of them. Returns Any for a key that
    the class lacks; None if the type is unknown, for example in a dict of any values.
    """
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, BaseModel):
            known = option.model_fields.get(key)
            return Any if known is None else known.annotation
        if get_origin(option) is dict:
            inner = get_args(option)[1]
            if inner is not Any and re.fullmatch(r"[A-Za-z0-9_]+", key):
                return inner
    return None


def _items_of(kind: object) -> object:
    for option in _options(kind):
        if get_origin(option) in (list, set, tuple):
            return get_args(option)[0]
    return Any
