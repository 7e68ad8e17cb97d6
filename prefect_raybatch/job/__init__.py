"""What a user writes, and what it may not bring about."""

from __future__ import annotations

from prefect_raybatch.job.batch_job import BatchJob

__all__ = ["BatchJob"]
