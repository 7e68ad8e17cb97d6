"""The identity of a run: what makes two runs the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """The fingerprint of everything that changes an answer, in hex.

    `parts` are what went into it, as records hold them: without credentials.
    """

    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """The failed rows that are the input ({parent, errors}); None for an ordinary input."""
        return self.parts.get("retry")
