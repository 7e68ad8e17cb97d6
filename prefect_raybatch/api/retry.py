"""Retries the failed rows of a finished run: makes the job of the child run, and plans that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.compile.job import compile_job, planned_job, public_job
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, planned_run_date, render_targets
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.limits import FAILED_LIMITS
from prefect_raybatch.job.secrets import hide_path
from prefect_raybatch.job.trusted_places import check_store_options
from prefect_raybatch.ledger.family import Family, Member, locate_run
from prefect_raybatch.ledger.forks import original_key
from prefect_raybatch.ledger.layout import QUARANTINE_FOLDER
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.runs.later_servers import check_later_servers
from prefect_raybatch.runs.plan_run import check_schema_names
from prefect_raybatch.runs.retry import (
    NothingToRetry,
    check_classes,
    check_not_repaired,
    copy_output_types,
    new_child,
    operator_fields,
    require_all_retried,
    retried_run,
    unfinished_retry,
)
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.storage import open_store

Keys = Callable[[BatchJob], BatchJob]  # puts keys from credentials blocks into store options
FIXED_BY_PARENT = "the rows come from the run's quarantine, and the retry is written beside the run"


@dataclass(frozen=True)
class Retry:
    """A planned child run: `infer_run` and `finalize_run` take its `job` and `run`.

    `parent` is the key of the run whose failed rows it retries.
    """

    job: BatchJob
    run: Run
    parent: str


@dataclass(frozen=True)
class RetryRequest:
    """A checked request for a retry, which `begin` carries out.

    `parent` is the run whose failed rows are retried, `family` the original run and all its
    retries. `job` is the job of the child run without the credentials of its blocks; `resolved` is
    that job with them. `going` is the unfinished retry to resume (None: make a new one).
    `selection` says which rows to retry: "parent" is the key of the parent, and "errors" is the
    error classes (None: all classes). `limited`: the caller set its own limit on failed rows.
    """

    family: Family
    parent: Member
    job: BatchJob
    resolved: Resolved
    selection: Mapping[str, Any]
    going: Member | None
    limited: bool


def plan_retry(
    run_dir: str,
    errors: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    job: BatchJob | None = None,
    keys: Keys = lambda job: job,
) -> Retry | NothingToRetry:
    """Plan the child run that retries failed rows of `run_dir`, or resume it.

    Retries rows that failed with one of the error classes `errors`. By default, retries all failed
    rows that no other child has taken. The child's job is `job`, or that of the run's plan, with
    the fields in `overrides` ({"sampling.max_tokens": 99}) replaced. Without `job`, the fields of
    `FROM_OPERATOR` (targets, servers) come only from `overrides`. `keys` adds to a job the
    credentials of the blocks that it names.

    Any number of the child's rows may fail, because they already count against the limit of the
    run. But a limit in `overrides` applies, and so does a limit in `job` that differs from the
    run's. Raises the errors of `retry_request` and `begin`.
    """
    asked = retry_request(run_dir, errors, overrides, job, keys)
    return asked if isinstance(asked, NothingToRetry) else begin(asked)


def begin(request: RetryRequest) -> Retry | NothingToRetry:
    """Create the child run of a request, or resume it; return it with its job.

    Returns `NothingToRetry` if other retries have taken and answered all rows meanwhile. Raises
    `PlanMismatch` if another retry of these rows began at the same moment. If the larger model of a
    cascade is hosted, raises `EndpointRefused` if its server refuses the request or lacks the
    model.
    """
    if request.going is not None:
        ledger, plan = request.going.ledger, request.going.plan
    else:
        check_later_servers(request.resolved, is_judged=False)
        created = new_child(request.family, request.parent, request.resolved, request.selection)
        if isinstance(created, NothingToRetry):
            return created
        ledger, plan = created
    copy_output_types(request.parent, request.resolved.job.output, ledger)
    run = run_of(ledger.store, plan, ledger, probed=request.going is None)
    job = request.job
    if not request.limited:
        unlimited = {f"limits.{name}": None for name in FAILED_LIMITS}
        job = edited(job, {**unlimited, "limits.max_failed_rows": plan.rows}, "the retry's job")
    return Retry(job, run, request.parent.key)


def retry_request(
    run_dir: str,
    errors: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    job: BatchJob | None = None,
    keys: Keys = lambda job: job,
) -> RetryRequest | NothingToRetry:
    """Check whether failed rows of a run can be retried; return the request for `begin`.

    Reads only records of the run, and writes nothing. For the arguments see `plan_retry`. Returns
    `NothingToRetry` if no row failed, or if other retries took and answered all of them. Raises
    `ConfigError` if

    - the run is unfinished or was repaired,
    - the job is invalid,
    - a class in `errors` is that of no failed row, or
    - another retry has taken rows and not yet answered or published them.

    Raises `CorruptRun` if runs related to this one are unreadable.
    """
    overrides = dict(overrides or {})
    root, key = locate_run(run_dir, _options(run_dir, overrides, job, keys))
    family, parent = retried_run(root, key)
    selection = {"parent": key, "errors": sorted(set(errors)) if errors else None}
    if not parent.failed:
        where = parent.ledger.store.uri
        return NothingToRetry(where, f"no row of {key} failed, so there is nothing to retry")
    if errors:
        check_classes(parent, errors)
    is_retried = family.is_fully_retried(parent)
    if job is None and not is_retried:  # before Prefect blocks that the plan names are loaded
        _check_operators(parent, overrides)
    child = _job(parent, root.uri, overrides, job)
    resolved = resolve(keys(child), selection)
    going = unfinished_retry(family, key, resolved.identity.fingerprint)
    if going is None and is_retried:
        return require_all_retried(family, parent, family.children(key))
    if going is None:
        check_not_repaired(parent)
    if job is None:
        _check_operators(parent, overrides)
    check_schema_names(resolved.job.output.output_schema)
    schema = decode_schema(parent.plan.input_schema)
    spec = compile_job(resolved.job, schema.names)
    planning.check_against_schema(spec, schema, judge=None)  # retried rows are not judged
    check_targets_of(spec, schema, family.next_key, later=True)
    limited = _limits_failed_rows(parent, overrides, job)
    return RetryRequest(family, parent, child, resolved, selection, going, limited)


def _limits_failed_rows(parent: Member, overrides: Mapping[str, Any], job: BatchJob | None) -> bool:
    """Return whether `overrides` or `job` sets another limit on failed rows than the run has."""
    if {"limits", *(f"limits.{name}" for name in FAILED_LIMITS)} & set(overrides):
        return True
    if job is None:
        return False
    ours, runs = job.effective_limits, planned_job(parent.plan).effective_limits
    return any(getattr(ours, name) != getattr(runs, name) for name in FAILED_LIMITS)


def planned_targets(
    run_dir: str, overrides: Mapping[str, Any], keys: Keys = lambda job: job
) -> list[dict[str, Any]]:
    """Return the publish targets in the plan of a run, for a user who has reviewed them.

    `overrides` and `keys` (as for `plan_retry`) give access to the store.
    """
    store = open_store(run_dir, _options(run_dir, overrides, None, keys))
    return list(need_plan(Ledger(store)).job.get("output", {}).get("publish", ()))


def _check_operators(parent: Member, overrides: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the parent's plan has targets or servers not set in `overrides`.

    Others may write to a run directory, so its plan must not decide where rows and credentials are
    sent. The caller has to confirm each of these job fields: `overrides` must have the field, or a
    group that contains it.
    """
    lines = [
        f"  {field}: {hide_path(value)}"
        for field, value in operator_fields(parent.plan).items()
        if not any(f"{field}.".startswith(f"{name}.") for name in overrides)
    ]
    if lines:
        raise ConfigError(
            f"{parent.ledger.store.uri}: name the job with --job JOB. A run directory does not "
            "decide where rows and credentials are sent, and this one names:\n"
            + "\n".join(lines)
            + "\nTo use these, check each and pass it with --set FIELD=VALUE; targets also with "
            "--targets-from-plan"
        )


def _options(
    run_dir: str, overrides: Mapping[str, Any], job: BatchJob | None, keys: Keys
) -> dict[str, Any] | None:
    """Return the store options for access to the run; None if there are none.

    They come from `overrides` or `job`, with the credentials that `keys` adds. The job in the run's
    plan cannot be used: it is not read yet, and holds no credentials.
    """
    value = job.to_dict().get("output", {}) if job is not None else {}
    given = {name: v for name, v in overrides.items() if name.partition(".")[0] == "output"}
    output = with_fields({"output": value}, given)["output"]
    if not isinstance(output, dict):
        raise ConfigError(f"output: {output!r} must be a mapping of fields")
    reach = {name: output[name] for name in ("options", "credentials_block") if name in output}
    stub = {"name": "retry", "source": {"uri": "-"}, "prompt": {"template": "-"}}
    whole = BatchJob.from_dict({**stub, "output": {**reach, "uri": run_dir}}, "the job's output")
    options = keys(whole).output.options
    check_store_options("output.options", options)
    return options or None


def _job(parent: Member, root: str, overrides: Mapping[str, Any], job: BatchJob | None) -> BatchJob:
    """Return the job of a child run of `parent`: its input is the quarantine of `parent`.

    `root` is the folder of all runs, where the child is written. The job is `job`, or that of the
    parent's plan, with `overrides`. Store options come only from the caller: a plan holds none, and
    one that somebody wrote into it must not decide where this machine's credentials are sent.
    """
    for name in overrides:
        if name in ("source", "output", "output.uri") or (
            name.startswith("source.") and name != "source.rows_per_shard"
        ):
            raise ConfigError(f"{name} cannot be set for a retry: {FIXED_BY_PARENT}")
    where = f"the job of {parent.key}" if job is None else "the job given"
    if job is None:
        value = public_job(BatchJob.from_dict(parent.plan.job, where))
    else:
        value = job.to_dict()
    edited_job = BatchJob.from_dict(with_fields(value, overrides), where)
    source = {
        "uri": f"{parent.ledger.store.uri}/{QUARANTINE_FOLDER}",
        "format": "parquet",
        "rows_per_shard": edited_job.source.rows_per_shard,
    }
    changed = edited_job.to_dict() | {"source": source}
    # The limits of a batch file follow from its format, which the quarantine does not have.
    failed = edited_job.effective_limits.model_dump(include=set(FAILED_LIMITS), exclude_none=True)
    changed["limits"] = {**changed.get("limits", {}), **failed}
    changed["output"] = {**changed["output"], "uri": root}
    when = planned_run_date(edited_job, planned_job(parent.plan), original_key(parent.plan))
    return render_targets(BatchJob.from_dict(changed, where), parent.key, when)
