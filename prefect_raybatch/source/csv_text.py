"""CSV: blocks of text columns, and what is said of broken files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.source import streams
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.find import File
from prefect_raybatch.source.streams import Raw, not_utf8, one_line, open_bytes
from prefect_raybatch.words import counted


def csv_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """Blocks of a CSV file with all columns as text; an empty unquoted cell is null."""
    import pyarrow.csv as pc

    ragged: list[Any] = []

    def refuse(row: Any) -> str:
        ragged.append(row)
        return "error"

    delimiter = "\t" if ".tsv" in file.info.path.lower() else ","
    read = pc.ReadOptions(block_size=streams.BLOCK_BYTES)
    parse = partial(pc.ParseOptions, delimiter=delimiter, newlines_in_values=True)
    try:
        with open_bytes(file) as stream:
            header = pc.open_csv(
                stream, read_options=read, parse_options=parse(invalid_row_handler=_skip)
            ).schema.names
        # pandas writes its index without a name; this is what it calls it when it reads.
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        chosen = check_columns(columns, names, file.uri)
        known.update(dict.fromkeys(names))
        convert = pc.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            include_columns=[header[names.index(name)] for name in chosen],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
        )
        with open_bytes(file) as stream:
            options = parse(invalid_row_handler=refuse)
            for batch in pc.open_csv(stream, read, options, convert):
                yield pa.Table.from_batches([batch]).rename_columns(chosen)
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(_explain_csv(file, delimiter, error, ragged)) from None


def _skip(_: Any) -> str:
    return "skip"


def _explain_csv(file: File, delimiter: str, error: Exception, ragged: list[Any]) -> str:
    text = str(error)
    if ragged:
        row = ragged[0]
        line, found = _find_ragged(file, delimiter, row.expected_columns)
        return (
            f"{file.uri}, line {line or row.number}: "
            f"{counted(found or row.actual_columns, 'column')} where the header has "
            f"{row.expected_columns}; put values that hold {delimiter!r} in double quotes, or mend "
            "the line"
        )
    if isinstance(error, UnicodeDecodeError) or "UTF8" in text:
        return not_utf8(file)
    if "straddl" in text:
        return (
            f"{file.uri}: a row is longer than {streams.BLOCK_BYTES >> 20} MiB; most likely a "
            "double quote is never closed. Close or double it."
        )
    if "Empty CSV" in text:
        return f"{file.uri}: holds no header line; write it again or remove it"
    return f"{file.uri}: cannot be read as CSV ({one_line(error)})"


def _find_ragged(file: File, delimiter: str, columns: int) -> tuple[int | None, int | None]:
    """Line and columns of the first row of another width; pyarrow counts rows, not lines."""
    with suppress(OSError, csv.Error, RayBatchError, ValueError), open_bytes(file) as stream:
        raw = io.BufferedReader(Raw(stream))
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace", newline="")
        reader, line = csv.reader(text, delimiter=delimiter), 1
        for row in reader:
            if row and len(row) != columns:
                return line, len(row)
            line = reader.line_num + 1
    return None, None
