"""Checks everything that a run needs before it needs it: `raybatch doctor`.

Each check has a time limit and is independent of the others; an exception is its finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue

from prefect_raybatch.doctor.engine import check_engine
from prefect_raybatch.doctor.finding import Finding, Patient, failed
from prefect_raybatch.doctor.machine import (
    check_engines,
    check_files,
    check_gpus,
    check_packages,
    check_shm,
    check_token,
    check_versions,
)
from prefect_raybatch.doctor.places import (
    check_functions,
    check_model,
    check_output,
    check_source,
)
from prefect_raybatch.doctor.policy import check_policy
from prefect_raybatch.doctor.services import check_clock, check_cluster, check_prefect
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.batch_job import BatchJob

__all__ = ["CHECKS", "Finding", "Patient", "examine"]

Check = Callable[[Patient], Iterable[Finding]]

# What is looked at, in the order shown, how many seconds it may take, and what to do about an
# error that it raises. A check gives up on a server that hangs after a few seconds; most of the
# time allowed is for imports, which take turns on a busy machine.
CHECKS: Mapping[str, tuple[Check, float, str]] = {
    "versions": (check_versions, 10, "install this package again"),
    "packages": (check_packages, 30, "install this package again"),
    "policy": (check_policy, 30, "correct the job, or the file that RAYBATCH_POLICY names"),
    "Prefect API": (check_prefect, 75, "correct PREFECT_API_URL (prefect config view)"),
    "cluster": (check_cluster, 75, "a larger cluster, or smaller numbers in engine and cluster"),
    "GPUs": (check_gpus, 10, "reload NVIDIA's driver, or restart the machine"),
    "engine": (check_engine, 120, "install this package and its extra for CPUs again"),
    "output": (check_output, 30, "correct output.uri, output.options or output.credentials_block"),
    "source": (check_source, 30, "correct source.uri, its options, or the columns the job names"),
    "model": (check_model, 30, "correct engine.model or engine.revision; HF_TOKEN for a gated one"),
    "functions": (check_functions, 75, "correct prompt.function or output.postprocess"),
    "clock": (check_clock, 75, "mend what the other findings name first"),
    "shared memory": (check_shm, 5, "mount /dev/shm"),
    "Ray's token": (check_token, 5, "chmod 600 ~/.ray/auth_token"),
    "open files": (check_files, 5, "ulimit -n 65536"),
    "engines left behind": (check_engines, 10, "look for processes named VLLM:: by hand"),
}


def examine(
    job: BatchJob | None = None,
    with_keys: Callable[[BatchJob], BatchJob] = lambda job: job,
    checks: Mapping[str, tuple[Check, float, str]] = CHECKS,
) -> list[Finding]:
    """Return all findings, in the order of `checks`; without a job, only checks that need none.

    `with_keys` puts the credentials of the job's blocks into it. The checks run concurrently, so
    the whole takes as long as the slowest one.
    """
    patient = Patient(job, with_keys)
    started = time.monotonic()
    answers: dict[str, SimpleQueue[list[Finding]]] = {}
    for name, (check, _, remedy) in checks.items():
        answers[name] = SimpleQueue()
        # Daemons: one that hangs must not keep the command from ending.
        threading.Thread(
            target=_ask, args=(name, check, patient, remedy, answers[name]), daemon=True
        ).start()
    found: list[Finding] = []
    for name, (_, seconds, _) in checks.items():
        try:
            left = started + seconds - time.monotonic()
            found += answers[name].get(timeout=max(left, 0.001))
        except Empty:
            found.append(
                failed(
                    name,
                    f"no answer within {seconds:g} s",
                    "look for what it waits on: a name that does not resolve, a firewall, a "
                    "network file system that hangs",
                )
            )
    return found


def _ask(
    name: str, check: Check, patient: Patient, remedy: str, answer: SimpleQueue[list[Finding]]
) -> None:
    try:
        answer.put(list(check(patient)))
    except RayBatchError as error:
        answer.put([failed(name, str(error), remedy)])
    except Exception as error:
        answer.put([failed(name, f"{type(error).__name__}: {error}"[:500], remedy)])
