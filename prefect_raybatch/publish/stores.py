"""The options of a place on S3 as the libraries of tables take them."""

from __future__ import annotations

from typing import Any

from prefect_raybatch.storage import S3Store, is_remote, join, open_store, s3_arguments


def place_of(uri: str) -> str:
    """The URI as a library takes it: normalized."""
    return join(uri)


def object_store_options(uri: str, options: dict[str, Any]) -> dict[str, str]:
    """`storage_options` of deltalake and lance, from s3fs's; what is not given they look up
    themselves. Empty for a local folder."""
    store = open_store(uri, options)
    if not is_remote(uri) or not isinstance(store, S3Store):
        return {}
    known = s3_arguments(store, join(uri).removeprefix("s3://").partition("/")[0])
    endpoint = known.get("endpoint_override")
    scheme = known.get("scheme", "https")
    given = {
        "aws_access_key_id": known.get("access_key"),
        "aws_secret_access_key": known.get("secret_key"),
        "aws_session_token": known.get("session_token"),
        "aws_region": known.get("region"),
        "aws_endpoint": f"{scheme}://{endpoint}" if endpoint else None,
        "aws_skip_signature": "true" if known.get("anonymous") else None,
        "allow_http": "true" if scheme == "http" else None,
    }
    return {name: str(value) for name, value in given.items() if value}
