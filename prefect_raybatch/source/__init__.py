"""Reads the input for the plan: Parquet files in place, other inputs as a copy in Parquet.

Runs on the driver. `inventory` reads only the footers of Parquet files, and the copies (snapshots)
are streamed, so memory does not grow with the input.
"""

from __future__ import annotations

from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.copied_shares import forget_copied
from prefect_raybatch.source.dataset_copies import snapshot_dataset
from prefect_raybatch.source.find import (
    Inventory,
    Weights,
    check_planned,
    detect_format,
    needs_snapshot,
    reaches,
)
from prefect_raybatch.source.parquet import inventory
from prefect_raybatch.source.snapshots import (
    detect_csv,
    heads,
    peek,
    snapshot,
    snapshot_tables,
)

__all__ = [
    "Inventory",
    "Weights",
    "check_columns",
    "check_planned",
    "detect_csv",
    "detect_format",
    "forget_copied",
    "heads",
    "inventory",
    "needs_snapshot",
    "peek",
    "reaches",
    "snapshot",
    "snapshot_dataset",
    "snapshot_tables",
]
