"""CUDA's Multi-Process Service for the engines of a benchmark: processes that share a GPU compute
on it side by side, in place of taking turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # by which a process finds the service
END_SECONDS = 30


@contextmanager
def side_by_side(wanted: bool) -> Iterator[None]:
    """The service for what this process starts in the block, in folders of its own, so that no
    other process of the machine has to do with it; nothing where it is not wanted."""
    if not wanted:
        yield
        return
    if shutil.which(CONTROL) is None:
        raise SystemExit(f"--mps: {CONTROL} is not installed; it comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        given = {PIPES: f"{folder}/pipes", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in given.values():
            os.mkdir(path)
        os.environ.update(given)
        subprocess.run([CONTROL, "-d"], check=True, timeout=END_SECONDS, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input=b"quit\n", timeout=END_SECONDS)
            for name in given:
                del os.environ[name]
