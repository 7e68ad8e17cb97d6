"""Processes that run a job with a hosted model: real driver, stages and HTTP, and no Ray.

    python -m helpers.endpoint_driver JOB KEY

Starts such a process for each line of its input; prints its process id, and its exit code once it
has ended. They are forks of this one, which has imported all that a run imports, so that a start
takes half a second.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import openai_server
from helpers.without_ray import instead_of_ray
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.job.batch_job import BatchJob


def drive(path: str, key: str) -> None:
    job = BatchJob.from_yaml(path)
    run = plan_run(job, key)
    finalize_run(job, run, infer_run(job, run))


def child(path: str, key: str) -> None:
    os.setsid()  # whoever kills it kills what it started, too
    os.dup2(2, 1)
    code = 0
    try:
        drive(path, key)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def import_what_a_run_imports() -> None:
    """Import the modules that a small run imports in a process of its own.

    A run in this process would leave threads, which a fork cannot copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "modules"
        if (process := os.fork()) == 0:
            os.dup2(2, 1)
            before = set(sys.modules)
            with openai_server() as server:
                finished_run(hosted_job(server.url, Path(folder), {"Company": ["A", "B"]}))
            names.write_text("\n".join(name for name in sys.modules if name not in before))
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert status == 0, "the small run failed"
        for name in names.read_text().split():
            importlib.import_module(name)


def main(path: str, key: str) -> None:
    instead_of_ray(pytest.MonkeyPatch())
    import_what_a_run_imports()
    for _ in sys.stdin:
        if (process := os.fork()) == 0:
            child(path, key)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
