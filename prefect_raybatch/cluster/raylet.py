"""Watches the raylet, Ray's daemon on this host: if it dies, Ray ends the driver in seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from prefect_raybatch.cluster import connect as cluster


def find_raylet() -> psutil.Process | None:
    """Return the process of the raylet to which this driver is connected; None if unknown.

    When it dies, Ray's C++ code ends the driver without an exception.
    """
    from prefect_raybatch.stages.ray_internals import raylet_socket

    socket = raylet_socket()
    if socket is None:
        return None
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if Path(words[0]).name == "raylet" and any(socket in word for word in words):
            return process
    return None


def raylet_watch() -> Callable[[], bool]:
    """Return a function that says whether the raylet has died while this driver is connected.

    It always returns False if the raylet's process cannot be found.
    """
    raylet = find_raylet()
    if raylet is None:
        return lambda: False
    return lambda: cluster.is_joined() and _is_gone(raylet)


def _is_gone(process: psutil.Process) -> bool:
    """Return whether a process has ended or is a zombie."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
