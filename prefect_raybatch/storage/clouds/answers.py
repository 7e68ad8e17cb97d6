"""Interprets the answers of Google Cloud Storage and Azure: a retry, or the error to raise."""

from __future__ import annotations

import re
from typing import NamedTuple

from prefect_raybatch.errors import (
    AccessDenied,
    ConfigError,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage.base import not_found
from prefect_raybatch.storage.permissions import PERMISSIONS

_STATUS = re.compile(r"^\s+status: (\d{3}),$", re.MULTILINE)
_PART_STATUS = re.compile(r"\(code: (\d{3})\)\s*$")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CERTIFICATE = re.compile(r"^\s+error: InvalidCertificate\(\n\s+(\w+)", re.MULTILINE)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
# URIs whose container and account could be swapped.
_NAMES = re.compile(r"az://([a-z0-9]{3,24})@([a-z0-9]{3,24})(?=/|\Z)")
_EXPIRED = re.compile(r"expired|AuthenticationRequired", re.IGNORECASE)

_NO_TOKEN = {
    "gs": "there are no application default credentials that work. Set "
    "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or run gcloud auth "
    "application-default login, or use a machine with a service account",
    "az": "there are no credentials of Azure that work. Set AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_KEY, or use a machine with a managed identity",
}


class CloudAnswer(NamedTuple):
    """The outcome of a failed call: HTTP status (0 without an answer), code and message.

    `certificate` says why the server's TLS certificate was refused; "" if it was not.
    """

    status: int
    code: str
    text: str
    certificate: str = ""

    @property
    def without_token(self) -> bool:
        """Return whether credentials are missing, or could not be exchanged for a token."""
        return "token request" in self.text

    @property
    def worth_retrying(self) -> bool:
        """Return whether the call may succeed if it is repeated."""
        if self.certificate:
            return False
        if self.code in ("ServerBusy", "OperationTimedOut", "InternalError"):
            return True
        return self.status in (0, 408, 429) or (
            self.status >= 500 and self.status not in (501, 505)
        )

    def error(
        self, scheme: str, operation: str, place: str, tries: int, endpoint: str
    ) -> Exception:
        """Return the error to raise for this answer: it names the place and what to do.

        `operation` is read, list, write or delete; `place` is the URI; `tries` counts the calls
        made; `endpoint` is scheme://host:port.
        """
        said = self.text
        if self.certificate:
            return ConfigError(
                f"{place}: the TLS certificate of {endpoint} is not valid: {self.certificate}. Set "
                "SSL_CERT_FILE to the file of the certificate authority that signed it, or renew it"
            )
        if self.without_token:
            return CredentialsUnusable(f"{place}: {_NO_TOKEN[scheme]} ({said})")
        if self.worth_retrying:
            return StoreUnavailable(
                f"{place}: no valid answer from {endpoint} in {tries} tries (the last: {said}). "
                f"Check that the store is up and can be reached from this machine{_swapped(place)}"
            )
        if self.code in _NO_BUCKET:
            return StoreError(
                f"{place}: the bucket or container does not exist at {endpoint}. Create it, or "
                f"check the name and the account{_swapped(place)}"
            )
        if self.status == 404:
            return not_found(place)
        if self.status == 401 or (self.status == 403 and _EXPIRED.search(said)):
            return CredentialsUnusable(
                f"{place}: the credentials are missing, wrong or expired ({said}). Renew them"
                f"{_swapped(place)}"
            )
        if self.status == 403:
            return AccessDenied(
                f"{place}: access denied ({said}). Check that the credentials allow "
                f"{PERMISSIONS[scheme][operation]}, and that the clock of this machine is right"
                f"{_swapped(place)}"
            )
        return StoreError(f"{place}: the store refused to {operation} ({said})")


def _swapped(place: str) -> str:
    """Return a sentence for an error: container and account may be swapped in the URI `place`.

    Returns "" if `place` is no Azure URI with an account, or if both have the same name.
    """
    named = _NAMES.match(place)
    if named is None or named[1] == named[2]:
        return ""
    container, account = named.groups()
    return (
        f". The URI names container {container} of account {account}. If {container} is the "
        f"account, write abfss://{account}@{container}.dfs.core.windows.net/PATH"
    )


def cloud_answer(error: Exception, text: str) -> CloudAnswer:
    """Return the outcome of the call that raised `error`; `text` is its message without secrets."""
    full = str(error)
    # The message begins with the object's name, which may hold anything; what follows is quoted.
    debug = full.rpartition("Debug source:")[2]
    statuses, certificate = _STATUS.findall(debug), _CERTIFICATE.search(debug)
    said = full.partition("\n\nDebug source:")[0]
    code = _CODE.findall(said)
    if not statuses:  # Azure deletes in batches, whose parts have a status each
        statuses = _PART_STATUS.findall(said)
    return CloudAnswer(
        int(statuses[-1]) if statuses else 0,
        code[-1] if code else "",
        text,
        certificate[1] if certificate else "",
    )
