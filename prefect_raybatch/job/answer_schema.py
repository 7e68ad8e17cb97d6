"""`output.schema_model`: the JSON Schema that answers must match, as text.

A job gives the schema inline, as a file or as a pydantic class; a plan stores its text. It is text
and not a mapping because a model writes properties in the order of the schema, whereas the records
of a run sort the keys of mappings.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from prefect_raybatch.bounded import read_regular_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import class_name, missing_path, without_user
from prefect_raybatch.job.function_faults import check_defined_in, import_failure
from prefect_raybatch.job.functions import check_module
from prefect_raybatch.job.own_code.loading import is_own_code, load_user_function
from prefect_raybatch.job.schema_limits import (
    MOST_SCHEMA_BYTES,
    VALUES,
    check_schema_limits,
    parts_of,
    target_of,
)
from prefect_raybatch.job.vllm.structured_outputs import guidance_error

FIELD = "output.schema_model"
BACKEND = "guidance"
"""vLLM's backend for grammars from a JSON Schema. guidance enforces most of JSON Schema and rejects
what it cannot enforce, while xgrammar ignores some keywords. Its check takes 0.2 s and no torch.
"""


def form_of_class(value: object) -> object:
    """Return the JSON Schema of a pydantic class; raise ValueError for any other class.

    A value that is no class is returned as it is.
    """
    make = getattr(value, "model_json_schema", None) if isinstance(value, type) else None
    if isinstance(value, type) and make is None:
        raise ValueError(f"{value.__name__} is no pydantic class; derive it from BaseModel")
    return value if make is None else make()


def check_form(value: str | dict[str, Any]) -> str:
    """Check the value of output.schema_model, and return it as text.

    It may be a JSON Schema (a mapping or its text), the name of a .json file, or
    package.module:Class. A mapping becomes JSON text, because in a flow's parameters Prefect treats
    a mapping with a `$ref` as a reference to a block, and sorts the keys of other mappings. Raises
    ValueError for anything else.
    """
    if isinstance(value, dict):
        return json.dumps(_parsed(value), ensure_ascii=False, separators=(",", ":"))
    if value.lstrip().startswith("{"):
        _parsed(value)
    elif not value.endswith(".json") and class_name(value) is None:
        raise ValueError(
            f"{value!r} is not a JSON Schema; write the schema, a file that ends in .json, or a "
            "pydantic class as package.module:Class or file.py:Class"
        )
    else:
        without_user(value)
    return value


def schema_text(value: str | Mapping[str, object]) -> str:
    """Return the JSON Schema to store in a plan, from the value of output.schema_model.

    Loads it if the value names a file or class. Raises `ConfigError` for a file or class that
    cannot be loaded, and for a schema that is invalid or that no engine accepts.
    """
    try:
        schema = _loaded(value)
        _check(schema)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}") from None
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _loaded(value: str | Mapping[str, object]) -> dict[str, Any]:
    if isinstance(value, Mapping) or value.lstrip().startswith("{"):
        return _parsed(value)
    name = class_name(value)
    if name is not None:
        return _of_class(name)
    try:
        data = read_regular_file(value, MOST_SCHEMA_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"{missing_path(value)}; check the path") from None
    except OSError as error:
        raise ValueError(
            f"{value} cannot be read: {error.strerror or error}; check the path"
        ) from None
    if len(data) > MOST_SCHEMA_BYTES:
        raise ValueError(f"{value} has over {MOST_SCHEMA_BYTES:,} bytes; make it smaller")
    try:
        return _parsed(data.decode())
    except ValueError as error:
        raise ValueError(f"{value}: {error}") from None


def _parsed(value: str | Mapping[str, object]) -> dict[str, Any]:
    try:
        # Through JSON, so that what a plan keeps is what is checked: 1 as a name becomes "1".
        text = value if isinstance(value, str) else json.dumps(dict(value), allow_nan=False)
        size = len(text.encode())
        schema = json.loads(text) if size <= MOST_SCHEMA_BYTES else {}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if size > MOST_SCHEMA_BYTES:
        raise ValueError(f"has over {MOST_SCHEMA_BYTES:,} bytes; make it smaller")
    if not isinstance(schema, dict):
        raise ValueError("is not the JSON Schema of an object; write a schema that begins with {")
    return schema


def _of_class(name: str) -> dict[str, Any]:
    from pydantic import BaseModel
    from pydantic.errors import PydanticUserError

    found = load_user_function(name, FIELD) if is_own_code(name) else _module_class(name)
    if not isinstance(found, type) or not issubclass(found, BaseModel):
        raise ConfigError(f"{FIELD}: {name} is no pydantic class; correct the name")
    try:
        return _parsed(found.model_json_schema())
    except PydanticUserError as error:
        raise ValueError(f"{name} cannot be converted to a JSON Schema: {error.message}") from None


def _module_class(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    check_module(module_name, FIELD)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"module {module_name!r} cannot be imported ({error}); install it, or set PYTHONPATH "
            "to its folder"
        ) from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ValueError(import_failure(module_name, error)) from None
    found: object = getattr(module, attribute, None)
    if not isinstance(found, type):
        raise ValueError(f"{module_name} has no pydantic class {attribute!r}; correct the name")
    check_defined_in(found, module_name, attribute, FIELD)
    return found


def _check(schema: dict[str, Any]) -> None:
    """Raise ValueError for a JSON Schema that is invalid, too large, or that vLLM cannot enforce.

    References to other documents, anchors and dynamic references are rejected.
    """
    check_schema_limits(schema)
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        # The format checker also compiles each pattern.
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except (SchemaError, RecursionError) as error:
        said = error.message if isinstance(error, SchemaError) else "is nested too deeply"
        place = "".join(f".{name}" for name in getattr(error, "absolute_path", ()))
        raise ValueError(
            f"is not a valid JSON Schema: {place or 'the root'}: {said[:300]}"
        ) from None
    for place, part in parts_of(schema):
        for word in ("$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"):
            if word in part:
                raise ValueError(
                    f"{place}: {word} is not supported; write a $ref such as #/$defs/X"
                )
        target = part.get("$ref")
        if isinstance(target, str) and not target.startswith("#"):
            raise ValueError(
                f"{place}: $ref {target!r} refers to another document; copy it into this one, "
                "under $defs"
            )
        if isinstance(target, str):
            target_of(schema, target)
    _check_grammar(schema)


def _check_grammar(schema: dict[str, Any]) -> None:
    """Raise ValueError with the reason if llguidance, and so vLLM, rejects a schema.

    Does nothing if llguidance is not installed.
    """
    if said := guidance_error("json", json.dumps(closed(schema)), blanks=False):
        raise ValueError(
            f"vLLM cannot compile it to a grammar: {' '.join(said.split())[:400]}; remove that "
            "part, and check it in output.postprocess if it matters"
        )


def closed(part: object) -> object:
    """Return a schema, or a part of one, with `additionalProperties: false` where it is unset.

    Only objects with named `properties` get it. The argument is not changed.
    """
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {name: item if name in VALUES else closed(item) for name, item in part.items()}
    if "additionalProperties" not in made and isinstance(made.get("properties"), dict):
        made["additionalProperties"] = False
    return made


def schema_sampling_fields(sampling: Mapping[str, object], schema: str | None) -> dict[str, Any]:
    """Return sampling fields that make vLLM write JSON that matches `schema`.

    If `schema` is None, returns the fields as they are.
    """
    if schema is None:
        return dict(sampling)
    form = {
        "json": schema,
        "disable_any_whitespace": True,
        "disable_additional_properties": True,
    }
    return {**sampling, "structured_outputs": form}


def schema_engine_fields(given: Mapping[str, object], schema: str | None) -> dict[str, Any]:
    """Return vLLM's engine arguments `given`, plus those that make answers match `schema`.

    Adds nothing if `schema` is None. Keeps what the job sets itself. The added arguments choose the
    grammar's backend and forbid blanks between the parts of the JSON, because models can continue
    with blanks until max_tokens. vLLM reads both settings only from an engine's arguments, not from
    a request.
    """
    if schema is None:
        return dict(given)
    own = given.get("structured_outputs_config")
    own = own if isinstance(own, Mapping) else {}
    ours: dict[str, Any] = {}
    if own.get("backend", BACKEND) in ("xgrammar", "guidance"):
        ours["disable_any_whitespace"] = True
    if own.get("backend", BACKEND) == BACKEND:
        ours["disable_additional_properties"] = True
    return {**given, "structured_outputs_config": {"backend": BACKEND, **ours, **own}}
