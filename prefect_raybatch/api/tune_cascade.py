"""Tunes the threshold of a cascade: asks both models about a sample, and compares their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.compare.sample import compared_columns
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, first_of, larger_of
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.tune import FOLDER, remove_trials
from prefect_raybatch.sizing.agreement import CONFIDENCE, least_sample, sample_size
from prefect_raybatch.sizing.threshold import TestedThreshold, find_threshold, thresholds
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.cascade import FAILS_SCHEMA, MEASURES
from prefect_raybatch.storage import join, open_store
from prefect_raybatch.words import counted

Observe = Callable[[Progress], None]


@dataclass(frozen=True)
class TunedCascade:
    """The threshold found, None if none keeps the `agreement`, and the sample's figures.

    `field` is the field of the threshold; `same` rows got the same answer of both models. `low` and
    `high` are the ends of the exact 95 % interval of the share of rows that go to the larger model.
    """

    first: str
    larger: str
    field: str
    agreement: float
    confidence: float
    rows: int
    same: int
    found: TestedThreshold | None
    at_most: float
    low: float = 0.0
    high: float = 0.0

    @property
    def changes(self) -> dict[str, float]:
        """Return the field to set in the job."""
        return {} if self.found is None else {self.field: self.found.below}

    def lines(self) -> list[str]:
        """Return the outcome in sentences."""
        made = [
            f"{self.first} and {self.larger} gave the same answer to {self.same:,} of "
            f"{counted(self.rows, 'sampled row')} ({self.same / self.rows:.1%})"
        ]
        if self.found is None:
            return [
                *made,
                f"no threshold keeps {self.agreement:g} of the answers equal to those of "
                f"{self.larger} at {self.confidence:.0%} confidence. Lower --agreement",
            ]
        found = self.found
        made += [
            f"{self.field}: {found.below:g}",
            f"with it, at least {found.bound:.2%} of the answers are those of {self.larger} "
            f"({self.confidence:.0%} confidence); this says nothing about whether they are right",
            f"{self.larger} is asked about {found.escalated / found.rows:.1%} of the rows "
            f"({self.low:.1%} to {self.high:.1%}, 95 % interval)",
        ]
        if self.at_most < self.high:
            made.append(
                f"output.escalate.at_most ({self.at_most:g}) may leave out some of them, and then "
                f"the guarantee does not hold. Set it to {self.high:.2f} or more"
            )
        return made


def tune_cascade(
    job: BatchJob, agreement: float = 0.95, observe: Observe = lambda progress: None
) -> TunedCascade:
    """Find the threshold at which few enough answers differ from the larger model's.

    Both models answer a random sample of the rows, in runs that are removed afterwards; the same
    command continues after a kill. Raises `ConfigError` for a job without a threshold, and for too
    few rows.
    """
    spec = compile_job(job)
    cascade = spec.cascade
    if cascade is None or cascade.measure is None or spec.first is None:
        raise ConfigError(
            "--cascade needs a threshold to tune. Set output.escalate with "
            "when.probability_below or when.logprob_below to any value"
        )
    if not 0 < agreement < 1:
        raise ConfigError(f"--agreement {agreement:g} must be between 0 and 1. Example: 0.95")
    if job.source.limit is not None:
        raise ConfigError(
            "source.limit takes the first rows, and --cascade needs a random sample. Remove it, or "
            "set source.sample"
        )
    sample, place = _sampled(job, sample_size(agreement, CONFIDENCE))
    first = _answered(first_of(sample), "first", observe)
    larger = _answered(larger_of(sample), "larger", observe)
    options = job.output.options or None
    try:
        sureness, own = _first_answers(first, options, cascade, spec.first.finish)
        theirs = _answers(larger, options, spec.finish)
    finally:
        remove_trials(open_store(job.output.uri, options), place)
    need = least_sample(agreement, CONFIDENCE)
    if len(own) < need:
        raise ConfigError(
            f"{counted(len(own), 'row')} cannot show an agreement of {agreement:g}; at least "
            f"{need:,} are needed. Lower --agreement, or read more rows"
        )
    agrees = np.array([a == b for a, b in zip(own, theirs, strict=True)], bool)
    found = find_threshold(sureness, agrees, agreement, CONFIDENCE, thresholds(cascade.measure))
    low, high = interval(found.escalated, found.rows) if found is not None else (0.0, 0.0)
    return TunedCascade(
        first=cascade.first_name,
        larger=cascade.larger_name,
        field=f"output.escalate.when.{cascade.measure}_below",
        agreement=agreement,
        confidence=CONFIDENCE,
        rows=len(own),
        same=int(agrees.sum()),
        found=found,
        at_most=cascade.at_most,
        low=low,
        high=high,
    )


def _sampled(job: BatchJob, rows: int) -> tuple[BatchJob, str]:
    """Return the job over a sample, and the folder of its runs below output.uri."""
    text = f"{resolve(job).identity.fingerprint} {rows}"
    folder = f"{FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    changes: dict[str, Any] = {
        "source.sample": min(rows, job.source.sample or rows),
        "output.uri": join(job.output.uri, folder),
        "output.columns": [],
        "output.publish": [],
        "limits.min_rows": None,
        "limits.deadline": None,
        "limits.max_failed_rows": None,
        "limits.max_failed_fraction": 1.0,  # a failed row is an answer like any other here
        "quality": {},
    }
    return edited(job, changes, "the job of a sample"), folder


def _answered(job: BatchJob, key: str, observe: Observe) -> RunReport:
    run = plan_run(job, key)
    infer_in_place(job, job, run, observe)
    return finalize_run(job, run)


def _answers(report: RunReport, options: Any, finish: FinishSpec) -> list[Any]:
    """Return the answers of a run by row, None for a failed row."""
    table = report.to_arrow(options)
    columns = compared_columns(table.column_names, finish, ())
    found = dict(
        zip(
            table[finish.row_number].to_pylist(),
            (tuple(row.values()) for row in table.select(columns).to_pylist()),
            strict=True,
        )
    )
    return [found.get(row) for row in range(report.rows)]


def _first_answers(
    report: RunReport, options: Any, cascade: CascadeSpec, finish: FinishSpec
) -> tuple[np.ndarray, list[Any]]:
    """Return how sure the first model was of each row, and its answers."""
    table = report.to_arrow(options)
    sureness = np.full(report.rows, np.inf)
    if table.num_rows and cascade.measure is not None:
        column = table[cascade.measure_column]
        chunk = pa.concat_arrays(column.chunks)
        sureness[table[finish.row_number].to_numpy()] = MEASURES[cascade.measure](chunk)
    if cascade.fails_schema and report.failed:
        failed = report.quarantine(options).to_table(columns=[finish.row_number, "error"])
        for row, error in zip(*(column.to_pylist() for column in failed.columns), strict=True):
            if error in FAILS_SCHEMA:
                sureness[row] = -np.inf
    return sureness, _answers(report, options, finish)
