"""Notes which files of the result are written and verified.

A finalizer that resumes after a crash does not write the files with a valid note again. Losing
notes costs only time. A note is valid if it belongs to the present layout of the result, and if the
store still lists the file with the size and identity (`FileSeen`) that the note gives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import (
    PART_NOTE_NAME,
    PART_NOTES,
    RESULT_FOLDERS,
    ROW_SUMS,
    row_sums_path,
)
from prefect_raybatch.ledger.part_layout import PartSpan
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import Part, dump
from prefect_raybatch.ledger.strict import Count, StrictRecord, read_json
from prefect_raybatch.storage import FileInfo, Store, read_ahead

log = logging.getLogger(__name__)

READ_AT_ONCE = 16


@dataclass(frozen=True)
class FileSeen(StrictRecord):
    """The identity of a file, as a store lists it.

    `etag` is set on S3, `mtime_ns` (modification time) and `inode` on a local disk.
    """

    size: Count
    etag: str | None
    mtime_ns: int | None
    inode: int | None

    @classmethod
    def of(cls, info: FileInfo) -> FileSeen:
        return cls(info.size, info.etag, info.mtime_ns, info.inode)


@dataclass(frozen=True)
class PartNote(StrictRecord):
    """A note that the file `part` of the result was written and verified.

    `layout` is the name of the layout's table. `kind` and `index` say which `PartSpan` of the
    layout the file is for. `file` is the identity of the file when it was verified; `sums` is that
    of the file with its row checksums.
    """

    layout: str
    kind: str
    index: Count
    part: Part
    file: FileSeen
    sums: FileSeen

    def put(self, store: Store) -> None:
        """Write the note; an error is only logged, because the result does not depend on notes."""
        try:
            put_record(store, _path(self.kind, self.index), dump(asdict(self)))
        except RayBatchError as error:
            log.info("the note of %s was not written: %s", self.part.path, error)


def unchanged_parts(store: Store, layout: str, spans: tuple[PartSpan, ...]) -> dict[str, Part]:
    """Return {path: part} of the files that were written, noted, and not changed since.

    `spans` are the files of the layout; `layout` is the name of its table. Notes about other files
    or another layout do not count, and neither do unreadable notes.
    """
    names = [info.path for info in store.list(PART_NOTES) if PART_NOTE_NAME.match(info.path)]
    if not names:
        return {}
    folders = [*RESULT_FOLDERS.values(), ROW_SUMS]
    there = {info.path: FileSeen.of(info) for folder in folders for info in store.list(folder)}
    spans_by_key = {(span.kind, span.index): span for span in spans}
    found = {}
    for note in _read(store, names):
        span = spans_by_key.get((note.kind, note.index))
        if span is None or note.layout != layout:
            continue
        part = note.part
        fits = (part.path, part.rows, part.bytes) == (span.path, span.rows, note.file.size)
        seen = there.get(part.path), there.get(row_sums_path(part.path))
        if fits and seen == (note.file, note.sums):
            found[part.path] = part
    return found


def _read(store: Store, names: list[str]) -> Iterator[PartNote]:
    def one(name: str) -> PartNote | None:
        try:
            return read_json(_NOTE, read_record(store, name), name)
        except (CorruptRun, FileNotFoundError) as error:
            log.info("ignored an unreadable note: %s", error)
            return None

    yield from filter(None, read_ahead(one, names, READ_AT_ONCE, READ_AT_ONCE))


def _path(kind: str, index: int) -> str:
    return f"{PART_NOTES}/{kind}-{index:05d}.json"


_NOTE = TypeAdapter(PartNote)
