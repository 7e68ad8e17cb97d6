"""Settings that may hold secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

StoreOptions = Mapping[str, Any]  # options of s3fs or obstore by name


class HiddenOptions(StoreOptions):
    """A mapping whose repr hides its values and that `json` cannot encode.

    `dict(options)` gives the values to the library that needs them.
    """

    def __init__(self, values: StoreOptions | None = None):
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"HiddenOptions({len(self)} hidden)"
