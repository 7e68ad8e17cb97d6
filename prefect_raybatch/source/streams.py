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
MARKS = {  # the longer ones first: they begin like the shorter
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


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


def check_encoding(file: File) -> None:
    """Raises SourceError for a file whose first bytes say that it is UTF-16 or UTF-32."""
    with open_bytes(file) as stream:
        head = stream.read(4)
    encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
    said = "its first bytes, the byte order mark, say"
    if encoding is None:
        if b"\0" not in head or not head.strip(b"\0"):
            return
        encoding = "UTF-32" if head.count(0) == 3 else "UTF-16"
        encoding += "BE" if head[:1] == b"\0" else "LE"
        said = "the zeros between its first characters say"
    raise SourceError(
        f"{file.uri}: is {encoding}, as {said}; only UTF-8 is read. Convert it, for example with "
        f"iconv -f {encoding} -t UTF-8"
    )


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
