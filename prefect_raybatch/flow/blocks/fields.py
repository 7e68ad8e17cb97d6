"""Defines the fields of blocks."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def block_field(default: Any, *, title: str, text: str, **kwargs: Any) -> Any:
    """Return a field with a title and a description for Prefect's form."""
    return Field(default, title=title, description=text, **kwargs)
