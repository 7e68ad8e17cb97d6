"""Interprets the answers of an S3 store: whether to retry, and the error to raise if not.

Decides by HTTP status and S3 code, never by the client's exception classes: s3fs maps several
answers to one exception, and one answer to several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefect_raybatch.errors import (
    AccessDenied,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
    UnsafeStore,
)
from prefect_raybatch.storage.base import not_found
from prefect_raybatch.storage.internet import MOVED
from prefect_raybatch.storage.permissions import PERMISSIONS
from prefect_raybatch.storage.s3_silence import CHECK

_NEEDED = {
    **dict.fromkeys(("get_object", "head_object"), PERMISSIONS["s3"]["read"]),
    "list_objects_v2": PERMISSIONS["s3"]["list"],
    "put_object": PERMISSIONS["s3"]["write"],
    "delete_objects": PERMISSIONS["s3"]["delete"],
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}


# The body was changed on its way to the store; we never send a part that is too small.
CHANGED = ("BadDigest", "XAmzContentSHA256Mismatch", "EntityTooSmall")


class Answer(NamedTuple):
    """The outcome of a failed call: S3's error code and the message, without secrets.

    `status` is the HTTP status, 0 without an answer, -1 if the client could not send the request.
    In these two cases `code` is the class of the client's exception.
    """

    status: int
    code: str
    text: str

    @property
    def expired(self) -> bool:
        return self.code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")

    @property
    def may_be_expired(self) -> bool:
        """Return whether credentials may have expired.

        A 400 to HEAD counts, because it has no body to say why.
        """
        return self.expired or self.code == "400"

    @property
    def refused_in_batch(self) -> bool:
        """Return whether a key of a batch was refused with an unknown code.

        The store answers such a batch with status 200.
        """
        return self.status == 200

    @property
    def worth_retrying(self) -> bool:
        """Return whether the call may succeed if it is repeated.

        True if there was no answer, and after an unknown code, a conflict, throttling, a server
        error, or a body changed in transit. True also for NoSuchUpload: an earlier try may have
        completed the upload, but its answer was lost.
        """
        codes = ("RequestTimeout", "NoSuchUpload", "SlowDown", *CHANGED)
        if self.refused_in_batch or self.code in codes:
            return True
        return self.status in (0, 408, 409, 429) or (
            self.status >= 500 and self.status not in (501, 505, 507)
        )

    @property
    def reply(self) -> str:
        status = f"{self.status} " if self.status > 0 else ""
        return f"{status}{self.code}" + (f": {self.text}" if self.text else "")

    def error(
        self, operation: str, bucket: str, key: str, tries: int, credentials: str, endpoint: str
    ) -> Exception:
        """Return the error to raise for this answer: it names the place and what to do.

        `operation` is the name of the client's method, such as get_object. `credentials` says where
        the credentials come from, without revealing them; `endpoint` is scheme://host:port.
        """
        place, said = f"s3://{bucket}/{key}", self.reply
        credentials = f"credentials: {credentials}"
        if self.refused_in_batch:
            return StoreError(f"{place}: the store refused {operation} in {tries} tries ({said})")
        if self.worth_retrying:
            return StoreUnavailable(
                f"{place}: no valid answer from {endpoint} in {tries} tries (the last: {said}). "
                f"{CHECK}"
            )
        if self.code == "NoSuchBucket":
            return StoreError(
                f"bucket {bucket!r} of {place} does not exist. Create it, or check the name and "
                f"the endpoint ({credentials})"
            )
        if self.status == 404:
            return not_found(place)
        if self.code == "QuotaExceeded" or self.status == 507:
            return StoreError(
                f"{place}: the store is full or over its quota ({said}). Free some space, or raise "
                "the quota"
            )
        if (error := self._credentials_error(operation, place, bucket, credentials)) is not None:
            return error
        if self.status in MOVED or self.code == "AuthorizationHeaderMalformed":
            return StoreError(
                f"{place}: the bucket is in another region or at another endpoint ({said}). Set "
                "region or endpoint_url, or AWS_REGION or AWS_ENDPOINT_URL"
            )
        if self.status == 501 and operation == "put_object":
            return UnsafeStore(
                f"{place}: the store does not support put-if-absent ({said}), which exactly-once "
                "needs. Choose an output on another store"
            )
        return StoreError(f"{place}: the store refused {operation} ({said})")

    def _credentials_error(
        self, operation: str, place: str, bucket: str, credentials: str
    ) -> Exception | None:
        """Return the error if credentials are missing, expired or refused; None for other causes.

        Also returns one if the client could not send the request at all (status -1).
        """
        if self.expired:
            return CredentialsUnusable(
                f"{place}: the credentials have expired. Renew them ({credentials})"
            )
        if self.may_be_expired and operation == "head_object":
            return CredentialsUnusable(
                f"{place}: refused ({self.reply}). S3 gives no reason in an answer to HEAD; most "
                f"often the credentials have expired: renew them ({credentials})"
            )
        if self.status in (401, 403):
            return AccessDenied(
                f"{place}: access denied ({self.reply}; {credentials}). Check that the credentials "
                f"belong to this endpoint and allow {_NEEDED[operation]} on bucket "
                f"{bucket!r}, and that the clock of this machine is right"
            )
        if self.status == -1:
            kind = CredentialsUnusable if "Credentials" in self.code else StoreError
            return kind(
                f"{place}: the S3 client cannot send the request ({self.reply}; {credentials})"
            )
        return None


def judge(error: Exception, scrub: Callable[[object], str]) -> Answer:
    """Return the outcome of the S3 call that raised `error`.

    If `error` does not come from the S3 client, the network or the file system, raises it again.
    `scrub` removes secrets from a text.
    """
    from aiohttp import ClientError as AioError
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, boto.ClientError):
        # s3fs wraps the client's error in an OSError, aiobotocore ours in an HTTPClientError.
        cause = cause.__cause__ or getattr(cause, "kwargs", {}).get("error")
    if cause is not None:
        said = cause.response
        status = said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(said.get("Error", {}).get("Code", ""))
        text = scrub(said.get("Error", {}).get("Message") or "")
        return Answer(status, code, text)
    lost = (
        boto.HTTPClientError,
        boto.ConnectionError,
        boto.IncompleteReadError,
        boto.CredentialRetrievalError,
        ResponseParserError,
        AioError,
        OSError,
        TimeoutError,
    )
    text = scrub(error)
    if isinstance(error, lost) and not isinstance(error, boto.SSLError):
        return Answer(0, type(error).__name__, text)
    if isinstance(error, boto.BotoCoreError):
        return Answer(-1, type(error).__name__, text)
    raise error
