"""Splits a JSON array of objects into its items without holding more than a few of them.

Python's decoder finds where an item ends. The text of the item is not changed, so that one parser
reads arrays and JSON Lines alike. This module also detects JSON that is nested too deep, before it
is parsed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

import numpy as np

from prefect_raybatch.errors import SourceError
from prefect_raybatch.source import streams
from prefect_raybatch.source.encodings import UTF8_MARK, UTF8_ONLY, not_decoded
from prefect_raybatch.source.find import File
from prefect_raybatch.source.streams import open_bytes

ITEM_CHARACTERS = 64 << 20  # a longer item: the file is not an array of rows
_SPACE = re.compile(r"[ \t\r\n]*")
_BREAKS = str.maketrans("\r\n", "  ")  # only between tokens: inside strings they are escaped
_CUT = 16  # characters: so near to the end, an error may mean that more must be read
# Levels of nesting. At some thousand, pyarrow's parser ends the process with a segmentation fault,
# and Python's own code reaches its recursion limit.
MOST_LEVELS = 100
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_OPEN, _CLOSE = np.zeros(256, np.int32), np.zeros(256, np.int32)
_OPEN[[*b"[{"]] = 1
_CLOSE[[*b"]}"]] = 1


def is_array(file: File) -> bool:
    """Return whether the file begins with `[`, after white space and a UTF-8 mark (BOM)."""
    with open_bytes(file) as stream:
        while head := stream.read(streams.TEXT_CHUNK):
            head = head.removeprefix(UTF8_MARK).lstrip(b" \t\r\n")
            if head:
                return bool(head.startswith(b"["))
    return False


def array_blocks(file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the items of a JSON array as JSON Lines, in blocks of BLOCK_BYTES or a little more.

    Each block is (number of its first item, lines); items are numbered from 1. The last block may
    be smaller. Raises SourceError for anything but an array of objects.
    """
    first, held, size = 1, [], 0
    for number, item in enumerate(_items(file), 1):
        line = item.translate(_BREAKS).encode()
        held.append(line)
        size += len(line) + 1
        if size >= streams.BLOCK_BYTES:
            yield first, b"\n".join(held) + b"\n"
            first, held, size = number + 1, [], 0
    if held:
        yield first, b"\n".join(held) + b"\n"


def _items(file: File) -> Iterator[str]:
    """Yield the JSON text of each item; raise SourceError for anything but an array of objects."""
    text = _Text(file)
    decoder = json.JSONDecoder()
    text.take("[", "array")
    if text.peek() == "]":
        text.take("]", "array")
        return text.end()
    number = 1
    while True:
        if text.peek() != "{":
            raise text.wrong(f"item {number} is not an object. Write an array of objects")
        yield text.value(decoder, number)
        if text.peek() == "]":
            text.take("]", "array")
            return text.end()
        text.take(",", f"item {number}")
        number += 1


class _Text:
    """The decoded text of a file, read in chunks, with a cursor in it."""

    def __init__(self, file: File) -> None:
        self._file, self._at, self._text = file, 0, ""
        self._chunks = _decoded(file)

    def peek(self) -> str:
        """Skip white space and return the next character without reading past it; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, wanted: str, where: str) -> None:
        found = self.peek()
        if found != wanted:
            after = f"after {where}" if where != "array" else "at the start"
            what = f"{found!r}" if found else "the end of the file"
            expected = f"{wanted!r} or ']'" if wanted == "," else repr(wanted)
            raise self.wrong(
                f"{after}: {expected} expected, but found {what}. Write the file again"
            )
        self._at += 1

    def value(self, decoder: json.JSONDecoder, number: int) -> str:
        """Return the text of the JSON value at the cursor, and move past it.

        Raises SourceError that names item `number` if the value is invalid, too long or nested too
        deep.
        """
        while True:
            try:
                _, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _CUT or "Unterminated" in error.msg
                if cut and len(self._text) - self._at > ITEM_CHARACTERS:
                    raise self.wrong(
                        f"item {number} is longer than 64 MiB. Check that the file is an array of "
                        "rows"
                    ) from None
                # Read as much again, so that an item of any size is decoded only a few times.
                if not cut or not self._more(len(self._text) - self._at):
                    raise self.wrong(
                        f"item {number} is not valid JSON ({error.msg}). Fix the item"
                    ) from None
            except RecursionError:
                raise self.wrong(
                    f"item {number} is nested more than {MOST_LEVELS} levels deep. Write flatter "
                    "objects, or write the nested part as text"
                ) from None
            else:
                found = self._text[self._at : end]
                self._at = end
                return found

    def end(self) -> None:
        """Raise SourceError unless only white space is left in the file."""
        if self.peek():
            raise self.wrong(
                "after the array: the end of the file expected, but found more. Write it again"
            )

    def wrong(self, message: str) -> SourceError:
        return SourceError(f"{self._file.uri}, {message}")

    def _more(self, least: int = 1) -> bool:
        """Read at least `least` more characters, or up to the end; drop those before the cursor.

        Returns False if nothing was left to read.
        """
        parts = [self._text[self._at :]]
        while least > 0:
            chunk = next(self._chunks, "")
            if not chunk:
                break
            parts.append(chunk)
            least -= len(chunk)
        self._text, self._at = "".join(parts), 0
        return len(parts) > 1


def _decoded(file: File) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    first = True
    with open_bytes(file) as stream:
        while True:
            data = stream.read(streams.TEXT_CHUNK)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError:
                raise SourceError(not_decoded(file, "utf-8", UTF8_ONLY)) from None
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not data:
                return


def is_too_deep(text: bytes) -> bool:
    """Return whether arrays and objects in a JSON text are nested deeper than MOST_LEVELS."""
    if text.count(b"[") + text.count(b"{") <= MOST_LEVELS:
        return False
    values = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    return bool(np.cumsum(_OPEN[values] - _CLOSE[values]).max(initial=0) > MOST_LEVELS)


def deep_line(block: bytes) -> int | None:
    """Return the 0-based number of the first line nested deeper than MOST_LEVELS, or None."""
    if block.count(b"[") + block.count(b"{") <= MOST_LEVELS:
        return None
    values = np.frombuffer(block, np.uint8)
    ends = np.append(np.flatnonzero(values == ord("\n")), len(values))
    opened = np.searchsorted(np.flatnonzero(_OPEN[values]), ends)
    suspects = np.flatnonzero(np.diff(opened, prepend=0) > MOST_LEVELS)
    if not len(suspects):
        return None
    lines = block.split(b"\n")
    return next((int(number) for number in suspects if is_too_deep(lines[number])), None)
