"""The store of Google Cloud Storage on a server with its preconditions."""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.gcs_server import GcsServer, serving

from prefect_raybatch.errors import (
    CorruptRun,
    CredentialsUnusable,
    SourceError,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage.clouds import CloudStore
from prefect_raybatch.storage.clouds.connection import CloudConnection

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with serving(GcsServer("secret-token", "bucket")) as running:
        yield running


@pytest.fixture
def store(server: GcsServer) -> CloudStore:
    return opened(server)


def opened(server: GcsServer, bucket: str = "bucket", **options: str) -> CloudStore:
    link = CloudConnection("gs", bucket, {**server.options, **options})
    return CloudStore(f"gs://{bucket}/{uuid.uuid4()}", link)


def test_put_read_stat_list_delete(store: CloudStore) -> None:
    assert list(store.list()) == list(store.list("nowhere")) == []
    paths = ["a-b/x", "a/x", "a/w/y.z", "a.b", "z", "A", "é", "a b%/c"]
    for path in paths:
        info = store.put(path, path.encode())
        assert info == store.stat(path) and store.read(path) == path.encode()
    assert [info.path for info in store.list()] == sorted(paths)
    assert [info.path for info in store.list("a", recursive=False)] == ["a/x"]
    assert set(store.folders()) == {"a-b", "a", "a b%"}
    assert store.sub("a").read("w/y.z") == b"a/w/y.z"
    with pytest.raises(CorruptRun, match="A has 1 bytes"):
        store.read("A", max_bytes=0)
    store.delete([*paths, "none"])
    assert list(store.list()) == []
    for call in (store.read, store.stat, store.open):
        with pytest.raises(FileNotFoundError):
            call("A")


def test_a_listing_goes_past_one_page(store: CloudStore, server: GcsServer) -> None:
    prefix = store.uri.removeprefix("gs://bucket/")
    for number in range(2500):
        server.store("bucket", f"{prefix}/{number:04}", b"")
    assert [info.path for info in store.list()] == [f"{n:04}" for n in range(2500)]


def test_of_fifty_writers_one_wins(store: CloudStore) -> None:
    for number in range(5):
        bodies = [uuid.uuid4().bytes for _ in range(50)]
        barrier = threading.Barrier(50)

        def write(body: bytes, barrier: threading.Barrier = barrier, number: int = number) -> bool:
            barrier.wait()
            return store.put_if_absent(str(number), body)

        with ThreadPoolExecutor(50) as pool:
            told = list(pool.map(write, bodies))
        winners = [body for body, won in zip(bodies, told, strict=True) if won]
        assert winners == [store.read(str(number))]
        assert store.put_if_absent(str(number), winners[0]), "after a lost answer it is ours"


def test_files_under_a_condition(store: CloudStore, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "large").write_bytes(os.urandom(70 << 20))
    old, new = store.put("a", b"old"), store.put("a", b"newer")
    assert store.replace_file("a", tmp_path / "mine", old) is False
    assert store.replace_file("a", tmp_path / "mine", new) is True
    assert store.put_file_if_absent("a", tmp_path / "mine") is True, "the same content is ours"
    assert store.put_file_if_absent("large", tmp_path / "large") is True
    assert store.put_file_if_absent("large", tmp_path / "large") is False
    assert store.put_file("parts", tmp_path / "large").size == 70 << 20
    assert store.read("parts") == store.read("large") == (tmp_path / "large").read_bytes()


def test_a_change_while_it_is_read_is_noticed(store: CloudStore) -> None:
    store.put("x", b"0123456789" * 400_000)
    with store.open("x") as handle:
        assert handle.seek(5) and handle.read(3) == b"567"
        store.put("x", b"other")
        handle.seek(3_000_000)
        with pytest.raises(SourceError, match="changed while it was being read"):
            handle.read(3)


def test_probe_pickle_and_no_secret(store: CloudStore) -> None:
    store.probe()
    assert list(store.list()) == []
    other = pickle.loads(pickle.dumps(store))
    other.put("x", b"1")
    assert store.read("x") == b"1" and "secret" not in repr(other) + repr(other.connection)


def test_errors_name_place_and_remedy(server: GcsServer) -> None:
    with pytest.raises(StoreError, match=r"gs://none/.*does not exist.*Create it"):
        opened(server, "none").put("x", b"")
    with pytest.raises(CredentialsUnusable, match="Renew them") as caught:
        opened(server, bearer_token="other-secret").read("x")
    assert "other-secret" not in str(caught.value)
    away = opened(server, base_url="http://127.0.0.1:9")
    away.retry_seconds = 0.0
    with pytest.raises(StoreUnavailable, match=r"gs://bucket/.* in 3 tries"):
        away.put("x", b"")


def test_a_fork_is_refused_and_does_not_hang(store: CloudStore) -> None:
    store.put("x", b"1")
    child = os.fork()
    if child == 0:
        try:
            store.read("x")
        except StoreError:
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
