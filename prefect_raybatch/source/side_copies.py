"""Copies files to a snapshot in parallel, with the rows and types of a sequential copy.

Each share (some small files, or a part of a large one) is written separately with the types known
so far, and reports the types that it met. Merged in file order, these are the snapshot's types; a
share written with others is read again. A cast would not do, because it loses how `True` was
written.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.ledger.layout import INPUT
from prefect_raybatch.source import cuts
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape, TypesSeen
from prefect_raybatch.source.copied_shares import (
    CopyShare,
    ShareCopied,
    copy_key,
    found_copied,
    note_copied,
)
from prefect_raybatch.source.copies import COPY_TRIES, Chosen
from prefect_raybatch.source.cuts import Everywhere, Stretch
from prefect_raybatch.source.find import File, Inventory
from prefect_raybatch.source.snapshot_writer import SnapshotWriter
from prefect_raybatch.source.text_types import common_text_type
from prefect_raybatch.storage import Store

SHARE_FILES = 256  # of small files a share: each costs a store several requests
REMOTE_AT_ONCE = 8  # shares from a remote store: it is waited for more than it is worked


class Reader(Protocol):
    """Yields blocks of a file; notes the names of all its columns."""

    def __call__(self, file: File, *, known: dict[str, None]) -> Iterator[pa.Table]: ...


class NotSideBySide(Exception):
    """Reading a part of this file failed, or its parts are incompatible.

    Only a reader from the start can say in which row, or that nothing is wrong.
    """

    def __init__(self, file: File) -> None:
        super().__init__(file.uri)
        self.file = file


@dataclass(frozen=True)
class ShareCopier:
    """Copies a share to `store`, unless an interrupted copy already did.

    `known` are the known types of any column, in the order of the snapshot's, `of_files` those of
    each file; `read_as` as in `copy_key`, the rest as in `Shape`.
    """

    reader: Reader
    store: Store
    attempt: str
    chosen: Chosen | None
    text: bool
    union: bool
    typed: frozenset[str]
    read_as: str = ""
    known: dict[str, pa.DataType] = field(default_factory=dict)
    of_files: Mapping[str, dict[str, pa.DataType]] = field(default_factory=dict)

    def __call__(self, share: CopyShare) -> ShareCopied:
        """Copy a share. Errors of reading are returned as values.

        Which of them counts is known only once all earlier shares are done.
        """
        names = {stretch.file.uri for stretch in share}
        mine = {uri: types for uri, types in self.of_files.items() if uri in names}
        key = copy_key(self.read_as, share, self.known, mine)
        if (found := found_copied(self.store, key)) is not None:
            return found
        made = self._copied(share, mine)
        note_copied(self.store, key, made)
        return made

    def _copied(self, share: CopyShare, mine: dict[str, dict[str, pa.DataType]]) -> ShareCopied:
        known: dict[str, None] = {}
        seen = TypesSeen(self.text, self.union, self.typed, dict(self.known), mine)
        parts = SnapshotWriter(self.store, f"{INPUT}/{self.attempt}-{uuid.uuid4()}")
        try:
            read, unfit, error = self._copy(share, known, seen, parts)
            files = None if error or unfit else parts.close()
        except BaseException:
            parts.abandon()
            raise
        if files is None:
            parts.abandon()
        return ShareCopied(
            files,
            written(seen.schema),
            tuple(seen.changes),
            tuple(known),
            parts.row_bytes,
            read,
            unfit,
            error,
            any(stretch.stop is not None for stretch in share),
        )

    def _copy(
        self, share: CopyShare, known: dict[str, None], seen: TypesSeen, parts: SnapshotWriter
    ) -> tuple[int, ConfigError | None, RayBatchError | None]:
        read, unfit, first = 0, None, None
        try:
            for stretch in share:
                for table in self.reader(stretch.opened(), known=known):
                    seen.see(stretch.file.uri, table)
                    schema = seen.schema
                    read += table.num_rows
                    first = first or written(schema)
                    if written(schema) != first or seen.clash:
                        parts.abandon()
                    if self.chosen is not None:
                        try:
                            table = self.chosen.rows(table, written(schema))
                        except ConfigError as fault:
                            unfit = fault
                            parts.abandon()
                            continue
                        schema = self.chosen.schema(schema)
                    parts.write(table, schema)
        except RayBatchError as error:
            return read, unfit, error
        return read, unfit, None


def shares_of(
    files: Sequence[File], stretches: Callable[[File], Sequence[Stretch]]
) -> Iterator[CopyShare]:
    """Yield all files in order: small neighbours together, larger ones in stretches."""
    held: list[Stretch] = []
    size = 0
    for file in files:
        parts = stretches(file)
        if len(parts) == 1 and size + file.info.size <= cuts.CUT_BYTES and len(held) < SHARE_FILES:
            held.extend(parts)
            size += file.info.size
            continue
        if held:
            yield tuple(held)
        held, size = ([*parts], file.info.size) if len(parts) == 1 else ([], 0)
        if len(parts) > 1:
            yield from ((part,) for part in parts)
    if held:
        yield tuple(held)


def in_threads(cpus: int, remote: bool) -> Everywhere:
    """Return a runner in threads of this process.

    They mostly read and write without Python's lock.
    """

    def everywhere(
        work: Callable[[Any], Any], items: Iterable[Any], size: int
    ) -> Generator[tuple[int, Any], None, None]:
        with ThreadPoolExecutor(max(cpus, REMOTE_AT_ONCE) if remote else cpus) as pool:
            under_way = {pool.submit(work, item): n for n, item in enumerate(items)}
            try:
                for done in as_completed(under_way):
                    yield under_way[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    return everywhere


def copy_shares(
    shares: Sequence[CopyShare],
    copier: ShareCopier,
    shape: Shape,
    guess: Mapping[str, pa.DataType],
    everywhere: Everywhere,
    known: dict[str, None],
    kind: str,
) -> Inventory:
    """Return the snapshot of all shares, copied by `copier` with the types known so far.

    Raises what a sequential copy raises, and `NotSideBySide` for what only that can report.
    `guess`: the likely types of columns.
    """
    made: list[ShareCopied | None] = [None] * len(shares)
    for again in range(COPY_TRIES):
        todo = [n for n, one in enumerate(made) if one is None or not one.under(shape)]
        types = dict(guess) if not again else shape.columns
        files = {s.file.uri: shape.types_of(s.file.uri) for n in todo for s in shares[n]}
        work = replace(copier, known=types, of_files={u: t for u, t in files.items() if t})
        _round(todo, shares, made, shape, partial(everywhere, work))
        schema = written(shape.schema)
        found = [one for one in made if one is not None]
        if all(one.under(shape) for one in found):
            return _inventory(found, shape, copier.chosen, known, kind)
        for one in found:
            if one.unfit is not None and one.schema == schema:
                raise one.unfit
    raise SourceError(
        "source.uri: the input keeps changing while it is being copied. Start again when nothing "
        "writes to it"
    )


def _round(
    todo: Sequence[int],
    shares: Sequence[CopyShare],
    made: list[ShareCopied | None],
    shape: Shape,
    everywhere: Callable[
        [Iterable[CopyShare], int], Generator[tuple[int, ShareCopied], None, None]
    ],
) -> None:
    """Copy these shares, and merge their types in file order."""
    size = sum(_bytes(stretch) for number in todo for stretch in shares[number])
    waiting: dict[int, ShareCopied] = {}
    one: ShareCopied
    after = 0
    with closing(everywhere((shares[number] for number in todo), size)) as copied:
        for place, one in copied:
            waiting[place] = made[todo[place]] = one
            while after in waiting:
                _take(shares[todo[after]], waiting.pop(after), shape)
                after += 1


def _take(share: CopyShare, one: ShareCopied, shape: Shape) -> None:
    """Merge the types of a share, then raise its error."""
    part = next((stretch for stretch in share if stretch.stop is not None), None)
    try:
        for uri, types in one.types:
            if part is not None and shape.text:
                before = shape.types_of(uri) or {}
                types = {n: common_text_type(before.get(n), kind) for n, kind in types.items()}
            shape.see_types(uri, types)
        if one.error is not None:
            raise one.error
    except (SourceError, ConfigError):
        if part is not None:
            raise NotSideBySide(part.file) from None
        raise


def _inventory(
    found: Sequence[ShareCopied],
    shape: Shape,
    chosen: Chosen | None,
    known: dict[str, None],
    kind: str,
) -> Inventory:
    schema, read = written(shape.schema), sum(one.read for one in found)
    if read and not len(schema):
        raise SourceError("source.uri: the rows have no columns. Check the files")
    for one in found:
        known.update(dict.fromkeys(one.known))
    files = tuple(file for one in found for file in one.files or ())
    row_bytes = max((one.row_bytes for one in found), default=0.0)
    schema = schema if chosen is None else chosen.schema(schema)
    return Inventory(files, schema, row_bytes, kind)


def _bytes(stretch: Stretch) -> int:
    size = stretch.file.info.size
    return size if stretch.stop is None else stretch.stop - stretch.start
