"""How a block's field is written down."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def block_field(default: Any, *, title: str, text: str, **kwargs: Any) -> Any:
    """A described field. Prefect's form shows a block's fields in the order of its class."""
    return Field(default, title=title, description=text, **kwargs)
