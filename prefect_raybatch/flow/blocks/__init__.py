"""Prefect blocks: `RayCluster`, `ObjectStore`, `HostedModel` and `BatchInferenceJob`.

Importing this package registers them; Prefect does so itself through the entry point
`prefect.collections`. Slugs, field names and their order are kept: saved blocks depend on them.
"""

from __future__ import annotations

from prefect_raybatch.flow.blocks.cluster import RayCluster
from prefect_raybatch.flow.blocks.endpoint import HostedModel, endpoint_of
from prefect_raybatch.flow.blocks.job import BatchInferenceJob, BatchInferenceRun
from prefect_raybatch.flow.blocks.store import ObjectStore, options_of

__all__ = [
    "BatchInferenceJob",
    "BatchInferenceRun",
    "HostedModel",
    "ObjectStore",
    "RayCluster",
    "endpoint_of",
    "options_of",
]
