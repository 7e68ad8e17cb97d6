"""Draws a sample of a finished run's rows, with the input columns and answers in its files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.escalate import ANSWERED_BY
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.source.row_sample import RowSample
from prefect_raybatch.spec.result import FinishSpec

# Values by column; None for a failed row, {} for one that postprocess left out.
AnswerValues = Mapping[str, Any] | None


@dataclass(frozen=True)
class DrawnRows:
    """A sample of rows of a finished run, in order of row number.

    `numbers` are the row numbers, `inputs` has the input columns of these rows. `answers` has
    {column: value} for each row, None for a failed one. `total` is the number of the run's answered
    and failed rows; rows that postprocess left out do not count.
    """

    numbers: tuple[int, ...]
    inputs: pa.Table
    answers: tuple[AnswerValues, ...]
    total: int

    def to_parquet(self) -> bytes:
        """Return the input rows as a Parquet file."""
        out = io.BytesIO()
        pq.write_table(self.inputs, out, compression="zstd")
        return out.getvalue()


def draw(report: RunReport, plan: Plan, options: Mapping[str, Any] | None, rows: int) -> DrawnRows:
    """Return a random sample of a finished run: `rows` rows, or all if there are fewer.

    It depends only on the run's plan, so the same command always draws the same rows; other runs
    give other row numbers. `options` are store options. Rows that postprocess left out are never
    drawn, because no file has them. Raises `ConfigError` for a run without rows, or without a
    result in data/ (`output.compact: false`).
    """
    finish = compile_plan(plan).finish
    name = finish.row_number
    good, bad = report.dataset(options), report.quarantine(options)
    numbers = np.sort(np.concatenate([_numbers(good, name), _numbers(bad, name)]))
    if not len(numbers):
        raise ConfigError(f"{report.run} has no row to compare. Name a run with answers")
    chosen = numbers[RowSample(rows, int(plan.hash[:15], 16)).numbers(len(numbers))]
    wanted = pc.field(name).isin(pa.array(chosen))
    kept = set(finish.kept(decode_schema(plan.input_schema).names))
    columns = [column for column in good.schema.names if column in kept]
    answered = good.to_table(filter=wanted)
    failed = bad.to_table(columns=[name, "input"], filter=wanted) if report.failed else None
    inputs = _inputs(answered, failed, columns)
    found = dict(
        zip(
            answered[name].to_pylist(),
            answered.select(compared_columns(answered.column_names, finish, kept)).to_pylist(),
            strict=True,
        )
    )
    at = answered[name].to_pylist() + (failed[name].to_pylist() if failed is not None else [])
    order = pa.array(np.argsort(np.array(at, np.int64)))
    return DrawnRows(
        tuple(chosen.tolist()),
        inputs.take(order).combine_chunks(),
        tuple(found.get(number) for number in chosen.tolist()),
        len(numbers),
    )


def compared_columns(names: Iterable[str], finish: FinishSpec, kept: Iterable[str]) -> list[str]:
    """Return the columns among `names` whose values are compared: the answers.

    `kept` are the input columns that the result has. These are left out, and so are details such as
    token counts or reasoning.
    """
    parsing = finish.parsing
    details = {finish.row_number, *finish.extras, PROBABILITIES, LOGPROBS}
    details |= {ANSWERED_BY} if finish.answered_by else set()
    details |= {parsing.reasoning_column} if parsing is not None else set()
    return [name for name in names if name not in details.union(kept)]


def check_kept(sample: DrawnRows, needed: Mapping[str, str], run: str) -> None:
    """Raise `ConfigError` if the sample lacks an input column that the job needs.

    `needed` is {column: job field that names it}; `run` names the sampled run in the message.
    """
    for name, field in needed.items():
        if name not in sample.inputs.column_names:
            there = ", ".join(sample.inputs.column_names) or "none"
            raise ConfigError(
                f"{field}: the result of {run} does not keep the column {name!r} (it keeps: "
                f"{there}). Compare with a run that keeps it: add it to output.columns there"
            )


def _numbers(rows: pyarrow.dataset.Dataset, name: str) -> np.ndarray:
    numbers: np.ndarray = rows.to_table(columns=[name])[name].to_numpy().astype(np.int64)
    return numbers


def _inputs(answered: pa.Table, failed: pa.Table | None, columns: list[str]) -> pa.Table:
    """Return the input columns of the answered rows, followed by those of the failed rows.

    `columns` are the input columns of `answered`. `failed` has the input columns of its rows in a
    struct column `input`. If both tables have rows, the result has the columns that both have. If
    only one has rows, the result has all input columns of that one.
    """
    if failed is None or not failed.num_rows:
        return answered.select(columns)
    names = [field.name for field in failed.schema.field("input").type]
    if not answered.num_rows:
        columns = names
    shared = [name for name in columns if name in names]
    rows = failed["input"].combine_chunks()
    theirs = pa.table({name: pc.struct_field(rows, name) for name in shared})
    if not answered.num_rows:
        return theirs
    mine = answered.select(shared)
    return pa.concat_tables([mine, theirs.cast(mine.schema)])
