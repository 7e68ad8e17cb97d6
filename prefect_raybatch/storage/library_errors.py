"""What an error of another library says, where each has a tree of its own, or only texts."""

from __future__ import annotations

import re
from typing import Literal

LibraryFailure = Literal["denied", "no bucket", "gone", "away"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What stores, catalogs and databases say to keys that are wrong, or may not do this.
_DENIED = re.compile(
    r"\b403\b|\b401\b|access[ ._]?denied|forbidden|unauthorized|InvalidAccessKeyId|SignatureDoesNot"
    r"|permission denied|not permitted|expired ?token|no ?credentials|CredentialsNot"
    r"|unable to locate credentials|AuthorizationExpired|OAuthError|invalid_client|authentication"
    r"|login failed|insufficient privilege|necessary privileges|no password supplied|using password"
    r"|role .* does not exist",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile(r"No_?Such_?Bucket", re.IGNORECASE)
_GONE = re.compile(r"not found|no such file|NoSuchKey|does not exist|404", re.IGNORECASE)
_AWAY = re.compile(
    r"timed? ?out|connection|dns error|\b50[0234]\b|SlowDown|temporarily|error sending request"
    r"|ServerError|ServiceUnavailable|TooManyRequests",
    re.IGNORECASE,
)


def text_of(error: object) -> str:
    """What an error says, in one line without colours."""
    return _COLOURS.sub("", " ".join(str(error).split()))


def failure_in(error: BaseException) -> LibraryFailure | None:
    """Whether keys were refused, a bucket or something else is not there, or nobody answered; None
    where the error tells none of it."""
    text = f"{type(error).__name__}: {text_of(error)}"
    if _DENIED.search(text):
        return "denied"
    if _NO_BUCKET.search(text):
        return "no bucket"
    if _GONE.search(text) or isinstance(error, FileNotFoundError):
        return "gone"
    return "away" if _AWAY.search(text) else None
