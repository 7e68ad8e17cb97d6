"""Reads CSV files as blocks of text columns, and explains what is wrong with a broken file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.source import streams
from prefect_raybatch.source.bounds import COLUMN_BOUND
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.encodings import (
    CSV_ENCODING,
    check_csv_encoding,
    detect_encoding,
    not_decoded,
)
from prefect_raybatch.source.find import File, ending
from prefect_raybatch.source.streams import Raw, one_line, open_text
from prefect_raybatch.words import counted

_RAGGED = re.compile(r"Expected (\d+) columns, got (\d+)")
_QUOTED = re.compile('"[^"]*"')
BLOCK_TRIES = 64  # block sizes that `_block_bytes` tries
DELIMITERS = ";\t|,"  # delimiters that are detected


def csv_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None], options: Csv
) -> Iterator[pa.Table]:
    """Yield blocks of a CSV file with `columns` (None: all) as text; empty unquoted cells are null.

    `columns` may also name key=value folders of the file's path. These are not read here; if no
    other is named, all columns are read. Adds the names of the file's columns to `known`.

    Raises SourceError for a broken file. Raises ConfigError for an unknown column or delimiter.
    """
    import pyarrow.csv as pc

    written = _Written.of(file, options)
    parse = written.parse_options()
    try:
        check_csv_encoding(file, options.encoding)
        block, known_to_fit = _block_bytes(file, options)
        read = written.read_options(block)
        text = partial(open_text, file, options.encoding, unbroken=not known_to_fit)
        if written.assumed:
            _check_delimiter(file, written)
        _check_width(file, written)
        with text() as stream:
            header = pc.open_csv(stream, read, parse).schema.names
        if len(header) == 1:  # then an empty line is a null; with more columns it is no row
            parse.ignore_empty_lines = False
            read.skip_rows += _empty_lines(file, written) if options.header else 0
        # pandas writes its index without a name, and names such columns so when it reads.
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        told = {name for name, _ in file.values} - {*names}
        chosen = check_columns([c for c in columns or () if c not in told], names, file.uri)
        known.update(dict.fromkeys(names))
        included = [header[names.index(name)] for name in chosen]
        convert = written.convert_options(header, included)
        held = None  # the last block is checked before it is yielded
        with text() as stream:
            for batch in pc.open_csv(stream, read, parse, convert):
                if held is None:
                    held = batch
                elif batch.num_rows:  # a block of empty lines has none
                    yield pa.Table.from_batches([held.select(included)]).rename_columns(chosen)
                    held = batch
        if held is not None:
            if held.num_rows and "\n" in (held.column(header[-1])[-1].as_py() or ""):
                _check_closed(file, written, read, parse, header)
            yield pa.Table.from_batches([held.select(included)]).rename_columns(chosen)
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(_explain_csv(file, written, error)) from None


def _check_width(file: File, written: _Written) -> None:
    """Raise SourceError if the first row has more values than the limit on columns."""
    most = COLUMN_BOUND.value()
    with suppress(csv.Error):  # raised for a value that is too long for Python's csv
        first = next((row for _, row in written.rows(file) if row), [])
        if len(first) > most:
            raise COLUMN_BOUND.exceeded_error(
                file.uri, f"the first row has {counted(len(first), 'value')}"
            )


def _empty_lines(file: File, written: _Written) -> int:
    """Return the number of empty lines between the lines to skip (`skip_rows`) and the header."""
    lines = islice(written.lines(file), written.options.skip_rows, None)
    return next((number for number, line in enumerate(lines) if line.strip("\r\n")), 0)


def _check_closed(
    file: File, written: _Written, read: Any, parse: Any, header: Sequence[str]
) -> None:
    """Raise SourceError if a quote is still open at the end of a file.

    pyarrow reads everything after such a quote as one value. So the file is read again with one
    more row at its end: a quote is open if that row becomes part of a value. `read` and `parse` are
    pyarrow's options, `header` the names of the columns.
    """
    import pyarrow.csv as pc

    end = "end"
    row = "\n" + written.delimiter.join([end] * len(header)) + "\n"
    convert = pc.ConvertOptions(
        column_types={header[-1]: pa.string()}, include_columns=[header[-1]], null_values=[]
    )
    value = None
    with open_text(file, written.options.encoding, unbroken=True, more=row.encode()) as stream:
        for batch in pc.open_csv(stream, read, parse, convert):
            value = batch.column(0)[-1].as_py() if batch.num_rows else value
    if value is None or value == end:
        return
    begin, line = 1, 1 + written.options.skip_rows
    with suppress(csv.Error):  # raised for a value that is too long for Python's csv
        for begin, values in written.rows(file):
            line = begin + 1 + sum(text.count("\n") for text in values)
        line = begin
    following = value.removesuffix(row).rstrip("\r\n").count("\n")
    raise SourceError(
        f"{file.uri}, line {line}: this row opens a quote that is never closed, so "
        f"{counted(following, 'more line')} would become part of its value. Close or double the "
        "quote, or set source.csv.quote to '' if the file does not use quotes"
    )


def _block_bytes(file: File, options: Csv) -> tuple[int, bool]:
    """Return (bytes per block, whether it is certain that no block breaks a value).

    If a block ends between carriage return and line feed, pyarrow ends a row there, even within
    quotes, and drops the line feed. Without quotes this breaks no value. With quotes, a block size
    is searched at which no block ends so. That is not possible in files that are compressed or not
    in UTF-8, because their blocks end at unknown places.
    """
    size = file.info.size if file.cut is None else len(file.cut.content)
    plain = options.encoding == "utf-8" and not ending(file.info.path)[1]
    if plain and size < streams.BLOCK_BYTES:
        return size + 1, True  # pyarrow takes memory for a whole block, however small the file is
    if not options.quote:
        return streams.BLOCK_BYTES, True
    if not plain:
        return streams.BLOCK_BYTES, False
    with file.store.open(file.info.path) if file.cut is None else BytesIO(file.cut.content) as data:
        for block in range(streams.BLOCK_BYTES, streams.BLOCK_BYTES + BLOCK_TRIES):
            if not any(_at(data, at) == b"\r\n" for at in range(block, size, block)):
                return block, True
    return streams.BLOCK_BYTES, False


def _at(data: BinaryIO, at: int) -> bytes:
    data.seek(at - 1)
    return data.read(2)


def delimiter_of(file: File, options: Csv) -> str:
    """Return the delimiter set in `options`, else the one that the file's name implies."""
    return options.delimiter or ("\t" if ".tsv" in file.info.path.lower() else ",")


def detect_csv_options(file: File, given: Csv) -> tuple[dict[str, Any], bool]:
    """Detect ({field of `source.csv`: value}, whether the encoding is a guess) from a file's start.

    The dictionary has the fields that differ from their defaults or are set in `given`.
    """
    told = given.model_dump(exclude_unset=True)
    try:
        encoding, guessed = (given.encoding, False) if "encoding" in told else detect_encoding(file)
        written = _Written.of(file, Csv(encoding=encoding))
        first = _first_line(file, written)
    except OSError as error:  # a compressed file may be damaged
        raise SourceError(
            f"{file.uri} cannot be read as CSV ({one_line(error)}). Write the file again, or "
            "correct source.csv"
        ) from None
    fields: dict[str, Any] = {}
    if {"delimiter", "skip_rows"} & told.keys():
        pass
    elif (named := _named_by_excel(first)) is not None:
        fields = {"delimiter": named, "skip_rows": 1}
    elif (other := _another_delimiter(first, written.delimiter)) is not None:
        fields = {"delimiter": other}
    return fields | ({} if encoding == "utf-8" else {"encoding": encoding}) | told, guessed


@dataclass(frozen=True)
class _Written:
    """The CSV options of one file, and its delimiter.

    `assumed`: the options set no delimiter, so it was chosen by the file's name.
    """

    options: Csv
    delimiter: str
    assumed: bool  # the job does not set the delimiter

    @classmethod
    def of(cls, file: File, options: Csv) -> _Written:
        return cls(options, delimiter_of(file, options), options.delimiter is None)

    def read_options(self, block_bytes: int) -> Any:
        import pyarrow.csv as pc

        given = self.options
        return pc.ReadOptions(
            block_size=block_bytes,
            skip_rows=given.skip_rows,
            column_names=given.names,
            skip_rows_after_names=1 if given.names and given.header else 0,
            autogenerate_column_names=not given.header and not given.names,
        )

    def parse_options(self) -> Any:
        import pyarrow.csv as pc

        # No handler for rows of another width: pyarrow would decode each as UTF-8 for it, and
        # print decoding errors that no caller can catch.
        return pc.ParseOptions(
            delimiter=self.delimiter,
            quote_char=self.options.quote or False,
            escape_char=self.options.escape or False,
            newlines_in_values=True,
        )

    def convert_options(self, header: Sequence[str], columns: Sequence[str]) -> Any:
        import pyarrow.csv as pc

        return pc.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()),
            # The last column shows whether a quote was still open at the end.
            include_columns=list(dict.fromkeys([*columns, header[-1]])),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=["", *self.options.null_values],
        )

    def lines(self, file: File) -> Iterator[str]:
        """Yield the lines of a file with their ends; undecodable bytes are replaced."""
        encoding = self.options.encoding
        with streams.open_bytes(file) as stream:
            raw = io.BufferedReader(Raw(stream))
            name = "utf-8-sig" if encoding == "utf-8" else encoding
            text = io.TextIOWrapper(raw, encoding=name, errors="replace", newline="")
            # In bounded parts: a small compressed file may hold a line of any length.
            yield from iter(partial(text.readline, streams.BLOCK_BYTES), "")

    def rows(self, file: File) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of its first line, values) for each row, parsed by Python's csv module."""
        given, skipped = self.options, self.options.skip_rows
        reader = csv.reader(
            islice(self.lines(file), skipped, None),
            delimiter=self.delimiter,
            quotechar=given.quote or None,
            quoting=csv.QUOTE_MINIMAL if given.quote else csv.QUOTE_NONE,
            escapechar=given.escape,
        )
        line = 1
        for row in reader:
            yield skipped + line, row
            line = reader.line_num + 1


def _check_delimiter(file: File, written: _Written) -> None:
    """Raise ConfigError if the first line suggests another delimiter, or names one (`sep=;`)."""
    first = _first_line(file, written)
    if (named := _named_by_excel(first)) is not None:
        raise ConfigError(
            f"{file.uri} begins with {first!r}, which names the delimiter for Excel. Set "
            f"source.csv.delimiter to {_shown(named)} and source.csv.skip_rows to "
            f"{written.options.skip_rows + 1}"
        )
    other = _another_delimiter(first, written.delimiter)
    if other is not None:
        raise ConfigError(
            f"{file.uri} has one column, {first[:80]!r}, if {_shown(written.delimiter)} is the "
            f"delimiter. Set source.csv.delimiter to {_shown(other)} (or to "
            f"{_shown(written.delimiter)} if it is one column)"
        )


def _first_line(file: File, written: _Written) -> str:
    """Return the first non-empty line after the skipped ones, stripped; "" if none."""
    lines = (line.strip() for line in islice(written.lines(file), written.options.skip_rows, None))
    return next(filter(None, lines), "")


def _named_by_excel(line: str) -> str | None:
    """Return the delimiter that a line names for Excel, as in `sep=;`; None for other lines."""
    return line[4] if line.lower().startswith("sep=") and len(line) == 5 else None


def _another_delimiter(line: str, delimiter: str) -> str | None:
    """Return the likely delimiter of a line in which `delimiter` does not occur.

    It is the one of DELIMITERS that is most frequent outside quotes. Returns None if the line
    contains `delimiter`, or none of DELIMITERS.
    """
    return None if delimiter in line else _other_delimiter(line, delimiter)


def _other_delimiter(line: str, delimiter: str) -> str | None:
    """Return the one of DELIMITERS that is most frequent in a line, not counting quoted text.

    Returns None if `delimiter` is at least as frequent.
    """
    line = _QUOTED.sub("", line)
    most = max(DELIMITERS, key=line.count)
    return most if line.count(most) > line.count(delimiter) else None


def _shown(delimiter: str) -> str:
    return "tab" if delimiter == "\t" else repr(delimiter)


def _explain_csv(file: File, written: _Written, error: Exception) -> str:
    text = str(error)
    ragged = _RAGGED.search(text)
    if ragged:
        return _explain_ragged(file, written, int(ragged[1]), int(ragged[2]))
    if isinstance(error, UnicodeDecodeError) or "UTF8" in text:
        return not_decoded(file, written.options.encoding, CSV_ENCODING)
    if "straddl" in text:
        what = "a double quote" if written.options.quote == '"' else "a quote"
        return (
            f"{file.uri}: a row is longer than {streams.BLOCK_BYTES >> 20} MiB, most likely "
            f"because {what} is never closed. Close or double it"
        )
    if "Empty CSV" in text:
        return f"{file.uri} has no header line. Write the file again or remove it"
    return (
        f"{file.uri} cannot be read as CSV ({one_line(error)}). Write the file again, or correct "
        "source.csv"
    )


def _explain_ragged(file: File, written: _Written, columns: int, found: int) -> str:
    line, first = None, ""
    with suppress(OSError, csv.Error, RayBatchError, ValueError):
        for number, row in written.rows(file):
            first = first or written.delimiter.join(row)
            if row and len(row) != columns:
                line, found = number, len(row)
                break
    where = "source.csv.names" if written.options.names else "the header"
    if not written.options.header and not written.options.names:
        where = "the first line"
    quote = {'"': "double quotes", "": ""}.get(written.options.quote, written.options.quote)
    remedy = (
        f"Enclose values that contain {written.delimiter!r} in {quote}" if quote else "Use quotes"
    )
    other = _other_delimiter(first, written.delimiter) if written.assumed else None
    if other is not None:
        remedy = f"Set source.csv.delimiter to {_shown(other)} if it separates the values"
    return (
        f"{file.uri}{f', line {line}' if line else ''} has {counted(found, 'column')}, but {where} "
        f"has {columns}. {remedy}, or fix the line"
    )
