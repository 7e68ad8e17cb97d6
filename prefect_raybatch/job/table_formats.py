"""Formats of source.format that are tables with versions, not files: what a job must know of them.

How they are opened is in `prefect_raybatch.source.tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_raybatch.job.checks import SCHEMES


@dataclass(frozen=True)
class TableFormat:
    """A table format.

    `title`: as its makers write it. `module`: what must be importable; `extra`: what of
    `pip install "prefect-raybatch[EXTRA]"` brings it. `schemes`: of its URIs, and where such a
    scheme is no store's, it tells the format. `version`: what source.version may be, in words for
    an error; None where nothing can be pinned.
    """

    title: str
    module: str
    extra: str
    version: str | None
    schemes: Sequence[str] = SCHEMES

    @property
    def own_schemes(self) -> tuple[str, ...]:
        return tuple(scheme for scheme in self.schemes if scheme not in SCHEMES)


TABLE_FORMATS: dict[str, TableFormat] = {
    "delta": TableFormat("Delta", "deltalake", "delta", "a version number or a timestamp"),
}


def scheme_of(uri: str) -> str:
    """The scheme of a URI in lower case; "" for a path."""
    return uri.split("://", 1)[0].lower() if "://" in uri else ""


def format_of_scheme(scheme: str) -> str | None:
    """The table format that a scheme tells, where it is no store's."""
    return next((name for name, one in TABLE_FORMATS.items() if scheme in one.own_schemes), None)
