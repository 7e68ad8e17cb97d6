"""Finds where a large text file may be split, so that its parts are read in parallel.

JSON Lines are split between lines, where a reader of the whole file would end a block. In CSV, a
line break ends a row if the number of quotes before it is even. That is reliable only if each quote
begins or ends a value, or is doubled. A file with any other quote is not split; its reader reports
the error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from prefect_raybatch.errors import SourceError
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.source.encodings import UTF8_MARK
from prefect_raybatch.source.find import Cut, File, ending
from prefect_raybatch.source.json_arrays import is_array

CUT_BYTES = 32 << 20  # bytes of a part: a multiple of streams.BLOCK_BYTES
SCAN_BYTES = 4 << 20  # bytes scanned for quotes at a time
NEWLINE = 10
LINE_WINDOW = 1 << 16  # bytes searched for a line's end, at first
HEADER_BYTES = 1 << 20  # searched for the header line; with a longer one, no split

Everywhere = Callable[
    [Callable[[Any], Any], Iterable[Any], int], Generator[tuple[int, Any], None, None]
]
"""Type of functions (work, items, total bytes of the items) that call `work` for each item, in
threads or Ray tasks, and yield (index of the item, result of `work`) in any order.
"""


@dataclass(frozen=True)
class Stretch:
    """Whole rows of a file: its bytes [start, stop), or up to the end if `stop` is None.

    `head` is the file's header line, which is put before these rows. `lead` applies to JSON Lines:
    the reader's first block is to be `lead` bytes longer than the others. Then its blocks end at
    the same places as when the whole file is read.
    """

    file: File
    start: int = 0
    stop: int | None = None
    lead: int = 0
    head: bytes = b""

    def opened(self) -> File:
        """Return the stretch as a file; raise SourceError if the whole file has become shorter."""
        if self.stop is None:
            return self.file
        data = _bytes_of(self.file, self.start, self.stop)
        if len(data) < self.stop - self.start:
            raise SourceError(
                f"{self.file.uri} became shorter while it was being copied. Start again when "
                "nothing writes to it"
            )
        cut = Cut(self.start, self.head + data, self.lead)
        return replace(self.file, cut=cut)


def cut_lines(file: File) -> list[Stretch]:
    """Split a JSON Lines file into stretches of about CUT_BYTES, each of whole lines.

    Returns one stretch for a file that is small, compressed, or a JSON array.
    """
    size = file.info.size
    if size <= CUT_BYTES or ending(file.info.path)[1] or is_array(file):
        return [Stretch(file)]
    starts = {0: 0}  # start of a stretch: the multiple of CUT_BYTES that it precedes
    for at in range(CUT_BYTES, size, CUT_BYTES):
        starts.setdefault(_line_before(file, at), at)
    ends = pairwise([*starts, size])
    return [Stretch(file, a, b, lead=starts[a] - a) for a, b in ends if a < b]


def cut_csv(file: File, options: Csv, delimiter: str, everywhere: Everywhere) -> list[Stretch]:
    """Split a CSV file into stretches of about CUT_BYTES, each of whole rows.

    Returns one stretch for a file that is small or cannot be split (compressed, other encodings
    than UTF-8, ambiguous quotes, ...). `everywhere` scans the parts of the file for quotes, in
    parallel.
    """
    size, quote = file.info.size, options.quote.encode()
    plain = options.encoding == "utf-8" and not options.escape and not options.skip_rows
    if size <= CUT_BYTES or ending(file.info.path)[1] or not plain or len(quote) > 1:
        return [Stretch(file)]
    scan = _Scan(file, quote, delimiter.encode())
    places = range(0, size, CUT_BYTES)
    found = dict(everywhere(scan, places, size))
    edges, odd = [0], 0
    for number in range(len(places)):
        seen = found[number][odd]
        if number and seen.line_end is not None:
            edges.append(seen.line_end)
        if not seen.clear:
            return [Stretch(file)]
        odd = seen.quotes % 2
    head = _header(file, quote) if options.header else b""
    if odd or head is None or len(edges) == 1:
        return [Stretch(file)]
    ends = pairwise([*edges, size])
    return [Stretch(file, a, b, head=head if a else b"") for a, b in ends if a < b]


class _Seen:
    """What a scan of a part of a CSV file finds, under an assumption about its beginning.

    `inside` is the assumption: 1 if the part begins inside quotes, 0 if outside. `clear`: each
    quote so far opens or closes a value. `quotes` is the number of quotes so far, plus `inside`.
    `line_end` is the offset in the file after the first line break outside quotes. It is None if
    the first window of the part (up to SCAN_BYTES) has no such line break.
    """

    def __init__(self, inside: int) -> None:
        self.quotes, self.clear = inside, True
        self.line_end: int | None = None
        self._first = True

    def look(
        self, data: bytes, places: np.ndarray, opens: np.ndarray, closes: np.ndarray, at: int
    ) -> None:
        """Process a window of the part; the first and the last byte of `data` are only context.

        `at` is the offset in the file of the first byte of `data`. `places` are the positions of
        quotes in `data`; `opens` and `closes` say of each whether it may open or close a value.
        """
        opening = (np.arange(len(places)) + self.quotes) % 2 == 0
        self.clear = self.clear and bool(np.where(opening, opens, closes).all())
        if self._first:
            self._first = False
            lines = np.flatnonzero(np.frombuffer(data, np.uint8)[1:-1] == NEWLINE) + 1
            outside = lines[(np.searchsorted(places, lines) + self.quotes) % 2 == 0]
            self.line_end = at + int(outside[0]) + 1 if len(outside) else None
        self.quotes += len(places)


@dataclass(frozen=True)
class _Scan:
    file: File
    quote: bytes
    delimiter: bytes

    def __call__(self, start: int) -> tuple[_Seen, _Seen]:
        """Scan the part that begins at byte `start`, of up to CUT_BYTES.

        Returns (findings if it begins outside quotes, findings if it begins inside).
        """
        seen = _Seen(0), _Seen(1)
        edges = np.frombuffer(self.delimiter + b"\r\n" + self.quote, np.uint8)
        none: Any = np.zeros(0, np.int64)
        for at, data in self._windows(start):
            places, opens, closes = none, none, none
            if self.quote and self.quote in data:
                values = np.frombuffer(data, np.uint8)
                places = np.flatnonzero(values[1:-1] == self.quote[0]) + 1
                opens, closes = (np.isin(values[places + step], edges) for step in (-1, 1))
            for one in seen:
                one.look(data, places, opens, closes, at)
        return seen

    def _windows(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of windows over the part at `start`.

        The bytes are the window and one byte of context on each side. Beyond the ends of the file,
        the context is a line break. `offset` is the offset in the file of the first byte of
        context, so it is -1 for the first window of the file.
        """
        size = self.file.info.size
        stop, at = min(start + CUT_BYTES, size), max(start - 1, 0)
        tail = b"" if start else b"\n"
        begins = start - 1
        with opened_again(self.file) as handle:
            handle.seek(at)
            while at <= stop:
                data = handle.read(min(SCAN_BYTES, stop + 1 - at)) or b"\n"
                at += len(data)
                data = tail + data
                yield begins, data
                begins, tail = begins + len(data) - 2, data[-2:]


def beginning(file: File) -> File:
    """Return a text file cut to the whole lines in its first HEADER_BYTES.

    The result is for estimates of columns and row counts: a quoted value that spans lines may be
    cut off. A small or compressed file and a JSON array are returned whole.
    """
    if file.info.size <= HEADER_BYTES or ending(file.info.path)[1] or is_array(file):
        return file
    data = _bytes_of(file, 0, HEADER_BYTES)
    return replace(file, cut=Cut(0, data[: data.rfind(b"\n") + 1]))


def _header(file: File, quote: bytes) -> bytes | None:
    """Return the start of a CSV file, up to the end of its first non-empty row.

    None if that row does not end within the first HEADER_BYTES.
    """
    data = _bytes_of(file, 0, HEADER_BYTES)
    at = data.find(b"\n")
    while at >= 0:
        head = data[: at + 1]
        if head.removeprefix(UTF8_MARK).strip() and not (quote and head.count(quote) % 2):
            return head
        at = data.find(b"\n", at + 1)
    return None


def _line_before(file: File, at: int) -> int:
    """Return the offset after the last line break before byte `at`; 0 if there is none."""
    window = LINE_WINDOW
    while True:
        start = max(0, at - window)
        found = _bytes_of(file, start, at).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        if not start:
            return 0
        window *= 8


def _bytes_of(file: File, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file; fewer if the file ends before.

    Raises SourceError if the file was deleted, and the store's errors.
    """
    with opened_again(file) as handle:
        handle.seek(start)
        return handle.read(stop - start)


@contextmanager
def opened_again(file: File) -> Iterator[BinaryIO]:
    """Open a listed file; raise SourceError if it was deleted meanwhile."""
    try:
        with file.store.open(file.info.path) as handle:
            yield handle
    except FileNotFoundError:
        raise SourceError(
            f"{file.uri} was deleted while it was being copied. Restore it, or start again without "
            "it"
        ) from None
