"""Turns answers into results: detokenizes and postprocesses them, writes pieces, returns receipts.

Runs on CPUs, one block at a time. The valid rows of a shard go to one Parquet piece, the failed
rows to another. A piece is durable before its receipt exists and has a fresh name, so nothing is
overwritten, even if Ray runs a task twice.
"""

from __future__ import annotations

import io
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.installed import code_version
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.ledger.failures import FailureKey, Loss, counted_message
from prefect_raybatch.ledger.layout import piece_path
from prefect_raybatch.ledger.part_files import dictionary_columns
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_texts import PieceKind
from prefect_raybatch.ledger.records import Piece, Receipt, Unit, digest
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.spec.request import SamplingSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.answer_counts import (
    MOST_COUNTED_LABELS,
    label_counts,
    length_counts,
)
from prefect_raybatch.stages.answer_logprobs import logprobs_type
from prefect_raybatch.stages.block import (
    Failure,
    failures_of,
    input_columns,
    is_lost,
    lost_units,
)
from prefect_raybatch.stages.calls.calling import CALLS_IN_PROCESS, Calls
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CHANCES,
    DIGESTS,
    ENDS,
    FINISH,
    POSITION,
    PROBABILITIES_TYPE,
    PROMPT_TOKENS,
    SHARD,
)
from prefect_raybatch.stages.input_counts import input_counts
from prefect_raybatch.stages.load import figures_of
from prefect_raybatch.stages.output_schema import ResultColumn, fitting_columns, output_schema
from prefect_raybatch.stages.raw_answers import raw_columns
from prefect_raybatch.stages.result_columns import extra_type
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, LeftOutRow, OutputRow
from prefect_raybatch.stages.shard_figures import shard_figures
from prefect_raybatch.stages.text_answers import TextAnswers
from prefect_raybatch.storage import Store, put_proved

RECEIPT = "receipt"


@dataclass(frozen=True)
class Finish:
    """The finish stage: a function that takes a block and returns receipts.

    `store` is rooted at the run directory, `model` is the plan's pinned model, and `calls` says in
    which process the user's function is called.
    """

    spec: FinishSpec
    sampling: SamplingSpec
    model: PinnedModel
    store: Store
    attempt: str
    calls: Calls = CALLS_IN_PROCESS

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return a table with the receipt, as JSON, of each shard (or lost unit) in the block."""
        if is_lost(table):
            lost = lost_units(table)
            return _receipts([Receipt.of_lost(unit, self.attempt, why) for unit, why in lost])
        if not table.num_rows:
            return _receipts([])
        made = []
        shards = table[SHARD].to_numpy()
        for shard in dict.fromkeys(shards.tolist()):  # a batch may bundle several small shards
            rows = table.filter(pa.array(shards == shard)) if (shards != shard).any() else table
            made.append(self._shard(int(shard), rows))
        return _receipts(made)

    def _shard(self, shard: int, table: pa.Table) -> Receipt:
        began = time.time()
        try:
            return self._write(shard, table, began)
        except Exception as error:
            # The store or this node failed, not a row: the shard is lost for this pass.
            positions = table[POSITION].to_numpy()
            low, high = int(positions.min()), int(positions.max())
            unit = Unit(shard, low, high - low + 1)
            return Receipt.of_lost(unit, self.attempt, Loss.of(error))

    def _write(self, shard: int, table: pa.Table, began: float) -> Receipt:
        outcomes = self._outcomes(table)
        names = input_columns(table)
        kept = self.spec.kept(names)
        positions = table[POSITION].to_numpy()
        pieces = []
        rows = {i: o.columns for i, o in enumerate(outcomes) if isinstance(o, OutputRow)}
        columns, misfits = self._result(table, rows) if rows else ([], {})
        for i, failure in misfits.items():
            outcomes[i] = failure
        good = [i for i in rows if i not in misfits]
        if good:
            columns += self._extras(table, good)
            data = table.select([POSITION, *kept])
            data = data.take(pa.array(good)) if len(good) < table.num_rows else data
            for column, values in columns:
                data = data.append_column(column, values)
            pieces.append(self.write_piece(shard, "data", data, positions[good]))
        failures = {i: o for i, o in enumerate(outcomes) if isinstance(o, Failure)}
        failed = list(failures)
        if failed:
            bad = quarantine(
                table.select([POSITION, *names]).take(pa.array(failed)), list(failures.values())
            )
            pieces.append(self.write_piece(shard, "quarantine", bad, positions[failed]))
        skipped = [i for i, o in enumerate(outcomes) if isinstance(o, LeftOutRow)]
        load, engine = figures_of(table)
        return Receipt(
            shard=shard,
            attempt=self.attempt,
            good=Positions.of(positions[good]),
            failed=Positions.of(positions[failed]),
            skipped=Positions.of(positions[skipped]),
            pieces=tuple(pieces),
            stats=shard_figures(
                load,
                table,
                began,
                {**self._counts(table, outcomes), **self._input_counts(table)},
            ),
            failures=dict(Counter(map(_key, failures.values()))),
            where={
                "node": socket.gethostname(),
                "pid": str(os.getpid()),
                "code": code_version(),
                **engine,
            },
        )

    def failed(self, unit: Unit, rows: pa.Table, failure: Failure, attempts: int) -> Receipt:
        """Write all `rows` of a unit to quarantine and return its receipt; raises store errors.

        `attempts` is the number of tries to record for each row.
        """
        positions = rows[POSITION].to_numpy()
        table = quarantine(rows, [failure] * unit.rows, attempts)
        piece = self.write_piece(unit.shard, "quarantine", table, positions)
        return Receipt(
            shard=unit.shard,
            attempt=self.attempt,
            failed=Positions.of(positions),
            pieces=(piece,),
            stats=ShardStats(rows=unit.rows),
            failures={_key(failure): unit.rows},
        )

    def _answers(self) -> TextAnswers:
        return TextAnswers(self.spec, self.sampling, self.model, self.calls)

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        return self._answers().outcomes(table)

    def _result(
        self, table: pa.Table, rows: Mapping[int, ColumnValues]
    ) -> tuple[list[ResultColumn], dict[int, Failure]]:
        """Return (output columns of the rows that fit the schema, {row index: failure} of others).

        `rows` has the values of the valid rows, by index in the block.
        """
        return fitting_columns(self._schema(list(rows.values())), rows)

    def _extras(self, table: pa.Table, good: list[int]) -> list[ResultColumn]:
        """Return the further result columns of the rows with indexes `good`.

        They are the columns of `output.extras`, label probabilities and log probabilities.
        """
        made = []
        for name in self.spec.extras:
            if name == "finish_reason":
                values = table[FINISH].to_pylist()
                if self.sampling.several:  # a row with a single answer has no list
                    several = table[ENDS].to_pylist()
                    values = [s or [v] for s, v in zip(several, values, strict=True)]
            elif name == DIGESTS_COLUMN:
                values = table[DIGESTS].to_pylist()
            elif name == "prompt_tokens":
                values = table[PROMPT_TOKENS].to_pylist()
            else:
                counts = [[len(ids) for ids in a or ()] for a in table[ANSWERS].to_pylist()]
                values = counts if self.sampling.several else [sum(c) for c in counts]
            kind = extra_type(name, self.sampling.answers)
            made.append((pa.field(name, kind), pa.array([values[i] for i in good], kind)))
        if self.spec.probabilities:
            values = table[CHANCES].combine_chunks().take(pa.array(good))
            made.append((pa.field(PROBABILITIES, PROBABILITIES_TYPE), values))
        if self.sampling.logprobs is not None:
            kind = logprobs_type(self.sampling.logprobs, self.sampling.answers)
            every = self._answers().logprobs(table)
            made.append((pa.field(LOGPROBS, kind), pa.array([every[i] for i in good], kind)))
        return made

    def _schema(self, rows: Sequence[ColumnValues]) -> pa.Schema:
        return output_schema(self.spec, self.sampling.several, self.store, rows)

    def write_piece(
        self, shard: int, kind: PieceKind, table: pa.Table, positions: np.ndarray
    ) -> Piece:
        """Write a table as a Parquet piece with a new name; return the piece's record."""
        out = io.BytesIO()
        # Encoded like the result's files, so that a piece becomes a row group of one unchanged.
        dictionary = dictionary_columns(table)
        pq.write_table(table, out, compression="zstd", use_dictionary=dictionary)
        data = out.getvalue()
        name = f"{shard:08d}-{uuid.uuid4().hex}.parquet"
        # Verified at once: a badly stored piece now costs one more PUT, but its rows at the end.
        put_proved(self.store, piece_path(name), data)
        return Piece(name, kind, table.num_rows, len(data), digest(data), Positions.of(positions))

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        """Return the numbers of answers by label (`label_counts`), or by length and finish reason.

        `_counts_labels` says which. Failed rows are left out. The keys are as in `answer_counts`.
        """
        well = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Failure)]
        if self._counts_labels():
            if self.spec.postprocess is None:
                rows = (o.columns for o in outcomes if isinstance(o, OutputRow))
                labels = [row[self.spec.column] for row in rows]
            else:  # labels are short, so decoding them again costs little
                texts = self._answers().texts(table)
                labels = [texts[i] for i in well]
            flat = [text for row in labels for text in (row if self.sampling.several else [row])]
            return label_counts(flat, self.sampling.choices)
        answers, reasons = table[ANSWERS].to_pylist(), table[FINISH].to_pylist()
        return length_counts([answers[i] or () for i in well], [reasons[i] for i in well])

    def _counts_labels(self) -> bool:
        """Return whether answers are counted by label.

        They are if the job has choices, not more than MOST_COUNTED_LABELS, and no answer schema.
        """
        return 0 < len(self.sampling.choices) <= MOST_COUNTED_LABELS and self.spec.schema is None

    def _input_counts(self, table: pa.Table) -> dict[str, float]:
        """Return `input_counts` of the columns that the prompt uses: nulls and common values."""
        return input_counts(table, self.spec.inputs)


def quarantine(rows: pa.Table, failures: list[Failure], attempts: int = 1) -> pa.Table:
    """Return failed rows in the format of quarantine: position, reason, attempts and input row.

    `rows` has the position column and the input columns of the failed rows only; `failures` has
    their reasons, in the same order. `attempts` is the number of tries to record for each row. The
    input columns become one struct column, so that their names cannot collide with ours.
    """
    names = input_columns(rows)
    arrays = [rows[name].combine_chunks() for name in names]
    fields = [pa.field(name, rows.schema.field(name).type) for name in names]
    nested = pa.StructArray.from_arrays(arrays, fields=fields) if names else None
    columns = {
        POSITION: rows[POSITION],
        "stage": pa.array([f.stage for f in failures], pa.string()),
        "error": pa.array([f.kind for f in failures], pa.string()),
        "message": pa.array([f.message for f in failures], pa.string()),
        "attempts": pa.array([attempts] * len(failures), pa.int32()),
    }
    if nested is not None:
        columns["input"] = nested
    return pa.table(columns)


def _key(failure: Failure) -> FailureKey:
    return FailureKey(failure.stage, failure.kind, counted_message(failure.message))


def _receipts(receipts: list[Receipt]) -> pa.Table:
    return pa.table({RECEIPT: pa.array([r.to_json() for r in receipts], pa.string())})


class RawFinish(Finish):
    """The finish stage of a requests phase, which answers each distinct request once.

    Writes the engine's answers unprocessed. The rows phase, which follows, looks them up for each
    row and decides, for example, whether a truncated answer fails its row.
    """

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        return [failure or OutputRow({}) for failure in failures_of(table)]

    def _result(
        self, table: pa.Table, rows: Mapping[int, ColumnValues]
    ) -> tuple[list[ResultColumn], dict[int, Failure]]:
        answers = raw_columns(table.take(pa.array(list(rows))))
        return [(field, answers[field.name].combine_chunks()) for field in answers.schema], {}

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        return {}  # the rows phase counts the answers

    def _input_counts(self, table: pa.Table) -> dict[str, float]:
        return {}  # the rows phase counts the input

    def _extras(self, table: pa.Table, good: list[int]) -> list[ResultColumn]:
        return []
