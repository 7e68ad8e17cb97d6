"""What can be told of a model without its weights, and weights that are fetched once a node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.clouds import CLOUDS, cloud_server
from helpers.models import LLAMA_8B

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError, HubUnavailable, RayBatchError
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.model import adapters
from prefect_raybatch.model import pinned as models

# A process like an engine's: it fetches a model whose store answers slowly and notes what was read.
ENGINE = """
import os, sys, time
from prefect_raybatch.model import pinned as models
from prefect_raybatch.storage import open_store

source, notes, dies = sys.argv[1:]

class Slow:
    def __init__(self):
        self.store = open_store(source)
    def list(self):
        return self.store.list()
    def open(self, path):
        with open(notes, "a") as file:
            file.write(path + "\\n")
        if dies == "yes" and path != "config.json":
            os._exit(9)
        time.sleep(0.5)
        return self.store.open(path)

models.open_store = lambda uri: Slow()
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.compile.job import model_request
found = models.local_path(models.pin(model_request(Engine(model="s3://bucket/model"))))
print(found, sorted(os.listdir(found)))
"""


def start(tmp_path: Path, dies: str = "no") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "store"), str(tmp_path / "notes"), dies],
        env={**os.environ, "RAYBATCH_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A model of two files in a store."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/config.json").write_text("{}")
    (tmp_path / "store/model.safetensors").write_bytes(b"w" * 1000)
    return tmp_path


def test_engines_that_start_together_on_a_node_fetch_its_model_once(remote: Path) -> None:
    engines = [start(remote) for _ in range(3)]
    found = {engine.communicate(timeout=100)[0] for engine in engines}
    assert [engine.returncode for engine in engines] == [0, 0, 0]
    (line,) = found  # all are given the same folder, whole
    assert "['config.json', 'model.safetensors']" in line
    assert sorted((remote / "notes").read_text().split()) == ["config.json", "model.safetensors"]


def test_a_model_that_was_half_fetched_is_fetched_anew(remote: Path) -> None:
    killed = start(remote, dies="yes")
    assert killed.wait(timeout=100) == 9
    after = start(remote)
    out, _ = after.communicate(timeout=100)
    assert after.returncode == 0 and "['config.json', 'model.safetensors']" in out
    left = {path.suffix for path in (remote / "cache/models").iterdir()}
    assert left == {"", ".files", ".lock"}  # nothing of the first try takes up the disk


@pytest.mark.parametrize("scheme", CLOUDS)
def test_a_model_of_google_or_azure_is_copied_to_the_node_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    with cloud_server(scheme, tmp_path) as cloud:
        for name, value in cloud.env.items():
            monkeypatch.setenv(name, value)
        store = cloud.opened()
        store.put("config.json", b'{"model_type": "llama"}')
        store.put("part/model.safetensors", b"w" * 1000)
        pinned = models.pin(model_request(Engine(model=store.uri)))
        assert models.read_config(pinned)[0] == {"model_type": "llama"}
        folder = Path(models.local_path(pinned))
        assert (folder / "part/model.safetensors").read_bytes() == b"w" * 1000
    assert models.local_path(pinned) == str(folder), "the node has it: the store is not asked"


def identity(folder: Path) -> str:
    return str(models.pin(model_request(Engine(model=str(folder))))["identity"])


@pytest.mark.parametrize("above", ["models", ".cache/huggingface/hub"])
def test_a_folder_is_identified_by_its_files_wherever_it_lies(tmp_path: Path, above: str) -> None:
    """The snapshots of Hugging Face lie below ~/.cache."""
    one, other = tmp_path / above / "one", tmp_path / above / "other"
    for folder, weights in ((one, b"1"), (other, b"2")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    before = identity(one)
    assert before != identity(other)
    (one / ".cache/huggingface").mkdir(parents=True)
    (one / ".cache/huggingface/model.lock").touch()  # what a download leaves in the folder
    assert identity(one) == before
    (one / "model.safetensors").write_bytes(b"2")
    assert identity(one) == identity(other)


def test_a_folder_without_files_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"engine\.model: .* has no files"):
        identity(tmp_path)


# --- its config and the size of its weights -----------------------------------------------------


@pytest.mark.parametrize(
    ("files", "stored"),
    [
        ({}, None),
        ({"a.safetensors": 300, "b.safetensors": 700, "old.bin": 999}, 1000),  # the same twice
        ({"pytorch_model.bin": 50, "b.pt": 9}, 50),
        ({"consolidated.safetensors": 500, "model.safetensors": 480}, 480),
        ({"consolidated.safetensors": 500}, 500),
        ({"m.gguf": 5, "tokenizer.json": 77}, 5),
    ],
)
def test_config_and_bytes_of_the_weights(tmp_path, monkeypatch, files, stored):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for name, size in files.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert models.read_config({"source": str(tmp_path)}) == (LLAMA_8B, stored)
    local = models.open_store(str(tmp_path))
    monkeypatch.setattr(models, "open_store", lambda uri: local)
    assert models.read_config({"source": "s3://bucket/model"}) == (LLAMA_8B, stored)


def test_the_bundled_model_has_both():
    config, stored = models.read_config({"source": "demo"})
    assert config["num_hidden_layers"] == 4 and stored and stored > 1 << 20


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_config_that_cannot_be_read_is_a_wrong_job(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"engine\.model: config\.json of .* cannot be read"):
        models.read_config({"source": str(tmp_path)})


def test_a_hub_model_is_told_by_its_config_and_file_list_alone(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    asked: list[tuple[object, ...]] = []
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))

    def download(name: str, file: str, revision: str) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / "config.json")

    class Api:
        def model_info(self, name: str, **_: object) -> object:
            files = {"config.json": 9, "a.safetensors": 300, "b.safetensors": 5, "x.bin": None}
            made = [types.SimpleNamespace(rfilename=n, size=size) for n, size in files.items()]
            return types.SimpleNamespace(siblings=made)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model = {"source": "owner/name", "revision": "abc"}
    assert models.read_config(model) == (LLAMA_8B, 305)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert models.read_config(model) == (LLAMA_8B, None)
    assert asked == [("owner/name", "config.json", "abc")] * 2  # no weights


def test_a_hub_name_that_cannot_be_reached_is_not_waited_for(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network and not in the cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(HubUnavailable, match="no network"):
        models.read_config({"source": "owner/name", "revision": "main"})


def answered(status: int) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    request = httpx.Request("HEAD", "https://huggingface.co")
    return HfHubHTTPError(f"status {status}", response=httpx.Response(status, request=request))


def not_cached(cause: Exception) -> Exception:
    from huggingface_hub.errors import LocalEntryNotFoundError

    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = cause
    return error


UNANSWERED = [
    ConnectionResetError("reset"),
    TimeoutError("no answer within 3 s"),
    httpx.ReadTimeout("slow"),
    answered(429),
    answered(503),
    not_cached(httpx.ConnectError("refused")),
    not_cached(answered(502)),
]
REFUSED = [answered(401), answered(403), answered(404), not_cached(answered(403))]


@pytest.mark.parametrize(
    ("error", "kind"),
    [*((error, HubUnavailable) for error in UNANSWERED), *((e, ConfigError) for e in REFUSED)],
    ids=repr,
)
def test_a_hub_that_does_not_answer_is_asked_again_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[RayBatchError]
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def fails(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise not_cached(FileNotFoundError()) if local_files_only else error

    class Api:
        model_info = fails

    for name in ("hf_hub_download", "snapshot_download", "parse_safetensors_file_metadata"):
        monkeypatch.setattr(huggingface_hub, name, fails)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pinned = {"source": "owner/name", "revision": "abc", "identity": "x", "rank": 8}
    request = model_request(Engine(model="demo", adapter="owner/name"))
    looks = {
        "engine.model: Hugging Face": lambda: models.hub_commit("owner/name", None),
        "engine.model: config.json": lambda: models.read_config(pinned),
        "engine.adapter: Hugging Face": lambda: adapters.pin_adapters(request),
        "engine.adapter: adapter_config.json": lambda: adapters.check_adapters_fit(
            request, {"": pinned}, {}
        ),
        "engine.adapters: owner/name": lambda: adapters.adapter_path(pinned),
    }
    for begin, look in looks.items():
        with pytest.raises(kind, match=f"^{begin}") as caught:
            look()
        assert caught.value.transient == (kind is HubUnavailable)
        if kind is HubUnavailable:
            assert "Hugging Face cannot be reached" in str(caught.value)
            assert "name a local or s3:// folder" in str(caught.value)


def test_a_missing_model_is_a_wrong_job_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        models.hub_commit("owner/name-that-is-not-cached", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        models.read_config({"source": "owner/name-that-is-not-cached", "revision": "main"})


# --- a hub without a network --------------------------------------------------------------------

LOOKUP = """
import logging, time
from huggingface_hub import HfApi, hf_hub_download
from prefect_raybatch.model import pinned as models
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import HubUnavailable
from prefect_raybatch.job.engine import Engine
models.HUB = 1.0  # second for an answer, of which two may be waited for

def look_up():
    try:
        found = models.pin(model_request(Engine(model="owner/name")))
        return [found["revision"], models.read_config(found)[0]["model_type"]]
    except HubUnavailable as error:  # a retry may find the hub
        return [error]

logging.disable()
look_up()  # what Python imports once
logging.disable(logging.NOTSET)
logging.basicConfig(format="%(message)s")
began = time.monotonic()
print(*look_up(), sep=chr(10))
print(time.monotonic() - began)
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Somebody who takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(20)
        yield listening.getsockname()[1]


def look_up(home: Path, port: int) -> tuple[list[str], str, float]:
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    env = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    env |= {"HF_HUB_ETAG_TIMEOUT": "100", "HF_HUB_DOWNLOAD_TIMEOUT": "100"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", LOOKUP], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    *lines, seconds = done.stdout.splitlines()
    return lines, done.stderr, float(seconds)


def cached(home: Path) -> None:
    repo = home / "hub/models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    (repo / f"snapshots/{COMMIT}").mkdir(parents=True)
    (repo / f"snapshots/{COMMIT}/config.json").write_text(json.dumps({"model_type": "llama"}))


@pytest.mark.parametrize("closed", [True, False])
def test_a_cached_model_serves_where_the_hub_cannot_be_reached(
    tmp_path: Path, silent_port: int, closed: bool
) -> None:
    cached(tmp_path)
    lines, said, seconds = look_up(tmp_path, 1 if closed else silent_port)
    assert lines == [COMMIT, "llama"]
    assert "Using owner/name from the local cache" in said and COMMIT in said
    assert "Traceback" not in said and len(said.splitlines()) == 1
    assert seconds < 60  # the client alone would wait 100 s


@pytest.mark.parametrize("closed", [True, False])
def test_a_model_that_is_nowhere_is_one_line_within_seconds(
    tmp_path: Path, silent_port: int, closed: bool
) -> None:
    (line,), said, seconds = look_up(tmp_path, 1 if closed else silent_port)
    assert "cannot be reached for 'owner/name'" in line and "Check the network" in line
    assert not said and seconds < 60
