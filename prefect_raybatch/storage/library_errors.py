"""Classifies errors of other libraries, which have separate exception trees or only messages."""

from __future__ import annotations

import errno
import os
import re
import ssl
from typing import Literal

LibraryFailure = Literal["denied", "no bucket", "gone", "away"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def _status(numbers: str) -> str:
    """Return a regex that finds these HTTP statuses in a message; `numbers` is e.g. `401|403`.

    A status is only found beside words such as "HTTP" or "error": a path, a port or a duration ("in
    401.0629ms") may contain the same numbers.
    """
    before = (
        r"\b(?:\w*(?:status|code|error|response)|http(?:/[\d.]+)?|occurred|returned|responded with)"
    )
    words = (
        r"(?:(?:internal )?server|client) error|authorization required|bad gateway"
        r"|service (?:temporarily )?unavailable|gateway time"
    )
    return rf"{before}\W{{1,4}}(?:{numbers})(?!\w|\.\d)|\b(?:{numbers}) (?:{words})"


# Messages of stores, catalogs and databases for wrong credentials or missing permissions.
_DENIED = re.compile(
    rf"{_status('401|403')}|access[ ._]?denied|forbidden|unauthorized|InvalidAccessKeyId"
    r"|SignatureDoesNot|permission denied|not permitted|expired ?token|no ?credentials"
    r"|CredentialsNot|unable to locate credentials|AuthorizationExpired|OAuthError"
    r"|invalid_client|authentication|login failed|insufficient privilege"
    r"|necessary privileges|no password supplied|using password|role .* does not exist",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile(r"No_?Such_?Bucket", re.IGNORECASE)
_GONE = re.compile(
    rf"not found|no such file|NoSuchKey|does not exist|{_status('404')}", re.IGNORECASE
)
_AWAY = re.compile(
    rf"timed? ?out|connection|dns error|{_status('50[0234]')}|SlowDown|temporarily"
    r"|error sending request|ServerError|ServiceUnavailable|TooManyRequests",
    re.IGNORECASE,
)


def text_of(error: object) -> str:
    """Return the message of an error in one line without colour codes."""
    return _COLOURS.sub("", " ".join(str(error).split()))


def certificate_problem(error: BaseException) -> str:
    """Return why a server's TLS certificate was refused; "" if `error` has another cause.

    urllib3 puts the reason in an error's first argument, without chaining it.
    """
    cause: object = error
    while isinstance(cause, BaseException):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        first = cause.args[0] if cause.args else None
        cause = cause.__cause__ or cause.__context__ or first
    return ""


# Numbers of errors that do not depend on the file's name, permissions or content.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)


def ca_file_problem(*settings: tuple[str, object]) -> str:
    """Return the setting whose file of CA certificates cannot be loaded, and why; "" if none.

    `settings` are (name, value) in the order in which the client looks. Only the first with a value
    is checked. The check is necessary because, with such a file, a client fails as if the server
    did not answer.
    """
    name, path = next(((name, value) for name, value in settings if value), ("", None))
    if not isinstance(path, str) or os.path.isdir(path):
        return ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # or SSLError, a subclass
        if not isinstance(error, ssl.SSLError) and error.errno in _PASSING:
            return ""
        return (
            f"{name}: {path!r} is not a readable PEM file of CA certificates ({error.strerror}). "
            "Name one, or remove the setting"
        )
    return ""


def failure_in(error: BaseException) -> LibraryFailure | None:
    """Classify a library's error by its class and text; return None if it fits no category.

    The categories are

    - "denied": credentials or permissions are missing,
    - "no bucket": the bucket does not exist,
    - "gone": the file or table does not exist,
    - "away": the server does not answer for now.
    """
    text = f"{type(error).__name__}: {text_of(error)}"
    if _DENIED.search(text):
        return "denied"
    if _NO_BUCKET.search(text):
        return "no bucket"
    if _GONE.search(text) or isinstance(error, FileNotFoundError):
        return "gone"
    return "away" if _AWAY.search(text) else None
