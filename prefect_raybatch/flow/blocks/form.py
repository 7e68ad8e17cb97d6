"""Changes how Prefect's form shows optional fields of our blocks."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_raybatch.job.group import show_plainly


class FormBlock(Block):
    """A block whose optional fields look like required ones in Prefect's form.

    Otherwise the form would show an optional text field as two tabs, one for each type that the
    field accepts.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        for shown in handler.resolve_ref_schema(schema).get("properties", {}).values():
            show_plainly(shown)
        return schema
