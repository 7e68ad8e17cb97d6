"""Predicts how long a run over all rows would take, from the rate of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration


@dataclass(frozen=True)
class PredictedTime:
    """The predicted duration of a run in seconds, without start-up.

    If it is unknown, `seconds` is None and `why` is the reason. `by` is the run key of the run
    whose rate was taken.
    """

    seconds: float | None
    by: str
    why: str = ""

    def line(self) -> str:
        if self.seconds is None:
            return f"unknown: {self.why}"
        return (
            f"about {duration(self.seconds)} without start-up, at the rate of {self.by}. Longer "
            "prompts or answers, or other machines, change it"
        )


def predicted_time(
    job: Mapping[str, Any], model: Mapping[str, Any], rows: int, plan: Plan, before: RunReport
) -> PredictedTime:
    """Return how long a run of a job would take if `rows` rows go to the model.

    `job` and `model` are what the plan of the new run would contain. `plan` and `before` are plan
    and report of an earlier run, whose rate is assumed. The time is unknown if the two runs differ
    in model, engine, `cluster` fields or `output.escalate` (prices aside). It is also unknown if
    the earlier run reused answers or has no measured rate.
    """
    key = before.run_key
    differing = [
        name
        for name, new, old in (
            ("model", dict(model), dict(plan.model)),
            ("engine", job.get("engine", {}), plan.job.get("engine", {})),
            ("cluster", job.get("cluster", {}), plan.job.get("cluster", {})),
            ("output.escalate", _escalate(job), _escalate(plan.job)),
        )
        if _without_prices(new) != _without_prices(old)
    ]
    if differing:
        return PredictedTime(None, key, f"{key} has another {' and '.join(differing)}")
    if before.reuse.get("asked", before.rows) < before.rows:  # its rate includes reused answers
        return PredictedTime(None, key, f"{key} reused answers")
    if not before.rows or not before.seconds:
        return PredictedTime(None, key, f"{key} has no measured rate")
    return PredictedTime(rows * before.seconds / before.rows, key)


def _without_prices(value: Any) -> Any:
    """Return a value of a job without prices and currency at any depth of its mappings."""
    if not isinstance(value, Mapping):
        return value
    kept = {k: v for k, v in value.items() if not k.startswith("price_") and k != "currency"}
    return {name: _without_prices(one) for name, one in kept.items()}


def _escalate(job: Mapping[str, Any]) -> object:
    return job.get("output", {}).get("escalate", {})
