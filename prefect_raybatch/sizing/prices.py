"""What an hour of the run's GPUs costs, by the prices that the job gives. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.sizing.cards import card
from prefect_raybatch.sizing.sizes import Capacity


@dataclass(frozen=True)
class GpuPrice:
    """A GPU-hour's price; None where the job gives none for its cards, and `why` then."""

    hour: float | None
    why: str = ""


def gpu_price(job: BatchJob, have: Capacity) -> GpuPrice:
    """Of the cards that the job's engines may be on: of several kinds, the dearest one's, so that
    a limit on costs holds wherever the engines come to lie."""
    cluster = job.cluster
    if not cluster.priced:
        return GpuPrice(None)
    asked = job.engine.accelerator_type
    kinds = (asked,) if asked else have.accelerators
    if not kinds:
        if cluster.price_per_gpu_hour is not None:
            return GpuPrice(cluster.price_per_gpu_hour)
        return GpuPrice(None, "the cluster does not say what cards it has")
    prices = {kind: _of_card(cluster, kind) for kind in kinds}
    unknown = [kind for kind, price in prices.items() if price is None]
    if unknown:
        return GpuPrice(None, f"cluster.price_by_card has no price of {' and '.join(unknown)}")
    return GpuPrice(max(price for price in prices.values() if price is not None))


def _of_card(cluster: Cluster, kind: str) -> float | None:
    by_name = {name.casefold(): price for name, price in cluster.price_by_card.items()}
    if (price := by_name.get(kind.casefold())) is not None:
        return price
    known = card(kind)
    for name, price in cluster.price_by_card.items():
        if known is not None and card(name) is known:
            return price
    return cluster.price_per_gpu_hour
