"""Row to the answer that is there already: in place of prepare and engine, where a run reuses.

The plan says where each row's answer lies. The row's key is made again: one that came out
otherwise fails the row, since the answer would be another request's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.increments import ASKED, MERGED_ROW, NO_REQUEST, REUSED
from prefect_raybatch.stages.block import (
    CACHED_TOKENS,
    ERROR,
    ERROR_TYPE,
    FORMED,
    MERGED,
    POSITION,
    REASONING_OPEN,
    REUSE,
    SHARD,
    TIMES,
    TRUNCATED,
    Failure,
    lost_all,
    passes_by,
    timed,
)
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.raw_answers import KEY_COLUMN, RAW, RAW_COLUMNS, AnswerFiles
from prefect_raybatch.stages.request_key import KEY, NOT_DETERMINISTIC, Keying

WHY = ("stage", "error", "message")  # columns of the quarantine
OPTIONAL = (FORMED, REASONING_OPEN, TRUNCATED)  # finish looks for them where a job has such


@dataclass(frozen=True)
class LookUp:
    """The stage as a function of one block.

    `prepare` makes requests as it does for the engine; `places` holds a row (kind, at) for each
    row of the input; `reused`, `asked` and `failed` are raw answers and failures by number.
    Shards are of `rows_per_shard` rows. `optional`: columns that finish looks for.
    """

    prepare: Prepare
    keying: Keying
    places: AnswerFiles
    reused: AnswerFiles
    asked: AnswerFiles
    failed: AnswerFiles
    rows_per_shard: int
    optional: tuple[str, ...] = ()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Adds answers, errors and times to a block of input rows."""
        if passes_by(table):
            return table
        try:
            return self._looked_up(table)
        except CorruptRun as error:
            return lost_all(table, Loss(type(error).__name__, str(error), fatal=True))
        except Exception as error:  # no row's fault: the store, or the function is not on this node
            return lost_all(table, Loss.of(error))

    def _looked_up(self, table: pa.Table) -> pa.Table:
        began = time.time()
        requests = self.prepare.requests(table)
        keys = self.keying.keys(requests, table)
        table = timed(table, "prepare", began)
        looked = time.time()
        kinds, at = self._places(table)
        answers, failures = self._answers(kinds, at)
        held = answers[KEY_COLUMN].to_pylist()
        errors: list[dict[str, str] | None] = []
        for i, (request, key, kind) in enumerate(zip(requests, keys, kinds.tolist(), strict=True)):
            failure = _failure(request, key, kind, held[i], failures.get(i))
            errors.append(failure.to_dict() if failure else None)
        well = pa.array([error is None for error in errors])
        for name, (column, kind) in RAW_COLUMNS.items():
            if name == KEY or (name in OPTIONAL and name not in self.optional):
                continue
            values = answers[column].combine_chunks()
            nothing = pa.nulls(table.num_rows, kind)
            table = table.append_column(name, _where(well, values, nothing))
        first = kinds == ASKED  # tokens count where they were computed, once
        table = table.append_column(MERGED, pa.array(~first))
        table = table.append_column(CACHED_TOKENS, pa.nulls(table.num_rows, pa.int32()))
        table = table.append_column(REUSE, pa.array(kinds))
        table = table.append_column(ERROR, pa.array(errors, ERROR_TYPE))
        table = table.append_column(f"{TIMES}_began", pa.array([began] * table.num_rows))
        return timed(table, "engine", looked)

    def _places(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Where each row's answer is: (kind, number)."""
        shards = table[SHARD].to_numpy().astype(np.int64)
        rows = shards * self.rows_per_shard + table[POSITION].to_numpy()
        there, places = self.places.take(rows)
        if places is None or not there.all():
            raise CorruptRun(f"the plan does not say where the answer to row {rows[~there][0]} is")
        return places["kind"].to_numpy(), places["at"].to_numpy()

    def _answers(self, kinds: np.ndarray, at: np.ndarray) -> tuple[pa.Table, dict[int, Failure]]:
        """(the raw answer of each row, null where there is none; why the asks of others failed)."""
        index = np.full(len(kinds), -1, np.int64)
        tables: list[pa.Table] = []
        held = 0
        for files, mask in (
            (self.reused, kinds == REUSED),
            (self.asked, (kinds == ASKED) | (kinds == MERGED_ROW)),
        ):
            rows = np.flatnonzero(mask)
            there, found = files.take(at[rows])
            if found is not None:
                index[rows[there]] = held + np.arange(found.num_rows)
                tables.append(found.cast(RAW))
                held += found.num_rows
        lacking = np.flatnonzero((index < 0) & (kinds != NO_REQUEST))
        failures: dict[int, Failure] = {}
        there, why = self.failed.take(at[lacking])
        if not there.all() or (kinds[lacking] == REUSED).any():
            raise CorruptRun("answers that plan.json names are missing; raybatch verify tells more")
        for i, row in zip(lacking.tolist(), why.to_pylist() if why else (), strict=True):
            failures[i] = Failure(*(str(row[name]) for name in WHY))
        every = pa.concat_tables([*tables, _no_answer()])
        index[index < 0] = held
        return every.take(pa.array(index)), failures


def _no_answer() -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(1, field.type) for field in RAW], schema=RAW)


def _where(well: pa.Array, values: pa.Array, nothing: pa.Array) -> Any:
    import pyarrow.compute as pc

    if pc.all(well).as_py() or not len(well):
        return values
    rows = pc.if_else(well, pa.array(range(len(well)), pa.int64()), None)
    return values.take(rows) if len(values) else nothing


def _failure(
    request: ChatRequest | Failure,
    key: bytes | None,
    kind: int,
    held: bytes | None,
    failed: Failure | None,
) -> Failure | None:
    """Why a row has no answer; None where it has one."""
    if isinstance(request, Failure):
        return request
    if kind == NO_REQUEST:
        return NOT_DETERMINISTIC
    if failed is not None:
        return failed
    return None if key == held else NOT_DETERMINISTIC
