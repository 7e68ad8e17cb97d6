"""The price of a run's GPUs, from the prices in the job. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.sizing.cards import card
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.spec.cluster import ClusterSpec, Prices


@dataclass(frozen=True)
class GpuPrice:
    """The price of a GPU-hour in `cluster.currency`; None if unknown.

    `why` says why the price is unknown. It is "" if the price is known or the job has no prices.
    """

    hour: float | None
    why: str = ""


def gpu_price(cluster: ClusterSpec, capacity: Capacity) -> GpuPrice:
    """Return the price of the GPU models on which engines may run.

    With several models, this is the highest price, so that a cost limit holds wherever Ray places
    the engines. The price is unknown if one of the models has no price.
    """
    prices = cluster.prices
    if not prices:
        return GpuPrice(None)
    kinds = (cluster.accelerator,) if cluster.accelerator else capacity.accelerators
    if not kinds:
        if prices.hour is not None:
            return GpuPrice(prices.hour)
        return GpuPrice(None, "the cluster does not report its GPU models")
    by_kind = {kind: _of_card(prices, kind) for kind in kinds}
    unknown = [kind for kind, price in by_kind.items() if price is None]
    if unknown:
        return GpuPrice(None, f"cluster.price_by_card has no price for {' and '.join(unknown)}")
    return GpuPrice(max(price for price in by_kind.values() if price is not None))


def _of_card(prices: Prices, kind: str) -> float | None:
    by_name = {name.casefold(): price for name, price in prices.by_card.items()}
    if (price := by_name.get(kind.casefold())) is not None:
        return price
    known = card(kind)
    for name, price in prices.by_card.items():
        if known is not None and card(name) is known:
            return price
    return prices.hour
