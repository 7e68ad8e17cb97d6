"""Checksums of rows: the same for the same values, however they are stored."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.result.row_sums import decode, encode, row_sums

HALVES = pa.list_(pa.float16(), 2)
VALUES = {
    "text": pa.array(["a", "", None, "\u00e4"]),
    "bytes": pa.array([b"a", b"", None, b"\xff"], pa.large_binary()),
    "int": pa.array([0, 1, None, -(2**63)]),
    "unsigned": pa.array([0, 1, None, 2**64 - 1], pa.uint64()),
    "float": pa.array([0.0, float("nan"), None, 1e300]),
    "small": pa.array([0, float("nan"), None, 0.5], pa.float32()),
    "bool": pa.array([True, False, None, True]),
    "date": pa.array([dt.date(2026, 1, 1), dt.date(1970, 1, 1), None, dt.date(1, 1, 1)]),
    "time": pa.array([1, 0, None, 3], pa.time64("us")),
    "stamp": pa.array([1, 0, None, 3], pa.timestamp("us", "UTC")),
    "decimal": pa.array(
        [Decimal("1.10"), Decimal("0"), None, Decimal("-2.5")], pa.decimal128(9, 2)
    ),
    "list": pa.array([["a"], [], None, [None, "b"]]),
    "struct": pa.array([{"x": 1, "y": None}, {"x": None, "y": "b"}, None, {"x": 1, "y": "z"}]),
    "vector": pa.array([[1.0, 2.0], [2.0, 1.0], None, [1.0, None]], pa.list_(pa.float32(), 2)),
    "half": pa.array([*np.array([[1, 2], [2, 1], [0, 0]], np.float16).tolist(), None], HALVES),
    "nested": pa.array([[[1], [2]], [[1, 2]], None, [[], [1, 2]]]),
    "large": pa.array([[1, 2], [2, 1], None, [1, 2, 0]], pa.large_list(pa.int8())),
    "map": pa.array([[("k", 1)], [], None, [("l", None)]], pa.map_(pa.string(), pa.int32())),
    "nothing": pa.nulls(4),
}


@pytest.mark.parametrize("name", VALUES)
def test_each_value_has_a_sum_of_its_own_however_it_is_stored(name):
    whole = pa.table({name: VALUES[name]})
    sums = row_sums(whole)
    assert sums.dtype == np.uint32
    if name != "nothing":
        assert len(set(sums.tolist())) == (3 if name == "bool" else 4)
    cut = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2), whole.slice(3)])
    assert row_sums(cut).tolist() == sums.tolist()
    assert [row_sums(whole.slice(i, 1))[0] for i in range(4)] == sums.tolist()


def broken(kind: pa.DataType, good: bool) -> pa.Array:
    """An array that holds text which is no UTF-8, as a Parquet file can; or the same, mended."""
    raw = pa.array([b"a", b"b" if good else b"\xff\xfe", None], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], 1)
    offsets = pa.array([0, 1, 2, 3], pa.int32())
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(offsets, pa.array(["k", "k", "k"]), text)
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([text], names=["x"])
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        inner = pa.StructArray.from_arrays([text], names=["x"])
        return pa.ListArray.from_arrays(offsets, inner)
    return pa.ListArray.from_arrays(offsets, text) if pa.types.is_list(kind) else text


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.struct([("x", pa.string())]),
        pa.list_(pa.string()),
        pa.list_(pa.struct([("x", pa.string())])),
        pa.map_(pa.string(), pa.string()),
    ],
    ids=str,
)
def test_text_that_is_no_utf8_has_a_sum_and_its_neighbours_keep_theirs(kind):
    bad, good = (row_sums(pa.table({"c": broken(kind, good)})) for good in (False, True))
    assert bad[1] != good[1]
    assert [bad[0], bad[2]] == [good[0], good[2]]


def test_encodings_do_not_matter_and_columns_do():
    table = pa.table({"a": ["x", None, "y", "x"], "b": ["x", "y", None, "z"]})
    coded = table.set_column(0, "a", table["a"].dictionary_encode())
    assert row_sums(coded).tolist() == row_sums(table).tolist()
    assert row_sums(table.rename_columns(["b", "a"])).tolist() != row_sums(table).tolist()
    swapped = pa.table({"a": table["b"], "b": table["a"]})
    assert not (row_sums(swapped)[1:] == row_sums(table)[1:]).any()


@pytest.mark.parametrize("name", ["response_2", "response", "response_1\0", "\u00e9response_1"])
def test_a_renamed_column_or_struct_field_changes_the_sums_of_all_rows(name):
    values = ["x", None, "y"]
    before = pa.table({"response_1": values})
    assert not (row_sums(pa.table({name: values})) == row_sums(before)).any()
    structs = (pa.table({"a": before.rename_columns([n]).to_struct_array()}) for n in (name, "b"))
    renamed, other = map(row_sums, structs)
    assert not (renamed == other).any()


def test_parts_keep_rows_and_sums():
    sums = np.array([1, 2**32 - 1, 3], np.uint32)
    data = encode([np.array([5, 6]), np.array([9])], [sums[:2], sums[2:]])
    rows, found = decode(data, 3, "x")
    assert rows.tolist() == [5, 6, 9] and found.tolist() == sums.tolist()
    for bad in (data[:-9], b"", b"PAR1"):
        with pytest.raises(CorruptRun, match="x is not readable"):
            decode(bad, 3, "x")
    with pytest.raises(CorruptRun, match="x holds 3 rows, not 4"):
        decode(data, 4, "x")
