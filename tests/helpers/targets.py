"""Targets to publish to in a local folder, and what is in them, read by their own libraries."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from prefect_raybatch.publish.base import AnsweredRows

Row = dict[str, Any]


def delta(root: Path, **more: Any) -> Row:
    return {"format": "delta", "uri": str(root / "delta"), **more}


def delta_rows(root: Path) -> list[Row]:
    from deltalake import DeltaTable

    return pa.table(DeltaTable(str(root / "delta")).to_pyarrow_table()).to_pylist()


def catalog(root: Path) -> Row:
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}"}


def iceberg(root: Path, **more: Any) -> Row:
    from pyiceberg.catalog import load_catalog

    load_catalog(None, **catalog(root)).create_namespace_if_not_exists("db")
    return {"format": "iceberg", "table": "db.answers", "catalog": catalog(root), **more}


def iceberg_rows(root: Path) -> list[Row]:
    from pyiceberg.catalog import load_catalog

    table = load_catalog(None, **catalog(root)).load_table("db.answers")
    return list(table.scan().to_arrow().to_pylist())


def sql(root: Path, **more: Any) -> Row:
    return {"format": "sql", "uri": f"sqlite:///{root}/rows.db", "table": "answers", **more}


def sql_rows(root: Path) -> list[Row]:
    with sqlite3.connect(root / "rows.db") as base:
        base.row_factory = sqlite3.Row
        return [dict(row) for row in base.execute("select * from answers")]


def lance(root: Path, **more: Any) -> Row:
    return {"format": "lance", "uri": f"{root}/lance-{{run_key}}", **more}


def lance_rows(root: Path) -> list[Row]:
    import lance

    found = sorted(root.glob("lance-*"))
    return [row for one in found for row in lance.dataset(str(one)).to_table().to_pylist()]


def parquet(root: Path, **more: Any) -> Row:
    return {"format": "parquet", "uri": str(root / "parquet"), **more}


def parquet_rows(root: Path) -> list[Row]:
    table = ds.dataset(str(root / "parquet"), partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: row["_row"])


def jsonl(root: Path, **more: Any) -> Row:
    return {"format": "jsonl", "uri": str(root / "jsonl"), **more}


def jsonl_rows(root: Path) -> list[Row]:
    files = sorted((root / "jsonl").rglob("part-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def published_rows(table: pa.Table, plan: str = "p" * 64) -> AnsweredRows:
    """The rows of a table as those of a run that is being published."""

    def read() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches()

    return AnsweredRows(plan, "key", "job", len(table), table.schema, read)


# By format: what makes the target's fields, and what reads its rows.
TARGETS: dict[str, tuple[Callable[..., Row], Callable[[Path], list[Row]]]] = {
    "delta": (delta, delta_rows),
    "iceberg": (iceberg, iceberg_rows),
    "sql": (sql, sql_rows),
    "lance": (lance, lance_rows),
    "parquet": (parquet, parquet_rows),
    "jsonl": (jsonl, jsonl_rows),
}
