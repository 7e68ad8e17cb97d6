"""What a user writes, and what it is not allowed to do."""

from __future__ import annotations

from prefect_raybatch.job.batch_job import BatchJob

__all__ = ["BatchJob"]
