"""Ray's authentication token: finds it, protects its file, and describes what is wrong with it."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from prefect_raybatch.bounded import read_regular_file
from prefect_raybatch.errors import ConfigError, Problem
from prefect_raybatch.job.cluster import ClusterAccess

log = logging.getLogger(__name__)

MOST_TOKEN_BYTES = 1 << 16
BY_ENVIRONMENT = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"


def token_sent(access: ClusterAccess) -> str | None:
    """Return Ray's token for a cluster: from the RayCluster block, else from the environment.

    The environment has it in RAY_AUTH_TOKEN, the file at RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.
    None if there is no token, or if RAY_AUTH_MODE switches tokens off. Raises `ConfigError` if the
    token file is a pipe or a device.
    """
    if access.token is not None:
        return access.token
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token if _uses_tokens() else None
    check_token_file()
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        file = token_file()
        return (file and read_regular_file(file, MOST_TOKEN_BYTES).decode().strip()) or None
    return None


def check_token_file() -> None:
    """Raise `ConfigError` if Ray's token file is a pipe or a device.

    Ray would wait for data from it, perhaps forever.
    """
    try:
        file = token_file()
        mode = file.stat().st_mode if file is not None else stat.S_IFREG
    except (OSError, RuntimeError):  # there is no token file
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"Ray reads its token from {file}, which is not a regular file. Remove it, or set "
            "RAY_AUTH_TOKEN_PATH to the token's file"
        )


def _uses_tokens() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def token_file() -> Path | None:
    """Return the path of Ray's token file, which need not exist; None if Ray reads no file.

    Raises `RuntimeError` if the path is in the home directory and the user has none.
    """
    if not _uses_tokens() or os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return None
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(path) if path else Path.home() / ".ray/auth_token"


def open_token_mode() -> tuple[Path, int] | None:
    """Return (token file, its mode) if other users may access the file, else None."""
    with suppress(OSError, RuntimeError):
        if (file := token_file()) is not None and (mode := file.stat().st_mode) & 0o077:
            return file, stat.S_IMODE(mode)
    return None


def keep_token_private() -> None:
    """Make Ray's token file readable by this user only; create it for a new local cluster.

    `ray.init` would create it with the mode of the umask, usually readable by all, and anybody with
    the token can run code as this user. A failure is only logged.
    """
    try:
        file = token_file()
        if file is None:
            return
        if not file.exists() and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            _put_token(file)
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
                log.info("%s was readable by other users; its mode is now 0600", file)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        log.debug("could not protect Ray's token: %s", error)


def _put_token(file: Path) -> None:
    """Create the token file, with a new token, atomically; keep a file that exists already."""
    descriptor, temporary = tempfile.mkstemp(prefix=".auth_token-", dir=file.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as made:  # its mode is 0600
            made.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        os.unlink(temporary)


def token_missing(who: str, access: ClusterAccess) -> Problem:
    """Return the problem that a cluster requires Ray's token and none was sent.

    `who` names the cluster in the text.
    """
    remedy = f"set {BY_ENVIRONMENT} for the flow"
    if access.block is None:
        remedy += ", or save it in a RayCluster block and name that in cluster.block"
    else:
        remedy = f"save it as the token of the block {access.block}, or {remedy}"
    return Problem(
        f"{who} requires Ray's token, but none was sent", f"{remedy[0].upper()}{remedy[1:]}"
    )


def token_wrong(who: str, access: ClusterAccess) -> Problem:
    """Return the problem that a cluster rejects the token that was sent.

    `who` names the cluster in the text.
    """
    ours = access.token is not None or any(n.lower() == "authorization" for n in access.headers)
    of = f"the block {access.block}" if ours and access.block else "this environment"
    return Problem(
        f"{who} rejects Ray's token from {of}, because the cluster has another",
        "Replace it with the output of `ray get-auth-token` on the head",
    )
