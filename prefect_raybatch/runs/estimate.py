"""Estimates the cost of a run: from an earlier run of the same job, or from sampled rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.listing import COMPLETED, list_runs
from prefect_raybatch.sizing.prices import gpu_price
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.spec.result import OutputSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import counted, money

RUNS_TRIED = 5  # finished runs that are looked at for one that says what a row took


@dataclass(frozen=True)
class CostEstimate:
    """The estimated `cost` of asking `rows`, by the GPU-seconds per row in the run `by`.

    A hosted model has no GPU-hours; `cost` is then that of answers of full length. If that is
    unknown, `why` says so and the others are None. `warning`: it exceeds limits.max_cost, or that
    limit has no effect.
    """

    rows: int
    cost: float | None = None
    gpu_hours: float | None = None
    by: str | None = None
    why: str = ""
    warning: str | None = None
    currency: str = ""

    def line(self) -> str:
        if self.cost is None:
            return f"not known: {self.why}"
        if self.gpu_hours is None:
            return (
                f"about {money(self.cost, self.currency)} for {counted(self.rows, 'row')}, if each "
                f"answer is as long as it may be; by {self.by}"
            )
        return (
            f"about {money(self.cost, self.currency)}: {money(self.gpu_hours)} GPU-hours for "
            f"{counted(self.rows, 'row')}, as in {self.by}"
        )


def estimate(
    cluster: ClusterSpec,
    sizes: SizeSpec,
    output: OutputSpec,
    most: float | None,
    have: Capacity,
    rows: int,
) -> CostEstimate | None:
    """Return the estimated cost of asking `rows` rows; None without prices. Never raises.

    `most` is limits.max_cost.
    """
    if not cluster.prices:
        return None
    if sizes.device_for(have.gpus) == "cpu":
        none = "the engines use no GPU"
        text = f"limits.max_cost has no effect: {none}" if most else None
        return CostEstimate(rows, why=none, warning=text)
    price = gpu_price(cluster, have)
    if price.hour is None:
        return CostEstimate(rows, why=price.why)
    try:
        known = _last_known(output.uri, output.options, cluster.name)
    except RayBatchError as error:
        return CostEstimate(rows, why=f"earlier runs cannot be read: {error}")
    if known is None:
        return CostEstimate(rows, why="no earlier run of this job has recorded its GPU-hours")
    by, hours_a_row = known
    hours = rows * hours_a_row
    currency = cluster.prices.currency
    cost = round(hours * price.hour, 6)
    found = CostEstimate(rows, cost, round(hours, 6), by, currency=currency)
    if most is None or hours * price.hour <= most:
        return found
    limit = f"limits.max_cost {money(most, currency)}"
    text = f"{limit} may stop the run before it is complete: {found.line()}"
    return replace(found, warning=text)


def hosted_estimate(cost: float, rows: int, most: float | None, currency: str) -> CostEstimate:
    """Return what `rows` rows cost at most at a hosted model, by the sizes of sampled rows."""
    found = CostEstimate(rows, round(cost, 6), None, "sampled rows", currency=currency)
    if most is None or cost <= most:
        return found
    limit = f"limits.max_cost {money(most, currency)}"
    return replace(found, warning=f"{limit} may stop the run before it is complete: {found.line()}")


def with_judge(
    found: CostEstimate | None, judge: float, most: float | None, currency: str
) -> CostEstimate | None:
    """Return the estimate with a warning if rows and judge together exceed limits.max_cost.

    `judge` is what a hosted judge costs, `most` the limit.
    """
    if found is None or most is None or (found.cost is not None and found.cost > most):
        return found
    if (found.cost or 0.0) + judge <= most:
        # A limit that has no effect on the engines holds for the judge.
        return found if found.cost is not None else replace(found, warning=None)
    text = (
        f"limits.max_cost {money(most, currency)} may stop the judge before it is done. Judge: "
        f"about {money(judge, currency)}; rows: {found.line()}"
    )
    return replace(found, warning=text)


def _last_known(output: str, options: StoreOptions, job: str) -> tuple[str, float] | None:
    """Return (run key, GPU-hours per asked row) of the newest run of the job that knows it."""
    lines = list_runs(output, options, job)
    done = [line for line in lines if line.state == COMPLETED and line.parent is None]
    for line in done[:RUNS_TRIED]:
        try:
            report = load_report(open_store(line.run, dict(options) or None))
        except CorruptRun:
            continue
        hours = report.cost.get("gpu_hours", 0.0)
        rows = report.reuse.get("asked", report.rows)
        if hours and rows:
            return line.run_key, hours / rows
    return None
