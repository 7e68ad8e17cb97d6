"""LoRA adapters that lie on S3 and on Hugging Face: pinned, checked by their headers, fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_models
from helpers.hub import COMMIT, OLD, hub
from helpers.small import make_job
from s3server import S3Server

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import adapters
from prefect_raybatch.storage import open_store

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    return tiny_models.lora(tmp_path / "polite", "demo", CONFIG)


def upload(s3: S3Server, folder: Path) -> str:
    uri = "s3://adapters-remote/polite"
    store = open_store(uri, s3.options)
    for name in adapters.ADAPTER_FILES:
        store.put(name, (folder / name).read_bytes())
    return uri


def test_an_adapter_on_s3_is_pinned_by_what_lies_there(s3, folder, tmp_path, monkeypatch):
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    engine = make_job(engine={"adapter": upload(s3, folder)}).engine
    pinned = adapters.pin_adapters(model_request(engine))
    adapters.check_adapters_fit(model_request(engine), pinned, CONFIG)
    with pytest.raises(ConfigError, match="does not fit the model demo"):
        adapters.check_adapters_fit(model_request(engine), pinned, {**CONFIG, "hidden_size": 8})
    here = Path(adapters.adapter_path(pinned[""]))
    for name in adapters.ADAPTER_FILES:
        assert (here / name).read_bytes() == (folder / name).read_bytes()
    assert adapters.identities(model_request(engine)) == {"": pinned[""]["identity"]}
    upload(s3, tiny_models.lora(tmp_path / "other", "demo", CONFIG, seed=2))
    assert adapters.identities(model_request(engine)) != {"": pinned[""]["identity"]}
    assert Path(adapters.adapter_path(pinned[""])) == here  # this node has what was pinned
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="changed after the run was planned"):
        adapters.adapter_path(pinned[""])


FETCH = """
import json, sys
from helpers.small import make_job
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import adapters
config, made = json.loads(sys.argv[1]), []
for source in sys.argv[2:]:
    engine = make_job(engine={"adapter": source}).engine
    try:
        pinned = adapters.pin_adapters(model_request(engine))
        adapters.check_adapters_fit(model_request(engine), pinned, config)
        path = adapters.adapter_path(pinned[""]) if config["hidden_size"] == 16 else ""
        made.append([pinned[""], path])
    except ConfigError as error:
        made.append(str(error))
print(json.dumps(made))
"""


def fetched(url: str, home: Path, config: dict[str, Any], *sources: str) -> list[Any]:
    """What a process makes of adapters on a hub, which is read when its library is imported."""
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", FETCH, json.dumps(config), *sources]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_adapter_on_hugging_face_is_pinned_to_a_commit_and_told_by_its_header(folder, tmp_path):
    asked: list[str] = []
    with hub("team/polite", folder, asked) as url:
        refused = fetched(url, tmp_path / "a", {**CONFIG, "hidden_size": 8}, "team/polite")
        weights = [one for one in asked if adapters.ADAPTER_WEIGHTS in one]
        assert all("bytes=" in one for one in weights), weights  # the header alone
        names = ("team/polite", "hf://team/polite", "hf://team/polite@v1", "hf://team/polite@v2")
        found = fetched(url, tmp_path / "b", CONFIG, *names, "hf://team/rude")
        (folder / adapters.ADAPTER_WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec")
        (broken,) = fetched(url, tmp_path / "c", CONFIG, "team/polite")
        (folder / adapters.ADAPTER_WEIGHTS).unlink()
        (without,) = fetched(url, tmp_path / "d", CONFIG, "team/polite")
    assert "engine.adapter: team/polite does not fit the model demo" in refused[0]
    plain, named, tagged, unknown, nobody = found
    assert (
        plain[0]
        == named[0]
        == {
            "source": "team/polite",
            "revision": COMMIT,
            "identity": f"team/polite@{COMMIT}",
            "rank": 4,
        }
    )
    assert tagged[0]["revision"] == OLD
    assert sorted(p.name for p in Path(plain[1]).iterdir()) == sorted(adapters.ADAPTER_FILES)
    assert "Hugging Face answers 404 for 'team/polite' at revision 'v2'" in unknown
    assert "engine.adapter: Hugging Face answers 404 for 'team/rude'" in nobody
    assert "not a safetensors file" in broken
    assert "has no adapter_model.safetensors" in without
