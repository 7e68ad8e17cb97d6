"""A store's location as a pyarrow file system, for code that reads whole tables from it.

pyarrow reads with its own threads, which must not call back into Python (see `Store.open`), so this
does not wrap the store but configures pyarrow's client with the same options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect_raybatch.storage.base import Store
from prefect_raybatch.storage.s3 import S3Store
from prefect_raybatch.storage.s3_settings import s3_settings

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


def arrow_filesystem(store: Store) -> tuple[FileSystem, str]:
    """Return (pyarrow file system, path of the store's root in it).

    Contacts nothing. Raises ConfigError for a profile that does not exist.
    """
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
