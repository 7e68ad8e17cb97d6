"""Findings of a check of the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prefect_raybatch.doctor import CheckContext, CheckResult
from prefect_raybatch.job.batch_job import BatchJob

Check = Callable[[CheckContext], Iterator[CheckResult]]


def found(check: Check, job: BatchJob | None = None) -> dict[str, CheckResult]:
    """Findings by name; each that is not passed says what to do."""
    findings = {f.check: f for f in check(CheckContext(job, lambda job: job))}
    for finding in findings.values():
        assert finding.found and bool(finding.remedy) == (finding.mark != "pass"), finding
    return findings


def one(check: Check, job: BatchJob | None = None) -> CheckResult:
    (finding,) = found(check, job).values()
    return finding
