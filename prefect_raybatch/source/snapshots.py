"""Copies inputs that cannot be read in place, by streaming: memory does not grow with the input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from prefect_raybatch import cpu_limit
from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.checks import is_web
from prefect_raybatch.job.openai_batch import BATCH_FORMAT
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.source import cuts, side_copies, streams
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape, check_columns
from prefect_raybatch.source.copies import Blocks, Chosen, copy_tables
from prefect_raybatch.source.csv_text import csv_tables, delimiter_of, detect_csv_options
from prefect_raybatch.source.cuts import Everywhere, Stretch, cut_csv, cut_lines
from prefect_raybatch.source.declared_types import (
    check_type_columns,
    digits_kept,
    typed_columns,
    with_types,
)
from prefect_raybatch.source.fetched_parquet import parquet_rows, parquet_tables
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.find import File, Inventory, ending, find, some, table_format
from prefect_raybatch.source.hive import add_columns
from prefect_raybatch.source.ipc_files import arrow_rows, arrow_tables
from prefect_raybatch.source.json_arrays import array_blocks, is_array
from prefect_raybatch.source.json_lines import json_tables
from prefect_raybatch.source.openai_batch import request_tables
from prefect_raybatch.source.row_sample import sample_of
from prefect_raybatch.source.side_copies import (
    NotSideBySide,
    ShareCopier,
    copy_shares,
    in_threads,
    shares_of,
)
from prefect_raybatch.source.snapshot_writer import conform
from prefect_raybatch.source.tables import copying
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import FileInfo, Store, is_remote, read_ahead
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

STATS = 16  # files looked up at once
GUESS_FILES = 8  # about so many files' first blocks are read before the copy


def snapshot(
    source: ReadSpec, run_store: Store, attempt: str, everywhere: Everywheres | None = None
) -> Inventory:
    """Copy input that cannot be read in place to Parquet in `_raybatch/input/ATTEMPT-UUID/`.

    Files are copied in parallel, by default in threads of this process. `everywhere(size, remote)`
    chooses where instead: `size` is the bytes of the input, `remote` whether other nodes can read
    it. Rows, their order and types are those of a sequential copy, which is used with `limit` or
    `sample`, for files over http(s) and for small inputs.

    The URIs of the inventory are relative to `run_store`. Types come from the values: CSV cells are
    int64, float64, bool or string, whichever is the narrowest that reproduces each value as written
    (so 02139 stays text), and an empty unquoted cell is null; a JSON key missing in a line is null.
    If a later value needs a wider type, the copy starts again with it.

    Raises SourceError (file, line or column, remedy), ConfigError for an unknown column, and the
    stores' errors. Whatever was written before an error belongs to no plan.
    """
    if (table := table_format(source)) is not None:
        return copying.snapshot_of(table, source, run_store, attempt)
    kind, files = _find_nonempty(source)
    types = typed_columns(kind, source, (file.values for file in files))
    known: dict[str, None] = {}
    reads, chosen = _reads(source)
    pushed = None if chosen is None else chosen.filter

    reader = partial(_tables, kind, source=reads, types=types, pushed=pushed)
    made = None
    if source.most_rows is None and not any(is_web(file.uri) for file in files):
        typing = _typing(kind, types)
        copier = ShareCopier(
            reader, run_store, attempt, chosen, *typing, _read_as(kind, source, types)
        )
        where = everywhere or in_this_process
        made = _side_by_side(kind, files, reads, types, copier, known, where)

    def blocks() -> Blocks:
        for file in files:
            for table in reader(file, known=known):
                yield file.uri, table

    if made is None:
        shape = _shape(kind, reads.columns, types)
        made = copy_tables(
            *(blocks, shape, run_store, attempt, source.limit, kind, chosen),
            sample=sample_of(source),
        )
    if not made.rows:
        raise _without_rows(kind, files, bool(source.filter))
    check_columns(source.columns, list(known), "the input")
    check_type_columns(source.types, known)
    _check_unchanged(files)
    return replace(made, table=_by_web(kind, files))


def _find_nonempty(source: ReadSpec) -> tuple[str, list[File]]:
    """Return format and files like `find`, but raise SourceError for an empty file too."""
    kind, files = find(source)
    for file in files:
        if file.info.size == 0:
            raise SourceError(f"{file.uri} is empty (0 bytes). Write it again or remove it")
    return kind, files


def _without_rows(kind: str, files: Sequence[File], filtered: bool = False) -> SourceError:
    if filtered:
        return SourceError(f"source.filter: no row of {some(files)} matches. Change the filter")
    header = " after the header" if kind == "csv" else ""
    return SourceError(f"source.uri: no rows{header} in {some(files)}. Check the files")


Everywheres = Callable[[int, bool], AbstractContextManager[Everywhere]]


@contextmanager
def in_this_process(size: int, remote: bool) -> Iterator[Everywhere]:
    """Provide an `Everywhere` (a parallel map) with a thread for each CPU, more for `remote` files.

    The default of `snapshot`; `size` is not used.
    """
    yield in_threads(cpu_limit.usable_cpus(), remote)


def _side_by_side(
    kind: str,
    files: Sequence[File],
    reads: ReadSpec,
    types: Mapping[str, pa.DataType],
    copier: ShareCopier,
    known: dict[str, None],
    everywhere: Everywheres,
) -> Inventory | None:
    """Copy the files as parallel shares; return None if they must be copied sequentially.

    Inputs that are small or consist of a single share must be copied sequentially. The same is true
    if the parts of a file have different types, although all its rows are valid. Raises the errors
    of `snapshot`.
    """
    size = sum(file.info.size for file in files)
    if size <= cuts.CUT_BYTES and len(files) <= side_copies.SHARE_FILES:
        return None
    remote = all(is_remote(file.store.uri) for file in files)
    with everywhere(size, remote) as apart:

        def stretches(file: File) -> Sequence[Stretch]:
            if kind == "csv":
                return cut_csv(file, reads.csv, delimiter_of(file, reads.csv), apart)
            return cut_lines(file) if kind == "jsonl" else [Stretch(file)]

        shares = list(shares_of(files, stretches))
        if len(shares) < 2:
            return None
        guess = _guess(kind, files, reads, types)
        shape = _shape(kind, reads.columns, types)
        try:
            return copy_shares(shares, copier, shape, guess, apart, known, kind)
        except NotSideBySide as error:
            for _ in copier.reader(error.file, known={}):
                pass  # raises the error, if there is one, with the right row
            log.info(
                "Copying %s in one piece, because its parts have different types", error.file.uri
            )
            return None


def _guess(
    kind: str, files: Sequence[File], reads: ReadSpec, types: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """Return likely types of columns, from the first blocks of some files.

    `types` are the types known beforehand. Stops at the first error, such as incompatible types,
    and returns the types found until then.
    """
    shape = _shape(kind, reads.columns, types)
    with suppress(RayBatchError):
        for number in sorted({i * (len(files) - 1) // GUESS_FILES for i in range(GUESS_FILES + 1)}):
            file = files[number]
            head = cuts.beginning(file) if kind in ("csv", "jsonl") else file
            table = next(_tables(kind, head, reads, {}, types), None)
            if table is not None:
                shape.see(file.uri, table)
    return shape.columns


def peek(source: ReadSpec) -> Inventory:
    """Estimate the inventory that `snapshot` would return, from the first block; write nothing.

    Rows are estimated from the sizes of the files (never more than `limit` or `sample`), types may
    still widen. Raises the errors of `snapshot` for faults in that block.
    """
    if (table := table_format(source)) is not None:
        return copying.estimate_inventory(table, source)
    kind, files = _find_nonempty(source)
    types = typed_columns(kind, source, (file.values for file in files))
    reads, wanted = _reads(source)
    shape = _shape(kind, reads.columns, types)
    known: dict[str, None] = {}
    for first in files:
        table = next(_tables(kind, first, reads, known, types), None)
        if table is not None and table.num_rows:
            break
    else:
        raise _without_rows(kind, files)
    shape.see(first.uri, table)
    check_columns(source.columns, list(known), first.uri)
    check_type_columns(source.types, known)
    schema = written(shape.schema)
    fits = _fitting(kind, wanted, table, schema).num_rows / table.num_rows
    stored = _stored_row_bytes(kind, first)
    chosen, left = [], source.most_rows
    whole = (  # the block is the file
        len(files) == 1
        and kind in ("csv", "jsonl", BATCH_FORMAT)
        and files[0].info.size <= streams.BLOCK_BYTES
        and not ending(files[0].info.path)[1]
    )
    for file in files:
        rows = table.num_rows if whole else max(1, round(file.info.size / stored))
        rows = max(1, round(rows * fits))
        rows = rows if left is None else min(rows, left)
        chosen.append(file.input(rows))
        left = None if left is None else left - rows
        if left == 0:
            break
    schema = schema if wanted is None else wanted.schema(schema)
    row_bytes = conform(table, schema).nbytes / table.num_rows
    return Inventory(tuple(chosen), schema, row_bytes, kind, guessed=not whole and left != 0)


def detect_csv(source: ReadSpec) -> tuple[dict[str, Any], bool]:
    """Detect ({field of source.csv: value}, whether the encoding is only a guess) for CSV input.

    Both come from the first file. ({}, False) if the source is not CSV. Raises the errors
    of `detect_format`.
    """
    if table_format(source) is None:
        kind, files = find(source)
        if kind == "csv":
            return detect_csv_options(files[0], source.csv)
    return {}, False


def heads(source: ReadSpec, most: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield (uri, matching rows of the first block) for up to `most` files, spread over all.

    The rows have the types inferred from their block; without a filter all rows match. A file
    without rows is left out. A table gives one block. Raises the errors of `peek`.
    """
    if (table := table_format(source)) is not None:
        yield from copying.head_of(table, source)
        return
    kind, files = find(source)
    types = typed_columns(kind, source, (file.values for file in files))
    reads, wanted = _reads(source)
    chosen = {i * (len(files) - 1) // max(1, most - 1) for i in range(most)}
    for number in sorted(chosen) if len(files) > most else range(len(files)):
        file = files[number]
        shape = _shape(kind, reads.columns, types)
        table = next(_tables(kind, file, reads, {}, types), None)
        if table is not None and table.num_rows:
            shape.see(file.uri, table)
            schema = written(shape.schema)
            table = _fitting(kind, wanted, table, schema)
            yield file.uri, conform(table, schema if wanted is None else wanted.schema(schema))


def _reads(source: ReadSpec) -> tuple[ReadSpec, Chosen | None]:
    """Return (source to read, rows and columns to write).

    The source to read also has the columns that only the filter needs. Without a filter, the rows
    and columns to write are None, which means everything that is read.
    """
    if source.filter is None:
        return source, None
    filter = Filter(source.filter)
    if source.columns is None:
        return source, Chosen(filter)
    more = list(dict.fromkeys([*source.columns, *filter.columns]))
    return replace(source, columns=tuple(more)), Chosen(filter, source.columns)


def _fitting(kind: str, wanted: Chosen | None, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows of a file's first block that match the filter of `wanted` (None: all rows).

    In CSV and JSON, returns all rows if the filter does not fit the types, because later rows may
    still change the types. In other formats, raises ConfigError. Raises it in CSV as well if the
    file lacks a column of the filter.
    """
    if wanted is None:
        return table
    try:
        return wanted.rows(table, schema)
    except ConfigError:
        absent = kind == "csv" and not set(wanted.filter.columns) <= {*schema.names}
        if absent or kind not in ("csv", "jsonl"):
            raise
        return table


def _stored_row_bytes(kind: str, file: File) -> float:
    """Return the mean bytes per row in the file, as stored (compressed).

    Estimated from the first block of a text file, else from the number of rows in the file.
    """
    if kind in ("arrow", "parquet"):
        count = arrow_rows(file) if kind == "arrow" else parquet_rows(file)
        return file.info.size / max(1, count)
    with file.store.open(file.info.path) as handle:
        data = handle.read(streams.BLOCK_BYTES // 8)
    compression = ending(file.info.path)[1]
    size = len(data)
    if compression:
        read = pa.BufferReader(data)
        stream = pa.CompressedInputStream(read, compression)
        data = b""
        with suppress(OSError):  # the sample ends within a compressed block
            while len(data) < streams.BLOCK_BYTES and (part := stream.read(1 << 16)):
                data += part
        size = min(size, read.tell())
    if kind == "jsonl" and is_array(file):  # often all in one line
        block = next(array_blocks(file), (1, b"\n"))[1]
        return size / max(1, len(data)) * len(block) / block.count(b"\n")
    return size / max(1, data.count(b"\n"))


def _tables(
    kind: str,
    file: File,
    source: ReadSpec,
    known: dict[str, None],
    types: Mapping[str, pa.DataType],
    pushed: Filter | None = None,
) -> Iterator[pa.Table]:
    """Yield blocks of a file with the columns of its path; add names of all columns to `known`.

    `types` are the types of columns whose type is known before any value is read. Rows that do not
    match `pushed` may be left out.
    """
    columns = source.columns
    told = [name for name, _ in file.values]
    own = {name: kind for name, kind in types.items() if name not in told}
    check_columns(None, [name for name in told if name in (columns or told)], file.uri)
    if kind == "csv":
        tables = csv_tables(file, columns, known, source.csv)
    elif kind == "parquet":
        tables = parquet_tables(file, columns, known, pushed)
    elif kind == BATCH_FORMAT:
        tables = request_tables(file, columns, known, source.served_as)
    elif kind == "jsonl":
        tables = json_tables(file, columns, known, digits_kept(own))
    else:
        tables = arrow_tables(file, columns, known)
    try:
        for table in tables:
            known.update(dict.fromkeys(told))
            table = with_types(table, own, file.uri)
            yield add_columns(table, file.uri, file.values, types, columns) if told else table
    except ConfigError as error:
        for name in Filter(source.filter).columns if source.filter else ():
            if f"no column {name!r}" in str(error):  # read for the filter
                text = str(error).replace("source.columns", "source.filter", 1)
                raise ConfigError(text) from None
        raise


def _typing(kind: str, types: Collection[str]) -> tuple[bool, bool, frozenset[str]]:
    """Return (text, union, typed) of a `Shape` for files of format `kind`."""
    return kind == "csv", kind in ("csv", "jsonl"), frozenset(types)


def _read_as(kind: str, source: ReadSpec, types: Mapping[str, pa.DataType]) -> str:
    """Return text that identifies the read settings and the code version; `copy_key` hashes it."""
    named = sorted((name, str(found)) for name, found in types.items())
    chosen = [source.uris, source.columns, source.limit, source.filter, source.served_as]
    csv = source.csv.model_dump(mode="json")
    return dump([code_version(), kind, chosen, csv, dict(source.types), named]).decode()


def _shape(kind: str, columns: Sequence[str] | None, types: Collection[str]) -> Shape:
    text, union, typed = _typing(kind, types)
    return Shape(kind != "jsonl", text, union, columns or (), typed)


def _by_web(kind: str, files: Sequence[File]) -> dict[str, str] | None:
    """Return `Plan.table` for files fetched over http(s): their format, URLs, ETags and sizes.

    None if no file was fetched.
    """
    found = [file for file in files if is_web(file.uri)]
    if not found:
        return None
    told = [f"{f.info.etag or 'no ETag'}, {counted(f.info.size, 'byte')}" for f in found]
    uris = " ".join(file.uri for file in found)
    return {"format": kind, "uri": uris, "id": uris, "version": "; ".join(told)}


def _check_unchanged(files: Sequence[File]) -> None:
    def look(file: File) -> FileInfo:
        try:
            return file.store.stat(file.info.path)
        except FileNotFoundError:
            raise SourceError(
                f"{file.uri} was deleted while it was being copied. Restore it, or start again "
                "without it"
            ) from None

    for file, now in zip(files, read_ahead(look, files, STATS, STATS), strict=True):
        # The change time cannot be set back. A new link or mode changes it too, but what was read
        # cannot be compared any more, and to begin the copy anew costs little.
        if now != file.info or now.ctime_ns != file.info.ctime_ns:
            raise SourceError(
                f"{file.uri} changed while it was being copied. Start again when it is complete"
            )


def snapshot_tables(tables: Callable[[], Blocks], run_store: Store, attempt: str) -> Inventory:
    """Copy tables that all have the same schema to Parquet; return the inventory.

    Without rows, the inventory has no files. Each call of `tables` yields (origin, rows) of all
    tables from the start; the origin is text for error messages.
    """
    return copy_tables(tables, Shape(), run_store, attempt, None, "parquet")
