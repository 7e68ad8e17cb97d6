"""Converts store options for deltalake, which has its own clients for all object stores."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.schemes import EXTRAS, store_scheme
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage.clouds.connection import CloudConnection
from prefect_raybatch.storage.s3_settings import object_store_options, table_settings


class DeltaAccess(NamedTuple):
    """The URI and `storage_options` of a table, and a function that hides credentials in text.

    Missing credentials are looked up by deltalake, in the same places as obstore.
    """

    uri: str
    options: dict[str, str] | None
    scrub: Callable[[str], str]


def delta_access(uri: str, options: StoreOptions) -> DeltaAccess:
    """Return what deltalake needs to open the table at a normalized `uri`; does not connect.

    Raises ConfigError for options that it cannot use.
    """
    scheme = store_scheme(uri)
    if scheme not in EXTRAS:
        keys = table_settings(uri, options)
        return DeltaAccess(uri, object_store_options(keys), keys.scrub if keys else str)
    place, slash, path = uri.partition("://")[2].partition("/")
    bucket, _, account = place.partition("@")
    given = {**options, "account_name": account} if account else dict(options)
    connection = CloudConnection.shared(scheme, bucket, given)
    if scheme == "gs":
        _refuse_bearer_token(uri, options)
    prefix = "google_" if scheme == "gs" else ""
    used = {f"{prefix}{name}": str(value) for name, value in given.items()}
    if connection.endpoint().startswith("http://"):
        used["allow_http"] = "true"
    return DeltaAccess(f"{scheme}://{bucket}{slash}{path}", used, connection.scrub)


def _refuse_bearer_token(uri: str, options: StoreOptions) -> None:
    """Raise ConfigError if Google's credentials are a bearer token, which deltalake cannot use."""
    others = ("service_account", "service_account_key", "application_credentials")
    variables = [f"GOOGLE_{name.upper()}" for name in others]
    if options.get("bearer_token") or (
        os.environ.get("GOOGLE_BEARER_TOKEN")
        and not any(map(options.get, others))
        and not any(map(os.environ.get, variables))
    ):
        raise ConfigError(
            f"{uri}: deltalake takes no bearer_token. Set service_account_key, or "
            "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"
        )
