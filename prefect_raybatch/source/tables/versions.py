"""Timestamps in source.version."""

from __future__ import annotations

from datetime import UTC, datetime


def moment_of(text: str) -> datetime | None:
    """The time that an ISO 8601 text tells, in UTC where it names no zone; None for another."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
