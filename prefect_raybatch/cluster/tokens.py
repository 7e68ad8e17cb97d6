"""Ray's token: which one would be sent, and the one line that says what is wrong with it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prefect_raybatch.job.cluster_access import ClusterAccess

BY_ENVIRONMENT = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"


def token_sent(access: ClusterAccess) -> str | None:
    """The token that goes to the cluster: the block's, else the environment's, as Ray reads it
    (RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token)."""
    if access.token is not None:
        return access.token
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    if given := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return given
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    with suppress(OSError, RuntimeError):
        file = Path(path) if path else Path.home() / ".ray/auth_token"
        return file.read_text(encoding="utf-8").strip() or None
    return None


def token_missing(who: str, access: ClusterAccess) -> str:
    """What is wrong where a cluster wants a token and got none, and what to do."""
    remedy = f"set {BY_ENVIRONMENT} for the flow"
    if access.block is None:
        remedy += ", or save it in a RayCluster block and name that in cluster.block"
    else:
        remedy = f"save it as the token of the block {access.block}, or {remedy}"
    return f"{who} wants Ray's token and got none: {remedy}"


def token_wrong(who: str, access: ClusterAccess) -> str:
    """What is wrong where a cluster refuses the token that it got, and what to do."""
    ours = access.token is not None or any(n.lower() == "authorization" for n in access.headers)
    of = f"the block {access.block}" if ours and access.block else "this environment"
    return (
        f"{who} refuses Ray's token of {of}, which is another than the cluster's: replace it by "
        "what `ray get-auth-token` prints on the head"
    )
