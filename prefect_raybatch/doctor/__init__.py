"""Checks, for `raybatch doctor`, everything that a run needs, before the run.

Checks are independent of each other, and each has a time limit. A check that raises an exception or
exceeds its limit gives a failed finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue

from prefect_raybatch.doctor.check_result import DOCTOR_JOB, CheckContext, CheckResult, failed
from prefect_raybatch.doctor.machine import (
    check_bytecode,
    check_caches,
    check_engine,
    check_engines,
    check_files,
    check_gpus,
    check_packages,
    check_shm,
    check_token,
    check_versions,
    check_workers,
)
from prefect_raybatch.doctor.places import (
    check_disk,
    check_functions,
    check_model,
    check_policy,
    check_saved_blocks,
    check_source,
)
from prefect_raybatch.doctor.services import (
    check_clock,
    check_cluster,
    check_prefect,
    check_store_clock,
)
from prefect_raybatch.doctor.stores import check_output, check_store
from prefect_raybatch.errors import RayBatchError

__all__ = ["CHECKS", "DOCTOR_JOB", "STORE_CHECKS", "CheckContext", "CheckResult", "examine"]

BLOCKS = "blocks"
Check = Callable[[CheckContext], Iterable[CheckResult]]

# In the order shown: the check, its time limit in seconds, and the advice for an exception that it
# raises. A check gives up on a server that hangs after a few seconds; most of the time allowed is
# for imports, which take turns on a busy machine.
CHECKS: Mapping[str, tuple[Check, float, str]] = {
    "versions": (check_versions, 10, "reinstall this package"),
    "workers": (check_workers, 60, "set RAYBATCH_WORKER_PYTHON to a Python with this package"),
    "packages": (check_packages, 30, "reinstall this package"),
    "policy": (check_policy, 30, "correct the job, or the policy file (RAYBATCH_POLICY)"),
    BLOCKS: (check_saved_blocks, 75, "correct the block, or its name in the job"),
    "Prefect API": (check_prefect, 75, "correct PREFECT_API_URL (see prefect config view)"),
    "cluster": (check_cluster, 75, "use a larger cluster, or request less in engine and cluster"),
    "GPUs": (check_gpus, 10, "reload NVIDIA's driver, or restart the machine"),
    "compile caches": (check_caches, 30, "correct VLLM_CACHE_ROOT"),
    "bytecode": (check_bytecode, 5, "reinstall vllm"),
    "engine": (check_engine, 120, "reinstall: pip install 'prefect-raybatch[cpu]'"),
    "output": (check_output, 30, "correct output.uri, output.options or output.credentials_block"),
    "disk": (check_disk, 30, "correct output.uri"),
    "source": (check_source, 30, "correct source.uri, its options, or the column names"),
    "model": (check_model, 30, "correct engine.model or engine.revision; set HF_TOKEN if gated"),
    "functions": (check_functions, 75, "correct prompt.function or output.postprocess"),
    "clock": (check_clock, 75, "fix the other findings first"),
    "shared memory": (check_shm, 5, "mount /dev/shm"),
    "Ray's token": (check_token, 5, "chmod 600 ~/.ray/auth_token"),
    "open files": (check_files, 5, "ulimit -n 65536"),
    "engines left behind": (check_engines, 10, "look for processes named VLLM:: (ps -ef)"),
}

# Checks of `raybatch doctor FOLDER|URI`: only the output of the job is used.
STORE_CHECKS: Mapping[str, tuple[Check, float, str]] = {
    BLOCKS: (check_saved_blocks, 75, "correct the block, or its name in the job"),
    "store": (check_store, 75, "correct the URI, or give options with --set output.options.NAME="),
    "disk": (check_disk, 30, "correct the folder"),
    "clock": (check_store_clock, 75, "fix the other findings first"),
}


def examine(
    context: CheckContext | None = None,
    checks: Mapping[str, tuple[Check, float, str]] = CHECKS,
) -> list[CheckResult]:
    """Run all checks concurrently; return their findings in the order of `checks`.

    `checks` is {name: (check, its time limit in seconds, remedy to show if it raises)}. If
    `context` has no job, checks of a job give no findings.
    """
    context = context or CheckContext()
    started = time.monotonic()
    answers: dict[str, SimpleQueue[list[CheckResult]]] = {}
    for name, (check, _, remedy) in checks.items():
        answers[name] = SimpleQueue()
        repeats_blocks = name != BLOCKS and BLOCKS in checks
        # Daemons: one that hangs must not keep the command from ending.
        threading.Thread(
            target=_run,
            args=(name, check, context, remedy, answers[name], repeats_blocks),
            daemon=True,
        ).start()
    findings: list[CheckResult] = []
    for name, (_, seconds, _) in checks.items():
        try:
            seconds_left = started + seconds - time.monotonic()
            findings += answers[name].get(timeout=max(seconds_left, 0.001))
        except Empty:
            findings.append(
                failed(
                    name,
                    f"no result after {seconds:g} s",
                    "check whether a host name does not resolve, a firewall drops packets, or a "
                    "network file system hangs; on a busy machine, try again",
                )
            )
    return findings


def _run(
    name: str,
    check: Check,
    context: CheckContext,
    remedy: str,
    answer: SimpleQueue[list[CheckResult]],
    repeats_blocks: bool,
) -> None:
    try:
        answer.put(list(check(context)))
    except RayBatchError as error:
        if error is context.block_fault and repeats_blocks:
            answer.put([])  # the check of the blocks reports it
            return
        answer.put([failed(name, str(error), remedy)])
    except Exception as error:
        answer.put([failed(name, f"{type(error).__name__}: {error}"[:500], remedy)])
