"""The base class of a job's groups of fields, and how the Prefect form shows the fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_raybatch.job.checks import path_of_non_finite
from prefect_raybatch.job.secrets import (
    hide_argument,
    hide_catalog,
    hide_env,
    hide_options,
    is_masked,
)


def field(default: Any = ..., *, title: str, text: str, **kwargs: Any) -> Any:
    """Return a pydantic field with a title and, as its description, `text`."""
    return Field(default, title=title, description=text, **kwargs)


def field_check(
    *fields: str, by: Callable[[Any], object], mode: Literal["before", "after"] = "after"
) -> Any:
    """Return a pydantic validator that replaces the value of each of the fields by `by(value)`.

    If `by` returns None, the value is kept. With mode "after", `by` is not called for None.
    """

    def check(value: object) -> object:
        found = None if value is None and mode == "after" else by(value)
        return value if found is None else found

    return field_validator(*fields, mode=mode)(check)


TABS = {
    **{"string": "One", "array": "Several", "integer": "Number", "number": "Number"},
    **{"null": "Default", "object": "Fields", "boolean": "Yes or no"},
}


def show_plainly(field: dict[str, Any]) -> None:
    """Simplify unions in a field's JSON schema, in place, for Prefect's form.

    The form shows a union as tabs named after Python's types, and users must find the right tab
    first. So an optional field becomes a plain one without a default (Prefect's server accepts null
    for it), int | float becomes a number, and other unions get tabs with readable names.
    """
    if "ge" in field:  # pydantic leaves the bound of a union as it is
        field["minimum"] = field.pop("ge")
    kinds = [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]
    types = [kind.get("type") for kind in kinds]
    if types == ["integer", "number"]:
        del kinds[0]
    if len(kinds) == 1:
        del field["anyOf"]
        field.update(kinds[0])
        if field.get("default", ...) is None:
            del field["default"]
        show_plainly(field)
    named = any("const" in kind for kind in kinds)
    if len(kinds) > 1 and not named and field.get("default", ...) is None:
        del field["default"]  # with it, the form opens the tab for null
    if isinstance(field.get("default"), dict):  # of a group: omit its nulls, too
        field["default"] = {k: v for k, v in field["default"].items() if v is not None}
    for kind in field.get("anyOf", ()):
        kind["title"] = kind.get("const") or TABS[kind["type"]]


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class Group(BaseModel):
    """A group of a job's fields, such as `source`; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        for name in value if isinstance(value, Mapping) else ():
            if cls._may_hold_keys(name) and is_masked(value[name]):
                raise ValueError(
                    f"{name} contains a key that was masked in Prefect's flow parameters; use a "
                    "credentials_block, or set the key in the environment where the flow runs"
                )
            # Groups and number fields check this themselves. The records of a run cannot hold NaN.
            free = name not in cls.model_fields or not _is_group(cls.model_fields[name].annotation)
            if free and isinstance(value[name], (float, Mapping, list, tuple)):
                place = path_of_non_finite(value[name])
                if place is not None and (place or name not in cls.model_fields):
                    raise ValueError(f"{name}{place} is not a finite number; set one, or remove it")
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, with unions simplified and fields in the order of this class.

        Prefect's form sorts fields by `position`, else by name.
        """
        schema = handler(core_schema)
        # A schema for output has no properties, because `_hidden` may return any mapping.
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for position, shown in enumerate(fields.values(), 1):
            shown["position"] = position
            show_plainly(shown)
        return schema

    @model_serializer(mode="wrap")
    def _hidden(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Serialize the group; in JSON mode, mask credentials.

        Credentials are not masked in Python mode, nor with the context {"clear": True}, which
        `to_dict` of a job uses.
        """
        value: dict[str, Any] = handler(self)
        if info.mode != "json" or (info.context or {}).get("clear"):
            return value
        return {name: self._shown(name, item) for name, item in value.items()}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, item in super().__repr_args__():
            yield name, self._shown(name or "", item)

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Return whether the field `name` may hold credentials, so that its value is masked."""
        return name in ("options", "env", "catalog")

    def _shown(self, name: str, value: Any) -> Any:
        if not value or not self._may_hold_keys(name):
            return value
        if name in ("options", "env", "catalog"):
            hide = {"options": hide_options, "env": hide_env, "catalog": hide_catalog}[name]
            return hide(value)
        return hide_argument(value, name)
