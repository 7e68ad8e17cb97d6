"""The identity of a run: what makes two runs the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """The fingerprint, in hex, of everything that changes an answer, and the `parts` that went into
    it, as records hold them: without credentials."""

    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """Return which failed rows of which run are the input ({parent, errors}); None if it is an
        ordinary input."""
        return self.parts.get("retry")
