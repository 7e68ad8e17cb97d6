"""A raw file whose reader asks for bytes by their offset."""

from __future__ import annotations

import errno
import io
from abc import abstractmethod
from typing import Any


class SeekableReader(io.RawIOBase):
    """A file whose subclass supplies the bytes in `read_at` and its `size` on demand."""

    def __init__(self) -> None:
        self._position = 0

    @property
    @abstractmethod
    def size(self) -> int:
        """The length of the file in bytes."""

    @abstractmethod
    def read_at(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer; none only at the end of the file."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        place = offset + (self.size if whence == io.SEEK_END else base[whence])
        if place < 0:
            raise OSError(errno.EINVAL, "seek before the start")
        self._position = place
        return place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(self._position, self._position + len(view)) if len(view) else b""
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
