"""The result of a check, and the argument of all checks: a job with its credentials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import ANY_JOB
from prefect_raybatch.spec.cluster import ClusterSpec

DOCTOR_JOB = {**ANY_JOB, "name": "doctor"}
Mark = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One finding of `raybatch doctor`: a line of its table.

    `check` is the title, `mark` the outcome, `found` what was found, and `remedy` what the user can
    do, "" if nothing is needed.
    """

    check: str
    mark: Mark
    found: str
    remedy: str = ""


def passed(check: str, found: str) -> CheckResult:
    """Return a finding that needs no remedy."""
    return CheckResult(check, "pass", found)


def warned(check: str, found: str, remedy: str) -> CheckResult:
    """Return a finding that does not make `raybatch doctor` fail."""
    return CheckResult(check, "warn", found, remedy)


def failed(check: str, found: str, remedy: str) -> CheckResult:
    """Return a finding that makes `raybatch doctor` fail."""
    return CheckResult(check, "fail", found, remedy)


class CheckContext:
    """The subject of the checks: the machine and, unless `job` is None, that job.

    `with_keys` returns a job with the credentials of its blocks added.
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
        """Return the job with the credentials of its blocks, loaded once; None without a job.

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
        """Return the job's cluster; without a job, the default cluster of runs."""
        return cluster_spec(self.keyed() or BatchJob.from_dict(DOCTOR_JOB))
