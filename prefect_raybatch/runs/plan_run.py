"""Makes a run's plan, or adopts the one that is there; what a job is checked for before."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.same_job import check_same
from prefect_raybatch.model import check as model_check
from prefect_raybatch.model import pinned as models
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.plan.fingerprint import fingerprint
from prefect_raybatch.runs.run import Run, model_identity, run_of, run_store
from prefect_raybatch.storage import Store, is_remote, join

if TYPE_CHECKING:
    import ray.data

log = logging.getLogger(__name__)


def plan_run(
    job: BatchJob, run_key: str, dataset: ray.data.Dataset | None = None, probe: bool = True
) -> Run:
    """Makes the run's plan, or adopts the one that is there; returns the run.

    `dataset` takes the place of the job's source files. Raises `ConfigError`, `SourceError`,
    `PlanMismatch` or `UnsafeStore`; nothing of it is worth a retry but a store that is away.
    """
    check_places(job)
    check_trust(job)
    store = run_store(job, run_key)
    ledger = Ledger(store)
    model = model_identity(job)
    plan = ledger.load_plan()
    if plan is not None:
        _check_same(plan, job, model, store.uri)
        return run_of(store, plan, ledger)
    ledger.finished()  # one without a plan is another's, and would be found at the end only
    if probe:
        store.probe()
    fingerprint(job, model)  # imports the user's functions: a wrong name fails here
    check_schema_names(job)
    plan = _new_plan(job, run_key, ledger, model, dataset)
    return run_of(store, plan, ledger)


def precheck(job: BatchJob, store: Store) -> None:
    """What can be told about a job within a second: a wrong one fails before anything starts.

    Looks at the plan of the run directory where there is one, else at a sample of the input.
    """
    from prefect_raybatch import source
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.reach import check_reachable

    check_places(job)
    check_trust(job)
    check_schema_names(job)
    model = model_identity(job)
    fingerprint(job, model)
    if job.cluster.job_server is None and (address := cluster.address_of(job)):
        check_reachable(address)
    plan = Ledger(store).load_plan()
    if plan is not None:
        _check_same(plan, job, model, store.uri)
        return
    if model is not None:
        model_check.check(job, model)
    if source.needs_snapshot(job.source):
        planning.check_against_schema(job, source.peek(job.source).schema)
    else:  # the first file with rows is enough here; the plan reads every footer
        first = job.source.model_copy(update={"limit": 1})
        planning.check_against_schema(job, source.inventory(first).schema)


def check_places(job: BatchJob) -> None:
    """Raises `ConfigError` where the output would lie in the input, or in a file."""
    from prefect_raybatch.source import reaches

    for uri in job.source.uris:
        if reaches(uri, job.output.uri):
            raise ConfigError(
                f"output.uri: {job.output.uri!r} lies inside the input {uri!r}; the next night "
                "would read its own results. Choose another folder"
            )
    if not is_remote(job.output.uri):
        path = join(job.output.uri)
        taken = [str(p) for p in (Path(path), *Path(path).parents) if p.exists() and not p.is_dir()]
        if taken:
            raise ConfigError(
                f"output.uri: {taken[-1]} is a file, so nothing can be written below it; name a "
                "folder"
            )


def check_schema_names(job: BatchJob) -> None:
    """Raises `ConfigError` for a type in output.schema that Arrow does not know."""
    if job.output.output_schema:
        from prefect_raybatch.stages.finish import declared

        try:
            declared(job.output.output_schema)
        except ValueError as error:
            raise ConfigError(f"output.schema: {error}") from None


def _check_same(plan: Plan, job: BatchJob, model: dict[str, Any] | None, where: str) -> None:
    """`PlanMismatch` unless the plan is this job's. The input of a run that retries failed rows
    is what it took, whatever the job reads."""
    check_same(plan, *fingerprint(job, model, plan.parts.get("retry")), where)


def _new_plan(
    job: BatchJob, run_key: str, ledger: Ledger, model: dict[str, Any] | None, dataset: Any
) -> Plan:
    from prefect_raybatch import source

    pinned = models.resolve(job.engine)
    model_check.check(job, pinned)
    attempt = uuid.uuid4().hex
    copied = dataset is not None or source.needs_snapshot(job.source)
    if dataset is not None:
        found = source.snapshot_dataset(
            dataset, ledger.store, attempt, job.source.limit, job.source.columns
        )
    elif copied:
        found = source.snapshot(job.source, ledger.store, attempt)
    else:
        found = source.inventory(job.source)
    planning.check_against_schema(job, found.schema)
    context = None
    if job.engine.max_model_len == "auto":
        tokens = counting.of_files(job, pinned, found, ledger.store if copied else None)
        log.info("engine.max_model_len auto: %d (%s)", tokens.max_model_len, tokens.why)
        for note in tokens.notes:
            log.warning("%s", note)
        context = tokens.context()
    plan, tables = planning.make_plan(
        job,
        run_key,
        found.files,
        found.schema,
        found.row_bytes,
        {**pinned, **({"identity": model["identity"]} if model else {})},
        snapshot=copied,
        engines=sized.expected_engines(job),
        context=context,
    )
    return ledger.create_plan(plan, tables)
