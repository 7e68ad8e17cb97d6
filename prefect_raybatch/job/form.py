"""How the fields of a job appear in the Prefect form: order, titles and types."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def field(position: int, default: Any = ..., *, title: str, text: str, **kwargs: Any) -> Any:
    """Return a described field.

    `position` sets the order in the Prefect form, which is otherwise alphabetical.
    """
    return Field(
        default,
        title=title,
        description=text,
        json_schema_extra={"position": position},
        **kwargs,
    )


TABS = {
    **{"string": "One", "array": "Several", "integer": "Number", "number": "Number"},
    **{"null": "Default", "object": "Fields", "boolean": "Yes or no"},
}


def show_plainly(field: dict[str, Any]) -> None:
    """Simplify unions in a field's schema, for Prefect's form.

    The form shows a union as tabs named after Python's types, and users must find the right tab
    first. An optional field becomes a plain one without a default, for which Prefect's server
    accepts null as well, and int | float a number. Other unions get tabs with readable names.
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
        del field["default"]  # with it, the tab of nothing is the open one
    if isinstance(field.get("default"), dict):  # of a group: the same holds for its fields
        field["default"] = {k: v for k, v in field["default"].items() if v is not None}
    for kind in field.get("anyOf", ()):
        kind["title"] = kind.get("const") or TABS[kind["type"]]
