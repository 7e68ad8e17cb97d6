"""Joins the request keys of a run with those of earlier answers: which row takes which answer.

Keys are hashed into buckets on the local disk (TMPDIR), and each bucket is sorted and joined on its
own, so memory is that of one bucket, whatever the run's size. The result is (kind, at) for each
row, in memory-mapped files. `kind` says where the row's answer comes from (constants of
`ledger.increments`): REUSED from an earlier run, ASKED from the row's own new request, MERGED_ROW
from the new request of an equal row; NO_REQUEST for a row that makes no request. `at` is the number
of the reused answer or of the new request.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from prefect_raybatch.ledger.increments import (
    ASKED,
    MERGED_ROW,
    NO_REQUEST,
    PLACES_ROWS,
    REUSED,
    RowCounts,
)
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.plan.prefix_order import PrefixOrder

BUCKET_ROWS = 1 << 20  # keys (of rows and answers) that a bucket is to hold
MOST_BUCKETS = 256
STEP = 1 << 20  # rows of a memory-mapped array that are processed together
# A record: the key as two numbers, the number of its row or answer, and whether all rows with the
# key share one answer.
PACKED_KEY = np.dtype("V16")
RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("number", "<i8"), ("exact", "?")])


class KeyBuckets:
    """Request keys of rows or of answers, on disk in several files (buckets).

    A hash of the key chooses its bucket, so equal keys are in one bucket.
    """

    def __init__(self, folder: Path, buckets: int) -> None:
        folder.mkdir()
        self.count = 0
        self._paths = [folder / f"{number:03d}" for number in range(buckets)]
        self._files: list[BinaryIO] = []
        with local_disk(), ExitStack() as stack:
            self._files = [stack.enter_context(path.open("wb")) for path in self._paths]
            self._stack = stack.pop_all()

    def add(self, keys: list[bytes] | bytes, numbers: np.ndarray, exact: np.ndarray) -> None:
        """Add 16-byte keys with the numbers of their rows or answers.

        `keys` is a list of keys or, as bytes, all keys joined. `exact` is a bool for each key. It
        is True if one answer serves all rows with this key, as for greedy sampling. Otherwise each
        row takes an answer of its own.
        """
        if not keys:
            return
        joined = keys if isinstance(keys, bytes) else b"".join(keys)
        halves = np.frombuffer(joined, ">u8").reshape(-1, 2)
        rows = np.empty(len(halves), RECORD)
        rows["high"], rows["low"] = halves[:, 0], halves[:, 1]
        rows["number"], rows["exact"] = numbers, exact
        self.count += len(rows)
        bucket = (rows["high"] % len(self._files)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(len(self._files) + 1))
        rows = rows[order]
        with local_disk():
            for number, file in enumerate(self._files):
                file.write(rows[edges[number] : edges[number + 1]].tobytes())

    def close(self) -> None:
        with local_disk():
            self._stack.close()

    def bucket(self, number: int) -> np.ndarray:
        """Return the entries (dtype RECORD) of a bucket."""
        return np.fromfile(self._paths[number], RECORD)


@dataclass
class Join:
    """Joins the run's request keys with those of earlier answers, in files of a temporary folder.

    Use it as a context manager, which removes the files. `rows` and `earlier` are the numbers of
    rows and of earlier answers. First add the keys of the rows (`add_rows`) and of the answers
    (`theirs.add`), then call `run`. After that:
    - `places` yields (kind, at) of the rows: where each row's answer comes from.
    - `leaders` returns which rows make a new request, called an ask.
    - `weights` returns how many rows each ask answers.
    - `needed` (bool) marks the earlier answers that are reused.

    Asks are numbered from 0, in the order of their rows. If `ordered` is set, they are numbered in
    the order of their prompts, which the caller adds to `prompts` before `run`. `keys` has the keys
    of the rows. The caller may write temporary files to `folder`, too.
    """

    rows: int
    earlier: int = 0
    ordered: bool = False

    def __enter__(self) -> Join:
        self._stack = ExitStack()
        with local_disk():
            folder = Path(
                self._stack.enter_context(tempfile.TemporaryDirectory(prefix="raybatch-"))
            )
        most = math.ceil((self.rows + self.earlier) / BUCKET_ROWS)
        self._buckets = min(MOST_BUCKETS, max(1, most))
        self.ours = KeyBuckets(folder / "ours", self._buckets)
        self.theirs = KeyBuckets(folder / "theirs", self._buckets)
        self.folder = folder
        self.prompts = PrefixOrder(folder / "prompts") if self.ordered else None
        self._kind = self._mapped("kind", np.int8, self.rows)
        self._at = self._mapped("at", np.int64, self.rows)
        self.keys = self._mapped("keys", PACKED_KEY, self.rows)
        self.needed = self._mapped("needed", np.bool_, self.earlier)
        self.counts = RowCounts()
        self.asked = 0
        self._digests: set[int] = set()  # first rows of the stored ranges of image digests
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _mapped(self, name: str, kind: DTypeLike, rows: int) -> np.ndarray:
        """Return `rows` zeros of dtype `kind`, memory-mapped to a new file in the folder."""
        with local_disk():
            return np.memmap(self.folder / name, kind, "w+", shape=(max(1, rows),))[:rows]

    def add_rows(self, start: int, keys: np.ndarray, valid: np.ndarray, exact: np.ndarray) -> None:
        """Add the `keys` (`PACKED_KEY`) of consecutive rows, the first of which is row `start`.

        `valid` (bool): the row makes a request. `exact` (bool): equal keys share one answer.
        """
        self.keys[start : start + len(keys)] = keys
        self.ours.add(keys[valid].tobytes(), start + np.flatnonzero(valid), exact[valid])

    def keep_digests(self, start: int, digests: pa.Array) -> None:
        """Store the image digests of consecutive rows, the first of which is row `start`."""
        with local_disk():
            pq.write_table(pa.table({"digests": digests}), self.folder / f"digests-{start}")
        self._digests.add(start)

    def kept_digests(self, start: int, stop: int) -> pa.ChunkedArray | None:
        """Return the image digests of rows [start, stop), or None if none were stored.

        Digests are stored in ranges, one for each call of `keep_digests`. `start` and `stop` must
        be bounds of such ranges.
        """
        if not self._digests:
            return None
        with local_disk():
            found = [
                pq.ParquetFile(self.folder / f"digests-{at}", pre_buffer=False)
                .read(use_threads=False)["digests"]
                .combine_chunks()
                for at in sorted(self._digests)
                if start <= at < stop
            ]
        return pa.chunked_array(found)

    def run(self) -> None:
        """Join the keys, once all are added. Sets `needed`, `counts` and `asked`.

        `counts` has the number of rows by source of the answer, `asked` the number of new requests.
        """
        self.ours.close()
        self.theirs.close()
        for number in range(self._buckets):
            rows, kind, at = match_keys(self.ours.bucket(number), self.theirs.bucket(number))
            self._kind[rows], self._at[rows] = kind, at
            self.needed[at[kind == REUSED]] = True
        self._number_requests()
        kinds = sum(
            (np.bincount(self._kind[a:b], minlength=4) for a, b in _steps(self.rows)),
            start=np.zeros(4, np.int64),
        )
        self.counts = RowCounts(
            reused=int(kinds[REUSED]),
            merged=int(kinds[MERGED_ROW]),
            asked=int(kinds[ASKED]),
            none=int(kinds[NO_REQUEST]),
        )
        self.asked = self.counts.asked

    def _number_requests(self) -> None:
        """Set `at` of each row to the number of its new request or reused answer.

        Requests and answers are each numbered from 0. Answers that are not `needed` get no number.
        """
        asks = _numbers(self._kind, ASKED, self._mapped("ask", np.int64, self.rows))
        self._asks = asks
        if self.prompts is not None:
            number = 0
            for rows in self.prompts.rows():
                asked = rows[self._kind[rows] == ASKED]
                asks[asked] = np.arange(number, number + len(asked))
                number += len(asked)
        taken = _numbers(self.needed, True, self._mapped("taken", np.int64, self.earlier))
        for a, b in _steps(self.rows):
            kind, at = self._kind[a:b], np.array(self._at[a:b])
            waits = (kind == ASKED) | (kind == MERGED_ROW)
            at[waits] = asks[at[waits]]
            at[kind == REUSED] = taken[at[kind == REUSED]]
            self._at[a:b] = at

    def places(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (kind, at) of the rows in order, in chunks of PLACES_ROWS rows.

        `kind` is NO_REQUEST, REUSED, ASKED or MERGED_ROW. `at` is the number of the reused answer,
        counted among those that are `needed`, or of the ask that answers the row.
        """
        for a, b in _steps(self.rows, PLACES_ROWS):
            yield np.array(self._kind[a:b]), np.array(self._at[a:b])

    def leaders(self, start: int, stop: int) -> np.ndarray:
        """Return bool[stop - start]: which of rows [start, stop) make a new request (an ask)."""
        return np.asarray(self._kind[start:stop] == ASKED)

    def numbers_of_leaders(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers (int64) of the new requests that rows in [start, stop) make."""
        return np.array(self._asks[start:stop][self.leaders(start, stop)])

    def weights(self) -> np.ndarray:
        """Return the number of rows that each new request answers: int64, by request number."""
        made = self._mapped("weights", np.int64, self.asked)
        for a, b in _steps(self.rows):
            waits = (self._kind[a:b] == ASKED) | (self._kind[a:b] == MERGED_ROW)
            asks, rows = np.unique(self._at[a:b][waits], return_counts=True)
            made[asks] += rows
        return made


def match_keys(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join RECORDs of rows (`ours`) and of answers (`theirs`); return (row number, kind, at).

    The three arrays have an entry for each row, in no order. `kind` is REUSED, ASKED or MERGED_ROW;
    `at` is the number of the answer in `theirs` that the row reuses, or else the row whose new
    request answers it. Equal keys share one answer if they are exact; otherwise the k-th row takes
    the k-th answer.
    """
    every = np.concatenate([theirs, ours])
    is_ours = np.arange(len(every)) >= len(theirs)
    order = np.lexsort((every["number"], is_ours, every["low"], every["high"]))
    every, is_ours = every[order], is_ours[order]
    new = np.ones(len(every), bool)
    new[1:] = (every["high"][1:] != every["high"][:-1]) | (every["low"][1:] != every["low"][:-1])
    group = np.cumsum(new) - 1
    first = np.flatnonzero(new)  # of each group, whose earlier answers come first
    answers = np.bincount(group[~is_ours], minlength=len(first)).astype(np.int64)
    mine = np.flatnonzero(is_ours)
    groups, rows = group[mine], every["number"][mine]
    leader = first[groups] + answers[groups]  # the group's first row of ours
    turn = np.where(every["exact"][mine], 0, mine - leader)
    taken = turn < answers[groups]
    at = np.where(every["exact"][mine], every["number"][leader], rows)
    at[taken] = every["number"][(first[groups] + turn)[taken]]
    kind = np.where(taken, REUSED, np.where(at == rows, ASKED, MERGED_ROW)).astype(np.int8)
    return rows, kind, at


def _numbers(flags: np.ndarray, wanted: int, out: np.ndarray) -> np.ndarray:
    """Write to `out`, for each flag, how many earlier flags equal `wanted`; return `out`."""
    before = 0
    for a, b in _steps(len(flags)):
        hits = flags[a:b] == wanted
        out[a:b] = before + np.cumsum(hits) - hits
        before += int(hits.sum())
    return out


def _steps(rows: int, step: int = STEP) -> Iterator[tuple[int, int]]:
    return ((at, min(rows, at + step)) for at in range(0, rows, step))
