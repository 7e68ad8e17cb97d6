"""The CPUs that this process may use."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # as a container sees its own


def usable_cpus() -> int:
    """Return how many logical CPUs this process may use, by CPU affinity and container quota."""
    affine = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return max(1, int(min(cpus, _quota())))


def _quota() -> float:
    """Return the CPUs of the container's quota (cgroup v2 or v1); infinity without one."""
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = (
            (CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
        )
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf
