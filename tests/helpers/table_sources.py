"""What the tests of tables as input share: rows, a copy of them, and a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_raybatch.errors import SourceError
from prefect_raybatch.job.source import Source
from prefect_raybatch.source import Inventory, peek, snapshot
from prefect_raybatch.storage import open_store


def companies(start: int, rows: int) -> pa.Table:
    ids = range(start, start + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "Company": [f"Company {i}" for i in ids],
            "city": [("Bonn", "Köln")[i % 2] for i in ids],
        }
    )


def copied(tmp_path: Path, uri: Any, **fields: Any) -> tuple[Inventory, pa.Table]:
    """A snapshot of a source, and its rows."""
    made = snapshot(Source(uri=uri, **fields), open_store(str(tmp_path / "run")), "attempt")
    rows = pa.concat_tables([pq.read_table(tmp_path / "run" / file.uri) for file in made.files])
    assert rows.schema.equals(made.schema)
    return made, rows


def refused(uri: Any, *words: str, error: type[Exception] = SourceError, **fields: Any) -> str:
    """What is said of a source before a row of it is copied."""
    with pytest.raises(error) as caught:
        peek(Source(uri=uri, **fields))
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)
