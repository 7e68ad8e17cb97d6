"""Copies rows to a Parquet snapshot, whose types are known only after all rows were read.

A source is copied in pieces: all of it (`copy_tables`), shares of files in parallel
(`side_copies.py`), or the blocks of a dataset (`dataset_copies.py`). `copy_blocks` writes a piece
with the types known so far, and reports the types of its values. A `Shape` merges the types of all
pieces, in their order. The merged types are those of the snapshot. Pieces written with other types
are copied again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.ledger.layout import INPUT
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.find import Inventory, Weights
from prefect_raybatch.source.row_sample import RowSample, SampledNumbers, rows_in_sample
from prefect_raybatch.source.snapshot_writer import SnapshotWriter, conform
from prefect_raybatch.storage import Store

COPY_TRIES = 4  # a second pass knows all types; more are needed only when the input changes

Blocks = Iterable[tuple[str, pa.Table]]  # (which file, some of its rows)
ColumnTypes = dict[str, pa.DataType]


@dataclass(frozen=True)
class Chosen:
    """The part of the input to write: the rows that match `filter`, and `columns` (None: all)."""

    filter: Filter
    columns: Sequence[str] | None = None

    def rows(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return the rows of a table, converted to `schema`, that match the filter.

        Raises ConfigError if the filter does not fit the schema.
        """
        return self.filter.keep(conform(table, schema))

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Return `schema` with only the columns to write."""
        names = schema.names if self.columns is None else self.columns
        return pa.schema([field for field in schema if field.name in names])


class KnownTypes(Protocol):
    """The column types with which an input is copied: interface of three classes.

    `schema` has the types known so far. `Shape` and `TypesSeen` merge the types of each block that
    `see` gets. `SettledTypes` ignores the blocks, because its types are final.
    """

    @property
    def clash(self) -> bool:
        """True once incompatible types were seen."""

    @property
    def schema(self) -> pa.Schema: ...

    def see(self, where: str, table: pa.Table) -> None:
        """Merge the column types of `table`, a block of the file `where`."""


@dataclass(frozen=True)
class SettledTypes:
    """The final column types of a snapshot, which can hold all values of the input."""

    schema: pa.Schema
    clash: bool = False

    def see(self, where: str, table: pa.Table) -> None:
        """Do nothing: the types are final."""


@dataclass(frozen=True)
class Copied:
    """The outcome of copying a piece of the source: all of it, a share of its files, or a block.

    `files` is None if no files were kept: a later value did not fit the types of earlier rows, the
    filter did not fit them (`unfit` says why), or reading failed (`error`). `schema` has types that
    hold all values read. `types` has (file URI, column types) of each file's first block and of
    each block that widened its file's types. `known` are the names of all columns in the files.
    `row_bytes` is an upper estimate of a row's bytes; `weights` are (rows, bytes) of consecutive
    ranges of the rows written. `read` counts the rows read, `kept` those that match the filter.
    `part`: the piece is a part of a file.
    """

    files: tuple[InputFile, ...] | None
    schema: pa.Schema
    types: tuple[tuple[str, ColumnTypes], ...] = ()
    known: tuple[str, ...] = ()
    row_bytes: float = 0.0
    weights: Weights = ()
    read: int = 0  # rows, before the filter
    unfit: ConfigError | None = None  # why the filter does not fit `schema`
    error: RayBatchError | None = None
    kept: int = 0  # rows that the filter lets through
    part: bool = False  # it is part of a file, whose other parts may have wider types

    def under(self, shape: Shape) -> bool:
        """Return whether the piece is final, so that it need not be copied again.

        It is final if it was written with the merged types of `shape`. If it is a part of a CSV
        file, the types inferred from its values must also equal those of the whole file.
        """
        if self.unfit is not None or self.files is None or self.schema != written(shape.schema):
            return False
        last: dict[str, ColumnTypes] = {}
        for uri, types in self.types if self.part and shape.text else ():
            last.setdefault(uri, {}).update(types)
        return all(
            pa.types.is_null(kind) or kind == (shape.types_of(uri) or {})[name]
            for uri, kinds in last.items()
            for name, kind in kinds.items()
        )


def copy_blocks(
    blocks: Blocks,
    types: KnownTypes,
    store: Store,
    attempt: str,
    chosen: Chosen | None = None,
    limit: int | None = None,
    keep_error: bool = False,
    numbers: SampledNumbers | None = None,
) -> Copied:
    """Write the `chosen` rows of blocks (None: all), up to `limit`, as files with one schema.

    With `numbers`, writes only the rows with these numbers, counted from 0 among the chosen ones.
    `attempt` becomes part of the files' names.

    If a block needs another schema than earlier rows, no file is kept, but the other blocks are
    still read, so that the types of all values are known for the next copy. With `keep_error`, an
    error of reading is returned in the outcome, not raised.
    """
    parts = SnapshotWriter(store, f"{INPUT}/{attempt}-{uuid.uuid4()}")
    read, kept, unfit, error = 0, 0, None, None
    try:
        try:
            read, kept, unfit = _write(blocks, types, parts, chosen, limit, numbers)
        except RayBatchError as fault:
            if not keep_error:
                raise
            error = fault
        files = None if error or unfit else parts.close()
    except BaseException:
        parts.abandon()
        raise
    if files is None:
        parts.abandon()
    schema, weights = written(types.schema), tuple(parts.weights)
    return Copied(files, schema, (), (), parts.row_bytes, weights, read, unfit, error, kept)


def _write(
    blocks: Blocks,
    types: KnownTypes,
    parts: SnapshotWriter,
    chosen: Chosen | None,
    limit: int | None,
    numbers: SampledNumbers | None,
) -> tuple[int, int, ConfigError | None]:
    """Read all blocks once and write them; return (rows read, rows chosen, error of the filter).

    The error is None if the filter fits the types.
    """
    read, kept, unfit, first, faulty = 0, 0, None, None, None
    for where, table in blocks:
        if limit is not None and chosen is None:
            table = table.slice(0, limit - kept)
        types.see(where, table)
        read += table.num_rows
        schema = types.schema
        if table.num_rows:
            first = first or written(schema)
        if types.clash or (first and written(schema) != first):  # earlier rows have other types
            parts.abandon()
        if chosen is not None:
            try:
                table = chosen.rows(table, written(schema))
            except ConfigError as fault:
                unfit, faulty = fault, written(schema)
                parts.abandon()
                continue
            schema = chosen.schema(schema)
            table = table if limit is None else table.slice(0, limit - kept)
        first_number, kept = kept, kept + table.num_rows
        parts.write(
            table if numbers is None else rows_in_sample(table, first_number, numbers), schema
        )
        if kept == limit:
            break
    # A later value may have changed the types to some that the filter fits.
    return read, kept, unfit if faulty == written(types.schema) else None


def copy_until_settled(
    pieces: int, shape: Shape, copy: Callable[[Sequence[int]], Iterable[tuple[int, Copied]]]
) -> list[Copied]:
    """Copy the pieces of a source until all are written with the same, merged types.

    `pieces` is the number of pieces; they are numbered from 0. `copy` is called in each round with
    the numbers of the pieces to copy. It writes them with the types known so far, merges the types
    of their values into `shape`, and yields (number, outcome) of each. Two rounds are enough,
    unless the input changes meanwhile.

    Returns the outcomes in the order of the pieces. Raises ConfigError if the filter does not fit
    the types, SourceError after COPY_TRIES rounds.
    """
    made: dict[int, Copied] = {}
    for _ in range(COPY_TRIES):
        made |= copy([n for n in range(pieces) if n not in made or not made[n].under(shape)])
        copied = [made[number] for number in range(pieces)]
        schema = written(shape.schema)
        if all(one.under(shape) for one in copied):
            return copied
        for one in copied:
            if one.unfit is not None and one.schema == schema:  # no type is left that could change
                raise one.unfit
    raise SourceError(
        "source.uri: the input keeps changing while it is being copied. Start again when nothing "
        "writes to it"
    )


def inventory_of(
    copied: Sequence[Copied], schema: pa.Schema, kind: str, chosen: Chosen | None = None
) -> Inventory:
    """Return the inventory of the snapshot that consists of the files of the `copied` pieces.

    `schema` has the columns that were read, before `chosen` selects those that were written; `kind`
    is the source's format. Raises SourceError if rows were read, but have no columns.
    """
    if not len(schema) and any(one.read for one in copied):
        raise SourceError("source.uri: the rows have no columns. Check the files")
    return Inventory(
        tuple(file for one in copied for file in one.files or ()),
        schema if chosen is None else chosen.schema(schema),
        max((one.row_bytes for one in copied), default=0.0),
        kind,
        weights=tuple(pair for one in copied for pair in one.weights),
    )


def copy_tables(
    blocks: Callable[[], Blocks],
    shape: Shape,
    store: Store,
    attempt: str,
    limit: int | None,
    kind: str,
    chosen: Chosen | None = None,
    sample: RowSample | None = None,
) -> Inventory:
    """Copy the `chosen` rows of all blocks (None: all) as one piece; return the inventory.

    Each call of `blocks` yields all blocks from the start; `kind` is the source's format. With a
    `sample`, the first pass only counts the rows. The copy is repeated if the types of the values,
    or the number of rows to sample from, turn out to differ from what it assumed.
    """
    counted = 0

    def copy(_: Sequence[int]) -> list[tuple[int, Copied]]:
        nonlocal counted
        numbers = None if sample is None else sample.numbers(counted)
        made = copy_blocks(blocks(), shape, store, attempt, chosen, limit, numbers=numbers)
        if sample is not None and made.kept != counted:
            counted, made = made.kept, replace(made, files=None)
        return [(0, made)]

    return inventory_of(copy_until_settled(1, shape, copy), written(shape.schema), kind, chosen)
