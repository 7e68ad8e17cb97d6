"""Fills this machine's caches of compiled code for the engine of a job: `raybatch warm`.

vLLM compiles a model for a GPU at the first start of an engine, and kernels at its first requests.
It finds compiled code by a hash of the engine's arguments and of vLLM's own code, so an engine is
started here with the same arguments as in a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect_raybatch.stages.vllm.shorter_start import kernel_cache

NAMED_LEVELS = 3  # vLLM: torch_compile_cache/torch_aot_compile/HASH


@dataclass(frozen=True)
class CacheFolder:
    """A folder in which the library `name` keeps compiled code."""

    name: str
    path: str


@dataclass(frozen=True)
class FilledCache:
    """A cache folder with its size in bytes before and after an engine started.

    `compiled`: new code was compiled. The sizes do not show this, because vLLM writes some hundred
    KiB even if it finds all compiled code in the cache.
    """

    folder: CacheFolder
    before: int
    after: int
    compiled: bool


@dataclass(frozen=True)
class WarmedCaches:
    """The caches of one model's engine, after it was started and gave an answer.

    `start_seconds` and `answer_seconds` say how long these took.
    """

    model: str
    caches: tuple[FilledCache, ...]
    start_seconds: float
    answer_seconds: float

    @property
    def were_warm(self) -> bool:
        """Return whether no new code was compiled."""
        return not any(cache.compiled for cache in self.caches)


def cache_folders(environment: Mapping[str, str]) -> tuple[CacheFolder, ...]:
    """Return the cache folders of vLLM, Triton and FlashInfer in a process with this `environment`.

    The variables are documented by vLLM (envs.py: VLLM_CACHE_ROOT), Triton (TRITON_CACHE_DIR,
    TRITON_HOME) and FlashInfer (FLASHINFER_WORKSPACE_BASE). PyTorch's code is in vLLM's folder.
    """
    home = Path(environment.get("HOME") or Path.home())
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    base = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home)
    return (
        CacheFolder("vLLM", environment.get("VLLM_CACHE_ROOT") or str(caches / "vllm")),
        CacheFolder("Triton", kernel_cache(environment)),
        CacheFolder("FlashInfer", str(base / ".cache" / "flashinfer")),
    )


@dataclass(frozen=True)
class CacheContent:
    """A cache's size in bytes, and the names of its folders, which identify compiled code.

    Only the first `NAMED_LEVELS` levels of folders are named: vLLM and Triton name a folder by the
    hash of the source, FlashInfer by its version and the GPU.
    """

    size: int
    names: frozenset[str]


def cache_content(path: str) -> CacheContent:
    """Return what the cache in folder `path` holds; empty if the folder is missing."""
    size, names = 0, set()
    for folder, _, files in os.walk(path):
        name = os.path.relpath(folder, path)
        if name.count(os.sep) < NAMED_LEVELS:
            names.add(name)
        for file in files:
            try:
                size += os.lstat(os.path.join(folder, file)).st_size
            except FileNotFoundError:  # another engine has replaced it
                continue
    return CacheContent(size, frozenset(names))


def filled(folder: CacheFolder, before: CacheContent) -> FilledCache:
    """Return a cache's size before and now, and whether code was compiled since `before`."""
    now = cache_content(folder.path)
    return FilledCache(folder, before.size, now.size, bool(now.names - before.names - {"."}))
