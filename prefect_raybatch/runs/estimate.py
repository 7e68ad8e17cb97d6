"""Estimates a run's cost from an earlier run or, for a hosted model, from sampled rows."""

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

RUNS_TRIED = 5  # newest finished runs in which the GPU time of a row is looked for


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of inferring `rows` rows.

    For a model on the cluster, it is computed from the GPU time per row of an earlier run, whose
    key is `by`. For a hosted model, it is computed from sampled rows: `by` is "sampled rows",
    `gpu_hours` is None and `cost` is for answers of full length, as the text `assumes` says. If the
    cost is unknown, `cost` and `gpu_hours` are None and `why` says why. `warning` says that the
    cost exceeds limits.max_cost or that this limit has no effect.
    """

    rows: int
    cost: float | None = None
    gpu_hours: float | None = None
    by: str | None = None
    why: str = ""
    warning: str | None = None
    currency: str = ""
    assumes: str = ""

    def line(self) -> str:
        """Return the estimate as a line of text."""
        if self.cost is None:
            return f"not known: {self.why}"
        if self.gpu_hours is None:
            return (
                f"about {money(self.cost, self.currency)} for {counted(self.rows, 'row')}, if "
                f"{self.assumes}; by {self.by}"
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
    capacity: Capacity,
    rows: int,
) -> CostEstimate | None:
    """Return the cost of inferring `rows` rows, estimated from an earlier run of the job.

    Returns None for a job without prices. `most` is limits.max_cost, None if not set. If earlier
    runs cannot be read, the estimate says so, and nothing is raised.
    """
    if not cluster.prices:
        return None
    if sizes.device_for(capacity.gpus) == "cpu":
        none = "the engines use no GPU"
        text = f"limits.max_cost has no effect: {none}" if most else None
        return CostEstimate(rows, why=none, warning=text)
    price = gpu_price(cluster, capacity)
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


def hosted_estimate(
    cost: float, rows: int, most: float | None, currency: str, assumes: str
) -> CostEstimate:
    """Return the estimate for a hosted model.

    `cost` is the most that `rows` rows can cost, which the text `assumes` explains. `most` is
    limits.max_cost (None: not set); the estimate gets a warning if `cost` exceeds it.
    """
    by = "sampled rows"
    found = CostEstimate(rows, round(cost, 6), None, by, currency=currency, assumes=assumes)
    if most is None or cost <= most:
        return found
    limit = f"limits.max_cost {money(most, currency)}"
    return replace(found, warning=f"{limit} may stop the run before it is complete: {found.line()}")


def with_first(
    estimate: CostEstimate | None, first: CostEstimate | None, most: float | None, currency: str
) -> CostEstimate | None:
    """Return `estimate`, with a warning if both models of a cascade cost more than limits.max_cost.

    `estimate` is for the larger model, `first` for the first one, None if `estimate` includes it.
    `most` is limits.max_cost. Returns `estimate` unchanged if it, `most` or the cost of the first
    model is None.
    """
    if estimate is None or most is None or first is None or first.cost is None:
        return estimate
    if first.cost + (estimate.cost or 0.0) <= most:
        # A limit that has no effect on the larger model applies to the first one.
        return estimate if estimate.cost is not None else replace(estimate, warning=None)
    text = (
        f"limits.max_cost {money(most, currency)} may stop the run before it is complete. First "
        f"model: {first.line()}; larger model: {estimate.line()}"
    )
    return replace(estimate, warning=text)


def with_judge(
    estimate: CostEstimate | None,
    first: CostEstimate | None,
    judge: float,
    most: float | None,
    currency: str,
) -> CostEstimate | None:
    """Return `estimate`, with a warning if rows and judge together cost more than limits.max_cost.

    `estimate` and `first` are those of `with_first`. `judge` is the cost of a hosted judge, `most`
    is limits.max_cost. Returns `estimate` unchanged if it or `most` is None, or if the rows alone
    cost more.
    """
    if estimate is None or most is None:
        return estimate
    models = [estimate] if first is None else [first, estimate]
    costs = [one.cost for one in models if one.cost is not None]
    if sum(costs) > most:
        return estimate
    if sum(costs) + judge <= most:
        # A limit that has no effect on the engines applies to the judge.
        return estimate if estimate.cost is not None else replace(estimate, warning=None)
    text = (
        f"limits.max_cost {money(most, currency)} may stop the judge before it is done. Judge: "
        f"about {money(judge, currency)}; rows: {'; '.join(one.line() for one in models)}"
    )
    return replace(estimate, warning=text)


def _last_known(output: str, options: StoreOptions, job: str) -> tuple[str, float] | None:
    """Return (run key, GPU-hours per inferred row) of the newest complete run with GPU-hours.

    Only the RUNS_TRIED newest complete runs of `job` under `output` are read; None if they have no
    GPU-hours.
    """
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
