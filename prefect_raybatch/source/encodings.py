"""Judges a text file's encoding by its first bytes, and finds its first undecodable byte."""

from __future__ import annotations

import codecs
from contextlib import suppress
from pathlib import PurePosixPath

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.source import streams
from prefect_raybatch.source.find import File
from prefect_raybatch.source.streams import open_bytes

MARKS = {  # the longer ones first: they begin like the shorter
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
OTHER_KINDS = {  # first bytes of files that are not text, and what to do
    b"\x1f\x8b": "is compressed with gzip. Rename it to {name}.gz",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Rename it to {name}.zst",
    b"\x04\x22\x4d\x18": "is compressed with lz4. Rename it to {name}.lz4",
    b"BZh": "is compressed with bzip2. Rename it to {name}.bz2",
    b"PK\x03\x04": "is a ZIP file or an Excel workbook. Unpack it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "is an Excel workbook. Save it as CSV",
    b"PAR1": "is a Parquet file. Set source.format to parquet, or rename it to {name}.parquet",
}
UTF8_MARK = b"\xef\xbb\xbf"
SAMPLE = 1 << 16
CSV_ENCODING = (
    "Set source.csv.encoding to the encoding of the file, such as cp1252 (Excel in Western Europe) "
    "or latin-1"
)
UTF8_ONLY = "JSON must be UTF-8: convert the file, for example with iconv -f latin1 -t utf-8"


def check_kind(file: File, head: bytes) -> None:
    """Raise SourceError if a file's first bytes, `head`, show that it is no text file.

    Compressed files, Excel workbooks and Parquet files are recognized, whatever the file's name.
    """
    for mark, said in OTHER_KINDS.items():
        if head.startswith(mark):
            name = PurePosixPath(file.info.path).name
            raise SourceError(f"{file.uri} {said.format(name=name)}")


def check_encoding(file: File) -> None:
    """Raise SourceError if a JSON file's first bytes show UTF-16, UTF-32 or no text."""
    with open_bytes(file) as stream:
        head = stream.read(4)
    check_kind(file, head)
    encoding, said = _wide(head)
    if encoding is not None:
        raise SourceError(
            f"{file.uri} is {encoding} ({said}). JSON must be UTF-8: convert the file, for example "
            f"with iconv -f {encoding} -t UTF-8"
        )


def check_csv_encoding(file: File, encoding: str) -> None:
    """Raise SourceError if the first bytes of a CSV file show that it is not in `encoding`.

    Without this check, most files would be decoded to wrong text, without an error.
    """
    with open_bytes(file) as stream:
        head = stream.read(SAMPLE)
    check_kind(file, head)
    found, said = _wide(head)
    wide = encoding.startswith(("utf-16", "utf-32"))
    if found is not None:
        right = codecs.lookup(found).name
        # Without a mark Python takes UTF-16 for little-endian.
        if encoding != right and f"{encoding}-le" != right:
            raise SourceError(f"{file.uri} is {found} ({said}). Set source.csv.encoding to {right}")
    elif wide and b"\0" not in head:
        raise SourceError(
            f"{file.uri} is not {encoding}: there are no zero bytes between its first characters. "
            "Remove source.csv.encoding if the file is UTF-8, or correct it"
        )
    elif encoding != "utf-8" and not wide and _is_utf8(head):
        raise SourceError(
            f"{file.uri} is UTF-8, not {encoding}: its first special characters are valid UTF-8. "
            "Remove source.csv.encoding"
        )


def detect_encoding(file: File) -> tuple[str, bool]:
    """Return (Python's name of a file's encoding, whether it is a guess), from its first bytes.

    UTF-8, UTF-16 and UTF-32 are recognized. Else the guess is cp1252, in which Excel writes CSV in
    Western Europe, or latin-1 if bytes are not valid in cp1252.
    """
    with open_bytes(file) as stream:
        head = stream.read(SAMPLE)
    check_kind(file, head)
    found, _ = _wide(head)
    if found is not None:
        return codecs.lookup(found).name, False
    for name, guessed in (("utf-8", False), ("cp1252", True)):
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder(name)().decode(head)  # may end within a character
            return name, guessed
    return "latin-1", True


def not_decoded(file: File, encoding: str, remedy: str) -> str:
    """Return the error message for a file that is not in `encoding`; it ends with `remedy`.

    Reads the file again to name the line and the first byte that cannot be decoded.
    """
    place, said = "", ""
    decoder = codecs.getincrementaldecoder(encoding)()
    before, line, data = 0, 1, b""
    with suppress(OSError, ValueError, RayBatchError), open_bytes(file) as stream:
        while True:
            data = stream.read(streams.TEXT_CHUNK)
            try:
                line += decoder.decode(data, final=not data).count("\n")
            except UnicodeDecodeError as error:
                # `error.object` begins with bytes that the decoder kept from the chunk before.
                at = before + error.start - (len(error.object) - len(data))
                line += error.object[: error.start].decode(encoding, "replace").count("\n")
                byte = error.object[error.start]
                place, said = f", line {line}", f" (byte 0x{byte:02x} at offset {at})"
                break
            before += len(data)
            if not data:
                break
    name = "UTF-8" if encoding == "utf-8" else encoding
    return f"{file.uri}{place} is not {name}{said}. {remedy}"


def _wide(head: bytes) -> tuple[str | None, str]:
    """Return (name of the encoding, how the first bytes show it) for UTF-16 and UTF-32.

    The name is UTF-16 or UTF-32, possibly followed by LE or BE for the order of the bytes. Returns
    (None, "") if the bytes show neither encoding.
    """
    found = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
    if found is not None:
        return found, "it begins with a byte order mark"
    head = head[:4]
    if b"\0" not in head or not head.strip(b"\0"):
        return None, ""
    found = "UTF-32" if head.count(0) == 3 else "UTF-16"
    found += "BE" if head[:1] == b"\0" else "LE"
    return found, "its first characters are padded with zero bytes"


def _is_utf8(head: bytes) -> bool:
    """Return whether the bytes are surely UTF-8.

    They are if they begin with its byte order mark, or if they are valid UTF-8 with at least one
    character beyond ASCII. ASCII alone proves nothing, because it is valid in other encodings too.
    """
    if head.startswith(UTF8_MARK):
        return True
    if head.isascii():
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # may end within a character
    except UnicodeDecodeError:
        return False
    return True
