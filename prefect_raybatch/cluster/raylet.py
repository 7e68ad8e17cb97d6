"""Finds Ray's daemon on this host, without which the driver ends within seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from prefect_raybatch.cluster import connect as cluster


def find_raylet() -> psutil.Process | None:
    """Return the process of the raylet to which this driver is connected; None if unknown.

    When it dies, Ray's C++ code ends the driver without an exception.
    """
    import ray

    with suppress(Exception):  # the address is internal to Ray, and only explains a crash
        node: Any = ray._private.worker._global_node
        socket = node.raylet_socket_name
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if Path(words[0]).name == "raylet" and any(socket in word for word in words):
                return process
    return None


def raylet_watch() -> Callable[[], bool]:
    """Return a function that says whether the raylet died while this driver is connected to it."""
    raylet = find_raylet()
    if raylet is None:
        return lambda: False
    return lambda: cluster.is_joined() and _is_gone(raylet)


def _is_gone(process: psutil.Process) -> bool:
    """Return whether a process has ended, also as a zombie."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
