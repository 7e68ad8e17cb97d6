"""The findings of a check, and its subject."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.job.batch_job import BatchJob

Mark = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the table. `remedy` is empty if nothing has to be done."""

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


class Patient:
    """The job that is checked; None if only the machine is."""

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
