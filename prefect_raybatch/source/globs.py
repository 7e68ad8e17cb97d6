"""Matches globs as source.uri writes them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

# What Windows leaves in folders that it shows; macOS and Linux use names that begin with a dot.
SYSTEM_FILES = ("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin")


def hidden(part: str) -> bool:
    """Return whether a name is hidden: writers and desktops leave such files beside the data.

    Examples are _SUCCESS, _temporary, .part-0.crc; .DS_Store, Thumbs.db, ~$open.xlsx.
    """
    return part.startswith(("_", ".", "~$")) or part.lower() in SYSTEM_FILES


def matches(path: Sequence[str | None], pattern: Sequence[str]) -> bool:
    """Match a glob part by part; `**` stands for any number of folders (at the end: also files).

    A part of `path` that is None stands for any name that is not hidden.
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
