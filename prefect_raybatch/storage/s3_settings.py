"""Resolves store options and environment for libraries with an S3 client of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.schemes import EXTRAS, store_scheme
from prefect_raybatch.spec.options import StoreOptions


@dataclass(frozen=True)
class S3Settings:
    """Endpoint, region and credentials.

    If `key` is None, the client must look up the credentials itself: only then does it renew the
    temporary credentials of a role. `anon`: requests are not signed.
    """

    endpoint: str | None
    region: str
    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False

    def scrub(self, text: str) -> str:
        """Return `text` without the credentials."""
        for secret in filter(None, (self.secret, self.token)):
            text = text.replace(secret, "***")
        return text


def s3_settings(options: StoreOptions) -> S3Settings:
    """Resolve s3fs's `options`; missing ones are looked up as boto3 does.

    Raises ConfigError if botocore rejects them, e.g. for an unknown profile.
    """
    import botocore.session
    from botocore.exceptions import BotoCoreError

    client = dict(options.get("client_kwargs") or {})
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        region = options.get("region") or client.get("region_name")
        region = region or session.get_config_variable("region")
        endpoint = options.get("endpoint_url") or client.get("endpoint_url")
        endpoint = endpoint or _configured_endpoint(session)
        anon = bool(options.get("anon"))
        key = options.get("key") or client.get("aws_access_key_id")
        if anon or key:
            secret = options.get("secret") or client.get("aws_secret_access_key")
            token = options.get("token") or client.get("aws_session_token")
            return S3Settings(endpoint, region or "us-east-1", key, secret, token, anon)
        found = session.get_credentials()
    except BotoCoreError as error:
        raise ConfigError(f"source.options: {error}") from None
    region = region or "us-east-1"
    # Only keys from the environment or a file are returned: they do not expire by themselves.
    if found is None or found.method not in ("env", "shared-credentials-file", "config-file"):
        return S3Settings(endpoint, region)
    keys = found.get_frozen_credentials()
    return S3Settings(endpoint, region, keys.access_key, keys.secret_key, keys.token)


def table_settings(uri: str, options: StoreOptions) -> S3Settings | None:
    """Return the settings for a table whose folder `uri` is on S3; None for a local folder.

    Raises ConfigError for a folder on a store of Google or Azure.
    """
    scheme = store_scheme(uri)
    if scheme in EXTRAS:
        raise ConfigError(
            f"{uri}: Lance datasets are read and written on s3:// and local disks only, not on "
            f"{scheme}://. Use Parquet files or an Iceberg table there, or another place"
        )
    return s3_settings(options) if scheme else None


def object_store_options(keys: S3Settings | None) -> dict[str, str] | None:
    """Return the `storage_options` of deltalake and lance; None for a local location (`keys` None).

    Both libraries use the same S3 client, so the names are the same.
    """
    if keys is None:
        return None
    given = {
        "aws_endpoint": keys.endpoint,
        "aws_region": keys.region,
        "aws_access_key_id": keys.key,
        "aws_secret_access_key": keys.secret,
        "aws_session_token": keys.token,
        "aws_skip_signature": "true" if keys.anon else None,
        "allow_http": "true" if (keys.endpoint or "").startswith("http://") else None,
    }
    return {name: value for name, value in given.items() if value}


def iceberg_options(keys: S3Settings | None) -> dict[str, str]:
    """Return pyiceberg's properties for reaching files on S3; {} for local ones (`keys` None)."""
    if keys is None:
        return {}
    given = {
        "s3.endpoint": keys.endpoint,
        "s3.region": keys.region,
        "s3.access-key-id": keys.key,
        "s3.secret-access-key": keys.secret,
        "s3.session-token": keys.token,
        "s3.anonymous": "true" if keys.anon else None,
    }
    return {name: value for name, value in given.items() if value}


def _configured_endpoint(session: Any) -> str | None:
    """Return AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or the endpoint in configuration files.

    A botocore client knows it too, but takes almost a second to create.
    """
    from botocore.configprovider import ConfiguredEndpointProvider

    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    found = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3")
    url: str | None = found.provide()
    return url
