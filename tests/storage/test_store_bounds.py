"""Both sides of what the stores and their helpers decide, without a server."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_raybatch.errors import (
    BadUpload,
    ConfigError,
    CorruptRun,
    SourceError,
    StoreError,
    StoreUnavailable,
    UnsafeStore,
)
from prefect_raybatch.storage import (
    FileInfo,
    LocalStore,
    Sums,
    footer_digest,
    holds,
    node_cache,
    put_file_proved,
    put_same_proved,
)
from prefect_raybatch.storage import bucket as bucket_module
from prefect_raybatch.storage.base import in_batches, not_found
from prefect_raybatch.storage.bucket import BucketStore, part_size
from prefect_raybatch.storage.checked import CHECKED_BLOCK, BlockSums, block_sums, open_checked
from prefect_raybatch.storage.library_errors import certificate_problem, failure_in, text_of
from prefect_raybatch.storage.node_cache import cached_folder
from prefect_raybatch.storage.parquet import parquet_table
from prefect_raybatch.storage.private import make_private_folder, open_regular, private_folders
from prefect_raybatch.storage.redirects import open_without_redirects

# --- buckets ------------------------------------------------------------------------------------


class Memory(BucketStore):
    """A bucket in memory that notes its requests. Another process deletes the first `deleted` files
    as soon as they are created."""

    most_put_bytes = 4

    def __init__(self, root: str, connection: Any, retry_seconds: float = 60.0) -> None:
        super().__init__(root, connection, retry_seconds)
        self.files: dict[str, bytes] = {"ranges": bytes(range(100))}
        self.asked: list[tuple[object, ...]] = []
        self.deleted = 0

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        if path not in self.files:
            raise not_found(path)
        return self.files[path]

    def stat(self, path: str) -> FileInfo:
        return FileInfo(path, len(self.read(path)), "e", None)

    def put(self, path: str, data: bytes) -> FileInfo:
        self.asked.append(("put", path, data))
        return self.stat("ranges")

    def _create(self, path: str, data: bytes) -> bool:
        self.asked.append(("create", path, data))
        self.deleted -= 1
        if self.deleted < 0:
            self.files.setdefault(path, data)
        return False

    def _create_from_file(self, path: str, source: str) -> bool:
        self.asked.append(("create from file", path, source))
        return False

    def _upload(self, path: str, source: str, size: int) -> None:
        self.asked.append(("upload", path, source, size))
        self.files[path] = Path(source).read_bytes()

    def _range(self, info: FileInfo, start: int, stop: int) -> bytes | None:
        self.asked.append(("range", start, stop))
        return None if info.etag == "old" else self.files[info.path][start:stop]

    list = folders = replace_file = delete = now = unfinished = None  # type: ignore[assignment]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 2)
    return Memory("s3://b/p/q", "link", 7.0)


def test_stores_beside_one_share_its_connection(bucket: Memory) -> None:
    root = bucket.above().above()
    for store, uri in ((bucket.sub("r"), "s3://b/p/q/r"), (bucket.above(), "s3://b/p"),
                       (root, "s3://b")):  # fmt: skip
        assert (store.uri, store.connection, store.retry_seconds) == (uri, "link", 7.0)
    assert root.above() is None and repr(root) == "Memory('s3://b')" and str(root) == "s3://b"


@pytest.mark.parametrize(
    ("size", "put", "created", "result"),
    [
        (2, ("put", "x", b"aa"), ("create", "x", b"aa"), True),
        (4, ("upload", "x", "FILE", 4), ("create from file", "x", "FILE"), False),
        (5, ("upload", "x", "FILE", 5), ("upload", "x", "FILE", 5), True),
    ],
)
def test_how_a_file_is_sent_depends_on_its_size(
    bucket: Memory, tmp_path: Path, size: int, put: Any, created: Any, result: bool
) -> None:
    (tmp_path / "f").write_bytes(b"a" * size)

    def shown(asked: Any) -> Any:
        return [tuple("FILE" if part == str(tmp_path / "f") else part for part in one)
                for one in asked]  # fmt: skip

    assert bucket.put_file("x", tmp_path / "f").size == (100 if size == 2 else size)
    assert shown(bucket.asked) == [put]
    bucket.files.clear()
    bucket.asked.clear()
    assert bucket.put_file_if_absent("x", tmp_path / "f") is result
    assert shown(bucket.asked) == [created]
    if size == 5:
        assert bucket.put_file_if_absent("x", tmp_path / "f") is False


def test_a_file_that_is_created_and_deleted_again_is_tried_ten_times(bucket: Memory) -> None:
    bucket.deleted = 9
    assert bucket.put_if_absent("x", b"mine") is True and len(bucket.asked) == 10
    bucket.deleted = 10
    del bucket.files["x"]
    with pytest.raises(StoreUnavailable, match=r"^s3://b/p/q/x was created and deleted again"):
        bucket.put_if_absent("x", b"mine")


def test_each_read_is_one_range(bucket: Memory) -> None:
    raw = bucket.open("ranges").detach()  # type: ignore[attr-defined]
    assert raw.seek(90) == 90 and raw.read(5) == bytes(range(90, 95)) and raw.tell() == 95
    assert raw.seek(-3, os.SEEK_CUR) == 92 and raw.seek(-1, os.SEEK_END) == 99
    assert raw.read(5) == b"c" and raw.read(5) == raw.readall() == b"" and raw.seek(98) == 98
    assert raw.readall() == b"bc" and raw.readable() and raw.seekable()
    assert bucket.asked == [("range", 90, 95), ("range", 99, 100), ("range", 98, 100)]
    with pytest.raises(OSError, match="seek before the start") as caught:
        raw.seek(-101, os.SEEK_END)
    assert caught.value.errno == errno.EINVAL and raw.seek(0) == 0
    with pytest.raises(SourceError, match=r"^s3://b/p/q/x changed while"):
        bucket.read_range(FileInfo("x", 1, "old", None), 0, 1)
    assert [part_size(size) for size in (1, 10**4 << 25, (10**4 << 25) + 1)] == [
        *(1 << 25, 1 << 25, (1 << 25) + 1)
    ]
    assert list(in_batches("abcde", 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert (not_found("u").errno, not_found("u").filename) == (errno.ENOENT, "u")


class Broken(LocalStore):
    """A folder that breaks one promise."""

    def __init__(self, root: str, how: str) -> None:
        super().__init__(root)
        self.how, self.lock = how, threading.Lock()
        self.created: list[str] = []

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        plain = path.endswith("/plain")
        data = super().read(path, max_bytes)
        return b"other" if self.how == ("read" if plain else "read race") else data

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        return super().list("" if self.how == "list" else prefix, recursive)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self.lock:
            self.created.append(path)
            if self.how == "late" and self.created.count(path) == 9:
                self.put(path, data)
                return True
            return super().put_if_absent(path, data) and self.how != "nobody"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("read", "just written cannot be read or listed"),
        ("list", "just written cannot be read or listed"),
        ("read race", r"\(1 of 8 writers created the same file\)"),
        ("late", r"\(1 of 8 writers created the same file, and a later one replaced it\)"),
        ("nobody", r"\(0 of 8 writers"),
        ("", ""),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused(tmp_path: Path, how: str, words: str) -> None:
    (tmp_path / "before").write_bytes(b"")
    store = Broken(str(tmp_path), how)
    if how:
        with pytest.raises(UnsafeStore, match=f"^{tmp_path}: .*{words}"):
            store.probe()
    else:
        store.probe()
        assert sorted(map(store.created.count, {*store.created})) == [9, 9]
        assert {os.path.basename(path) for path in store.created} == {"race-0", "race-1"}
    assert os.listdir(tmp_path) == ["before"]


# --- a local folder -----------------------------------------------------------------------------


def test_a_local_file_is_described_by_the_file_system(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    info, found = store.put("a/x", b"abc"), os.stat(tmp_path / "a/x")
    assert (info.size, info.etag, info.mtime_ns) == (3, None, found.st_mtime_ns)
    assert (info.modified, info.ctime_ns) == (found.st_mtime, found.st_ctime_ns)
    assert (info.device, info.inode) == (found.st_dev, found.st_ino)
    assert store.holds("a/x") and not store.holds("a/y")
    above = store.sub("a").above()
    assert above.uri == above.top == str(tmp_path) and LocalStore("/").above() is None
    with pytest.raises(StoreError, match=r"/a exists but is not a readable file\. Remove it"):
        store.put_if_absent("a", b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="/pipe: a pipe or a device is in place"):
        store.read("pipe")
    (tmp_path / "nowhere").symlink_to("nothing")
    assert [info.path for info in store.list()] == ["a/x"]
    with pytest.raises(StoreError, match="a/x/y: a file is in the way"):
        store.put("a/x/y", b"")


def test_unfinished_writes_are_those_older_than_a_time(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/x", b"")
    for name, at in (("a/.tmp-old", 99), (".tmp-new", 100)):
        (tmp_path / name).write_bytes(b"123")
        os.utime(tmp_path / name, (at, at))
    for remove in (False, True):
        (found,) = store.unfinished(100.0, remove)
        assert (found.path, found.size) == ("a/.tmp-old", 3)
    assert store.unfinished(100.0, True) == ()
    assert sorted(os.listdir(tmp_path)) == [".tmp-new", "a"] and os.listdir(tmp_path / "a") == ["x"]
    assert LocalStore(str(tmp_path / "none")).unfinished(100.0, True) == ()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EXDEV, errno.EIO])
def test_a_file_that_cannot_be_moved_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "f").chmod(0o600)
    store = LocalStore(str(tmp_path / "out"))
    monkeypatch.setattr(os, "chmod", refuse)
    if code == errno.EIO:
        with pytest.raises(StoreError, match="Input/output error"):
            store.put_file("x", tmp_path / "f")
        assert os.listdir(tmp_path / "out") == []
        return
    assert store.put_file("x", tmp_path / "f").size == 3 and store.read("x") == b"abc"
    assert store.put_file_if_absent("x", tmp_path / "f") is False and (tmp_path / "f").exists()


@pytest.mark.parametrize("failures", [9, 10])
def test_a_write_whose_temporary_file_is_removed_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    left, real = [failures], os.replace

    def cleaned(temporary: str, target: str) -> None:
        if left[0]:
            left[0] -= 1
            os.unlink(temporary)
        real(temporary, target)

    monkeypatch.setattr(os, "replace", cleaned)
    store = LocalStore(str(tmp_path))
    if failures == 9:
        assert store.put("x", b"abc").size == 3
    else:
        with pytest.raises(StoreError, match="/x: No such file"):
            store.put("x", b"abc")
    assert os.listdir(tmp_path) == (["x"] if failures == 9 else [])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_what_is_written_is_synced_with_its_new_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if os.path.isdir(synced[-1]):
            raise OSError(code, "a folder")

    monkeypatch.setattr(os, "fsync", sync)
    LocalStore(str(tmp_path)).put("a/b/x", b"")
    folders = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")]
    assert [*synced[:2], synced[3]] == folders and "/a/b/.tmp-" in synced[2] and len(synced) == 4


# --- checksums ----------------------------------------------------------------------------------


class Dripping(LocalStore):
    """Its files give at most 100,000 bytes at a time, and note what they are asked for."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: list[tuple[int, int]] = []

    def open(self, path: str) -> Any:
        return _Drip(super().open(path), self.asked)


class _Drip(io.RawIOBase):
    def __init__(self, stream: Any, asked: list[tuple[int, int]]) -> None:
        self.stream, self.asked = stream, asked

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.stream.seek(offset, whence))

    def read(self, size: int = -1) -> bytes:
        self.asked.append((self.stream.tell(), size))
        return bytes(self.stream.read(min(size, 100_000)))


def test_only_blocks_that_are_not_held_are_read(tmp_path: Path) -> None:
    block, size = CHECKED_BLOCK, 3 * CHECKED_BLOCK + 4321
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    sha256, store = hashlib.sha256(data).hexdigest(), Dripping(str(tmp_path))
    sums = block_sums(store, "x", sha256[:16])
    digest = [hashlib.blake2b(data[at : at + block], digest_size=16).digest()
              for at in range(0, size, block)]  # fmt: skip
    assert sums == BlockSums(sha256, size, b"".join(digest)) and sums.of_block(3) == digest[3]
    for short in (sha256[:15], "0" * 64):
        with pytest.raises(CorruptRun, match=f"^{tmp_path}/x was damaged"):
            block_sums(store, "x", short)
    raw = open_checked(store, "x", sums).detach()  # type: ignore[attr-defined]
    store.asked.clear()

    def read(start: int, stop: int) -> list[tuple[int, int]]:
        store.asked.clear()
        assert raw.read_at(start, stop) == data[start:stop]
        return [(at, wanted) for at, wanted in store.asked]

    drips = [(0, 0), (100_000, 100_000), (200_000, 200_000)]
    assert read(5, 9) == [(at, block - done) for at, done in drips]
    assert read(7, block) == [] == read(size, size + 5) == read(3, 3)
    assert read(block - 1, block + 1) == [(block + at, block - done) for at, done in drips]
    assert read(2 * block - 1, 2 * block) == []
    assert read(3 * block, size + 99) == [(3 * block, 4321)] and raw.size == size
    assert read(3 * block + 1, size) == []
    assert read(2 * block, size)[0] == (2 * block, block + 4321)
    raw.close()
    assert raw.closed


def test_a_file_is_proved_by_reading_it_back(tmp_path: Path) -> None:
    store, sums = LocalStore(str(tmp_path)), Sums.of(b"abc")
    info = store.put("x", b"abc")
    etag = FileInfo("none", 3, sums.md5, None)
    assert holds(store, info, sums) and holds(store, etag, sums)
    with pytest.raises(FileNotFoundError):
        holds(store, etag, sums, read_back=True)
    assert not holds(store, FileInfo("x", 4, sums.md5, None), sums)
    with store.open("x") as stream:
        assert Sums.of_stream(stream) == sums and stream.seek(0) == 0
        assert Sums.of_stream(stream, etag=False) == Sums(3, "", sums.sha256)


@pytest.mark.parametrize("before", [None, b"abc", b"oth"])
def test_a_file_named_by_its_content_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    store, wrote = LocalStore(str(tmp_path)), list[str]()
    if before is not None:
        store.put("x", before)
    for name in ("put", "put_if_absent"):
        real = getattr(LocalStore, name)
        monkeypatch.setattr(
            LocalStore, name, lambda *a, real=real, name=name: wrote.append(name) or real(*a)
        )
    assert put_same_proved(store, "x", b"abc") == store.stat("x") and store.read("x") == b"abc"
    assert wrote == {None: ["put_if_absent"], b"abc": [], b"oth": ["put"]}[before]


@pytest.mark.parametrize(("stays", "writes"), [(True, 3), (False, 1)])
def test_a_bad_upload_is_repeated_while_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool, writes: int
) -> None:
    wrote: list[str] = []

    def put_file(store: LocalStore, path: str, source: Path) -> None:
        wrote.append(path)
        store.put(path, b"bad")
        if not stays:
            source.unlink(missing_ok=True)

    monkeypatch.setattr(LocalStore, "put_file", put_file)
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(BadUpload, match=f"^{tmp_path}/x: the store reported a successful write"):
        put_file_proved(LocalStore(str(tmp_path)), "x", tmp_path / "f", Sums.of(b"abc"))
    assert wrote == ["x"] * writes


FOOTER = b"metadata" + (8).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("file", [FOOTER, b"rows" + FOOTER, FOOTER[:-4] + b"PARE"])
def test_a_footer_is_hashed_without_the_rows(file: bytes) -> None:
    expected = hashlib.sha256(file[-16:]).hexdigest()[:32]
    assert footer_digest(io.BytesIO(file)) == expected


@pytest.mark.parametrize("file", [b"", b"PAR1", FOOTER[1:], FOOTER[:-1] + b"2"])
def test_what_has_no_footer_is_refused(file: bytes) -> None:
    with pytest.raises(ValueError, match="no Parquet footer"):
        footer_digest(io.BytesIO(file))


def test_a_table_has_the_columns_that_are_asked_for() -> None:
    pq.write_table(pa.table({"a": [1], "b": [2], "c": [3]}), sink := pa.BufferOutputStream())
    data = sink.getvalue().to_pybytes()
    assert parquet_table(data, ["c", "a"]).to_pydict() == {"c": [3], "a": [1]}
    assert parquet_table(data).column_names == ["a", "b", "c"]
    with pytest.raises(KeyError):
        parquet_table(data, ["d"])


# --- private files and the cache of a node ------------------------------------------------------


def test_only_folders_of_this_user_alone_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = make_private_folder("p")
    assert made.name.startswith(f"p-{os.getuid()}-") and make_private_folder("p") == made
    assert make_private_folder("other") != made
    for name, mode in (("a", 0o700), ("b", 0o701), ("c", 0o710)):
        (tmp_path / f"p-{os.getuid()}-{name}").mkdir(mode=mode)
    (tmp_path / f"p-{os.getuid()}-file").touch(mode=0o600)
    (tmp_path / f"p-{os.getuid()}-link").symlink_to(made)
    own = sorted([made, tmp_path / f"p-{os.getuid()}-a"])
    assert list(private_folders("p")) == own
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / "gone", *reversed(own)])
    assert list(private_folders("p")) == own
    found = os.lstat(made)
    other = os.stat_result((*found[:4], os.getuid() + 1, *found[5:]))
    monkeypatch.setattr(Path, "lstat", lambda _: other)
    assert list(private_folders("p")) == []


def test_a_file_of_another_user_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_regular(tmp_path / "x", os.O_RDWR | os.O_CREAT, "w") as file:
        file.write("é\udc80".encode(errors="ignore").decode())
    assert (tmp_path / "x").read_bytes() == "é".encode()
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(OSError, match="not a regular file of this user; remove it") as caught:
        open_regular(tmp_path / "x", os.O_RDONLY, "r")
    assert (caught.value.errno, caught.value.filename) == (errno.EPERM, str(tmp_path / "x"))


def test_a_cache_entry_is_filled_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "deep/cache"
    root.mkdir(parents=True)
    root.chmod(0o1777)  # others may add to it, but rename nothing
    monkeypatch.setenv("RAYBATCH_CACHE", str(root))
    listing = b'[["a", 1], ["d/b", "%s"]]' % hashlib.sha256(b"b").hexdigest().encode()
    identity = hashlib.sha256(listing).hexdigest()
    (root / "models" / f"{identity}.part/left").mkdir(parents=True)
    (root / "models").chmod(0o700)
    seen: list[tuple[str, int, list[str]]] = []

    def fetch(part: Path) -> bytes:
        seen.append((part.name, part.stat().st_mode & 0o777, os.listdir(part)))
        (part / "a").write_bytes(b"a")
        (part / "d").mkdir()
        (part / "d/b").write_bytes(b"b")
        return listing

    for _ in range(2):
        assert cached_folder("models", identity, fetch) == str(root / "models" / identity)
    assert seen == [(f"{identity}.part", 0o700, [])]
    names = {identity, f"{identity}.files", f"{identity}.lock"}
    assert {*os.listdir(root / "models")} == names
    monkeypatch.setattr(node_cache, "MAX_LISTING_BYTES", len(listing) - 1)
    with pytest.raises(ConfigError, match=f"listing has more than {len(listing) - 1} bytes"):
        cached_folder("models", identity, fetch)
    monkeypatch.setattr(node_cache, "MAX_LISTING_BYTES", len(listing))
    (root / "models" / identity / "d/b").write_bytes(b"c")
    with pytest.raises(ConfigError, match=rf"/{identity}: the SHA-256 of d/b differs .*\.files to"):
        cached_folder("models", identity, fetch)
    (root / "models" / identity / "a").write_bytes(b"aa")
    with pytest.raises(ConfigError, match="a has 2 bytes, but 1 in its listing"):
        cached_folder("models", identity, fetch)
    (root / "models" / f"{identity}.lock").unlink()
    (root / "models" / f"{identity}.lock").symlink_to("x")
    with pytest.raises(ConfigError, match=rf"{identity}\.lock: .*set RAYBATCH_CACHE"):
        cached_folder("models", identity, fetch)
    monkeypatch.setenv("RAYBATCH_CACHE", str(root / "models" / identity / "a/x"))
    with pytest.raises(ConfigError, match=r"a/x: cannot be used \(File exists\)"):
        cached_folder("models", identity, fetch)


# --- errors of others -----------------------------------------------------------------------------


def test_a_silent_server_is_given_up(silent: str) -> None:
    with pytest.raises((TimeoutError, socket.timeout)):
        open_without_redirects(silent, 0.1)


REFUSED = ssl.SSLCertVerificationError("x")
REFUSED.verify_message = "expired"


def chained(link: str) -> Exception:
    error = ValueError(REFUSED if link == "argument" else "x", REFUSED)
    if link in ("__cause__", "__context__"):
        setattr(error, link, ValueError(REFUSED))
    return error


@pytest.mark.parametrize("link", ["argument", "__cause__", "__context__", ""])
def test_a_refused_certificate_is_found_in_other_errors(link: str) -> None:
    assert certificate_problem(chained(link)) == ("expired" if link else "")
    assert certificate_problem(REFUSED) == "expired" and certificate_problem(ValueError()) == ""


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("NoSuchBucket: not found"), "no bucket"),
        (ValueError("No_Such_Bucket"), "no bucket"),
        (FileNotFoundError("x"), "gone"),
        (ConnectionError("x"), "away"),
        (PermissionError("access denied"), "denied"),
        (ValueError("x"), None),
    ],
)
def test_an_error_is_told_by_class_and_text(error: Exception, failure: str | None) -> None:
    assert failure_in(error) == failure
    assert text_of("a \x1b[31m b\n c\x1b[0m") == "a  b c"
