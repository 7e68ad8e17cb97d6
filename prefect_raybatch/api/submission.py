"""Runs inference where the job asks for it: here, or on a cluster that receives the job.

A cluster receives the job without secrets (`sendable`), in a record of the run directory. There
`recorded_job` proves that the record holds the plan's job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefect_raybatch.api import infer_run
from prefect_raybatch.compile.job import model_request, planned_job, public_job
from prefect_raybatch.compile.resolved import LOOKED_UP, answer_fields, shown_parts
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import with_answer_schema, with_template_text
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.ray_cluster import check_made_cluster
from prefect_raybatch.job.secrets import (
    SAFE_NAMES,
    hide_argument,
    hide_catalog,
    hide_env,
    hide_options,
    masked,
)
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.layout import job_path
from prefect_raybatch.ledger.many_uris import bounded_parts
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.ledger.same_job import differing
from prefect_raybatch.remote.follower import Owner, Submission
from prefect_raybatch.remote.places import infer_remotely
from prefect_raybatch.remote.records import Record
from prefect_raybatch.runs.run import Run

OUTPUT_ENV = "RAYBATCH_OUTPUT"  # store options for the run directory, without secrets


def infer_in_place(
    job: BatchJob,
    loaded: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    owner: Owner | None = None,
) -> Progress:
    """Run `infer_run` here or, if the job names a job server or Kubernetes, as a Ray job.

    `loaded` is the job with the credentials of its blocks. Raises what `infer_run` and
    `infer_remotely` do, and `ConfigError` for secrets that would be exposed.
    """
    check_run_place(run.uri)
    check_trust(loaded)
    if not loaded.cluster.access.remote:
        return infer_run(loaded, run, observe)
    check_made_cluster(loaded.cluster.access, loaded.engine)
    owner = owner or Owner()
    return infer_remotely(submission_of(job, loaded, owner.api), run, observe, owner)


# --- sent to a cluster --------------------------------------------------------------------------


def submission_of(job: BatchJob, loaded: BatchJob, api: str = "") -> Submission:
    """Return the job as it is sent to a cluster.

    `loaded` is the same job with its blocks loaded: it gives the access to cluster and run
    directory. `api` is the URL of Prefect's API. Raises `ConfigError` like `sendable` and
    `environment`.
    """
    return Submission(
        name=job.name,
        job=sendable(job),
        env=environment(job, api),
        stop_on_crash=job.cluster.on_crash == "stop",
        access=loaded.cluster.access,
        options=loaded.output.options,
    )


def sendable(job: BatchJob) -> dict[str, Any]:
    """Return the job as it may be recorded and sent to a cluster.

    Raises `ConfigError` for a field that may contain a secret, because Ray's job server shows it to
    everybody who can open its dashboard.
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
    """Add the environment of an engine to its plain values; refuse what may be a secret."""
    _refuse(f"{group}.env", hide_env(engine.env), f"Set it {nodes}")
    if engine.env:
        value["env"] = dict(engine.env)
    arguments = model_request(engine).given
    hidden = {name: hide_argument(item, name) for name, item in arguments.items()}
    _refuse(group, hidden, f"Set HF_TOKEN or a similar variable {nodes}")


def _refuse(where: str, shown: Mapping[str, Any], remedy: str) -> None:
    field = next(masked(shown, where), None)
    if field is not None:
        raise ConfigError(
            f"{field} may be a secret, which Ray's dashboard at cluster.job_server would show. "
            f"{remedy}. If it is not a secret, add its name to {SAFE_NAMES} in the flow's "
            "environment"
        )


def environment(job: BatchJob, api: str) -> dict[str, str]:
    """Return the environment variables of the Ray job, without secrets.

    `api` is the URL of Prefect's API. Raises `ConfigError` if the job names blocks and the cluster
    cannot reach the API.
    """
    block = job.output.credentials_block
    output = {"options": job.output.options, "credentials_block": block}
    env = {OUTPUT_ENV: json.dumps(output)}
    if block or job.source.credentials_block:
        if not api or "@" in api.split("/api", 1)[0]:
            raise ConfigError(
                "credentials_block with cluster.job_server: the cluster loads the block, so set "
                "PREFECT_API_URL to an API that it can reach, without a password in the URL. Set "
                "PREFECT_API_KEY in the nodes' environment"
            )
        env["PREFECT_API_URL"] = api
    return env


# --- received on a cluster ----------------------------------------------------------------------


def job_of_output(uri: str, given: Mapping[str, Any]) -> BatchJob:
    """Return a job with only the access to the run directory, which contains the real job.

    `given` are the fields of `OUTPUT_ENV`.
    """
    return BatchJob.from_dict(
        {
            "name": "remote",
            "source": {"uri": uri},
            "prompt": {"template": "-"},
            "output": {"uri": uri, **given},
        },
        OUTPUT_ENV,
    )


def recorded_job(record: Record, plan: Plan) -> BatchJob:
    """Return the job of a record; raise `CorruptRun` if it is not the plan's."""
    job = BatchJob.from_dict(record.job, f"job {record.number}")
    check_recorded_job(job, record.accepted_fields, plan, job_path(record.number))
    return job


def check_recorded_job(job: BatchJob, accepted: Iterable[Accepted], plan: Plan, where: str) -> None:
    """Raise `CorruptRun` if a job from the run directory differs from the plan.

    Accepted fields, and fields that do not change answers, may differ.
    """
    kept = planned_job(plan)
    planned = {name: part for name, part in plan.parts.items() if name not in LOOKED_UP}
    if "retry" in plan.parts:  # its rows come from the parent's quarantine
        fields = answer_fields(kept)
        planned |= {name: part for name, part in fields.items() if name.startswith("source.")}
    fields = shown_parts(answer_fields(_with_planned_texts(job, plan)))
    recorded = json.loads(dump(bounded_parts(fields)))
    for parts, engine in ((planned, kept.engine), (recorded, job.engine)):
        parts["engine.adapters"] = {"": engine.adapter, **engine.adapters}
        # The file may have moved: `planned_classifier` checks its content.
        parts["engine.classifier"] = engine.classifier is not None
    names = {one.field for one in accepted}
    differences = [
        f"{name}: {before} -> {after}"
        for name, (before, after) in differing(planned, recorded).items()
        if not any(f"{name}.".startswith(f"{field}.") for field in names)
    ]
    if differences:
        raise CorruptRun(
            f"{where} contains a job that differs from the plan, so it was not started:\n  "
            + "\n  ".join(differences)
            + "\nNo flow writes such a record. Check who can write to the run directory, then run "
            "the same command again to submit a new job"
        )


def _with_planned_texts(job: BatchJob, plan: Plan) -> BatchJob:
    """Return the job with the chat template and the schema from the plan.

    The files that the job names may not exist on this machine.
    """
    template = plan.parts.get("prompt.chat_template")
    if job.prompt.chat_template is not None and isinstance(template, str):
        job = with_template_text(job, template)
    # A schema class named in the job is not imported, because the policy was not checked for it.
    return with_answer_schema(job, plan.parts.get("output.schema_model") or "{}")
