"""The schemes of the object stores, read by policy, jobs and stores alike."""

from __future__ import annotations

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
