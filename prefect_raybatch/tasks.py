"""Import path of the Prefect tasks; defined in `flow/tasks.py`."""

from __future__ import annotations

from prefect_raybatch.flow.tasks import finalize_run, infer_shards, plan_shards, publish_run

__all__ = ["finalize_run", "infer_shards", "plan_shards", "publish_run"]
