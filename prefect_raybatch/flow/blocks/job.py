"""The block that holds a job and runs it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect._internal.compatibility.async_dispatch import async_dispatch
from prefect.blocks.abstract import JobBlock, JobRun
from prefect.client.orchestration import get_client
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger
from prefect.settings import get_current_settings
from prefect.states import Pending
from pydantic import ConfigDict, HttpUrl, model_validator

from prefect_raybatch.errors import ConfigError, IncompleteRun, RayBatchError
from prefect_raybatch.flow.blocks.cluster import RayCluster
from prefect_raybatch.flow.blocks.fields import block_field
from prefect_raybatch.flow.blocks.store import ObjectStore, reference
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.job.edits import edited
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.storage import is_remote

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

ENTRYPOINT = "prefect_raybatch.flow.batch_inference"
STOP_GRACE = 30.0  # seconds a stopped run has for ending its engines
PROCESS_LOOK = 0.5  # seconds between two looks at the process


class BatchInferenceJob(JobBlock[RunReport]):
    """A batch inference job that can be triggered: the flow `batch_inference` with its parameters.

    The flow works in a process of its own and is a flow run of its own in the Prefect page. Keys
    do not travel with it: it gets the names of the blocks that hold them.

    Attributes:
        job: The job, in place of a file.
        job_file: Path of a job file.
        cluster: Where Ray is, in place of what the job says.
        store: Keys for input and output where the job names none.

    Example:
        Run a saved job to its end:
        ```python
        from prefect_raybatch.flow.blocks import BatchInferenceJob

        nightly = BatchInferenceJob.load("BLOCK_NAME")
        run = nightly.trigger()
        run.wait_for_completion()
        report = run.fetch_result()
        ```
    """

    _block_type_name = "Batch Inference Job"
    _block_type_slug = "batch-inference-job"
    _logo_url = HttpUrl("https://github.com/vllm-project.png?size=200")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    model_config = ConfigDict(hide_input_in_errors=True)  # input may hold keys

    job: BatchJob | None = block_field(
        None, title="Job", text="What to read, what to ask and where to write."
    )
    job_file: str | None = block_field(
        None,
        title="Job file",
        text="Path of a job file in YAML, in place of the job; read at each trigger.",
    )
    cluster: RayCluster | None = block_field(
        None, title="Ray cluster", text="Where Ray is, in place of what the job says."
    )
    store: ObjectStore | None = block_field(
        None,
        title="Object store",
        text="Keys for s3:// input and output where the job itself names no credentials block.",
    )

    @model_validator(mode="after")
    def _one_job(self) -> BatchInferenceJob:
        if (self.job is None) == (not self.job_file):
            raise ValueError("set exactly one of job and job_file")
        return self

    def batch_job(self) -> BatchJob:
        """The job as it will run: on the cluster and with the store's name.

        Raises `ConfigError` for a job file that is missing or wrong, and for a store that was
        never saved.
        """
        job = self.job or BatchJob.from_yaml(str(self.job_file))
        if self.cluster is not None:
            job = self.cluster.apply(job)
        if self.store is None:
            return job
        try:
            name = reference(self.store)
        except ValueError as error:
            raise ConfigError(f"store: {error}") from None
        changes = {}
        if not job.source.credentials_block and any(map(is_remote, job.source.uris)):
            changes["source.credentials_block"] = name
        if not job.output.credentials_block and is_remote(job.output.uri):
            changes["output.credentials_block"] = name
        return edited(job, changes, "the job with its store")

    async def atrigger(self, run_key: str | None = None) -> BatchInferenceRun:
        """Starts a flow run and returns at once; see `trigger`."""
        return await asyncio.to_thread(self._start, run_key)

    @async_dispatch(atrigger)
    def trigger(  # type: ignore[override]
        self, run_key: str | None = None
    ) -> BatchInferenceRun:
        """Starts a flow run in a process of its own and returns at once.

        `run_key` continues or returns the run of that key; without it the key is made as
        `batch_inference` makes it, of the scheduled start of the flow run that triggers. Awaitable
        in async code. Raises `ConfigError` for a job that cannot work as written.
        """
        return self._start(run_key)

    def _start(self, run_key: str | None) -> BatchInferenceRun:
        from prefect_raybatch.flow.flows import batch_inference, scheduled_start
        from prefect_raybatch.flow.tasks import with_blocks
        from prefect_raybatch.runs.run import begun

        job = self.batch_job()
        key = run_key or begun(with_blocks(job), None, scheduled_start())[1]
        parameters: dict[str, Any] = {"job": job, "run_key": check_run_key(key)}
        with get_client(sync_client=True) as client:
            made = client.create_flow_run(batch_inference, parameters=parameters, state=Pending())
        # A process of its own can be cancelled and killed without harm to the one that triggers;
        # started by Prefect's engine, so that nothing is pickled and no script is run again.
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect.engine", str(made.id)],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
        )
        _logger().info("%s: flow run %s works on run key %s", job.name, made.name, key)
        return BatchInferenceRun(job, key, made.id, process)

    def environment(self) -> dict[str, str]:
        """Of the new process: ours, with Prefect's settings of now, without what names our own
        flow run. Secrets of the cluster pass here, not in flow parameters."""
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT__")}
        access = self.cluster.access() if self.cluster else ClusterAccess()
        more = {}
        if access.headers and access.job_server:
            more["RAY_JOB_HEADERS"] = json.dumps(dict(access.headers))
        elif access.token:
            more |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": access.token}
        return {**ours, **settings, **more, "PREFECT__FLOW_ENTRYPOINT": ENTRYPOINT}


class BatchInferenceRun(JobRun[RunReport]):
    """A triggered job: the flow run `flow_run_id`, whose run directory is `run_key`'s."""

    def __init__(
        self, job: BatchJob, run_key: str, flow_run_id: UUID, process: subprocess.Popen[bytes]
    ):
        self.job, self.run_key, self.flow_run_id = job, run_key, flow_run_id
        self._process = process

    def __repr__(self) -> str:
        return f"BatchInferenceRun({self.job.name!r}, {self.run_key!r}, {self.flow_run_id})"

    async def await_for_completion(self) -> None:
        """Waits for the end; see `wait_for_completion`."""
        try:
            while self._process.poll() is None:
                await asyncio.sleep(PROCESS_LOOK)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        await asyncio.to_thread(self._check)

    @async_dispatch(await_for_completion)
    def wait_for_completion(self) -> None:  # type: ignore[override]
        """Waits until the flow run has ended. Awaitable in async code.

        Raises `RayBatchError` with the flow run's message unless it completed. Whatever ends the
        waiting early (a cancelled flow run, Ctrl-C) stops the run; what is committed is kept.
        """
        try:
            self._process.wait()
        except BaseException:
            self.stop()
            raise
        self._check()

    async def afetch_result(self) -> RunReport:
        """The report; see `fetch_result`."""
        return await asyncio.to_thread(self._result)

    @async_dispatch(afetch_result)
    def fetch_result(self) -> RunReport:  # type: ignore[override]
        """The report of the finished run. Awaitable in async code.

        Raises `IncompleteRun` while the run is not finished.
        """
        return self._result()

    def stop(self) -> None:
        """Ends the flow run and its engines; what is committed is kept."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check(self) -> None:
        found = self._flow_run()
        if found.state is not None and found.state.is_completed():
            return
        said = f"{found.state_name}: {found.state.message}" if found.state else "no state"
        raise RayBatchError(
            f"flow run {found.name} of run key {self.run_key} did not complete ({said})"
        )

    def _flow_run(self) -> FlowRun:
        """The flow run as the API knows it; its last state can come a moment after its end."""
        with get_client(sync_client=True) as client:
            for _ in range(10):
                found = client.read_flow_run(self.flow_run_id)
                if found.state is not None and found.state.is_final():
                    break
                time.sleep(PROCESS_LOOK)
            return found

    def _result(self) -> RunReport:
        from prefect_raybatch.flow.tasks import with_blocks
        from prefect_raybatch.ledger.ledger import Ledger
        from prefect_raybatch.runs.finalize_run import load_report
        from prefect_raybatch.runs.run import run_store

        store = run_store(with_blocks(self.job).output, self.run_key)
        if Ledger(store).finished() is None:
            raise IncompleteRun(f"{store.uri} is not finished; wait for its completion first")
        return load_report(store)


def _logger() -> Any:
    with suppress(MissingContextError):
        return get_run_logger()
    return get_logger("prefect_raybatch")
