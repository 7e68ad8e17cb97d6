"""Looks up each row's stored answer; replaces prepare and engine in a run that reuses answers.

The plan says where each row's answer is. The key of the row's request, a content hash, is computed
again. If it differs from the stored answer's key, the row fails: the answer is another request's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.increments import ASKED, MERGED_ROW, NO_REQUEST, REUSED
from prefect_raybatch.stages.block import (
    Failure,
    is_passthrough,
    lost_block_like,
    numbers_of,
    timed,
    with_failures,
)
from prefect_raybatch.stages.columns import (
    CACHED_TOKENS,
    DIGESTS,
    ENGINE_BEGAN,
    FORMED,
    KEY,
    MERGED,
    REASONING_OPEN,
    REUSE,
    TRUNCATED,
    VECTOR,
)
from prefect_raybatch.stages.images.rows import Digests, RowImages
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.prepare import Prepare, with_images, with_own_forms
from prefect_raybatch.stages.raw_answers import (
    KEY_COLUMN,
    POOLED,
    RAW,
    RAW_COLUMNS,
    VECTOR_COLUMN,
    AnswerFiles,
)
from prefect_raybatch.stages.request_key import NOT_DETERMINISTIC, Keying, changed_request

WHY = ("stage", "error", "message")  # columns of the quarantine
OPTIONAL = (FORMED, REASONING_OPEN, TRUNCATED)  # finish reads them only in jobs that need them
IMAGE_LATE = Failure(
    "prepare",
    "ImageUnavailable",
    "an image of the row was unavailable when the run was planned, so the row was not sent to the "
    "model. The image is available now: retry the row",
)


@dataclass(frozen=True)
class LookUp:
    """The lookup stage: a function that adds stored answers to a block of input rows.

    `prepare` makes the rows' requests, as for an engine; `keying` computes their keys.

    `places` has three values for each input row: `kind` (the source of its answer), `at` (the
    answer's number in that source) and `digests` (of the row's images). The kinds are:

    - REUSED: the answer is in `reused`, the answers of earlier runs;
    - ASKED: the answer is in `asked`, the answers of this run's requests phase, which sends each
      distinct request once before this stage;
    - MERGED_ROW: the answer is in `asked` too, but the request was sent for an equal row;
    - NO_REQUEST: there is no answer.

    `failed` has the requests that failed in the requests phase, by the same numbers as `asked`.
    `by_row`, if set, has all answers by row number, and is read in place of `reused` and `asked`.

    Shards have `rows_per_shard` rows. `optional` has those columns of OPTIONAL that the finish
    stage needs. `pools`: answers are vectors.
    """

    prepare: Prepare
    keying: Keying
    places: AnswerFiles
    reused: AnswerFiles
    asked: AnswerFiles
    failed: AnswerFiles
    rows_per_shard: int
    by_row: AnswerFiles | None = None
    optional: tuple[str, ...] = ()
    pools: bool = False

    def __call__(self, table: pa.Table) -> pa.Table:
        """Add each row's stored answer, or its error, and the stage's times to the block.

        A lost or empty block is returned unchanged. If the stored answers cannot be read, or the
        prompt function cannot be loaded, a lost block with the reason is returned. It ends the run
        unless the error is transient, such as an outage of the store.
        """
        if is_passthrough(table):
            return table
        try:
            return self._looked_up(table)
        except CorruptRun as error:
            told = f"{error}. Run: raybatch repair {self.places.store.uri}"
            return lost_block_like(table, Loss(type(error).__name__, told, fatal=True))
        except Exception as error:  # no row's fault: the store, or the function is not on this node
            return lost_block_like(table, Loss.of(error))

    def _looked_up(self, table: pa.Table) -> pa.Table:
        began = time.time()
        rows = numbers_of(table, self.rows_per_shard)
        kinds, at, digests = self._places(rows)
        requests = self.prepare.requests(table)
        if self.prepare.images is not None:
            requests = self._as_shown(self.prepare.images, table, requests, kinds, digests)
            table = DIGESTS.add_to(table, digests)
        keys = self.keying.keys(requests, table)
        if self.prepare.prompt.function:
            table = with_own_forms(table, requests)
        table = timed(table, "prepare", began)
        looked = time.time()
        answers, failures = self._answers(rows, kinds, at)
        held = answers[KEY_COLUMN].to_pylist()
        errors = [
            _failure(request, key, kind, held[i], failures.get(i))
            for i, (request, key, kind) in enumerate(
                zip(requests, keys, kinds.tolist(), strict=True)
            )
        ]
        if self.pools and (vectors := _vectors(answers, errors)) is not None:
            table = table.append_column(VECTOR, vectors)
        well = pa.array([error is None for error in errors])
        for name, (column, kind) in RAW_COLUMNS.items():
            if name == KEY or (name in OPTIONAL and name not in self.optional):
                continue
            # An earlier release may have written them with another type.
            values = answers[column].combine_chunks().cast(kind)
            nothing = pa.nulls(table.num_rows, kind)
            table = table.append_column(name, _where(well, values, nothing))
        first = kinds == ASKED  # tokens count once, for the row that was sent to the engine
        table = MERGED.add_to(table, ~first)
        table = CACHED_TOKENS.add_to(table, [None] * table.num_rows)
        table = REUSE.add_to(table, kinds)
        table = with_failures(table, errors)
        table = ENGINE_BEGAN.add_to(table, [began] * table.num_rows)
        return timed(table, "engine", looked)

    def _as_shown(
        self,
        images: RowImages,
        table: pa.Table,
        requests: list[ChatRequest | Failure],
        kinds: np.ndarray,
        digests: list[Digests],
    ) -> list[ChatRequest | Failure]:
        """Return requests with the planned image digests, because request keys depend on them.

        `kinds` and `digests` are as from `_places`. A row that made no request when the run was
        planned gets a failure instead: its images are fetched again to find out why, and if that
        succeeds, the failure is IMAGE_LATE.
        """
        empty = [r.messages if isinstance(r, ChatRequest) else r for r in requests]
        requests = with_images(requests, empty, digests)
        none = [i for i in np.flatnonzero(kinds == NO_REQUEST) if not isinstance(empty[i], Failure)]
        if none:
            rows = table.take(pa.array(none))
            images = replace(images, too_many=1.0)
            shown, _ = images.fetched(rows, [empty[i] for i in none])
            for i, found in zip(none, shown, strict=True):
                requests[i] = found if isinstance(found, Failure) else IMAGE_LATE
        return requests

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Digests]]:
        """Return each row's `kind` and `at` (see `LookUp`), and the digests of its images.

        `rows` are row numbers. The list of digests is empty for a job without images. Raises
        `CorruptRun` if the plan lacks a row.
        """
        there, places = self.places.take(rows)
        if places is None or not there.all():
            raise CorruptRun(f"the plan has no location for the answer to row {rows[~there][0]}")
        digests = places["digests"].to_pylist() if self.prepare.images is not None else []
        return places["kind"].to_numpy(), places["at"].to_numpy(), digests

    def _answers(
        self, numbers: np.ndarray, kinds: np.ndarray, at: np.ndarray
    ) -> tuple[pa.Table, dict[int, Failure]]:
        """Return (table of each row's raw answer, {row index: failure of its request}).

        A row without an answer has nulls in the table. `numbers` are row numbers; `kinds` and `at`
        are as from `_places`. Raises `CorruptRun` if a row that made a request has neither answer
        nor failure.
        """
        index = np.full(len(kinds), -1, np.int64)
        tables: list[pa.Table] = []
        held = 0
        sources = [
            (self.reused, kinds == REUSED, at),
            (self.asked, (kinds == ASKED) | (kinds == MERGED_ROW), at),
        ]
        if self.by_row is not None:
            sources = [(self.by_row, kinds != NO_REQUEST, numbers)]
        for files, mask, by in sources:
            rows = np.flatnonzero(mask)
            there, found = files.take(by[rows])
            if found is not None:
                index[rows[there]] = held + np.arange(found.num_rows)
                tables.append(found.cast(self._schema))
                held += found.num_rows
        lacking = np.flatnonzero((index < 0) & (kinds != NO_REQUEST))
        failures: dict[int, Failure] = {}
        there, why = self.failed.take(at[lacking])
        gone = ~there | (kinds[lacking] == REUSED)
        if gone.any():
            row = numbers[lacking[gone]][0]
            raise CorruptRun(f"the answer to row {row} is missing, though plan.json lists its file")
        for i, row in zip(lacking.tolist(), why.to_pylist() if why else (), strict=True):
            failures[i] = Failure(*(str(row[name]) for name in WHY))
        every = pa.concat_tables([*tables, _no_answer(self._schema)])
        index[index < 0] = held
        return every.take(pa.array(index)), failures

    @property
    def _schema(self) -> pa.Schema:
        return POOLED if self.pools else RAW


def _no_answer(schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)


def _vectors(answers: pa.Table, errors: list[Failure | None]) -> pa.Array | None:
    """Return the answers' vectors as fixed_size_list<float32>, null for a row with an error.

    A vector whose length differs from the first one's sets its row's entry in `errors`. Returns
    None if all rows have an error already.
    """
    lists = answers[VECTOR_COLUMN].combine_chunks()
    well = [i for i, error in enumerate(errors) if error is None]
    if not well:
        return None
    size = len(lists[well[0]])
    values, missing = np.zeros((len(errors), size), np.float32), np.ones(len(errors), bool)
    for i in well:
        vector = lists[i].values
        if len(vector) != size:
            what = f"the row's vector has {len(vector)} numbers, but others have {size}"
            errors[i] = Failure("engine", "OddVector", what)
            continue
        values[i], missing[i] = vector.to_numpy(), False
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, size, mask=pa.array(missing))


def _where(well: pa.Array, values: pa.Array, nothing: pa.Array) -> pa.Array:
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
    """Return why a row has no answer; None if it has one.

    `key` is the key of the row's request as computed now. `held` is the key of the stored answer;
    if they differ, the row has no answer. `kind` is as in `LookUp.places`. `failed` is the
    request's failure in the requests phase, if it failed there.
    """
    if isinstance(request, Failure):
        return request
    if kind == NO_REQUEST:
        return NOT_DETERMINISTIC
    if failed is not None:
        return failed
    return None if key == held else changed_request(request)
