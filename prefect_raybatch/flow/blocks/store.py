"""The block with the keys of an object store. Converts credentials blocks to store options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prefect.blocks.abstract import CredentialsBlock
from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import ConfigDict, HttpUrl, SecretStr, field_validator, model_validator

from prefect_raybatch.errors import ConfigError, PrefectUnavailable
from prefect_raybatch.flow.away import is_outage
from prefect_raybatch.flow.blocks.form import FormBlock
from prefect_raybatch.job.group import field
from prefect_raybatch.schemes import store_scheme
from prefect_raybatch.storage import Store, open_store

# Options of s3fs, each with the fields of prefect-aws's credentials blocks that hold its value.
KEYS = {
    "key": ("aws_access_key_id", "minio_root_user"),
    "secret": ("aws_secret_access_key", "minio_root_password"),
    "token": ("aws_session_token",),
    "profile": ("profile_name",),
}


class ObjectStore(FormBlock, CredentialsBlock):
    """Keys and endpoint of S3 or an S3-compatible store, for the input and output of jobs.

    Name the block in a job as `credentials_block: object-store/NAME`. It contains the keys itself,
    or names a saved `AwsCredentials` or `MinIOCredentials` block of prefect-aws. Without either,
    the keys come from the environment of the worker process. For gs:// and az:// a job names a
    block of prefect-gcp or prefect-azure instead.

    Attributes:
        credentials: Saved prefect-aws block with the keys.
        access_key_id: Access key ID, if no credentials block is set.
        secret_access_key: Secret that belongs to the access key ID.
        session_token: Session token, for temporary keys.
        endpoint_url: URL of an S3-compatible store other than AWS.
        region: Region of the bucket.
        anonymous: Send requests without keys.

    Example:
        List a folder with the keys of a saved block:
        ```python
        from prefect_raybatch.flow.blocks import ObjectStore

        store = ObjectStore.load("BLOCK_NAME")
        for file in store.get_client("s3://bucket/folder").list():
            print(file.path, file.size)
        ```
    """

    _block_type_name = "Object Store"
    _block_type_slug = "object-store"
    _logo_url = HttpUrl(
        "https://cdn.sanity.io/images/3ugk85nk/production/"
        "d74b16fe84ce626345adf235a47008fea2869a60-225x225.png"
    )
    _documentation_url = HttpUrl("https://s3fs.readthedocs.io/en/latest/#credentials")

    model_config = ConfigDict(hide_input_in_errors=True)  # input may hold keys

    credentials: str | None = field(
        None,
        title="Credentials block",
        text="Saved AwsCredentials or MinIOCredentials block of prefect-aws, as type-slug/name.",
    )
    access_key_id: SecretStr | None = field(
        None, title="Access key ID", text="Access key ID, if no credentials block is set."
    )
    secret_access_key: SecretStr | None = field(
        None, title="Secret access key", text="Secret that belongs to the access key ID."
    )
    session_token: SecretStr | None = field(
        None, title="Session token", text="Session token, for temporary keys."
    )
    endpoint_url: str | None = field(
        None,
        title="Endpoint URL",
        text="http(s) URL of an S3-compatible store such as Ceph, MinIO or R2. Default: AWS.",
    )
    region: str | None = field(
        None, title="Region", text="Region of the bucket, such as eu-central-1."
    )
    anonymous: bool = field(
        False,
        title="Anonymous access",
        text="Send requests without keys. Works only for public buckets.",
    )

    @field_validator("credentials", mode="before")
    @classmethod
    def _credentials(cls, value: Any) -> Any:
        name = reference(value) if isinstance(value, Block) else value or None
        if str(name).startswith("object-store/"):
            raise ValueError("names another object store; name the block that contains the keys")
        return name

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        if not value:
            return None
        host = value.partition("://")[2].partition("/")[0]
        if not value.startswith(("http://", "https://")) or not host or "@" in host:
            raise ValueError("is not an endpoint URL; write http(s)://host[:port], without keys")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> ObjectStore:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key belong together; set both")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError(
                "session_token belongs to access_key_id and secret_access_key; set all three"
            )
        given = [self.credentials is not None, self.access_key_id is not None, self.anonymous]
        if sum(given) > 1:
            raise ValueError(
                "credentials, access_key_id and anonymous exclude each other; keep one of them"
            )
        return self

    def store_options(self) -> dict[str, Any]:
        """Return the options for `source.options` and `output.options`; secrets in clear text.

        Raises `ConfigError` if the block in `credentials` cannot be loaded or contains no keys.
        """
        found: dict[str, Any] = {}
        if self.credentials is not None:
            found = options_of(self.credentials)
        for option, value in (
            ("key", self.access_key_id),
            ("secret", self.secret_access_key),
            ("token", self.session_token),
        ):
            if value is not None:
                found[option] = value.get_secret_value()
        if self.anonymous:
            found["anon"] = True
        for option, place in (("endpoint_url", self.endpoint_url), ("region", self.region)):
            if place:
                found[option] = place
        return found

    def get_client(self, uri: str) -> Store:
        """Return a client for the folder `uri`: `read`, `list`, `put`, `put_if_absent`, `delete`.

        Does not contact the store yet. Raises `ConfigError` if the URI is not of an object store.
        """
        if not store_scheme(uri):
            raise ConfigError(f"{uri!r} is not on an object store; write s3://bucket/folder")
        return open_store(uri, self.store_options())


def reference(block: Block) -> str:
    """Return type-slug/name of a saved block.

    Raises `ValueError` for an unsaved block, because its keys would be sent in clear text.
    """
    name = block._block_document_name
    if not name:
        raise ValueError(
            f"the {block.get_block_type_name()} block is not saved; save it first, so that jobs "
            "can refer to it by name"
        )
    return f"{block.get_block_type_slug()}/{name}"


def options_of(name: str) -> dict[str, Any]:
    """Return the store options of the saved block type-slug/name.

    The block is an `ObjectStore` or has the fields of prefect-aws's `AwsCredentials` or
    `MinIOCredentials`, of prefect-gcp's `GcpCredentials`, of prefect-azure's
    `AzureBlobStorageCredentials`, or of prefect-sqlalchemy's `DatabaseCredentials`.

    Raises `ConfigError` if it cannot be loaded or contains no keys.
    """
    block = load_block("credentials_block", name)
    if isinstance(block, ObjectStore):
        return block.store_options()
    options = {**_google_options(block), **_azure_options(name, block)}
    for option, fields in KEYS.items():
        for given in fields:
            if (value := _value(block, given)) is not None:
                options[option] = value
    parameters = getattr(block, "aws_client_parameters", None)
    endpoint = getattr(parameters, "endpoint_url", None)
    if endpoint:
        options["endpoint_url"] = endpoint
    if region := getattr(block, "region_name", None):
        options["region"] = region
    if not options:  # a database's, such as prefect-sqlalchemy's DatabaseCredentials
        for option in ("username", "password"):
            if (value := _value(block, option)) is not None:
                options[option] = value
    if not options:
        raise ConfigError(
            f"credentials_block: {name!r} contains no keys for a store or a database; name a block "
            "that does, or remove it to use the credentials of the environment"
        )
    return options


def _value(block: object, field: str) -> Any:
    """Return a field of a block, a secret in clear text; None if it is not set."""
    value = getattr(block, field, None)
    return getattr(value, "get_secret_value", lambda: value)()


def _google_options(block: object) -> dict[str, Any]:
    """Return the options of a `GcpCredentials` block; {} if it has no key.

    They contain the key itself, because the cluster's nodes lack the key file.
    """
    file, key = _value(block, "service_account_file"), _value(block, "service_account_info")
    if file is not None:
        return {"service_account_key": Path(file).expanduser().read_text()}
    return {} if key is None else {"service_account_key": json.dumps(key)}


def _azure_options(name: str, block: object) -> dict[str, Any]:
    """Return the options of an `AzureBlobStorageCredentials` block; {} if no field is set.

    Raises `ConfigError` if the block `name` names no storage account.

    https://learn.microsoft.com/azure/storage/common/storage-configure-connection-string
    """
    text, url = _value(block, "connection_string"), _value(block, "account_url")
    fields = dict(part.split("=", 1) for part in str(text or "").split(";") if "=" in part)
    url = fields.get("BlobEndpoint") or url
    account = fields.get("AccountName") or urlsplit(str(url or "")).netloc.partition(".")[0]
    if not account:
        if text or url:
            raise ConfigError(
                f"credentials_block: {name!r} names no storage account; save a connection string "
                "with AccountName, or an account_url"
            )
        return {}
    if suffix := fields.get("EndpointSuffix"):
        protocol = fields.get("DefaultEndpointsProtocol", "https")
        url = url or f"{protocol}://{account}.blob.{suffix}"
    found = {"account_name": account, "account_key": fields.get("AccountKey")}
    found |= {"sas_key": fields.get("SharedAccessSignature"), "endpoint": url}
    return {option: value for option, value in found.items() if value}


def load_block(field: str, name: str) -> Any:
    """Return the saved block type-slug/name that a job names in `field`.

    Raises `ConfigError` if it cannot be loaded, and `PrefectUnavailable` if Prefect's API does not
    answer, fails, or asks to try again later.
    """
    try:
        return Block.load(name, _sync=True)  # type: ignore[call-arg]
    except Exception as error:
        if is_outage(error):
            raise PrefectUnavailable(
                f"{field}: the block {name} could not be loaded from Prefect's API "
                f"{PREFECT_API_URL.value()}: {_brief(error)}"
            ) from None
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            raise ConfigError(
                f"{field}: Prefect's API {PREFECT_API_URL.value()} refuses access to the block "
                f"{name} (status {error.response.status_code}). Check PREFECT_API_KEY or "
                "PREFECT_API_AUTH_STRING, and what it allows"
            ) from None
        if isinstance(error.__cause__, ObjectNotFound):
            url = PREFECT_API_URL.value()
            remedy = f"Save it in Prefect ({url})" if url else "Set PREFECT_API_URL to its server"
            raise ConfigError(
                f"{field}: Prefect has no block {name}. {remedy}, or correct the name"
            ) from None
        if "/" not in name:
            raise ConfigError(
                f"{field}: {name!r} is not the name of a block; write its type and name, such as "
                "hosted-model/large"
            ) from None
        raise ConfigError(
            f"{field}: {name!r} cannot be loaded ({_brief(error)}); save the block, and install "
            "the package that defines it"
        ) from None


def _brief(error: Exception) -> str:
    """Return the text of an error without the values of a block, which may be keys."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        wrong = sorted({".".join(map(str, item["loc"])) or "block" for item in error.errors()})
        return f"these fields are invalid: {', '.join(wrong)}"
    return str(error)
