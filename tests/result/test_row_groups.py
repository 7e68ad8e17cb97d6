"""Row groups put together as they are: the same rows for every reader, the same bytes each time."""

from __future__ import annotations

import datetime as dt
import io
from contextlib import suppress
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_raybatch.ledger.layout import POSITION_COLUMN
from prefect_raybatch.result.parquet_footer import encoded, footer_at_end, footer_figures, footer_of
from prefect_raybatch.result.row_groups import Columns, RowGroupFile, encoded_columns

ROWS = 300
NUMBER = pa.field("row", pa.int64())


def rows(start: int) -> pa.Table:
    """Rows of many types, each with nulls, some columns of values that repeat."""
    numbers = range(start, start + ROWS)
    often = [None if n % 7 == 0 else n for n in numbers]
    day = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return pa.table(
        {
            POSITION_COLUMN: pa.array(range(ROWS), pa.int32()),
            "text": [n and f"text of {n}, which is no other's" for n in often],
            "label": pa.array([f"label {n % 3}" for n in numbers]).dictionary_encode(),
            "score": pa.array([n and n / 7 for n in often], pa.float32()),
            "flag": [n % 2 == 0 for n in numbers],
            "at": pa.array([day + dt.timedelta(n) for n in numbers], pa.timestamp("us", "UTC")),
            "took": pa.array(list(numbers), pa.duration("s")),
            "vector": pa.array([[n / 2] * 3 for n in numbers], pa.list_(pa.float32(), 3)),
            "tags": pa.array([["a", None, str(n)] if n % 5 else [] for n in numbers]),
            "deep": pa.array([n and {"a": n, "b": [{"c": str(n)}]} for n in often]),
            "map": pa.array([[("k", n)] for n in numbers], pa.map_(pa.string(), pa.int64())),
            "nothing": pa.nulls(ROWS),
        }
    )


def bytes_of(table: pa.Table, **how: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", **how)
    return out.getvalue()


def numbered(start: int) -> Columns:
    return encoded_columns(pa.table({"row": pa.array(range(start, start + ROWS), pa.int64())}))


def schema_of(table: pa.Table) -> pa.Schema:
    return table.schema.remove(0).append(NUMBER)


@pytest.mark.parametrize("dictionary", [True, False])
def test_groups_of_other_files_and_encoded_ones_read_as_their_rows(tmp_path, dictionary):
    tables = [rows(0), rows(ROWS), rows(2 * ROWS)]
    path = f"{tmp_path}/made.parquet"
    file = RowGroupFile(path, schema_of(tables[0]))
    for number, table in enumerate(tables):
        kept = Columns(bytes_of(table, use_dictionary=dictionary), after_first=True)
        if number == 1:
            kept = encoded_columns(table.drop_columns([POSITION_COLUMN]))
        assert file.append([kept, numbered(number * ROWS)])
    file.close()
    whole = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    want = whole.drop_columns([POSITION_COLUMN]).append_column(NUMBER, pa.array(range(3 * ROWS)))
    with pq.ParquetFile(path) as found:
        ours = pq.read_schema(io.BytesIO(bytes_of(want)))  # as pyarrow alone would have it
        assert found.schema_arrow.equals(ours, check_metadata=True)
        assert [found.metadata.row_group(n).num_rows for n in range(3)] == [ROWS] * 3
        assert found.read().to_pylist() == want.to_pylist()
        assert found.read_row_group(2, ["deep", "row"]).to_pylist() == (
            want.select(["deep", "row"]).slice(2 * ROWS).to_pylist()
        )
    some = want.select(["text", "label", "score", "at", "tags", "row"]).to_pylist()
    assert polars.read_parquet(path).select(some[0].keys()).to_dicts() == some
    plain = ["text", "score", "tags", "row"]
    names = ", ".join(plain)
    found = duckdb.sql(f"select {names} from '{path}' where row >= {ROWS} order by row").fetchall()
    assert found == [tuple(row[name] for name in plain) for row in some[ROWS:]]


def test_the_same_groups_give_the_same_bytes(tmp_path):
    pieces = [bytes_of(rows(0)), bytes_of(rows(ROWS))]
    for name in "ab":
        file = RowGroupFile(f"{tmp_path}/{name}", schema_of(rows(0)))
        for number, piece in enumerate(pieces):
            assert file.append([Columns(piece, after_first=True), numbered(number * ROWS)])
        file.close()
        file.close()
    assert Path(tmp_path / "a").read_bytes() == Path(tmp_path / "b").read_bytes()


def test_a_page_index_and_bloom_filters_stay_behind(tmp_path):
    table = rows(0).select([POSITION_COLUMN, "text", "flag"])
    piece = bytes_of(table, write_page_index=True, data_page_size=1024)
    path = f"{tmp_path}/made.parquet"
    file = RowGroupFile(path, schema_of(table))
    assert file.append([Columns(piece, after_first=True), numbered(0)])
    file.close()
    column = pq.read_metadata(path).row_group(0).column(0)
    assert not column.has_offset_index and not column.has_column_index
    assert pq.read_table(path, columns=["text"]) == table.select(["text"])


def test_what_does_not_go_together_is_not_taken(tmp_path):
    table = rows(0).select([POSITION_COLUMN, "text", "score"])
    path = f"{tmp_path}/made.parquet"
    file = RowGroupFile(path, schema_of(table))
    other_type = table.set_column(2, "score", table["score"].cast(pa.float64()))
    filled = table.set_column(1, pa.field("text", pa.string(), nullable=False), [["x"] * ROWS])
    renamed = table.rename_columns([POSITION_COLUMN, "other", "score"])
    wrong = [
        Columns(bytes_of(other_type), after_first=True),
        Columns(bytes_of(filled), after_first=True),
        Columns(bytes_of(renamed), after_first=True),
        Columns(bytes_of(table)),
        Columns(bytes_of(table, row_group_size=100), after_first=True),
        Columns(bytes_of(table, version="1.0"), after_first=True),
        Columns(bytes_of(table.slice(1)), after_first=True),
    ]
    for one in wrong:
        assert not file.append([one, numbered(0)])
    nested_first = table.set_column(0, "first", pa.array([{"a": 1}] * ROWS))
    assert not file.append([Columns(bytes_of(nested_first), after_first=True), numbered(0)])
    assert file.append([Columns(bytes_of(table), after_first=True), numbered(0)])
    file.close()
    assert pq.read_metadata(path).num_rows == ROWS


def test_a_footer_is_written_as_it_was_read():
    data = bytes_of(rows(0), write_page_index=True)
    size = int.from_bytes(data[-8:-4], "little")
    assert encoded(footer_of(data)) == data[-8 - size :]
    with pytest.raises(ValueError, match="not a Parquet file"):
        footer_of(data[:-1])
    with pytest.raises((ValueError, IndexError)):
        footer_of(b"\x19" + (1).to_bytes(4, "little") + b"PAR1" + data[-8:])


def test_a_footer_with_a_bit_turned_tells_figures_or_is_none():
    """pyarrow ends the process where it is asked for the figures of some of them."""
    table = rows(0).select(["text", "score", "tags", "deep"])
    data = bytearray(bytes_of(table))
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    (whole,) = footer_figures(footer_at_end(io.BytesIO(data)))
    assert whole.rows == ROWS and whole.columns[1]["nulls"] == table["score"].null_count
    others = 0
    for at in range(begin, len(data) - 8):
        data[at] ^= 1 << at % 8
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            others += footer_figures(footer_of(bytes(data))) != [whole]
        data[at] ^= 1 << at % 8
    assert others > 10
