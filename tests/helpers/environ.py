"""The environment of processes that tests start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from prefect_raybatch.stages.vllm.forking import FIRST_VARIABLE

# Machines that run tests are busy. Ray puts its workers behind everything else, where beside other
# work an engine takes minutes to start. For its statistics, Ray Data starts a process in each
# cluster, which takes a second and more of a core.
BUSY = {"RAY_worker_niceness": "0", "RAY_DATA_USAGE_DISABLED": "1"}
# What jobs of the tests may do that come through Prefect's API or a job server.
POLICY = str(Path(__file__).parents[1] / "data" / "policy.yaml")


def keep_place_for_titles() -> None:
    """Put a variable that nobody changes first in the environment of this process.

    A process gives itself a title over its first variables, and cannot once the first is changed.
    vLLM's import changes some, each test may leave another order behind, and tests find the
    processes of an engine by their titles.
    """
    before = {name: value for name, value in os.environ.items() if name != FIRST_VARIABLE}
    os.environ.clear()
    os.environ.update({FIRST_VARIABLE: "1", **before})


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
