"""Pins the model of a job to a revision, and finds its files on a node."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefect_raybatch import demo
from prefect_raybatch.bounded import read_regular_file, within
from prefect_raybatch.errors import ConfigError, HubUnavailable, RayBatchError
from prefect_raybatch.job.checks import missing_path
from prefect_raybatch.job.secrets import endpoint_identity
from prefect_raybatch.ledger.records import JsonObject, digest, dump
from prefect_raybatch.model.context import OVERRIDES, ModelConfig, length_overrides, own_context
from prefect_raybatch.spec.engine import EngineFields, ModelRequest
from prefect_raybatch.storage import FileInfo, Store, is_remote, open_store
from prefect_raybatch.storage.node_cache import cached_folder

log = logging.getLogger(__name__)

PinnedModel = JsonObject
"""A model as a plan keeps it: source, revision, identity and, if it has any, its adapters."""

DEMO = "demo"
ENDPOINT = "endpoint"  # source of a hosted model
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
MAX_CONFIG_BYTES = 4 << 20
HUB = 3.0  # seconds for an answer of Hugging Face
HASHED_BYTES = 1 << 20  # bytes hashed at each end of a weight file: whole files would take minutes


def pin(request: ModelRequest) -> dict[str, Any]:
    """Return {source, revision, identity} of the model, which the plan records.

    A folder's identity is a hash of file names, sizes and (sampled) contents. A Hugging Face name
    is pinned to the commit that `revision` points to now. A hosted model has only a name and URL,
    since what its server runs cannot be pinned. Raises `ConfigError` if there is no such model.
    """
    source = request.name
    if (endpoint := request.endpoint) is not None:  # what a server runs cannot be pinned
        name = f"{endpoint.model}@{endpoint_identity(endpoint.url)}"
        return {"source": ENDPOINT, "revision": None, "identity": name}
    if source == DEMO:
        return {"source": DEMO, "revision": None, "identity": _folder(Path(demo.demo_model_path()))}
    if is_remote(source):
        return {"source": source, "revision": None, "identity": _remote(source)}
    if Path(source).exists():
        path = Path(source).resolve()
        if not (path / "config.json").exists():
            raise ConfigError(f"engine.model: {source} has no config.json, so it is not a model")
        return {"source": str(path), "revision": None, "identity": _folder(path)}
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ConfigError(
            f"engine.model: {source!r} is neither a local folder nor a Hugging Face name "
            f"(owner/name): {missing_path(source)}"
        )
    revision = hub_commit(source, request.revision)
    return {"source": source, "revision": revision, "identity": f"{source}@{revision}"}


def cpu_dtype(request: ModelRequest) -> str | None:
    """Return the dtype with which to load the model on a CPU; None for the stored dtype."""
    said = request.vllm_arguments.get("dtype")
    return said or (demo.CPU_DTYPE if request.name == DEMO else None)


def local_path(model: PinnedModel) -> str:
    """Return the path or Hugging Face name to load on this node; download an s3:// model once."""
    source = str(model["source"])
    if source == DEMO:
        return demo.demo_model_path()
    return _fetch(source, str(model["identity"])) if is_remote(source) else source


def store_of(model: PinnedModel) -> Store:
    """Return a store of the model's folder, local or s3://; downloads nothing."""
    source = str(model["source"])
    return open_store(demo.demo_model_path() if source == DEMO else source)


def model_name(model: PinnedModel) -> str:
    """Return the name of a model for display: `NAME REVISION`, or `NAME@URL` if hosted."""
    if model["source"] == ENDPOINT:
        return str(model["identity"])
    return f"{model['source']} {model.get('revision') or ''}".rstrip()


def tokenizer_place(model: PinnedModel) -> tuple[str, str | None, bool]:
    """Return (path or name, revision, trust_remote_code) of the engine's tokenizer.

    If that is the model's own, an s3:// model is downloaded to this node first.
    """
    trust = bool(model.get("trust_remote_code"))
    if model.get("tokenizer"):
        return str(model["tokenizer"]), model.get("tokenizer_revision"), trust
    return local_path(model), model.get("revision"), trust


def with_arguments(model: PinnedModel, request: ModelRequest) -> PinnedModel:
    """Return the plan's model, with engine arguments of the job added that stages need.

    These are the arguments about the tokenizer, and those of `hf_overrides` that change the context
    length.
    """
    extra = {**request.vllm_arguments, OVERRIDES: length_overrides(request.vllm_arguments)}
    names = ("tokenizer", "tokenizer_revision", "trust_remote_code", OVERRIDES)
    return {**model, **{name: extra[name] for name in names if extra.get(name)}}


def read_config(model: PinnedModel) -> tuple[ModelConfig, int | None]:
    """Return (config.json, bytes of the weight files or None) without downloading weights.

    The bytes are None if there are no weight files, or if Hugging Face does not tell their sizes.
    Raises `ConfigError` if config.json is missing or cannot be read, `HubUnavailable` if it is not
    in the local cache and Hugging Face does not answer.
    """
    source = str(model["source"])
    try:
        if is_remote(source):
            store = open_store(source)
            sizes = {file.path: file.size for file in store.list()}
            return _object(store.read("config.json", MAX_CONFIG_BYTES)), _weight_bytes(sizes)
        folder = Path(demo.demo_model_path() if source == DEMO else source)
        if not folder.exists():
            return _hub_config(source, model.get("revision"))
        sizes = {str(file.name): file.stat().st_size for file in folder.iterdir()}
        data = read_regular_file(folder / "config.json", MAX_CONFIG_BYTES)
        return _object(data), _weight_bytes(sizes)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine.model: config.json of {source} cannot be read: {error}"
        ) from None


def _object(data: bytes) -> ModelConfig:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def _weight_bytes(sizes: Mapping[str, int]) -> int | None:
    """Return the total bytes of a model's weight files; None if it has none.

    `sizes` has the size of each of the model's files. If there are weights in several formats, only
    those in the format that comes first in `WEIGHTS` count.
    """
    for ending in WEIGHTS:
        # Mistral publishes the same weights in a second format, in files `consolidated*`.
        files = {n: size for n, size in sizes.items() if n.endswith(ending) and "/" not in n}
        usual = [size for name, size in files.items() if not name.startswith("consolidated")]
        if found := sum(usual or files.values()):
            return found
    return None


def hub_file(field: str, name: str, file: str, revision: str | None) -> bytes:
    """Return the content of a file of a Hugging Face model, downloaded or from the local cache.

    Raises `ConfigError` or `HubUnavailable`, naming job field `field`, if it cannot be read.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=revision)).read_bytes()
    except Exception as error:
        raise hub_error(f"{field}: {file} of {name} cannot be read", error) from None


def hub_error(fault: str, error: Exception) -> Exception:
    """Return the error to raise for `error` of a request to Hugging Face.

    This is `HubUnavailable` if the hub does not answer, and `ConfigError` if it refuses or a file
    does not exist. Another error is returned as it is. `fault` begins the message.
    """
    from huggingface_hub.errors import EntryNotFoundError

    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if _is_unanswered(error):
        return HubUnavailable(
            f"{fault}: Hugging Face cannot be reached ({text}). Check the network, or name a local "
            "or s3:// folder"
        )
    if isinstance(error, (OSError, ValueError, EntryNotFoundError)):
        return ConfigError(f"{fault}: {text}")
    return error


def _hub_config(name: str, revision: str | None) -> tuple[ModelConfig, int | None]:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    config = _object(hub_file("engine.model", name, "config.json", revision))
    if HF_HUB_OFFLINE:
        return config, None
    try:
        info = within(
            HUB,
            lambda: HfApi().model_info(name, revision=revision, timeout=HUB, files_metadata=True),
        )
    except Exception as error:
        if not _is_network(error):
            raise
        return config, None  # the sizes then follow from the config
    return config, _weight_bytes({f.rfilename: f.size or 0 for f in info.siblings or ()})


def context_length(model: PinnedModel) -> int | None:
    """Return the default context length of a model from `with_arguments`, by its copy on this node.

    Downloads an s3:// model once. Returns None for a model on Hugging Face, and if config.json has
    no length or cannot be read.
    """
    path = Path(local_path(model)) / "config.json"
    try:
        config = json.loads(read_regular_file(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return own_context(config, model) if isinstance(config, dict) else None


def own_length(model: PinnedModel, arguments: EngineFields) -> int | None:
    """Return the context length of an engine with these `arguments`, by the model's config.json.

    This is the default length, without `max_model_len`. None if config.json has none or cannot be
    read. Does not download the weights. Raises `HubUnavailable` if config.json is not in the local
    cache and Hugging Face does not answer.
    """
    try:
        return own_context(read_config(model)[0], arguments)
    except ConfigError as error:
        log.info("The context length of %s is unknown: %s", model["source"], error)
        return None


def _folder(path: Path) -> str:
    """Return the identity of the model in folder `path`.

    This is a hash of names, sizes, and the first and last bytes of all files. Files in a `.cache`
    folder, where downloads leave their records, are ignored. Raises `ConfigError` if there are no
    files.
    """
    files = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        if ".cache" in file.relative_to(path).parts:
            continue
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(HASHED_BYTES)
            stream.seek(max(0, size - HASHED_BYTES))
            files.append([str(file.relative_to(path)), size, digest(head + stream.read())])
    if not files:
        raise ConfigError(f"engine.model: {path} has no files. Copy the model there again")
    return digest(dump(files))


def _remote(source: str) -> str:
    files = list(open_store(source).list())
    if not any(file.path == "config.json" for file in files):
        raise ConfigError(f"engine.model: {source} has no config.json, so it is not a model")
    return digest(_listing(files))


def hub_commit(
    name: str, revision: str | None, field: str = "engine.model", file: str = "config.json"
) -> str | None:
    """Return the commit to which `revision` of the Hugging Face model `name` refers.

    If the hub is unreachable or HF_HUB_OFFLINE is set, returns the commit of the cached `file`. If
    that is missing too, raises `HubUnavailable` if the hub does not answer, else `ConfigError`.
    Raises `ConfigError` also if the hub refuses, or has no such model. Both errors name job field
    `field`.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    kind: type[RayBatchError] = ConfigError
    trouble = "HF_HUB_OFFLINE is set"
    if not HF_HUB_OFFLINE:
        try:
            # With a time limit, because the DNS lookup of the hub has none.
            return within(HUB, lambda: HfApi().model_info(name, revision=revision, timeout=HUB).sha)
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, HfHubHTTPError) and status in (401, 403, 404):
                raise ConfigError(
                    f"{field}: Hugging Face answers {status} for {name!r}"
                    f"{f' at revision {revision!r}' if revision else ''}. Check the name, the "
                    "revision and HF_TOKEN"
                ) from None
            if not _is_network(error):
                raise
            trouble = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            kind = HubUnavailable if _is_unanswered(error) else ConfigError
    try:
        cached = hf_hub_download(name, file, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, OSError):
        raise kind(
            f"{field}: Hugging Face cannot be reached for {name!r} ({trouble}), which is not in "
            "the local cache. Check the network, or name a local or s3:// folder"
        ) from None
    commit = Path(cached).parent.name
    if not HF_HUB_OFFLINE:
        log.warning(
            "%s: Hugging Face cannot be reached (%s). Using %s from the local cache, at "
            "revision %s",
            field,
            trouble,
            name,
            commit,
        )
    return commit


def _is_network(error: BaseException) -> bool:
    """Return whether an error may mean that Hugging Face could not be reached."""
    return isinstance(error, OSError) or _is_of_client(error)


def _is_of_client(error: BaseException) -> bool:
    """Return whether an error is of the HTTP client of huggingface_hub, such as a lost connection.

    The client (httpx, httpx2 or requests) differs between versions, so its errors are recognized
    by the names of their classes.
    """
    kinds = (k for k in type(error).__mro__ if k.__module__.startswith(("http", "requests")))
    return any(kind.__name__ in ("TransportError", "RequestException") for kind in kinds)


def _is_unanswered(error: BaseException) -> bool:
    """Return whether a request to Hugging Face failed with an `error` after which a retry may help.

    True if the hub could not be reached, or was too slow, too busy (429) or faulty (5xx). False if
    HF_HUB_OFFLINE is set and the error has no HTTP status.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):  # not cached; the cause says why not downloaded
        error = error.__cause__ or error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status == 429 or status >= 500)
    away = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
    return not HF_HUB_OFFLINE and (away or _is_of_client(error))


def _fetch(source: str, identity: str) -> str:
    """Return the folder on this node with the files of an s3:// model.

    Downloads them if necessary. Raises `ConfigError` if their hash is no longer `identity`, which
    the plan has pinned.
    """

    def fetch(folder: Path) -> bytes:
        store = open_store(source)
        files = list(store.list())
        listing = _listing(files)
        if digest(listing) != identity:
            raise ConfigError(
                f"engine.model: the files of {source} changed after the run was planned. Restore "
                "them, or choose a new run key"
            )
        _download(store, files, folder)
        return listing

    return cached_folder("models", identity, fetch)


def _listing(files: Iterable[FileInfo]) -> bytes:
    return dump(sorted([file.path, file.size, file.etag] for file in files))


def _download(store: Store, files: Iterable[FileInfo], folder: Path) -> None:
    for info in files:
        path = folder / info.path
        if ".." in path.parts or not path.is_relative_to(folder):
            raise ConfigError(f"engine.model: {store.uri} has a file {info.path!r}. Rename it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(info.path) as stream, path.open("wb") as out:
            while chunk := stream.read(16 << 20):
                out.write(chunk)
