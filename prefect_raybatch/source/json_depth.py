"""Determines the nesting depth of JSON before it is parsed.

pyarrow's parser ends the process with a segmentation fault at some thousand levels, and Python's
own code reaches its recursion limit.
"""

from __future__ import annotations

import re

import numpy as np

MOST_LEVELS = 100
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_OPEN, _CLOSE = np.zeros(256, np.int32), np.zeros(256, np.int32)
_OPEN[[*b"[{"]] = 1
_CLOSE[[*b"]}"]] = 1


def is_too_deep(text: bytes) -> bool:
    """Return whether JSON nests more than MOST_LEVELS arrays and objects."""
    if text.count(b"[") + text.count(b"{") <= MOST_LEVELS:
        return False
    values = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    return bool(np.cumsum(_OPEN[values] - _CLOSE[values]).max(initial=0) > MOST_LEVELS)


def deep_line(block: bytes) -> int | None:
    """Return the 0-based number of the first line that is nested too deep; None without one."""
    if block.count(b"[") + block.count(b"{") <= MOST_LEVELS:
        return None
    values = np.frombuffer(block, np.uint8)
    ends = np.append(np.flatnonzero(values == ord("\n")), len(values))
    opened = np.searchsorted(np.flatnonzero(_OPEN[values]), ends)
    suspects = np.flatnonzero(np.diff(opened, prepend=0) > MOST_LEVELS)
    if not len(suspects):
        return None
    lines = block.split(b"\n")
    return next((int(number) for number in suspects if is_too_deep(lines[number])), None)
