"""Computes how many engines a run has, and how many shards each has in flight.

They follow from the job's settings, the cluster's capacity and the memory that the model needs.
"""

from __future__ import annotations

from dataclasses import asdict

from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.model import adapters, memory
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing import sizes as sizing
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.sizes import SizeSpec


def engines_to_plan_for(
    spec: SizeSpec, where: ClusterSpec, model: models.PinnedModel, row_bytes: float
) -> int:
    """Return how many engines a run is expected to have; a new plan sizes its shards for them.

    If the cluster's GPUs and the model's size are known, the cost model chooses the number.
    `row_bytes` is the mean size of a row in memory, in bytes.
    """
    capacity = cluster.glance(where)
    found = None if capacity is None else model_sizes(spec, model, capacity)[0]
    return sizing.expected_engines(spec, capacity, found, row_bytes)


def for_attempt(spec: SizeSpec, plan: Plan, capacity: Capacity) -> Sizing:
    """Return the sizes (engines, concurrency) of an attempt at a run whose plan exists."""
    model, unknown = model_sizes(spec, plan.model, capacity)
    return sizing.sizes_of(
        spec, plan.rows, plan.row_bytes, capacity, model, unknown, planned=plan.rows_per_shard
    )


def model_sizes(
    spec: SizeSpec, model: models.PinnedModel, capacity: Capacity
) -> tuple[memory.Model | None, str]:
    """Return (GPU memory that the model needs, ""), or (None, why it is unknown).

    Returns (None, "") if the engines run on CPUs.
    """
    if spec.device_for(capacity.gpus) == "cpu":
        return None, ""
    try:
        config, stored = models.read_config(model)
        room = adapters.arguments(model.get("adapters") or {}, spec.vllm_arguments)
        return memory.describe(config, {**spec.vllm_arguments, **room}, stored), ""
    except ConfigError as error:
        return None, str(error)


def capacity_or_assumed(spec: SizeSpec, where: ClusterSpec) -> tuple[Capacity, list[str]]:
    """Return (capacity of the cluster, []), or (an assumed capacity, errors) if it is unknown.

    `errors` has one text if the cluster was queried and did not answer, else none.
    """
    if cluster.address_of(where):
        try:
            with cluster.connected(where) as capacity:
                return capacity, []
        except InsufficientResources as error:
            return sizing.assumed(spec), [f"{error}. The sizes are for an assumed cluster"]
    return cluster.glance(where) or sizing.assumed(spec), []


def checked_needs(spec: SizeSpec, capacity: Capacity, size: Sizing, wrong: list[str]) -> JsonObject:
    """Return the run's `Needs` as a dict.

    If the cluster is too small, append the reason to `wrong`. An assumed `capacity` is not checked.
    """
    if not capacity.assumed:
        try:
            cluster.check_fit(spec, capacity, size.pool)
        except InsufficientResources as error:
            wrong.append(str(error))
    return asdict(cluster.needs(spec, size.pool))
