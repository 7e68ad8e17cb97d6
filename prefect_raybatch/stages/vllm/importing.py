"""Imports many modules in less time."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterable


def import_all(names: Iterable[str], stop: Callable[[], bool] = lambda: False) -> None:
    """Import the modules `names`, without those that fail, until `stop()` returns True.

    A module that fails is imported again by the code that needs it, which then reports the reason.
    Garbage is not collected meanwhile: imports leave little, and to look for it takes a fifth of
    their time. Later collections skip all objects that exist at the end (`gc.freeze`), so forks of
    this process share more memory with it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            if stop():
                return
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
