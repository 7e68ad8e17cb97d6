"""Sorts the stored answers that a run's rows reuse or share, so that they are in row order.

Requests are sent in the order of their prompts, and answers of earlier runs are in an order of
their own. So the answers of one shard are scattered over all files, and every shard would read
nearly all of them: quadratic work in the number of rows. Sorting them on the local disk (TMPDIR)
reads each answer once.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import (
    NO_REQUEST,
    REUSED,
    AnswersByRow,
    Increment,
    RowAnswers,
    read_answers_by_row,
)
from prefect_raybatch.ledger.layout import BY_ROW, table_path
from prefect_raybatch.ledger.part_files import PartFiles, local_disk
from prefect_raybatch.ledger.record_files import hash_in_name
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.plan.prefix_order import RANK, sorted_by_rank
from prefect_raybatch.stages.raw_answers import NUMBER, AnswerFiles
from prefect_raybatch.storage import Store
from prefect_raybatch.storage.checked import block_sums, open_checked
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.cluster.lookups import LookUpFiles

log = logging.getLogger(__name__)
ROW_STEP = 4096  # answers or rows that are read together
FEW_READS = 8  # mean reads of an answer up to which answers are not sorted
# Files of fewer bytes are not sorted: a worker reads them once, keeps them in memory, and a
# shard finds its answers in few of their row groups.
UNSORTED_BYTES = 4 << 20
DISK_TIMES = 8  # bytes of local disk for each byte of the files, which are compressed
LOOKUP_ROWS = 1 << 16  # rows whose answers are looked up together
ROWS_TOGETHER = 8192
FILE_ROWS = 1 << 20


def sort_answers(
    store: Store,
    plan: Plan,
    increment: Increment,
    known: LookUpFiles,
    waits: Callable[[str], None] = lambda why: None,
) -> None:
    """Copy the answers that a run looks up to new files in the order of its rows; record the files.

    Does nothing if the new files are recorded already, or if looking up answers in their present
    order takes few reads. Also does nothing, with a warning, if the local disk is too small.
    `known` are the files in their present order. `waits` is called with a text that says what the
    run waits for, at the end with "". Raises `StoreError` for a full disk or a failing store.
    """
    size = sum(part.bytes for part in increment.reused) + known.new_answer_bytes
    if size <= UNSORTED_BYTES or _are_there(store, plan):
        return
    taken = sum(part.rows for part in increment.reused)
    answers = taken + increment.counts.asked
    reads = sum(len(np.unique(n // ROW_STEP)) for _, n in _near(store, increment, taken))
    if reads * ROW_STEP <= FEW_READS * answers:
        return
    room = shutil.disk_usage(tempfile.gettempdir()).free
    if room < DISK_TIMES * size:
        log.warning(
            "%s has %d MB free, too little to sort the answers by row, so each will be read about "
            "%d times. Set TMPDIR to a larger disk",
            *(tempfile.gettempdir(), room >> 20, reads * ROW_STEP // answers),
        )
        return
    why = f"sorting the answers to {counted(answers, 'request')} by row"
    log.info(why)
    with ExitStack() as stack:
        waits(why)
        stack.callback(waits, "")
        with local_disk():
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="raybatch-"))
        folder = Path(name)
        pairs = (
            ("rows", _pairs(rows, numbers)) for rows, numbers in _near(store, increment, taken)
        )
        by_answer = sorted_by_rank(
            pairs, plan.rows, _created_folder(folder / "pairs"), answers, keep=True
        )
        found = _with_answers(by_answer, known, taken)
        by_row = sorted_by_rank(
            found, plan.rows, _created_folder(folder / "rows"), plan.rows, keep=True
        )
        files = tuple(_write(store, by_row))
    AnswersByRow(plan.hash, files).put(store)


def _are_there(store: Store, plan: Plan) -> bool:
    """Return whether the record of sorted answers exists; a damaged one counts, with a warning."""
    try:
        return read_answers_by_row(store, plan) is not None
    except CorruptRun as error:
        log.warning("reading the answers in the order of the requests: %s", error)
        return True


def _created_folder(folder: Path) -> Path:
    with local_disk():
        folder.mkdir()
    return folder


def _near(
    store: Store, increment: Increment, taken: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (row numbers, numbers of their answers), up to ROW_STEP rows each, in row order.

    Rows without a request are left out. Answers of earlier runs are numbered from 0; this run's own
    are numbered from `taken`, the number of answers of earlier runs.
    """
    start = 0
    for name in increment.places:
        path = table_path(name)
        with open_checked(store, path, block_sums(store, path, hash_in_name(name))) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            for batch in file.iter_batches(ROW_STEP, columns=["kind", "at"], use_threads=False):
                kind, at = batch["kind"].to_numpy(), batch["at"].to_numpy()
                has = kind != NO_REQUEST
                yield start + np.flatnonzero(has), np.where(kind == REUSED, at, taken + at)[has]
                start += batch.num_rows


def _pairs(rows: np.ndarray, numbers: np.ndarray) -> pa.Table:
    return pa.table({"row": pa.array(rows), RANK: pa.array(numbers)})


def _with_answers(
    pairs: Iterator[tuple[str, pa.Table]], known: LookUpFiles, taken: int
) -> Iterator[tuple[str, pa.Table]]:
    """Look up answers by their numbers; yield (name, table of raw answers with their row numbers).

    Each row of a table of `pairs` has a row number and, in column RANK, the number of the row's
    answer. The table is sorted by RANK. Numbers below `taken` are positions in `known.reused`. From
    `taken` on, they are positions in `known.new_answers`, after subtracting `taken`.

    In the yielded tables, column RANK has the row numbers. Rows whose request failed have no answer
    and are left out.
    """
    for what, every in pairs:
        for start in range(0, every.num_rows, LOOKUP_ROWS):
            part = every.slice(start, LOOKUP_ROWS)
            rows, numbers = part["row"].to_numpy(), part[RANK].to_numpy()
            earlier = int(np.searchsorted(numbers, taken))
            for files, a, b, first in (
                (known.reused, 0, earlier, 0),
                (known.new_answers, earlier, len(numbers), taken),
            ):
                found = _found(files, numbers[a:b] - first, rows[a:b])
                if found is not None:
                    yield what, found


def _found(files: AnswerFiles, numbers: np.ndarray, rows: np.ndarray) -> pa.Table | None:
    there, table = files.take(numbers)
    return None if table is None else table.append_column(RANK, pa.array(rows[there]))


def _write(store: Store, tables: Iterator[tuple[str, pa.Table]]) -> Iterator[RowAnswers]:
    """Write the tables of answers, which are in row order, to files; yield a record of each file.

    `tables` are (name, table) pairs; the names are not used. Column RANK has the row numbers.
    """
    parts = PartFiles(store, f"{BY_ROW}/{uuid.uuid4().hex}")
    first = 0

    def finished() -> Iterator[RowAnswers]:
        if (made := parts.finish()) is not None:
            part = made[0]
            yield RowAnswers(part.path, first, part.rows, part.bytes, part.sha256)

    try:
        for _, table in tables:
            names = [NUMBER if name == RANK else name for name in table.column_names]
            table = table.rename_columns(names)
            for start in range(0, table.num_rows, ROWS_TOGETHER):
                group = table.slice(start, ROWS_TOGETHER)
                if not parts.rows:
                    first = group[NUMBER][0].as_py()
                parts.write(group)
                if parts.rows >= FILE_ROWS:
                    yield from finished()
        yield from finished()
    finally:
        parts.discard()
