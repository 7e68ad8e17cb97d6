"""Opens a URI as a `Store`: the few operations that the ledger needs, local or in a bucket.

A store's client is imported at its first call, so that `raybatch status` on a local run directory
starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.schemes import EXTRAS, store_scheme
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage.base import FileInfo, Store
from prefect_raybatch.storage.clouds import CloudStore
from prefect_raybatch.storage.clouds.connection import CloudConnection
from prefect_raybatch.storage.local import LocalStore
from prefect_raybatch.storage.proof import (
    Sums,
    footer_digest,
    holds,
    put_file_proved,
    put_proved,
    put_same_proved,
)
from prefect_raybatch.storage.s3 import S3Store
from prefect_raybatch.storage.s3_client import Connection
from prefect_raybatch.storage.s3_settings import (
    S3Settings,
    iceberg_options,
    object_store_options,
    s3_settings,
    table_settings,
)
from prefect_raybatch.storage.uri import contains, is_remote, join, normalize, split_glob

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = [
    "CloudStore",
    "FileInfo",
    "LocalStore",
    "S3Settings",
    "S3Store",
    "Store",
    "Sums",
    "arrow_filesystem",
    "contains",
    "footer_digest",
    "holds",
    "iceberg_options",
    "is_remote",
    "join",
    "object_store_options",
    "open_store",
    "put_file_proved",
    "put_proved",
    "put_same_proved",
    "read_ahead",
    "s3_settings",
    "split_glob",
    "table_settings",
]
Item = TypeVar("Item")
Value = TypeVar("Value")


def open_store(uri: str, options: StoreOptions | None = None, links: bool = False) -> Store:
    """Return the store in a bucket (s3://, gs://, az://), in `file:///folder`, or in a local path.

    `options` for s3:// are s3fs options (key, secret, token, endpoint_url, region, profile, anon,
    client_kwargs, config_kwargs, ...). Missing ones are read from the environment and configuration
    files as boto3 does (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). Options for gs:// and az:// are
    obstore's (`schemes.CLOUD_OPTIONS`); missing ones come from GOOGLE_... and AZURE_... variables
    and from the machine's identity. A local store ignores them. With `links`, listings follow links
    to folders; use it only for data that is read (input, models). Does not connect yet. Raises
    ConfigError for an unknown scheme.
    """
    root = normalize(uri)
    scheme = store_scheme(root)
    if scheme in EXTRAS:
        bucket, _, account = root.partition("://")[2].partition("/")[0].partition("@")
        given = dict(options or {})
        if account and given.setdefault("account_name", account) != account:
            raise ConfigError(f"{root} names another account than options.account_name. Remove one")
        return CloudStore(root, CloudConnection.shared(scheme, bucket, given))
    if scheme:
        return S3Store(root, Connection.shared(options or {}))
    return LocalStore(root, links)


def arrow_filesystem(store: Store) -> tuple[FileSystem, str]:
    """Return a pyarrow file system that reads whole tables, and the path of the store's root in it.

    It does not read through the store: pyarrow reads with its own threads, which must not call back
    into Python (see `Store.open`). Instead, pyarrow's own client gets the store's options. Does not
    connect yet. Raises ConfigError for a store of Google Cloud or Azure, and for a missing AWS
    profile.
    """
    from pyarrow import fs

    if isinstance(store, CloudStore):
        # obstore's file system calls Python in pyarrow's threads, which aborts processes that end.
        raise ConfigError(
            f"{store.uri}: Ray cannot read a result there. Use run.dataset(), it copies the files"
        )
    if not isinstance(store, S3Store):
        return fs.LocalFileSystem(), store.uri
    keys = s3_settings(store.connection.options)
    scheme, _, host = (keys.endpoint or "").rpartition("://")
    given: dict[str, Any] = {
        "anonymous": keys.anon,
        "access_key": keys.key,
        "secret_key": keys.secret,
        "session_token": keys.token,
        "region": keys.region,
        "scheme": scheme,
        "endpoint_override": host.rstrip("/"),
    }
    used = {name: value for name, value in given.items() if value}
    return fs.S3FileSystem(**used), store.uri.removeprefix("s3://")


def read_ahead(
    read: Callable[[Item], Value], items: Iterable[Item], threads: int, ahead: int
) -> Iterator[Value]:
    """Yield `read(item)` for each item in order; `threads` threads read up to `ahead` items ahead.

    At most `ahead` results are in memory, however many items there are. An exception from `read` is
    raised at its item. If that happens, or if the consumer stops early, pending reads are dropped
    and running ones are not waited for.
    """
    waiting: deque[Future[Value]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Garbage collection may end this in a thread that is just starting, where a join hangs.
        pool.shutdown(wait=False, cancel_futures=True)
