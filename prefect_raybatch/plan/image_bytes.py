"""Estimate the bytes of a prepared row with images, from a sample and the model's own files.

The same photo takes 0.6 MB for one model and 15 MB for another that cuts every image into tiles of
a fixed size. A block of rows holds all its images in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.images import UNKNOWN
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.context import ModelConfig
from prefect_raybatch.model.tasks import overridden
from prefect_raybatch.source import Inventory
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.request import ImageSpec
from prefect_raybatch.storage import Store, is_remote

CHANNELS = 3
BASE64 = 4 / 3  # characters for a byte; a PNG of noise is no smaller than its pixels
FRAMES = 2  # copies of an image that the processor of a Qwen model makes
MAX_PROCESSOR_BYTES = 1 << 20
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
ROWS_A_LOOK, IMAGE_LOOKS = 8, 3  # rows sampled at each of 3 places of the input


def row_bytes(
    images: ImageSpec | None,
    request: ModelRequest,
    read: ReadSpec,
    model: models.PinnedModel,
    inventory: Inventory,
    store: Store | None = None,
    samples: bool = True,
) -> float:
    """Estimate the bytes of a row in memory: its input, or its prepared images if they are larger.

    `store` is the run's store if the input's files are a snapshot in it. If `samples` is False, no
    row is read and each image has an assumed size.
    """
    if images is None:
        return inventory.row_bytes
    processor = {} if request.endpoint is not None else processor_of(model)
    per_row: list[float] = []
    if samples and images.columns and not isinstance(images.resize, tuple):
        for sizes in _sizes(images.columns, read, inventory, store):
            each = (image_bytes(request, model, images.pixels(s), processor) for s in sizes)
            per_row.append(sum(each))
    if per_row:
        return max(inventory.row_bytes, sum(per_row) / len(per_row))
    one = image_bytes(request, model, images.pixels(UNKNOWN), processor)
    return max(inventory.row_bytes, one * images.most)


def _sizes(
    columns: Sequence[str], read: ReadSpec, inventory: Inventory, store: Store | None
) -> Iterator[list[tuple[int, int]]]:
    """Yield the list of (width, height) of a row's images, for a few rows spread over the input.

    Leaves out rows without images and rows with an image whose size cannot be determined. Ends
    early if the input cannot be read.
    """
    from prefect_raybatch.stages.block import Failure, is_lost, rows_of
    from prefect_raybatch.stages.images.decode import size_of
    from prefect_raybatch.stages.read import ShardReader

    names = list(columns)
    schema = inventory.schema.empty_table().select(names).schema
    reader = ShardReader(inventory.files, schema, store, dict(read.options))
    starts = sorted(
        {
            place * max(0, reader.rows - ROWS_A_LOOK) // (IMAGE_LOOKS - 1)
            for place in range(IMAGE_LOOKS)
        }
    )
    units = [(Unit(i, 0, min(ROWS_A_LOOK, reader.rows)), start) for i, start in enumerate(starts)]
    for task in reader.tasks(units, len(units), units_per_task=1):
        for table in reader.read(task):
            if is_lost(table):  # the run itself reports why
                return
            for row in rows_of(table, names):
                values = [] if isinstance(row, Failure) else list(row.values())
                sizes = [size for value in values for size in map(size_of, _each(value))]
                if sizes and None not in sizes:
                    yield [size for size in sizes if size is not None]


def _each(value: object) -> list[object]:
    many = value if isinstance(value, list) else [value]
    return [one.get("bytes") if isinstance(one, dict) else one for one in many]


def image_bytes(
    request: ModelRequest, model: models.PinnedModel, pixels: float, processor: ModelConfig
) -> float:
    """Estimate the bytes of one image of `pixels` pixels as it is sent to the model.

    `processor` are the settings of the model's image processor (`processor_of`).
    """
    if request.endpoint is not None:
        return pixels * CHANNELS * BASE64
    config, _ = models.read_config(model)
    config = overridden(request, config)
    inner = config.get("text_config")
    kind = config.get("dtype") or config.get("torch_dtype")
    kind = kind or (inner.get("dtype") if isinstance(inner, Mapping) else None)
    asked = request.vllm_arguments.get("dtype")
    kind = kind if asked in (None, "auto") else asked
    wide = kind in ("float32", "float")
    given = request.vllm_arguments.get("mm_processor_kwargs")
    merged = {**processor, **(given if isinstance(given, Mapping) else {})}
    return made_pixels(pixels, merged) * CHANNELS * (4 if wide else 2)


def made_pixels(pixels: float, processor: ModelConfig) -> float:
    """Return how many pixels the model's image processor makes of an image of `pixels` pixels.

    Counts all tiles and copies of the image.
    """
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    if "merge_size" in processor:  # Qwen2-VL and similar: nearly the image's own size
        least = processor.get("min_pixels") or size.get("shortest_edge") or 0
        most = processor.get("max_pixels") or size.get("longest_edge") or pixels
        return float(FRAMES * min(max(pixels, least), most))
    tile = processor.get("max_image_size")
    if isinstance(tile, Mapping) and "longest_edge" in tile and "longest_edge" in size:
        side, longest = tile["longest_edge"], size["longest_edge"]  # Idefics3, SmolVLM
        tiles = -(-longest // side) if processor.get("do_image_splitting", True) else 0
        return float((tiles**2 + 1) * side**2)
    each = _fixed(processor.get("crop_size")) or _fixed(size)
    if each is None:
        return FRAMES * pixels  # unknown processor: assume the most expensive
    points = processor.get("image_grid_pinpoints")
    if points:  # LLaVA-NeXT
        return float(max(height * width for height, width in points) + each)
    if processor.get("crop_to_patches"):  # InternVL
        return float((processor.get("max_patches", 12) + 1) * each)
    return each


def processor_of(model: models.PinnedModel) -> ModelConfig:
    """Return the settings of the model's image processor; {} if they cannot be read here."""
    for name in PROCESSOR_FILES:
        try:
            value = json.loads(_read(model, name))
        except (OSError, ValueError, RayBatchError):
            continue
        if isinstance(value, dict):
            inner = value.get("image_processor")
            return inner if isinstance(inner, dict) else value
    return {}


def _read(model: models.PinnedModel, name: str) -> bytes:
    source = str(model["source"])
    if is_remote(source) or Path(source).exists() or source == models.DEMO:
        return models.store_of(model).read(name, MAX_PROCESSOR_BYTES)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name, revision=model.get("revision"))).read_bytes()
    except Exception as error:  # without a network or the file, of many classes
        raise OSError(str(error)) from error


def _fixed(size: object) -> float | None:
    """Return the pixels of an image, if the processor's setting `size` gives every image that size.

    Returns None if the size varies.
    """
    if isinstance(size, int):
        return size * size
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return float(size["height"] * size["width"])
    return None
