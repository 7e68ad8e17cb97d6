"""Copies files to a snapshot in parallel, with the rows and types of a sequential copy.

Each share (some small files, or a part of a large one) is written separately with the types known
so far, and reports the types of its values. The types of all shares are merged in file order. The
merged types are those of the snapshot. A share written with other types is read again. Its files
are not cast instead, because they no longer tell how a value was written: cast to text, the bool
read from `True` would become `true`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.source import cuts
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape, TypesSeen
from prefect_raybatch.source.copied_shares import (
    CopyShare,
    copy_key,
    read_copy_record,
    write_copy_record,
)
from prefect_raybatch.source.copies import (
    Chosen,
    Copied,
    copy_blocks,
    copy_until_settled,
    inventory_of,
)
from prefect_raybatch.source.cuts import Everywhere, Stretch
from prefect_raybatch.source.find import File, Inventory
from prefect_raybatch.source.text_types import common_text_type
from prefect_raybatch.storage import Store

SHARE_FILES = 256  # small files in a share: each costs several requests to the store
REMOTE_AT_ONCE = 8  # shares copied at once from a remote store: they mostly wait


class Reader(Protocol):
    """Function that yields blocks of a file, and adds the names of all its columns to `known`."""

    def __call__(self, file: File, *, known: dict[str, None]) -> Iterator[pa.Table]: ...


class NotSideBySide(Exception):
    """Raised if a part of `file` cannot be read, or its parts have incompatible types.

    The file must then be read from its start: that raises the error with the right row number, or
    shows that nothing is wrong.
    """

    def __init__(self, file: File) -> None:
        super().__init__(file.uri)
        self.file = file


@dataclass(frozen=True)
class ShareCopier:
    """A function that copies a share (some files, or a part of one) to `store`.

    If an earlier copy of the same share is recorded in the store, it is used instead.

    `attempt` becomes part of the files' names; `chosen` are the rows to write (None: all).
    `known` has the column types known so far, in the snapshot's order. `of_files` has the column
    types of each file, by URI. For `read_as` see `copy_key`; for `text`, `union` and `typed` see
    `Shape`.
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

    def __call__(self, share: CopyShare) -> Copied:
        """Copy a share, or find an earlier copy of it; return the outcome.

        A read error is put into the outcome, not raised: shares are copied in any order, but the
        error to raise is that of the first share in file order.
        """
        names = {stretch.file.uri for stretch in share}
        mine = {uri: types for uri, types in self.of_files.items() if uri in names}
        key = copy_key(self.read_as, share, self.known, mine)
        if (found := read_copy_record(self.store, key)) is not None:
            return found
        made = self._copied(share, mine)
        write_copy_record(self.store, key, made)
        return made

    def _copied(self, share: CopyShare, of_files: dict[str, dict[str, pa.DataType]]) -> Copied:
        known: dict[str, None] = {}
        seen = TypesSeen(self.text, self.union, self.typed, dict(self.known), of_files)
        blocks = (
            (stretch.file.uri, table)
            for stretch in share
            for table in self.reader(stretch.opened(), known=known)
        )
        copied = copy_blocks(blocks, seen, self.store, self.attempt, self.chosen, keep_error=True)
        part = any(stretch.stop is not None for stretch in share)
        types, names = tuple(seen.changes), tuple(known)
        return replace(copied, types=types, known=names, weights=(), part=part)


def shares_of(
    files: Sequence[File], stretches: Callable[[File], Sequence[Stretch]]
) -> Iterator[CopyShare]:
    """Group all files, in order, into shares, which are copied in parallel.

    A share is some small neighbouring files, one larger file, or one of several parts of a file.
    `stretches` splits a file into such parts (ranges of whole rows).
    """
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
    """Return a function of type `Everywhere`, a parallel map, that uses threads of this process.

    The function starts `cpus` threads, or more for `remote` files. Threads are enough, because
    copying rarely holds Python's global lock.
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
    """Copy all shares with `copier` until their types agree; return the snapshot's inventory.

    `guess`: likely types of columns, for the first round. `everywhere` runs the copies, `kind` is
    the format of the files. Adds the names of all columns to `known`. Raises the errors of a
    sequential copy, and `NotSideBySide` if only such a copy can tell what is wrong.
    """
    rounds = count()

    def copy(todo: Sequence[int]) -> Iterator[tuple[int, Copied]]:
        types = shape.columns if next(rounds) else dict(guess)
        files = {s.file.uri: shape.types_of(s.file.uri) for n in todo for s in shares[n]}
        work = replace(copier, known=types, of_files={u: t for u, t in files.items() if t})
        return _round(todo, shares, shape, partial(everywhere, work))

    copied = copy_until_settled(len(shares), shape, copy)
    for one in copied:
        known.update(dict.fromkeys(one.known))
    return inventory_of(copied, written(shape.schema), kind, copier.chosen)


def _round(
    todo: Sequence[int],
    shares: Sequence[CopyShare],
    shape: Shape,
    everywhere: Callable[[Iterable[CopyShare], int], Generator[tuple[int, Copied], None, None]],
) -> Iterator[tuple[int, Copied]]:
    """Copy the shares with indexes `todo`; yield (index, outcome) of each as it is done.

    Merges the types of all outcomes into `shape`, in file order. `everywhere` is called with the
    shares to copy and their total bytes; it yields (index among these shares, outcome) in any
    order.
    """
    size = sum(_bytes(stretch) for number in todo for stretch in shares[number])
    waiting: dict[int, Copied] = {}
    next_place = 0
    with closing(everywhere((shares[number] for number in todo), size)) as outcomes:
        for place, copied in outcomes:
            waiting[place] = copied
            yield todo[place], copied
            while next_place in waiting:
                _take(shares[todo[next_place]], waiting.pop(next_place), shape)
                next_place += 1


def _take(share: CopyShare, one: Copied, shape: Shape) -> None:
    """Merge the types in `one`, a share's outcome, into `shape`; then raise its error, if any.

    If the share is a part of a file, raises `NotSideBySide` instead of SourceError or ConfigError,
    whether the merge or the copy failed.
    """
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


def _bytes(stretch: Stretch) -> int:
    size = stretch.file.info.size
    return size if stretch.stop is None else stretch.stop - stretch.start
