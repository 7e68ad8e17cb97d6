"""Runs sampled rows through a run's stages on one engine and collects the outcomes.

A run compares the outcomes of two trials, for example with two precisions. Files are written only
to a temporary folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import EngineFailure, IncompleteRun, RayBatchError, error_class
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.layout import POSITION_COLUMN, piece_path
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.stages.block import is_lost, losses
from prefect_raybatch.stages.columns import ERROR, PARAMS
from prefect_raybatch.stages.engine import EngineLaunch
from prefect_raybatch.stages.finish import RECEIPT, Finish
from prefect_raybatch.stages.raw_answers import VECTOR_COLUMN
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.parquet import parquet_table

READING = 8  # shards read at once
BLOCKS_ASKED = 64  # blocks in an engine at once
COSINE = 0.99  # least cosine similarity of two vectors that count as the same
SCORES_NEAR = 0.1  # most difference of two scores that count as the same, in standard deviations

SampledRow = tuple[int, int]  # shard and position
# ("failed", "class: message"), or ("good", the columns); for a pooling task ("good", answer), where
# the answer is a vector (float32), a label or a score.
RowOutcome = tuple[str, Any]
Read = Callable[[], Iterator[pa.Table]]


@dataclass(frozen=True)
class TrialStages:
    """The stages that a trial runs on sampled rows: read, prepare, engine (`launch`) and finish.

    `read` has for each sampled shard a function that yields its tables, and the positions of the
    sampled rows. `ignored` has result columns that outcomes leave out. `pooled` is (task, answer
    column) of a pooling task, else None.
    """

    read: Sequence[tuple[Read, Sequence[int]]]
    prepare: Callable[[pa.Table], pa.Table]
    launch: EngineLaunch
    finish: Finish
    ignored: tuple[str, ...] = ()
    pooled: tuple[str, str] | None = None


class TrialEngine:
    """An engine in this worker process that answers a trial's sampled rows.

    `engine` is the class of the engine stage, `stages` are all stages of the trial.
    """

    def __init__(self, engine: type, stages: TrialStages):
        self.stages = stages
        self.engine = engine(stages.launch)

    def outcomes(self, again: bool = False) -> dict[SampledRow, RowOutcome]:
        """Return the outcome of each sampled row that was sent to the engine, valid or failed.

        Rows that fail in the prepare stage, and rows of blocks with which the engine died twice,
        are left out. `again`: send the rows in reverse order.

        Raises `SourceError` for unreadable rows, `EngineStartError` if the engine does not start,
        `EngineFailure` if it died with every block, and an error that is worth a retry for a loss
        that says nothing about the engine, such as a store that does not answer.
        """
        blocks = self._prepared()
        if again:
            blocks = [block.take(pa.array(range(len(block))[::-1])) for block in blocks[::-1]]
        answered = self._answered([block for block in blocks if block.num_rows])
        with tempfile.TemporaryDirectory(prefix="raybatch-trial-") as folder:
            store = open_store(folder)
            finish = replace(self.stages.finish, store=store)
            found: dict[SampledRow, RowOutcome] = {}
            for block in answered:
                for text in finish(block)[RECEIPT].to_pylist():
                    found |= self._of_receipt(store, Receipt.from_json(text))
        return found

    def close(self) -> None:
        """End the engine, so that its GPU is free."""
        self.engine.close()

    def _prepared(self) -> list[pa.Table]:
        with ThreadPoolExecutor(READING) as pool:
            tables = list(pool.map(_taken, self.stages.read))
        made = [self.stages.prepare(table) for table in tables if table.num_rows]
        for table in made:
            if is_lost(table):
                raise _error_of(losses(table)[0])
        return [_greedy(table.filter(table[ERROR].is_null())) for table in made]

    def _answered(self, blocks: list[pa.Table]) -> list[pa.Table]:
        """Return the blocks with their answers.

        A block with which the engine died is sent once more, alone. If the engine dies again, the
        block is left out. Raises `EngineFailure` if every block was left out. If a block is lost
        for another reason, raises the error of that reason.
        """
        with ThreadPoolExecutor(BLOCKS_ASKED) as pool:
            first = list(pool.map(self.engine, blocks))
        made, why = [], ""
        for block, answered in zip(blocks, first, strict=True):
            if is_lost(answered):
                answered = self.engine(block)
            if is_lost(answered):
                loss = losses(answered)[0]
                if loss.fatal or not loss.may_be_caused_by_row:
                    raise _error_of(loss)
                why = str(loss)
                continue
            made.append(answered)
        if blocks and not made:
            raise EngineFailure(f"the engine crashed on every sampled row: {why}")
        return made

    def _of_receipt(self, store: Store, receipt: Receipt) -> dict[SampledRow, RowOutcome]:
        if receipt.lost is not None:
            raise _error_of(receipt.lost)
        found: dict[SampledRow, RowOutcome] = {}
        for piece in receipt.pieces:
            table = parquet_table(store.read(piece_path(piece.path), piece.bytes))
            if piece.kind == "data" and self.stages.pooled is not None:
                answers = pooled_answers(table, *self.stages.pooled)
                for position, answer in zip(
                    table[POSITION_COLUMN].to_pylist(), answers, strict=True
                ):
                    found[receipt.shard, position] = ("good", answer)
                continue
            for row in table.to_pylist():
                place = (receipt.shard, row.pop(POSITION_COLUMN))
                if piece.kind == "data":
                    kept = {n: v for n, v in row.items() if n not in self.stages.ignored}
                    found[place] = ("good", kept)
                else:
                    found[place] = ("failed", f"{row['error']}: {row['message']}")
        return found


def interrupted(reason: str) -> IncompleteRun:
    """Return the error of a trial that ended for a `reason` which says nothing about the engine."""
    return IncompleteRun(f"the trial on sampled rows was interrupted: {reason}. Run the job again")


def _error_of(loss: Loss) -> RayBatchError:
    kind = error_class(loss.kind)
    if loss.fatal or (kind is not None and kind.transient):
        return loss.to_error()
    return interrupted(str(loss))


def _taken(shard: tuple[Read, Sequence[int]]) -> pa.Table:
    read, positions = shard
    tables = list(read())
    for table in tables:
        if is_lost(table):
            loss = losses(table)[0]
            raise _error_of(loss)
    return pa.concat_tables(tables).take(pa.array(positions))


def _greedy(table: pa.Table) -> pa.Table:
    """Return the block with temperature 0 and one answer in the sampling fields that rows set.

    A row without sampling fields of its own is unchanged, as the job's fields apply to it.
    """
    own = [
        text and json.dumps({**json.loads(text), "temperature": 0.0, "n": 1})
        for text in table[PARAMS].to_pylist()
    ]
    at = table.column_names.index(PARAMS)
    return table.set_column(at, PARAMS, pa.array(own, PARAMS.type))


def pooled_answers(table: pa.Table, task: str, column: str) -> Iterator[np.ndarray | str | float]:
    """Yield each row's answer: the vector for task embed, the label for classify, else the score.

    `table` is a data piece with the answers in `column`, or with raw vectors. For raw vectors, a
    label is its index, as in "label 3".
    """
    raw = VECTOR_COLUMN in table.column_names and column != VECTOR_COLUMN
    for value in table[VECTOR_COLUMN if raw else column].combine_chunks():
        if task == "embed" or raw:
            vector = value.values.to_numpy(zero_copy_only=False).astype(np.float32)
            if task == "embed":
                yield vector
            else:
                yield f"label {vector.argmax()}" if task == "classify" else float(vector[0])
        else:
            yield value.as_py()


def compared(
    one: Mapping[SampledRow, RowOutcome], other: Mapping[SampledRow, RowOutcome]
) -> tuple[int, int, list[SampledRow]]:
    """Return (number of common rows, number of common rows that agree, the rows that differ).

    Valid rows agree if all columns are equal; vectors, if their cosine similarity is at least
    COSINE; scores, if they differ by at most SCORES_NEAR standard deviations of the scores in
    `one`. Failed rows agree if their error classes are equal.
    """
    both = sorted(one.keys() & other.keys())
    scores = [one[row][1] for row in both if isinstance(one[row][1], float)]
    near = SCORES_NEAR * float(np.std(scores)) if scores else 0.0
    differ = [row for row in both if not _agree(one[row], other[row], near)]
    return len(both), len(both) - len(differ), differ


def _agree(one: RowOutcome, other: RowOutcome, near: float) -> bool:
    """Return whether two outcomes agree (see `compared`); `near` is the allowed gap of scores."""
    if one[0] != other[0]:
        return False
    if one[0] == "failed":
        return str(one[1]).partition(":")[0] == str(other[1]).partition(":")[0]
    if isinstance(one[1], np.ndarray):
        return cosine(one[1], other[1]) >= COSINE
    if isinstance(one[1], float):
        return bool(abs(one[1] - other[1]) <= near)
    return bool(one[1] == other[1])


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine similarity of two vectors; 0 for zero or mismatched vectors."""
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.dot(one, other)) / length if length and one.shape == other.shape else 0.0
