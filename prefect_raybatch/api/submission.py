"""Runs inference here, or on the cluster that the job is sent to; checks jobs that were sent.

On such a cluster, `recorded_job` reads the job that was sent and compares it with the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefect_raybatch.api import infer_run
from prefect_raybatch.api.sending import OUTPUT_ENV, infer_on_cluster
from prefect_raybatch.compile.job import planned_job
from prefect_raybatch.compile.resolved import LOOKED_UP, answer_fields, shown_parts
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import with_answer_schema, with_template_text
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.layout import job_path
from prefect_raybatch.ledger.many_uris import bounded_job, bounded_parts
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.ledger.same_job import differing
from prefect_raybatch.remote.follower import Owner
from prefect_raybatch.remote.records import Record
from prefect_raybatch.runs.run import Run


def infer_in_place(
    job: BatchJob,
    loaded: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    owner: Owner | None = None,
) -> Progress:
    """Run `infer_run` here or, if the job names a job server or Kubernetes, as a Ray job there.

    `loaded` is `job` with the credentials of its blocks. Raises the errors of `infer_run` and
    `infer_on_cluster`.
    """
    check_run_place(run.uri)
    check_trust(loaded)
    if not loaded.cluster.access.remote:
        return infer_run(loaded, run, observe)
    return infer_on_cluster(job, loaded, run, observe, owner)


def job_of_output(uri: str, given: Mapping[str, Any]) -> BatchJob:
    """Return a stand-in job for access to the run directory `uri`, before the real job is read.

    `given` are output fields (options, credentials_block) from the variable `OUTPUT_ENV`.
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
    """Return the job of a record; raise `CorruptRun` if it is not the job of the plan."""
    job = BatchJob.from_dict(record.job, f"job {record.number}")
    check_recorded_job(job, record.accepted_fields, plan, job_path(record.number))
    return job


def check_recorded_job(job: BatchJob, accepted: Iterable[Accepted], plan: Plan, where: str) -> None:
    """Raise `CorruptRun` if a job from the file `where` in the run directory differs from the plan.

    Accepted fields, and fields that do not change answers, may differ.
    """
    kept = planned_job(plan)
    planned = {name: part for name, part in plan.parts.items() if name not in LOOKED_UP}
    if "retry" in plan.parts:  # its rows come from the parent's quarantine
        fields = answer_fields(kept)
        planned |= {name: part for name, part in fields.items() if name.startswith("source.")}
    fields = shown_parts(answer_fields(_with_planned_texts(job, plan)))
    recorded = json.loads(dump(bounded_parts(fields)))
    for parts, one in ((planned, kept), (recorded, job)):
        engine = one.engine
        parts["engine.adapters"] = {"": engine.adapter, **engine.adapters}
        # Both jobs lack the hidden parts of URLs, and the plan's shows the first of many.
        parts["source.uri"] = bounded_job({"source": {"uri": one.source.uris}})["source"]["uri"]
        # The file may have moved: the run reads the copy that its plan keeps.
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
    """Return the job with chat template and answer schema replaced by those in the plan.

    So the files that the job names need not exist on this machine.
    """
    template = plan.parts.get("prompt.chat_template")
    if job.prompt.chat_template is not None and isinstance(template, str):
        job = with_template_text(job, template)
    # A schema class named in the job is not imported, because the policy was not checked for it.
    return with_answer_schema(job, plan.parts.get("output.schema_model") or "{}")
