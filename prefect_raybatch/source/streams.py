"""Text files as streams of bytes, and what is said when the bytes are no text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.source.find import File, ending

BLOCK_BYTES = 8 << 20  # text parsed at a time


def one_line(error: BaseException) -> str:
    """The text of `error` for the middle of a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def open_bytes(file: File) -> Iterator[Any]:
    """The file's bytes from the start, decompressed: what pyarrow's readers take."""
    compression = ending(file.info.path)[1]
    try:
        with file.store.open(file.info.path) as handle:
            # pyarrow reads CSV ahead in threads of its own, which need Python for any handle but
            # a real file: see Store.open.
            path = getattr(handle, "name", None)
            real = isinstance(handle, io.BufferedReader) and isinstance(path, str)
            native = pa.OSFile(path) if real else pa.PythonFile(handle, mode="r")
            yield pa.CompressedInputStream(native, compression) if compression else native
    except FileNotFoundError:
        raise SourceError(f"{file.uri}: was deleted while the input was being listed") from None


def not_utf8(file: File) -> str:
    """Names the first line that is no UTF-8; reads the file again, which only errors pay for."""
    place, number = "", 0
    with suppress(OSError, ValueError, RayBatchError), open_bytes(file) as stream:
        for number, line in enumerate(io.BufferedReader(Raw(stream)), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                place = f", line {number}"
                break
    return (
        f"{file.uri}{place}: is not UTF-8, the only encoding read; convert it, for example with "
        "iconv -f latin1 -t utf-8"
    )


class Raw(io.RawIOBase):
    """A pyarrow stream as a raw file; pyarrow's own buffering wants to seek."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
