"""The base class of a job's groups of fields. It rejects unknown fields and masks credentials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_raybatch.job.checks import not_finite
from prefect_raybatch.job.form import show_plainly
from prefect_raybatch.job.secrets import (
    hide_argument,
    hide_catalog,
    hide_env,
    hide_options,
    is_masked,
)


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class Group(BaseModel):
    """Fields that belong together; unknown ones are rejected."""

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
            # Fields with a type of their own say it better; a run's records could not hold these.
            free = name not in cls.model_fields or not _is_group(cls.model_fields[name].annotation)
            if free and isinstance(value[name], (float, Mapping, list, tuple)):
                place = not_finite(value[name])
                if place is not None and (place or name not in cls.model_fields):
                    raise ValueError(f"{name}{place} is not a finite number; set one, or remove it")
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, with each field as the Prefect form shows it best."""
        schema = handler(core_schema)
        # As what is written out, a group is any object: which keys are hidden is told only then.
        for shown in handler.resolve_ref_schema(schema).get("properties", {}).values():
            show_plainly(shown)
        return schema

    @model_serializer(mode="wrap")
    def _hidden(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Serialize to JSON with credentials masked, unless the context asks for them.

        `to_dict` asks for them.
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
        """Return whether it is a mapping with arbitrary names."""
        return name in ("options", "env", "catalog")

    def _shown(self, name: str, value: Any) -> Any:
        if not value or not self._may_hold_keys(name):
            return value
        if name in ("options", "env", "catalog"):
            hide = {"options": hide_options, "env": hide_env, "catalog": hide_catalog}[name]
            return hide(value)
        return hide_argument(value, name)
