"""The store's promises, on a local folder and on a real S3 server."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.clouds import CLOUDS
from s3server import S3Server, proxy

from prefect_raybatch import storage
from prefect_raybatch.errors import (
    AccessDenied,
    BadUpload,
    ConfigError,
    CorruptRun,
    CredentialsUnusable,
    RayBatchError,
    SourceError,
    StoreError,
    StoreUnavailable,
    UnsafeStore,
    is_transient,
)
from prefect_raybatch.storage import (
    FileInfo,
    Store,
    Sums,
    contains,
    holds,
    is_remote,
    join,
    open_store,
    put_file_proved,
    put_proved,
    read_ahead,
    s3_silence,
)
from prefect_raybatch.storage import bucket as bucket_module
from prefect_raybatch.storage import local as local_module
from prefect_raybatch.storage.s3_client import Connection

BUCKET = "store-tests"
OUTSIDE = ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.02)


@pytest.fixture
def s3_store(s3: S3Server) -> Store:
    return open_store(f"s3://{BUCKET}/{uuid.uuid4()}", s3.options)


@pytest.fixture(params=["local", "s3", *CLOUDS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "root"))
    if request.param == "s3":
        found: Store = request.getfixturevalue("s3_store")
    else:
        found = request.getfixturevalue(request.param).opened()
    return found


def behind(server: S3Server, endpoint: str, retry_seconds: float = 20) -> Store:
    """A store of its own prefix that talks to `endpoint`."""
    store = open_store(
        f"s3://{BUCKET}/{uuid.uuid4()}", {**server.options, "endpoint_url": endpoint}
    )
    store.retry_seconds = retry_seconds
    return store


class First:
    """A proxy decision: `what` for the first `times` requests that fit, then "pass"."""

    def __init__(self, what: str, times: int, method: str = "PUT", header: str = "") -> None:
        self.what, self.left, self.method, self.header = what, times, method, header

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> str:
        fits = method == self.method and (not self.header or self.header in headers)
        if not fits or not self.left:
            return "pass"
        self.left -= 1
        return self.what


def race(store: Store, path: str, writers: int) -> tuple[list[bytes], bytes]:
    """Bodies of those who were told that they won, and the body that is stored."""
    bodies = [str(uuid.uuid4()).encode() for _ in range(writers)]
    barrier = threading.Barrier(writers)

    def write(body: bytes) -> bool:
        barrier.wait()
        return store.put_if_absent(path, body)

    with ThreadPoolExecutor(writers) as pool:
        told = list(pool.map(write, bodies))
    return [b for b, won in zip(bodies, told, strict=True) if won], store.read(path)


# --- all stores ------------------------------------------------------------------------------


def test_put_read_stat_list_delete(store: Store) -> None:
    assert list(store.list()) == []
    assert list(store.list("nowhere")) == []
    info = store.put("a/b/c.json", b"one")
    assert store.put("a/d.json", b"twoo").size == 4
    assert info == store.stat("a/b/c.json") and info.size == 3
    assert (info.etag is None) != (info.mtime_ns is None)
    assert store.read("a/b/c.json") == b"one"
    assert list(store.list()) == [info, store.stat("a/d.json")]
    assert [f.path for f in store.list("a", recursive=False)] == ["a/d.json"]
    assert [f.path for f in store.sub("a").list("b")] == ["b/c.json"]
    assert store.sub("a/b").read("c.json") == b"one"
    store.put("a/d.json", b"")
    assert store.read("a/d.json") == b"" and store.stat("a/d.json").size == 0
    store.delete(["a/d.json", "a/b/c.json", "a/none", "none/none"])
    assert list(store.list()) == []


def test_listing_order_is_the_same_everywhere(store: Store) -> None:
    paths = ["a-b/x", "a/x", "a/w/y.z", "a.b", "z", "A", "é"]
    for path in paths:
        store.put(path, b"")
    assert [info.path for info in store.list()] == sorted(paths)


def test_missing_files_and_folders_are_not_found(store: Store) -> None:
    store.put("folder/file", b"x")
    for missing in ("none", "folder", "folder/file/deeper"):
        with pytest.raises(FileNotFoundError):
            store.stat(missing)
        with pytest.raises(FileNotFoundError):
            store.read(missing)
        with pytest.raises(FileNotFoundError):
            store.open(missing)


def test_read_refuses_more_than_max_bytes(store: Store) -> None:
    store.put("record", b"12345")
    assert store.read("record", max_bytes=5) == b"12345"
    with pytest.raises(CorruptRun, match=r"record has 5 bytes, and at most 4 are read"):
        store.read("record", max_bytes=4)


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_stay_inside(store: Store, path: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    for call in (
        store.read,
        store.stat,
        store.open,
        store.sub,
        lambda p: store.put(p, b""),
        lambda p: store.put_if_absent(p, b""),
        lambda p: store.put_file(p, tmp_path / "x"),
        lambda p: store.delete([p]),
        lambda p: list(store.list(p or "/")),
    ):
        with pytest.raises(ConfigError):
            call(path)


def test_put_if_absent_is_won_once(store: Store) -> None:
    assert store.put_if_absent("commits/1", b"mine")
    assert not store.put_if_absent("commits/1", b"theirs")
    assert store.put_if_absent("commits/1", b"mine"), "the same token again is still ours"
    assert store.read("commits/1") == b"mine"


def test_twenty_races_of_sixteen_writers(store: Store) -> None:
    for number in range(20):
        winners, stored = race(store, f"commits/{number}", 16)
        assert winners == [stored]


def test_a_local_file_that_cannot_be_read_is_an_error_of_the_store(
    store: Store, tmp_path: Path
) -> None:
    store.put("x", b"1")
    (tmp_path / "file").write_bytes(b"1")
    seen, absent = store.stat("x"), tmp_path / "file/below"
    calls: list[Callable[[], object]] = [
        lambda: store.put_file("y", absent),
        lambda: store.put_file_if_absent("y", absent),
        lambda: store.replace_file("x", absent, seen),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="file/below cannot be read to store it: Not a dir"):
            call()


def test_put_file(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "finished"
    source.write_bytes(b"piece" * 1000)
    source.chmod(0o600)
    info = store.put_file("pieces/1", source)
    assert info.size == 5000 and store.read("pieces/1") == b"piece" * 1000
    with pytest.raises(FileNotFoundError):
        store.put_file("pieces/2", tmp_path / "none")
    assert [f.path for f in store.list()] == ["pieces/1"]


def test_put_file_if_absent_writes_once_and_leaves_the_local_file(
    store: Store, tmp_path: Path
) -> None:
    for name, body in (("one", b"1"), ("two", b"22")):
        (tmp_path / name).write_bytes(body)
    assert store.put_file_if_absent("a/b", tmp_path / "one") is True
    assert store.put_file_if_absent("a/b", tmp_path / "two") is False
    assert store.read("a/b") == b"1"
    assert (tmp_path / "one").read_bytes() == b"1" and (tmp_path / "two").exists()
    assert [info.path for info in store.list()] == ["a/b"]


def test_replace_file_is_tied_to_what_was_seen(store: Store, tmp_path: Path) -> None:
    old = store.put("a", b"old")
    new = store.put("a", b"newer")
    (tmp_path / "mine").write_bytes(b"mine")
    assert store.replace_file("a", tmp_path / "mine", old) is False
    assert store.read("a") == b"newer"
    assert store.replace_file("a", tmp_path / "mine", new) is True
    assert store.read("a") == b"mine"


def test_what_is_proved_is_what_was_sent(store: Store, tmp_path: Path) -> None:
    body = os.urandom(3000)
    sums = Sums.of(body)
    (tmp_path / "file").write_bytes(body)
    assert put_proved(store, "a", body).size == 3000
    assert put_file_proved(store, "b", tmp_path / "file", sums) == store.stat("b")
    assert holds(store, store.stat("a"), sums) and holds(store, store.stat("b"), sums)
    for other in (body[:-1], body[:-1] + bytes([body[-1] ^ 1])):
        store.put("a", other)
        assert not holds(store, store.stat("a"), sums)


def test_parquet_reads_through_open(store: Store) -> None:
    table = pa.table({"n": list(range(50_000)), "s": [f"row {i}" for i in range(50_000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=10_000, compression="none")
    store.put("t.parquet", sink.getvalue().to_pybytes())
    with store.open("t.parquet") as handle:
        file = pq.ParquetFile(handle)
        assert file.read_row_group(3) == table.slice(30_000, 10_000)
        assert file.read(["s"]).num_rows == 50_000
    with store.open("t.parquet") as handle:
        assert handle.read() == store.read("t.parquet")
        assert handle.read(10) == b"" and handle.seek(-4, os.SEEK_END) and handle.read() == b"PAR1"


def test_probe_accepts_and_leaves_nothing(store: Store) -> None:
    store.probe()
    assert list(store.list()) == []
    if isinstance(store, storage.LocalStore):
        assert os.listdir(store.uri) == []


def test_probe_refuses_a_store_where_two_writers_win(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: Store, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True

    monkeypatch.setattr(type(store), "put_if_absent", careless)
    with pytest.raises(UnsafeStore, match=r"8 of 8 writers .* Use a store with"):
        store.probe()
    assert list(store.list()) == []


def test_pickles_and_reads_on_the_other_side(store: Store) -> None:
    store.put("x", b"here")
    store.retry_seconds = 7
    other = pickle.loads(pickle.dumps(store))
    assert other.uri == store.uri and other.sub("y").uri == join(store.uri, "y")
    assert other.read("x") == b"here"


@pytest.mark.parametrize("store", ["local", "s3"], indirect=True)  # a cloud's refuses a fork
def test_sixteen_threads_and_a_fork(store: Store) -> None:
    for number in range(8):
        store.put(f"c/{number}", str(number).encode())
    with ThreadPoolExecutor(16) as pool:
        read = list(pool.map(lambda n: store.read(f"c/{n % 8}"), range(40)))
    assert read == [str(n % 8).encode() for n in range(40)]
    child = os.fork()
    if child == 0:  # in the copy: nothing but the read, and out without pytest's own exit
        os._exit(0 if store.read("c/7") == b"7" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- local ------------------------------------------------------------------------------------


def test_killed_writer_leaves_nothing_visible(tmp_path: Path) -> None:
    code = """
import os, sys
from prefect_raybatch.storage import open_store
store = open_store(sys.argv[1])
def killed(*a):
    print("written", flush=True)
    os.kill(os.getpid(), 9)
setattr(os, sys.argv[3], killed)  # the step that would show the file
getattr(store, sys.argv[2])("commits/1", b"x" * 100_000)
"""
    store = open_store(str(tmp_path))
    for method, step in (("put", "replace"), ("put_if_absent", "link"), ("put", "fsync")):
        command = [sys.executable, "-c", code, str(tmp_path), method, step]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL and done.stdout == "written\n", done.stderr
        assert list(store.list()) == []
    assert len(os.listdir(tmp_path / "commits")) >= 1, "the temporary files are there, unseen"
    assert store.put_if_absent("commits/1", b"next")


def test_full_disk_and_lost_permission_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    for code, words in (
        (errno.ENOSPC, r"disk full at .*/a/b: .*, 5 bytes needed"),
        (errno.EDQUOT, r"disk full at .*quota"),
        (errno.EACCES, r"no permission to write .*/a/b"),
        (errno.EROFS, r"no permission to write .*/a/b"),
        (errno.EIO, r"/a/b: Input/output error"),
    ):

        def failing(_: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(StoreError, match=words) as caught:
                store.put("a/b", b"12345")
        assert not is_transient(caught.value)
        assert os.listdir(tmp_path / "a") == [], "no temporary file stays"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        store.put("file/below", b"")


def test_a_folder_that_is_deleted_while_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the `delete` of another process."""
    store, make = open_store(str(tmp_path)), os.mkdir
    left = [3]

    def deleted_at_once(path: str, *mode: int) -> None:
        make(path, *mode)
        if left[0]:
            left[0] -= 1
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", deleted_at_once)
    store.put("folder/x", b"x")
    assert store.read("folder/x") == b"x" and left == [0]


def test_no_hard_links_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsafeStore, match="no hard links"):
        open_store(str(tmp_path)).probe()
    assert os.listdir(tmp_path) == []


def test_put_file_moves_or_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, source = open_store(str(tmp_path / "root")), tmp_path / "source"
    source.write_bytes(b"x")
    inode = source.stat().st_ino
    store.put_file("moved", source)
    assert os.stat(join(store.uri, "moved")).st_ino == inode and not source.exists()

    real = os.replace

    def other_device(a: str, b: str) -> None:
        if a == str(source):
            raise OSError(errno.EXDEV, "other device")
        real(a, b)

    source.write_bytes(b"yy")
    monkeypatch.setattr(os, "replace", other_device)
    assert store.put_file("copied", source).size == 2 and store.read("copied") == b"yy"
    assert sorted(os.listdir(store.uri)) == ["copied", "moved"]


def test_a_linked_folder_is_no_part_of_a_store_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_bytes(b"1")
    (tmp_path / "root" / "in").mkdir(parents=True)
    (tmp_path / "root" / "in" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "here").symlink_to(tmp_path / "root")  # the root itself may be one
    store = open_store(str(tmp_path / "here"))
    assert [info.path for info in store.list()] == ["in/linked"]
    asked: list[Callable[[], object]] = [
        lambda: list(store.list("in/linked")),
        lambda: store.delete(["in/linked/x"]),
        lambda: store.put("in/linked/y", b""),
        lambda: list(store.sub("in").list("linked")),
    ]
    for ask in asked:
        with pytest.raises(StoreError, match=r"in/linked is a link"):
            ask()
    store.delete(["in/linked"])  # the link, and not what it leads to
    assert list(store.list()) == [] and (tmp_path / "real/x").exists()


def test_nothing_passes_a_link_below_the_folder_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "out/new").mkdir(parents=True)
    (tmp_path / "out/latest").symlink_to("new")
    (tmp_path / "out/new/_asks").symlink_to(tmp_path / "else")
    (tmp_path / "else").mkdir()
    (tmp_path / "else/x").write_bytes(b"1")
    (tmp_path / "source").write_bytes(b"2")
    root = open_store(str(tmp_path / "out"))
    assert list(root.folders()) == ["new"]
    assert list(open_store(str(tmp_path / "out"), links=True).folders()) == ["latest", "new"]
    for store in (root.sub("latest"), root.sub("new").sub("_asks"), root.sub("latest").sub("a")):
        asked: list[Callable[[], object]] = [
            lambda store=store: list(store.list()),
            lambda store=store: store.delete(["x"]),
            lambda store=store: store.put("x", b""),
            lambda store=store: store.put_if_absent("y", b""),
            lambda store=store: store.put_file_if_absent("y", tmp_path / "source"),
            lambda store=store: store.unfinished(0.0, remove=True),
        ]
        for ask in asked:
            with pytest.raises(StoreError, match=r"(latest|_asks) is a link"):
                ask()
    assert os.listdir(tmp_path / "else") == ["x"] and os.listdir(tmp_path / "out/new") == ["_asks"]
    opened = open_store(str(tmp_path / "out/latest"))  # the folder that is opened may be one
    opened.put("x", b"")
    assert [info.path for info in opened.list()] == ["_asks", "x"]


FAILING_CALLS = ["stat", "fstat", "scandir", "open", "unlink", "link", "replace", "mkdir", "fsync"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ELOOP, errno.ESTALE, errno.ENAMETOOLONG])
@pytest.mark.parametrize("name", FAILING_CALLS)
def test_a_failing_disk_raises_nothing_but_errors_of_the_store(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "root/a/b").write_bytes(b"12")
    (tmp_path / "root/a/.tmp-1").write_bytes(b"12")
    store, source = open_store(str(tmp_path / "root")), tmp_path / "source"
    seen = store.stat("a/b")
    calls: list[Callable[[], object]] = [
        lambda: store.read("a/b", 10),
        lambda: list(store.list()),
        lambda: list(store.folders()),
        lambda: store.stat("a/b"),
        lambda: store.holds("a/b"),
        lambda: store.open("a/b").close(),
        lambda: store.put("a/b", b"5"),
        lambda: store.put_if_absent("a/c", b"5"),
        lambda: store.put_file("a/d", source),
        lambda: store.put_file_if_absent("a/e", source),
        lambda: store.replace_file("a/b", source, seen),
        lambda: store.unfinished(2e9, remove=True),
        lambda: store.delete(["a/b"]),
        store.probe,
    ]

    def failing(*args: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code))

    failed = 0
    for call in calls:
        source.write_bytes(b"34")  # which a put before may have moved
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                call()
            except RayBatchError:
                failed += 1
    assert failed


def test_a_disk_that_fails_while_a_file_is_read_raises_an_error_of_the_store(
    tmp_path: Path,
) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    reads: list[Callable[[Any], object]] = [
        lambda handle: handle.read(),
        lambda handle: handle.read(2),
        lambda handle: handle.readinto(bytearray(3)),
    ]
    for read in reads:
        with open_store(str(tmp_path)).open("x") as handle:
            written = os.open(tmp_path / "y", os.O_WRONLY | os.O_CREAT)
            os.dup2(written, handle.fileno())  # a read of it fails, as it would on a broken disk
            os.close(written)
            with pytest.raises(StoreError, match=r"/x: Bad file descriptor"):
                read(handle)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_bytes(b"1")
    (tmp_path / "root" / "in").mkdir(parents=True)
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "root" / "in" / "up").symlink_to(tmp_path / "root")
    paths = [info.path for info in open_store(str(tmp_path / "root"), links=True).list()]
    assert "linked/x" in paths and len(paths) < 5
    assert contains(str(tmp_path / "real"), str(tmp_path / "root" / "linked" / "deep"))


# --- S3 ---------------------------------------------------------------------------------------


def test_listing_and_deleting_go_past_one_page(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "LISTING_PAGE", 20)
    for number in range(45):
        s3_store.put(f"commits/{number:05}", b"")
    paths = [info.path for info in s3_store.list("commits")]
    assert paths == [f"commits/{n:05}" for n in range(45)]
    s3_store.delete(iter(paths))
    assert list(s3_store.list()) == []


def test_what_is_listed_is_deleted_while_it_is_listed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of 500,000 pieces was held."""
    monkeypatch.setattr(bucket_module, "LISTING_PAGE", 10)
    monkeypatch.setattr(local_module, "DELETED_AT_ONCE", 10)
    for number in range(45):
        store.put(f"pieces/{number:05}", b"")
    left: list[int] = []

    def listed() -> Iterator[str]:
        for number, info in enumerate(store.list("pieces")):
            if number % 10 == 0:
                left.append(sum(1 for _ in store.list("pieces")))
            yield info.path

    store.delete(listed())
    assert left == [45, 35, 25, 15, 5] and list(store.list()) == []


def test_large_file_goes_in_parts(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1024)
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    body = os.urandom(1024) * (12 * 1024)
    (tmp_path / "large").write_bytes(body)
    info = s3_store.put_file("large", tmp_path / "large")
    assert info.size == len(body) and str(info.etag).endswith("-3")
    assert s3_store.read("large") == body


def test_a_large_file_that_is_there_is_not_written_again(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 4)
    for name, body in (("one", b"first"), ("two", b"second")):
        (tmp_path / name).write_bytes(body)
    assert s3_store.put_file_if_absent("x", tmp_path / "one") is True
    assert s3_store.put_file_if_absent("x", tmp_path / "two") is False
    first = s3_store.stat("x")
    assert s3_store.replace_file("x", tmp_path / "two", first) is True
    assert s3_store.replace_file("x", tmp_path / "one", first) is False
    assert s3_store.read("x") == b"second"


# --- files under a condition --------------------------------------------------------------------


def files_of(tmp_path: Path, count: int, size: int) -> dict[int, bytes]:
    """`count` local files 0, 1, ... of that size, each of its own bytes."""
    bodies = {number: bytes([65 + number]) * size for number in range(count)}
    for number, body in bodies.items():
        (tmp_path / str(number)).write_bytes(body)
    return bodies


def at_one_moment(count: int, write: Callable[[int], bool]) -> list[int]:
    """Those of `count` writers, begun at one moment, that won."""
    start = threading.Barrier(count)

    def one(number: int) -> bool:
        start.wait()
        return write(number)

    with ThreadPoolExecutor(count) as pool:
        return [number for number, won in enumerate(pool.map(one, range(count))) if won]


@pytest.mark.parametrize("size", [1 << 10, 4 << 20])
def test_of_files_that_race_for_a_name_one_is_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1 << 20)  # the larger one is streamed
    bodies = files_of(tmp_path, 8, size)
    won = at_one_moment(8, lambda number: store.put_file_if_absent("a/b", tmp_path / str(number)))
    assert len(won) == 1 and store.read("a/b") == bodies[won[0]]
    assert "-" not in str(store.stat("a/b").etag)  # an upload in parts would not be atomic


@pytest.mark.parametrize("size", [1 << 10, 4 << 20])
def test_of_files_that_race_for_the_place_of_another_one_is_there(
    store: Store, tmp_path: Path, size: int
) -> None:
    for _ in range(2):
        bodies = files_of(tmp_path, 8, size)  # a local store moves the winner's
        seen = store.put("a", os.urandom(9))
        won = at_one_moment(
            8, lambda n, seen=seen: store.replace_file("a", tmp_path / str(n), seen)
        )
        assert len(won) == 1 and store.read("a") == bodies[won[0]]


@pytest.mark.parametrize("how", ["lose", "reset", "flip", "503"])
def test_a_streamed_file_is_there_whole_whatever_the_network_does(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1 << 10)
    bodies = files_of(tmp_path, 2, 1 << 20)
    with proxy(s3, First(how, 2)) as between:
        store = behind(s3, between.endpoint)
        store.put_file_if_absent("a", tmp_path / "0")
        between.decide = lambda *request: "pass"
        assert how == "flip" or store.read("a") == bodies[0]
        seen = store.stat("a")
        between.decide = First(how, 2)
        store.replace_file("a", tmp_path / "1", seen)
        assert how == "flip" or store.read("a") == bodies[1]
        assert how in {decision for _, _, decision in between.seen}


def test_a_store_that_cannot_replace_says_so(
    tmp_path: Path, monkeypatch: Any, s3: S3Server
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    files_of(tmp_path, 1, 9)
    here = open_store(str(tmp_path / "store"))
    seen = here.put("a", b"old")
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UnsafeStore, match="no locks"):
        here.replace_file("a", tmp_path / "0", seen)
    assert here.read("a") == b"old"
    with proxy(s3, lambda m, p, h: "501" if "If-Match" in h and m == "PUT" else "pass") as between:
        there = behind(s3, between.endpoint)
        seen = there.put("a", b"old")
        with pytest.raises(UnsafeStore, match="/a: the store does not support"):
            there.replace_file("a", tmp_path / "0", seen)


@pytest.mark.parametrize("how", ["flip", "truncate", "garble"])
@pytest.mark.parametrize("parts", [False, True])
def test_a_body_that_was_changed_on_the_way_is_sent_again(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, parts: bool
) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    if parts:
        monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1024)
    body = os.urandom(1024) * (11 * 1024 if parts else 4)
    (tmp_path / "file").write_bytes(body)
    with proxy(s3, First(how, 1)) as there:
        store = behind(s3, there.endpoint)
        info = put_file_proved(store, "a", tmp_path / "file", Sums.of(body))
        assert str(info.etag).endswith("-3") == parts
        assert store.read("a") == body
        assert how in {decision for _, _, decision in there.seen}


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_store_that_keeps_other_bytes_is_told(s3: S3Server, how: str) -> None:
    with proxy(s3, First(how, 99)) as there:
        store = behind(s3, there.endpoint)
        with pytest.raises(BadUpload, match=r"/a: .* keeps other bytes") as caught:
            put_proved(store, "a", b"some body")
    assert is_transient(caught.value)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_answer_is_still_our_win(s3: S3Server, lost: int) -> None:
    """One lost answer is the sly case: aiohttp repeats the PUT unasked, and we see only a 412."""
    with proxy(s3, First("lose", lost, header="If-None-Match")) as between:
        store = behind(s3, between.endpoint)
        assert store.put_if_absent("commits/1", b"mine")
        assert [d for _, _, d in between.seen].count("lose") == lost
        assert store.read("commits/1") == b"mine"
        # A real loser whose answer is lost learns that it lost.
        between.decide = First("lose", lost, header="If-None-Match")
        assert not store.put_if_absent("commits/1", b"theirs")
        assert store.read("commits/1") == b"mine"


def test_races_over_a_bad_network_have_one_winner(s3: S3Server) -> None:
    chance = random.Random(7)

    def shaky(method: str, path: str, headers: Mapping[str, str]) -> str:
        spoilt = ["lose", "503", "reset"] if method == "PUT" else []
        return chance.choice(["pass", "pass", *spoilt])

    with proxy(s3, shaky) as between:
        store = behind(s3, between.endpoint)
        for number in range(2):
            winners, stored = race(store, f"commits/{number}", 6)
            assert winners == [stored]


def test_errors_that_pass_are_retried(s3: S3Server) -> None:
    with proxy(s3, First("pass", 0)) as between:
        store = behind(s3, between.endpoint)
        for what, times in (("503", 2), ("reset", 2), ("expired", 1)):
            between.decide = First(what, times)
            assert store.put("x", b"1").size == 1
            between.decide = First(what, times, method="GET")
            assert store.read("x") == b"1"
            between.decide = First(what, times, method="HEAD")
            assert store.stat("x").size == 1
            between.decide = First(what, times)
            assert store.put_if_absent(what, b"1")
            assert [d for _, _, d in between.seen].count(what) == 4 * times


def test_errors_that_stay_are_told(s3: S3Server) -> None:
    with proxy(s3, First("pass", 0)) as between:
        store = behind(s3, between.endpoint, retry_seconds=0.2)
        for what, kind, words in (
            ("503", StoreUnavailable, r"no valid answer .* in \d+ tries \(the last: 503 SlowDown"),
            ("reset", StoreUnavailable, r"no valid answer .* in \d+ tries \(the last: [A-Z]"),
            ("expired", CredentialsUnusable, r"credentials have expired.*options of the store"),
            ("507", StoreError, r"full or over its quota"),
            ("501", UnsafeStore, r"put-if-absent"),
        ):
            between.decide = First(what, 10**6)
            with pytest.raises(kind, match=words) as caught:
                store.put_if_absent("commits/1", b"x")
            assert type(caught.value) is kind and s3.secret not in str(caught.value)
            assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_expired_credentials_are_told_where_the_answer_has_no_body(s3: S3Server) -> None:
    with proxy(s3, First("expired", 10**6, method="HEAD")) as between:
        store = behind(s3, between.endpoint, retry_seconds=0.2)
        with pytest.raises(CredentialsUnusable, match=r"the credentials have expired: renew"):
            store.stat("commits/1")


def test_large_upload_starts_again(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1024)
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    body = os.urandom(1024) * (11 * 1024)
    (tmp_path / "large").write_bytes(body)
    with proxy(s3, First("lose", 3)) as between:
        store = behind(s3, between.endpoint)
        assert store.put_file("large", tmp_path / "large").size == len(body)
        between.decide = First("lose", 2, method="POST")  # the end of an upload, among others
        assert store.put_file("again", tmp_path / "large").size == len(body)
        assert store.read("again") == body


def test_probe_refuses_a_store_that_ignores_the_condition(s3: S3Server) -> None:
    def ignore(method: str, path: str, headers: Mapping[str, str]) -> str:
        return "strip" if "If-None-Match" in headers else "pass"

    with proxy(s3, ignore) as between:
        store = behind(s3, between.endpoint)
        with pytest.raises(UnsafeStore, match="does not honour put-if-absent"):
            store.probe()
        assert {d for _, _, d in between.seen} == {"strip", "pass"}
        assert list(store.list()) == []


def test_an_object_that_changes_while_read_is_noticed(s3_store: Store) -> None:
    s3_store.put("x", b"a" * 100)
    with s3_store.open("x") as handle:
        s3_store.put("x", b"b" * 100)
        with pytest.raises(SourceError, match="x changed while it was being read"):
            handle.read()


def test_no_bucket_and_no_permission_name_the_place(s3: S3Server) -> None:
    with pytest.raises(StoreError, match=r"bucket 'no-such-bucket' .* does not exist"):
        open_store("s3://no-such-bucket/p", s3.options).probe()
    wrong = {**s3.options, "secret": "not-the-secret"}
    store = open_store(f"s3://{BUCKET}/p", wrong)
    with pytest.raises(
        StoreError, match=rf"s3://{BUCKET}/p/x: access denied .*options of the store.*s3:PutObject"
    ) as caught:
        store.put("x", b"")
    shown = f"{caught.value!r} {store!r} {store} {vars(store)}"
    assert "not-the-secret" not in shown and s3.secret not in shown


def test_environment_gives_the_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/env")
    store.put("x", b"1")
    assert s3.secret.encode() not in pickle.dumps(store)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(StoreError, match="environment variable AWS_ACCESS_KEY_ID") as caught:
        open_store(f"s3://{BUCKET}/env").read("x")
    assert "not-the-secret" not in str(caught.value)


def test_unknown_options_are_refused_without_their_values() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("s3://b/p", {"sekret": "hush-hush"}).read("x")
    assert "hush-hush" not in str(caught.value)
    shown = Connection({"secret": "hush-hush"}).scrub("http://u:p@h/x?sig=1 hush-hush")
    assert shown == "http://h ***"


# --- URIs -------------------------------------------------------------------------------------


def test_open_store_normalizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("s3://b/p/").uri == open_store("s3a://b/p").uri == "s3://b/p"
    assert open_store("s3://b").uri == "s3://b"
    assert open_store("rel/./x/").uri == str(tmp_path / "rel" / "x")
    assert open_store("file:///a%20b/c").uri == "/a b/c"
    assert open_store("file://localhost/x").uri == open_store("//x").uri == "/x"
    assert open_store("/").uri == "/" and open_store("//X/y").uri == "/X/y"
    assert open_store("~/x").uri == os.path.expanduser("~/x")


def test_arrow_reads_what_a_store_holds(store: Store) -> None:
    if isinstance(store, storage.CloudStore):
        with pytest.raises(ConfigError, match=r"run.dataset\(\)"):
            storage.arrow_filesystem(store)
        return
    pq.write_table(pa.table({"x": [1, 2]}), body := pa.BufferOutputStream())
    store.put("d/t.parquet", body.getvalue().to_pybytes())
    filesystem, root = storage.arrow_filesystem(store)
    found = pq.read_table(f"{root}/d/t.parquet", filesystem=filesystem)
    assert found["x"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "uri", ["ftp://b/p", "http://h/x", "file://host/x", "s3://", "", "s3://b/../c", "s3://b//c"]
)
def test_open_store_refuses(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri)
    with pytest.raises(ConfigError, match="s3://"):
        open_store("ftp://b/p")


def test_join_contains_is_remote() -> None:
    assert join("s3://b", "x", "y/z") == "s3://b/x/y/z"
    assert join("/", "x") == "/x" and join("/a/") == "/a" and join("file:///a", "b") == "/a/b"
    for bad in ("..", "/x", ""):
        with pytest.raises(ConfigError):
            join("/a", bad)
    assert contains("s3://b/p", "s3://b/p/") and contains("s3://b", "s3://b/x/y")
    assert not contains("s3://b/p", "s3://b/p2") and not contains("s3://b/p", "/b/p")
    assert contains("/", "/x") and contains("/a/b", "/a/b/../b/c") and not contains("/a/b", "/a")
    assert is_remote("s3://b/x") and not is_remote("file:///x") and not is_remote("s3/b")


@pytest.mark.parametrize(
    ("uri", "root", "pattern"),
    [
        ("s3://b/data/2024-*/x.parquet", "s3://b/data", "2024-*/x.parquet"),
        ("s3://b/*.csv", "s3://b", "*.csv"),
        ("s3://b/data/x.csv", "s3://b/data/x.csv", None),
        ("/data/a?.csv", "/data", "a?.csv"),
        ("/[ab]/x", "/", "[ab]/x"),
        ("file:///d/**/x", "/d", "**/x"),
        ("*.csv", None, "*.csv"),
        ("d/*.csv", "d", "*.csv"),
    ],
)
def test_split_glob(uri: str, root: str | None, pattern: str | None) -> None:
    found, rest = storage.split_glob(uri)
    expected = root if root and is_remote(root) else os.path.abspath(root or ".")
    assert (found, rest) == (expected, pattern)


def test_split_glob_refuses_a_wildcard_bucket() -> None:
    with pytest.raises(ConfigError, match="bucket"):
        storage.split_glob("s3://b*/x")


def test_file_info_has_four_fields() -> None:
    assert FileInfo("p", 1, None, 2) == FileInfo(path="p", size=1, etag=None, mtime_ns=2)


def test_reading_ahead_keeps_order_and_bound() -> None:
    asked: list[int] = []

    def read(item: int) -> int:
        asked.append(item)
        if item == 50:
            raise OSError("spoilt")
        return -item

    assert list(read_ahead(read, range(20), threads=4, ahead=5)) == [-n for n in range(20)]
    assert list(read_ahead(read, [], threads=4, ahead=5)) == []
    asked.clear()
    few = read_ahead(read, range(1000), threads=4, ahead=5)
    assert [next(few), next(few)] == [0, -1] and len(asked) <= 6
    few.close()
    assert len(asked) <= 6
    with pytest.raises(OSError, match="spoilt"):
        list(read_ahead(read, range(1000), threads=4, ahead=5))


def test_reading_ahead_ends_without_waiting_for_reads() -> None:
    late, begun = threading.Event(), threading.Event()

    def read(item: int) -> int:
        if item:
            begun.set()
            late.wait(60)
        return item

    few = read_ahead(read, range(9), threads=2, ahead=3)
    try:
        assert next(few) == 0 and begun.wait(60)
        few.close()
        assert not late.is_set()
    finally:
        late.set()


def test_importing_loads_no_client() -> None:
    code = "import sys, prefect_raybatch.storage as s; s.open_store('/x'); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in out.stdout.split()}
    assert not loaded & {"s3fs", "fsspec", "botocore", "aiobotocore", "aiohttp", "pyarrow", "ray"}


# --- answers that are not whole -----------------------------------------------------------------

WHOLE = bytes(range(256)) * 8


class _Answers(BaseHTTPRequestHandler):
    """One object of the bytes WHOLE; `spoil` says how the next GETs are answered, then well."""

    protocol_version = "HTTP/1.1"
    spoil: list[str] = []
    etag = hashlib.md5(WHOLE).hexdigest()
    seen: list[str] = []
    refused: list[str] = []  # codes with which the next deletes fail for their key

    def do_POST(self) -> None:
        self.seen.append(self.command)
        self.rfile.read(int(self.headers["Content-Length"]))
        code = self.refused.pop(0)
        body = f"<DeleteResult><Error><Key>x</Key><Code>{code}</Code></Error></DeleteResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.seen.append(self.command)
        how = "well"
        if self.command == "GET" and self.spoil:
            how = self.spoil.pop(0)
        body, status = WHOLE, 200
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and how != "no range":
            body, status = WHOLE[int(asked[1]) : int(asked[2]) + 1], 206
        sent = body[: len(body) // 2] if how in ("short", "cut off", "short in chunks") else body
        self.send_response(status)
        self.send_header("ETag", f'"{self.etag}"')
        if how in ("in chunks", "short in chunks"):
            self.send_header("Transfer-Encoding", "chunked")
            sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent)
        else:
            self.send_header("Content-Length", str(len(sent if how == "short" else body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent)
        self.close_connection = how == "cut off"

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def answers() -> Iterator[tuple[type[_Answers], Store]]:
    handler = type("Answers", (_Answers,), {"spoil": [], "seen": [], "refused": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "region": "us-east-1"}
    store = open_store("s3://bucket/run", {**options, "key": "AKEY", "secret": "ASECRET"})
    store.retry_seconds = 5.0
    yield handler, store
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["short", "cut off", "short in chunks"])
@pytest.mark.parametrize("etag", ["of the bytes", "of an encryption"])
def test_a_body_that_is_not_whole_is_asked_for_again(answers, how: str, etag: str) -> None:
    handler, store = answers
    if etag != "of the bytes":
        handler.etag = "0" * 32
    handler.spoil[:] = [how, how]
    assert store.read("x", 10**6) == WHOLE
    assert handler.seen.count("GET") == 3


def test_a_body_that_is_never_whole_is_a_store_that_is_away(answers) -> None:
    handler, store = answers
    store.retry_seconds = 0.1
    handler.spoil[:] = ["short"] * 100
    with pytest.raises(StoreUnavailable, match=r"1024 of 2048 bytes") as caught:
        store.read("x", 10**6)
    assert is_transient(caught.value)


@pytest.mark.parametrize("how", ["short", "cut off", "no range"])
def test_a_range_that_is_not_the_one_asked_for_is_asked_for_again(answers, how: str) -> None:
    handler, store = answers
    handler.spoil[:] = [how]
    with store.open("x") as stream:
        stream.seek(100)
        assert stream.read(1000) == WHOLE[100:1100]
    assert handler.spoil == []


def test_a_body_without_a_length_is_read_within_the_limit(answers) -> None:
    handler, store = answers
    handler.spoil[:] = ["in chunks"]
    assert store.read("x", len(WHOLE)) == WHOLE
    handler.spoil[:] = ["in chunks"]
    with pytest.raises(CorruptRun, match="has 2048 bytes, and at most 2047 are read"):
        store.read("x", len(WHOLE) - 1)


def test_a_file_that_a_batch_could_not_delete_is_told(answers) -> None:
    handler, store = answers
    handler.refused[:] = ["SlowDown", "AccessDenied"]
    with pytest.raises(AccessDenied, match=r"403 AccessDenied.*s3:DeleteObject"):
        store.delete(["x"])
    assert handler.seen.count("POST") == 2
    handler.refused[:] = ["NoSuchKey"]
    store.delete(["x"])


@pytest.mark.parametrize(
    "code", ["SlowDownWrite", "OperationAborted", "XMinioServerNotInitialized"]
)
def test_a_file_that_a_batch_could_not_delete_yet_is_deleted_again(answers, code: str) -> None:
    handler, store = answers
    handler.refused[:] = [code, "NoSuchKey"]
    store.delete(["x"])
    assert handler.refused == [] and handler.seen.count("POST") == 2


# --- a store that is away -----------------------------------------------------------------------


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("prefect_raybatch")]


@pytest.mark.parametrize(
    ("away", "error"),
    [
        ("refused", "EndpointConnectionError"),
        ("silent", "ReadTimeoutError"),
        ("no such host", "EndpointConnectionError"),
        ("busy", "ShortBody"),
        ("named with a user", "HTTPClientError"),  # which the client cannot send
    ],
)
def test_a_store_that_is_away_is_told_in_time_and_named(
    away: str, error: str, silent: str, answers, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    assert answers[1].read("x") == WHOLE  # the client is imported
    monkeypatch.setattr(s3_silence, "WARN_AFTER", 0.3)
    endpoint = {
        "silent": silent,
        "no such host": "http://store.invalid:9000",
        "busy": answers[1].connection.options["endpoint_url"],
    }.get(away, "http://127.0.0.1:9")
    answers[0].spoil[:] = ["short"] * 1000
    keys = {"key": "AKEY", "secret": "ASECRET", "config_kwargs": {"read_timeout": 0.6}}
    user = "user:PASSWORD@" if away == "named with a user" else ""
    given = endpoint.replace("http://", f"http://{user}")
    store = open_store("s3://bucket/run", {**keys, "endpoint_url": given, "region": "r"})
    store.retry_seconds = 1.5
    with (
        caplog.at_level(logging.INFO, "prefect_raybatch"),
        pytest.raises(StoreUnavailable) as found,
    ):
        store.read("x", 10**6)
    (warning,) = ours(caplog)
    assert warning.levelname == "WARNING"
    assert f"(the last: {error}: " in str(found.value)
    for text in (warning.getMessage(), str(found.value)):
        assert endpoint in text and "s3://bucket/run/x" in text
        assert "Check that the store is up" in text and "endpoint_url" in text
        assert "PASSWORD" not in text and "\n" not in text


def test_a_store_that_answers_late_or_once_badly_is_not_called_away(
    answers, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(s3_silence, "WARN_AFTER", 600.0)  # whatever else the machine does
    handler, store = answers
    handler.spoil[:] = ["short", "cut off"]
    assert store.read("x") == WHOLE
    assert ours(caplog) == []
