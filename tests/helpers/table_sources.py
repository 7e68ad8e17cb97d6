"""What the tests of tables as input share: rows, a copy of them, and a refusal."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.specs import reads
from prefect_raybatch.errors import SourceError
from prefect_raybatch.source import Inventory, peek, snapshot
from prefect_raybatch.storage import open_store

# What fits of `all_kinds`, by their ids.
KINDS_FITTING = (
    ("at > '2026-01-01T12:00:00Z'", [1, 2]),
    ("seen <= '2026-01-02'", [0, 1]),
    ("day = '2026-01-03'", [2]),
    ("day != '2026-01-03'", [0]),
    ("cost > -3.33", [0]),
    ("price <= 1 OR price IS NULL", [0, 2]),
    ("NOT price > 1", [0]),
    ("ok", [0]),
    ("NOT ok", [1]),
    ("id NOT IN (0, 7)", [1, 2]),
    ("id > 0.5 AND id < 2", [1]),
    ('"odd ""name""" = \'it\'\'s\'', [0]),
    ('"odd ""name""" LIKE \'it%\'', [0]),
    ('"odd ""name""" NOT LIKE \'it%\'', [1]),
)


def all_kinds() -> pa.Table:
    """Rows of all the types that tables of other systems keep."""
    return pa.table(
        {
            "id": pa.array([0, 1, 2], pa.int32()),
            "cost": pa.array([Decimal("1.10"), None, Decimal("-3.33")], pa.decimal128(20, 2)),
            "at": pa.array(
                [datetime(2026, 1, d, tzinfo=UTC) for d in (1, 2, 3)], pa.timestamp("us", "UTC")
            ),
            "seen": pa.array([datetime(2026, 1, d) for d in (1, 2, 3)], pa.timestamp("us")),
            "day": [date(2026, 1, 1), None, date(2026, 1, 3)],
            "price": [0.5, float("nan"), None],
            "ok": [True, False, None],
            "data": [b"\0", b"", None],
            "tags": [["a", None], [], None],
            "who": [{"name": "x", "years": [1]}, {"name": None, "years": None}, None],
            "more": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            'odd "name"': ["it's", "", None],
        }
    )


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No keys of a store in the environment: those of the job are to be taken."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


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
    made = snapshot(reads(uri=uri, **fields), open_store(str(tmp_path / "run")), "attempt")
    rows = pa.concat_tables([pq.read_table(tmp_path / "run" / file.uri) for file in made.files])
    assert rows.schema.equals(made.schema)
    return made, rows


def refused(uri: Any, *words: str, error: type[Exception] = SourceError, **fields: Any) -> str:
    """What is said of a source before a row of it is copied."""
    with pytest.raises(error) as caught:
        peek(reads(uri=uri, **fields))
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)
