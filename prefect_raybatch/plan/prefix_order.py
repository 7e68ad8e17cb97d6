"""Orders the requests of a whole run so that prompts with a common prefix reach an engine together.

A prefix cache holds recent prompts. Rows of one document, customer or few-shot block that are
scattered over a table hit it only if they reach the engine one after the other. So requests are
sorted by the text of their prompts, on the local disk (TMPDIR), and the rows put into that order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.images.rows import is_image
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.request_key import canonical

MOST_ORDERED = 50_000_000  # rows; sorting more takes minutes, and local disk for their prompts
# Bytes of a prompt that are compared, counted from its first difference to the first row's prompt.
# Prefixes that differ do so soon, and the engine stage sorts rows of one prefix by their tokens.
COMPARED = 512
RUN_ROWS = 1 << 18  # rows that are sorted in memory, and about as many when runs are merged
RUN_BYTES = 96 << 20  # ... or fewer, where their texts are long
MERGED_ROWS = 512  # rows of each sorted file that are in memory while all are merged
CUT_ROWS = 1024  # one of so many rows of a sorted run is a candidate for a cut between merges
BUCKET_BYTES = 128 << 20  # of rows in a bucket, which is sorted in memory
DEALT_BYTES = 64 << 20  # of rows put into buckets at once; fewer make many small writes
MOST_DEALT = 256  # buckets, each an open file
RANK = "__rb_rank"


def sort_text(request: ChatRequest | Failure, adapter: str | None = None) -> bytes:
    """Return the text of a prompt as bytes to sort by: adapter name, documents, messages.

    Chat template and tokenizer are not applied, and images are left out. Returns b"" for a
    `Failure`, i.e. a row that makes no request.
    """
    if isinstance(request, Failure):
        return b""
    parts = [(adapter or "").encode()]
    if request.documents is not None:
        parts.append(canonical(request.documents))
    for message in request.messages:
        parts += [str(message.get("role", "")).encode(), _text(message.get("content"))]
    return b"\n".join(parts)


def _text(content: object) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    if not isinstance(content, list):
        return b"" if content is None else canonical(content)
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    shown = (
        text.encode(errors="surrogatepass") if isinstance(text, str) else canonical(part)
        for text, part in zip(texts, content, strict=True)
        if not (isinstance(part, dict) and is_image(part))
    )
    return b"\n".join(shown)


def compared_text(text: bytes, reference: bytes) -> bytes:
    """Return the sort key of a prompt's `text`; keys of prompts with a common prefix sort together.

    A key is the length of the prefix that `text` has in common with `reference` (4 bytes), then up
    to 512 bytes of `text` after that prefix. `reference` is one prompt of the run, the same for
    all.
    """
    common = _common(text, reference)
    return common.to_bytes(4, "big") + text[common : common + COMPARED]


def _common(one: bytes, other: bytes) -> int:
    """Return how many leading bytes are equal, by bisection: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixOrder:
    """Sorts the rows of a run by their prompts: `add` all prompts, then iterate over `rows`.

    Memory: about RUN_BYTES of `compared_text`. Local disk: the compared text of all rows, in
    `folder`, which is created and must not exist.
    """

    def __init__(self, folder: Path) -> None:
        with local_disk():
            folder.mkdir()
        self._folder = folder
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = 0
        self._runs: list[Path] = []
        self._cuts: list[pa.Table] = []
        self._rows = 0

    def add(self, start: int, texts: pa.Array) -> None:
        """Add the `compared_text` (binary) of consecutive rows, the first being row `start`."""
        numbers = np.arange(start, start + len(texts), dtype=np.int64)
        self._held.append(pa.table({"text": texts, "row": pa.array(numbers)}))
        self._held_rows += len(texts)
        self._held_bytes += texts.nbytes
        if self._held_rows >= RUN_ROWS or self._held_bytes >= RUN_BYTES:
            self._sort()

    def _sort(self) -> None:
        if not self._held:
            return
        table = pa.concat_tables(self._held).sort_by(_BY_TEXT)
        self._held, self._held_rows, self._held_bytes = [], 0, 0
        self._rows += table.num_rows
        self._cuts.append(_at(table, range(CUT_ROWS // 2, table.num_rows, CUT_ROWS)))
        path = self._folder / f"run-{len(self._runs)}"
        self._runs.append(path)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with local_disk(), pa.ipc.new_stream(str(path), table.schema, options=options) as out:
            out.write_table(table, max_chunksize=MERGED_ROWS)

    def rows(self) -> Iterator[np.ndarray]:
        """Yield all row numbers (int64) in batches, rows with a common prefix together.

        Rows with equal compared text keep their order. Call it once, after the last `add`.
        """
        self._sort()
        if not self._runs:
            return
        with ExitStack() as stack:
            runs = [_SortedRun(stack, path) for path in self._runs]
            for cut in [*self._merged_at(), None]:
                parts = [part for run in runs for part in run.before(cut)]
                if parts:
                    table = pa.Table.from_batches(parts)
                    order = pc.sort_indices(table, sort_keys=_BY_TEXT)
                    yield table["row"].to_numpy()[order.to_numpy()]

    def _merged_at(self) -> list[tuple[bytes, int]]:
        """Return the (text, row) entries that divide the merge into parts.

        A part ends just before such an entry, and the last part has no end. Each part fits into
        memory.
        """
        cuts = pa.concat_tables(self._cuts).sort_by(_BY_TEXT)
        parts = math.ceil(self._rows / RUN_ROWS)
        chosen = _at(cuts, [cuts.num_rows * i // parts for i in range(1, parts)])
        return list(zip(chosen["text"].to_pylist(), chosen["row"].to_pylist(), strict=True))


_BY_TEXT = [("text", "ascending"), ("row", "ascending")]


def _at(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    return table.take(pa.array(rows, pa.int64()))


class _SortedRun:
    """A file of sorted (text, row) entries, read once from its start; `stack` closes it."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        with local_disk():
            file = stack.enter_context(pa.OSFile(str(path)))
        self._batches = iter(pa.ipc.open_stream(file))
        self._held: pa.RecordBatch | None = next(self._batches, None)

    def before(self, cut: tuple[bytes, int] | None) -> Iterator[pa.RecordBatch]:
        """Yield the (text, row) entries before `cut`; all remaining ones if it is None."""
        while (batch := self._held) is not None:
            texts, numbers = batch["text"], batch["row"]
            rows = batch.num_rows
            if cut is not None:
                rows = bisect_left(
                    range(rows), cut, key=lambda i: (texts[i].as_py(), numbers[i].as_py())
                )
            if rows:
                yield batch.slice(0, rows)
            if rows < batch.num_rows:
                self._held = batch.slice(rows)
                return
            self._held = next(self._batches, None)


def sorted_by_rank(
    tables: Iterator[tuple[str, pa.Table]],
    rows: int,
    folder: Path,
    ranks: int | None = None,
    keep: bool = False,
) -> Iterator[tuple[str, pa.Table]]:
    """Sort the rows of all `tables` by their integer column RANK; yield them in new tables.

    The result is (description, table) pairs. All have the description of the first input table.

    If `ranks` is None, `rows` must be the exact number of rows, and each number from 0 to `rows` -
    1 must be the rank of one row. Otherwise the ranks are numbers from 0 to `ranks` - 1, which may
    be missing or repeated, and `rows` may be an estimate: it only decides how much memory is used.
    Column RANK is dropped unless `keep` is set. Memory is about BUCKET_BYTES if the ranks are
    spread evenly. All rows are written to files in `folder`, which must exist.
    """
    first = next(tables, None)
    if first is None:
        return
    what, table = first
    size = table.nbytes / max(1, table.num_rows) * rows
    buckets = max(1, min(MOST_DEALT, math.ceil(size / BUCKET_BYTES)))
    each = -(-(rows if ranks is None else ranks) // buckets)
    paths = [folder / f"bucket-{number}" for number in range(buckets)]
    with ExitStack() as stack:
        with local_disk():
            files = [
                stack.enter_context(pa.ipc.new_stream(str(path), table.schema)) for path in paths
            ]
        held, size = [table], table.nbytes
        for _, table in tables:
            if size + table.nbytes > DEALT_BYTES:
                _deal(pa.concat_tables(held), each, files)
                held, size = [], 0
            held.append(table)
            size += table.nbytes
        _deal(pa.concat_tables(held), each, files)
    del held, table
    for path in paths:
        with local_disk(), pa.OSFile(str(path)) as file:
            found = pa.ipc.open_stream(file).read_all()
        if found.num_rows:
            found = found.sort_by(RANK)
            yield what, found if keep else found.drop_columns([RANK])
        with suppress(OSError):
            path.unlink()


def _deal(table: pa.Table, each: int, files: Sequence[pa.ipc.RecordBatchStreamWriter]) -> None:
    ranks = table[RANK].to_numpy()
    order = np.argsort(ranks, kind="stable")
    edges = np.searchsorted(ranks[order], np.arange(len(files) + 1) * each)
    table = table.take(pa.array(order))
    with local_disk():
        for number in range(len(files)):
            part = table.slice(edges[number], edges[number + 1] - edges[number])
            if part.num_rows:
                files[number].write_table(part)
