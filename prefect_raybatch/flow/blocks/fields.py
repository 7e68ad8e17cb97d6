"""Defines the fields of blocks."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def block_field(default: Any, *, title: str, text: str, **kwargs: Any) -> Any:
    """Return a field with a title and a description. Prefect's form shows the fields in the order
    of the class."""
    return Field(default, title=title, description=text, **kwargs)
