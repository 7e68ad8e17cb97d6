"""The format of a block between stages: an Arrow table, mostly with the rows of one shard.

A block may also hold a part of a shard. In addition to the input columns, each row has its shard
and its position in the shard, and the reason if it failed.

A unit of work is a range of rows of one shard. If a stage cannot process a unit, it returns a
`lost` block with the reason. An exception would not do: Ray would retry the task or swallow the
exception, and lose its text.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, KeysView, Mapping, Sequence, ValuesView
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise, starmap
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from prefect_raybatch.job.checks import RESERVED
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model.tokenizer_class import PLAIN_CLASS, class_of_tokenizer
from prefect_raybatch.stages.columns import ERROR, LOST, LOST_ROWS, POSITION, SHARD, SPENT_COLUMNS
from prefect_raybatch.words import storable

MAX_ERROR = 500  # characters of a message that are kept
# Errors of Arrow for a value that Python cannot represent; KeyError for an unknown time zone.
NOT_IN_PYTHON = (ValueError, OverflowError, KeyError, pa.ArrowException)
Row = dict[str, Any]  # values by the names of their columns, as `to_pylist` returns them


def tag(table: pa.Table, unit: Unit) -> pa.Table:
    """Return `table`, the input rows of `unit`, with columns of each row's shard and position."""
    positions = np.arange(unit.offset, unit.offset + unit.rows, dtype=np.int32)
    shards = np.full(unit.rows, unit.shard, dtype=np.int32)
    table = table.add_column(0, POSITION, pa.array(positions))
    return table.add_column(0, SHARD, pa.array(shards))


def numbers_of(table: pa.Table, rows_per_shard: int) -> np.ndarray:
    """Return int64[rows]: the number of each row of a block in the run's input, from 0."""
    shards = table[SHARD].to_numpy().astype(np.int64)
    return np.asarray(shards * rows_per_shard + table[POSITION].to_numpy())


def timed(table: pa.Table, stage: str, began: float) -> pa.Table:
    """Return the block with a column of the seconds that `stage` has spent on it.

    `began` is when the stage received the block, in seconds since 1970.
    """
    spent = np.full(table.num_rows, time.time() - began)
    return SPENT_COLUMNS[stage].add_to(table, spent)


def lost_block(unit: Unit, why: Loss) -> pa.Table:
    """Return a lost block: a single row that stands for all of `unit` and holds the reason."""
    return pa.table(
        {
            SHARD: pa.array([unit.shard], SHARD.type),
            POSITION: pa.array([unit.offset], POSITION.type),
            LOST: pa.array([asdict(why)], LOST.type),
            LOST_ROWS: pa.array([unit.rows], LOST_ROWS.type),
        }
    )


def is_lost(table: pa.Table) -> bool:
    """Return whether this is a lost block, which has reasons (`Loss`) instead of rows."""
    return LOST in table.column_names


def losses(table: pa.Table) -> list[Loss]:
    """Return the reason of each unit in a lost block."""
    return [Loss(**why) for why in table[LOST].to_pylist()]


def lost_units(table: pa.Table) -> list[tuple[Unit, Loss]]:
    """Return (unit, reason) for each unit in a lost block."""
    places = (table[name].to_pylist() for name in (SHARD, POSITION, LOST_ROWS))
    return list(zip(starmap(Unit, zip(*places, strict=True)), losses(table), strict=True))


def is_passthrough(table: pa.Table) -> bool:
    """Return whether stages must skip the block: it is lost, or empty (already committed)."""
    return is_lost(table) or table.num_rows == 0


def input_columns(table: pa.Table) -> list[str]:
    """Return the names of the columns that came from the input, in order."""
    return [name for name in table.column_names if not name.startswith(RESERVED)]


@dataclass(frozen=True)
class Failure:
    """Why a row failed: the stage, the error class (`kind`) and the message."""

    stage: str
    kind: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return {"stage": self.stage, "kind": self.kind, "message": self.message}

    @classmethod
    def of(cls, stage: str, error: BaseException) -> Failure:
        try:
            text = str(error)
        except Exception:  # a user's own class may fail here as well
            text = "its message cannot be shown"
        # Lone surrogates, as in file names, cannot be written: neither to Arrow nor to JSON.
        return cls(stage, type(error).__name__, storable(text[:MAX_ERROR]))


def failures_of(table: pa.Table) -> list[Failure | None]:
    """Return why each row of a prepared block has failed; None for a valid row."""
    return [error and Failure(**error) for error in ERROR.values(table)]


def with_failures(table: pa.Table, failures: Iterable[Failure | None]) -> pa.Table:
    """Return the block with `failures` as its error column: one per row, None for a valid row."""
    if ERROR in table.column_names:
        table = table.drop_columns([ERROR])
    return ERROR.add_to(table, [failure and failure.to_dict() for failure in failures])


def rows_of(table: pa.Table, names: list[str]) -> list[Row | Failure]:
    """Return rows as dicts of the named columns, or a `Failure` for an unreadable row.

    Python cannot represent, for example, invalid UTF-8, a date after the year 9999 or a time in an
    unknown time zone.
    """
    if not names:
        return [{} for _ in range(table.num_rows)]
    part = table.select(names)
    try:
        return list(part.to_pylist())
    except NOT_IN_PYTHON:
        return [_row(part.slice(i, 1)) for i in range(part.num_rows)]


def _row(one: pa.Table) -> Row | Failure:
    try:
        (row,) = one.to_pylist()
        return cast(Row, row)
    except NOT_IN_PYTHON as error:
        return unreadable(error)


def unreadable(error: Exception) -> Failure:
    """Return the failure of a row with a value that raises `error`, one of `NOT_IN_PYTHON`."""
    if isinstance(error, KeyError):
        error = ValueError(
            f"unknown time zone {error}. Store the times with another zone, or leave the column "
            "out with source.columns"
        )
    return Failure.of("prepare", error)


def copied(value: object) -> Any:
    """Copy what a user function returned, with all dicts, lists, tuples, sets and arrays in it.

    A function may return the same object for every row and change it from row to row.
    """
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, (list, ValuesView, KeysView)):
        return [copied(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(copied(inner) for inner in value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return copy.deepcopy(value) if isinstance(value, (set, np.ndarray)) else value


Message = dict[str, Any]  # chat message: role, content, other fields that a template may use
Messages = list[Message]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this package uses."""

    chat_template: str | None
    is_fast: bool
    model_max_length: int
    truncation_side: str
    eos_token_id: int | None

    def __hash__(self) -> int: ...

    def __call__(
        self,
        text: str | list[str],
        text_pair: list[str] | None = ...,
        *,
        add_special_tokens: bool,
        return_offsets_mapping: bool = ...,
        truncation: bool = ...,
        max_length: int | None = ...,
    ) -> Mapping[str, Any]: ...

    all_special_ids: list[int]
    all_special_tokens: list[str]

    def decode(self, token_ids: list[int]) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[Messages],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **arguments: object,
    ) -> list[str]: ...

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]: ...


@lru_cache(maxsize=4)
def load_tokenizer(path: str, revision: str | None, trust_remote_code: bool = False) -> Tokenizer:
    """Return the model's tokenizer, loaded once per worker process."""
    name = class_of_tokenizer(path, revision)
    if name is not None and not trust_remote_code:
        import transformers

        named = getattr(transformers, name, None)
        base = transformers.PreTrainedTokenizerBase
        if (
            hasattr(transformers, PLAIN_CLASS)
            and isinstance(named, type)
            and issubclass(named, base)
        ):
            return cast(Tokenizer, named.from_pretrained(path, revision=revision or "main"))
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code
    )
    return cast(Tokenizer, made)


def units_of(table: pa.Table) -> list[Unit]:
    """Return the units in a block: each a range of consecutive positions of one shard."""
    shards = table[SHARD].to_numpy()
    positions = table[POSITION].to_numpy()
    if len(shards) == 0:
        return []
    breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(positions) != 1)) + 1
    edges = [0, *breaks.tolist(), len(shards)]
    return [Unit(int(shards[a]), int(positions[a]), b - a) for a, b in pairwise(edges)]


def lost_block_like(table: pa.Table, why: Loss) -> pa.Table:
    """Return a lost block with a row for each unit in `table`, all with the reason `why`."""
    return pa.concat_tables([lost_block(unit, why) for unit in units_of(table)])
