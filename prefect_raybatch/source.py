"""The input as the plan sees it: Parquet in place, anything else as a Parquet snapshot.

Runs on the driver. `inventory` reads footers only; `snapshot` and `snapshot_dataset` stream, so
that neither needs memory in proportion to the input.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import io
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError, StoreError
from prefect_raybatch.job import RESERVED, Source
from prefect_raybatch.records import InputFile
from prefect_raybatch.storage import FileInfo, Store, is_remote, join, open_store, split_glob

if TYPE_CHECKING:
    import ray.data

ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
FOOTER_THREADS = 16
FOOTER_WAVE = 64  # with a limit, footers are read in waves of this many files
BLOCK_BYTES = 8 << 20  # text parsed at a time
LINE_BYTES = 64 << 20  # a longer JSON line is a file of another kind
GROUP_ROWS = 16_384  # rows in a row group of a snapshot ...
GROUP_BYTES = 64 << 20  # ... or fewer, where rows are large
PART_ROWS = 1 << 18
PART_BYTES = 128 << 20
COPY_TRIES = 4  # a second pass knows all types; more are needed only when the input changes


@dataclass(frozen=True)
class Inventory:
    """What a run reads.

    `files` in reading order; `schema` of the columns read, dictionary types decoded; `row_bytes`
    the largest mean of uncompressed bytes a row over the files; `format` parquet, csv, jsonl or
    dataset (of the source, also where the files are a snapshot of it).
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    row_bytes: float
    format: str

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class _File:
    """A file found; `given` is the entry of source.uri, `named` when that is the file itself."""

    store: Store
    info: FileInfo
    given: str
    named: bool

    @property
    def uri(self) -> str:
        return join(self.store.uri, self.info.path)


# --- finding files and their format -----------------------------------------------------------


def detect_format(source: Source) -> str:
    """parquet, csv or jsonl: `source.format`, or by the endings of the files.

    Raises SourceError when nothing is found, for a mixture and for unknown endings, and the
    store's errors.
    """
    if source.format != "auto":
        return source.format
    return _choose(source, _find(source))[0]


def needs_snapshot(source: Source) -> bool:
    """Whether `source` is read through a Parquet snapshot. Raises as `detect_format`."""
    return detect_format(source) != "parquet"


def check_columns(wanted: Sequence[str] | None, known: Sequence[str], where: str) -> list[str]:
    """The columns to read of `known`: `wanted`, or all.

    Raises ConfigError for an unknown or repeated one, SourceError for names of `where` (a file)
    that cannot be columns here: repeated, or beginning with the reserved prefix.
    """
    for name in dict.fromkeys(known):
        if known.count(name) > 1:
            raise SourceError(f"{where}: column {name!r} stands there twice; rename one of them")
    for number, name in enumerate(wanted or ()):
        if name in (wanted or ())[:number]:
            raise ConfigError(f"source.columns: {name!r} stands there twice; remove one")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"source.columns: {where} has no column {name!r}{hint} "
                f"(columns: {', '.join(map(str, known))})"
            )
    chosen = list(wanted or known)
    for name in chosen:
        if name.startswith(RESERVED):
            raise SourceError(
                f"{where}: column {name!r} begins with {RESERVED}, which is reserved; rename it "
                "or leave it out with source.columns"
            )
    return chosen


def _find(source: Source) -> list[_File]:
    """All files of `source`, by name. Raises SourceError when an entry gives none."""
    found: dict[str, _File] = {}
    for given in source.uris:
        files = list(_expand(given, source.options))
        if not files:
            raise SourceError(_nothing(given))
        for file in files:
            before = found.setdefault(file.uri, file)
            if before is not file:
                raise SourceError(
                    f"source.uri: {file.uri} is listed twice, by {before.given!r} and by "
                    f"{given!r}; its rows would be read twice. Name it once."
                )
    return [found[uri] for uri in sorted(found)]


def _nothing(given: str) -> str:
    if split_glob(given)[1] is not None:
        return f"source.uri: no file matches {given!r}; check the folder and the pattern"
    if not is_remote(given) and os.path.isdir(split_glob(given)[0]):
        return (
            f"source.uri: folder {given!r} holds no files to read (hidden ones and those "
            "beginning with _ are left out)"
        )
    return f"source.uri: {given!r} does not exist; check the path (and the bucket)"


def _expand(given: str, options: dict[str, Any]) -> Iterator[_File]:
    """The files one entry of source.uri stands for."""
    root, pattern = split_glob(given)
    if pattern is not None:
        parts = pattern.split("/")
        store = open_store(root, options)
        for info in store.list("", recursive=len(parts) > 1 or parts == ["**"]):
            if _matches(info.path.split("/"), parts):
                yield _File(store, info, given, named=False)
        return
    folder, _, name = root.rpartition("/")
    if name and not folder.endswith(":/") and not given.endswith("/"):
        parent = open_store(folder or "/", options)
        with suppress(FileNotFoundError):
            yield _File(parent, parent.stat(name), given, named=True)
            return
    store = open_store(root, options)
    for info in store.list():
        if not any(_hidden(part) for part in info.path.split("/")):
            yield _File(store, info, given, named=False)


def _hidden(part: str) -> bool:
    """What writers leave beside the data: _SUCCESS, _temporary, .part-0.crc."""
    return part.startswith(("_", "."))


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Glob match part by part; `**` stands for any number of folders (at the end: also files)."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path) and not any(_hidden(part) for part in path)
        return _matches(path, pattern[1:]) or (
            bool(path) and not _hidden(path[0]) and _matches(path[1:], pattern)
        )
    if not path or (_hidden(path[0]) and not _hidden(pattern[0])):
        return False
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _ending(name: str) -> tuple[str | None, str | None]:
    """Format and compression that a file name tells, each None when it does not."""
    stem, dot, last = name.lower().rpartition(".")
    compression = COMPRESSIONS.get(dot + last)
    if compression:
        dot, last = stem.rpartition(".")[1:]
    found = ENDINGS.get(dot + last)
    if found == "parquet" and compression:
        return None, compression
    return found, compression


def _choose(source: Source, files: list[_File]) -> tuple[str, list[_File]]:
    """The format and the files of it; what `_find` found in folders may be left out."""
    by_format: dict[str | None, list[_File]] = {}
    for file in files:
        by_format.setdefault(_ending(file.info.path)[0], []).append(file)
    if source.format != "auto":
        chosen = [f for f in files if f.named or _ending(f.info.path)[0] in (source.format, None)]
        if not chosen:
            raise SourceError(
                f"source.format is {source.format}, but no file of {source.uris[0]!r} ends like "
                f"one; the first is {files[0].uri}"
            )
        return source.format, chosen
    unknown = by_format.pop(None, [])
    if unknown:
        raise SourceError(
            f"source.format: {_some(unknown)}: the ending does not tell the format; set "
            "source.format to parquet, csv or jsonl, or leave such files out with a glob"
        )
    if len(by_format) > 1:
        kinds = "; ".join(f"{kind}: {_some(found)}" for kind, found in by_format.items())
        raise SourceError(
            f"source.uri holds files of several formats ({kinds}); set source.format to read "
            "those of one and leave out the others"
        )
    (kind, chosen) = next(iter(by_format.items()))
    return str(kind), chosen


def _some(files: Sequence[_File]) -> str:
    more = f" and {len(files) - 2} more" if len(files) > 2 else ""
    return ", ".join(file.uri for file in files[:2]) + more


# --- types ------------------------------------------------------------------------------------


def _map_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """`kind` with `change` applied to it and, from the inside out, to the types it holds."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    inner = partial(_map_type, change=change)
    if types.is_struct(kind):
        kind = pa.struct([pa.field(f.name, inner(f.type)) for f in kind])
    elif types.is_map(kind):
        kind = pa.map_(inner(kind.key_type), inner(kind.item_type))
    elif types.is_fixed_size_list(kind):
        kind = pa.list_(inner(kind.value_type), kind.list_size)
    elif types.is_large_list(kind):
        kind = pa.large_list(inner(kind.value_type))
    elif types.is_list(kind):
        kind = pa.list_(inner(kind.value_type))
    elif types.is_dictionary(kind):
        kind = inner(kind.value_type)
    return change(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """`kind` with dictionaries and view types replaced by what they hold, at any depth."""

    def change(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_string_view(kind):
            return pa.string()
        return pa.binary() if pa.types.is_binary_view(kind) else kind

    return _map_type(kind, change)


def _written(kind: pa.DataType) -> pa.DataType:
    """`kind` as a snapshot writes it: a column that is null throughout becomes text."""
    return _map_type(kind, lambda k: pa.string() if pa.types.is_null(k) else k)


def common_type(a: pa.DataType, b: pa.DataType, union: bool = False) -> pa.DataType | None:
    """The type that holds the values of both, or None.

    Null gives way; ints of one sign and floats take the larger width; text, binary and lists
    their large kind. With `union` (text formats) int and float give float64, and structs may
    differ in fields.
    """
    types = pa.types
    if a == b:
        return a
    if types.is_null(a) or types.is_null(b):
        return b if types.is_null(a) else a
    for same in (types.is_signed_integer, types.is_unsigned_integer, types.is_floating):
        if same(a) and same(b):
            return a if a.bit_width >= b.bit_width else b
    if union and {_is_number(a), _is_number(b)} == {True}:
        return pa.float64()
    for small, large in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if {a, b} == {small, large}:
            return large
    if types.is_struct(a) and types.is_struct(b):
        return _common_struct(a, b, union)
    if types.is_map(a) and types.is_map(b):
        key = common_type(a.key_type, b.key_type, union)
        item = common_type(a.item_type, b.item_type, union)
        return pa.map_(key, item) if key is not None and item is not None else None
    return _common_list(a, b, union)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _common_struct(a: pa.StructType, b: pa.StructType, union: bool) -> pa.DataType | None:
    left, right = ({f.name: f.type for f in kind} for kind in (a, b))
    if len(left) < a.num_fields or len(right) < b.num_fields:
        return None
    if not union and left.keys() != right.keys():
        return None
    both = {
        name: common_type(left.get(name, pa.null()), right.get(name, pa.null()), union)
        for name in left | right
    }
    return None if None in both.values() else pa.struct(list(both.items()))


def _common_list(a: pa.DataType, b: pa.DataType, union: bool) -> pa.DataType | None:
    types = pa.types
    if not all(types.is_list(kind) or types.is_large_list(kind) for kind in (a, b)):
        return None
    value = common_type(a.value_type, b.value_type, union)
    if value is None:
        return None
    large = types.is_large_list(a) or types.is_large_list(b)
    return pa.large_list(value) if large else pa.list_(value)


class _Shape:
    """Column names and types, merged over files; the first file gives the order.

    `order`: the columns wanted, in this order, where given. `strict`: all files must have the same
    columns. `text`: columns are CSV text, whose types are
    inferred here. `union`: see `common_type`.
    """

    def __init__(
        self,
        strict: bool = True,
        text: bool = False,
        union: bool = False,
        order: Sequence[str] = (),
    ) -> None:
        self._strict, self._text, self._union, self._order = strict, text, union, order
        self._files: dict[str, dict[str, pa.DataType]] = {}
        self._columns: dict[str, pa.DataType] = {}
        self._first: str | None = None

    @property
    def schema(self) -> pa.Schema:
        names = [name for name in self._order if name in self._columns] or self._columns
        return pa.schema([(name, self._columns[name]) for name in names])

    def see(self, where: str, table: pa.Table) -> None:
        """Take a block of `where` into account. Raises as `see_types`."""
        if self._text:
            mine = self._files.get(where, {})
            found = {
                name: _text_type(table.column(name), mine.get(name)) for name in table.column_names
            }
        else:
            found = {field.name: plain_type(field.type) for field in table.schema}
        self.see_types(where, found)

    def see_types(self, where: str, found: dict[str, pa.DataType]) -> None:
        """Take types found in `where` into account.

        Raises SourceError naming the column, both files and both types when they do not go
        together, and for a column that only one of two files has.
        """
        new = where not in self._files
        mine = self._files.setdefault(where, {})
        if new and self._strict:
            self._check_names(where, found)
        for name, kind in found.items():
            before = mine.get(name, pa.null())
            # Text of one file may widen to anything; typed values must go together.
            wider = kind if self._text else common_type(before, kind, self._union)
            if wider is None:
                raise SourceError(
                    f"{where}: column {name!r} changes from {before} to {kind}; write one type"
                )
            if name not in mine or wider != before:
                mine[name] = wider
                self._merge(where, name, wider)

    def _merge(self, where: str, name: str, kind: pa.DataType) -> None:
        known = self._columns.get(name, pa.null())
        both = common_type(known, kind, self._union)
        if both is None:
            both = pa.null()  # `known` may stem from this very file before it widened
            for other, types in self._files.items():
                if name in types and (wider := common_type(both, types[name], self._union)):
                    both = wider
                elif name in types:
                    first = self._clashing(name, types[name])
                    raise SourceError(_clash(name, first, self._files[first][name], other, types))
        self._columns[name] = both

    def _clashing(self, name: str, kind: pa.DataType) -> str:
        """The first file in which the column does not go together with `kind`."""
        having = [file for file, types in self._files.items() if name in types]
        for file in having:
            if common_type(self._files[file][name], kind, self._union) is None:
                return file
        return having[0]

    def _check_names(self, where: str, found: dict[str, pa.DataType]) -> None:
        if self._first is None:
            self._first = where
            return
        known = self._files[self._first]
        for name in [*(set(known) - set(found)), *(set(found) - set(known))]:
            lacking, having = (where, self._first) if name in known else (self._first, where)
            raise SourceError(
                f"{lacking} has no column {name!r}, which {having} has; all files must have the "
                "same columns. Read fewer with source.columns, or name the files that go together."
            )


def _clash(
    name: str, first: str, kind: pa.DataType, other: str, types: dict[str, pa.DataType]
) -> str:
    return (
        f"column {name!r} is {kind} in {first} and {types[name]} in {other}; all files must agree. "
        "Write them with one type, leave the column out with source.columns, or name only files "
        "that go together."
    )


# --- Parquet in place -------------------------------------------------------------------------


def inventory(source: Source) -> Inventory:
    """Parquet files as they lie, from their footers; `limit` and `columns` of `source` apply.

    Footers are read by FOOTER_THREADS threads; files past the limit are dropped and theirs not
    read. Raises SourceError for what is missing, unreadable or does not go together (naming the
    file), ConfigError for an unknown column, and the store's errors.
    """
    kind, files = _choose(source, _find(source))
    if kind != "parquet":
        raise SourceError(f"{files[0].uri} is {kind}, which is read through a snapshot")
    shape, chosen, row_bytes = _Shape(), [], 0.0
    left = source.limit
    wave = len(files) if left is None else FOOTER_WAVE
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        for start in range(0, len(files), wave):
            part = files[start : start + wave]
            footers = pool.map(partial(_footer, columns=source.columns), part)
            for file, footer in zip(part, footers, strict=True):
                if left == 0:
                    break
                rows = footer.rows if left is None else min(footer.rows, left)
                left = None if left is None else left - rows
                if rows:  # an empty table often has no real types
                    shape.see_types(file.uri, footer.types)
                row_bytes = max(row_bytes, footer.row_bytes)
                chosen.append(_input_file(file.uri, file.info, rows))
            if left == 0:
                break
    if not any(file.rows for file in chosen):
        raise SourceError(f"source.uri: no rows in {_some(files)}")
    return Inventory(tuple(chosen), shape.schema, row_bytes, "parquet")


def _input_file(uri: str, info: FileInfo, rows: int) -> InputFile:
    return InputFile(uri=uri, size=info.size, etag=info.etag, mtime_ns=info.mtime_ns, rows=rows)


@dataclass(frozen=True)
class _Footer:
    rows: int
    types: dict[str, pa.DataType]
    row_bytes: float


def _footer(file: _File, columns: Sequence[str] | None) -> _Footer:
    """Rows, types of the chosen columns and mean uncompressed bytes a row of one file."""
    import pyarrow.parquet as pq

    try:
        with file.store.open(file.info.path) as handle, pq.ParquetFile(handle) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except RayBatchError:
        raise
    except FileNotFoundError:
        raise SourceError(f"{file.uri}: was deleted while the input was being listed") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.uri}: is not a readable Parquet file ({_line(error)}); write it again, remove "
            "it, or set source.format if it is of another kind"
        ) from None
    names = check_columns(columns, schema.names, file.uri)
    types = {name: plain_type(schema.field(name).type) for name in names}
    size = _stored_bytes(metadata, None if columns is None else set(names))
    rows = metadata.num_rows
    # Repeated values are stored once: never below what the fixed widths alone need.
    least = sum(_least_bytes(kind) for kind in types.values())
    return _Footer(rows, types, max(size / rows, least) if rows else 0.0)


def _stored_bytes(metadata: Any, names: set[str] | None) -> int:
    """Uncompressed bytes of the named top-level columns (None: of all)."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if names is None:
        return sum(group.total_byte_size for group in groups)
    wanted = [
        i
        for i in range(metadata.num_columns)
        if (path := metadata.schema.column(i).path) in names or path.split(".")[0] in names
    ]
    return sum(group.column(i).total_uncompressed_size for group in groups for i in wanted)


def _least_bytes(kind: pa.DataType) -> float:
    if pa.types.is_struct(kind):
        return sum(_least_bytes(field.type) for field in kind)
    try:
        return kind.bit_width / 8
    except ValueError:
        return 4.0  # an offset


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- snapshot ---------------------------------------------------------------------------------

Blocks = Iterable[tuple[str, pa.Table]]  # (which file, some of its rows)


def snapshot(source: Source, run_store: Store, attempt: str) -> Inventory:
    """Copy CSV or JSON Lines to Parquet under `_raybatch/input/ATTEMPT-UUID/` of `run_store`.

    The uris of the inventory are relative to `run_store`. Types come from the values: CSV cells
    are int64, float64, bool or string, whichever is the narrowest that gives each value back as
    it stood (so 02139 stays text), and an empty unquoted cell is null; a JSON key that a line
    lacks is null. Where a later value needs a wider type the copy is begun anew with it.

    Raises SourceError (file, line or column, remedy), ConfigError for an unknown column, and the
    stores' errors. Whatever was written before an error belongs to no plan.
    """
    kind, files = _choose(source, _find(source))
    for file in files:
        if file.info.size == 0:
            raise SourceError(f"{file.uri}: is empty (0 bytes); write it again or remove it")
    tables = _csv_tables if kind == "csv" else _json_tables

    known: dict[str, None] = {}

    def blocks() -> Blocks:
        for file in files:
            for table in tables(file, source.columns, known):
                yield file.uri, table

    made = _copy(blocks, _shape(kind, source.columns), run_store, attempt, source.limit, kind)
    if made.rows:
        check_columns(source.columns, list(known), "the input")
    else:
        what = "has a header but no rows" if kind == "csv" else "has no rows"
        raise SourceError(f"source.uri: {_some(files)} {what}; there is nothing to do")
    _check_unchanged(files)
    return made


def peek(source: Source) -> Inventory:
    """What `snapshot` would give, guessed from the first block of the first file; writes nothing.

    Rows are estimated from the sizes of the files (never more than `limit`), types may still
    widen. Raises as `snapshot` for what shows in that block.
    """
    kind, files = _choose(source, _find(source))
    shape = _shape(kind, source.columns)
    known: dict[str, None] = {}
    tables = (_csv_tables if kind == "csv" else _json_tables)(files[0], source.columns, known)
    table = next(iter(tables), None)
    if table is None or not table.num_rows:
        raise SourceError(f"{files[0].uri}: has no rows to look at")
    shape.see(files[0].uri, table)
    check_columns(source.columns, list(known), files[0].uri)
    schema = pa.schema([(f.name, _written(f.type)) for f in shape.schema])
    stored = _stored_row_bytes(files[0])
    chosen, left = [], source.limit
    for file in files:
        rows = max(1, round(file.info.size / stored))
        if len(files) == 1 and file.info.size <= BLOCK_BYTES and not _ending(file.info.path)[1]:
            rows = table.num_rows  # the block is the file
        rows = rows if left is None else min(rows, left)
        chosen.append(_input_file(file.uri, file.info, rows))
        left = None if left is None else left - rows
        if left == 0:
            break
    row_bytes = _conform(table, schema).nbytes / table.num_rows
    return Inventory(tuple(chosen), schema, row_bytes, kind)


def _stored_row_bytes(file: _File) -> float:
    """Bytes in the file, compressed or not, that its first lines take each."""
    with file.store.open(file.info.path) as handle:
        data = handle.read(BLOCK_BYTES // 8)
    compression = _ending(file.info.path)[1]
    size = len(data)
    if compression:
        stream = pa.CompressedInputStream(pa.BufferReader(data), compression)
        data = b""
        with suppress(OSError):  # the sample ends within a compressed block
            while part := stream.read(1 << 16):
                data += part
    return size / max(1, data.count(b"\n"))


def _shape(kind: str, columns: Sequence[str] | None) -> _Shape:
    return _Shape(strict=kind == "csv", text=kind == "csv", union=True, order=columns or ())


def _check_unchanged(files: Sequence[_File]) -> None:
    for file in files:
        try:
            now = file.store.stat(file.info.path)
        except FileNotFoundError:
            raise SourceError(f"{file.uri}: was deleted while it was being copied") from None
        if (now.size, now.etag, now.mtime_ns) != (
            file.info.size,
            file.info.etag,
            file.info.mtime_ns,
        ):
            raise SourceError(
                f"{file.uri}: changed while it was being copied (size {file.info.size} -> "
                f"{now.size}); start again when it is complete"
            )


def snapshot_dataset(
    dataset: ray.data.Dataset,
    run_store: Store,
    attempt: str,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> Inventory:
    """Copy any `ray.data.Dataset` to Parquet, as `snapshot` does; blocks are streamed in order.

    Raises SourceError for columns that cannot be written or change type, ConfigError for an
    unknown column. What the dataset itself raises passes through.
    """
    if limit is not None:
        dataset = dataset.limit(limit)
    known = dataset.schema(fetch_if_missing=False)
    if columns is not None and known is not None and set(columns) <= set(known.names):
        dataset = dataset.select_columns(list(columns))
    options = dataset.context.execution_options

    def blocks() -> Blocks:
        ordered, options.preserve_order = options.preserve_order, True
        try:
            table: Any
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                if not table.num_rows:
                    continue
                names = check_columns(columns, table.column_names, "the dataset")
                table = table.select(names)
                for field in table.schema:
                    if "PythonObject" in type(field.type).__name__:
                        raise SourceError(
                            f"the dataset: column {field.name!r} holds Python objects of no one "
                            "type; convert it to text, numbers or bytes first"
                        )
                yield "the dataset", table
        finally:
            options.preserve_order = ordered

    made = _copy(blocks, _Shape(), run_store, attempt, limit, "dataset")
    if not made.rows:
        raise SourceError("the dataset has no rows; there is nothing to do")
    return made


def _copy(
    blocks: Callable[[], Blocks],
    shape: _Shape,
    store: Store,
    attempt: str,
    limit: int | None,
    kind: str,
) -> Inventory:
    """Write all blocks under one schema.

    A pass that meets a value its schema cannot hold goes on without writing, so that the next
    one knows every type: two passes at most, unless the input changes meanwhile.
    """
    for _ in range(COPY_TRIES):
        parts = _Parts(store, f"_raybatch/input/{attempt}-{uuid.uuid4()}")
        try:
            seen = 0
            for where, table in blocks():
                if limit is not None:
                    table = table.slice(0, limit - seen)
                seen += table.num_rows
                shape.see(where, table)
                parts.write(table, shape.schema)
                if seen == limit:
                    break
            if seen and not len(shape.schema):
                raise SourceError("source.uri: the rows have no columns; there is nothing to read")
            files = parts.close()
        except BaseException:
            parts.abandon()
            raise
        if files is not None:
            schema = pa.schema([(f.name, _written(f.type)) for f in shape.schema])
            return Inventory(files, schema, parts.row_bytes, kind)
    raise SourceError("source.uri: the input keeps changing while it is copied; try again later")


class _Parts:
    """Writes tables as Parquet files `FOLDER/part-00000.parquet` ... of bounded size.

    Once a table needs a schema other than that of the rows already written it writes no more,
    and `close` returns None.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.row_bytes = 0.0
        self._store, self._folder = store, folder
        self._files: list[InputFile] = []
        self._held: list[pa.Table] = []
        self._held_bytes = self._rows = self._part_rows = self._part_bytes = 0
        self._schema: pa.Schema | None = None
        self._writer: Any = None
        self._local: str | None = None
        self._given_up = False

    def write(self, table: pa.Table, schema: pa.Schema) -> None:
        """Add rows; `schema` is the one known so far. Raises StoreError for a full local disk."""
        if self._given_up or not table.num_rows:
            return
        schema = pa.schema([(field.name, _written(field.type)) for field in schema])
        if self._rows and schema != self._schema:
            self.abandon()
            return
        self._schema = schema
        table = _conform(table, schema)
        self._rows += table.num_rows
        self.row_bytes = max(self.row_bytes, table.nbytes / table.num_rows)
        # Large rows make small groups, so that a reader needs little memory for one.
        step = max(1, min(GROUP_ROWS, int(GROUP_BYTES * table.num_rows / max(1, table.nbytes))))
        for start in range(0, table.num_rows, step):
            self._hold(table.slice(start, step))

    def close(self) -> tuple[InputFile, ...] | None:
        """Finish the last part; the files written, or None when the schema changed."""
        if self._given_up:
            return None
        self._flush()
        self._finish_part()
        return tuple(self._files)

    def abandon(self) -> None:
        """Write no more and take away what was written (no plan can know it yet)."""
        self._given_up = True
        self._held.clear()
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
            self._writer = None
        self._drop_local()
        with suppress(RayBatchError):  # only tidiness
            self._store.delete([file.uri for file in self._files])
        self._files.clear()

    def _hold(self, table: pa.Table) -> None:
        while table.num_rows:
            room = GROUP_ROWS - sum(held.num_rows for held in self._held)
            self._held.append(table.slice(0, room))
            self._held_bytes += self._held[-1].nbytes
            if table.num_rows >= room or self._held_bytes >= GROUP_BYTES:
                self._flush()
            table = table.slice(room)

    def _flush(self) -> None:
        """Write what is held as one row group."""
        import pyarrow.parquet as pq

        if not self._held:
            return
        group = pa.concat_tables(self._held)
        self._held.clear()
        self._part_bytes += self._held_bytes
        self._held_bytes = 0
        with self._local_disk():
            if self._writer is None:
                handle, self._local = tempfile.mkstemp(suffix=".parquet", prefix="raybatch-")
                os.close(handle)
                self._writer = pq.ParquetWriter(self._local, self._schema, compression="zstd")
            self._writer.write_table(group, row_group_size=max(1, group.num_rows))
        self._part_rows += group.num_rows
        if self._part_rows >= PART_ROWS or self._part_bytes >= PART_BYTES:
            self._finish_part()

    def _finish_part(self) -> None:
        if self._writer is None or self._local is None:
            return
        with self._local_disk():
            self._writer.close()
        self._writer = None
        path = f"{self._folder}/part-{len(self._files):05d}.parquet"
        info = self._store.put_file(path, self._local)
        self._files.append(_input_file(path, info, self._part_rows))
        self._part_rows = self._part_bytes = 0
        self._drop_local()

    def _drop_local(self) -> None:
        if self._local is not None:
            with suppress(FileNotFoundError):  # a local store has moved it
                os.unlink(self._local)
            self._local = None

    @contextmanager
    def _local_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{tempfile.gettempdir()}: the snapshot cannot be written there ({_line(error)}); "
                "make room, or set TMPDIR to another folder"
            ) from error


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns and types of `schema`; absent columns are null."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(_convert(table.column(field.name), field.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
    return pa.Table.from_arrays(columns, schema=schema)


def _convert(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    if pa.types.is_boolean(kind) and pa.types.is_string(column.type):
        return pc.equal(pc.utf8_lower(column), "true")
    return column if column.type == kind else column.cast(kind)


# --- CSV --------------------------------------------------------------------------------------

# What a value must look like so that the typed value is the same: no leading zeros (postal codes),
# no more digits than the type holds (identifiers), no words (nan).
_DIGITS = "-?(0|[1-9][0-9]{0,%d})"
_LOOKS = {
    pa.int64(): f"^{_DIGITS % 17}$",
    pa.float64(): f"^{_DIGITS % 14}(\\.[0-9]+)?([eE][-+]?[0-9]{{1,2}})?$",
    pa.bool_(): "^(true|false|True|False|TRUE|FALSE)$",
}
_WIDER = {
    None: (pa.int64(), pa.float64(), pa.bool_()),
    pa.null(): (pa.int64(), pa.float64(), pa.bool_()),
    pa.int64(): (pa.int64(), pa.float64()),
    pa.float64(): (pa.float64(),),
    pa.bool_(): (pa.bool_(),),
}


def _text_type(column: pa.ChunkedArray, before: pa.DataType | None) -> pa.DataType:
    """The narrowest type, not narrower than `before`, that holds the values of a text column."""
    import pyarrow.compute as pc

    if before == pa.string():
        return before
    if column.null_count == len(column):
        return before or pa.null()
    for kind in _WIDER[before]:
        looks = partial(pc.match_substring_regex, pattern=_LOOKS[kind])
        # A few values settle most columns.
        if all(pc.all(looks(part)).as_py() is not False for part in (column[:64], column)):
            return kind
    return pa.string()


@contextmanager
def _stream(file: _File) -> Iterator[Any]:
    """The file's bytes from the start, decompressed: what pyarrow's readers take."""
    compression = _ending(file.info.path)[1]
    try:
        with file.store.open(file.info.path) as handle:
            native = pa.PythonFile(handle, mode="r")
            yield pa.CompressedInputStream(native, compression) if compression else native
    except FileNotFoundError:
        raise SourceError(f"{file.uri}: was deleted while the input was being listed") from None


def _csv_tables(
    file: _File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """Blocks of a CSV file with all columns as text; an empty unquoted cell is null."""
    import pyarrow.csv as pc

    ragged: list[Any] = []

    def refuse(row: Any) -> str:
        ragged.append(row)
        return "error"

    delimiter = "\t" if ".tsv" in file.info.path.lower() else ","
    read = pc.ReadOptions(block_size=BLOCK_BYTES)
    parse = partial(pc.ParseOptions, delimiter=delimiter, newlines_in_values=True)
    try:
        with _stream(file) as stream:
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
        with _stream(file) as stream:
            options = parse(invalid_row_handler=refuse)
            for batch in pc.open_csv(stream, read, options, convert):
                yield pa.Table.from_batches([batch]).rename_columns(chosen)
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(_explain_csv(file, delimiter, error, ragged)) from None


def _skip(_: Any) -> str:
    return "skip"


def _explain_csv(file: _File, delimiter: str, error: Exception, ragged: list[Any]) -> str:
    text = str(error)
    if ragged:
        row = ragged[0]
        line, found = _find_ragged(file, delimiter, row.expected_columns)
        return (
            f"{file.uri}, line {line or row.number}: {found or row.actual_columns} columns where "
            f"the header has {row.expected_columns}; put values that hold {delimiter!r} in double "
            "quotes, or mend the line"
        )
    if isinstance(error, UnicodeDecodeError) or "UTF8" in text:
        return _not_utf8(file)
    if "straddl" in text:
        return (
            f"{file.uri}: a row is longer than {BLOCK_BYTES >> 20} MiB; most likely a double "
            "quote is never closed. Close or double it."
        )
    if "Empty CSV" in text:
        return f"{file.uri}: holds no header line; write it again or remove it"
    return f"{file.uri}: cannot be read as CSV ({_line(error)})"


def _not_utf8(file: _File) -> str:
    """Names the first line that is no UTF-8; reads the file again, which only errors pay for."""
    place, number = "", 0
    with suppress(OSError, ValueError, RayBatchError), _stream(file) as stream:
        for number, line in enumerate(io.BufferedReader(_Raw(stream)), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                place = f", line {number}"
                break
    return (
        f"{file.uri}{place}: is not UTF-8, the only encoding read; convert it, for example with "
        "iconv -f latin1 -t utf-8"
    )


def _find_ragged(file: _File, delimiter: str, columns: int) -> tuple[int | None, int | None]:
    """Line and columns of the first row of another width; pyarrow counts rows, not lines."""
    with suppress(OSError, csv.Error, RayBatchError, ValueError), _stream(file) as stream:
        raw = io.BufferedReader(_Raw(stream))
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace", newline="")
        reader, line = csv.reader(text, delimiter=delimiter), 1
        for row in reader:
            if row and len(row) != columns:
                return line, len(row)
            line = reader.line_num + 1
    return None, None


class _Raw(io.RawIOBase):
    """A pyarrow stream as a raw file; pyarrow's own buffering wants to seek."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


# --- JSON Lines -------------------------------------------------------------------------------


def _json_tables(
    file: _File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """Blocks of a JSON Lines file, without keys that no line of a block has; notes all keys."""
    types: dict[str, Any] = {}
    try:
        for line, block in _line_blocks(file):
            if not block.strip():
                continue
            table = _parse_json(file, block, line)
            check_columns(None, table.column_names, file.uri)
            known.update(dict.fromkeys(table.column_names))
            for field in table.schema:
                before = types.get(field.name, pa.null())
                wider = common_type(before, field.type, union=True)
                if wider is None and (columns is None or field.name in columns):
                    raise SourceError(
                        f"{file.uri}, from line {line}: key {field.name!r} holds {field.type}, but "
                        f"{before} before; write one type"
                    )
                types[field.name] = wider
            if columns is not None:
                # Keep the count of rows that have none of the columns.
                absent = pa.nulls(table.num_rows)
                table = pa.table(
                    {
                        name: table.column(name) if name in table.column_names else absent
                        for name in columns
                        if name in table.column_names
                    }
                    or {columns[0]: absent}
                )
            yield table
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.uri}: cannot be read ({_line(error)})") from None


def _line_blocks(file: _File) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) of about BLOCK_BYTES."""
    line, carry = 1, b""
    with _stream(file) as stream:
        while True:
            data = stream.read(BLOCK_BYTES)
            cut = data.rfind(b"\n") + 1 if data else 0
            block, carry = (carry + data[:cut], data[cut:]) if cut else (b"", carry + data)
            if not data:
                block, carry = carry, b""
            if line == 1 and block:
                block = block.removeprefix(b"\xef\xbb\xbf")
            if block:
                yield line, block
                line += block.count(b"\n")
            if len(carry) > LINE_BYTES:
                raise SourceError(f"{file.uri}, line {line}: is longer than {LINE_BYTES >> 20} MiB")
            if not data:
                return


def _parse_json(file: _File, block: bytes, line: int) -> pa.Table:
    """One block as a table; times stay text. Raises SourceError naming file and line."""
    import pyarrow.json as pj

    read = pj.ReadOptions(block_size=len(block) + 1, use_threads=False)

    def parse(fields: list[tuple[str, pa.DataType]]) -> pa.Table:
        schema = pa.schema(fields) if fields else None
        options = pj.ParseOptions(explicit_schema=schema, newlines_in_values=False)
        return pj.read_json(io.BytesIO(block), read_options=read, parse_options=options)

    try:
        block.decode("utf-8")
        table = parse([])
        plain = {field.name: _map_type(field.type, _no_time) for field in table.schema}
        changed = [(f.name, plain[f.name]) for f in table.schema if plain[f.name] != f.type]
        # The parser takes text that looks like a time for one, and would lose how it is written.
        return parse(changed).select(table.column_names) if changed else table
    except UnicodeDecodeError:
        raise SourceError(_not_utf8(file)) from None
    except (pa.ArrowException, ValueError) as error:
        raise SourceError(_explain_json(file, block, line, error)) from None


def _no_time(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_temporal(kind) else kind


def _explain_json(file: _File, block: bytes, line: int, error: Exception) -> str:
    """Looks for the line that pyarrow stumbled over: it counts from the start of a block."""
    kinds: dict[str, tuple[str, int]] = {}
    for number, text in enumerate(block.split(b"\n"), line):
        if not text.strip():
            continue
        place = f"{file.uri}, line {number}"
        if number == 1 and text.lstrip().startswith(b"["):
            return (
                f"{place}: is a JSON array, not JSON Lines; write one object a line, for example "
                "with jq -c '.[]'"
            )
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as wrong:
            return f"{place}: is not valid JSON ({_line(wrong)}); write one object a line"
        if not isinstance(row, dict):
            return f"{place}: holds {_kind(row)}, not an object; write one object a line"
        for name, value in row.items():
            before, where = kinds.setdefault(name, (_kind(value), number))
            if before == "null":
                kinds[name] = (_kind(value), number)
            elif _kind(value) not in (before, "null"):
                return (
                    f"{place}: key {name!r} holds {_kind(value)}, but {before} in line {where}; "
                    "write one type"
                )
    return f"{file.uri}, from line {line}: cannot be read as JSON Lines ({_line(error)})"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
