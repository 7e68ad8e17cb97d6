"""The cost of a run in money: a meter for the run's attempts, and figures for its report."""

from __future__ import annotations

import logging
from dataclasses import replace

from prefect_raybatch.driver.cost import HOUR, CostMeter, Spent, spent_on
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.sizing.prices import gpu_price
from prefect_raybatch.sizing.sizes import Capacity, Pool
from prefect_raybatch.spec.cluster import ClusterSpec, Prices

log = logging.getLogger(__name__)


def plain_price(prices: Prices) -> float | None:
    """Return the price of a GPU-hour, or None if prices are set per GPU model or not at all."""
    return None if prices.by_card else prices.hour


def meter_for(
    cluster: ClusterSpec, limits: Limits, capacity: Capacity, pool: Pool, spent: Spent
) -> CostMeter:
    """Return a meter that counts the cost of an attempt whose engines are `pool`.

    The meter starts at `spent`, the cost of earlier attempts at the run. If the job has prices, but
    none for the GPUs of these engines, the cost cannot be counted. This is logged. If
    limits.max_cost is set, raises `ConfigError` instead.
    """
    price = gpu_price(cluster, capacity)
    if price.hour is None and pool.gpus[1] and price.why:
        if limits.max_cost is not None:
            raise ConfigError(
                f"limits.max_cost: {price.why}. Add its price there, or set "
                "cluster.price_per_gpu_hour for all other cards"
            )
        log.warning("the cost of this run is not counted: %s", price.why)
    gpus, currency = pool.gpus_a_replica / pool.engines_per_gpu, cluster.prices.currency
    return CostMeter(price.hour, gpus, pool.fewest, spent, currency)


def with_cost(
    report: RunReport,
    ledger: Ledger,
    plan: Plan,
    prices: Prices | None = None,
    phase_report: RunReport | None = None,
) -> RunReport:
    """Return the report with the run's GPU-hours and, if prices are known, its cost in money.

    Also adds what one million tokens and one answered row cost, and what resuming and reuse saved.
    `phase_report` is the report of the requests phase, if the run has one: tokens and shards are
    then taken from it.
    """
    spent = spent_on(ledger, plan)
    price = plain_price(prices) if prices is not None else None
    found = _costs(report, phase_report or report, spent, price)
    rounded = {name: float(f"{value:.8g}") for name, value in found.items()}
    currency = prices.currency if prices is not None and "total" in rounded else ""
    return replace(report, cost=rounded, currency=currency)


def _costs(
    report: RunReport, asked: RunReport, spent: Spent, price: float | None
) -> dict[str, float]:
    total, hours = spent.cost_at(price), spent.gpu_seconds / HOUR
    found = {"gpu_hours": hours} if hours else {}
    saved = report.reuse.get("saved_seconds")
    if total is None or not (hours or saved or total):
        return found
    found["total"] = total
    tokens = asked.tokens.get("prompt_tokens", 0) + asked.tokens.get("output_tokens", 0)
    if tokens:
        found["per_million_tokens"] = total / tokens * 1e6
    if report.good:
        found["per_answered_row"] = total / report.good
    if asked.resumed_shards and asked.shards:
        found["saved_by_resume"] = total * asked.resumed_shards / asked.shards
    hour = total / hours if hours else price
    if saved is not None and hour is not None:
        found["saved_by_reuse"] = saved / HOUR * hour
    return found
