"""Changes fields of a job, or fills in its placeholders, before it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import answer_schema
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.endpoint import ModelEndpoint
from prefect_raybatch.job.engine import PRECISION_FIELDS, TRY_FP8, precision_tries
from prefect_raybatch.job.escalate import first_changes, larger_changes
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.judge import judge_fields, judge_job, local_cluster
from prefect_raybatch.job.openai_batch import without_batch_fields
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.placeholders import (
    date_of_key,
    dates_in,
    day_of_run,
    placeholders_in,
    render_text,
    today,
)
from prefect_raybatch.job.secrets import hide_endpoint

# The least of a valid job, for questions that are not about a user's job.
ANY_JOB: dict[str, Any] = {
    "name": "any",
    "source": {"uri": "-"},
    "prompt": {"template": "-"},
    "output": {"uri": "-"},
}


def edited(job: BatchJob, changes: Mapping[str, object], where: str) -> BatchJob:
    """Return the job with the fields in `changes` replaced, e.g. {"source.limit": 5}; validated.

    `where` names the job in messages. Cluster settings that were loaded from a Prefect block are
    kept unless the changed job names another block. Raises `ConfigError` for an unknown field, and
    if the changed job is invalid.
    """
    if not changes:
        return job
    value = without_batch_fields(dict(job), job.to_dict())
    made = BatchJob.from_dict(with_fields(value, changes), where)
    access = job.cluster.access_if_loaded
    same = made.cluster.block is not None and made.cluster.block == job.cluster.block
    return with_access(made, access) if same and access is not None else made


def job_of_fields(fields: Mapping[str, Any], changes: Mapping[str, object], where: str) -> BatchJob:
    """Build a job from plain `fields`, then apply `changes` with `edited`; return the valid job."""
    return edited(BatchJob.from_dict(fields, where), changes, where)


def first_of(job: BatchJob) -> BatchJob:
    """Return the job of the first model, which answers all rows; `job` must have a cascade."""
    return edited(job, first_changes(job.to_dict()), "the first model of the cascade")


def larger_of(job: BatchJob) -> BatchJob:
    """Return the job of a cascade's larger model; `job` itself if it has no cascade."""
    if job.output.escalate.engine is None:
        return job
    return edited(job, larger_changes(job.to_dict()["output"]), "output.escalate.to")


def judging_job(job: BatchJob, rows: str, runs: str, max_cost: float | None = None) -> BatchJob:
    """Return the job in which the judge of `job` judges the answers in the file `rows`.

    The judge's runs are written to the folder `runs` and cost at most `max_cost` (None: no limit).
    They use the cluster of `job`, with one exception: if that cluster gets its runs as Ray jobs, a
    hosted judge is called from this machine instead.
    """
    value = judge_job(job.to_dict(), job.quality.judge, rows, runs, max_cost)
    access = job.cluster.access_if_loaded
    if job.quality.judge.model or access is None or not access.remote:
        made = BatchJob.from_dict(value, "quality.judge")
        return made if access is None else with_access(made, access)
    here = {**value, "cluster": local_cluster(value["cluster"])}
    return BatchJob.from_dict(here, "quality.judge")


def is_same_job(value: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two jobs (plain values) are equal once validated; False if one is invalid."""
    with suppress(ConfigError):
        return BatchJob.from_dict(value).to_dict() == BatchJob.from_dict(other).to_dict()
    return False


def shown_job(job: object) -> dict[str, Any] | None:
    """Return a job's plain values with secrets masked; None if it is not valid.

    `job` is a `BatchJob`, or a mapping of its plain values.
    """
    if isinstance(job, Mapping):
        with suppress(ConfigError, TypeError, ValueError):
            job = BatchJob.from_dict(job)
    if isinstance(job, BatchJob):
        return job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return None


def with_access(job: BatchJob, access: ClusterAccess) -> BatchJob:
    """Return a copy of the job that reaches its cluster through `access`."""
    return job.model_copy(update={"cluster": job.cluster.with_access(access)})


def with_store_options(
    job: BatchJob, source: Mapping[str, object], output: Mapping[str, object]
) -> BatchJob:
    """Return the job with store options added to its input and output.

    Options that the job itself sets have precedence.
    """
    read, written = job.source, job.output
    return job.model_copy(
        update={
            "source": read.model_copy(update={"options": {**source, **read.options}}),
            "output": written.model_copy(update={"options": {**output, **written.options}}),
        }
    )


def with_endpoint_fields(job: BatchJob, fields: Mapping[str, object]) -> BatchJob:
    """Return the job with the `fields` of its Prefect block added to `engine.endpoint`.

    Fields that the job sets take precedence. Raises `ConfigError` if the job sets another URL than
    the block, because that server would get the block's key.
    """
    made = _endpoint_of_block("engine.endpoint", job.engine.endpoint, fields)
    return job.model_copy(update={"engine": job.engine.model_copy(update={"endpoint": made})})


def with_endpoint_of(job: BatchJob, other: BatchJob) -> BatchJob:
    """Return `job` with `engine.endpoint` of `other`, but keep the key of `job`.

    Both are the same job. In `other`, the Prefect block of the hosted model is loaded already.
    """
    endpoint = other.engine.endpoint.model_copy(update={"key": job.engine.endpoint.key})
    return job.model_copy(update={"engine": job.engine.model_copy(update={"endpoint": endpoint})})


def with_judge_fields(job: BatchJob, fields: Mapping[str, object]) -> BatchJob:
    """Return the job with the `fields` of its Prefect block added to `quality.judge.endpoint`.

    Fields that the job sets take precedence. Raises `ConfigError` if the job sets another URL than
    the block. Also raises `ConfigError` if the judge's job is then invalid, for example if
    limits.max_cost needs prices that neither the job nor the block has.
    """
    quality, judge = job.quality, job.quality.judge
    own = ModelEndpoint.model_validate(judge.endpoint)
    made = _endpoint_of_block("quality.judge.endpoint", own, fields)
    values = {name: value for name, value in made if name in made.model_fields_set}
    judge = judge.model_copy(update={"endpoint": values})
    job = job.model_copy(update={"quality": quality.model_copy(update={"judge": judge})})
    try:
        judging_job(job, "rows.parquet", "runs", job.limits.max_cost)
    except ConfigError as error:
        raise ConfigError(judge_fields(str(error).removeprefix("quality.judge: "))) from None
    return job


def _endpoint_of_block(
    where: str, endpoint: ModelEndpoint, fields: Mapping[str, object]
) -> ModelEndpoint:
    """Return `endpoint` with missing fields filled in from `fields`, those of its Prefect block.

    Raises `ConfigError` if `endpoint` has another URL than the block, because the block's key must
    not be sent to that URL. `where` is the job field that the message names.
    """
    own = {name: value for name, value in endpoint if name in endpoint.model_fields_set}
    own = {name: value for name, value in own.items() if value is not None}
    if own.get("url", fields["url"]) != fields["url"]:
        url = hide_endpoint(fields["url"])
        raise ConfigError(
            f"{where}.url: the block {endpoint.block} is for {url} and its key "
            "goes nowhere else; remove url, or remove block"
        )
    return ModelEndpoint.model_validate({**fields, **own})


def with_answer_schema(job: BatchJob, text: str | None = None) -> BatchJob:
    """Return the job with `output.schema_model` as the text of a JSON Schema; unchanged if not set.

    `text` is the schema; by default it is loaded from the class or file. Raises `ConfigError` if
    that cannot be loaded, or if no engine accepts it.
    """
    if job.output.schema_model is None:
        return job
    if text is None:
        text = answer_schema.schema_text(job.output.schema_model)
    return job.model_copy(update={"output": job.output.model_copy(update={"schema_model": text})})


def with_template_text(job: BatchJob, text: str) -> BatchJob:
    """Return the job with its chat template, which may be a file name, replaced by `text`."""
    return job.model_copy(update={"prompt": job.prompt.model_copy(update={"chat_template": text})})


def with_precision(job: BatchJob, decided: Mapping[str, str]) -> BatchJob:
    """Return the job with its `try-fp8` fields replaced by the engine arguments `decided`.

    If `decided` is {}, these fields are unset. The model is then used in the precision in which it
    is stored.
    """
    if not precision_tries(job.engine):
        return job
    engine = job.engine.model_copy()
    extra = engine.model_extra
    for name in PRECISION_FIELDS:
        if extra is not None and extra.get(name) == TRY_FP8:
            del extra[name]
    if extra is not None:
        extra.update(decided)
    return job.model_copy(update={"engine": engine})


def job_placeholders(job: BatchJob) -> set[str]:
    """Return which of the placeholders run_date and run_key must be filled in before a run.

    A {run_key} in the targets of output.publish does not count: it is filled in when publishing,
    because a retry run has another key.
    """
    return _location_placeholders(job) | ({"run_date"} if targets_are_dated(job.output) else set())


def locations_are_dated(job: BatchJob) -> bool:
    """Return whether {run_date} is used in the job's source or in output.uri."""
    return "run_date" in _location_placeholders(job)


def _location_placeholders(job: BatchJob) -> set[str]:
    return placeholders_in(*job.source.uris, job.source.query, job.source.filter, job.output.uri)


def targets_are_dated(output: Output) -> bool:
    """Return whether {run_date} is used in the `uri` or `table` of a publish target."""
    return bool(_dated_targets(output))


def _dated_targets(output: Output) -> list[str]:
    """Return the `uri` and `table` of publish targets that contain {run_date}."""
    texts = (text for target in output.publish for text in (target.uri, target.table))
    return [text for text in texts if text and "run_date" in placeholders_in(text)]


def render_for_today(job: BatchJob) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in as for a run scheduled today."""
    return render_placeholders(job, f"{job.name}-{today():%Y%m%d}T000000Z")


def render_placeholders(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in; unchanged without placeholders.

    A {run_key} in publish targets is filled in later, when publishing. If `run_date` is None,
    {run_date} is the date in the run key.

    Raises `ConfigError` if the job uses {run_date}, `run_date` is None and the key has no date.
    Also raises it if {run_key} is to be filled in and the key is not valid.
    """
    return render_targets(render_locations(job, run_key, run_date), run_key, run_date)


def render_locations(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in, except in output.publish.

    Arguments and errors are those of `render_placeholders`.
    """
    words = _location_placeholders(job)
    if not words:
        return job
    when = day_of_run(run_key, run_date) if "run_date" in words else None
    key = check_run_key(run_key) if "run_key" in words else run_key
    return _changed(job, lambda text: render_text(text, key, when))


def render_targets(job: BatchJob, run_key: str, run_date: date | None = None) -> BatchJob:
    """Return the job with {run_date} filled in, but only in output.publish.

    Arguments and errors are those of `render_placeholders`.
    """
    if not targets_are_dated(job.output):
        return job
    when = day_of_run(run_key, run_date)
    targets = [
        target.model_copy(
            update={
                "uri": target.uri and render_text(target.uri, None, when),
                "table": target.table and render_text(target.table, None, when),
            }
        )
        for target in job.output.publish
    ]
    output = job.output.model_copy(update={"publish": targets})
    return job.model_copy(update={"output": output})


def planned_run_date(job: BatchJob, planned: BatchJob, run_key: str) -> date | None:
    """Return the date with which {run_date} in `job` gives the locations in `planned`.

    `planned` is the job in the plan of run `run_key`. The run's date may differ from the date in
    its key. Tries the date in the key first, then the dates that the planned locations contain.
    Returns the first date that agrees with all of them. Returns None if no date does, or if no
    location contains a date.

    The plan may lack a publish target in which `job` uses {run_date}. Then locations that contain
    only a part of the date, such as {run_date:%Y-%m}, do not give a date to try. If no tried date
    agrees in this case, raises `ConfigError`.
    """
    pairs = [
        *zip(job.source.uris, planned.source.uris, strict=False),
        (job.source.query, planned.source.query),
        (job.source.filter, planned.source.filter),
        (job.output.uri, planned.output.uri),
    ]
    targets = {target.label: target for target in planned.output.publish}
    for target in job.output.publish:
        if (other := targets.get(target.label)) is not None:
            pairs += [(target.uri, other.uri), (target.table, other.table)]
    texts = [
        (render_text(given, run_key, None), render_text(filled, run_key, None))
        for given, filled in pairs
        if given and filled
    ]
    dates: list[date] | None = None  # those that agree with all locations
    known = set()
    for given, filled in texts:
        agreeing = [when for when in dates or () if render_text(given, None, when) == filled]
        if agreeing or (found := dates_in(given, filled)):
            dates = agreeing if dates is not None else found
            known.add(given)
    if dates is None:
        return None
    targets_known = all(
        render_text(text, run_key, None) in known for text in _dated_targets(job.output)
    )
    in_key = date_of_key(run_key)
    if in_key in dates:
        return in_key
    if len(dates) == 1 or (dates and targets_known):
        return dates[0]
    if not targets_known:
        raise ConfigError(
            f"{{run_date}} in output.publish: the locations of run {run_key!r} do not tell its "
            "whole date. Set --run-date (run_date of the flow), or write the date itself"
        )
    return None


def _changed(job: BatchJob, fill: Callable[[str], str]) -> BatchJob:
    source = job.source
    uri = fill(source.uri) if isinstance(source.uri, str) else [fill(one) for one in source.uri]
    query, kept = (text and fill(text) for text in (source.query, source.filter))
    source = source.model_copy(update={"uri": uri, "query": query, "filter": kept})
    output = job.output.model_copy(update={"uri": fill(job.output.uri)})
    return job.model_copy(update={"source": source, "output": output})
