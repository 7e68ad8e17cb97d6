"""Opens a URI as a `Store`: the few operations that the ledger needs, on a local folder or on S3.

The S3 client is imported at the first S3 call, so that `raybatch status` on a local run directory
starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.storage.ahead import read_ahead
from prefect_raybatch.storage.arrow_files import arrow_filesystem
from prefect_raybatch.storage.base import FileInfo, Store
from prefect_raybatch.storage.footers import footer_digest
from prefect_raybatch.storage.local import LocalStore
from prefect_raybatch.storage.proof import Sums, holds, put_file_proved, put_proved, put_same_proved
from prefect_raybatch.storage.s3 import S3Store
from prefect_raybatch.storage.s3_client import Connection
from prefect_raybatch.storage.s3_settings import (
    S3Settings,
    iceberg_options,
    object_store_options,
    s3_settings,
)
from prefect_raybatch.storage.uri import contains, is_remote, join, normalize, split_glob

__all__ = [
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
]


def open_store(uri: str, options: Mapping[str, Any] | None = None, links: bool = False) -> Store:
    """Return the store at `uri`: `s3://bucket/prefix`, `file:///folder`, or a local path.

    `options` are those of s3fs (key, secret, token, endpoint_url, region, profile, anon,
    client_kwargs, config_kwargs, ...). Missing ones are read from the environment and configuration
    files as boto3 does (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). A local store ignores them. With
    `links`, listings follow links to folders; use it only for data that is read (input, models).
    Contacts nothing yet. Raises ConfigError for an unknown scheme.
    """
    root = normalize(uri)
    if is_remote(root):
        return S3Store(root, Connection.shared(options or {}))
    return LocalStore(root, links)
