"""The seam for table formats: what comes with it, whatever a format's own reader does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from helpers.specs import reads
from helpers.table_sources import companies, copied, refused

from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.job.source import SourceFormat
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.source import peek
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import TablePin, TableSource, translate_errors
from prefect_raybatch.source.tables.copying import OPENERS


class Given(TableSource):
    """Tables as they are given, whatever is asked for."""

    def __init__(self, *tables: pa.Table, rows: int | None = None) -> None:
        self.pin = TablePin("delta", "lake/t", "id-1", "7")
        self.schema = tables[0].schema
        self.rows = rows
        self.tables = tables
        self.asked: list[tuple[Sequence[str] | None, str | None]] = []
        self.closed = 0

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        self.asked.append((columns, filter and filter.text))
        for table in self.tables:
            yield from table.to_batches()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(*tables: pa.Table, rows: int | None = None) -> Given:
        made = Given(*tables, rows=rows)
        monkeypatch.setitem(OPENERS, "delta", lambda source: made)
        return made

    return give


def test_each_format_of_tables_can_be_named_and_opened():
    assert set(TABLE_FORMATS) == set(OPENERS) <= set(SourceFormat.__args__)


def test_a_reader_that_leaves_the_filter_to_others_gives_the_same_rows(tmp_path, given):
    table = given(companies(0, 6), companies(6, 0), companies(6, 4), rows=10)
    how = {"format": "delta", "filter": "city = 'Bonn'", "columns": ["id"]}
    rows = copied(tmp_path, "lake/t", **how)[1]
    assert rows.to_pydict() == {"id": [0, 2, 4, 6, 8]} and table.closed == 1
    assert table.asked == [(["id", "city"], "city = 'Bonn'")]
    assert peek(reads(uri="lake/t", **how)).rows == 5 and table.closed == 2
    assert table.asked[1] == (["id", "city"], None)  # which share fits, by all rows
    assert copied(tmp_path, "lake/t", format="delta", limit=7)[1]["id"].to_pylist() == [*range(7)]


def test_dictionaries_and_views_come_as_what_they_hold(tmp_path, given):
    values = pa.array(["a", None, "b"])
    given(
        pa.table(
            {
                "d": values.dictionary_encode(),
                "v": values.cast(pa.string_view()),
                "n": pa.nulls(3),
            }
        )
    )
    rows = copied(tmp_path, "lake/t", format="delta", filter="d = 'a' OR v = 'b'")[1]
    assert rows.to_pydict() == {"d": ["a", "b"], "v": ["a", "b"], "n": [None, None]}
    assert rows.schema.types == [pa.string()] * 3


def test_a_type_that_no_snapshot_keeps_is_refused_by_its_column_unless_left_out(tmp_path, given):
    span = pa.array([pa.MonthDayNano([1, 2, 3])], pa.month_day_nano_interval())
    given(pa.table({"id": [1], "span": span}))
    refused("lake/t", "column 'span'", "Parquet cannot store", "source.columns", format="delta")
    assert copied(tmp_path, "lake/t", format="delta", columns=["id"])[1].num_rows == 1

    class Odd(pa.ExtensionType):
        def __init__(self) -> None:
            super().__init__(pa.int64(), "somebody.odd")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

    odd = pa.ExtensionArray.from_storage(Odd(), pa.array([1], pa.int64()))
    given(pa.table({"id": [1], "odd": odd}))
    refused("lake/t", "column 'odd'", "somebody.odd", format="delta")


def test_a_column_of_a_reserved_name_or_an_unknown_one_is_refused(given):
    given(pa.table({"__rb_x": [1], "id": [1]}))
    refused("lake/t", "__rb_x", format="delta")
    refused("lake/t", "'idd'", "'id'", error=ConfigError, format="delta", columns=["idd"])


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("HTTP 403 Forbidden, key SECRET", SourceError, "access denied"),
        ("NoSuchKey: part-0.parquet", SourceError, "a file is missing"),
        ("\x1b[31mconnection reset\x1b[0m by peer", StoreUnavailable, "t: connection reset by"),
        ("operation timed out", StoreUnavailable, "timed out"),
        ("bad magic", SourceError, "cannot be read (ValueError: bad magic)"),
    ],
)
def test_what_a_library_raises_is_said_in_a_line_and_without_keys(text, kind, words):
    with pytest.raises(kind) as caught, translate_errors("t", lambda t: t.replace("SECRET", "***")):
        raise ValueError(text)
    assert words in str(caught.value) and "SECRET" not in str(caught.value)
    assert caught.value.transient == (kind is StoreUnavailable)
