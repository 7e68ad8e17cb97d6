"""Checks a job, then makes its run's plan or continues with the existing one."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.compile.job import (
    cluster_spec,
    compile_job,
    compile_judge,
    public_job,
    read_spec,
)
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.errors import ConfigError, HubUnavailable, SourceError
from prefect_raybatch.job.edits import judging_job
from prefect_raybatch.job.escalate import larger_named
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.job.ray_cluster import check_made_cluster
from prefect_raybatch.ledger import increments
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.model import chat_template
from prefect_raybatch.model import check as model_check
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.plan import image_bytes
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.plan.accepting import check_acceptable, of_model
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.plan.prefix_order import MOST_ORDERED
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.runs.attempts import note_planner
from prefect_raybatch.runs.estimate import estimate
from prefect_raybatch.runs.later_servers import check_later_servers
from prefect_raybatch.runs.quality import AnswerSpec, check_quality_columns, judge_warning
from prefect_raybatch.runs.run import Run, run_of, user_at_host
from prefect_raybatch.schemes import with_account
from prefect_raybatch.sizing.agreement import trial_rows
from prefect_raybatch.sizing.sizes import assumed, check_step
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.label_probabilities import check_labels
from prefect_raybatch.storage import Store, is_remote, join, open_store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    import ray.data

    from prefect_raybatch.source import Inventory

log = logging.getLogger(__name__)
# Engine arguments with which vLLM's context may be shorter than config.json says. For a pooling
# task, it may be shortened by the tokenizer's or sentence-transformers' length.
SHORTENS = frozenset({"hf_overrides", "hf_config_path", "disable_sliding_window"})


def adopt_plan(plan: Plan, resolved: Resolved, ledger: Ledger, accept: Sequence[str]) -> Run:
    """Return the run of an existing plan, or the repaired run that supersedes it.

    Raises `PlanMismatch` if the job differs from the plan in a field that `accept` does not name.
    Accepted differences are logged.
    """
    store = ledger.store
    accepted = check_same_job(plan, resolved, store.uri, accept)
    ledger, plan = follow_forks(ledger, plan)
    if ledger.store is not store:
        log.warning("%s was repaired; continuing with %s", store.uri, ledger.store.uri)
    return _with_accepted(run_of(ledger.store, plan, ledger), accepted, resolved)


def _with_accepted(run: Run, accepted: tuple[Accepted, ...], resolved: Resolved) -> Run:
    """Log the accepted differences between job and plan; return the run with a record of them.

    If the model is one of them, the run gets the job's model in place of the plan's.
    """
    if not accepted:
        return run
    for difference in accepted:
        log.warning("%s", difference)
    if not of_model(accepted):
        return replace(run, accepted=accepted)
    model = with_checked_models(resolved.pinned()).with_adapters()
    return replace(run, accepted=accepted, model=model)


def precheck_resolved(resolved: Resolved, store: Store, accept: Sequence[str] = ()) -> Resolved:
    """Check everything about a job that takes at most a second, so that a wrong job fails early.

    If the run directory `store` has a plan, the job is compared with the plan: raises
    `PlanMismatch` if they differ in a field that `accept` does not name. Else the job's model is
    checked, and the job is checked against the beginning of the input. Raises `ConfigError` for a
    wrong job. Returns the job. If its model's files were checked, it is marked (`checked`), and
    planning does not check them again.
    """
    from prefect_raybatch import source

    job = resolved.job
    check_places(read_spec(job.source), job.output.uri, job.output.options)
    check_schema_names(job.output.output_schema)
    _check_cluster(resolved)
    plan = Ledger(store).load_plan()
    if plan is not None:
        check_same_job(plan, resolved, store.uri, accept)
        return resolved
    resolved = with_checked_models(resolved)
    check_judge_model(resolved, pinned=False)
    read = read_spec(job.source)
    if source.needs_snapshot(read):
        schema = source.peek(read).schema
    else:  # the first file with rows is enough here; the plan reads every footer
        schema = source.inventory(replace(read, limit=1)).schema
    spec = compile_job(job, schema.names)
    planning.check_against_schema(spec, schema, compile_judge(job))
    check_quality_columns(job.quality, job.output, answer_spec(spec), schema.names)
    check_targets_of(spec, schema, later=True)
    return resolved


def _check_cluster(resolved: Resolved) -> None:
    """Raise `ConfigError` if the job's cluster cannot be reached or started from this machine.

    A cluster to which runs are submitted as Ray jobs is not contacted.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.reach import check_reachable, check_temp_folder
    from prefect_raybatch.installed import check_engine_packages

    spec = cluster_spec(resolved.job)
    job = resolved.job
    check_made_cluster(spec.access, job.engine, job.output.escalate.engine)
    if spec.access.remote:
        return
    if address := cluster.address_of(spec):
        check_reachable(address, spec.access)
    else:
        check_temp_folder()
        check_engine_packages()


def check_places(read: ReadSpec, output: str, options: StoreOptions) -> None:
    """Raise `ConfigError` if a run cannot or must not write below `output`.

    It must not if `output` is inside the input that `read` describes. It cannot if `output` is a
    file or lies below a file. It cannot either if the URI of an Azure container lacks the storage
    account and `options` do not name it.
    """
    from prefect_raybatch.source import reaches

    for uri in read.uris if read.stored else ():
        if reaches(with_account(uri, read.options), with_account(output, options)):
            raise ConfigError(
                f"output.uri: {output!r} is inside the input {uri!r}, so the next run would read "
                "its own results. Choose another folder"
            )
    if is_remote(output):
        open_store(output, options)  # contacts nothing
    else:
        path = join(output)
        taken = [str(p) for p in (Path(path), *Path(path).parents) if p.exists() and not p.is_dir()]
        if taken:
            raise ConfigError(
                f"output.uri: {taken[-1]} is a file, so nothing can be written below it. Name a "
                "folder"
            )


def check_schema_names(types: Mapping[str, str] | None) -> None:
    """Raise `ConfigError` for a type in `types` (output.schema) that Arrow does not have."""
    if types:
        from prefect_raybatch.stages.result_columns import declared_schema

        try:
            declared_schema(types)
        except ValueError as error:
            raise ConfigError(f"output.schema: {error}") from None


def check_same_job(
    plan: Plan, resolved: Resolved, where: str, accept: Sequence[str] = ()
) -> tuple[Accepted, ...]:
    """Check that a job differs from a plan only in fields that `accept` names.

    Returns these differences. Raises `PlanMismatch` for any other difference; its message names the
    run as `where`. For a plan that retries failed rows, the job's input is not compared.
    """
    own = resolved.retrying(plan.parts.get("retry"))
    return check_acceptable(plan, own.identity, where, accept, user_at_host())


def with_checked_models(resolved: Resolved) -> Resolved:
    """Check that the files of each model fit the job; return the job, marked as checked.

    Raises `ConfigError` if they do not fit. The models are the job's own and, in a cascade, the
    first one. A model that is not pinned yet is skipped, and its job is not marked. A job that is
    marked already is not checked again.
    """
    is_pinned = resolved.pinned_model is not None
    if is_pinned and not resolved.checked:
        check_pinned_model(compile_job(resolved.job), resolved.model)
    first = None if resolved.first is None else with_checked_models(resolved.first)
    return replace(resolved, checked=is_pinned, first=first)


def check_pinned_model(spec: RunSpec, model: PinnedModel, files: bool = True) -> None:
    """Raise `ConfigError` if a pinned model cannot do what a run asks of it.

    Checks its files; without `files`, only its config.json and its chat template. For a hosted
    model, checks only that the API key is set.
    """
    endpoint = spec.engine.model.endpoint
    if endpoint is not None:  # its server is asked when an engine starts
        endpoint.api_key()
        return
    with larger_named(spec.first is not None):
        step = spec.sizes.max_num_batched_tokens
        model_check.check(spec.engine.model, spec.prompt, spec.sampling, model, files, step)
        chat_template.check_template(spec.prompt, spec.engine.model, model)
        check_labels(spec.sampling.labels, spec.engine.model, model)
        if spec.sizes.takes_whole_prompts and not spec.engine.model.context_auto:
            check_step(spec.sizes, spec.sizes.context or _certain_length(spec.sizes, model))


def _certain_length(spec: SizeSpec, model: PinnedModel) -> int | None:
    """Return the model's default context length; None if vLLM may choose a shorter one."""
    if spec.pools or not SHORTENS.isdisjoint(spec.vllm_arguments):
        return None
    return models.own_length(model, spec.vllm_arguments)


def check_judge_model(resolved: Resolved, pinned: bool = True, files: bool = True) -> None:
    """Raise `ConfigError` if the judge's model does not exist, or its engine cannot be started.

    With `pinned`, a Hugging Face name is looked up on the Hub. `files` is explained in
    `check_pinned_model`. Does nothing for a hosted judge or a job without one.
    """
    job = resolved.job
    if job.quality.judge.model is None:
        return
    uri = job.output.uri
    try:
        judging = resolve(judging_job(job, join(uri, "rows.parquet"), uri))
        check_made_cluster(judging.job.cluster.access, judging.job.engine, None)
        judging = judging.pinned() if pinned else judging
        if judging.pinned_model is not None:
            check_pinned_model(compile_job(judging.job), judging.model, files)
    except (ConfigError, HubUnavailable) as error:
        raise type(error)(judge_fields(str(error))) from None


def length_of_spec(
    spec: RunSpec, run_key: str | None, measured: counting.PromptLengths
) -> counting.PromptLengths:
    """Return `measured` with the `max_model_len` that `auto` resolves to.

    This is the measured length. In a run that reuses answers, it is the length of the run that gave
    them, if that is larger. Raises `ConfigError` if the job sets too few tokens per step for the
    length.
    """
    if spec.reuse.keeps:
        from prefect_raybatch.runs.reusable_runs import with_reused_context

        reused = spec.reuse.run
        measured = with_reused_context(reused, spec.output, spec.name, run_key, measured)
    check_step(spec.sizes, measured.max_model_len)
    return measured


def begin_run(
    resolved: Resolved, run_key: str, ledger: Ledger, dataset: ray.data.Dataset | None
) -> Run:
    """Check the job, make the plan of a new run and write it; return the run.

    If another process writes a plan of the same run first, the returned run has that plan.
    `dataset` is read in place of the job's source.
    """
    job = resolved.job
    check_made_cluster(job.cluster.access, job.engine, job.output.escalate.engine)
    # raises for a _SUCCESS without a plan, which would otherwise be found only at the end
    ledger.finished()
    ledger.store.probe()
    check_schema_names(job.output.output_schema)
    check_judge_model(resolved)
    check_later_servers(resolved)
    plan = _write_plan(with_checked_models(resolved.pinned()), run_key, ledger, dataset)
    return run_of(ledger.store, plan, ledger, probed=True)


def _write_plan(
    resolved: Resolved, run_key: str, ledger: Ledger, dataset: ray.data.Dataset | None
) -> Plan:
    """Read the input, make the plan and write it; return the run's plan.

    If another process writes its plan first, returns that one. `dataset` is read in place of the
    job's source.
    """
    from prefect_raybatch import source

    taken = _taken_input(resolved, ledger.store, dataset)
    found = taken.found
    job = resolved.job
    spec = compile_job(job, found.schema.names)
    planning.check_against_schema(spec, found.schema, compile_judge(job))
    check_quality_columns(job.quality, job.output, answer_spec(spec), found.schema.names)
    if warning := judge_warning(job.quality, job.engine, job.output.escalate.engine):
        log.warning("%s", warning)
    if few := too_few_rows(spec, taken.rows):
        raise SourceError(few)
    trial_rows(spec.engine.tries, spec.limits.min_agreement, taken.rows)
    if note := planning.equal_requests_warning(spec):
        log.warning("%s", note)
    for line in check_targets_of(spec, found.schema, run_key, found, taken.snapshot):
        log.info("to publish: %s", line)
    context = None
    if spec.engine.model.context_auto:
        measured = counting.of_files(spec, resolved.model, found, taken.snapshot)
        tokens = length_of_spec(spec, run_key, measured)
        log.info("engine.max_model_len auto: %d (%s)", tokens.max_model_len, tokens.why)
        for note in (*tokens.notes, *tokens.hints):
            log.warning("%s", note)
        context, spec = tokens.context(), spec.decide(context=tokens.max_model_len)
    plan, tables = new_plan(resolved, spec, run_key, taken, context)
    _warn_of_cost(spec, plan)
    made = ledger.create_plan(plan, tables)
    if taken.copied:
        kept = {file.uri for file in ledger.files(made)}
        source.forget_copied(ledger.store, taken.attempt, kept)
    note_planner(ledger.store)
    return made


def answer_spec(spec: RunSpec) -> AnswerSpec:
    """Return the parts of a run's spec that decide what its answers and result columns are."""
    has_function = spec.prompt.function is not None
    return AnswerSpec(spec.finish, spec.sampling, spec.engine.model.task, has_function)


def too_few_rows(spec: RunSpec, rows: int, guessed: bool = False) -> str:
    """Return an error text if the input has fewer rows than limits.min_rows, else "".

    `rows` is the number of rows to read; `guessed`: it is an estimate. Returns "" if the rows reach
    source.limit or source.sample, because the input then may have more.
    """
    least, limit = spec.limits.min_rows, spec.read.most_rows
    if least is None or rows >= least or (limit is not None and rows >= limit):
        return ""
    about = "about " if guessed else ""
    return (
        f"the input has {about}{counted(rows, 'row')}, but limits.min_rows is {least:,}. Complete "
        "the input, or lower limits.min_rows"
    )


def _taken_input(resolved: Resolved, store: Store, dataset: ray.data.Dataset | None) -> RunInput:
    """Return the input of a new run; copy it into the run directory unless it is plain Parquet.

    The job's engines may be started while the files are copied. `dataset` is read in place of the
    job's source, and is always copied. Raises `ConfigError` for a `dataset` with source.sample.
    """
    from prefect_raybatch import source
    from prefect_raybatch.cluster.prewarm import begin_prewarming
    from prefect_raybatch.cluster.side_by_side import copying_for

    spec, attempt = compile_job(resolved.job), uuid.uuid4().hex
    read, copying = spec.read, partial(copying_for, spec.cluster)
    if dataset is not None:
        if read.sample is not None:
            raise ConfigError(
                "source.sample does not apply to a dataset. Remove it, and pass "
                "dataset.random_sample(...)"
            )
        found = source.snapshot_dataset(dataset, store, attempt, read.limit, read.columns, copying)
        return RunInput(found, store, attempt, copied=True)
    if not source.needs_snapshot(read):
        return RunInput(source.inventory(read), store, attempt, copied=False)
    begin_prewarming(spec, resolved.with_adapters)
    return RunInput(source.snapshot(read, store, attempt, copying), store, attempt, copied=True)


def _warn_of_cost(spec: RunSpec, plan: Plan) -> None:
    if spec.limits.max_cost is None:
        return
    from prefect_raybatch.cluster import connect as cluster

    increment, rows = increments.increment_of(plan), plan.rows
    if increment is not None and increment.looks_up:
        rows = increment.counts.asked
    have = cluster.glance(spec.cluster) or assumed(spec.sizes)
    found = estimate(spec.cluster, spec.sizes, spec.output, spec.limits.max_cost, have, rows)
    if found is not None and found.warning:
        log.warning("%s", found.warning)


@dataclass(frozen=True)
class RunInput:
    """The input of a new run.

    `found` lists its files. `store` is the run directory. `attempt` is a random id of this planning
    attempt. `copied`: the files are a copy that this attempt made in the run directory.
    """

    found: Inventory
    store: Store
    attempt: str
    copied: bool

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.found.files)

    @property
    def snapshot(self) -> Store | None:
        """Return the store that holds the files if they are a copy, else None."""
        return self.store if self.copied else None

    def row_bytes(self, spec: RunSpec, model: PinnedModel) -> float:
        """Estimate the bytes of a row in memory in a run of `spec` with this input."""
        images, engine = spec.prompt.images, spec.engine.model
        return image_bytes.row_bytes(images, engine, spec.read, model, self.found, self.snapshot)


def new_plan(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    run_input: RunInput,
    context: JsonObject | None = None,
    numbers: bytes | None = None,
    earlier: bool = True,
    share: increments.RetryShare | None = None,
) -> tuple[Plan, dict[str, bytes]]:
    """Return the plan of a new run, and the tables that it names, as {name: bytes}.

    Does not write the plan or these tables. Writes what the plan's `increment` names: copies of
    reused answers, tables that say where each row's answer is, and input and tables of a first
    phase. `context` records how `max_model_len: auto` was resolved. `numbers` is a Parquet table of
    row numbers, for a retry of failed rows. With `earlier=False`, no answers of earlier runs are
    reused. `share` limits the rows that a retry of a cascade sends to the larger model.
    """
    found = run_input.found
    model = resolved.with_adapters()
    row_bytes = run_input.row_bytes(spec, resolved.model)
    return make_plan(
        spec,
        resolved.identity,
        model,
        public_job(resolved.job, spec.finish),
        run_key,
        found.files,
        found.schema,
        row_bytes,
        snapshot=run_input.copied,
        numbers=numbers,
        engines=sized.engines_to_plan_for(spec.sizes, spec.cluster, model, row_bytes),
        context=context,
        table=found.table,
        increment=_increment(resolved, spec, run_key, run_input, context, earlier, share),
        weights=found.weights,
        classifier=resolved.classifier,
    )


def _increment(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    run_input: RunInput,
    context: JsonObject | None,
    earlier: bool,
    share: increments.RetryShare | None,
) -> JsonObject | None:
    """Return the plan's `increment`, after writing the files that it names.

    Returns None for a run of one phase. If the input is too large for `engine.order: run`, logs
    that this setting is ignored.
    """
    if resolved.first is not None and spec.first is not None:
        from prefect_raybatch.runs.increment import plan_first_model

        return plan_first_model(resolved.first, spec.first, run_input, share)
    if not spec.reuse.has_requests_phase:
        return None
    if run_input.rows > MOST_ORDERED and not spec.reuse.keeps:
        log.warning(
            "engine.order: run is ignored: the input has %d rows, and at most %d can be ordered",
            run_input.rows,
            MOST_ORDERED,
        )
        return None
    from prefect_raybatch.runs.increment import increment_for

    return increment_for(resolved, spec, run_key, run_input, context, earlier)
