"""Compares the files of a result with what finalize recorded; names changed files and rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import row_sums_path
from prefect_raybatch.ledger.records import Part, digest
from prefect_raybatch.ledger.success import strays
from prefect_raybatch.result.row_sums import decode, row_sums
from prefect_raybatch.storage import Store

MOST_ROWS_NAMED = 10  # rows of a file named one by one
NUMBERS_AT_ONCE = 1 << 20

Fault = Callable[[str], None]
TakeRows = Callable[[np.ndarray], None]


def present(store: Store, folder: str, parts: Mapping[str, Part], fault: Fault) -> list[str]:
    """Return the sorted paths of the files that the result should have in `folder` and has.

    `parts` is {path: part} of all files of the result. `fault` is called with a message for each of
    these files that is missing. It is also called for each other file in the folder that readers of
    the folder would read.
    """
    there = {info.path for info in store.list(folder)}
    named = {path: part for path, part in parts.items() if path.startswith(f"{folder}/")}
    for path in sorted(set(named) - there):
        fault(f"{path}: the file is missing ({_held(named[path])})")
    for path in strays(there, named):
        fault(f"{path}: _SUCCESS does not name this file, but readers of the folder would read it")
    return sorted(there & set(named))


def check_file(store: Store, part: Part, row_number: str, take: TakeRows, fault: Fault) -> int:
    """Compare a file of the result with its record `part`; return its number of rows.

    `fault` is called with a message for each difference. `take` is called with the file's row
    numbers in ascending batches. An intact file is not loaded into memory as a whole. For a file
    that is unreadable or has no valid column `row_number`, returns the number of rows that were
    passed to `take`. Raises FileNotFoundError if the file is missing.
    """
    with store.open(part.path) as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        same = checksum == part.sha256
        if same:
            _check_sums(store, part, fault)
        taken = 0
        try:
            stream.seek(0)
            if same:
                taken, whole = _take_ascending(stream, row_number, take)
                if whole:
                    return taken
            stream.seek(0)
            columns = [row_number] if same else None
            table = pq.ParquetFile(stream, pre_buffer=False).read(columns, use_threads=False)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            fault(
                f"{part.path}: its contents are not what finalize wrote ({_held(part)}), and it is "
                f"not readable Parquet: {error}"
            )
            return taken
    if (
        row_number not in table.column_names
        or table[row_number].null_count
        or not pa.types.is_integer(table.schema.field(row_number).type)
    ):
        fault(f"{part.path}: column {row_number} is missing, not of integers, or has nulls")
        return taken
    rows: np.ndarray = table[row_number].to_numpy().astype(np.int64)
    if not same:
        sums = row_sums(table.drop_columns([row_number]))
        _compare(store, part, sums, rows, fault)
    _check_order(part.path, rows, fault)
    take(np.setdiff1d(rows, rows[:taken]))
    return len(rows)


def _take_ascending(stream: BinaryIO, row_number: str, take: TakeRows) -> tuple[int, bool]:
    """Pass a file's row numbers to `take` in batches, as long as they are ascending and not null.

    Stops before the first batch with a fault. Returns (how many row numbers were passed, whether
    these are all).
    """
    taken, last = 0, None
    with pq.ParquetFile(stream, pre_buffer=False) as file:
        schema = file.schema_arrow
        if row_number not in schema.names or not pa.types.is_integer(schema.field(row_number).type):
            return 0, False
        for batch in file.iter_batches(NUMBERS_AT_ONCE, columns=[row_number], use_threads=False):
            column = batch.column(0)
            if column.null_count:
                return taken, False
            rows = column.to_numpy().astype(np.int64)
            joined = rows if last is None else np.append(last, rows)
            if (np.diff(joined) <= 0).any():
                return taken, False
            take(rows)
            taken += len(rows)
            last = rows[-1:] if len(rows) else last
    return taken, True


def _compare(store: Store, part: Part, found: np.ndarray, rows: np.ndarray, fault: Fault) -> None:
    """Call `fault` with a message about a changed file, which names the rows that changed.

    Without row checksums it names only the file. `rows` are the row numbers in the file, `found`
    the checksums of these rows.
    """
    text = f"{part.path}: its contents are not what finalize wrote"
    known = _known(store, part, fault)
    if known is None:
        fault(text)
        return
    numbers, sums = known
    changed = _changed(numbers, sums, rows, found)
    missing, added = np.setdiff1d(numbers, rows), np.setdiff1d(rows, numbers)
    names = [
        f"{what} {rows_text(which)}"
        for what, which in (("changed:", changed), ("missing:", missing), ("added:", added))
        if len(which)
    ]
    fault(f"{text}; {'; '.join(names) or 'the rows are the same: the file was rewritten'}")


def _known(store: Store, part: Part, fault: Fault) -> tuple[np.ndarray, np.ndarray] | None:
    if part.sums is None:
        return None
    path = row_sums_path(part.path)
    try:
        data = store.read(path)
        if digest(data) != part.sums:
            raise CorruptRun(f"{path}: its contents are not what finalize wrote")
        return decode(data, part.rows, path)
    except FileNotFoundError:
        fault(f"{path}: the file is missing, so changed rows cannot be named")
    except CorruptRun as error:
        fault(str(error))
    return None


def _check_sums(store: Store, part: Part, fault: Fault) -> None:
    """Call `fault` if the row checksums of an intact file are missing or changed."""
    if part.sums is None:
        return
    path = row_sums_path(part.path)
    try:
        if digest(store.read(path)) != part.sums:
            fault(f"{path}: its contents are not what finalize wrote")
    except FileNotFoundError:
        fault(f"{path}: the file is missing, so later changes of rows could not be located")


def _changed(
    numbers: np.ndarray, sums: np.ndarray, rows: np.ndarray, found: np.ndarray
) -> np.ndarray:
    """Return the row numbers whose checksums differ from the recorded ones.

    `numbers` and `sums` are the recorded row numbers and checksums, `rows` and `found` those of the
    file now. Rows that were removed or added are left out.
    """
    at = np.searchsorted(numbers, rows)
    at[at == len(numbers)] = 0
    known = numbers[at] == rows
    return np.unique(rows[known & (sums[at] != found)])


def _check_order(path: str, rows: np.ndarray, fault: Fault) -> None:
    ordered = np.sort(rows)
    repeated = np.unique(ordered[1:][np.diff(ordered) == 0])
    if len(repeated):
        fault(f"{path}: more than once in this file: {rows_text(repeated)}")
    elif (ordered != rows).any():
        fault(f"{path}: rows are out of order near row {int(rows[1:][np.diff(rows) < 0][0])}")


def rows_text(rows: np.ndarray) -> str:
    """Return row numbers as text, e.g. `row 7`, or `rows 7, 9, 12 and 3 more`."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    text = ", ".join(str(row) for row in rows[:MOST_ROWS_NAMED].tolist())
    more = f" and {len(rows) - MOST_ROWS_NAMED:,} more" if len(rows) > MOST_ROWS_NAMED else ""
    return f"rows {text}{more}"


def _held(part: Part) -> str:
    where = "" if part.first is None else f", from {part.first} to {part.last}"
    return f"it held {part.rows:,} rows{where}"
