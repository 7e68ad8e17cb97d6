"""Fills this machine's caches of compiled code for the engine of a job: `raybatch warm`.

vLLM compiles a model for a GPU at the first start of an engine, and kernels at its first requests.
It finds what it has compiled by a hash of the engine's arguments and of its own code; so an engine
is started here with the very arguments of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAMED_LEVELS = 3  # vLLM: torch_compile_cache/torch_aot_compile/HASH


@dataclass(frozen=True)
class CacheFolder:
    """A folder that a library keeps compiled code in."""

    name: str
    path: str


@dataclass(frozen=True)
class FilledCache:
    """A cache and its size in bytes, before an engine started and afterwards.

    `compiled`: whether something was compiled anew. The sizes do not show this, because vLLM writes
    a file of some hundred KiB even at a start that finds everything in the cache.
    """

    folder: CacheFolder
    before: int
    after: int
    compiled: bool


@dataclass(frozen=True)
class WarmedCaches:
    """The caches of one model's engine, and the seconds of its start and of its first answer."""

    model: str
    caches: tuple[FilledCache, ...]
    start_seconds: float
    answer_seconds: float

    @property
    def were_warm(self) -> bool:
        """Return whether the engine compiled nothing anew."""
        return not any(cache.compiled for cache in self.caches)


def cache_folders(environment: Mapping[str, str]) -> tuple[CacheFolder, ...]:
    """Return the folders of vLLM, Triton and FlashInfer in a process with these variables.

    The variables are documented by vLLM (envs.py: VLLM_CACHE_ROOT), Triton (TRITON_CACHE_DIR,
    TRITON_HOME) and FlashInfer (FLASHINFER_WORKSPACE_BASE). PyTorch's code is in vLLM's folder.
    """
    home = Path(environment.get("HOME") or Path.home())
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    triton = Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"
    base = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home)
    return (
        CacheFolder("vLLM", environment.get("VLLM_CACHE_ROOT") or str(caches / "vllm")),
        CacheFolder("Triton", environment.get("TRITON_CACHE_DIR") or str(triton)),
        CacheFolder("FlashInfer", str(base / ".cache" / "flashinfer")),
    )


@dataclass(frozen=True)
class CacheContent:
    """What a cache holds: its size in bytes, and the names of what was compiled.

    The names are of folders in the first `NAMED_LEVELS` levels: vLLM and Triton name a folder by
    the hash of what it was compiled from, FlashInfer by the version and the GPU.
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
    """Return a cache's sizes and whether code was compiled since it held `before`."""
    now = cache_content(folder.path)
    return FilledCache(folder, before.size, now.size, bool(now.names - before.names - {"."}))
