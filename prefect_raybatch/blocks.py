"""Public import path of the Prefect blocks; the entry point `prefect.collections` names it."""

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
