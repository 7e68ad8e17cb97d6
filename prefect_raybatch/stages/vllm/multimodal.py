"""Prepares images for a model with vLLM's own code but outside its engine.

The results are prompt tokens with placeholders for the images, and image features that an engine
uses as they are. vLLM's renderer needs no GPU (`vllm launch render`).
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict, cast

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.model import chat_template
from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.stages.block import Failure, Messages
from prefect_raybatch.stages.tokens import TemplateLimit
from prefect_raybatch.stages.vllm import internals

if TYPE_CHECKING:
    import numpy as np
    import torch

# Engine arguments that affect how a prompt with images is rendered.
RENDERING = (
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
    "config_format",
    "hf_config_path",
    "hf_overrides",
    "dtype",
    "max_model_len",
    "limit_mm_per_prompt",
    "mm_processor_kwargs",
)
WITH_IMAGES: EngineFields = {
    # With this cache the renderer returns None for a repeated image, as if the engine held it
    # already. But the engine that gets a request may be any of the run's.
    "mm_processor_cache_gb": 0,
    # With neither cache, vLLM identifies images by a counter instead of a hash of their content,
    # so images from two workers would be confused.
    "enable_prefix_caching": True,
}
NO_IMAGE = bytes(32)  # stands for the key of the images in rows without images


class RowFeatures(TypedDict):
    """A row's prepared images for the engine; the fields are those of the Arrow type `MM_TYPE`.

    `vllm` is the version of vLLM that made the pickled `features`; `key` is a hash of the images.
    """

    vllm: str
    key: bytes | None
    features: bytes | None


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered to the tokens and image features of a request.

    `features` are the engine's inputs for the images, pickled, and `key` is a hash of the images;
    both are None for a request without images.
    """

    tokens: list[int]
    features: bytes | None = None
    key: bytes | None = None


class Renderer:
    """Renders chat messages with decoded images to prompt tokens and image features.

    `path` and `revision` name the model; `arguments` are the engine's. Raises ConfigError if the
    model takes no images.
    """

    def __init__(self, path: str, revision: str | None, arguments: EngineFields) -> None:
        given = {name: arguments[name] for name in RENDERING if name in arguments}
        self._limit = TemplateLimit(chat_template.TEMPLATE_SECONDS)
        render = internals.image_renderer(
            path, revision, {**given, **WITH_IMAGES}, lambda apply: self._limit(apply)
        )
        if render is None:
            raise ConfigError(f"prompt.images: the model {path} accepts only text, no images")
        self._render = render

    def rows(
        self, conversations: Sequence[Messages | Failure]
    ) -> tuple[list[list[int] | Failure], list[RowFeatures | None]]:
        """Return (each row's prompt tokens or failure, each row's image features).

        The features are None for a row without images and for a failed row.
        """
        tokens: list[list[int] | Failure] = []
        features: list[RowFeatures | None] = []
        here = internals.version()
        self._limit = TemplateLimit(chat_template.TEMPLATE_SECONDS)  # counts slow rows per block
        for messages in conversations:
            made = messages if isinstance(messages, Failure) else self._guarded(messages)
            if isinstance(made, Failure):
                tokens.append(made)
                features.append(None)
                continue
            tokens.append(made.tokens)
            sent: RowFeatures = {"vllm": here, "key": made.key, "features": made.features}
            features.append(None if made.features is None else sent)
        return tokens, features

    def _guarded(self, messages: Messages) -> Rendered | Failure:
        try:
            return self.render(messages)
        except Exception as error:
            return Failure.of("prepare", error)

    def render(self, messages: Messages) -> Rendered:
        """Render one conversation; image parts are {"type": "image_pil", "image_pil": IMAGE}."""
        made = self._render(list(messages))
        tokens = list(made["prompt_token_ids"])
        if made["type"] != "multimodal":
            return Rendered(tokens)
        hashes = {kind: list(names) for kind, names in made["mm_hashes"].items()}
        whole = (made["mm_kwargs"], hashes, dict(made["mm_placeholders"]))
        key = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).digest()
        return Rendered(tokens, _pickled(whole), key)


@lru_cache(maxsize=1)
def _renderer(path: str, revision: str | None, arguments: str) -> Renderer:
    return Renderer(path, revision, json.loads(arguments))


def renderer(path: str, revision: str | None, arguments: EngineFields) -> Renderer:
    """Return the model's renderer; this process caches the latest one."""
    given = {name: arguments[name] for name in RENDERING if name in arguments}
    return _renderer(path, revision, json.dumps(given, sort_keys=True))


def engine_input(tokens: Sequence[int], features: bytes | memoryview | None) -> dict[str, object]:
    """Return the prompt for vLLM's `add_request`; `features` are pickled, None without images."""
    if features is None:
        return {"type": "token", "prompt_token_ids": tokens}
    kwargs, hashes, placeholders = pickle.loads(features)
    return {
        "type": "multimodal",
        "prompt_token_ids": tokens,
        "mm_kwargs": kwargs,
        "mm_hashes": hashes,
        "mm_placeholders": placeholders,
    }


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes.

    torch would pickle each as a ZIP file, and reading one of 0.6 MB takes 12 ms.
    """

    def reducer_override(self, value: object) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (data, str(plain.dtype).removeprefix("torch."), tuple(plain.shape))


def _pickled(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 5).dump(value)
    return out.getvalue()


def _tensor(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    dtype = cast(torch.dtype, getattr(torch, kind))
    return torch.from_numpy(data).view(dtype).reshape(shape)


def other_version(column: pa.ChunkedArray) -> Loss | None:
    """Return a fatal `Loss` if another version of vLLM made image features in `column`, else None.

    `column` has the type `MM_TYPE`. The version to compare with is the one on this node.
    """
    # `flatten`, unlike `field`, also makes the fields of a null row null.
    made = set(column.combine_chunks().flatten()[0].drop_null().to_pylist())
    if not made or made <= {here := internals.version()}:
        return None
    return Loss(
        "ConfigError",
        f"images were prepared by vLLM {', '.join(sorted(made))}, but the engine's node has "
        f"{here}. Install one version on all nodes",
        fatal=True,
    )


def with_image_features(
    keys: Sequence[bytes], column: pa.ChunkedArray
) -> tuple[list[bytes], list[pa.Buffer | None]]:
    """Return (each row's key with its images' key appended, each row's image features).

    `keys` identify the rows' prompt tokens. `column` has the type `MM_TYPE`. The features are None
    for a row without images, and are not copied out of the block.
    """
    _, names, sent = column.combine_chunks().flatten()
    images = names.to_pylist()
    features = [f.as_buffer() if f.is_valid else None for f in sent]
    # Always 32 bytes are appended, so the tokens and the images cannot be confused.
    return [key + (image or NO_IMAGE) for key, image in zip(keys, images, strict=True)], features
