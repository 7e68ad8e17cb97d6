"""Globs as source.uri writes them: what matches, and whether one reaches into a folder."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

from prefect_raybatch.storage import contains, is_remote, join, split_glob

RESULTS = ("data", "quarantine")  # what of a run a folder or a glob can reach


def hidden(part: str) -> bool:
    """What writers leave beside the data: _SUCCESS, _temporary, .part-0.crc."""
    return part.startswith(("_", "."))


def matches(path: Sequence[str | None], pattern: Sequence[str]) -> bool:
    """Glob match part by part; `**` stands for any number of folders (at the end: also files).

    A part of `path` that is None stands for some name that is not hidden.
    """
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path) and not any(hidden(part) for part in path if part is not None)
        return matches(path, pattern[1:]) or (
            bool(path) and not hidden(path[0] or "") and matches(path[1:], pattern)
        )
    if not path or (hidden(path[0] or "") and not hidden(pattern[0])):
        return False
    return (path[0] is None or fnmatch.fnmatchcase(path[0], pattern[0])) and matches(
        path[1:], pattern[1:]
    )


def reaches(given: str, output: str) -> bool:
    """Whether `given` (an entry of source.uri) would read the results of runs below `output`."""
    root, pattern = split_glob(given)
    if not contains(root, output):
        return False
    if pattern is None:
        return True
    outer, inner = (
        uri if is_remote(uri) else os.path.realpath(uri) for uri in (root, join(output))
    )
    below = [part for part in inner[len(outer) :].split("/") if part]
    results = ([*below, None, kind, "part-00000.parquet"] for kind in RESULTS)
    return any(matches(path, pattern.split("/")) for path in results)
