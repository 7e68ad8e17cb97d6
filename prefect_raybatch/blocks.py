"""Import path of the Prefect blocks, also for the entry point `prefect.collections`."""

from __future__ import annotations

from prefect_raybatch.flow.blocks import (
    BatchInferenceJob,
    BatchInferenceRun,
    HostedModel,
    ObjectStore,
    RayCluster,
    options_of,
)

__all__ = [
    "BatchInferenceJob",
    "BatchInferenceRun",
    "HostedModel",
    "ObjectStore",
    "RayCluster",
    "options_of",
]
