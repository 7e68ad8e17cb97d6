"""Checks by config.json whether a model takes the images of a job's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import vllm_fields
from prefect_raybatch.model.tasks import architectures, overridden
from prefect_raybatch.spec.model import ModelRequest
from prefect_raybatch.spec.prompt import ImageSpec


def check_takes(
    request: ModelRequest, images: ImageSpec, source: str, config: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` for a model that accepts no images, or fewer than a row may have.

    Passes a model that the installed vLLM does not know.
    """
    names = architectures(overridden(request, config))
    shown = f"engine.model: {source} is {', '.join(names)}, which accepts"
    if any(name in (vllm_fields.text_models() or ()) for name in names):
        raise ConfigError(
            f"{shown} only text, but prompt.images sends images. Name a model that accepts them, "
            "such as Qwen2.5-VL, or remove prompt.images"
        )
    limits = vllm_fields.media_limits(names[0]) if names else None
    if limits is None:
        return
    if "image" not in limits:
        raise ConfigError(
            f"{shown} {' and '.join(sorted(limits)) or 'no media'}, but no images. Name another"
        )
    most = limits["image"]
    if most is not None and images.most > most:
        raise ConfigError(
            f"{shown} {most} image{'s' if most > 1 else ''} a request, but prompt.images.per_row "
            f"is {images.most}. Lower it, or name a model that accepts more"
        )
