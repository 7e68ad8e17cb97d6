"""The stores of Google Cloud Storage and Azure, each on a server with its preconditions."""

from __future__ import annotations

import base64
import os
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from helpers.azurite import running_azurite
from helpers.clouds import Cloud
from obstore.exceptions import GenericError

from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    CredentialsUnusable,
    SourceError,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.clouds import CloudStore
from prefect_raybatch.storage.clouds.answers import CloudAnswer

REMEDY = r"Renew them|Check that the credentials"


@pytest.fixture
def store(cloud: Cloud) -> Store:
    return cloud.opened()


def test_put_read_stat_list_delete(store: Store) -> None:
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


@pytest.mark.parametrize("breaks", [None, 0, 1, 2])
def test_a_listing_in_the_order_of_folders_loses_no_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, breaks: int | None
) -> None:
    """Azure with a hierarchical namespace lists folder `a` before folder `a-b`."""
    paths = ["a/1", "a/2", "a-b/1", "c"]
    for path in paths:
        store.put(path, b"")
    begun, real = [], obstore.list

    def listed(*given: Any, **options: Any) -> Iterator[list[Any]]:
        begun.append(1)
        found = [item for page in real(*given, **options) for item in page]
        found.sort(key=lambda item: [item["path"].endswith(path) for path in reversed(paths)])
        for number in range(3):
            if len(begun) == 1 and number == breaks:
                raise GenericError("connection reset")
            yield found[number : number + 1] if number < 2 else found[2:]

    monkeypatch.setattr(obstore, "list", listed)
    assert [info.path for info in store.list()] == paths
    assert len(begun) == (1 if breaks is None else 2)


def test_files_are_deleted_as_they_are_listed_although_a_page_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        store.put(f"{number}", b"")
    begun, real = [], obstore.list

    def listed(*given: Any, **options: Any) -> Iterator[list[Any]]:
        begun.append(1)
        found = [item for page in real(*given, **options) for item in page]
        for at in range(0, len(found), 2):
            if len(begun) == 1 and at == 4:
                raise GenericError("connection reset")
            yield found[at : at + 2]

    monkeypatch.setattr(obstore, "list", listed)
    for info in store.list():
        store.delete([info.path])
    assert list(store.list()) == []


def test_a_listing_goes_past_one_page(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: store.put(f"{n:04}", b""), range(1200)))
    assert [info.path for info in store.list()] == [f"{n:04}" for n in range(1200)]
    store.delete(info.path for info in store.list())
    assert list(store.list()) == []


def test_files_under_a_condition(store: Store, tmp_path: Path) -> None:
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


def test_a_change_while_it_is_read_is_noticed(store: Store) -> None:
    store.put("x", b"0123456789" * 400_000)
    with store.open("x") as handle:
        assert handle.seek(5) and handle.read(3) == b"567"
        store.put("x", b"other")
        handle.seek(3_000_000)
        with pytest.raises(SourceError, match="changed while it was being read"):
            handle.read(3)


def test_probe_pickle_and_no_secret(store: Store, cloud: Cloud) -> None:
    store.probe()
    assert list(store.list()) == []
    other = pickle.loads(pickle.dumps(store))
    other.put("x", b"1")
    assert store.read("x") == b"1"
    assert isinstance(other, CloudStore)
    assert cloud.options[cloud.secret] not in repr(other) + repr(other.connection)


def test_errors_name_place_and_remedy(cloud: Cloud) -> None:
    with pytest.raises(StoreError, match=r"://none/.*does not exist.*Create it"):
        cloud.opened("none").put("x", b"")
    other = base64.b64encode(b"other-secret" * 4).decode()
    with pytest.raises((CredentialsUnusable, StoreError), match=REMEDY) as caught:
        cloud.opened(**{cloud.secret: other}).read("x")
    assert other not in str(caught.value)
    away = cloud.opened(**{cloud.address: "http://127.0.0.1:9/testaccount"})
    away.retry_seconds = 0.0
    with pytest.raises(StoreUnavailable, match=r"://bucket/.* in 3 tries"):
        away.put("x", b"")
    with pytest.raises(ConfigError, match=r"no options 'key'\. Use "):
        cloud.opened(key="other-secret")


def test_a_fork_is_refused_and_does_not_hang(store: Store) -> None:
    store.put("x", b"1")
    child = os.fork()
    if child == 0:
        try:
            store.read("x")
        except StoreError:
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.whole
def test_the_account_of_an_azure_url_is_used(tmp_path: Path) -> None:
    with running_azurite(tmp_path, "bucket") as server:
        options = {"account_key": server.key, "endpoint": server.endpoint}
        url = f"abfss://bucket@{server.account}.dfs.core.windows.net/x"
        open_store(url, options).put("a", b"1")
        assert open_store("az://bucket/x", server.options).read("a") == b"1"
        assert open_store(f"az://bucket@{server.account}/x", options).read("a") == b"1"
        swapped = open_store(f"abfss://{server.account}@bucket.dfs.core.windows.net/x", options)
        with pytest.raises(StoreError, match=BOTH):
            swapped.probe()


BOTH = (
    r"The URI names container testaccount of account bucket\. If testaccount is the account, "
    r"write abfss://bucket@testaccount\.dfs\.core\.windows\.net/PATH$"
)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (0, "", "dns error"),
        (404, "ContainerNotFound", "x"),
        (403, "AuthenticationFailed", "x"),
        (401, "", "x"),
    ],
)
def test_swapped_names_of_container_and_account_are_both_named(
    status: int, code: str, text: str
) -> None:
    def message(place: str) -> str:
        return str(CloudAnswer(status, code, text).error("az", "write", place, 3, "https://h"))

    assert re.search(BOTH, message("az://testaccount@bucket/x"))
    for place in ("az://my-box@account/x", "az://bucket/x", "az://ab@account", "az://same@same/x"):
        assert "The URI names" not in message(place), place
