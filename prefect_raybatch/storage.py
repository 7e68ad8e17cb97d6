"""URI to `Store`: the few operations the ledger builds on, for a local folder and for S3.

This is the only file that knows s3fs, and it imports it on the first S3 call only, so that
`raybatch status` on a local run directory starts at once. Everything exactly-once rests on
`Store.put_if_absent`; `Store.probe` finds out whether a store keeps that promise.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import stat as stat_module
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    RayBatchError,
    SourceError,
    StoreError,
    StoreUnavailable,
    UnsafeStore,
)

SUPPORTED = "s3://bucket/prefix, file:///folder, or a local path"
TEMPORARY = ".tmp-"  # local files being written; never listed
SINGLE_PUT_BYTES = 64 * 2**20  # larger files go to S3 in parts
PART_BYTES = 32 * 2**20
PARALLEL_PARTS = 4  # s3fs keeps this many parts in memory
READ_BUFFER_BYTES = 2**20  # read-ahead of `open`: neighbouring small column chunks in one GET
DELETE_BATCH = 1000  # S3's limit of keys in one delete
PROBE_WRITERS = 8
PROBE_ROUNDS = 2
RACE_TRIES = 10  # for what only a delete at the same moment can disturb
MIN_TRIES = 3  # even when one slow try used up `retry_seconds`

_WILDCARD = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


# --- URIs -------------------------------------------------------------------------------------


def is_remote(uri: str) -> bool:
    """Whether `uri` has a scheme other than `file` (nothing is checked about the store)."""
    return _scheme(uri) not in ("", "file")


def join(uri: str, *parts: str) -> str:
    """`uri` (normalized) with relative `parts` below it. ConfigError when a part leaves it."""
    root = _normalize(uri)
    return "/".join([root.rstrip("/"), *(_checked(part) for part in parts)]) if parts else root


def contains(outer_uri: str, inner_uri: str) -> bool:
    """Whether `inner_uri` is `outer_uri` or lies in it; local links are followed."""
    outer, inner = (
        uri if is_remote(uri) else os.path.realpath(uri)
        for uri in (_normalize(outer_uri), _normalize(inner_uri))
    )
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def split_glob(uri: str) -> tuple[str, str | None]:
    """A root without wildcards and the pattern below it.

    `s3://b/data/2024-*/x.parquet` gives `("s3://b/data", "2024-*/x.parquet")`; a URI without
    `*`, `?` or `[` gives itself, normalized, and None. ConfigError for a wildcard in the bucket.
    """
    wildcard = _WILDCARD.search(uri)
    if wildcard is None:
        return _normalize(uri), None
    cut = uri.rfind("/", 0, wildcard.start())
    root, pattern = (uri[:cut] or "/", uri[cut + 1 :]) if cut >= 0 else (".", uri)
    if is_remote(uri) and root.endswith(":/"):
        raise ConfigError(f"{uri}: the bucket cannot hold a wildcard; name the bucket")
    return _normalize(root), _checked(pattern)


def _scheme(uri: str) -> str:
    """The scheme of `uri` in lower case, "" for a plain path."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def _normalize(uri: str) -> str:
    """`s3://bucket[/prefix]` or an absolute local path, without a slash at the end."""
    scheme = _scheme(uri)
    rest = uri[len(scheme) + 3 :] if scheme else uri
    if not rest or "\0" in rest:
        raise ConfigError(f"{uri!r} names no place; use {SUPPORTED}")
    if scheme in ("s3", "s3a"):
        return "s3://" + _checked(rest.rstrip("/"))
    if scheme == "file":
        if not rest.startswith("/"):
            host, _, rest = rest.partition("/")
            if host != "localhost":
                raise ConfigError(f"{uri!r} names another host; write file:///folder")
            rest = "/" + rest
        rest = unquote(rest)
    elif scheme:
        raise ConfigError(f"{uri!r}: no store for {scheme}://; supported are {SUPPORTED}")
    path = os.path.abspath(os.path.expanduser(rest))
    return "/" + path.lstrip("/")  # abspath keeps a double slash at the start


def _checked(path: str) -> str:
    """`path` itself when it is relative and stays inside; else ConfigError."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ConfigError(
            f"{path!r} is no path inside a store: relative, with no empty part, '.', '..' or NUL"
        )
    return path


# --- the interface ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FileInfo:
    """One file: what tells that it is still the same one.

    `path` is relative to the store's root with "/" between parts, `size` is in bytes. S3 gives
    `etag` (no quotes), a local store `mtime_ns` (nanoseconds since 1970); the other is None.
    """

    path: str
    size: int
    etag: str | None
    mtime_ns: int | None


class Store(ABC):
    """Files under one root URI. Safe for threads and forks; pickles without its connection.

    `uri` is the normalized root. `retry_seconds` (default 60) bounds how long one call goes on
    asking a remote store that does not answer; a local store does not use it. Options with
    secrets travel in the pickle, but are in no repr, str or error message. Paths are relative to
    the root and stay inside it (else ConfigError). Any call can raise StoreError (permission,
    missing bucket, full disk) or StoreUnavailable (no answer in `retry_seconds`).
    """

    uri: str
    retry_seconds: float = 60.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __str__(self) -> str:
        return self.uri

    @abstractmethod
    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """The whole file. FileNotFoundError; CorruptRun when it has more than `max_bytes`."""

    @abstractmethod
    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        """Files in the folder `prefix` ("" is the root), asked afresh, a page at a time.

        Folders are not files; `recursive=False` leaves out what lies in deeper ones. An absent
        folder is empty. Sorted by path locally and on S3 (directory buckets excepted).
        """

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Size and etag or mtime of one file. FileNotFoundError, for a folder too."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> FileInfo:
        """Write `data`, replacing what is there: whole or not at all, durable on return."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` unless it exists; of any number of writers one wins.

        True: the file holds exactly `data`, so with a unique token in it we created it, even if
        the store's first answer was lost. False: another body is there; read it and compare.
        StoreUnavailable leaves it open which: the same body can be sent again.
        UnsafeStore when the store says that it cannot do this.
        """

    @abstractmethod
    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        """Store a finished local file: whole or not at all, durable on return.

        `local_path` is given up: a local store moves it where it can, S3 leaves it in place.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are fine. Local folders left empty go too."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A handle for random reads (close it, or use `with`). FileNotFoundError.

        On S3 each read is one GET tied to the etag seen here: SourceError if the object changes.
        """

    @abstractmethod
    def sub(self, prefix: str) -> Store:
        """The store rooted at `prefix`, over the same connection."""

    def probe(self) -> None:
        """Try at the start of a run whether this can be its output; leaves nothing behind.

        Writes, reads, lists, then lets PROBE_WRITERS writers race for one name, PROBE_ROUNDS
        times: some stores pass a sequential test of put-if-absent and fail a race.
        UnsafeStore when not exactly one writer wins; StoreError when it cannot be written.
        """
        folder = f"_probe-{uuid.uuid4()}"
        names = [f"{folder}/plain", *(f"{folder}/race-{i}" for i in range(PROBE_ROUNDS))]
        try:
            self._probe_plain(names[0])
            for name in names[1:]:
                self._probe_race(name)
        except BaseException:
            with suppress(RayBatchError):  # the first error is the one that explains
                self.delete(names)
            raise
        self.delete(names)

    def _probe_plain(self, name: str) -> None:
        """What is written must be readable and listed at once. Raises UnsafeStore."""
        body = uuid.uuid4().bytes
        self.put(name, body)
        listed = [info.path for info in self.list(name.rpartition("/")[0])]
        if self.read(name) != body or listed != [name]:
            raise UnsafeStore(
                f"{self.uri}: a file just written is not read back or not listed; exactly-once "
                "needs a store that shows a finished write at once. Choose another output."
            )

    def _probe_race(self, name: str) -> None:
        """Exactly one of several writers may create `name`, and its body must be the one kept."""
        bodies = [f"{uuid.uuid4()}".encode() for _ in range(PROBE_WRITERS)]
        start = threading.Barrier(PROBE_WRITERS)

        def write(body: bytes) -> bool:
            start.wait()
            return self.put_if_absent(name, body)

        with ThreadPoolExecutor(PROBE_WRITERS) as pool:
            won = [body for body, win in zip(bodies, pool.map(write, bodies), strict=True) if win]
        late = self.put_if_absent(name, b"late")  # catches luck in the race
        if len(won) != 1 or late or self.read(name) != won[0]:
            seen = f"{len(won)} of {PROBE_WRITERS} writers created the same file"
            seen += ", and a later one replaced it" if late else ""
            raise UnsafeStore(
                f"{self.uri}: the store does not honour put-if-absent ({seen}), so rows could be "
                "lost or doubled. Use a store with atomic If-None-Match (AWS S3, Ceph radosgw, "
                "MinIO, Cloudflare R2) or a local file system with hard links for the output."
            )


def open_store(uri: str, options: Mapping[str, Any] | None = None) -> Store:
    """The store at `uri`: `s3://bucket/prefix`, `file:///folder`, or a local path.

    `options` are s3fs's (key, secret, token, endpoint_url, region, profile, anon, client_kwargs,
    config_kwargs, ...); what is not given comes from the environment and files as boto3 reads
    them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). A local store ignores them. Nothing is
    contacted yet. ConfigError for an unknown scheme.
    """
    root = _normalize(uri)
    if is_remote(root):
        return S3Store(root, _Connection.shared(options or {}))
    return LocalStore(root)


def _not_found(uri: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)


def _too_large(uri: str, size: int, max_bytes: int) -> CorruptRun:
    return CorruptRun(f"{uri} has {size} bytes where at most {max_bytes} are expected")


# --- local folders ----------------------------------------------------------------------------


class LocalStore(Store):
    """A folder. Files appear by rename or hard link of a temporary file that is already synced."""

    def __init__(self, root: str) -> None:
        self.uri = root

    def sub(self, prefix: str) -> LocalStore:
        return LocalStore(join(self.uri, prefix))

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        with self.open(path) as handle:
            if max_bytes is not None and (size := os.fstat(handle.fileno()).st_size) > max_bytes:
                raise _too_large(self._path(path), size, max_bytes)
            with _os_errors(self._path(path)):
                return handle.read()

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        top = _checked(prefix) if prefix else ""
        yield from self._walk(top, recursive, frozenset())

    def _walk(
        self, folder: str, recursive: bool, above: frozenset[tuple[int, int]]
    ) -> Iterator[FileInfo]:
        """Files of `folder` in S3's order. Linked folders are followed, never round in circles."""
        place = os.path.join(self.uri, folder)
        try:
            with _os_errors(place):
                here = os.stat(place)
                with os.scandir(place) as entries:
                    found = sorted((e.name + "/" * e.is_dir(), e) for e in entries)
        except FileNotFoundError:
            return
        identity = (here.st_dev, here.st_ino)
        for name, entry in found:
            path = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                if recursive and identity not in above:
                    yield from self._walk(path[:-1], recursive, above | {identity})
            elif not name.startswith(TEMPORARY) and entry.is_file():
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    yield _local_info(path, entry.stat())

    def stat(self, path: str) -> FileInfo:
        place = self._path(path)
        with _os_errors(place):
            found = os.stat(place)
        if not stat_module.S_ISREG(found.st_mode):
            raise _not_found(place)
        return _local_info(path, found)

    def put(self, path: str, data: bytes) -> FileInfo:
        self._land(path, data, len(data), os.replace)
        return self.stat(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        for _ in range(RACE_TRIES):
            try:
                # A link, never O_EXCL: a writer killed after O_EXCL leaves an empty "commit".
                self._land(path, data, len(data), _link)
                return True
            except FileExistsError:
                # NFS can repeat a link whose answer was lost and then report our own file.
                with suppress(FileNotFoundError):  # taken, and deleted since: try again
                    return self.read(path) == data
        raise StoreError(f"{self._path(path)}: the name is taken, but not by a readable file")

    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        source = os.fspath(local_path)

        def place(temporary: str, target: str) -> None:
            try:
                # The umask's mode: temporary files are often for their owner only.
                os.chmod(source, stat_module.S_IMODE(os.stat(temporary).st_mode))
                _sync(source)
                os.replace(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES):
                    raise
                shutil.copyfile(source, temporary)
                _sync(temporary)
                os.replace(temporary, target)

        self._land(path, b"", os.stat(source).st_size, place)
        return self.stat(path)

    def delete(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            place = self._path(path)
            with suppress(FileNotFoundError), _os_errors(place):
                os.unlink(place)
            folders.add(os.path.dirname(path))
        for folder in folders:
            while folder:  # like S3, a folder is there while it has files
                try:
                    os.rmdir(os.path.join(self.uri, folder))
                except OSError:
                    break
                folder = os.path.dirname(folder)

    def open(self, path: str) -> BinaryIO:
        place = self._path(path)
        with _os_errors(place):
            return open(place, "rb")

    def _path(self, path: str) -> str:
        return os.path.join(self.uri, _checked(path))

    def _land(self, path: str, data: bytes, size: int, place: Callable[[str, str], None]) -> None:
        """Write `data` beside the target, sync it, let `place(temporary, target)` show it.

        `size` is only for the message of a full disk. FileExistsError comes from `place`.
        """
        target = self._path(path)
        folder = os.path.dirname(target)
        with _os_errors(target, writing=size):
            temporary, handle = _temporary_in(folder)
            try:
                with handle:
                    handle.write(data)
                    handle.flush()
                    os.fsync(handle.fileno())
                place(temporary, target)
                _sync(folder)
            finally:
                with suppress(OSError):  # renamed away, or left for nobody to see
                    os.unlink(temporary)


def _local_info(path: str, found: os.stat_result) -> FileInfo:
    return FileInfo(path, found.st_size, None, found.st_mtime_ns)


def _link(temporary: str, target: str) -> None:
    """Show `temporary` as `target` if that is free. FileExistsError; UnsafeStore without links."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise UnsafeStore(
                f"{target}: this file system has no hard links, which exactly-once needs; "
                "choose an output on another file system or on S3"
            ) from error
        raise


def _temporary_in(folder: str) -> tuple[str, BinaryIO]:
    """A new open file in `folder`, which is made if need be. Its mode follows the umask."""
    path = os.path.join(folder, f"{TEMPORARY}{uuid.uuid4()}")
    for _ in range(RACE_TRIES):  # a `delete` elsewhere may remove the folder while it is empty
        _make_folder(folder)
        with suppress(FileNotFoundError):
            return path, open(path, "xb")
    raise OSError(errno.ENOENT, "the folder keeps disappearing", folder)


def _make_folder(folder: str) -> None:
    """Like makedirs, and each new name is synced in its parent."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", folder) from None
    with suppress(FileNotFoundError):
        _sync(parent)


def _sync(path: str) -> None:
    """fsync of a file or folder by name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders on some network mounts
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _os_errors(place: str, writing: int | None = None) -> Iterator[None]:
    """Turn operating system errors about `place` into ours; `writing` is the bytes wanted.

    A missing file stays FileNotFoundError when reading, a taken name stays FileExistsError.
    """
    absent = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if writing is None and isinstance(error, absent):
            raise _not_found(place) from error
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"disk full at {place}: {reason}, {writing or 0} bytes needed; make room or "
                "choose another output, then run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            doing = "read" if writing is None else "write"
            raise StoreError(
                f"no permission to {doing} {place}: {reason}; check the owner and mode of the "
                "folder and how it is mounted"
            ) from error
        raise StoreError(f"{place}: {reason}") from error


# --- S3 ---------------------------------------------------------------------------------------


class _Connection:
    """s3fs's file system for one set of options: opened on first use, once in each process."""

    _all: dict[str, _Connection] = {}

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._by_process: dict[int, Any] = {}  # keyed by pid: a fork must not share sockets

    @classmethod
    def shared(cls, options: Mapping[str, Any]) -> _Connection:
        """One connection for equal options and AWS environment; opening one costs 0.1 s or so."""
        around = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "FSSPEC_"))}
        known = json.dumps([dict(options), around], sort_keys=True, default=repr)
        key = hashlib.sha256(known.encode()).hexdigest()
        if len(cls._all) > 16:
            cls._all.clear()  # stores that are alive keep theirs
        return cls._all.setdefault(key, cls(options))

    def __repr__(self) -> str:
        return "_Connection()"  # options hold secrets

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Connection.shared, (self.options,))

    def filesystem(self) -> Any:
        """This process's S3FileSystem. ConfigError when s3fs is missing or refuses the options."""
        pid = os.getpid()
        return self._by_process.get(pid) or self._by_process.setdefault(pid, self._build())

    def renew(self, old: Any) -> None:
        """Replace `old` so that credentials are looked up again; calls in flight keep it."""
        pid = os.getpid()
        if self._by_process.get(pid) is old:
            self._by_process[pid] = self._build()

    def _build(self) -> Any:
        try:
            import s3fs
        except ImportError as error:
            raise ConfigError("s3:// needs s3fs: pip install s3fs") from error
        options = dict(self.options)
        client = dict(options.pop("client_kwargs", None) or {})
        if region := options.pop("region", None):
            client.setdefault("region_name", region)
        config = {
            "connect_timeout": 10,
            "read_timeout": 30,
            "max_pool_connections": 32,
            # Ceph radosgw and other stores do not know the checksums newer clients send.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **(options.pop("config_kwargs", None) or {}),
            # botocore's own retries would hide that a first answer was lost.
            "retries": {"total_max_attempts": 1},
        }
        options.update(skip_instance_cache=True, use_listings_cache=False)
        try:
            return s3fs.S3FileSystem(client_kwargs=client, config_kwargs=config, **options)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"s3fs refuses the store options: {self.scrub(error)}") from None

    def credentials(self) -> str:
        """Where the credentials come from, in words without any of them."""
        client = self.options.get("client_kwargs") or {}
        if self.options.get("anon"):
            return "none (anon=True)"
        if self.options.get("key") or client.get("aws_access_key_id"):
            return "key and secret of the store's options"
        if profile := self.options.get("profile") or os.environ.get("AWS_PROFILE"):
            return f"profile {profile!r}"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
            if os.environ.get(name):
                return f"environment variable {name}"
        return "boto's chain (configuration files, container or instance role)"

    def scrub(self, error: object) -> str:
        """The text of `error`, with URLs cut to their host and our secrets taken out."""
        text = re.sub(r"(\w+://)(?:[^/\s\"']*@)?([^/?\s\"']*)[^\s\"']*", r"\1\2", str(error))
        client = self.options.get("client_kwargs") or {}
        secrets = [
            *(self.options.get(name) for name in ("secret", "token", "password")),
            *(client.get(name) for name in ("aws_secret_access_key", "aws_session_token")),
            *(os.environ.get(name) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")),
        ]
        for secret in filter(None, secrets):
            text = text.replace(str(secret), "***")
        return text[:300]


class _Answer(NamedTuple):
    """What a call came to. `status` is HTTP's, 0 for no answer, -1 for a fault on our side."""

    status: int
    code: str
    text: str

    @property
    def expired(self) -> bool:
        return self.code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")

    @property
    def may_be_expired(self) -> bool:
        """An answer to HEAD has no body to say why: then 400 can mean expired, too."""
        return self.expired or self.code == "400"

    @property
    def worth_retrying(self) -> bool:
        """No answer, a conflict, throttling or a server error; NoSuchUpload is a lost success."""
        if self.code in ("RequestTimeout", "NoSuchUpload", "SlowDown"):
            return True
        return self.status in (0, 408, 409, 429) or (
            self.status >= 500 and self.status not in (501, 505, 507)
        )


class S3Store(Store):
    """A prefix of a bucket on S3 or a compatible store."""

    def __init__(
        self, root: str, connection: _Connection, retry_seconds: float = Store.retry_seconds
    ) -> None:
        self.uri = root
        self.retry_seconds = retry_seconds
        self._connection = connection
        self._bucket, _, self._prefix = root.removeprefix("s3://").partition("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.uri, self._connection, self.retry_seconds))

    def sub(self, prefix: str) -> S3Store:
        return S3Store(join(self.uri, prefix), self._connection, self.retry_seconds)

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        found = self._call("get_object", self._key(path), max_bytes)
        if found["Body"] is None:
            raise _too_large(join(self.uri, path), found["ContentLength"], max_bytes or 0)
        return cast(bytes, found["Body"])

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        folder = self._key(prefix) if prefix else self._prefix
        asked: dict[str, Any] = {"Prefix": f"{folder}/" if folder else ""}
        if not recursive:
            asked["Delimiter"] = "/"
        skip = len(self._prefix) + 1 if self._prefix else 0
        while True:
            page = self._call("list_objects_v2", None, **asked)
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):  # what consoles write as a "folder"
                    yield _s3_info(item["Key"][skip:], item["Size"], item["ETag"])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, path: str) -> FileInfo:
        found = self._call("head_object", self._key(path))
        return _s3_info(path, found["ContentLength"], found["ETag"])

    def put(self, path: str, data: bytes) -> FileInfo:
        done = self._call("put_object", self._key(path), Body=data)
        return _s3_info(path, len(data), done["ETag"])

    def put_if_absent(self, path: str, data: bytes) -> bool:
        key = self._key(path)
        for _ in range(RACE_TRIES):
            if self._call("put_object", key, accept=412, Body=data, IfNoneMatch="*"):
                return True
            # Also after a first 412: aiohttp itself repeats a PUT on a kept connection that
            # breaks, so even then the object can be ours.
            with suppress(FileNotFoundError):  # taken, and deleted since: try again
                return self.read(path) == data
        raise StoreUnavailable(f"{join(self.uri, path)}: taken and absent by turns")

    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        source = os.fspath(local_path)
        size = os.stat(source).st_size
        if size <= SINGLE_PUT_BYTES:
            with open(source, "rb") as handle:
                return self.put(path, handle.read())
        key = self._key(path)
        part = max(PART_BYTES, -(-size // 10_000))  # S3 takes 10,000 parts

        async def send(fs: Any) -> None:
            target = f"{self._bucket}/{key}"
            await fs._put_file(source, target, chunksize=part, max_concurrency=PARALLEL_PARTS)

        self._until_answered("put_object", key, send)
        return self.stat(path)

    def delete(self, paths: Iterable[str]) -> None:
        keys = [self._key(path) for path in paths]
        for start in range(0, len(keys), DELETE_BATCH):
            batch = [{"Key": key} for key in keys[start : start + DELETE_BATCH]]
            self._call("delete_objects", None, Delete={"Objects": batch, "Quiet": True})

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_RangeReader(self, self.stat(path)), READ_BUFFER_BYTES)

    def read_range(self, info: FileInfo, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of `info`'s object. SourceError if it changed."""
        found = self._call(
            "get_object",
            self._key(info.path),
            accept=412,
            Range=f"bytes={start}-{stop - 1}",
            IfMatch=f'"{info.etag}"',
        )
        if found is None:
            raise SourceError(f"{join(self.uri, info.path)} changed while it was being read")
        return cast(bytes, found["Body"])

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{_checked(path)}" if self._prefix else _checked(path)

    def _call(
        self,
        operation: str,
        key: str | None,
        max_bytes: int | None = None,
        accept: int | None = None,
        **arguments: Any,
    ) -> Any:
        """One client operation, repeated until answered: its response, `Body` read.

        A body of more than `max_bytes` is left unread (None). Returns None for HTTP status
        `accept`; any other failure raises as `_error` says.
        """
        arguments["Bucket"] = self._bucket
        if key is not None:
            arguments["Key"] = key

        async def send(fs: Any) -> Any:
            return await _send(fs, operation, arguments, max_bytes)

        return self._until_answered(operation, key, send, accept)

    def _until_answered(
        self, operation: str, key: str | None, send: Callable[[Any], Any], accept: int | None = None
    ) -> Any:
        """The one retry loop: `send` again, with growing random pauses, until it is answered.

        Gives up after `retry_seconds`, but not before MIN_TRIES. Expired credentials are looked
        up afresh once.
        """
        from fsspec.asyn import sync

        deadline = time.monotonic() + self.retry_seconds
        tries, renewed = 0, False
        while True:
            fs = self._connection.filesystem()
            try:
                return sync(fs.loop, send, fs)
            except Exception as error:
                answer = self._answer(error)
            tries += 1
            if answer.status == accept:
                return None
            if answer.may_be_expired and not renewed:
                renewed = True
                self._connection.renew(fs)
                continue
            pause = random.uniform(0.5, 1.0) * min(0.1 * 2**tries, 8.0)
            late = time.monotonic() + pause > deadline and tries >= MIN_TRIES
            if late or not answer.worth_retrying:
                # Not chained: the client's own texts can hold URLs with credentials.
                raise self._error(answer, operation, key, tries) from None
            time.sleep(pause)

    def _answer(self, error: Exception) -> _Answer:
        """Judge a failed call by its HTTP status. What is no failure of the call passes through."""
        from aiohttp import ClientError as AioError
        from botocore import exceptions as boto
        from botocore.parsers import (
            ResponseParserError,
        )

        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, boto.ClientError):
            cause = cause.__cause__  # s3fs wraps the client's error in an OSError
        if cause is not None:
            said = cause.response
            status = said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(said.get("Error", {}).get("Code", ""))
            text = self._connection.scrub(said.get("Error", {}).get("Message") or "no message")
            return _Answer(status, code, text)
        lost = (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            boto.CredentialRetrievalError,
            ResponseParserError,
            AioError,
            OSError,
            TimeoutError,
        )
        text = self._connection.scrub(error)
        if isinstance(error, lost) and not isinstance(error, boto.SSLError):
            return _Answer(0, type(error).__name__, text)
        if isinstance(error, boto.BotoCoreError):
            return _Answer(-1, type(error).__name__, text)
        raise error

    def _error(self, answer: _Answer, operation: str, key: str | None, tries: int) -> Exception:
        """The error to raise for `answer`: names the place, what was said, and what to do."""
        place = f"s3://{self._bucket}/{key or self._prefix}"
        said = f"{answer.status} {answer.code}: {answer.text}"
        credentials = f"credentials: {self._connection.credentials()}"
        if answer.worth_retrying:
            return StoreUnavailable(f"{place}: no good answer in {tries} tries, the last: {said}")
        if answer.code == "NoSuchBucket":
            return StoreError(
                f"bucket {self._bucket!r} of {place} does not exist; create it, or check the name "
                f"and the endpoint ({credentials})"
            )
        if answer.status == 404:
            return _not_found(place)
        if answer.expired:
            return StoreError(f"{place}: the credentials have expired; renew them ({credentials})")
        if answer.code == "QuotaExceeded" or answer.status == 507:
            return StoreError(f"{place}: the store is full or over its quota ({said})")
        if answer.status in (401, 403):
            return StoreError(
                f"{place}: not allowed ({said}); {credentials}; check that they belong to this "
                f"endpoint and may {_PERMISSIONS[operation]} on bucket {self._bucket!r}, "
                "and that this machine's clock is right"
            )
        if answer.status in (301, 307, 308) or answer.code == "AuthorizationHeaderMalformed":
            return StoreError(
                f"{place}: the bucket is in another region or at another endpoint ({said}); set "
                "region or endpoint_url, or AWS_REGION or AWS_ENDPOINT_URL"
            )
        if answer.status == 501 and operation == "put_object":
            return UnsafeStore(
                f"{place}: the store cannot write if absent ({said}), which exactly-once needs; "
                "choose an output on another store"
            )
        if answer.status == -1:
            return StoreError(f"{place}: the S3 client cannot ask ({said}); {credentials}")
        return StoreError(f"{place}: {operation} refused ({said})")


_PERMISSIONS = {
    "get_object": "s3:GetObject (and s3:ListBucket: without it a missing file reads as forbidden)",
    "head_object": "s3:GetObject (and s3:ListBucket: without it a missing file reads as forbidden)",
    "list_objects_v2": "s3:ListBucket",
    "put_object": "s3:PutObject",
    "delete_objects": "s3:DeleteObject",
}


def _s3_info(path: str, size: int, etag: str) -> FileInfo:
    return FileInfo(path, size, etag.strip('"'), None)


async def _send(fs: Any, operation: str, arguments: dict[str, Any], max_bytes: int | None) -> Any:
    """One request through the client of s3fs's session, so that nothing hides the status."""
    try:
        await fs.set_session()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the S3 client refuses the store options: {error}") from None
    method = getattr(await fs.get_s3(arguments["Bucket"]), operation)
    # s3fs drops arguments it does not know: only the user's extras may pass that filter.
    found = await method(**{**fs._get_s3_method_kwargs(method), **arguments})
    if "Body" in found:
        async with found["Body"] as body:
            small = max_bytes is None or found["ContentLength"] <= max_bytes
            found["Body"] = await body.read() if small else None
    _raise_partial(found, operation)
    return found


def _raise_partial(found: Mapping[str, Any], operation: str) -> None:
    """A batch is answered 200 even where single keys failed: raise the first as its own error."""
    from botocore.exceptions import ClientError

    statuses = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503}
    for failed in found.get("Errors", ()):
        if failed.get("Code") != "NoSuchKey":
            status = statuses.get(failed.get("Code", ""), 400)
            said = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise ClientError(said, operation)


class _RangeReader(io.RawIOBase):
    """An S3 object as a seekable raw file: each read is one ranged GET through the retry loop."""

    def __init__(self, store: S3Store, info: FileInfo) -> None:
        self._store = store
        self._info = info
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "seek before the start")
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        return self.read(max(self._info.size - self._position, 0)) or b""  # one GET, not many

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._info.size)
        if stop <= self._position:
            return 0
        data = self._store.read_range(self._info, self._position, stop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
