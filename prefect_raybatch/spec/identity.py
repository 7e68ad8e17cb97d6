"""What makes two runs the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """The fingerprint of whatever changes an answer, in hex, and the `parts` that went into it, as
    records hold them: without keys."""

    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """Which failed rows of which run are the input ({parent, errors}); None for an input."""
        return self.parts.get("retry")
