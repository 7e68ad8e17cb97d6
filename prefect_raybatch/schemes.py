"""The URI schemes of object stores, and the options that Google and Azure stores accept."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Schemes that a store's URI may have, and the canonical scheme of each.
STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
EXTRAS = {"gs": "gcs", "az": "azure"}  # scheme: extra of this package that it needs
SUPPORTED = (
    "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, or a local path"
)
INSTALL = (
    'gs:// needs pip install "prefect-raybatch[gcs]", az:// and abfss:// '
    'pip install "prefect-raybatch[azure]"'
)
# Options of Google and Azure stores, by obstore's names. Other spellings that obstore accepts are
# refused, so that no secret goes unmasked under an unexpected name.
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
    """Return s3, gs or az for the URI of an object store, else ""."""
    scheme, separator, _ = uri.partition("://")
    return STORES.get(scheme.lower(), "") if separator else ""


# Container and account in a URL of Spark: abfss://container@account.dfs.core.windows.net/path.
_ACCOUNT = re.compile(
    r"([^/@:]+)@([a-z0-9]{3,24})(?:\.(?:dfs|blob)\.core\.windows\.net)?(?=/|\Z)", re.IGNORECASE
)


def store_place(uri: str) -> str:
    """Return the URI of an object store in canonical form: s3://, gs:// or az://.

    An Azure URI with a storage account becomes az://container@account/path.
    """
    scheme, rest = store_scheme(uri), uri.partition("://")[2]
    if scheme == "az" and (named := _ACCOUNT.match(rest)):
        rest = f"{named[1]}@{named[2].lower()}{rest[named.end() :]}"
    return f"{scheme}://{rest}"


def names_account(uri: str) -> bool:
    """Return whether an Azure URI names its storage account, as in az://container@account/path.

    Credentials in the URI (user:password@) are not taken for an account.
    """
    return store_scheme(uri) == "az" and _ACCOUNT.match(uri.partition("://")[2]) is not None


def with_account(uri: str, options: Mapping[str, object]) -> str:
    """Return an Azure URI with its storage account, as az://container@account/path.

    Two accounts may have containers of the same name. The account comes from option account_name or
    from AZURE_STORAGE_ACCOUNT_NAME; without either, and for other stores, returns `uri`
    unchanged.
    """
    account = options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if store_scheme(uri) != "az" or names_account(uri) or not account:
        return uri
    container, slash, path = uri.partition("://")[2].partition("/")
    return f"az://{container}@{account}{slash}{path}"


def options_for(uri: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return `options` if the store of `uri` accepts options of these names, else {}.

    Other options must have been written for another store. Without options, a store takes its
    credentials from the environment.
    """
    clouds = {name for names in CLOUD_OPTIONS.values() for name in names}
    scheme = store_scheme(uri)
    known = set(CLOUD_OPTIONS.get(scheme, ()))
    fits = known.issuperset(options) if known else not options or not clouds.issuperset(options)
    return dict(options) if fits else {}


def check_cloud_options(uri: str, options: Mapping[str, object]) -> None:
    """Raise ValueError if a Google or Azure store has unknown options.

    The error omits their values, which may be secrets. Options of other stores are not checked.
    """
    scheme = store_scheme(uri)
    known = CLOUD_OPTIONS.get(scheme, tuple(options))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"{scheme}:// has no options {', '.join(map(repr, unknown))}. Use {', '.join(known)}"
        )
