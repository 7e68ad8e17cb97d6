"""Hash of a Parquet footer: a cheap way to tell whether a file was rewritten."""

from __future__ import annotations

import hashlib
import os
from typing import BinaryIO

END = 8  # bytes: the length of the metadata, and the magic word
DIGITS = 32  # of the hash in hex: 128 bits


def footer_digest(handle: BinaryIO) -> str:
    """Return a hash of the metadata at the end of a Parquet file.

    It covers offsets, sizes and statistics of all column chunks. Raises ValueError if there is no
    footer.
    """
    size = handle.seek(0, os.SEEK_END)
    handle.seek(max(0, size - END))
    end = handle.read(END)
    length = int.from_bytes(end[:4], "little") + END
    if end[4:] not in (b"PAR1", b"PARE") or length > size:
        raise ValueError("no Parquet footer")
    handle.seek(size - length)
    return hashlib.sha256(handle.read(length)).hexdigest()[:DIGITS]
