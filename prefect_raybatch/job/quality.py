"""How good the answers must be: `quality` of a job file."""

from __future__ import annotations

from pydantic import field_validator

from prefect_raybatch.job.group import Group, field
from prefect_raybatch.job.judge import Judge

GOLDEN_FORMATS = (".parquet", ".csv", ".jsonl", ".ndjson")


class Quality(Group):
    """How the accuracy is measured, and below which accuracy a result is not published."""

    golden: str | None = field(
        None,
        title="Golden rows",
        text="File with rows of the input and their right answers: Parquet, CSV or JSON Lines. "
        "The report shows how many of them the run answered right.",
        min_length=1,
    )
    key: list[str] = field(
        [],
        title="Key of golden rows",
        text="Columns by which golden rows are found in the result. Default: all columns of the "
        "golden file except the answer.",
    )
    answer: str | None = field(
        None,
        title="Answer of golden rows",
        text="Column with the answer, in the golden file and in the result. Default: "
        "output.column.",
        min_length=1,
    )
    at_least: float | None = field(
        None,
        title="Least accuracy",
        text="Accuracy, as a fraction, that the golden rows must show at 97.5 % confidence for "
        "the result to be published. Without golden rows, what the judge must show.",
        gt=0,
        lt=1,
    )
    judge: Judge = field(
        Judge(),
        title="Judge",
        text="A model that judges a sample of the answers after each run. Default: none.",
    )

    @field_validator("golden")
    @classmethod
    def _golden(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(GOLDEN_FORMATS):
            raise ValueError(f"{value!r} must end in one of {', '.join(GOLDEN_FORMATS)}")
        return value
