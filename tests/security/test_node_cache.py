"""A node's cache: no other user can put a model there, and an entry is what its name says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import PLANTED_CACHES

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.model import adapters
from prefect_raybatch.model import pinned as models
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.base import FileInfo

Fetch = Callable[[], str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    before = os.umask(0o022)
    yield tmp_path / "cache"
    os.umask(before)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    (tmp_path / "store/sub").mkdir(parents=True)
    (tmp_path / "store/config.json").write_text("{}")
    (tmp_path / "store/sub/model.safetensors").write_bytes(b"w" * 1000)
    monkeypatch.setattr(models, "open_store", lambda _: open_store(str(tmp_path / "store")))
    pinned = models.pin(model_request(Engine(model="s3://bucket/model")))
    return lambda: models.local_path(pinned)


@pytest.fixture
def adapter(tmp_path: Path) -> Fetch:
    (tmp_path / "lora").mkdir()
    for name in adapters.ADAPTER_FILES:
        (tmp_path / "lora" / name).write_text("{}")
    source = str(tmp_path / "lora")
    identity = adapters.identities(model_request(Engine(model="demo", adapter=source)))[""]
    return lambda: adapters.adapter_path({"source": source, "identity": identity})


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_folders_are_private_and_hold_what_was_pinned(cache: Path, model: Fetch) -> None:
    place = Path(model())
    assert place.parent == cache / "models" and model() == str(place)
    assert (place / "sub/model.safetensors").read_bytes() == b"w" * 1000
    assert [mode(path) for path in (cache, cache / "models", place)] == [0o700] * 3


def test_the_default_is_private_too(cache: Path, model: Fetch, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAYBATCH_CACHE")
    monkeypatch.setenv("HOME", str(cache))
    assert Path(model()).is_relative_to(cache / ".cache/prefect_raybatch")
    assert mode(cache / ".cache/prefect_raybatch") == 0o700


def test_a_folder_that_others_may_only_read_is_made_private(cache: Path, model: Fetch) -> None:
    place = Path(model())
    (cache / "models").chmod(0o755)
    assert model() == str(place) and mode(cache / "models") == 0o700


@pytest.mark.parametrize("attack", PLANTED_CACHES)
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_planted_cache_is_refused(
    cache: Path, attack: str, kind: str, request: pytest.FixtureRequest
) -> None:
    fetch: Fetch = request.getfixturevalue(kind)
    place = Path(fetch())
    plant, words = PLANTED_CACHES[attack]
    plant(place)
    with pytest.raises(ConfigError, match=words):
        fetch()


def test_a_file_of_another_user_is_refused(
    cache: Path, model: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match=r"belongs to another user|not a folder of this user"):
        model()


def test_an_adapter_of_the_same_size_is_told_by_its_content(adapter: Fetch, cache: Path) -> None:
    place = Path(adapter())
    (place / adapters.ADAPTER_WEIGHTS).write_text("[]")
    with pytest.raises(ConfigError, match="differs from its listing"):
        adapter()


def test_an_entry_that_is_removed_is_fetched_again(adapter: Fetch, cache: Path) -> None:
    place = Path(adapter())
    shutil.rmtree(place)
    assert adapter() == str(place) and place.is_dir()


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_an_entry_without_its_listing_is_fetched_again(
    cache: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    fetch: Fetch = request.getfixturevalue(kind)
    place = Path(fetch())
    (place / "planted.py").write_text("x")
    place.with_name(f"{place.name}.files").unlink()  # as versions without listings left it
    assert fetch() == str(place)
    assert not (place / "planted.py").exists()


def test_a_model_that_changed_since_the_plan_is_not_fetched(
    cache: Path, model: Fetch, tmp_path: Path
) -> None:
    (tmp_path / "store/config.json").write_text("{'a': 1}")
    with pytest.raises(ConfigError, match="changed after the run was planned"):
        model()


@pytest.mark.parametrize("identity", ["../../x", "abc", "", "A" * 64])
def test_a_plan_names_no_other_place(cache: Path, identity: str) -> None:
    with pytest.raises(ConfigError, match="not a SHA-256"):
        models.local_path({"source": "s3://bucket/model", "identity": identity})
    assert not cache.exists()


def test_a_file_of_a_bucket_stays_below_its_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        uri = "s3://bucket/model"

        def list(self) -> list[FileInfo]:
            return [FileInfo(path, 1, "a", None) for path in ("../../x", "config.json")]

    monkeypatch.setattr(models, "open_store", lambda _: Hostile())
    pinned = models.pin(model_request(Engine(model="s3://bucket/model")))
    with pytest.raises(ConfigError, match=r"has a file '\.\./\.\./x'"):
        models.local_path(pinned)
    assert not (tmp_path / "cache/x").exists()
