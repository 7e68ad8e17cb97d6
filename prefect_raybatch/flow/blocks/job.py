"""The block that contains a job and runs it."""

from __future__ import annotations

import asyncio
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
from prefect_raybatch.flow.blocks.store import ObjectStore, reference
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.group import field
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.storage import is_remote

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

ENTRYPOINT = "prefect_raybatch.flow.batch_inference"
STOP_GRACE = 30.0  # seconds a stopped run has for ending its engines
PROCESS_LOOK = 0.5  # seconds between two looks at the process


class BatchInferenceJob(JobBlock[RunReport]):
    """A batch inference job that flows can trigger.

    A trigger starts a flow run of `batch_inference` in a separate process. Keys are not parameters
    of the flow run: it receives the names of the blocks that contain them.

    Attributes:
        job: The job to run.
        job_file: Path of a YAML job file, in place of the job.
        cluster: Ray cluster to run on, in place of the cluster that the job names.
        store: Keys for s3:// input and output, if the job names no credentials block.

    Example:
        Run a saved job and wait for its report:
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

    job: BatchJob | None = field(
        None,
        title="Job",
        text="The job to run: what to read, what to ask and where to write. Leave it "
        "empty if you set a job file.",
    )
    job_file: str | None = field(
        None,
        title="Job file",
        text="Path of a YAML job file, in place of the job. It is read at each trigger.",
    )
    cluster: RayCluster | None = field(
        None,
        title="Ray cluster",
        text="Ray cluster to run on. It replaces the cluster that the job names.",
    )
    store: ObjectStore | None = field(
        None,
        title="Object store",
        text="Keys for s3:// input and output, if the job names no credentials block.",
    )

    @model_validator(mode="after")
    def _one_job(self) -> BatchInferenceJob:
        if (self.job is None) == (not self.job_file):
            raise ValueError("set exactly one of job and job_file")
        return self

    def batch_job(self) -> BatchJob:
        """Return the job that a trigger runs.

        It is the job, or the contents of the job file, with the block's `cluster` in place of its
        own. Remote inputs and outputs without a credentials block get the name of the saved block
        `store`. Raises `ConfigError` for a missing or invalid job file, for an unsaved store, and
        for an unsaved cluster with a token or headers.
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
        """Start a flow run and return immediately; see `trigger`."""
        return await asyncio.to_thread(self._start, run_key)

    @async_dispatch(atrigger)
    def trigger(  # type: ignore[override]
        self, run_key: str | None = None
    ) -> BatchInferenceRun:
        """Start a flow run in a separate process and return immediately. Awaitable in async code.

        `run_key` resumes an unfinished run or returns a finished one. Without it, the key is
        derived from the scheduled start of the triggering flow run, as in `batch_inference`. Raises
        `ConfigError` for an invalid job.
        """
        return self._start(run_key)

    def _start(self, run_key: str | None) -> BatchInferenceRun:
        from prefect_raybatch.api import resolve_run
        from prefect_raybatch.flow.flows import batch_inference
        from prefect_raybatch.flow.schedule import scheduled_start
        from prefect_raybatch.flow.tasks import with_blocks

        job = self.batch_job()
        key = run_key or resolve_run(with_blocks(job), None, scheduled_start())[1]
        parameters: dict[str, Any] = {"job": job, "run_key": check_run_key(key)}
        with get_client(sync_client=True) as client:
            made = client.create_flow_run(batch_inference, parameters=parameters, state=Pending())
        # A separate process can be cancelled and killed without harm to the triggering one.
        # Prefect's engine starts it, so that nothing is pickled and no script runs again.
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect.engine", str(made.id)],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
        )
        _logger().info("%s: started flow run %s for run key %s", job.name, made.name, key)
        return BatchInferenceRun(job, key, made.id, process)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process that runs the triggered flow run.

        They are those of this process, with the current Prefect settings, and without the variables
        that identify the present flow run.
        """
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT__")}
        return {**ours, **settings, "PREFECT__FLOW_ENTRYPOINT": ENTRYPOINT}


class BatchInferenceRun(JobRun[RunReport]):
    """A triggered job: `flow_run_id` is its flow run, and `run_key` names its run directory."""

    def __init__(
        self, job: BatchJob, run_key: str, flow_run_id: UUID, process: subprocess.Popen[bytes]
    ):
        self.job, self.run_key, self.flow_run_id = job, run_key, flow_run_id
        self._process = process

    def __repr__(self) -> str:
        return f"BatchInferenceRun({self.job.name!r}, {self.run_key!r}, {self.flow_run_id})"

    async def await_for_completion(self) -> None:
        """Wait until the flow run has ended; see `wait_for_completion`."""
        try:
            while self._process.poll() is None:
                await asyncio.sleep(PROCESS_LOOK)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        await asyncio.to_thread(self._check)

    @async_dispatch(await_for_completion)
    def wait_for_completion(self) -> None:  # type: ignore[override]
        """Wait until the flow run has ended. Awaitable in async code.

        Raises `RayBatchError` with the flow run's message if it did not complete. If the wait is
        interrupted (a cancelled flow run, Ctrl-C), the run stops and keeps its committed shards.
        """
        try:
            self._process.wait()
        except BaseException:
            self.stop()
            raise
        self._check()

    async def afetch_result(self) -> RunReport:
        """Return the report; see `fetch_result`."""
        return await asyncio.to_thread(self._result)

    @async_dispatch(afetch_result)
    def fetch_result(self) -> RunReport:  # type: ignore[override]
        """Return the report of the finished run. Awaitable in async code.

        Raises `IncompleteRun` if the run is not finished.
        """
        return self._result()

    def stop(self) -> None:
        """Stop the flow run and its engines. Committed shards are kept."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check(self) -> None:
        run = self._flow_run()
        if run.state is not None and run.state.is_completed():
            return
        state = f"{run.state_name}: {run.state.message}" if run.state else "no state"
        raise RayBatchError(
            f"flow run {run.name} of run key {self.run_key} did not complete ({state})"
        )

    def _flow_run(self) -> FlowRun:
        """Read the flow run from the API, waiting briefly for its final state."""
        with get_client(sync_client=True) as client:
            for _ in range(10):
                run = client.read_flow_run(self.flow_run_id)
                if run.state is not None and run.state.is_final():
                    break
                time.sleep(PROCESS_LOOK)
            return run

    def _result(self) -> RunReport:
        from prefect_raybatch.flow.tasks import with_blocks
        from prefect_raybatch.ledger.forks import follow_forks
        from prefect_raybatch.ledger.ledger import Ledger
        from prefect_raybatch.runs.finalize_run import load_report
        from prefect_raybatch.runs.run import run_store

        store = run_store(with_blocks(self.job).output, self.run_key)
        ledger = Ledger(store)
        plan = ledger.load_plan()
        if plan is not None:
            ledger, plan = follow_forks(ledger, plan)
        if ledger.finished(plan) is None:
            raise IncompleteRun(
                f"the run {ledger.store.uri} is not finished; call wait_for_completion first"
            )
        return load_report(ledger.store)


def _logger() -> Any:
    with suppress(MissingContextError):
        return get_run_logger()
    return get_logger("prefect_raybatch")
