"""Publishes Parquet or JSON Lines files to a folder, in Hive partitions with `partition_by`.

File names depend only on the plan, and rows on the run's result, so publishing again writes the
same files. A marker file, which readers ignore, is written last: without it, files may be missing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as kinds

from prefect_raybatch.errors import ConfigError, RayBatchError, is_transient
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.publish.base import PROPERTY, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.sql import json_text
from prefect_raybatch.publish.stores import folder_place
from prefect_raybatch.publish.types import converted_schema, to_schema
from prefect_raybatch.schemes import with_account
from prefect_raybatch.storage import Store, Sums, is_remote, join, open_store, put_file_proved

MOST_PARTITIONS = 1000  # folders of one run: each has a file open while rows are written
# Bytes of a folder's name on a local disk, and of an object's whole key in a store. Non-ASCII
# characters have three bytes or more each.
MOST_NAME_BYTES, MOST_KEY_BYTES = 255, 1024
SHOWN_VALUE = 40  # characters of a value that an error shows
MARK_BYTES = 64 << 20  # largest size of the marker file, which lists all files
FILE_BYTES = 256 << 20  # of Arrow data in one file
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
PARTITION_TYPES = (
    kinds.is_string,
    kinds.is_large_string,
    kinds.is_integer,
    kinds.is_boolean,
    kinds.is_date,
)


class FilesSink(Sink):
    """A folder of Parquet or JSON Lines files as a target; each run adds files of its own."""

    def existing(self) -> None:
        return None  # files of other runs may have other columns

    def check(self, schema: pa.Schema, whole: bool = True) -> str:
        wanted = converted_schema(schema, self.target, whole)
        for name in self.target.partition_by:
            kind = wanted.field(name).type if name in wanted.names else pa.string()
            if not any(test(kind) for test in PARTITION_TYPES):
                raise ConfigError(
                    f"{self.what}: partition_by: column {name!r} is of type {kind}. Partition "
                    "by texts, integers, dates or booleans"
                )
        if whole and len(wanted) == len(self.target.partition_by):
            raise ConfigError(f"{self.what}: partition_by names all columns. Leave one out")
        if whole and not self.target.partition_by:
            self.check_names(wanted.names)
        if self.planned:
            self.check_place()
            with self.with_plain_errors():
                self._check_layout(open_store(self.target.uri or "", self.options))
        return "gets new files"

    def rehearse(self, schema: pa.Schema, existing: pa.Schema | None) -> None:
        """Do nothing: this package writes the files itself, so `check` has found all faults."""

    def check_place(self) -> None:
        uri = join(self.target.uri or "")
        if not is_remote(uri):
            self.need_writable(uri)

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        store = open_store(self.target.uri or "", self.options)
        with self.with_plain_errors(rows):
            observe("opened")
            if self._whole(store, rows.plan):
                return ""
            self._check_layout(store, rows.plan)
            observe("looked")
            named: dict[str, int] = {}
            with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
                schema = converted_schema(rows.schema, self.target)
                parts = _Partitions(folder, schema, self.target)
                for path, local in parts.files(rows, f"part-{rows.plan[:16]}"):
                    with open(local, "rb") as stream:
                        sums = Sums.of_stream(stream)
                    put_file_proved(store, path, local, sums)
                    named[path] = sums.size
                    Path(local).unlink(missing_ok=True)  # a store on a disk may have moved it
                    observe("file written")
            ours = f"part-{rows.plan[:16]}-"
            strays = [
                info.path
                for info in store.list()
                if info.path.rpartition("/")[2].startswith(ours)
                and info.path.endswith(f".{self.target.format}")
                and info.path not in named
            ]
            store.delete(strays)  # left by another version of this package
            observe("committed")
            note = {"format": self.target.format, "rows": rows.count, "files": named}
            store.put(self._mark(rows.plan), dump({**rows.marks, **note}))
        return ""

    def place(self) -> tuple[str, ...]:
        return folder_place(with_account(self.target.uri or "", self.options))

    def holds(self, plan: str, recorded: str) -> bool:
        with self.with_plain_errors():
            return self._whole(open_store(self.target.uri or "", self.options), plan)

    def _mark(self, plan: str) -> str:
        """Return the name of the marker file of `plan`, which is written last.

        The target's format is part of the name, because two targets may share a folder.
        """
        return f"_{PROPERTY}{plan[:16]}.{self.target.format}.json"

    def _check_layout(self, store: Store, plan: str = "") -> None:
        """Raise `ConfigError` if earlier runs in the folder are partitioned by other columns.

        One earlier run with the target's partition columns is enough to pass: earlier versions of
        this package wrote several layouts to one folder. The run of `plan` itself does not count.
        Neither do runs whose marker cannot be read, for example because a store has archived it.
        """
        layout: list[str] | None = None
        for info in store.list(recursive=False):
            is_mark = info.path.startswith(f"_{PROPERTY}")
            is_mark = is_mark and info.path.endswith(f".{self.target.format}.json")
            if not is_mark or info.path == self._mark(plan):
                continue
            try:
                path = next(iter(json.loads(store.read(info.path, MARK_BYTES))["files"]))
            except RayBatchError as error:
                if is_transient(error):
                    raise
                continue
            except (FileNotFoundError, ValueError, KeyError, TypeError, StopIteration):
                continue
            layout = [unquote(folder.partition("=")[0]) for folder in path.split("/")[:-1]]
            if layout == self.target.partition_by:
                return
        if layout is not None:
            wanted = ", ".join(self.target.partition_by) or "not set"
            raise ConfigError(
                f"{self.what}: partition_by is {wanted}, but the files of earlier runs in "
                f"{store.uri} are partitioned by {', '.join(layout) or 'no column'}. Set "
                f"partition_by to {json.dumps(layout)}, or publish to another folder"
            )

    def _whole(self, store: Store, plan: str) -> bool:
        """Return whether the folder has all files of `plan`.

        True if the marker of `plan` exists, and each file that it lists exists with the listed
        size.
        """
        try:
            note = json.loads(store.read(self._mark(plan), MARK_BYTES))
            named, whole = note["files"].items(), note[f"{PROPERTY}plan"] == plan
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return bool(whole) and set(named) <= {(info.path, info.size) for info in store.list()}


class _Partitions:
    """Writes rows to temporary local files, one or more for each partition.

    A partition has one open file at a time; once it has FILE_BYTES, it is closed and complete.
    """

    def __init__(self, folder: str, schema: pa.Schema, target: PublishTarget) -> None:
        self._folder, self._target = folder, target
        self._by, self._format = target.partition_by, target.format
        self._schema = schema
        self._inner = pa.schema([field for field in schema if field.name not in self._by])
        self._open: dict[str, _File] = {}
        self._numbers: dict[str, int] = {}
        self._made = 0

    def files(self, rows: AnsweredRows, stem: str) -> Iterator[tuple[str, str]]:
        """Write the rows; yield (path in the target, local path) of each file once it is complete.

        File names begin with `stem`.
        """
        with local_disk():
            for batch in to_schema(rows.read(), self._schema):
                for place, table in self._split(pa.Table.from_batches([batch])):
                    file = self._file(place)
                    file.write(table.select(self._inner.names))
                    if file.size >= FILE_BYTES:
                        yield self._close(place, stem)
            for place in list(self._open):
                yield self._close(place, stem)

    def _split(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if not self._by:
            yield "", table
            return
        for place, values in _places(table, self._by, self._target):
            mask = None
            for name, value in values.items():
                column = table[name]
                same = (
                    pc.is_null(column)
                    if value is None
                    else pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
                )
                mask = same if mask is None else pc.and_(mask, same)
            yield place, table.filter(mask)

    def _file(self, place: str) -> _File:
        if place not in self._open:
            _check_number(len(self._open) + 1, self._by)
            self._made += 1
            path = f"{self._folder}/{self._made}"
            self._open[place] = _File(path, self._inner, self._format)
        return self._open[place]

    def _close(self, place: str, stem: str) -> tuple[str, str]:
        file = self._open.pop(place)
        file.close()
        number = self._numbers.get(place, 0)
        self._numbers[place] = number + 1
        name = f"{stem}-{number:05d}.{self._format}"
        return (f"{place}/{name}" if place else name), file.path


class _File:
    def __init__(self, path: str, schema: pa.Schema, format: str) -> None:
        self.path, self.size = path, 0
        parquet = format == "parquet"
        self._parquet = pq.ParquetWriter(path, schema, compression="zstd") if parquet else None
        self._text = None if parquet else open(path, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, table: pa.Table) -> None:
        self.size += table.nbytes
        if self._parquet is not None:
            self._parquet.write_table(table)
        elif self._text is not None:
            for row in table.to_pylist():
                self._text.write(json_text(row))
                self._text.write("\n")

    def close(self) -> None:
        for one in (self._parquet, self._text):
            if one is not None:
                one.close()


def check_partitions(tables: Iterable[pa.Table], by: Sequence[str], target: PublishTarget) -> None:
    """Raise `ConfigError` if the rows of `tables` cannot be partitioned by their columns `by`.

    There may be too many partitions, or a value that is too long for a folder's name in `target`.
    """
    places = set[str]()
    for table in tables:
        places.update(place for place, _ in _places(table, by, target))
        _check_number(len(places), by)


def _check_number(partitions: int, by: Sequence[str]) -> None:
    if partitions > MOST_PARTITIONS:
        raise ConfigError(
            f"output.publish: partition_by {', '.join(by)} makes over {MOST_PARTITIONS:,} "
            "partitions. Choose columns with fewer values"
        )


def _places(
    table: pa.Table, by: Sequence[str], target: PublishTarget
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (folder in the target, values by column) of each partition of the table's rows."""
    most = MOST_KEY_BYTES if is_remote(target.uri or "") else MOST_NAME_BYTES
    found = table.select(by).group_by(list(by), use_threads=False).aggregate([])
    for values in found.to_pylist():
        yield "/".join(_folder(name, value, most) for name, value in values.items()), values


def _folder(column: str, value: object, most: int) -> str:
    """Return a partition's folder name; raise `ConfigError` if it has over `most` bytes."""
    name = f"{_quoted(column)}={_quoted(value)}"
    if len(name) > most:
        raise ConfigError(
            f"output.publish: partition_by {column}: the folder of the value "
            f"{str(value)[:SHOWN_VALUE]!r}... would have a name of {len(name)} bytes, and at most "
            f"{most} are possible there. Partition by a column of shorter values"
        )
    return name


def _quoted(value: object) -> str:
    """Return the name of a partition column, or its value, percent-encoded for a folder's name.

    Null becomes NULL_FOLDER, as in Hive. A text equal to NULL_FOLDER gets an encoded character, so
    that it is not read as null.
    """
    if value is None:
        return NULL_FOLDER
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe="") if text != NULL_FOLDER else text.replace("_", "%5F", 1)
