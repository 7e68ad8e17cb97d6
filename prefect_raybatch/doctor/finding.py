"""The findings of a check, and the job that it checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.spec.cluster import ClusterSpec

ANY_JOB = {
    "name": "doctor",
    "source": {"uri": "-"},
    "prompt": {"template": "-"},
    "output": {"uri": "-"},
}
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
    """The job to check; None to check only the machine.

    `with_keys` adds the credentials of the job's blocks.
    """

    def __init__(
        self,
        job: BatchJob | None = None,
        with_keys: Callable[[BatchJob], BatchJob] = lambda job: job,
    ) -> None:
        self.job = job
        self._with_keys, self._lock = with_keys, threading.Lock()
        self._loaded: BatchJob | None = None
        self.block_fault: RayBatchError | None = None  # why a block cannot be loaded

    def keyed(self) -> BatchJob | None:
        """Return the job with the credentials of its blocks, loaded once for all checks.

        Raises `ConfigError` if a block cannot be loaded.
        """
        if self.job is None:
            return None
        with self._lock:
            if self.block_fault is not None:
                raise self.block_fault
            try:
                self._loaded = self._loaded or self._with_keys(self.job)
            except RayBatchError as error:
                self.block_fault = error
                raise
            return self._loaded

    def cluster(self) -> ClusterSpec:
        """Return the cluster of the job; without a job, the one that runs have by default."""
        return cluster_spec(self.keyed() or BatchJob.from_dict(ANY_JOB))
