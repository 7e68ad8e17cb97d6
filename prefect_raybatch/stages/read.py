"""Reads shards of the input; yields one block for each unit of work.

A unit is a range of rows of one shard. Each row of its block is tagged with its shard and position.
Each row group is decoded once per task.

If a unit cannot be read, its block is a `lost` block with the reason (see `block`). An exception
would not do: Ray would retry the task and drop the exception's text.
"""

from __future__ import annotations

import io
import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
from ray.data import DataContext, Dataset, read_datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from prefect_raybatch.errors import RayBatchError, SourceError, is_transient
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import InputFile, Unit
from prefect_raybatch.sizing.shards import longest_first
from prefect_raybatch.source.int96 import int96_batches, open_parquet
from prefect_raybatch.source.parquet import batch_rows
from prefect_raybatch.spec.options import HiddenOptions, StoreOptions
from prefect_raybatch.stages import block as blocks
from prefect_raybatch.stages.ray_internals import UnjoinedBlocks
from prefect_raybatch.storage import FileInfo, Store, footer_digest, is_remote, open_store

MAX_TASKS = 2000  # Ray needs about 1 ms and 4 KB for each
UNITS_PER_TASK = 8  # neighbouring units, since they share the decoding of a row group
MIN_TASKS = 64  # tasks get fewer units if there would be fewer tasks than this
CHUNK_BYTES = 64 << 20  # larger column chunks are not fetched whole
BUFFER_BYTES = 16 << 20  # but in steps of this size
SMALL_FILE = 4 << 20  # remote files up to this size are fetched whole, several ahead
FILES_AHEAD = 8

Done = Callable[[int], bool]  # shard id -> whether its commit exists; must pickle


@dataclass(frozen=True)
class FileRows:
    """Rows [start, start + rows) of a file; `file` is its index in `Task.files`."""

    file: int
    start: int
    rows: int


@dataclass(frozen=True)
class Task:
    """The work of one read task: `units` in input order.

    `parts` has the file rows of each unit, `files` the files with these rows.
    """

    units: tuple[Unit, ...]
    parts: tuple[tuple[FileRows, ...], ...]
    files: tuple[InputFile, ...]


class ShardReader:
    """Divides units into read tasks. Lives on the driver; tasks carry only what they need.

    `files` are in the plan's order. `schema` has the columns to read, in this order, and the types
    to cast them to.

    If the files are a snapshot, `store` is the run's store: the files' URIs are relative to it, and
    only their size is checked. Otherwise `store` is None, and `options` are the options of the
    input's store.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        schema: pa.Schema,
        store: Store | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        self.files, self.schema, self.store = tuple(files), schema, store
        self.options = HiddenOptions(options)
        self._stops = np.cumsum([file.rows for file in self.files], dtype=np.int64)

    @property
    def rows(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def tasks(
        self,
        units: Sequence[tuple[Unit, int]],
        max_tasks: int = MAX_TASKS,
        min_tasks: int = MIN_TASKS,
        units_per_task: int = UNITS_PER_TASK,
        shuffle_seed: str | None = None,
        work: np.ndarray | None = None,
    ) -> list[Task]:
        """Group neighbouring units into tasks; `units` are (unit, its first row in the input).

        Each task has `units_per_task` units. It has fewer if there would otherwise be fewer than
        `min_tasks` tasks, and more if there would otherwise be more than `max_tasks`.

        The order of the tasks is:
        - by default, that of the input;
        - with `work` (a number for each shard, in any unit of measure), by work per shard, the most
          first;
        - with `shuffle_seed` (an attempt's uuid), random. So two live drivers seldom work on the
          same shard: in a common order, one would catch up with the other.

        Raises ValueError for rows outside the files.
        """
        ordered = sorted(units, key=lambda pair: pair[1])
        size = max(1, min(units_per_task, len(ordered) // max(1, min_tasks)))
        size = max(size, -(-len(ordered) // max(1, max_tasks)))
        tasks = [self._task(ordered[at : at + size]) for at in range(0, len(ordered), size)]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(tasks)
        elif work is not None:
            mean = [float(np.mean([work[unit.shard] for unit in task.units])) for task in tasks]
            tasks = [tasks[number] for number in longest_first(mean)]
        return tasks

    def _task(self, units: Sequence[tuple[Unit, int]]) -> Task:
        numbers: dict[int, int] = {}  # index in the run's files -> index in the task's files
        parts = []
        for unit, start in units:
            found = self._parts(unit, start)
            parts.append(
                tuple(replace(p, file=numbers.setdefault(p.file, len(numbers))) for p in found)
            )
        files = tuple(self.files[number] for number in numbers)
        return Task(tuple(unit for unit, _ in units), tuple(parts), files)

    def _parts(self, unit: Unit, start: int) -> Iterator[FileRows]:
        stop = start + unit.rows
        if start < 0 or unit.rows < 1 or stop > self.rows:
            raise ValueError(f"{unit}: rows {start} to {stop} of an input of {self.rows} rows")
        number = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            end = min(stop, int(self._stops[number]))
            if end > start:  # skips files without rows
                first = int(self._stops[number]) - self.files[number].rows
                yield FileRows(number, start - first, end - start)
                start = end
            number += 1

    def read(self, task: Task) -> Iterator[pa.Table]:
        """Yield the blocks of a task's units, as `read_units` does."""
        return self.bind(task)()

    def bind(self, task: Task, done: Done | None = None) -> Callable[[], Iterator[pa.Table]]:
        """Return a small picklable function that yields the blocks of a task's units.

        `done` is as in `read_units`.
        """
        return partial(read_units, task, self.schema, self.store, self.options, done)


def read_units(
    task: Task,
    schema: pa.Schema,
    store: Store | None = None,
    options: StoreOptions | None = None,
    done: Done | None = None,
) -> Iterator[pa.Table]:
    """Yield a block for each unit of a task, in order.

    The block has the unit's rows, tagged and cast to `schema`. If they cannot be read, it is a lost
    block. `schema`, `store` and `options` are as in `ShardReader`. `done` (picklable) takes a
    shard's id and returns whether to skip the shard: its units get no block.

    Each file is compared with the plan's record of it twice: before its first use, and before a
    unit with rows of it is yielded.

    Memory: a unit, a decoded batch (`batch_rows`), and the column chunks of a row group as stored
    (at most CHUNK_BYTES each).
    """
    files = _Files(task, schema, store, dict(options or {}))
    with files:
        for unit, parts in zip(task.units, task.parts, strict=True):
            if done is not None and _is_done(done, unit.shard):
                continue
            began = time.time()
            table = _read_unit(unit, parts, files)
            yield table if blocks.is_lost(table) else blocks.timed(table, "read", began)


def _is_done(done: Done, shard: int) -> bool:
    try:
        return done(shard)
    except RayBatchError:
        # the check only saves work: put-if-absent decides which commit counts
        return False


def _read_unit(unit: Unit, parts: Sequence[FileRows], files: _Files) -> pa.Table:
    tables: list[pa.Table] = []
    for part in parts:
        try:
            tables += files.take(part)
        except Exception as error:
            files.forget(part.file)
            return blocks.lost_block(unit, files.explain(part, error))
    for number in dict.fromkeys(part.file for part in parts):
        try:
            files.check(number)
        except Exception as error:
            files.forget(number)
            part = next(part for part in parts if part.file == number)
            return blocks.lost_block(unit, files.explain(part, error))
    table = pa.concat_tables(tables).combine_chunks()  # a slice would hold its whole batch
    return blocks.tag(table, unit)


class _Changed(Exception):
    """A file differs from the plan's record of it; the text says what changed."""


class _Files:
    """The files of a task, opened one after the other, checked against the plan."""

    def __init__(
        self, task: Task, schema: pa.Schema, store: Store | None, options: StoreOptions
    ) -> None:
        self._task, self._schema, self._store, self._options = task, schema, store, options
        self._stores: dict[str, Store] = {}
        self._last_row = [0] * len(task.files)
        for part in (part for parts in task.parts for part in parts):
            self._last_row[part.file] = max(self._last_row[part.file], part.start + part.rows)
        self._open: tuple[int, Cursor] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[bytes]] = {}
        # Change time and inode of files that were touched since the plan but have the planned
        # footer, so that the footer is not read again.
        self._same: dict[int, tuple[int | None, int | None]] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, part: FileRows) -> list[pa.Table]:
        """Return the rows of `part`, cast to the schema. Raises read errors, and _Changed."""
        if self._open is None or self._open[0] != part.file:
            self._close()
            handle = self._handle(part.file)
            try:
                values = dict(self._task.files[part.file].values)
                cursor = Cursor(handle, self._schema, self._last_row[part.file], values)
            except BaseException:
                handle.close()
                raise
            self._open = (part.file, cursor)
        return self._open[1].take(part.start, part.rows)

    def check(self, number: int) -> None:
        """Raise `_Changed` if file `number` differs from the plan's record of it.

        For a snapshot, only the size is compared. Raises `FileNotFoundError` if the file is
        missing, and errors of the store.
        """
        planned = self._task.files[number]
        store, path = self._place(number)
        found: FileInfo = store.stat(path)
        if found.size != planned.size:
            raise _Changed(f"size {planned.size} -> {found.size}")
        if self._store is not None:  # a snapshot is ours: never written twice
            return
        if planned.etag is not None and found.etag != planned.etag:
            raise _Changed(f"etag {planned.etag} -> {found.etag} (size still {found.size})")
        if planned.mtime_ns is not None and found.mtime_ns != planned.mtime_ns:
            raise _Changed(
                f"modification time {planned.mtime_ns} -> {found.mtime_ns} ns (size still "
                f"{found.size})"
            )
        self._check_written(number, planned, found)

    def _check_written(self, number: int, planned: InputFile, info: FileInfo) -> None:
        """Compare file `number`'s footer with the plan if its change time or inode differ.

        `check` has compared size and modification time already, but anybody can set those. `info`
        describes the file as it is now. Does nothing if the plan has no digest of the footer.
        Raises `_Changed` if the footer differs, and errors of the store.
        """
        at = (info.ctime_ns, info.inode)
        if planned.footer is None or at in (
            (planned.ctime_ns, planned.inode),
            self._same.get(number),
        ):
            return
        store, path = self._place(number)
        with store.open(path) as handle:
            try:
                footer = footer_digest(handle)
            except ValueError:
                footer = "none"
        if footer != planned.footer:
            raise _Changed(
                f"footer {planned.footer[:12]} -> {footer[:12]} (same size and modification time, "
                "but other contents)"
            )
        self._same[number] = at

    def forget(self, number: int) -> None:
        """Close file `number` after an error, so that the next unit opens it again."""
        if self._open is not None and self._open[0] == number:
            self._close()
        self._ahead.pop(number, None)

    def explain(self, part: FileRows, error: Exception) -> Loss:
        """Return the loss that says why reading `part` failed with `error`.

        The loss is fatal, and so ends the run, if a retry cannot help.
        """
        uri = self._task.files[part.file].uri
        if self._store is not None:
            uri = f"{self._store.uri}/{uri}"
        if not isinstance(error, (_Changed, FileNotFoundError)):
            # A file that is replaced while it is read may raise any error: report the change.
            try:
                self.check(part.file)
            except (_Changed, FileNotFoundError) as changed:
                error = changed
            except Exception:  # the original error tells more than this one
                pass
        if isinstance(error, _Changed):
            return Loss(
                SourceError.__name__,
                f"{uri} has changed since the run was planned: {error}. Restore the planned file "
                "and run again, or start a new run key.",
                fatal=True,
            )
        if isinstance(error, FileNotFoundError):
            return Loss(
                SourceError.__name__,
                f"{uri} no longer exists. Restore it and run again, or start a new run key.",
                fatal=True,
            )
        rows = f"rows {part.start} to {part.start + part.rows - 1}"
        kind = type(error).__name__
        return Loss(
            SourceError.__name__,
            f"{uri}, {rows}: {kind}: {' '.join(str(error).split())[:500]}",
            _is_fatal(error),
        )

    def _place(self, number: int) -> tuple[Store, str]:
        """Return the store of a file and its path there."""
        uri = self._task.files[number].uri
        if self._store is not None:
            return self._store, uri
        folder, _, name = uri.rpartition("/")
        if folder not in self._stores:
            self._stores[folder] = open_store(folder or "/", self._options)
        return self._stores[folder], name

    def _handle(self, number: int) -> BinaryIO:
        ahead = self._fetch_ahead(number)
        if ahead is not None:
            return io.BytesIO(ahead.result())
        self.check(number)
        store, path = self._place(number)
        return store.open(path)

    def _fetch_ahead(self, number: int) -> Future[bytes] | None:
        """Start fetching small remote files from `number` on; return the future of file `number`.

        None if that file is large or local.
        """
        for following in range(number, min(number + FILES_AHEAD, len(self._task.files))):
            file = self._task.files[following]
            place = file.uri if self._store is None else self._store.uri
            if following in self._ahead or file.size > SMALL_FILE or not is_remote(place):
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FILES_AHEAD)
            self._ahead[following] = self._pool.submit(self._fetch, following)
        return self._ahead.pop(number, None)

    def _fetch(self, number: int) -> bytes:
        self.check(number)
        store, path = self._place(number)
        return store.read(path)

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _is_fatal(error: Exception) -> bool:
    """Return whether reading again is useless, as for a corrupt file.

    False for errors that may pass, such as a store that does not answer.
    """
    if isinstance(error, MemoryError):
        return False
    if isinstance(error, pa.ArrowException):
        return True
    if isinstance(error, OSError) and error.errno is None:  # how pyarrow reports corrupt pages
        return True
    return not is_transient(error)


class Cursor:
    """Reads ranges of rows from a Parquet file, mostly forward, and casts them to `schema`.

    Rows from number `stop` on are not read. `values` maps each column of `schema` that is not in
    the file to its value in all rows, as text; None for null.
    """

    def __init__(
        self, handle: BinaryIO, schema: pa.Schema, stop: int, values: Mapping[str, str | None]
    ) -> None:
        self._handle, self._schema, self._stop, self._values = handle, schema, stop, values
        self._names = [name for name in schema.names if name not in values]
        self._file = open_parquet(handle)
        metadata = self._file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._starts = [0]
        for group in groups:
            self._starts.append(self._starts[-1] + group.num_rows)
        if self._starts[-1] < stop:
            raise pa.ArrowInvalid(f"holds {self._starts[-1]} rows, but the plan needs {stop}")
        names = set(self._names)
        chunks = [
            group.column(i)
            for group in groups[:1]
            for i in range(metadata.num_columns)
            if group.column(i).path_in_schema.split(".")[0] in names
            or group.column(i).path_in_schema in names
        ]
        stored = sum(chunk.total_uncompressed_size for chunk in chunks)
        row_bytes = stored / max(1, groups[0].num_rows) if groups else 1.0
        self._batch_rows = batch_rows(row_bytes)
        if any(chunk.total_compressed_size > CHUNK_BYTES for chunk in chunks):
            self._file = open_parquet(handle, metadata=metadata, buffer_size=BUFFER_BYTES)
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: deque[pa.RecordBatch] = deque()
        self._at = 0  # the next row that `_held` and then `_batches` give
        self._end = 0  # where `_batches` ends; nothing is being read yet

    def take(self, start: int, rows: int) -> list[pa.Table]:
        """Return rows [start, start + rows), in one or more tables of the schema."""
        stop = start + rows
        group = bisect_right(self._starts, start) - 1
        # Start again if the rows are before the current ones, or if row groups can be skipped.
        if start < self._at or stop > self._end or self._starts[group] > self._group_end():
            self._begin(group)
        tables = []
        while self._at < stop:
            batch = self._held.popleft() if self._held else next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"ends at row {self._at} of {stop}")
            low, high = max(start - self._at, 0), min(stop - self._at, batch.num_rows)
            if high < batch.num_rows:
                self._held.append(batch.slice(high))
            self._at += high
            if low < high:
                tables.append(_cast(batch.slice(low, high - low), self._schema, self._values))
        return tables

    def close(self) -> None:
        self._batches, self._held = iter(()), deque()
        with suppress(Exception):
            self._file.close(force=True)
        self._handle.close()

    def _group_end(self) -> int:
        """Return the number of the first row after the row group that has the next row to read."""
        return self._starts[min(bisect_right(self._starts, self._at), len(self._starts) - 1)]

    def _begin(self, group: int) -> None:
        last = bisect_right(self._starts, self._stop - 1)
        self._at, self._end = self._starts[group], self._starts[last]
        self._held.clear()
        self._batches = int96_batches(
            self._file,
            self._handle,
            self._names,
            # Decode no more rows than needed: a dictionary may hold large values for many rows.
            batch_size=min(self._batch_rows, self._stop - self._at),
            row_groups=list(range(group, last)),
        )


def _cast(batch: pa.RecordBatch, schema: pa.Schema, values: Mapping[str, str | None]) -> pa.Table:
    """Return the batch as a table with the columns and types of `schema`.

    A column in `values` has the same value in all rows. Numbers are widened and dictionaries
    decoded, also in nested columns.
    """
    columns = [
        pa.repeat(pa.scalar(values[name], pa.string()), batch.num_rows)
        if name in values
        else batch.column(name)
        for name in schema.names
    ]
    cast_columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(cast_columns, schema=schema)


# --- Ray Data ---------------------------------------------------------------------------------


class ShardDatasource(UnjoinedBlocks):
    """A data source with one Ray read task for each `Task`; Ray displays it as "ReadShards"."""

    def __init__(
        self, reader: ShardReader, tasks: Sequence[Task], done: Done | None = None
    ) -> None:
        super().__init__()
        self._read_tasks = [ReadTask(reader.bind(task, done), _metadata()) for task in tasks]

    def get_name(self) -> str:
        return "Shards"  # Ray puts "Read" in front

    def estimate_inmemory_data_size(self) -> int | None:
        return None  # a size would make Ray choose tasks and splits by it

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Return all read tasks; `parallelism` is ignored. Ray calls this several times."""
        if per_task_row_limit is None:
            return self._read_tasks
        return [
            ReadTask(task.read_fn, task.metadata, per_task_row_limit=per_task_row_limit)
            for task in self._read_tasks
        ]

    def dataset(self, **options: object) -> Dataset:
        """Return the dataset of all blocks; `options` are those of `ray.data.read_datasource`.

        `DataContext.target_max_block_size` must be None when this is called (Ray copies the
        context). Raises ValueError if there are no tasks, because Ray cannot read an empty list of
        tasks.
        """
        if not self._read_tasks:
            raise ValueError("no units to read")
        options.setdefault("override_num_blocks", len(self._read_tasks))
        return cast(Dataset, read_datasource(self, **options))


def _metadata() -> BlockMetadata:
    # No row count: a committed unit gives no block, and Ray would answer count() from this.
    return BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
