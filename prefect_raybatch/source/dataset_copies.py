"""Copies a `ray.data.Dataset` to a snapshot in the dataset's own tasks, not on the driver.

The task that computed a block writes it, with the types of its own values, and reports them. Blocks
with types other than the merged ones are read and written again. Small neighbouring blocks are
joined, to avoid many small files. The dataset itself is computed once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source.arrow_types import map_type, written
from prefect_raybatch.source.columns import Shape, check_columns
from prefect_raybatch.source.copies import Copied, SettledTypes, copy_blocks, inventory_of
from prefect_raybatch.source.find import Inventory
from prefect_raybatch.source.snapshots import Everywheres, in_this_process
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    import ray.data

SMALL_BYTES = 8 << 20  # blocks with smaller files are joined with small neighbours
JOINED_BYTES = 64 << 20  # most bytes in the files of blocks that are joined
DATASET = "the dataset"
_RECEIPT = "receipt"


def snapshot_dataset(
    dataset: ray.data.Dataset,
    run_store: Store,
    attempt: str,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    everywhere: Everywheres = in_this_process,
) -> Inventory:
    """Copy a `ray.data.Dataset` to Parquet files in the order of its rows; return their inventory.

    The dataset's tasks write the files, so `run_store` must be reachable from where they run.
    `attempt` becomes part of the files' names. Some files may have to be written again; as in
    `snapshot`, `everywhere` chooses where this happens. Only the first `limit` rows and `columns`
    are copied (None: all). Raises SourceError for columns that cannot be written or that change
    type, ConfigError for an unknown column, and the errors of store and dataset.
    """
    if limit is not None:
        dataset = dataset.limit(limit)
    known = dataset.schema(fetch_if_missing=False)
    if columns is not None and known is not None and set(columns) <= set(known.names):
        dataset = dataset.select_columns(list(columns))
    shape = Shape()
    blocks: list[Copied] = []
    try:
        for block in _written(dataset, run_store, attempt, columns):
            blocks.append(block)
            if block.error is not None:
                raise block.error
            shape.see_types(DATASET, _types(block))
        if not blocks:
            raise SourceError("the dataset has no rows. Check how it is built")
        blocks = _settled(blocks, written(shape.schema), run_store, attempt, everywhere)
    except BaseException:
        _forget(run_store, blocks)
        raise
    return inventory_of(blocks, written(shape.schema), "dataset")


def _written(
    dataset: ray.data.Dataset, store: Store, attempt: str, columns: Sequence[str] | None
) -> Iterator[Copied]:
    """Write the dataset's blocks in its tasks; yield the outcomes of non-empty ones, in order."""
    write: Any = copy_block
    copies: Any = dataset.map_batches(
        write,
        batch_size=None,
        batch_format="pyarrow",
        fn_args=(store, attempt, columns),
    )
    options = copies.context.execution_options
    ordered, options.preserve_order = options.preserve_order, True
    try:
        for receipts in copies.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from map(pickle.loads, receipts[_RECEIPT].to_pylist())
    finally:
        options.preserve_order = ordered


def copy_block(
    table: pa.Table, store: Store, attempt: str, columns: Sequence[str] | None
) -> pa.Table:
    """Write a block in the task that computed it; return a table with the pickled outcome.

    The table has one row, or none for a block without rows.
    """
    made = [pickle.dumps(_copied(table, store, attempt, columns))] if table.num_rows else []
    return pa.table({_RECEIPT: pa.array(made, pa.binary())})


def _copied(table: pa.Table, store: Store, attempt: str, columns: Sequence[str] | None) -> Copied:
    """Copy a block; return the outcome, with a `RayBatchError` in `error` if copying failed.

    The error is not raised, because Ray would retry the task, and because the first error in the
    order of the blocks is to be reported.
    """
    try:
        table = table.select(check_columns(columns, table.column_names, DATASET))
        for column in table.schema:
            if "PythonObject" in type(column.type).__name__:
                raise SourceError(
                    f"{DATASET}: column {column.name!r} has Python objects of different types. "
                    "Convert it to text, numbers or bytes first"
                )
        if not len(table.schema):
            raise SourceError(f"{DATASET}: the rows have no columns. Check how it is built")
        shape = Shape()
        copied = copy_blocks([(DATASET, table)], shape, store, attempt)
    except RayBatchError as error:
        return Copied(None, pa.schema([]), error=error)
    return replace(copied, types=((DATASET, shape.columns),))


def _settled(
    blocks: list[Copied],
    schema: pa.Schema,
    store: Store,
    attempt: str,
    everywhere: Everywheres,
) -> list[Copied]:
    """Rewrite the blocks whose types differ from `schema`, and join small neighbours.

    Returns the outcomes of all blocks in order. Files that were replaced are deleted.
    """
    groups = list(_groups(blocks))
    todo = [n for n, group in enumerate(groups) if len(group) > 1 or group[0].schema != schema]
    made: list[Copied] = [group[0] for group in groups]
    size = sum(_size(block) for number in todo for block in groups[number])
    if not todo:
        return made
    joiner, again = _Joiner(store, attempt, schema), list[Copied]()
    try:
        with everywhere(size, True) as apart:
            joined: Any = apart(joiner, (tuple(groups[n]) for n in todo), size)
            with closing(joined):
                for place, block in joined:
                    again.append(block)
                    made[todo[place]] = block
    except BaseException:
        _forget(store, again)
        raise
    _forget(store, [block for number in todo for block in groups[number]])
    return made


def _groups(blocks: Sequence[Copied]) -> Iterator[list[Copied]]:
    held: list[Copied] = []
    size = 0
    for block in blocks:
        fits = _size(block) < SMALL_BYTES and size + _size(block) <= JOINED_BYTES
        if held and not (fits and _size(held[-1]) < SMALL_BYTES):
            yield held
            held, size = [], 0
        held.append(block)
        size += _size(block)
    yield held


@dataclass(frozen=True)
class _Joiner:
    """Rewrites the files of some blocks as one block with the types of `schema`, in a task."""

    store: Store
    attempt: str
    schema: pa.Schema

    def __call__(self, blocks: tuple[Copied, ...]) -> Copied:
        rows = (
            (DATASET, self._fitted(table, _types(block)))
            for block in blocks
            for file in block.files or ()
            for table in _read(self.store, file)
        )
        return copy_blocks(rows, SettledTypes(self.schema), self.store, self.attempt)

    def _fitted(self, table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
        """Return `table`, read from a block's files, with null-typed columns converted to `schema`.

        `types` are the block's own types. A column with a null type, at any depth, was written as
        text, which cannot be cast to the column's type in `schema`.
        """
        for number, (name, kind) in enumerate(types.items()):
            wanted = self.schema.field(name).type
            if _holds_null(kind) and table.schema.field(name).type != wanted:
                column = pa.array(table[name].to_pylist(), wanted)
                table = table.set_column(number, pa.field(name, wanted), column)
        return table


def _types(block: Copied) -> dict[str, pa.DataType]:
    return dict(block.types)[DATASET]


def _size(block: Copied) -> int:
    return sum(file.size for file in block.files or ())


def _holds_null(kind: pa.DataType) -> bool:
    found: list[bool] = []

    def note(inner: pa.DataType) -> pa.DataType:
        found.append(pa.types.is_null(inner))
        return inner

    map_type(kind, note)
    return any(found)


def _read(store: Store, file: InputFile) -> Iterator[pa.Table]:
    with store.open(file.uri) as stream, pq.ParquetFile(stream, pre_buffer=False) as parquet:
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, use_threads=False)


def _forget(store: Store, blocks: Sequence[Copied]) -> None:
    """Delete the files of these blocks, which no plan lists; errors of the store are ignored."""
    with suppress(RayBatchError):  # only tidiness
        store.delete([file.uri for block in blocks for file in block.files or ()])
