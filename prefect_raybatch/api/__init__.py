"""The operations on a job's run: each compiles the job and calls the function of `runs`.

The main path is `plan_run` -> `infer_run` -> `finalize_run`. Each can be called again after a crash
and continues where the records end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from prefect_raybatch.compile.job import (
    cluster_spec,
    compile_planned,
    planned_job,
    read_spec,
    size_spec,
)
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.driver import metrics
from prefect_raybatch.errors import ConfigError, IncompleteRun, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import LONGEST_NAME
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.edits import (
    edited,
    first_of,
    job_placeholders,
    judging_job,
    larger_of,
    locations_are_dated,
    render_locations,
    render_placeholders,
    render_targets,
    with_precision,
)
from prefect_raybatch.job.placeholders import date_of_key, render_text, today
from prefect_raybatch.job.secrets import is_masked
from prefect_raybatch.job.trust import check_reach, check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.family import Member, without_link
from prefect_raybatch.ledger.last_attempt import JUDGING, MEASURING
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.policy.in_force import policy_in_force
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs import attempts
from prefect_raybatch.runs.agreement import with_agreement
from prefect_raybatch.runs.backfill import DatedRun, dated_run, run_dates
from prefect_raybatch.runs.dry_run import DryRun, dry_run_resolved
from prefect_raybatch.runs.finalize_run import finalize_spec, load_report
from prefect_raybatch.runs.infer_run import infer_spec
from prefect_raybatch.runs.judge import with_verdicts
from prefect_raybatch.runs.next_step import NextStep, next_step_of
from prefect_raybatch.runs.plan_run import (
    adopt_plan,
    begin_run,
    check_places,
    precheck_resolved,
)
from prefect_raybatch.runs.publish_run import finished_member
from prefect_raybatch.runs.quality import check_accuracy, check_judge, golden_of, measured
from prefect_raybatch.runs.run import Run, latest_unfinished, load_run, run_of, run_store
from prefect_raybatch.schemes import with_account
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.storage import Store, open_store

if TYPE_CHECKING:
    import ray.data

    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.remote.follower import Owner
    from prefect_raybatch.runs.preview import Preview
    from prefect_raybatch.runs.warm_caches import WarmedCaches

JUDGE_SUFFIX = "-judge"  # of the key of the run in which a judge is asked
SHORTEST_SECRET = 4  # characters: shorter texts also occur in ordinary words


@dataclass(frozen=True)
class Sender:
    """The sender of a job to a cluster that receives jobs.

    `job` is the job without the credentials of its blocks, and `owner` the flow run on whose behalf
    it is sent.
    """

    job: BatchJob
    owner: Owner | None = None


# --- the name of a run --------------------------------------------------------------------------


def default_run_key(job: BatchJob | Resolved, scheduled: datetime | None = None) -> str:
    """Return the run key for a job: its name with the scheduled start.

    Without `scheduled`, return the key of the newest unfinished run of this job, so that running
    again after a crash resumes it; without such a run, a new key with the current second.
    """
    if scheduled is not None:
        name = job.name if isinstance(job, BatchJob) else job.job.name
        return attempts.key_for_start(name, scheduled)
    resolved = resolve(job)
    job = resolved.job
    root = open_store(job.output.uri, job.output.options or None)
    unfinished = latest_unfinished(root, resolved.identity.fingerprint)
    return attempts.key_for_start(job.name) if unfinished is None else unfinished


def resolve_run(
    job: BatchJob,
    run_key: str | None,
    scheduled: datetime | None,
    run_date: date | None = None,
) -> tuple[BatchJob, str]:
    """Return the job with {run_date} and {run_key} filled in, and the run's key.

    The date is `run_date`, else the date in the run key, else the date of the scheduled start, else
    today, all in UTC.
    """
    if run_date is not None and run_key is None:  # so that the same date finds the same run
        scheduled = datetime.combine(run_date, time(), UTC)
    words = job_placeholders(job)
    if not words:
        return job, run_key or default_run_key(job, scheduled)
    if run_key is None and scheduled is None and "run_key" not in words:
        placed = render_locations(job, "", today())
        key = default_run_key(placed)  # perhaps of a run that began on another day
        return render_targets(placed, key, date_of_key(key) or today()), key
    key = run_key or default_run_key(job, scheduled or datetime.now(UTC))
    when = run_date or date_of_key(key)
    if when is None and scheduled is not None:
        when = scheduled.astimezone(UTC).date()
    return render_placeholders(job, key, when), key


def judge_key(run_key: str) -> str:
    """Return the key of the run that judges run `run_key`, cut to the longest that is valid."""
    return f"{run_key[: LONGEST_NAME - len(JUDGE_SUFFIX)]}{JUDGE_SUFFIX}"


# --- records of attempts ------------------------------------------------------------------------


@contextmanager
def recorded_attempt(
    store: Store, job: BatchJob, run_key: str, phase: str, begin: bool = True
) -> Iterator[None]:
    """Record an attempt at the run in `store` when the block begins, and its end if it raises.

    `phase` is the step that the block takes (PLANNING, INFERENCE or FINALIZING of `runs.attempts`).
    `begin=False` records only the end of a block that raises. A run that is complete keeps the
    record it has.
    """
    with attempts.recorded_end(store, job.name, run_key, phase, secrets_of(job), begin):
        yield


def record_unplanned(
    job: BatchJob, run_key: str | None, error: BaseException, run_date: date | None = None
) -> tuple[Store, str] | None:
    """Record an attempt that failed before its run directory was known; return directory and key.

    None if it could not be recorded. Without `run_key`, the key is that of a run that begins now.
    `run_date` is the value of {run_date}, by default the date in the key.
    """
    key = run_key or attempts.key_for_start(job.name)
    try:
        check_reach(job, policy_in_force())  # a refused job writes nothing, not even this record
        uri = render_text(job.output.uri, key, run_date or date_of_key(key) or today())
        inputs = [with_account(one, job.source.options) for one in job.source.uris]
        return attempts.record_without_plan(
            *(uri, job.output.options or None, inputs, job.name, key, error),
            secrets_of(job),
        )
    except RayBatchError as fault:
        attempts.log.warning("%s: the failed attempt could not be recorded: %s", key, fault)
        return None


def secrets_of(job: BatchJob) -> list[str]:
    """Return the texts in a job that must be masked, the longest first."""
    secrets: set[str] = set()
    _collect(job.to_dict(), job.model_dump(mode="json", by_alias=True), secrets)
    return sorted(secrets, key=len, reverse=True)


def _collect(clear: object, shown: object, secrets: set[str]) -> None:
    """Add to `secrets` each text of `clear` that is masked in `shown`, unless it is very short.

    `clear` are values of a job in clear text, `shown` the same values as they may be shown.
    """
    if isinstance(clear, Mapping):
        for name, inner in clear.items():
            _collect(inner, shown.get(name) if isinstance(shown, Mapping) else shown, secrets)
    elif isinstance(clear, list):
        pairs = shown if isinstance(shown, list) else [shown] * len(clear)
        for inner, shown_inner in zip(clear, pairs, strict=False):
            _collect(inner, shown_inner, secrets)
    elif is_masked(shown) and isinstance(clear, str) and len(clear) >= SHORTEST_SECRET:
        secrets.add(clear)


# --- plan, infer, finalize ----------------------------------------------------------------------


def plan_run(
    job: BatchJob | Resolved,
    run_key: str,
    dataset: ray.data.Dataset | None = None,
    accept: Sequence[str] = (),
) -> Run:
    """Make the run's plan, or adopt the existing one; return the run.

    `dataset` replaces the job's source files. `accept` names fields in which the job may differ
    from the run's plan, which the user accepts and the run records. Raises `ConfigError`,
    `SourceError`, `PlanMismatch` or `UnsafeStore`; only an unreachable store is worth a retry.
    """
    resolved = resolve(job)
    job = resolved.job
    check_places(read_spec(job.source), job.output.uri, job.output.options)
    ledger = Ledger(run_store(job.output, run_key))
    plan = ledger.load_plan()
    with recorded_attempt(ledger.store, job, run_key, attempts.PLANNING, begin=plan is None):
        golden_of(job.quality, job.output)  # a file that cannot be read stops the run here
        check_judge(job.quality)
        if plan is not None:
            return adopt_plan(plan, resolved, ledger, accept)
        return begin_run(resolved, run_key, ledger, dataset)


def precheck(job: BatchJob | Resolved, store: Store, accept: Sequence[str] = ()) -> Resolved:
    """Check everything about a job that can be checked within a second; return it resolved.

    The resolved job has its files read and its model pinned, if that needs no network. So a wrong
    job fails before anything starts. Reads the plan in the run directory `store` if there is one,
    otherwise a sample of the input.
    """
    return precheck_resolved(resolve(job), store, accept)


def dry_run(
    job: BatchJob | Resolved,
    run_key: str | None = None,
    what_if: Capacity | None = None,
    sample: int = 0,
    rows_left: int | None = None,
) -> DryRun:
    """Return what a run would do, without writing and without Ray.

    If the job names a cluster, its capacity is queried; `what_if` replaces it. `problems` is empty
    if the run can start and keeps its engines busy. `sample` rows are made into prompts to measure
    their length (0: none, unless max_model_len is auto). `rows_left` are the rows whose cost is
    estimated, by default all.
    """
    return dry_run_resolved(resolve(job), run_key, what_if, sample, rows_left)


def next_step(job: BatchJob | Resolved, run_key: str | None = None) -> NextStep | None:
    """Return what `raybatch run` would do with this job and run key; writes nothing.

    Without `run_key`, looks at the newest unfinished run of this job, which that command would
    resume; None if there is none, or if the output cannot be listed.
    """
    resolved = resolve(job)
    if run_key is not None:
        return next_step_of(resolved, run_key)
    output = resolved.job.output
    try:
        root = open_store(output.uri, output.options or None)
        key = latest_unfinished(root, resolved.identity.fingerprint)
        return None if key is None else next_step_of(resolved, key)
    except RayBatchError as error:
        attempts.log.info("cannot look for an unfinished run: %s", error)
        return None


def infer_run(
    job: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    engine: type | None = None,
) -> Progress:
    """Read, infer and commit every pending shard; return the progress at the end.

    Starts no engine if nothing is pending. An observer that is a `heartbeat.Listener` also receives
    heartbeats. `engine` replaces the engine stage in tests.
    """
    check_trust(job)
    check_run_place(run.uri)
    ledger = Ledger(open_store(run.uri, job.output.options or None))
    plan, shards = load_run(ledger, run)
    begin = ledger.finished(plan) is None
    with recorded_attempt(ledger.store, job, run.run_key, attempts.INFERENCE, begin):
        return infer_spec(compile_planned(job, plan), run, ledger, plan, shards, observe, engine)


def finalize_run(
    job: BatchJob,
    run: Run,
    progress: Progress | None = None,
    written: str | None = None,
    sender: Sender | None = None,
) -> RunReport:
    """Write the result and _SUCCESS; return the report. A finished run returns its report again.

    `written` is output.uri as written in the job, if it contained {run_date} or {run_key}. `sender`
    is needed by a judge on a cluster that receives jobs, if blocks have credentials. Measures the
    accuracy if the job names golden rows, and asks the judge if it names one. Compares the checked
    rows of a cascade with those of earlier runs. Raises `IncompleteRun` while shards are missing,
    `CorruptRun` if the coverage is wrong, and what the judge's own run raises.
    """
    report = _finalized(job, run, progress)
    report = with_agreement(report, job.output.options or None, written or job.output.uri)
    if job.quality.golden is None and not job.quality.judge.asked:
        return report
    member = finished_member(open_store(run.uri, job.output.options or None))
    return _with_quality(report, member, job, written, sender)


def _with_quality(
    report: RunReport,
    member: Member,
    job: BatchJob,
    written: str | None,
    sender: Sender | None,
    measure_again: bool = False,
) -> RunReport:
    """Return the report of a finished run with its accuracy, by golden rows and by a judge.

    `measure_again` measures a run again, since its judge or golden rows may have changed.
    """
    written = written or job.output.uri
    place = (member.ledger.store, job.name, member.key)
    with attempts.recorded_measurement(*place, MEASURING, secrets_of(job)):
        report = measured(report, member, job.quality, job.output, written, measure_again)
    if not job.quality.judge.asked:
        return report

    def ask(rows: str, runs: str, max_cost: float | None) -> RunReport:
        own = judging_job(job, rows, runs, max_cost)
        run = plan_run(own, judge_key(member.key))
        if not own.cluster.access.remote:
            return _finalized(own, run, infer_run(own, run))
        from prefect_raybatch.api.sending import infer_on_cluster

        by = sender or Sender(job)
        sent = judging_job(by.job, rows, runs, max_cost)
        judged = run_of(member.ledger.store, member.plan, member.ledger)
        progress = infer_on_cluster(sent, own, run, owner=by.owner, cluster_of=judged)
        return _finalized(own, run, progress)

    most = job.limits.max_cost
    with attempts.recorded_measurement(*place, JUDGING, secrets_of(job)):
        return with_verdicts(
            *(report, member, job.quality, job.output, most, written, ask), measure_again
        )


def _finalized(job: BatchJob, run: Run, progress: Progress | None = None) -> RunReport:
    ledger = Ledger(open_store(run.uri, job.output.options or None))
    plan, shards = load_run(ledger, run)
    report = finalize_spec(compile_planned(job, plan), ledger, plan, shards, progress)
    metrics.completed(report.job, run.run_key)
    return report


def finalize_whole(
    run_dir: str, job: BatchJob | None = None, sender: Sender | None = None
) -> RunReport:
    """Write result, report and `_SUCCESS` of a run with all shards committed; publish nothing.

    Returns the report, also of a run that is complete already. `job` says how to reach the store
    and on which cluster a large result is written, by default the run's own. Raises `IncompleteRun`
    while shards are missing, and what `finalize_run` raises.
    """
    check_run_place(run_dir)
    store = open_store(without_link(run_dir), (job.output.options if job else None) or None)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    try:
        run = run_of(store, plan, ledger)
        # A run directory does not decide which file is read as golden rows.
        if job is not None:
            return finalize_run(job, run, sender=sender)
        # Nor are all places of earlier runs known: output.uri may have contained {run_date}.
        own = planned_job(plan)
        return with_agreement(_finalized(own, run), None, own.output.uri, needs_earlier=True)
    except IncompleteRun as error:
        raise IncompleteRun(
            f"{error}, or write the committed rows now: raybatch finalize --partial {store.uri}"
        ) from None


def finalize_partial(
    run_dir: str, options: Mapping[str, Any] | None = None, job: BatchJob | None = None
) -> RunReport:
    """Write the committed rows of an incomplete run to a folder in `run_dir`; return its report.

    The folder is `partial/_UUID`, with `data` and `_quarantine`; the report's state is "partial"
    and its `run` is that folder. The run is not changed: it stays unfinished, is resumed and
    finished as before, and nothing is deleted. Reads only commits and the pieces that they name, so
    it may run while a driver is active. `options` are s3fs options, as in `output.options`; `job`
    says on which cluster a large result is written, by default the run's own.

    Raises `ConfigError` for a run with all shards committed, or one that is completed meanwhile,
    `IncompleteRun` while nothing is committed, `NoSuchRun`, `CorruptRun` and the store's errors.
    """
    from prefect_raybatch.runs.partial_run import write_partial

    return write_partial(run_dir, options, None if job is None else cluster_spec(job))


# --- publish ------------------------------------------------------------------------------------


def publish_run(
    job: BatchJob | None,
    uri: str,
    observe: Callable[[str], None] = lambda step: None,
    run_date: date | None = None,
    targets_from_plan: bool = False,
    written: str | None = None,
    sender: Sender | None = None,
) -> RunReport:
    """Publish the finished run at `uri` to the targets of the job, each once; return the report.

    Targets in a run directory are not trusted, because anyone who can write to it could add a
    target. So `job` None is rejected if the run's plan names targets, unless `targets_from_plan`
    says that these were reviewed. `run_date` is the value of {run_date} in a target, by default the
    date in the run key, and `written` output.uri as written in the job, if it contained {run_date}
    or {run_key}. `sender` is as for `finalize_run`. Raises `IncompleteRun` while the run is not
    finished, `QualityTooLow` if neither golden rows nor judge show `quality.at_least`,
    `ConfigError` for what cannot be published, `PublishFailed` (worth a retry).
    """
    from prefect_raybatch.runs.publish_run import publish_member, targets_text

    check_run_place(uri)
    if job is not None:
        check_trust(job)  # its options name the host that is asked for the run
    options = job.output.options if job is not None else {}
    member = finished_member(open_store(uri, options or None))
    given = job is not None
    if job is None:
        job = planned_job(member.plan)
        if job.output.publish and not targets_from_plan:
            raise ConfigError(
                f"{member.ledger.store.uri}: name the job with the targets: --job JOB. The run "
                f"directory itself names these:\n{targets_text(job.output.publish, member.key)}\n"
                "To publish to them, check each of them and add --targets-from-plan"
            )
    job = render_targets(job, member.key, run_date)
    check_trust(job)
    if job.quality.golden is not None or job.quality.judge.asked:
        report = load_report(member.ledger.store)
        # A run directory decides neither which file is read as golden rows, nor who judges.
        if given:
            report = _with_quality(report, member, job, written, sender, measure_again=True)
        check_accuracy(report, member, job.quality)
    return publish_member(member, job.output.publish, options, observe)


def other_targets(job: BatchJob, uri: str, run_date: date | None = None) -> tuple[str, str] | None:
    """Return (targets of the job, targets of the run's plan) as lines; None if they are equal.

    If they differ, the user may have chosen the wrong job or the wrong run.
    """
    from prefect_raybatch.runs.publish_run import targets_text

    plan = need_plan(Ledger(open_store(uri, job.output.options or None)))
    of_job, of_plan = (
        targets_text(render_targets(j, plan.run_key, run_date).output.publish, plan.run_key)
        for j in (job, planned_job(plan))
    )
    return None if of_job == of_plan else (of_job, of_plan)


# --- preview ------------------------------------------------------------------------------------


def preview_rows(
    job: BatchJob, rows: int = 5, answers: bool = True, engine: type | None = None
) -> Preview:
    """Send the first `rows` rows through every stage of the job, in this process, on one engine.

    Without `answers`, no engine starts. In a cascade, both models are asked about these rows, and
    the first model's preview holds the larger model's (`larger`). Nothing is kept, published, or
    reused from earlier runs. Raises like `plan_run` for a job that cannot run,
    `InsufficientResources` if this machine has no GPU for its engine, `EngineStartError` or
    `EngineFailure` if the engine does not start or dies. `engine` replaces the engine stage in
    tests.
    """
    if rows < 1:
        raise ConfigError(f"rows {rows}: at least one row is shown")
    if job.output.escalate.engine is not None:
        first = preview_rows(first_of(job), rows, answers, engine)
        return replace(first, larger=preview_rows(larger_of(job), rows, answers, engine))
    return _preview(job, rows, answers, engine, None)


def _preview(
    job: BatchJob, rows: int, answers: bool, engine: type | None, size: Sizing | None
) -> Preview:
    """Return the preview of one model. `size` None: the sizes of a run of just these rows."""
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.runs.preview import PREVIEW_KEY, PhaseClock, check_gpus_here, preview_spec

    with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
        clock = PhaseClock()
        small = _first_rows_of(job, rows, folder)
        capacity = cluster.this_machine(cluster_spec(small))
        if answers:
            check_gpus_here(size_spec(small), capacity)
        run = plan_run(small, PREVIEW_KEY)
        ledger = Ledger(run_store(small.output, PREVIEW_KEY))
        plan, shards = load_run(ledger, run)
        spec = compile_planned(small, plan)
        size = size or sized.for_attempt(spec.sizes, plan, capacity)
        return preview_spec(spec, ledger, plan, shards, size, clock, answers, engine)


def _first_rows_of(job: BatchJob, rows: int, folder: str) -> BatchJob:
    """Return the job restricted to its first rows, on one local engine.

    The job tries no quantization, and writes its result to `folder`.
    """
    limit = min(rows, job.source.most_rows or rows)
    changes: dict[str, Any] = {
        "source.limit": limit,
        "source.sample": None,
        "source.sample_seed": 0,
        "source.rows_per_shard": limit,
        "engine.replicas": 1,
        **({} if job.engine.endpoint.asked else {"engine.engines_per_gpu": 1}),
        "engine.order": "input" if job.engine.order == "input" else "auto",
        "output.uri": folder,
        "output.options": {},
        "output.publish": [],
        "output.keep_answers": None,
        "limits.max_cost": None,
        "limits.min_rows": None,
        "cluster": {"address": LOCAL},
        "reuse": None,
    }
    return with_precision(edited(job, changes, "the job of a preview"), {})


def warm_caches(job: BatchJob, engine: type | None = None) -> tuple[WarmedCaches, ...]:
    """Fill this machine's caches of compiled code for a job's engine; return what was added.

    An engine starts in this process with the arguments that it has in a run of all rows, answers
    the first row, and ends; then the engine of a cascade's larger model does the same. The answers
    are not kept. Raises `ConfigError` if only hosted models are asked, which have no engine, and
    otherwise like `preview_rows`. `engine` replaces the engine stage in tests.
    """
    from prefect_raybatch.runs.preview import ANSWERS_PHASE, START_PHASE
    from prefect_raybatch.runs.warm_caches import (
        WarmedCaches,
        cache_content,
        cache_folders,
        filled,
    )

    if job.output.escalate.engine is not None:
        both = (first_of(job), larger_of(job))
        local = [one for one in both if not one.engine.endpoint.asked]
        # Without a local one, the first says why nothing is compiled.
        return tuple(warmed for one in local or both for warmed in warm_caches(one, engine))
    if job.engine.endpoint.asked:
        raise ConfigError(
            "engine.endpoint: a hosted model has no engine on this machine, so there is nothing to "
            "compile. Give a job whose engine.model is a local model"
        )
    job = with_precision(job, {})
    planned = dry_run(job)
    if planned.tokens is not None:  # the length was measured
        length = {"engine.max_model_len": planned.tokens.max_model_len}
        job = edited(job, length, "the job with its longest prompt")
    folders = cache_folders({**os.environ, **job.engine.env})
    before = [(folder, cache_content(folder.path)) for folder in folders]
    seconds = _preview(job, 1, True, engine, planned.sizing).seconds
    caches = tuple(filled(folder, content) for folder, content in before)
    return (WarmedCaches(job.engine.model, caches, seconds[START_PHASE], seconds[ANSWERS_PHASE]),)


MOST_DATES = 10_000


def planned_runs(job: BatchJob, first: date, last: date) -> list[DatedRun]:
    """Return the run of each date from `first` to `last`, both included, with its state.

    `job` has its credentials. Starts nothing and reads no input. Raises `ConfigError` for a job
    with the same input and output for every date, and for invalid dates.
    """
    if not locations_are_dated(job):
        raise ConfigError(
            f"{job.name} has no {{run_date}} in source (uri, query, filter) or output.uri, so each "
            "date would infer the same rows. Write {run_date} where the rows of a date are."
        )
    days = (last - first).days + 1
    if not 0 < days <= MOST_DATES:
        raise ConfigError(
            f"from {first} to {last} are {max(0, days):,} dates. Give a first date that is not "
            f"after the last, and at most {MOST_DATES:,} dates."
        )
    return [_planned(job, first + timedelta(days=number)) for number in range(days)]


def _planned(job: BatchJob, day: date) -> DatedRun:
    filled, key = resolve_run(job, None, None, day)
    check_trust(filled)
    root = open_store(filled.output.uri, filled.output.options or None)
    return dated_run(
        root,
        key,
        day,
        lambda: resolve(filled).identity,
        # The run itself finds what is not published yet; it publishes each target once.
        has_targets=bool(filled.output.publish),
    )


def backfill(
    job: BatchJob,
    runs: Sequence[DatedRun],
    run_date: Callable[[DatedRun], RunReport],
    at_most: int = 1,
    stop_on_failure: bool = False,
    observe: Callable[[DatedRun], None] = lambda run: None,
) -> list[DatedRun]:
    """Run the incomplete ones of `runs`, which has one run per date; return the state of all.

    They run in order, `at_most` at once. `run_date` is called in a thread and runs one date to its
    end; `observe` is called with each run that has ended. A failed run stops the others only with
    `stop_on_failure`: active ones finish, and nothing new begins. A signal stops all; committed
    shards are kept. One Ray cluster serves all of them. Raises `ConfigError` for `at_most` under 1,
    and errors of starting the cluster.
    """
    if at_most < 1:
        raise ConfigError(f"at most {at_most} concurrent runs is none. Give 1 or more.")
    todo = [run for run in runs if not run.done]
    if not todo:
        return list(runs)
    cluster = cluster_spec(resolve_run(job, None, None, todo[0].date)[0])
    return run_dates(cluster, runs, run_date, at_most, stop_on_failure, observe)
