"""CSV: blocks of text columns, and what is said of broken files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.source import streams
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.find import File
from prefect_raybatch.source.streams import Raw, check_encoding, not_utf8, one_line, open_bytes
from prefect_raybatch.words import counted

_RAGGED = re.compile(r"Expected (\d+) columns, got (\d+)")


def csv_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """Blocks of a CSV file with all columns as text; an empty unquoted cell is null.

    Of `columns` those that the path tells may be lacking; without any other, all are given.
    """
    import pyarrow.csv as pc

    delimiter = "\t" if ".tsv" in file.info.path.lower() else ","
    read = pc.ReadOptions(block_size=streams.BLOCK_BYTES)
    # No handler for rows of another width: pyarrow would decode each as UTF-8 for it, and print
    # what goes wrong with that past every error.
    parse = pc.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        check_encoding(file)
        with open_bytes(file) as stream:
            header = pc.open_csv(stream, read, parse).schema.names
        # pandas writes its index without a name; this is what it calls it when it reads.
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        told = {name for name, _ in file.values} - {*names}
        chosen = check_columns([c for c in columns or () if c not in told], names, file.uri)
        known.update(dict.fromkeys(names))
        convert = pc.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            include_columns=[header[names.index(name)] for name in chosen],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
        )
        with open_bytes(file) as stream:
            for batch in pc.open_csv(stream, read, parse, convert):
                yield pa.Table.from_batches([batch]).rename_columns(chosen)
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(_explain_csv(file, delimiter, error)) from None


def _explain_csv(file: File, delimiter: str, error: Exception) -> str:
    text = str(error)
    ragged = _RAGGED.search(text)
    if ragged:
        line, found = _find_ragged(file, delimiter, int(ragged[1]))
        return (
            f"{file.uri}{f', line {line}' if line else ''}: "
            f"{counted(found or int(ragged[2]), 'column')} where the header has {ragged[1]}; put "
            f"values that hold {delimiter!r} in double quotes, or mend the line"
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
