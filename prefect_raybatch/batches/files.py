"""Turns a batch file into the job of a run, and the finished run into the output file."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.batches.outputs import output_lines
from prefect_raybatch.batches.requests import REQUEST_COLUMNS, rows_of_requests
from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.open_run import open_run
from prefect_raybatch.source.find import File, find
from prefect_raybatch.source.json_lines import line_blocks
from prefect_raybatch.storage import open_store

SCHEMA = pa.schema(
    [(name, pa.int64() if name == "line" else pa.string()) for name in REQUEST_COLUMNS]
)
_ROWS_AT_ONCE = 4096  # lines that are held in memory while a file is read
_KEY_LENGTH = 24  # hex digits of the job's fingerprint that name a run


def batch_fields(
    source: str,
    output: str,
    model: str,
    served_as: Sequence[str],
    max_tokens: int,
) -> dict[str, Any]:
    """Store the requests of a batch file beside the output file; return the fields of its job.

    The stored file is named by its content, so the same call makes the same job.
    Raises `ConfigError`, `SourceError` and the errors of the stores.
    """
    if output.startswith(("http://", "https://")):
        raise ConfigError("-o: a URL cannot be written. Name a local or s3:// file")
    place = f"{output}.run"
    requests = _stored(source, place, [model, *served_as])
    return {
        "name": "batch",
        "source": {"uri": requests},
        "prompt": {"function": "prefect_raybatch.batches.requests:chat_request"},
        "sampling": {"temperature": 1.0, "max_tokens": max_tokens},
        "engine": {"model": model},
        "limits": {"max_failed_fraction": 1.0},
        "output": {
            "uri": place,
            "columns": ["custom_id", "body"],
            "extras": ["finish_reason", "prompt_tokens", "output_tokens"],
            "on_cut_off": "keep",
        },
    }


def batch_key(fingerprint: str) -> str:
    """Return the key of the run of a batch file, from its job's fingerprint."""
    return f"batch-{fingerprint[:_KEY_LENGTH]}"


def write_output(output: str, report: RunReport, model: str, number: str) -> None:
    """Write the output file of a finished run, whole or not at all.

    `number` names the column of row numbers.
    """
    run, folder, name = open_run(report.run), *_split(output)
    plan = need_plan(Ledger(open_store(report.run)))
    lines = output_lines(
        run,
        plan.hash,
        model,
        int(datetime.fromisoformat(plan.created).timestamp()),
        number,
    )
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(scratch) / "output.jsonl"
        with local.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
        open_store(folder).put_file(name, local)


def _split(output: str) -> tuple[str, str]:
    folder, slash, name = output.rpartition("/")
    if not name or (slash and folder.endswith(":/")):
        raise ConfigError(f"-o {output!r} is not a file. Name one, such as output.jsonl")
    return (folder or "/") if slash else ".", name


def _stored(source: str, place: str, models: Sequence[str]) -> str:
    """Store the requests of a batch file as Parquet, named by its content; return the URI."""
    _, files = find(read_spec(Source(uri=source, format="jsonl")))
    if len(files) != 1:
        raise SourceError(f"-i {source!r} has {len(files)} files. Name one file")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as scratch:
        local, rows = Path(scratch) / "requests.parquet", 0
        with pq.ParquetWriter(local, SCHEMA, compression="zstd") as writer:
            requests = rows_of_requests(_lines(files[0]), models)
            while block := list(islice(requests, _ROWS_AT_ONCE)):
                columns = zip(*block, strict=True)
                arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
                writer.write_table(pa.table(arrays, schema=SCHEMA))
                digest.update(repr(block).encode("utf-8", "backslashreplace"))
                rows += len(block)
        if not rows:
            raise SourceError(f"{files[0].uri} has no requests. Write one object per line")
        store, name = open_store(f"{place}/inputs"), f"{digest.hexdigest()}.parquet"
        store.put_file_if_absent(name, local)
        return f"{store.uri}/{name}"


def _lines(file: File) -> Iterator[tuple[int, bytes]]:
    for first, block in line_blocks(file):
        yield from enumerate(block.split(b"\n"), first)
