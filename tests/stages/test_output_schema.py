"""Values of postprocess in the types of the output columns: kept whole, or a failed row."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import compile_job, finish_spec
from prefect_raybatch.stages.output_schema import fitting_columns, output_schema
from prefect_raybatch.stages.result_columns import declared_schema, result_types
from prefect_raybatch.storage import open_store

MORNING = datetime(2026, 1, 2, 3, 4, 5, 678_901)
SPEC = finish_spec(make_job(output={"uri": "out", "postprocess": "helpers.functions:shout"}))
NAMED = pa.struct([("name", pa.string())])


def stored(kind: pa.DataType, *values: Any) -> tuple[list[Any], dict[int, str]]:
    """The values of a column that fit its type, and the messages of the rows that do not."""
    rows = {i: {"value": value} for i, value in enumerate(values)}
    ((_, array),), misfits = fitting_columns(pa.schema([("value", kind)]), rows)
    assert {(why.stage, why.kind) for why in misfits.values()} <= {("postprocess", "SchemaError")}
    return array.to_pylist(), {i: why.message for i, why in misfits.items()}


@pytest.mark.parametrize(
    ("kind", "value", "lost"),
    [
        (pa.int64(), 0.9, "0.9 is not a whole number"),
        (pa.int64(), np.float32(2.5), "2.5"),
        (pa.int8(), Decimal("1.5"), "1.5"),
        (pa.list_(pa.int32()), [4, 4.7], "4.7 is not a whole number"),
        (pa.list_(pa.int32()), np.array([4, 4.7]), "4.7"),
        (pa.float32(), 1e300, "too large"),
        (pa.list_(pa.float16()), [1e6], "too large"),
        (NAMED, {"name": "a", "age": 3}, "'age' is no field"),
        (NAMED, {3: "a"}, "3 is no field"),
        (NAMED, [("name", "a"), ("age", 3)], "'age' is no field"),
        (pa.list_(NAMED), [{"name": "a"}, {"age": 3}], "'age' is no field"),
        (pa.struct([("deep", NAMED)]), {"deep": {"nam": "a"}}, "'nam' is no field"),
        (pa.struct([("count", pa.int64())]), {"count": 1.5}, "1.5"),
        (pa.map_(pa.string(), pa.int64()), {"a": 1.5}, "1.5"),
        (pa.map_(pa.string(), pa.int64()), [("a", 1.5)], "1.5"),
        (pa.date32(), MORNING, "time of day"),
        (pa.date64(), MORNING, "time of day"),
        (pa.date32(), 5.5, "5.5"),
        (pa.timestamp("s"), MORNING, "finer than s"),
        (pa.timestamp("ms", "UTC"), MORNING, "finer than ms"),
        (pa.timestamp("us"), 1.5, "1.5"),
        (pa.timestamp("us"), MORNING.replace(tzinfo=UTC), "time zone"),
        (pa.date32(), datetime(2026, 1, 2, tzinfo=UTC), "time zone"),
        (pa.time32("s"), time(1, 2, 3, 4), "finer than s"),
        (pa.time64("us"), time(1, 2, 3, tzinfo=UTC), "time zone"),
        (pa.duration("ms"), timedelta(microseconds=1), "finer than ms"),
        (pa.list_(pa.timestamp("us")), np.array([MORNING], "datetime64[ms]"), "another unit"),
    ],
)
def test_a_row_whose_value_would_lose_a_part_fails_alone(
    kind: pa.DataType, value: Any, lost: str
) -> None:
    values, messages = stored(kind, None, value, None)
    assert values == [None, None] and messages.keys() == {1}
    assert f"column value has type {kind}" in messages[1] and lost in messages[1]
    assert "output.schema" in messages[1]  # what to do


@pytest.mark.parametrize(
    ("kind", "value", "held"),
    [
        (pa.int64(), 4.0, 4),
        (pa.int64(), Decimal("4.00"), 4),
        (pa.int64(), np.int8(4), 4),
        (pa.uint64(), 2**64 - 1, 2**64 - 1),
        (pa.float32(), 0.1, pytest.approx(0.1)),  # a float type is a precision
        (pa.float32(), float("inf"), float("inf")),
        (pa.float64(), 4, 4.0),
        (pa.list_(pa.int64()), (1, None), [1, None]),
        (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
        (NAMED, {}, {"name": None}),
        (NAMED, {"name": "a", "age": None}, {"name": "a"}),
        (NAMED, ("a",), {"name": "a"}),
        (pa.map_(pa.string(), pa.int64()), [{"key": "a", "value": 1}], [("a", 1)]),
        (pa.timestamp("us"), pa.scalar(MORNING), MORNING),
        (NAMED, {b"name": "a"}, {"name": "a"}),
        (pa.date32(), datetime(2026, 1, 2), date(2026, 1, 2)),
        (pa.date32(), date(2026, 1, 2), date(2026, 1, 2)),
        (pa.timestamp("s"), MORNING.replace(microsecond=0), MORNING.replace(microsecond=0)),
        (pa.timestamp("us", "UTC"), MORNING.replace(tzinfo=UTC), MORNING.replace(tzinfo=UTC)),
        (pa.timestamp("us"), 0, datetime(1970, 1, 1)),
        (pa.time64("us"), time(1, 2, 3, 4), time(1, 2, 3, 4)),
        (pa.duration("us"), timedelta(microseconds=1), timedelta(microseconds=1)),
        (pa.list_(pa.timestamp("us")), np.array([MORNING], "datetime64[us]"), [MORNING]),
        (pa.binary(), b"\xff", b"\xff"),
    ],
)
def test_a_value_that_its_type_holds_is_stored(kind: pa.DataType, value: Any, held: Any) -> None:
    assert stored(kind, value, None) == ([held, None], {})


def test_a_declared_integer_takes_no_fraction() -> None:
    rows = {0: {"score": 1}, 1: {"score": 0.9}, 2: {"score": 3.0}}
    ((_, array),), misfits = fitting_columns(declared_schema({"score": "int64"}), rows)
    assert array.to_pylist() == [1, 3] and misfits.keys() == {1}
    assert "int64" in misfits[1].message and "0.9" in misfits[1].message


@pytest.mark.parametrize(
    ("first", "kind", "later"),
    [
        ([], pa.list_(pa.string()), ["a"]),
        ({"a": None}, pa.struct([("a", pa.string())]), {"a": "b"}),
        ([{"a": [None]}], pa.list_(pa.struct([("a", pa.list_(pa.string()))])), [{"a": ["b"]}]),
        ([[], None], pa.list_(pa.list_(pa.string())), [["a"]]),
        (None, pa.string(), "a"),
    ],
)
def test_what_the_first_shard_leaves_open_is_text(
    tmp_path: Path, first: Any, kind: pa.DataType, later: Any
) -> None:
    schema = output_schema(SPEC, False, open_store(str(tmp_path)), [{"value": first}])
    assert schema.field("value").type == kind
    assert stored(kind, first, later)[1] == {}


def test_an_empty_object_in_the_first_shard_fails_its_row_alone(tmp_path: Path) -> None:
    """Parquet cannot store a struct without fields, so the shard would never be written."""
    rows = [{"value": {}}, {"value": None}]
    schema = output_schema(SPEC, False, open_store(str(tmp_path)), rows)
    assert schema.field("value").type == pa.string()
    assert stored(pa.string(), {}, None)[0] == [None]


@pytest.mark.parametrize("answers", [1, 2])
def test_the_columns_known_before_a_run_are_those_of_its_shards(answers, tmp_path):
    form = {"label": {"type": "string"}, "years": {"type": ["integer", "null"]}}
    record = {"type": "object", "properties": form, "required": ["label", "years"]}
    (tmp_path / "form.json").write_text(json.dumps(record))
    output = {"uri": "out", "columns": [], "schema_model": str(tmp_path / "form.json")}
    spec = compile_job(make_job(output=output, sampling={"n": answers, "temperature": 1}))
    known, is_all = result_types(spec.finish, spec.sampling, "generate", pa.schema([]))
    columns = output_schema(spec.finish, spec.sampling.several, open_store(str(tmp_path)), [])
    assert is_all and known == pa.schema([*columns, (spec.finish.row_number, pa.int64())])
