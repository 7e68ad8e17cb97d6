"""Exactly-once LLM batch inference over tables: Prefect tasks and flows, Ray Data, vLLM.

The public Python interface is `__all__`: jobs and flows (`BatchJob`, `batch_inference`,
`retry_failed`, `backfill_job`, `tune_job`), tasks (`plan_shards`, `infer_shards`, `finalize_run`,
`publish_run`), functions (`open_run`, `finalize_partial`, `warm_engines`, `reconcile_jobs`,
`restart_crashed`), functions for DataFrames and lists (`ask`, `ask_async`, `ask_run`, `embed`,
`classify`, `score`, `end_engines`) and blocks (`RayCluster`, `ObjectStore`, `HostedModel`,
`BatchInferenceJob`). Other modules may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

if TYPE_CHECKING:
    from prefect_raybatch.api import finalize_partial
    from prefect_raybatch.cluster.connect import warm_engines
    from prefect_raybatch.errors import ConfigError, RayBatchError
    from prefect_raybatch.flow.blocks import BatchInferenceJob, HostedModel, ObjectStore, RayCluster
    from prefect_raybatch.flow.flows import (
        backfill_job,
        batch_inference,
        retry_failed,
        tune_job,
    )
    from prefect_raybatch.flow.reconcile import reconcile_jobs, restart_crashed
    from prefect_raybatch.flow.tasks import finalize_run, infer_shards, plan_shards, publish_run
    from prefect_raybatch.frames.ask import (
        Answered,
        RowsFailed,
        ask,
        ask_async,
        ask_run,
        classify,
        embed,
        score,
    )
    from prefect_raybatch.frames.running import end_engines
    from prefect_raybatch.job.batch_job import BatchJob
    from prefect_raybatch.report.records import RunReport
    from prefect_raybatch.runs.open_run import OpenRun, open_run
    from prefect_raybatch.runs.run import Run

__version__ = "0.1.0"

# Names are imported on first use: `raybatch status` must not wait for Prefect to be imported.
# `prefect block register -m prefect_raybatch` finds the blocks through `dir()`.
_HOMES = {
    "Answered": "frames.ask",
    "BatchInferenceJob": "flow.blocks",
    "BatchJob": "job.batch_job",
    "ConfigError": "errors",
    "HostedModel": "flow.blocks",
    "ObjectStore": "flow.blocks",
    "OpenRun": "runs.open_run",
    "RayBatchError": "errors",
    "RayCluster": "flow.blocks",
    "RowsFailed": "frames.ask",
    "Run": "runs.run",
    "RunReport": "report.records",
    "ask": "frames.ask",
    "ask_async": "frames.ask",
    "ask_run": "frames.ask",
    "backfill_job": "flow.flows",
    "batch_inference": "flow.flows",
    "classify": "frames.ask",
    "embed": "frames.ask",
    "end_engines": "frames.running",
    "finalize_partial": "api",
    "finalize_run": "flow.tasks",
    "infer_shards": "flow.tasks",
    "open_run": "runs.open_run",
    "plan_shards": "flow.tasks",
    "publish_run": "flow.tasks",
    "reconcile_jobs": "flow.reconcile",
    "restart_crashed": "flow.reconcile",
    "retry_failed": "flow.flows",
    "score": "frames.ask",
    "tune_job": "flow.flows",
    "warm_engines": "cluster.connect",
}
__all__ = [
    "Answered",
    "BatchInferenceJob",
    "BatchJob",
    "ConfigError",
    "HostedModel",
    "ObjectStore",
    "OpenRun",
    "RayBatchError",
    "RayCluster",
    "RowsFailed",
    "Run",
    "RunReport",
    "ask",
    "ask_async",
    "ask_run",
    "backfill_job",
    "batch_inference",
    "classify",
    "embed",
    "end_engines",
    "finalize_partial",
    "finalize_run",
    "infer_shards",
    "open_run",
    "plan_shards",
    "publish_run",
    "reconcile_jobs",
    "restart_crashed",
    "retry_failed",
    "score",
    "tune_job",
    "warm_engines",
]


# An import hook, because Prefect may start its server before a flow imports this package.
register_post_import_hook(
    f"{__name__}.temporary_server:guard_temporary_server", "prefect.server.api.server"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
