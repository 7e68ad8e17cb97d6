"""Finds the threshold of a cascade from the answers of both its models to a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.compare.sample import compared_columns
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.sizing.agreement import (
    CONFIDENCE,
    comparable_rows,
    least_sample,
    unanswered_text,
)
from prefect_raybatch.sizing.threshold import TestedThreshold, find_threshold, thresholds
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.cascade import MEASURES, failing_kinds
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class TunedCascade:
    """The outcome of the search for a cascade's threshold on a sample of rows.

    `first` and `larger` name the models; `field` is the job field that sets the threshold. With the
    threshold `found`, at least the share `agreement` of the answers equals the larger model's, with
    `confidence` (0 to 1). `found` is None if there is no such threshold.

    The larger model answered `rows` sampled rows, and failed `unanswered` other ones. To `same` of
    the `rows`, the first model gave an equal answer. With the threshold, `escalated` sampled rows
    go to the larger model. `low` and `high` are the ends of the exact 95 % interval for the share
    of all rows that do. `at_most` is the job's `output.escalate.at_most`, the largest share
    allowed.
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
    unanswered: int = 0
    escalated: int = 0
    low: float = 0.0
    high: float = 0.0

    @property
    def asks_all(self) -> bool:
        """Return whether the larger model is asked about all rows with the threshold `found`."""
        return self.found is not None and self.found.escalated == self.found.rows

    @property
    def changes(self) -> dict[str, float]:
        """Return {field: threshold} to set in the job; {} if no threshold saves a row."""
        return {} if self.found is None or self.asks_all else {self.field: self.found.below}

    @property
    def sampled(self) -> int:
        """Return the number of sampled rows, including those that the larger model failed."""
        return self.rows + self.unanswered

    def lines(self) -> list[str]:
        """Return sentences for the user that describe the outcome."""
        made = [
            f"{self.first} and {self.larger} gave the same answer to {self.same:,} of "
            f"{counted(self.rows, 'sampled row')} ({self.same / self.rows:.1%})"
        ]
        if failed := unanswered_text(self.unanswered, "sampled row", "the larger model"):
            made.append(f"{failed}, so these were not compared")
        if self.found is None or self.asks_all:
            unless = f", unless {self.larger} is asked about all rows" if self.asks_all else ""
            return [
                *made,
                f"no threshold keeps {self.agreement:g} of the answers equal to those of "
                f"{self.larger} at {self.confidence:.0%} confidence{unless}. Lower --agreement, or "
                "take a first model that agrees with it more often",
            ]
        found = self.found
        made += [
            f"{self.field}: {found.below:g}",
            f"with it, at least {found.bound:.2%} of the answers are those of {self.larger} "
            f"({self.confidence:.0%} confidence); this says nothing about whether they are right",
            f"{self.larger} is asked about {self.escalated / self.sampled:.1%} of the rows "
            f"({self.low:.1%} to {self.high:.1%}, 95 % interval)",
        ]
        if self.at_most < self.high:
            made.append(
                f"output.escalate.at_most ({self.at_most:g}) may leave out some of them, and then "
                f"the guarantee does not hold. Set it to {math.ceil(self.high * 100) / 100:g} or "
                "more"
            )
        return made


@dataclass(frozen=True)
class SampleAnswers:
    """A model's answer to each sampled row (None: failed), and how sure it was of the answer.

    `sureness` is float[rows]: a probability or logprob; see `SampleAnswers.of`.
    """

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
        """Return the answers in the result of a finished run, with their sureness.

        For a run of the first model, pass the `cascade`. The sureness is then the measure that the
        cascade uses (probability or logprob). If a row failed in a way for which the cascade asks
        the larger model, its sureness is minus infinity; if it failed in another way, infinity.
        Without `cascade`, the sureness of all rows is infinity.
        """
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
    """Find the threshold of a cascade from the answers of both its models to the same rows.

    Raises `ConfigError` if the sample is too small to show the `agreement`, whatever the threshold.
    """
    compared = comparable_rows(larger.answers)
    rows, need = int(compared.sum()), least_sample(agreement, CONFIDENCE)
    unanswered = len(compared) - rows
    if rows < need:
        failed = unanswered_text(unanswered, "sampled row", "the larger model")
        raise ConfigError(
            f"{counted(rows, 'row')} cannot show an agreement of {agreement:g}; at least "
            f"{need:,} are needed{f', and {failed}' if failed else ''}. Lower --agreement, or read "
            "more rows"
        )
    equal = [a == b for a, b in zip(first.answers, larger.answers, strict=True)]
    agrees = np.array(equal, bool)[compared]
    order = thresholds(str(cascade.measure))
    found = find_threshold(first.sureness[compared], agrees, agreement, CONFIDENCE, order)
    escalated = 0 if found is None else int((first.sureness < found.below).sum())
    low, high = interval(escalated, len(compared)) if found is not None else (0.0, 0.0)
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
        unanswered=unanswered,
        escalated=escalated,
        low=low,
        high=high,
    )
