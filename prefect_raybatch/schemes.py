"""The schemes of the object stores, read by policy, jobs and stores alike."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Each scheme that a URI may have, and the one that it is turned into.
STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
EXTRAS = {"gs": "gcs", "az": "azure"}  # extras of this package that these need
SUPPORTED = (
    "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, or a local path"
)
INSTALL = (
    'gs:// needs pip install "prefect-raybatch[gcs]", az:// and abfss:// '
    'pip install "prefect-raybatch[azure]"'
)
# The options of the stores of Google and Azure, by obstore's names for them. Its other spellings
# of them are refused, so that no secret passes under a name that nobody expects.
CLOUD_OPTIONS = {
    "gs": (
        *("application_credentials", "base_url", "bearer_token", "service_account"),
        *("service_account_key", "skip_signature"),
    ),
    "az": (
        *("account_key", "account_name", "authority_host", "client_id", "client_secret"),
        *("endpoint", "federated_token_file", "msi_endpoint", "msi_resource_id", "object_id"),
        *("sas_key", "skip_signature", "tenant_id", "token", "use_azure_cli"),
    ),
}
CLOUD_SECRETS = (
    *("account_key", "bearer_token", "client_secret", "sas_key", "service_account_key", "token"),
)


def store_scheme(uri: str) -> str:
    """Return s3, gs or az for a URI of such a store, else ""."""
    scheme, separator, _ = uri.partition("://")
    return STORES.get(scheme.lower(), "") if separator else ""


# Of the URLs that Spark takes: abfss://container@account.dfs.core.windows.net/path.
_ACCOUNT = re.compile(
    r"([^/@:]+)@([a-z0-9]{3,24})(?:\.(?:dfs|blob)\.core\.windows\.net)?(?=/|\Z)", re.IGNORECASE
)


def store_place(uri: str) -> str:
    """Return the one form of a store's URI: s3://, gs:// or az://, with an account as in az://c@a/x."""
    scheme, rest = store_scheme(uri), uri.partition("://")[2]
    if scheme == "az" and (named := _ACCOUNT.match(rest)):
        rest = f"{named[1]}@{named[2].lower()}{rest[named.end() :]}"
    return f"{scheme}://{rest}"


def names_account(uri: str) -> bool:
    """Return whether a URI of Azure names container@account, and no password."""
    return store_scheme(uri) == "az" and _ACCOUNT.match(uri.partition("://")[2]) is not None


def with_account(uri: str, options: Mapping[str, object]) -> str:
    """Return a URI of Azure with its account: containers of two accounts are two places."""
    account = options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if store_scheme(uri) != "az" or names_account(uri) or not account:
        return uri
    container, slash, path = uri.partition("://")[2].partition("/")
    return f"az://{container}@{account}{slash}{path}"


def options_for(uri: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return options that are given for another place, if the store of `uri` can take them too.

    Otherwise none: for a store of another kind credentials come from the environment.
    """
    clouds = {name for names in CLOUD_OPTIONS.values() for name in names}
    scheme = store_scheme(uri)
    known = set(CLOUD_OPTIONS.get(scheme, ()))
    fits = known.issuperset(options) if known else not options or not clouds.issuperset(options)
    return dict(options) if fits else {}


def check_cloud_options(uri: str, options: Mapping[str, object]) -> None:
    """Raise ValueError, without their values, for options that a store of Google or Azure lacks."""
    scheme = store_scheme(uri)
    known = CLOUD_OPTIONS.get(scheme, tuple(options))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"{scheme}:// has no options {', '.join(map(repr, unknown))}. Use {', '.join(known)}"
        )
