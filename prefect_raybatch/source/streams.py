"""Opens text files as decompressed byte streams."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.source.bounds import EXPANSION_BOUND, FREE_BYTES
from prefect_raybatch.source.find import File, ending

BLOCK_BYTES = 8 << 20  # bytes of text parsed at a time
TEXT_CHUNK = 1 << 18  # bytes recoded at a time


def one_line(error: BaseException) -> str:
    """Return an error's text in one line of at most 200 characters; its class name if empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def open_text(
    file: File, encoding: str, unbroken: bool = False, more: bytes = b""
) -> Iterator[Any]:
    """Open a file's text as a stream of UTF-8 bytes, from the start, followed by the bytes `more`.

    With `unbroken`, no read ends between a carriage return and a line feed.
    """
    with open_bytes(file) as stream:
        text: Any = stream
        if encoding != "utf-8":  # a short read would be the end of a block to pyarrow
            text = io.BufferedReader(Recoded(stream, encoding))
        if more:
            text = io.BufferedReader(Followed(text, more))
        if unbroken:
            text = Unbroken(text)
        try:
            yield text if text is stream else pa.PythonFile(text, mode="r")
        finally:
            if unbroken:
                text.end()


@contextmanager
def open_bytes(file: File) -> Iterator[Any]:
    """Open a stream of the file's decompressed bytes for pyarrow's readers, at the start.

    If the file has a `cut`, the stream has only the content of the cut. Raises SourceError if the
    file was deleted, or decompresses to more than EXPANSION_BOUND and FREE_BYTES allow.
    """
    if file.cut is not None:
        yield pa.BufferReader(file.cut.content)
        return
    compression = ending(file.info.path)[1]
    try:
        with file.store.open(file.info.path) as handle:
            # pyarrow reads CSV ahead in threads of its own, which need Python for any handle but
            # a real file: see Store.open.
            path = getattr(handle, "name", None)
            real = isinstance(handle, io.BufferedReader) and isinstance(path, str)
            native = pa.OSFile(path) if real else pa.PythonFile(handle, mode="r")
            if compression is None:
                yield native
                return
            most = max(FREE_BYTES, file.info.size * EXPANSION_BOUND.value())
            with pa.CompressedInputStream(native, compression) as stream:
                yield pa.PythonFile(Expanded(stream, most, file.uri), mode="r")
    except FileNotFoundError:
        raise SourceError(
            f"{file.uri} was deleted while the input was being listed. Restore it, or start again "
            "without it"
        ) from None


class Readable(Protocol):
    """A stream of bytes that is only read."""

    def read(self, size: int) -> bytes: ...


class Raw(io.RawIOBase):
    """Wraps a pyarrow stream as a raw file, because pyarrow's own buffering requires seeking."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Expanded(Raw):
    """A decompressed stream that raises SourceError after more than `most` bytes."""

    def __init__(self, stream: Readable, most: int, where: str) -> None:
        super().__init__(stream)
        self._left, self._where = most, where

    def readinto(self, buffer: Any) -> int:
        read = super().readinto(buffer)
        self._left -= read
        if self._left < 0:
            raise EXPANSION_BOUND.exceeded_error(
                self._where, "decompresses to far more than its size"
            )
        return read


class Followed(Raw):
    """A stream followed by further bytes."""

    def __init__(self, stream: Readable, more: bytes) -> None:
        super().__init__(stream)
        self._more: io.BytesIO | None = io.BytesIO(more)

    def readinto(self, buffer: Any) -> int:
        read = super().readinto(buffer)
        if not read and self._more is not None:
            self._stream, self._more = self._more, None
            read = super().readinto(buffer)
        return read


class Unbroken:
    """A stream whose reads never end between a carriage return and a line feed.

    A carriage return at the end of a read is held back for the next read.
    """

    closed = False

    def __init__(self, stream: Readable) -> None:
        self._stream, self._held = stream, b""
        self._ended, self._reading = False, Lock()

    def read(self, size: int) -> bytes:
        with self._reading:
            if self._ended:
                return b""
            data: bytes = self._stream.read(size - len(self._held))
            data, self._held = (self._held + data if self._held else data), b""
            if data[-1:] == b"\r" and len(data) > 1:
                data, self._held = data[:-1], data[-1:]
            return data

    def close(self) -> None:
        """Do nothing: whoever opened the stream closes it."""

    def end(self) -> None:
        """Report the end of the stream from now on, so that pyarrow's read-ahead threads stop."""
        with self._reading:
            self._ended = True


class Recoded(io.RawIOBase):
    """A stream of text in `encoding`, read as UTF-8. Undecodable text raises UnicodeDecodeError."""

    def __init__(self, stream: Readable, encoding: str) -> None:
        self._stream, self._held = stream, b""
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held and not self._ended:
            data = self._stream.read(TEXT_CHUNK)
            self._ended = not data
            self._held = self._decoder.decode(data, final=self._ended).encode()
        part, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
