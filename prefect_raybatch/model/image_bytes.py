"""Estimates the bytes of an image after a model's processor, from the model's own files.

The same photo takes 0.6 MB for one model and 15 MB for another that cuts every image into tiles of
one size. A block of rows must hold all its images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.tasks import overridden
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.storage import is_remote

CHANNELS = 3
FRAMES = 2  # that Qwen's models make of one
MAX_PROCESSOR_BYTES = 1 << 20
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def image_bytes(
    request: ModelRequest, model: Mapping[str, Any], pixels: float, processor: Mapping[str, Any]
) -> float:
    """Return the approximate bytes of one image of `pixels` pixels as the model gets it."""
    config, _ = models.read_config(model)
    config = overridden(request, config)
    inner = config.get("text_config")
    kind = config.get("dtype") or config.get("torch_dtype")
    kind = kind or (inner.get("dtype") if isinstance(inner, Mapping) else None)
    asked = request.given.get("dtype")
    kind = kind if asked in (None, "auto") else asked
    wide = kind in ("float32", "float")
    given = request.given.get("mm_processor_kwargs")
    merged = {**processor, **(given if isinstance(given, Mapping) else {})}
    return made_pixels(pixels, merged) * CHANNELS * (4 if wide else 2)


def made_pixels(pixels: float, processor: Mapping[str, Any]) -> float:
    """Return the pixels of an image of `pixels` pixels after the processor."""
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    if "merge_size" in processor:  # Qwen2-VL and its kin: nearly as they are
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
        return FRAMES * pixels  # not known: as much as the dearest take
    points = processor.get("image_grid_pinpoints")
    if points:  # LLaVA-NeXT
        return float(max(height * width for height, width in points) + each)
    if processor.get("crop_to_patches"):  # InternVL
        return float((processor.get("max_patches", 12) + 1) * each)
    return each


def processor_of(model: Mapping[str, Any]) -> dict[str, Any]:
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


def _read(model: Mapping[str, Any], name: str) -> bytes:
    source = str(model["source"])
    if is_remote(source) or Path(source).exists() or source == models.DEMO:
        return models.store_of(model).read(name, MAX_PROCESSOR_BYTES)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name, revision=model.get("revision"))).read_bytes()
    except Exception as error:  # of many kinds, where there is no network or no such file
        raise OSError(str(error)) from error


def _fixed(size: Any) -> float | None:
    """Return the pixels of a fixed size; None if the size varies."""
    if isinstance(size, int):
        return size * size
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return float(size["height"] * size["width"])
    return None
