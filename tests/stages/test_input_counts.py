"""Counts of a shard's input, whatever types its columns have."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from prefect_raybatch.ledger.stats import values_by_column
from prefect_raybatch.report.inputs import null_counts
from prefect_raybatch.stages.input_counts import input_counts

LISTS = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([[1], [2]]))
NULL_IN_DICTIONARY = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
NOT_UTF8 = pa.array([b"\xff", b"\xff", b"a"]).view(pa.string())
DATE = datetime.date(2026, 11, 28)


@pytest.mark.parametrize(
    ("column", "nulls", "values"),
    [
        (pa.array(["a", "b", None]), 1, [1, 1]),
        (pa.array(["a", "b", "a"], pa.string_view()), 0, [1, 2]),
        (pa.array(["a", "a", None]).dictionary_encode(), 1, [2]),
        (NULL_IN_DICTIONARY, 1, [2]),
        (LISTS, 0, []),
        (NOT_UTF8, 0, [1, 2]),
        (pa.array(["x" * 61, "x" * 60, ""]), 0, [1, 1]),
        (pa.array([True, False, None]), 1, [1, 1]),
        (pa.array([2**63, 1, 1], pa.uint64()), 0, [1, 2]),
        (pa.array(np.array([1, 2, 2], np.float16)), 0, [1, 2]),
        (pa.array([1.0, None, 1.0]), 1, [2]),  # whole numbers, as pandas writes them
        (pa.array([1.0, float("nan"), float("inf")]), 1, [1]),
        (pa.array([2.0, 1.5, 2.0, -1e300, 2.0**53]), 0, [2]),
        (pa.array([DATE, DATE, None], pa.date64()), 1, [2]),
        (pa.nulls(3), 3, []),
        (pa.array([decimal.Decimal("1.5")] * 3), 0, []),
        (pa.array([{"a": 1}] * 3), 0, []),
        (pa.array([b"a"] * 3), 0, []),
        (pa.array([], pa.string()), 0, []),
    ],
)
def test_columns_of_any_type_are_counted_or_left_out(
    column: pa.Array, nulls: int, values: list[int]
) -> None:
    figures = input_counts(pa.table({"c": column}), ["c", "absent"])
    assert null_counts(figures) == {"c": {"null": nulls, "filled": len(column) - nulls}}
    assert sorted(values_by_column(figures).get("c", {}).values()) == values


def test_one_odd_number_hides_no_other_value() -> None:
    column = pa.array([1.0, 2.0] * 500 + [float("nan"), 1.5])
    figures = input_counts(pa.table({"c": column}), None)
    assert sorted(values_by_column(figures)["c"].values()) == [500, 500]


def test_few_values_are_counted_in_a_small_shard_too() -> None:
    """The last shard of a run may be small: its values must not pass for new ones."""
    figures = input_counts(pa.table({"c": [f"v{n % 24}" for n in range(30)]}), None)
    assert sum(values_by_column(figures)["c"].values()) == 30
    many = input_counts(pa.table({"c": [f"Company {n}" for n in range(100)]}), None)
    assert not values_by_column(many)
