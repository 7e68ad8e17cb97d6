"""The place of a store as pyarrow's own file system, for whoever reads whole tables from it.

pyarrow reads with threads of its own, which must not call back into Python (`Store.open` says why),
so this is no cover of the store but pyarrow's client, told the same options.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.storage.base import Store
from prefect_raybatch.storage.s3 import S3Store

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


def arrow_filesystem(store: Store) -> tuple[FileSystem, str]:
    """(pyarrow's file system, path of the store's root in it). Contacts nothing but, on AWS and
    without a region, what tells the bucket's. ConfigError for a profile that is not there."""
    from pyarrow import fs

    if not isinstance(store, S3Store):
        return fs.LocalFileSystem(), store.uri
    path = store.uri.removeprefix("s3://")
    return fs.S3FileSystem(**s3_arguments(store, path.partition("/")[0])), path


def s3_arguments(store: S3Store, bucket: str) -> dict[str, Any]:
    """What pyarrow's S3FileSystem takes, from s3fs's options and the environment. What is not given
    there pyarrow looks up itself, in AWS's usual places."""
    options = store.connection.options
    client = options.get("client_kwargs") or {}
    found: dict[str, Any] = {"anonymous": True} if options.get("anon") else {}
    if not found:
        names = (
            ("access_key", "key", "aws_access_key_id"),
            ("secret_key", "secret", "aws_secret_access_key"),
            ("session_token", "token", "aws_session_token"),
        )
        found = {name: options.get(ours) or client.get(theirs) for name, ours, theirs in names}
        if not found["access_key"] and options.get("profile"):
            found = _of_profile(str(options["profile"]))
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = (
        endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    region = options.get("region") or client.get("region_name")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        scheme, _, host = str(endpoint).rpartition("://")
        found |= {"scheme": scheme or "https", "endpoint_override": host.rstrip("/")}
    if not region:
        region = "us-east-1" if endpoint else _region(bucket)
    return {name: value for name, value in {**found, "region": region}.items() if value}


def _region(bucket: str) -> str | None:
    from pyarrow import fs

    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:  # pyarrow's own default, and then its own error
        return None


def _of_profile(name: str) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        keys = Session(profile=name).get_credentials()
    except BotoCoreError as error:
        raise ConfigError(f"output.options: {error}") from None
    if keys is None:
        raise ConfigError(f"output.options: profile {name!r} gives no credentials")
    frozen = keys.get_frozen_credentials()
    return {
        "access_key": frozen.access_key,
        "secret_key": frozen.secret_key,
        "session_token": frozen.token,
    }
