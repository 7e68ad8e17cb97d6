"""Writes the result from committed pieces, in input order, and checks its coverage.

It reads the commits twice. The first time it checks and counts them, which determines the rows of
each file. The second time it makes a task for each file, which any process can write. Plan and
commits never change once every shard is committed, so two finalizers write files with the same rows
and either one's may be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.layout import KINDS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.manifest import put_manifest
from prefect_raybatch.ledger.part_layout import PartLayout, PartSpan
from prefect_raybatch.ledger.plan_tables import Shards, decode_schema
from prefect_raybatch.ledger.records import Commit, Part, Plan
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.ledger.success import check_no_strays, check_parts
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.result.part_notes import unchanged_parts
from prefect_raybatch.result.parts import PartTask, check_unfinished, write_part
from prefect_raybatch.result.pieces import check_commit
from prefect_raybatch.result.survey import Survey, bare, chosen_layout, layout_of, survey
from prefect_raybatch.storage import Store

PartWriters = Callable[[Callable[[PartTask], Part], Iterator[PartTask], int], Iterable[Part]]
"""Type of functions (write, tasks, total bytes) that call `write` for each task, in this process or
on workers, and return the parts in any order.
"""


@dataclass(frozen=True)
class Result:
    """The files that finalize wrote (`parts`), and the sums over all commits (`tally`).

    With compaction, `layout` is the name of the table that says which shards are in which file, and
    `manifest` is None. Without compaction, `manifest` is the name of the table of pieces, and
    `layout` is None.
    """

    tally: Tally
    parts: list[Part]
    layout: str | None = None
    manifest: str | None = None


def write_sequentially(
    write: Callable[[PartTask], Part], tasks: Iterator[PartTask], size: int
) -> Iterable[Part]:
    """Call `write` for one task after the other, in this process; return the files written.

    `size` is the total bytes of the files. It is not used here, but other `PartWriters` need it.
    """
    return map(write, tasks)


def finalize(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    row_number: str,
    file_bytes: int,
    compact: bool = True,
    read_back: bool = False,
    writers: PartWriters = write_sequentially,
) -> Result:
    """Write data/ and the quarantine; check that they hold each row exactly once.

    Without `compact`, writes only the manifest, a list of the pieces. `row_number` is the name of
    the column of row numbers. `file_bytes` is the target size of a file, in bytes of its pieces.
    With `read_back`, a file's ETag is not accepted as proof of its content. `writers` writes the
    files.

    Does not write _SUCCESS: the caller does, after its report. Raises `IncompleteRun` if shards are
    missing. Raises `CorruptRun`, which names the piece or file, for a faulty commit or piece and
    for an unexpected file among the results. Raises it also if another finalizer has finished the
    run while this one still had files to write.
    """
    found = survey(ledger, plan, shards, pieces=not compact)
    if compact:
        layout, spans = layout_of(ledger, plan, found, row_number, file_bytes)
        work = _Work(ledger, plan, shards, found, layout, spans, read_back)
        result = Result(found.tally, work.done(writers), work.noted_as)
    else:
        check_unfinished(ledger.store)
        name = put_manifest(ledger.store, found.pieces)
        result = Result(found.tally, [], manifest=name)
    check_no_strays(ledger.store, result.parts)
    check_parts(ledger.store, result.parts)
    return result


def finalize_committed(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    survey: Survey,
    row_number: str,
    file_bytes: int,
    below: str,
    read_back: bool = False,
    writers: PartWriters = write_sequentially,
) -> list[Part]:
    """Write the rows of an incomplete run's committed shards to files; return the files.

    `survey` has the committed shards. The files are written to the folder `below`, a path in the
    run directory without a final "/". Other parameters are those of `finalize`. No records are
    written, so the state of the run is unchanged. If the caller later writes a record that names
    the files, it must check then that they still exist.

    Raises `CorruptRun` for a faulty commit or piece, and if the run is completed meanwhile.
    """
    layout, spans = chosen_layout(ledger, plan, survey, row_number, file_bytes)
    work = _Work(ledger, plan, shards, survey, layout, spans, read_back, f"{below}/")
    return work.done(writers)


@dataclass(frozen=True)
class _Work:
    """Writes the files of a layout: the second half of finalize.

    `spans` are the files of the layout, `found` is the survey of the commits. `below` is the folder
    to write to, as a path in the run directory with a final "/"; "" for the run directory itself.
    """

    ledger: Ledger
    plan: Plan
    shards: Shards
    found: Survey
    layout: PartLayout
    spans: tuple[PartSpan, ...]
    read_back: bool
    below: str = ""

    @property
    def noted_as(self) -> str | None:
        """Return the name of the layout's table, which notes about written files contain.

        None for a partial result, for which no notes are written.
        """
        return None if self.below else self.layout.table

    def path(self, span: PartSpan) -> str:
        return f"{self.below}{span.path}"

    def done(self, writers: PartWriters) -> list[Part]:
        """Write the files that no earlier finalizer wrote; return all files in the layout's order.

        Raises `CorruptRun` if `writers` did not write a file or wrote another number of rows.
        """
        store, parts = self.ledger.store, dict[str, Part]()
        if self.noted_as is not None:
            parts = unchanged_parts(store, self.noted_as, self.spans)
        todo = [span for span in self.spans if self.path(span) not in parts]
        sizes = self.found.sums.bytes
        size = sum(int(sizes[span.kind][span.start : span.stop].sum()) for span in todo)
        unwritten = {self.path(span): span.rows for span in todo}
        write = partial(write_part, store)
        for part in writers(write, self.tasks(todo), size) if todo else ():
            if unwritten.pop(part.path, None) != part.rows:
                raise CorruptRun(
                    f"{part.path} was written with {part.rows} rows, or is not in the layout"
                )
            parts[part.path] = part
        if unwritten:
            raise CorruptRun(f"{next(iter(unwritten))} was not written")
        return [parts[self.path(span)] for span in self.spans]

    def tasks(self, spans: Collection[PartSpan]) -> Iterator[PartTask]:
        """Yield the task for each file in `spans`, in the order of the files' last shards."""
        waiting = {kind: deque(s for s in spans if s.kind == kind) for kind in KINDS}
        held = {kind: list[Commit]() for kind in KINDS}
        for commit in self.ledger.commits(self.plan, self.found.listing):
            check_commit(commit, self.shards[commit.shard].rows)
            for kind, queue in waiting.items():
                if not queue or commit.shard < queue[0].start:
                    continue
                if (part := bare(commit, kind)).pieces:
                    held[kind].append(part)
                if commit.shard + 1 >= queue[0].stop:
                    yield self._task(queue.popleft(), held[kind])
                    held[kind] = []

    def _task(self, span: PartSpan, commits: list[Commit]) -> PartTask:
        starts = tuple(self.shards[commit.shard].start for commit in commits)
        table = self._numbers.table
        return PartTask(
            span=span,
            path=self.path(span),
            row_number=self.layout.row_number,
            schema=decode_schema(self.layout.schemas[span.kind]),
            commits=tuple(commits),
            starts=starts,
            numbers=None if table is None else table[starts[0] : self.shards.starts[span.stop]],
            read_back=self.read_back,
            layout=self.noted_as,
        )

    @cached_property
    def _numbers(self) -> RowNumbers:
        return self.ledger.numbers(self.plan)


def first_rows(store: Store, files: Iterable[str], rows: int) -> pa.Table | None:
    """Return up to `rows` rows from the first of `files` that has rows; None if none has.

    `files` are Parquet files in `store`, in the result's order.
    """
    for name in files:
        with store.open(name) as stream:
            parquet = pq.ParquetFile(stream, pre_buffer=False)
            check_types(parquet.schema_arrow, name)
            batch = next(parquet.iter_batches(batch_size=rows, use_threads=False), None)
        if batch is not None:
            return pa.Table.from_batches([batch])
    return None
