"""The threshold of a cascade from the answers of both its models to a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.compare.sample import compared_columns
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.sizing.agreement import CONFIDENCE, least_sample
from prefect_raybatch.sizing.threshold import TestedThreshold, find_threshold, thresholds
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.cascade import MEASURES, failing_kinds
from prefect_raybatch.words import counted


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


@dataclass(frozen=True)
class SampleAnswers:
    """A model's answers by row (None: failed), and how sure it was (as `find_threshold` takes)."""

    answers: list[Any]
    sureness: np.ndarray

    @classmethod
    def of(
        cls,
        report: RunReport,
        options: Mapping[str, Any] | None,
        finish: FinishSpec,
        cascade: CascadeSpec | None = None,
    ) -> SampleAnswers:
        """Read the result of a finished run; with `cascade`, it is that of the first model."""
        table = report.to_arrow(options)
        numbers = table[finish.row_number].to_pylist()
        rows = table.select(compared_columns(table.column_names, finish, ())).to_pylist()
        found = dict(zip(numbers, (tuple(row.values()) for row in rows), strict=True))
        sureness = np.full(report.rows, np.inf)
        if cascade is not None and cascade.measure is not None and numbers:
            column = pa.concat_arrays(table[cascade.measure_column].chunks)
            sureness[numbers] = MEASURES[cascade.measure](column)
        kinds = () if cascade is None else failing_kinds(cascade)
        if kinds and report.failed:
            failed = report.quarantine(options).to_table(columns=[finish.row_number, "error"])
            for row, error in zip(*(column.to_pylist() for column in failed.columns), strict=True):
                if error in kinds:
                    sureness[row] = -np.inf
        return cls([found.get(row) for row in range(report.rows)], sureness)


def threshold_of_sample(
    cascade: CascadeSpec, agreement: float, first: SampleAnswers, larger: SampleAnswers
) -> TunedCascade:
    """Return the threshold found; raise `ConfigError` if the sample is too small to show any."""
    rows, need = len(first.answers), least_sample(agreement, CONFIDENCE)
    if rows < need:
        raise ConfigError(
            f"{counted(rows, 'row')} cannot show an agreement of {agreement:g}; at least "
            f"{need:,} are needed. Lower --agreement, or read more rows"
        )
    agrees = np.array([a == b for a, b in zip(first.answers, larger.answers, strict=True)], bool)
    order = thresholds(str(cascade.measure))
    found = find_threshold(first.sureness, agrees, agreement, CONFIDENCE, order)
    low, high = interval(found.escalated, found.rows) if found is not None else (0.0, 0.0)
    return TunedCascade(
        first=cascade.first_name,
        larger=cascade.larger_name,
        field=f"output.escalate.when.{cascade.measure}_below",
        agreement=agreement,
        confidence=CONFIDENCE,
        rows=rows,
        same=int(agrees.sum()),
        found=found,
        at_most=cascade.at_most,
        low=low,
        high=high,
    )
