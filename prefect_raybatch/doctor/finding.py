"""The findings of a check, and the job that it checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.job.batch_job import BatchJob

Mark = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the table: result and advice; `remedy` is empty if there is nothing to do."""

    check: str
    mark: Mark
    found: str
    remedy: str = ""


def passed(check: str, found: str) -> Finding:
    return Finding(check, "pass", found)


def warned(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, remedy)


def failed(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, remedy)


class CheckContext:
    """The job to check; None to check only the machine."""

    def __init__(self, job: BatchJob | None, with_keys: Callable[[BatchJob], BatchJob]) -> None:
        self.job = job
        self._with_keys, self._lock = with_keys, threading.Lock()
        self._loaded: BatchJob | None = None

    def keyed(self) -> BatchJob | None:
        """Return the job with the credentials of its blocks, loaded once for all checks.

        Raises `ConfigError` if a block cannot be loaded.
        """
        if self.job is None:
            return None
        with self._lock:
            if self._loaded is None:
                self._loaded = self._with_keys(self.job)
            return self._loaded
