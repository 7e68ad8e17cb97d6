"""Estimates the bytes of a prepared row with images from a sample of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect_raybatch.job.images import UNKNOWN
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model.image_bytes import image_bytes, processor_of
from prefect_raybatch.source import Inventory
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.storage import Store

ROWS_A_LOOK, IMAGE_LOOKS = 8, 3  # rows looked at in each of so many places


def row_bytes(
    spec: RunSpec,
    model: Mapping[str, Any],
    found: Inventory,
    store: Store | None = None,
    read: bool = True,
) -> float:
    """Return the uncompressed bytes of an input row, at least those of its prepared images.

    `store` is the run's store if the files are its snapshot. If `read` is false, no row is read.
    """
    images, request = spec.prompt.images, spec.engine.model
    if images is None:
        return found.row_bytes
    processor = processor_of(model)
    per_row: list[float] = []
    if read and images.columns and not isinstance(images.resize, tuple):
        for sizes in _sizes(images.columns, spec.read, found, store):
            each = (image_bytes(request, model, images.pixels(s), processor) for s in sizes)
            per_row.append(sum(each))
    if per_row:
        return max(found.row_bytes, sum(per_row) / len(per_row))
    one = image_bytes(request, model, images.pixels(UNKNOWN), processor)
    return max(found.row_bytes, one * images.most)


def _sizes(
    columns: Sequence[str], read: ReadSpec, found: Inventory, store: Store | None
) -> Iterator[list[tuple[int, int]]]:
    """Yield (width, height) of the images of a few rows, as far as they can be determined."""
    from prefect_raybatch.stages.block import Failure, is_lost, rows_of
    from prefect_raybatch.stages.images.decode import size_of
    from prefect_raybatch.stages.read import ShardReader

    names = list(columns)
    schema = found.schema.empty_table().select(names).schema
    reader = ShardReader(found.files, schema, store, dict(read.options))
    starts = sorted(
        {
            place * max(0, reader.rows - ROWS_A_LOOK) // (IMAGE_LOOKS - 1)
            for place in range(IMAGE_LOOKS)
        }
    )
    units = [(Unit(i, 0, min(ROWS_A_LOOK, reader.rows)), start) for i, start in enumerate(starts)]
    for task in reader.tasks(units, len(units), units_per_task=1):
        for table in reader.read(task):
            if is_lost(table):  # told with its reason when the run is read
                return
            for row in rows_of(table, names):
                values = [] if isinstance(row, Failure) else list(row.values())
                sizes = [size for value in values for size in map(size_of, _each(value))]
                if sizes and None not in sizes:
                    yield [size for size in sizes if size is not None]


def _each(value: Any) -> list[Any]:
    many = value if isinstance(value, list) else [value]
    return [one.get("bytes") if isinstance(one, dict) else one for one in many]
