"""Sends a job to a cluster that receives jobs (a Ray job server), and follows it there.

The job is sent without secrets (`sendable`): it is written to a record in the run directory, which
the cluster reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from prefect_raybatch.compile.job import model_request, public_job
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import judging_job, with_endpoint_of
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.job.ray_cluster import check_made_cluster
from prefect_raybatch.job.secrets import (
    SAFE_NAMES,
    hide_argument,
    hide_catalog,
    hide_endpoint,
    hide_env,
    hide_options,
    masked,
)
from prefect_raybatch.remote.follower import Owner, Submission
from prefect_raybatch.remote.places import infer_remotely
from prefect_raybatch.runs.run import Run

OUTPUT_ENV = "RAYBATCH_OUTPUT"  # store options for the run directory, without secrets


def infer_on_cluster(
    job: BatchJob,
    loaded: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    owner: Owner | None = None,
    cluster_of: Run | None = None,
) -> Progress:
    """Run inference as a Ray job on the job's cluster; return the progress at the end.

    `loaded` is `job` with the credentials of its blocks. On Kubernetes, the run uses the cluster
    that was created for the run `cluster_of`, by default one for `run` itself. Raises the errors of
    `infer_remotely`, and `ConfigError` for secrets that would be exposed.
    """
    check_made_cluster(loaded.cluster.access, loaded.engine, loaded.output.escalate.engine)
    _check_judge_sendable(job)
    owner = owner or Owner()
    submission = submission_of(job, loaded, owner.api)
    return infer_remotely(submission, run, observe, owner, cluster_of)


def submission_of(job: BatchJob, loaded: BatchJob, api: str = "") -> Submission:
    """Return the job as it is sent to a cluster.

    `loaded` is the same job with what its blocks hold: the hosted model's address and limits, and
    credentials to reach the cluster and the run directory. `api` is the URL of Prefect's API, by
    default PREFECT_API_URL. Raises `ConfigError` like `sendable` and `environment`.
    """
    if job.engine.endpoint.block is not None:  # its fields are in the plan; its key is not sent
        job = with_endpoint_of(job, loaded)
    return Submission(
        name=job.name,
        job=sendable(job),
        env=environment(job, api),
        stop_on_crash=job.cluster.on_crash == "stop",
        access=loaded.cluster.access,
        options=loaded.output.options,
        has_successor=loaded.quality.judge.model is not None,
    )


def _check_judge_sendable(job: BatchJob) -> None:
    """Raise `ConfigError` if the judge's job may contain a secret, before any row is answered."""
    if job.quality.judge.model is None:
        return
    try:
        sendable(judging_job(job, job.output.uri, job.output.uri))
    except ConfigError as error:
        raise ConfigError(judge_fields(str(error))) from None


def sendable(job: BatchJob) -> dict[str, Any]:
    """Return the fields of the job that are recorded and sent to a cluster.

    Raises `ConfigError` for a field that may contain a secret, because Ray's job server shows the
    fields to everybody who can open its dashboard.
    """
    value = public_job(job)
    value.get("cluster", {}).pop("kubernetes", None)  # not used on the cluster
    for group, options in (("source", job.source.options), ("output", job.output.options)):
        _refuse(
            f"{group}.options",
            hide_options(options),
            f"Name a Prefect block in {group}.credentials_block, or give the cluster's nodes a "
            "role or environment variables",
        )
        if options:
            value.setdefault(group, {})["options"] = dict(options)
    nodes = "in the environment of the cluster's nodes"
    if job.source.catalog:
        shown = hide_catalog(job.source.catalog)
        _refuse("source.catalog", shown, f"Write ${{NAME}} there, and set the variable {nodes}")
        value["source"]["catalog"] = dict(job.source.catalog)
    _send_engine(job.engine, value.setdefault("engine", {}), "engine", nodes)
    if (larger := job.output.escalate.engine) is not None:
        group = value["output"]["escalate"]["to"]
        _send_engine(larger, group, "output.escalate.to", nodes)
    return value


def _send_engine(engine: Engine, value: dict[str, Any], group: str, nodes: str) -> None:
    """Add an engine's environment variables, and the ${NAME} of a hosted model's key.

    They are added to `value`, the fields of the engine that are sent to the cluster. Raises
    `ConfigError` if a value in `engine.env`, an engine argument or the key itself may be a secret.
    The message names the field, which is below `group` (`engine`, `output.escalate.to`). It also
    says where to set the value instead: `nodes`, e.g. "in the environment of the cluster's nodes".
    """
    shown = {"url": hide_endpoint(engine.endpoint.url)}
    _refuse(f"{group}.endpoint", shown, "Use a server that takes its key from endpoint.key")
    if key := engine.endpoint.key:
        shown = hide_catalog({"key": key})
        _refuse(f"{group}.endpoint", shown, f"Write ${{NAME}} there, and set the variable {nodes}")
        value["endpoint"]["key"] = key
    _refuse(f"{group}.env", hide_env(engine.env), f"Set it {nodes}")
    if engine.env:
        value["env"] = dict(engine.env)
    arguments = model_request(engine).vllm_arguments
    hidden = {name: hide_argument(item, name) for name, item in arguments.items()}
    _refuse(group, hidden, f"Set HF_TOKEN or a similar variable {nodes}")


def _refuse(where: str, shown: Mapping[str, Any], remedy: str) -> None:
    field = next(masked(shown, where), None)
    if field is not None:
        raise ConfigError(
            f"{field} may be a secret, which Ray's dashboard at cluster.job_server would show. "
            f"{remedy}. If it is not a secret, add its name (of a URL: that part of the path) to "
            f"{SAFE_NAMES} in the flow's environment"
        )


def environment(job: BatchJob, api: str) -> dict[str, str]:
    """Return the environment variables of the Ray job, without secrets.

    `api` is the URL of Prefect's API; if empty, PREFECT_API_URL is taken. Raises `ConfigError` if
    the cluster must load a block, but the URL is missing or contains a password.
    """
    api = api or os.environ.get("PREFECT_API_URL", "")
    block = job.output.credentials_block
    output = {"options": job.output.options, "credentials_block": block}
    env = {OUTPUT_ENV: json.dumps(output)}
    if names := os.environ.get(SAFE_NAMES):  # so that it hides the same as the plan
        env[SAFE_NAMES] = names
    if field := field_of_block(job):
        if not api or "@" in api.split("/api", 1)[0]:
            raise ConfigError(
                f"{field} with cluster.job_server: the cluster loads the block, so set "
                "PREFECT_API_URL to an API that it can reach, without a password in the URL. Set "
                "PREFECT_API_KEY in the nodes' environment"
            )
        env["PREFECT_API_URL"] = api
    return env


def field_of_block(job: BatchJob) -> str:
    """Return the name of a job field whose Prefect block the Ray job must load; "" if none."""
    blocks = {
        "source.credentials_block": job.source.credentials_block,
        "output.credentials_block": job.output.credentials_block,
        "engine.endpoint.block": job.engine.endpoint.block,
    }
    return next((field for field, block in blocks.items() if block), "")
