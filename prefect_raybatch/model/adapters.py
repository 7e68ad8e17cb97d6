"""LoRA adapters: pinned by content, checked against the model, and cached on each node."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import missing_path
from prefect_raybatch.ledger.records import JsonObject, digest, dump
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.context import ModelConfig, text_part
from prefect_raybatch.spec.engine import EngineFields, ModelRequest
from prefect_raybatch.storage import Store, is_remote, open_store
from prefect_raybatch.storage.node_cache import cached_folder

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MAX_ADAPTER_BYTES = 8 << 30
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM makes room for one of these
TOGETHER = 4  # adapters on the GPU at once: rows are sorted by adapter, so that few are needed
IN_MEMORY = 32  # adapters in the node's memory at once
HUB_SCHEME = "hf://"  # before a Hugging Face name, which may also stand alone: owner/name
FROM_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


PinnedAdapter = JsonObject
"""A LoRA adapter as a plan keeps it: source, revision, identity and rank."""


def named(request: ModelRequest) -> dict[str, str]:
    """Return {name: source} of the job's adapters, sorted; one adapter for all rows is named ""."""
    if request.adapter is not None:
        return {"": request.adapter}
    return dict(sorted(request.adapters.items()))


def identities(request: ModelRequest) -> dict[str, str]:
    """Return {adapter's name: its content hash, or its Hugging Face name}, for the fingerprint."""
    return {
        name: source if _is_name(source) else _identity(_field(name), source)
        for name, source in named(request).items()
    }


def pin_adapters(request: ModelRequest) -> dict[str, PinnedAdapter]:
    """Return {name: {source, revision, identity, rank}} of the job's adapters, for the plan."""
    pinned: dict[str, PinnedAdapter] = {}
    for name, source in named(request).items():
        revision = None
        if _is_name(source):
            source, _, wanted = source.removeprefix(HUB_SCHEME).partition("@")
            revision = models.hub_commit(source, wanted or None, _field(name), ADAPTER_CONFIG)
            identity = f"{source}@{revision}"
        else:
            identity = _identity(_field(name), source)
            source = source if is_remote(source) else str(Path(source).resolve())
        adapter = {"source": source, "revision": revision, "identity": identity}
        pinned[name] = {**adapter, "rank": _rank(_field(name), _config(_field(name), adapter))}
    return pinned


def arguments(pinned: Mapping[str, PinnedAdapter], given: EngineFields) -> EngineFields:
    """Return vLLM's engine arguments for these adapters, except any that the job sets (`given`)."""
    if not pinned:
        return {}
    rank = max(int(adapter["rank"]) for adapter in pinned.values())
    ours = {
        "enable_lora": True,
        "max_loras": min(len(pinned), TOGETHER),
        "max_cpu_loras": max(min(len(pinned), IN_MEMORY), int(given.get("max_loras") or 0)),
        "max_lora_rank": next(size for size in RANKS if size >= rank),
    }
    return {name: value for name, value in ours.items() if given.get(name) is None}


def check_adapters_fit(
    request: ModelRequest, pinned: Mapping[str, PinnedAdapter], config: ModelConfig
) -> None:
    """Raise `ConfigError` for an adapter that does not fit the model or that vLLM cannot load.

    `config` is the model's config.json. Logs a warning if an adapter fits, but was trained for a
    model of another name.
    """
    text = text_part(config)
    for name, adapter in pinned.items():
        field = _field(name)
        said = _config(field, adapter)
        for wrong in ("use_dora", "modules_to_save"):
            if said.get(wrong):
                raise ConfigError(f"{field}: {adapter['source']} has {wrong}, unsupported by vLLM")
        if said.get("bias") not in (None, "none"):
            raise ConfigError(f"{field}: {adapter['source']} trains biases, unsupported by vLLM")
        _check_tensors(field, request.name, adapter, text)
        base = str(said.get("base_model_name_or_path") or "")
        if base and Path(base).name != Path(request.name).name:
            log.warning(
                "%s: %s was made for %s, but engine.model is %s. Its tensors fit",
                field,
                adapter["source"],
                base,
                request.name,
            )


def adapter_path(adapter: PinnedAdapter) -> str:
    """Return a folder on this node with the pinned adapter; copy or download it on first use.

    Later changes to the adapter's source have no effect. Raises `ConfigError` if the source changed
    between planning and the copy.
    """
    source, identity = str(adapter["source"]), str(adapter["identity"])
    if adapter.get("revision") is not None:
        from huggingface_hub import snapshot_download

        try:
            found: str = snapshot_download(
                source, revision=str(adapter["revision"]), allow_patterns=list(ADAPTER_FILES)
            )
        except Exception as error:
            fault = f"engine.adapters: {source} cannot be downloaded"
            raise models.hub_error(fault, error) from None
        return found

    def fetch(folder: Path) -> bytes:
        store = open_store(source)
        for file in ADAPTER_FILES:
            with store.open(file) as stream, (folder / file).open("wb") as out:
                shutil.copyfileobj(stream, out, 16 << 20)
        listing = _listing("engine.adapters", source)
        if digest(listing) != identity:
            raise ConfigError(
                f"the adapter {source} changed after the run was planned. Restore it, or choose "
                "a new run key"
            )
        return listing

    return cached_folder("adapters", identity, fetch)


def _field(name: str) -> str:
    return f"engine.adapters.{name}" if name else "engine.adapter"


def _is_name(source: str) -> bool:
    """Return whether `source` is a Hugging Face name rather than a folder."""
    if source.startswith(HUB_SCHEME):
        return True
    local = source.startswith((".", "/", "~")) or Path(source).exists()
    return not is_remote(source) and not local and source.count("/") == 1


def _identity(field: str, source: str) -> str:
    return digest(_listing(field, source))


def _listing(field: str, source: str) -> bytes:
    """Return a listing of an adapter's files (`ADAPTER_FILES`), as JSON bytes to hash.

    The listing has the name of each file. For a local file it has its SHA-256; for any other, its
    size and the store's ETag.
    """
    store = _store(field, source)
    if is_remote(source):
        files = [[f.path, f.size, f.etag] for f in store.list() if f.path in ADAPTER_FILES]
        return dump(sorted(files))
    return dump([[name, digest(store.read(name, MAX_ADAPTER_BYTES))] for name in ADAPTER_FILES])


def _store(field: str, source: str) -> Store:
    if not is_remote(source) and not Path(source).is_dir():
        raise ConfigError(
            f"{field}: {source!r} is neither a local folder nor a Hugging Face name: "
            f"{missing_path(source)}"
        )
    store = open_store(source)
    there = {file.path for file in store.list()}
    missing = [name for name in ADAPTER_FILES if name not in there]
    if missing:
        raise ConfigError(
            f"{field}: {source} has no {missing[0]}, so it is not a LoRA adapter of peft"
        )
    return store


def _config(field: str, adapter: PinnedAdapter) -> JsonObject:
    source = str(adapter["source"])
    try:
        if adapter.get("revision") is not None:
            data = models.hub_file(field, source, ADAPTER_CONFIG, str(adapter["revision"]))
        else:
            data = _store(field, source).read(ADAPTER_CONFIG, models.MAX_CONFIG_BYTES)
        config = json.loads(data)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{field}: {ADAPTER_CONFIG} of {source} cannot be read: {error}"
        ) from None
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{field}: {ADAPTER_CONFIG} of {source} does not describe a LoRA adapter")
    return config


def _rank(field: str, config: ModelConfig) -> int:
    values = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    ranks = [rank for rank in values if isinstance(rank, int) and 0 < rank <= RANKS[-1]]
    if len(ranks) < len(values):
        raise ConfigError(f"{field}: its rank r must be an integer from 1 to {RANKS[-1]}")
    return max(ranks)


def _check_tensors(field: str, model: str, adapter: PinnedAdapter, config: ModelConfig) -> None:
    """Raise `ConfigError` if a tensor of the adapter has a shape that does not fit the model.

    Reads only the header of the adapter's weight file. `field` names the adapter in the error.
    """
    for name, shape in _shapes(field, adapter).items():
        wrong = _misfit(name, shape, config)
        if wrong:
            raise ConfigError(
                f"{field}: {adapter['source']} does not fit the model {model}: {wrong}. Name an "
                "adapter that was trained for this model"
            )


def _shapes(field: str, adapter: PinnedAdapter) -> dict[str, list[int]]:
    """Return {tensor name: shape} of the adapter; raise `ConfigError` for unreadable weights."""
    source, revision = str(adapter["source"]), adapter.get("revision")
    if revision is None:
        with open_store(source).open(ADAPTER_WEIGHTS) as stream:
            return _header(field, source, stream)
    from huggingface_hub import parse_safetensors_file_metadata, try_to_load_from_cache
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    cached = try_to_load_from_cache(source, ADAPTER_WEIGHTS, revision=str(revision))
    if isinstance(cached, str):
        with open(cached, "rb") as stream:
            return _header(field, source, stream)
    try:
        found = parse_safetensors_file_metadata(source, ADAPTER_WEIGHTS, revision=str(revision))
    except (SafetensorsParsingError, NotASafetensorsRepoError):
        raise _no_tensors(field, source) from None
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", None) == 404:
            raise ConfigError(
                f"{field}: {source} has no {ADAPTER_WEIGHTS}, so it is not a LoRA adapter of peft"
            ) from None
        fault = f"{field}: {ADAPTER_WEIGHTS} of {source} cannot be read"
        raise models.hub_error(fault, error) from None
    return {name: list(tensor.shape) for name, tensor in found.tensors.items()}


def _header(field: str, source: str, stream: BinaryIO) -> dict[str, list[int]]:
    length = int.from_bytes(stream.read(8), "little")
    try:
        head = json.loads(stream.read(min(length, models.MAX_CONFIG_BYTES * 8)))
    except ValueError:
        raise _no_tensors(field, source) from None
    return {n: list(t.get("shape") or ()) for n, t in head.items() if n != "__metadata__"}


def _no_tensors(field: str, source: str) -> ConfigError:
    return ConfigError(
        f"{field}: {source}/{ADAPTER_WEIGHTS} is not a safetensors file. Copy it again"
    )


def _misfit(name: str, shape: list[int], config: ModelConfig) -> str:
    """Return how a tensor does not fit the model; "" if it fits or if that cannot be determined."""
    layers = config.get("num_hidden_layers")
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer and isinstance(layers, int) and int(layer[1]) >= layers:
        return f"it changes layer {layer[1]}, but the model has {layers} layers"
    sides = {
        **{(part, "lora_A"): "hidden_size" for part in FROM_HIDDEN},
        ("down_proj", "lora_A"): "intermediate_size",
        ("gate_proj", "lora_B"): "intermediate_size",
        ("up_proj", "lora_B"): "intermediate_size",
        ("down_proj", "lora_B"): "hidden_size",
        ("o_proj", "lora_B"): "hidden_size",
    }
    for (part, side), said in sides.items():
        if f".{part}.{side}." in name and "expert" not in name:
            size, found = config.get(said), shape[1 if side == "lora_A" else 0]
            if isinstance(size, int) and found != size:
                return f"{name} needs {said} {found}, but the model has {size}"
    return ""
