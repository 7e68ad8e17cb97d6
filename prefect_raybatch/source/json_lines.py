"""Reads JSON as blocks of rows with arbitrary keys, and explains the errors of broken files."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.source import streams
from prefect_raybatch.source.arrow_types import (
    NUMBER_TEXT,
    ROWS_WITHOUT_KEYS,
    common_type,
    map_type,
)
from prefect_raybatch.source.bounds import COLUMN_BOUND, check_columns_bound
from prefect_raybatch.source.columns import check_columns, types_in
from prefect_raybatch.source.encodings import UTF8_ONLY, check_encoding, not_decoded
from prefect_raybatch.source.find import File
from prefect_raybatch.source.json_arrays import MOST_LEVELS, array_blocks, deep_line, is_array
from prefect_raybatch.source.json_numbers import Path, inexact_paths, with_texts
from prefect_raybatch.source.snapshot_writer import TABLE_CELLS, conform
from prefect_raybatch.source.streams import one_line, open_bytes

LINE_BYTES = 64 << 20  # a longer line: the file is not JSON Lines
# A null that may be outside of objects and arrays. pyarrow ends the process with a segmentation
# fault if a block begins with such a null, and makes others rows.
_NULL_ROW = re.compile(rb"[\r\n}][ \t]*null")
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:', re.DOTALL)


def json_tables(
    file: File,
    columns: Sequence[str] | None,
    known: dict[str, None],
    as_written: Collection[str] = (),
) -> Iterator[pa.Table]:
    """Yield the rows of JSON Lines, or of one array of objects, in blocks; add all keys to `known`.

    `columns` are the keys to read (None: all). A table lacks the keys that none of its rows has.

    `as_written` has keys whose fractions must not be rounded. If such a key has a number with a
    fraction in a block, all its numbers in that block become text, exactly as in the file.
    """
    types: dict[str, pa.DataType] = {}
    schema = None
    try:
        check_encoding(file)
        for where, table in _tables(file, as_written):
            check_columns(None, table.column_names, file.uri)
            known.update(dict.fromkeys(table.column_names))
            if columns is not None:
                held = [name for name in columns if name in table.column_names]
                # A block that has none of the columns still counts its rows.
                told = {name for name, _ in file.values}
                lacking = next((name for name in columns if name not in told), ROWS_WITHOUT_KEYS)
                nothing = {lacking: pa.nulls(table.num_rows)}
                table = table.select(held) if held else pa.table(nothing)
            elif not table.num_columns:
                table = pa.table({ROWS_WITHOUT_KEYS: pa.nulls(table.num_rows)})
            for field in table.schema:
                before = types.get(field.name, pa.null())
                wider = common_type(before, field.type, union=True)
                if wider is None:
                    raise SourceError(
                        f"{where}: key {field.name!r} is {field.type}, but {before} in earlier "
                        "rows. Write one type"
                    )
                types[field.name] = wider
            if table.schema != schema:
                schema = table.schema
                check_columns_bound(pa.schema(list(types.items())), file.uri)
            yield table
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{file.uri} cannot be read ({one_line(error)}). Write the file again"
        ) from None


def _tables(file: File, as_written: Collection[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (place, rows) for each block of the file.

    A place is text for error messages: the file's URI and the number of the block's first line (or
    first item, in an array). A block whose rows have many keys gives several tables. `as_written`
    is explained in `json_tables`.
    """
    array = file.cut is None and is_array(file)
    unit = "item" if array else "line"
    for line, block in array_blocks(file) if array else line_blocks(file):
        if block.strip():
            for table in _parse_json(file, block, line, unit, as_written):
                yield f"{file.uri}, from {unit} {line}", table


def line_blocks(file: File) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, whole lines) in blocks of about streams.BLOCK_BYTES.

    Lines are numbered from 1. Raises SourceError for a line longer than LINE_BYTES.
    """
    line, carry = 1, b""
    first = file.cut is None or not file.cut.at
    with open_bytes(file) as stream:
        if file.cut is not None:
            carry = stream.read(file.cut.lead)
        while True:
            data = stream.read(streams.BLOCK_BYTES)
            cut = data.rfind(b"\n") + 1 if data else 0
            block, carry = (carry + data[:cut], data[cut:]) if cut else (b"", carry + data)
            if not data:
                block, carry = carry, b""
            if first and block:
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False
            if block:
                yield line, block
                line += block.count(b"\n")
            if len(carry) > LINE_BYTES:
                raise SourceError(
                    f"{file.uri}, line {line} is longer than {LINE_BYTES >> 20} MiB. Check that "
                    "each line is one row"
                )
            if not data:
                return


def _parse_json(
    file: File, block: bytes, line: int, unit: str, as_written: Collection[str]
) -> list[pa.Table]:
    """Parse one block to tables; text that looks like a time stays text.

    `line` is the number of its first line, or of its first item in an array; `unit` is "line" or
    "item". Raises SourceError that names the file and the line or item.
    """
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(_not_utf8(file)) from None
    if (deep := deep_line(block)) is not None:
        raise SourceError(
            f"{file.uri}, {unit} {line + deep} is nested more than {MOST_LEVELS} levels deep. "
            "Write flatter objects, or write the nested part as text"
        )
    if _NULL_ROW.search(b"\n" + block) and _has_null_row(block):
        raise SourceError(
            _fault_in(file, block, line, unit)
            or f"{file.uri}, from {unit} {line}: a row is null, not an object"
        )
    try:
        pieces = _pieces(file, block)
        return _merged((_parse_piece(file, piece, as_written) for piece in pieces), file.uri)
    except (pa.ArrowException, ValueError) as error:
        raise SourceError(
            _fault_in(file, block, line, unit)
            or f"{file.uri}, from {unit} {line}: cannot be read as JSON ({one_line(error)}). Fix "
            "the file"
        ) from None


def _pieces(file: File, block: bytes) -> Iterator[bytes]:
    """Split a block at line ends into parts whose tables have few enough columns and cells.

    pyarrow makes each key of any line a column of all lines. Raises SourceError for a line with
    more keys than COLUMN_BOUND allows.
    """
    most, waiting = COLUMN_BOUND.value(), [block]
    while waiting:
        piece = waiting.pop()
        keys, lines = piece.count(b":"), piece.count(b"\n") + 1
        middle = piece.find(b"\n", len(piece) // 2) + 1 or piece.rfind(b"\n", 0, -1) + 1
        if keys <= most and keys * lines <= TABLE_CELLS:
            if piece.strip():
                yield piece
        elif 0 < middle < len(piece):
            waiting += [piece[middle:], piece[:middle]]
        else:
            if keys > most:
                _check_keys(file, piece, most)
            yield piece


def _check_keys(file: File, line: bytes, most: int) -> None:
    """Raise SourceError if a line has more than `most` distinct keys, nested ones included."""
    names: set[bytes] = set()
    for found in _KEY.finditer(line):
        names.add(found[1])
        if len(names) > most:
            raise COLUMN_BOUND.exceeded_error(file.uri, f"an object has more than {most:,} keys")
    try:
        waiting: list[tuple[tuple[str, ...], object]] = [((), json.loads(line))]
    except ValueError:
        return  # pyarrow reports it
    paths: set[tuple[str, ...]] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
            paths.update((*path, key) for key in value)
        elif isinstance(value, list):
            waiting += [((*path, ""), inner) for inner in value if isinstance(inner, dict | list)]
        if len(paths) > most:
            raise COLUMN_BOUND.exceeded_error(file.uri, f"an object has more than {most:,} keys")


def _parse_piece(file: File, piece: bytes, as_written: Collection[str]) -> pa.Table:
    import pyarrow.json as pj

    read = pj.ReadOptions(block_size=len(piece) + 1, use_threads=False)

    def parse(piece: bytes, fields: list[tuple[str, pa.DataType]]) -> pa.Table:
        schema = pa.schema(fields) if fields else None
        options = pj.ParseOptions(explicit_schema=schema, newlines_in_values=False)
        return pj.read_json(pa.BufferReader(piece), read_options=read, parse_options=options)

    def parse_valid(piece: bytes, fields: list[tuple[str, pa.DataType]]) -> pa.Table:
        table = parse(piece, fields)
        try:
            table.validate()
        except pa.ArrowInvalid:
            # pyarrow drops a null that begins a column's first list, unless it knows the type.
            schema = table.schema
            table = parse(piece, [(f.name, map_type(f.type, _null_as_text)) for f in schema])
            table.validate()
            table = _with_null_types(table, schema)
        return table

    table = parse_valid(piece, [])
    check_columns_bound(table.schema, file.uri)
    declared: set[Path] = {
        (field.name,)
        for field in table.schema
        if field.name in as_written and pa.types.is_floating(field.type)
    }
    paths = inexact_paths(piece, table.schema) | declared
    if paths:
        piece = with_texts(piece, paths, declared)
        read.block_size = len(piece) + 1
        table = parse_valid(piece, [])
    plain = {field.name: map_type(field.type, _no_time) for field in table.schema}
    changed = [(f.name, plain[f.name]) for f in table.schema if plain[f.name] != f.type]
    # The parser turns text that looks like a time into a time, which loses how it was written.
    table = parse_valid(piece, changed).select(table.column_names) if changed else table
    return _with_number_texts(table, paths) if paths else table


def _with_null_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the types of `schema`.

    These may differ from the table's types only by having the null type where the table has text.
    """
    for at, field in enumerate(schema):
        if table.field(at).type != field.type:
            table = table.set_column(at, field, [pa.array(table[at].to_pylist(), field.type)])
    return table


def _with_number_texts(table: pa.Table, paths: set[Path]) -> pa.Table:
    """Return the table with type NUMBER_TEXT instead of text for the values at `paths`.

    That type marks numbers that are kept as text, so that they merge with columns of numbers.
    """

    def typed(kind: pa.DataType, path: Path) -> pa.DataType:
        if path in paths:
            return NUMBER_TEXT
        if pa.types.is_struct(kind):
            return pa.struct([(f.name, typed(f.type, (*path, f.name))) for f in kind])
        return pa.list_(typed(kind.value_type, (*path, None))) if pa.types.is_list(kind) else kind

    fields = [(field.name, typed(field.type, (field.name,))) for field in table.schema]
    return table.cast(pa.schema(fields))


def _merged(tables: Iterable[pa.Table], where: str) -> list[pa.Table]:
    """Convert the tables of one block to a common schema, and join them up to TABLE_CELLS cells.

    `where` names the file in errors. Raises ArrowInvalid for incompatible types, SourceError for
    more keys than COLUMN_BOUND allows.
    """
    held: list[pa.Table] = []
    types: dict[str, pa.DataType] = {}
    for table in tables:
        if not held or table.schema != held[-1].schema:
            _merge_types(types, table.schema)
            check_columns_bound(pa.schema(list(types.items())), where)
        held.append(table)
    if any(table.schema != held[0].schema for table in held):
        for table in held:
            for name, kind in types_in(table, {}, False, (), types).items():
                types[name] = kind if kind == NUMBER_TEXT else types[name]
    return list(_joined(held, pa.schema(list(types.items()))))


def _joined(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    if not len(schema):  # which pyarrow can neither slice nor join
        yield from tables
        return
    held: list[pa.Table] = []
    rows, most = 0, max(1, TABLE_CELLS // max(1, len(schema)))
    for table in tables:
        while table.num_rows:
            part, table = table.slice(0, most - rows), table.slice(most - rows)
            held.append(part if part.schema == schema else conform(part, schema))
            rows += part.num_rows
            if rows == most:
                yield pa.concat_tables(held)
                held, rows = [], 0
    if held:
        yield pa.concat_tables(held)


def _merge_types(types: dict[str, pa.DataType], schema: pa.Schema) -> None:
    for field in schema:
        before = types.get(field.name, pa.null())
        kind = common_type(before, field.type, union=True)
        if kind is None:
            raise pa.ArrowInvalid(f"key {field.name!r} changed from {before} to {field.type}")
        types[field.name] = kind


def _no_time(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_temporal(kind) else kind


def _null_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) else kind


def _has_null_row(block: bytes) -> bool:
    """Return whether a null stands outside of objects and arrays, before any invalid JSON."""
    text, decoder, at = block.decode(), json.JSONDecoder(), 0
    with suppress(ValueError, RecursionError):
        while (found := _NOT_SPACE.search(text, at)) is not None:
            value, at = decoder.raw_decode(text, found.start())
            if value is None:
                return True
    return False


def _fault_in(file: File, block: bytes, line: int, unit: str) -> str | None:
    """Return an error message that names the first faulty line or item of `block`, or None.

    `line` is the number of the block's first line or item, because pyarrow counts from the start of
    a block; `unit` is "line" or "item".
    """
    kinds: dict[str, tuple[str, int]] = {}
    for number, text in enumerate(block.split(b"\n"), line):
        if not text.strip():
            continue
        place = f"{file.uri}, {unit} {number}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as wrong:
            return f"{place} is not valid JSON ({one_line(wrong)}). Write one object per line"
        if not isinstance(row, dict):
            return f"{place} is {_kind(row)}, not an object. Write one object per line"
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as wrong:  # JSON can escape half of a surrogate pair
            half = f"\\u{ord(wrong.object[wrong.start]):04x}"
            return f"{place} has {half}, half of a surrogate pair. Write the whole character"
        for name, value in row.items():
            before, where = kinds.setdefault(name, (_kind(value), number))
            if before == "null":
                kinds[name] = (_kind(value), number)
            elif _kind(value) not in (before, "null"):
                return (
                    f"{place}: key {name!r} is {_kind(value)}, but {before} in {unit} {where}. "
                    "Write one type"
                )
    return None


def _not_utf8(file: File) -> str:
    return not_decoded(file, "utf-8", UTF8_ONLY)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
