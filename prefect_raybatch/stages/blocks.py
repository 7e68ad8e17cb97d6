"""What a block looks like between stages: one Arrow table, one (part of a) shard.

Beside the input columns a row carries its shard, its position in it and, once it failed, why.
A unit that did not get through travels on as a `lost` block, since an exception in a Ray task
would be retried blindly or swallowed, and its text lost.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from prefect_raybatch.records import Unit

SHARD, POSITION = "__rb_shard", "__rb_pos"  # int32 each; position counts from 0 in the shard
ERROR = "__rb_error"  # struct<stage, kind, message>; null while the row is well
LOST, FATAL = "__rb_lost", "__rb_fatal"  # only in lost blocks: text, and whether to stop the run
TIMES = "__rb_times"  # float64 seconds a stage took for the block, same in each row
ERROR_TYPE = pa.struct([("stage", pa.string()), ("kind", pa.string()), ("message", pa.string())])


def tag(table: pa.Table, unit: Unit) -> pa.Table:
    """The unit's input rows with shard and position columns in front."""
    positions = np.arange(unit.offset, unit.offset + unit.rows, dtype=np.int32)
    shards = np.full(unit.rows, unit.shard, dtype=np.int32)
    table = table.add_column(0, POSITION, pa.array(positions))
    return table.add_column(0, SHARD, pa.array(shards))


def lost(unit: Unit, reason: str, fatal: bool = False) -> pa.Table:
    """A block of one row that says why `unit` did not get through; `fatal` stops the run."""
    return pa.table(
        {
            SHARD: pa.array([unit.shard], pa.int32()),
            POSITION: pa.array([unit.offset], pa.int32()),
            LOST: pa.array([reason], pa.string()),
            FATAL: pa.array([fatal]),
        }
    )


def is_lost(table: pa.Table) -> bool:
    return LOST in table.column_names


def input_columns(table: pa.Table) -> list[str]:
    """Names of the columns that came from the input, in order."""
    return [name for name in table.column_names if not name.startswith("__rb_")]
