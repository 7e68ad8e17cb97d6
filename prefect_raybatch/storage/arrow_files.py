"""The place of a store as pyarrow's own file system, for whoever reads whole tables from it.

pyarrow reads with threads of its own, which must not call back into Python (`Store.open` says why),
so this is no cover of the store but pyarrow's client, told the same options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect_raybatch.storage.base import Store
from prefect_raybatch.storage.s3 import S3Store
from prefect_raybatch.storage.s3_settings import s3_settings

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


def arrow_filesystem(store: Store) -> tuple[FileSystem, str]:
    """(pyarrow's file system, path of the store's root in it). Contacts nothing. ConfigError for a
    profile that is not there."""
    from pyarrow import fs

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
