"""Keeps requests to this machine away from HTTP proxies."""

from __future__ import annotations

import os
from urllib.request import getproxies_environment

LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")


def bypass_for_local_addresses() -> None:
    """Add this machine's addresses to NO_PROXY if a proxy is set in the environment.

    Prefect's server and Ray's dashboard listen on 127.0.0.1, where a proxy elsewhere cannot reach
    them: Prefect then waits 160 s for its own server. Child processes inherit NO_PROXY.
    """
    proxies = getproxies_environment()
    bypassed = [name.strip() for name in proxies.pop("no", "").split(",") if name.strip()]
    missing = [name for name in LOCAL_ADDRESSES if name not in bypassed]
    if proxies and missing and "*" not in bypassed:
        # Some libraries read only one of the two spellings.
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join([*bypassed, *missing])
