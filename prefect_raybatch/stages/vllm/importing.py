"""Imports many modules in less time."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable

from prefect_raybatch.uncollected import uncollected


def import_all(names: Iterable[str], stop: Callable[[], bool] = lambda: False) -> None:
    """Import the modules `names`, without those that fail, until `stop()` returns True.

    A module that fails is imported again by the code that needs it, which then reports the reason.
    """
    with uncollected():
        for name in names:
            if stop():
                return
            with contextlib.suppress(Exception):
                importlib.import_module(name)
