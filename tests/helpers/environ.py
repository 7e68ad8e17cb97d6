"""The environment of processes that tests start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Machines that run tests are busy. Ray puts its workers behind everything else, where beside other
# work an engine takes minutes to start.
BUSY = {"RAY_worker_niceness": "0"}
# What jobs of the tests may do that come through Prefect's API or a job server.
POLICY = str(Path(__file__).parents[1] / "data" / "policy.yaml")


def clean() -> dict[str, str]:
    """This process's, without Prefect's and Ray's settings except those for busy machines."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))}
    return {**kept, **BUSY}


def dying_with_us(*command: str) -> list[str]:
    """The command of a server that gets SIGTERM when the process that started it is gone, even one
    that was killed (Linux only)."""
    program = shutil.which("setpriv")
    return [program, "--pdeathsig", "TERM", *command] if program else list(command)


def python_path() -> str:
    """PYTHONPATH of processes that must find what tests define: the folders of the tests, first."""
    tests = Path(__file__).parents[1]
    rooms = sorted(path.parent for path in tests.glob("*/test_*.py"))
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join(
        [*dict.fromkeys(map(str, [tests, *rooms])), *([before] if before else [])]
    )
