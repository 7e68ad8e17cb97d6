"""Engines that the runs of a test process keep for each other, on a cluster that it has joined."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from prefect_raybatch.cluster.connect import warm_engines
from prefect_raybatch.imports.start import SWITCH, import_process
from prefect_raybatch.stages.engine import CPU_ENV
from prefect_raybatch.stages.vllm import forking

IDLE = 3600.0  # seconds that an engine waits for a run: as long as other tests take


@contextmanager
def imported(**workers: str) -> Iterator[None]:
    """Fork engines of runs in the block from one process that has imported vLLM.

    `workers` are variables of Ray's workers. A fork needs the same values for those by which
    modules are loaded."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, "1")
            patch.delenv(forking.METHOD, raising=False)
            for name, value in workers.items():
                patch.setenv(name, value)
            stack.enter_context(import_process(None, {}, CPU_ENV))
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Keep engines of runs in the block for later ones."""
    # Imported first, as it sets the levels of its loggers; a command that joins a cluster by itself
    # does the same.
    importlib.import_module("ray.data")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    with warm_engines(IDLE):
        yield
