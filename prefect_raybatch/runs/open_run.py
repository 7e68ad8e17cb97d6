"""A run directory opened from Python: what became of it, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.finished import FinishedRows
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.status import report_of, state_of
from prefect_raybatch.storage import open_store


@dataclass(frozen=True)
class OpenRun(FinishedRows):
    """A run that is there; state and rows are looked at when they are asked for."""

    uri: str
    options: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold keys

    def _place(self) -> tuple[str, Mapping[str, Any] | None]:
        return self.uri, self.options

    @property
    def state(self) -> str:
        """planned, unfinished or completed."""
        return state_of(self.uri, self.options)

    @property
    def report(self) -> RunReport:
        """What the run came to; of one that is not finished, what its commits say now."""
        return report_of(self.uri, dict(self.options or {}) or None)


def open_run(uri: str, options: Mapping[str, Any] | None = None) -> OpenRun:
    """Opens the run directory `uri`, a local folder or s3://.

    `options` are s3fs's, as in `output.options`; without them keys come from the environment.
    Raises `NoSuchRun` where there is none, naming those that are near.
    """
    state_of(uri, options)
    return OpenRun(open_store(uri, options).uri, options)
