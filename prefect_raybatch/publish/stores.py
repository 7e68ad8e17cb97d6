"""The options of a place on S3 as the libraries of tables take them."""

from __future__ import annotations

from typing import Any

from prefect_raybatch.storage import is_remote, s3_settings


def object_store_options(uri: str, options: dict[str, Any]) -> dict[str, str]:
    """`storage_options` of deltalake and lance, from s3fs's; what is not given they look up
    themselves. Empty for a local folder."""
    if not is_remote(uri):
        return {}
    keys = s3_settings(options)
    given = {
        "aws_access_key_id": keys.key,
        "aws_secret_access_key": keys.secret,
        "aws_session_token": keys.token,
        "aws_region": keys.region,
        "aws_endpoint": keys.endpoint,
        "aws_skip_signature": "true" if keys.anon else None,
        "allow_http": "true" if (keys.endpoint or "").startswith("http://") else None,
    }
    return {name: value for name, value in given.items() if value}
