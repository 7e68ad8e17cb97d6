"""Keys in a job, hidden wherever a job is turned into text for others: Prefect keeps a flow's
parameters, and shows them to whoever may see its page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "**********"
CLEAR = {"clear": True}  # pydantic context that asks for a job as it is
# Store options that name no secret; whatever else is text may be one.
PUBLIC = frozenset(
    (
        "addressing_style",
        "endpoint_url",
        "profile",
        "region",
        "region_name",
        "signature_version",
        "version_aware",
    )
)
SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


def hide_options(value: Any, name: str = "") -> Any:
    """Store options with every text masked that `PUBLIC` does not name."""
    if isinstance(value, Mapping):
        return {key: hide_options(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [hide_options(inner, name) for inner in value]
    if isinstance(value, str) and name not in PUBLIC:
        return MASK
    return value


def hide_named(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with the texts masked whose names sound like secrets (HF_TOKEN, API_KEY)."""
    return {k: MASK if SECRET.search(k) and isinstance(v, str) else v for k, v in value.items()}


def is_masked(value: Any) -> bool:
    """Whether a masked text stands anywhere in it."""
    if isinstance(value, Mapping):
        return any(is_masked(inner) for inner in value.values())
    if isinstance(value, list):
        return any(is_masked(inner) for inner in value)
    return bool(value == MASK)
