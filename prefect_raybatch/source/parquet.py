"""Lists Parquet files that are read in place, with their rows, types and sizes from the footers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.source.arrow_types import check_carried, plain_type
from prefect_raybatch.source.bounds import (
    check_columns_bound,
    check_expansion_bound,
    check_rows_bound,
    declared_bytes,
    footer_fault,
)
from prefect_raybatch.source.columns import Shape, check_columns
from prefect_raybatch.source.declared_types import typed_columns
from prefect_raybatch.source.find import File, Inventory, Weights, find, some
from prefect_raybatch.source.hive import Values, agrees, differs
from prefect_raybatch.source.int96 import open_parquet
from prefect_raybatch.source.streams import one_line
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import footer_digest, is_remote, read_ahead

BATCH_ROWS = 16_384  # rows decoded at a time; fewer if rows are large
BATCH_BYTES = 32 << 20
FOOTER_THREADS = 16
FOOTERS_AHEAD = 64  # footers read before they are needed; with a limit, some never are


def batch_rows(row_bytes: float) -> int:
    """Return how many rows of `row_bytes` bytes to decode at a time."""
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(row_bytes, 1.0))))


def inventory(source: ReadSpec) -> Inventory:
    """Return the inventory of Parquet files that are read in place, from their footers.

    `limit` and `columns` of `source` apply; the footers of files beyond the limit are not read.
    FOOTER_THREADS threads read footers. Raises SourceError that names a missing, unreadable or
    incompatible file, ConfigError for an unknown column, and the store's errors.
    """
    kind, files = find(source)
    if kind != "parquet":
        raise SourceError(
            f"{files[0].uri} is {kind}, not Parquet: it must be read through a snapshot"
        )
    shape, chosen, row_bytes = Shape(), [], 0.0
    weights: list[tuple[int, int]] = []
    hive = typed_columns(kind, source, (file.values for file in files))
    for file, footer, rows in _footers(files, source.columns, source.limit, hive):
        if rows:  # an empty table often has no real types
            shape.see_types(file.uri, footer.types)
        row_bytes = max(row_bytes, footer.row_bytes)
        chosen.append(file.input(rows, footer.digest, footer.values))
        weights += _first_rows(footer.groups, rows)
    if not any(file.rows for file in chosen):
        raise SourceError(f"source.uri: no rows in {some(files)}. Check the files")
    return Inventory(tuple(chosen), shape.schema, row_bytes, "parquet", weights=tuple(weights))


def _first_rows(groups: Weights, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, bytes) of the row groups that hold the first `rows` rows of a file.

    `groups` are (rows, bytes) of all its row groups. If only some rows of the last group are
    needed, yields their number and their share of the group's bytes.
    """
    for held, size in groups:
        taken = min(held, rows)
        if taken:
            yield taken, size * taken // held
        rows -= taken


def _footers(
    files: Sequence[File],
    columns: Sequence[str] | None,
    limit: int | None,
    hive: Mapping[str, pa.DataType],
) -> Iterator[tuple[File, _Footer, int]]:
    """Yield (file, its footer, rows to read of it) until `limit` rows are reached (None: all).

    `hive` are the types of the columns in paths.
    """
    left = sys.maxsize if limit is None else limit
    footers = read_ahead(
        partial(_footer, columns=columns, hive=hive), files, FOOTER_THREADS, FOOTERS_AHEAD
    )
    for file, footer in zip(files, footers, strict=True):
        rows = min(footer.rows, left)
        left -= rows
        yield file, footer, rows
        if not left:
            return


@dataclass(frozen=True)
class _Footer:
    rows: int
    types: dict[str, pa.DataType]
    row_bytes: float
    digest: str | None  # hash of the footer; None for a remote file
    values: Values  # the chosen columns that only the path supplies
    groups: Weights  # rows and bytes of each row group


def _footer(file: File, columns: Sequence[str] | None, hive: Mapping[str, pa.DataType]) -> _Footer:
    """Read the footer of one file; raise SourceError if the file cannot be used.

    `hive` are the types of the columns in paths.
    """
    try:
        with (
            file.store.open(file.info.path) as handle,
            open_parquet(handle) as parquet,
        ):
            metadata, schema = parquet.metadata, parquet.schema_arrow
            digest = None if is_remote(file.uri) else footer_digest(handle)
    except RayBatchError:
        raise
    except FileNotFoundError:
        raise SourceError(
            f"{file.uri} was deleted while the input was being listed. Restore it, or start again "
            "without it"
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.uri} is not a readable Parquet file ({one_line(error)}). Write it again, "
            "remove it, or set source.format if it has another format"
        ) from None
    check_footer(metadata, file)
    added = [name for name, _ in file.values if name not in schema.names]
    names = check_columns(columns, [*schema.names, *added], file.uri)
    own = pa.schema([schema.field(name) for name in names if name not in added])
    check_types(own, file.uri, SourceError)
    check_columns_bound(own, file.uri)
    check_carried(own, file.uri)
    for name, value in file.values:
        if name in own.names and not _all_are(metadata, own.field(name), value):
            raise SourceError(differs(file.uri, name, value))
    types = {
        name: hive[name] if name in added else plain_type(own.field(name).type) for name in names
    }
    groups = _stored_bytes(metadata, None if columns is None else set(names))
    size, rows = sum(held for _, held in groups), metadata.num_rows
    # Repeated values are stored once, so a row counts at least the fixed widths of its types.
    values = tuple((name, value) for name, value in file.values if name in {*added} & {*names})
    least = sum(_least_bytes(kind) for kind in types.values())
    return _Footer(rows, types, max(size / rows, least) if rows else 0.0, digest, values, groups)


def check_footer(metadata: pq.FileMetaData, file: File) -> None:
    """Raise SourceError if a footer has impossible counts, or counts too high for the file size."""
    if (fault := footer_fault(metadata, file.info.size)) is not None:
        raise SourceError(
            f"{file.uri} is not a readable Parquet file ({fault}). Write it again or remove it"
        )
    check_rows_bound(metadata.num_rows, file.info.size, file.uri)
    check_expansion_bound(declared_bytes(metadata), file.info.size, file.uri)


def _all_are(metadata: pq.FileMetaData, field: pa.Field, value: str | None) -> bool:
    """Return whether statistics of all row groups prove that a column holds only `value`.

    `value` is the column's value in the file's path, as text, e.g. 2024 for year=2024; None: null.
    """
    kind = plain_type(field.type)
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        if not group.num_rows:
            continue
        chunks = (group.column(i) for i in range(metadata.num_columns))
        seen = next((c.statistics for c in chunks if c.path_in_schema == field.name), None)
        if seen is None or not seen.has_null_count:
            return False
        if value is None or seen.null_count:
            if value is not None or seen.null_count != group.num_rows:
                return False
            continue
        try:
            if not seen.has_min_max or not agrees(pa.array([seen.min, seen.max], kind), value):
                return False
        except (pa.ArrowException, TypeError, ValueError):
            return False
    return True


def _stored_bytes(metadata: pq.FileMetaData, names: set[str] | None) -> Weights:
    """Return (rows, uncompressed bytes) of each row group.

    Only top-level columns in `names` count (None: all).
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if names is None:
        return tuple((group.num_rows, group.total_byte_size) for group in groups)
    wanted = [
        i
        for i in range(metadata.num_columns)
        if (path := metadata.schema.column(i).path) in names or path.split(".")[0] in names
    ]
    return tuple(
        (group.num_rows, sum(group.column(i).total_uncompressed_size for i in wanted))
        for group in groups
    )


def _least_bytes(kind: pa.DataType) -> float:
    if pa.types.is_struct(kind):
        return sum(_least_bytes(field.type) for field in kind)
    try:
        return float(kind.bit_width / 8)
    except ValueError:
        return 4.0  # an offset
