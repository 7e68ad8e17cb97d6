"""Inputs and jobs of the trials."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.demo import LABELS, SYSTEM
from prefect_raybatch.demo.customers import companies

from .functions import QUESTION

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
MOST = 1200  # rows of any trial with the real engine


def texts() -> list[str]:
    """The company names that trials ask about."""
    return [name for name, _ in companies(MOST, 11, "all")]


def rows(count: int, engine: str) -> list[dict[str, Any]]:
    """`count` rows; the real engine gets company names, the fast one texts all different."""
    names = texts()
    if engine == "fast":
        return [{"id": i, "text": f"{names[i % MOST]} ({i})"} for i in range(count)]
    return [{"id": i, "text": names[i]} for i in range(count)]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A Parquet file of rows; columns beyond id and text get the type of their values."""
    more = [name for name in rows[0] if name not in SCHEMA.names]
    columns = [pa.array([row[name] for row in rows]) for name in more]
    table = pa.Table.from_pylist(rows, SCHEMA)
    for name, column in zip(more, columns, strict=True):
        table = table.append_column(name, column)
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=200)
    return sink.getvalue()


def csv_text(rows: list[dict[str, Any]]) -> str:
    lines = [f'{row["id"]},"{row["text"]}"' for row in rows]
    return "\n".join(["id,text", *lines]) + "\n"


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def job(which: str, **groups: dict[str, Any]) -> dict[str, Any]:
    """A job for the fast engine or the bundled model."""
    fields: dict[str, Any] = {
        "name": "chaos",
        "prompt": {"template": "{text}"},
        "sampling": {"temperature": 0, "max_tokens": 16},
        "engine": {"model": "demo", "max_model_len": 256, "num_cpus": 0.25},
        "limits": {"max_failed_rows": 0},
        "cluster": {"prepare": {"num_cpus": 1}, "finish": {"num_cpus": 0.15}},
    }
    if which != "fast":
        fields["prompt"] = {
            "system": SYSTEM,
            "template": QUESTION,
        }
        fields["sampling"]["choice"] = list(LABELS)
    for group, given in groups.items():
        fields[group] = {**fields.get(group, {}), **given}
    return fields
