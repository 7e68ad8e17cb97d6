"""The operations on a job's run: plan, infer, finalize, publish, preview, backfill and others.

Each function compiles the job and calls the function of package `runs` that does the work. The main
path is `plan_run` -> `infer_run` -> `finalize_run`. Each of these can be called again after a
crash, and continues from what the run directory records.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from prefect_raybatch.compile.job import (
    cluster_spec,
    compile_plan,
    compile_planned,
    planned_job,
    read_spec,
    size_spec,
)
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.driver import metrics
from prefect_raybatch.driver.heartbeat import Listener
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
    planned_run_date,
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
from prefect_raybatch.ledger.forks import original_key
from prefect_raybatch.ledger.last_attempt import JUDGING, MEASURING, PUBLISHING
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.published import unpublished_labels
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.policy.in_force import policy_in_force
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs import attempts
from prefect_raybatch.runs.agreement import with_agreement
from prefect_raybatch.runs.backfill import DatedRun, dated_run, plans_below, run_dates
from prefect_raybatch.runs.dry_run import DryRun, dry_run_resolved
from prefect_raybatch.runs.finalize_run import finalize_spec, load_report
from prefect_raybatch.runs.infer_run import infer_spec
from prefect_raybatch.runs.judge import judgement_to_make, with_verdicts
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

JUDGE_SUFFIX = "-judge"  # added to a run's key for the run of its judge
SHORTEST_SECRET = 4  # characters: shorter texts also occur in ordinary words


@dataclass(frozen=True)
class Sender:
    """How to send jobs that are derived from a job, such as the judge's, to a cluster.

    `job` is the user's job without the credentials of its blocks; the jobs that are sent are made
    from it. `owner` is the flow run that sends them (None: no flow run). `observe` receives the
    progress of their runs, also if they run on a local cluster.
    """

    job: BatchJob
    owner: Owner | None = None
    observe: Listener = field(default_factory=Listener)


# --- the name of a run --------------------------------------------------------------------------


def default_run_key(job: BatchJob | Resolved, scheduled: datetime | None = None) -> str:
    """Return the run key for a job: NAME-YYYYMMDDTHHMMSSZ of the scheduled start, in UTC.

    Without `scheduled`, return the key of the newest unfinished run of this job, so that the same
    command after a crash resumes it. If there is no such run, return a new key with the current
    second.
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
    """Return (the job with {run_date} and {run_key} filled in, the run key).

    Without `run_key`, the first of these gives the key: midnight of `run_date`, `scheduled`, a new
    key with the current second if the job contains {run_key}, else `default_run_key`. A job with
    {run_key} gets a new key because its locations depend on the key.

    The first of these gives {run_date}: `run_date`, the date in the run key, the date of the
    scheduled start, today; all in UTC. But while `default_run_key` looks for an unfinished run,
    {run_date} in source and output is today.
    """
    if run_date is not None and run_key is None:  # so that the same date finds the same run
        scheduled = attempts.midnight(run_date)
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
    """Return the key of the run in which a judge grades the answers of run `run_key`: KEY-judge.

    KEY is `run_key`, shortened if the result would be longer than a run key may be.
    """
    return f"{run_key[: LONGEST_NAME - len(JUDGE_SUFFIX)]}{JUDGE_SUFFIX}"


# --- records of attempts ------------------------------------------------------------------------


@contextmanager
def recorded_attempt(
    store: Store, job: BatchJob, run_key: str, phase: str, begin: bool = True
) -> Iterator[None]:
    """Record in `store` that an attempt begins; record its end if the `with` block raises.

    `store` is the run directory, `phase` the step that the block takes (PLANNING, INFERENCE or
    FINALIZING of `runs.attempts`). With `begin=False`, nothing is recorded unless the block raises.
    The failure is not recorded if the run is already complete.
    """
    with attempts.recorded_end(store, job.name, run_key, phase, secrets_of(job), begin):
        yield


def record_unplanned(
    job: BatchJob, run_key: str | None, error: BaseException, run_date: date | None = None
) -> tuple[Store, str] | None:
    """Record an attempt that failed before its plan existed; return (run directory, run key).

    Returns None, after a warning in the log, if the attempt cannot be recorded. Without `run_key`,
    the key is made from the job's name and midnight of `run_date`. If this is None too, the current
    second is used. `run_date` is the value of {run_date}, by default the date in the key, else
    today.
    """
    key = run_key or attempts.key_for_start(job.name, attempts.midnight(run_date))
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
    """Return the secret texts in a job, which must be masked; the longest first.

    Texts of fewer than 4 characters are left out.
    """
    secrets: set[str] = set()
    _collect(job.to_dict(), job.model_dump(mode="json", by_alias=True), secrets)
    return sorted(secrets, key=len, reverse=True)


def _collect(clear: object, shown: object, secrets: set[str]) -> None:
    """Add to `secrets` each text of `clear` that is masked in `shown` and is not very short.

    `clear` are values of a job in clear text, `shown` the same values with the secrets masked.
    Texts of fewer than 4 characters are left out, because they also occur in ordinary words.
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
    """Write the plan of the run, or adopt the plan that exists; return the run.

    `dataset` replaces the job's source files. `accept` names fields in which the job may differ
    from the existing plan; the run records that the user accepted these differences.

    Raises `ConfigError`, `SourceError`, `PlanMismatch` or `UnsafeStore`: no retry can fix these.
    May also raise errors for which a retry can help (`is_transient`), such as `StoreUnavailable` or
    `HubUnavailable`.
    """
    resolved = resolve(job)
    job = resolved.job
    check_places(read_spec(job.source), job.output.uri, job.output.options)
    ledger = Ledger(run_store(job.output, run_key))
    plan = ledger.load_plan()
    with recorded_attempt(ledger.store, job, run_key, attempts.PLANNING, begin=plan is None):
        golden_of(job.quality, job.output)  # raises here if the file cannot be read
        check_judge(job.quality)
        if plan is not None:
            return adopt_plan(plan, resolved, ledger, accept)
        return begin_run(resolved, run_key, ledger, dataset)


def precheck(job: BatchJob | Resolved, store: Store, accept: Sequence[str] = ()) -> Resolved:
    """Make all checks of a job that take at most a second; return the resolved job.

    So a wrong job fails before anything starts. If the run directory `store` has a plan, the job is
    compared with it, except for the fields in `accept`; else a sample of the input is read. The
    returned job contains the text of the files that it names, and the exact version of its model if
    that needs no network.
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

    `what_if` is a cluster to assume instead of the job's. `sample` is the number of rows whose
    prompts are made and measured. If it is 0, none are measured; with max_model_len `auto`, as many
    as needed. The cost is estimated for `rows_left` rows. By default these are all rows or, if the
    job reuses answers, the rows that it infers. The result's `problems` are empty if the run can
    start and keep its engines busy.
    """
    return dry_run_resolved(resolve(job), run_key, what_if, sample, rows_left)


def next_step(job: BatchJob | Resolved, run_key: str | None = None) -> NextStep | None:
    """Return what `raybatch run` would do with this job and run key; write nothing.

    Without `run_key`, the command would resume the newest unfinished run of the job. Returns None
    if there is no such run, or if the search for it fails, which is only logged. With `run_key`,
    raises `CorruptRun` if the records of that run are unreadable, and the errors of the store.
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

    Starts no engine if nothing is pending. `observe` is called with the progress; if it is a
    `heartbeat.Listener`, it also receives heartbeats. `engine` replaces the engine stage in tests.
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
    """Write the result and `_SUCCESS`; return the report.

    A complete run is not written again. Measures the accuracy if the job names golden rows or a
    judge. For a cascade, tests whether its two models agree on fewer of the checked rows than in
    earlier runs.

    `progress` is what `infer_run` returned. `written` is output.uri before {run_date} and {run_key}
    were filled in, which shows where earlier runs are. By default, it is the output.uri of `job`.
    `sender` says how the judge's job is sent to a Ray job server, and who observes its run; it is
    needed if that job names blocks with credentials, or to observe the run.

    Raises `IncompleteRun` while shards are missing, `CorruptRun` if the coverage is wrong, and the
    errors of the judge's run.
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
    """Return the report of a finished run, with its accuracy by golden rows and by a judge.

    `member` is the run; `written` and `sender` are those of `finalize_run`. With `measure_again`, a
    run that was measured before is measured again, because its judge or golden rows may have
    changed.
    """
    written = written or job.output.uri
    place = (member.ledger.store, job.name, member.key)
    step = attempts.recorded_step(*place, MEASURING, secrets_of(job))
    report = measured(report, member, job.quality, job.output, written, step, measure_again)
    to_judge = judgement_to_make(member, job.quality, job.output, measure_again)
    if to_judge is None:
        return report
    by = sender or Sender(job)

    def ask(rows: str, runs: str, max_cost: float | None) -> RunReport:
        own = judging_job(job, rows, runs, max_cost)
        run = plan_run(own, judge_key(member.key))
        by.observe.on_judge(run.uri)
        if not own.cluster.access.remote:
            return _finalized(own, run, infer_run(own, run, by.observe))
        from prefect_raybatch.api.sending import infer_on_cluster

        sent = judging_job(by.job, rows, runs, max_cost)
        judged = run_of(member.ledger.store, member.plan, member.ledger)
        progress = infer_on_cluster(sent, own, run, by.observe, by.owner, judged)
        return _finalized(own, run, progress)

    most = job.limits.max_cost
    with attempts.recorded_step(*place, JUDGING, secrets_of(job)):
        return with_verdicts(
            *(report, member, job.quality, job.output, most, written, ask, to_judge)
        )


def _finalized(job: BatchJob | None, run: Run, progress: Progress | None = None) -> RunReport:
    """Write the result of a run; return its report.

    Without `job`, the job in the run's plan says what to write. But others may write to a run
    directory, so the cluster and the server that it names are not used. It has no store options.
    """
    ledger = Ledger(open_store(run.uri, (job.output.options if job else None) or None))
    plan, shards = load_run(ledger, run)
    spec = compile_plan(plan) if job is None else compile_planned(job, plan)
    report = finalize_spec(spec, ledger, plan, shards, progress, asks_server=job is not None)
    metrics.completed(report.job, run.run_key)
    return report


def finalize_whole(
    run_dir: str, job: BatchJob | None = None, sender: Sender | None = None
) -> RunReport:
    """Write result, report and `_SUCCESS` of a run with all shards committed; publish nothing.

    Returns the report, even if the run was complete before. `job` gives access to the store and
    names the cluster on which a large result is written. Without it, the result is written on this
    machine, golden rows and judge are not used, and no batches are removed from a hosted model's
    server. Raises `IncompleteRun` while shards are missing, and the errors of `finalize_run`.
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
        # Some earlier runs may not be found, because output.uri may have contained {run_date}.
        beside = (store.above() or store).uri
        return with_agreement(_finalized(None, run), None, beside, needs_earlier=True)
    except IncompleteRun as error:
        raise IncompleteRun(
            f"{error}, or write the committed rows now: raybatch finalize --partial {store.uri}"
        ) from None


def finalize_partial(
    run_dir: str, options: Mapping[str, Any] | None = None, job: BatchJob | None = None
) -> RunReport:
    """Write the committed rows of an incomplete run to a folder in `run_dir`; return its report.

    The folder is `partial/_UUID`, with `data` and `_quarantine`. The report's state is "partial"
    and its `run` is that folder. The run stays unfinished and can be resumed and finished as
    before; nothing is deleted. Reads only commits and the pieces that they name, so it may be
    called while a driver is active. `options` are s3fs options, as in `output.options`. `job` names
    the cluster on which a large result is written; without it, that is done on this machine.

    Raises `ConfigError` for a run with all shards committed, or one that is completed meanwhile.
    Raises `IncompleteRun` while nothing is committed. Can also raise `NoSuchRun`, `CorruptRun` and
    the store's errors.
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

    Anyone who can write to a run directory could add a target to its plan. So without `job`, the
    targets in the plan are refused, unless `targets_from_plan` says that the user has reviewed
    them. `run_date` is the value of {run_date} in a target, by default the run's date. `written`
    and `sender` are those of `finalize_run`. `observe` is called with a text for each step.

    Raises `IncompleteRun` while the run is not finished, `ConfigError` for what cannot be
    published, `PublishFailed` (worth a retry), and `QualityTooLow` below `quality.at_least`.
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
    job = _with_dated_targets(job, member.plan, run_date)
    check_trust(job)
    store, report = member.ledger.store, None
    if job.quality.golden is not None or job.quality.judge.asked:
        report = load_report(store)
        # A run directory decides neither which file is read as golden rows, nor who judges.
        if given:
            report = _with_quality(report, member, job, written, sender, measure_again=True)
    step: AbstractContextManager[None] = nullcontext()
    if unpublished_labels(store, job.output.publish):
        step = attempts.recorded_step(store, job.name, member.key, PUBLISHING, secrets_of(job))
    with step:
        if report is not None:
            check_accuracy(report, member, job.quality, job.output)
        return publish_member(member, job.output.publish, options, observe)


def _with_dated_targets(job: BatchJob, plan: Plan, run_date: date | None) -> BatchJob:
    """Return the job with {run_date} in its targets filled in, by default with the run's date."""
    when = run_date or planned_run_date(job, planned_job(plan), original_key(plan))
    return render_targets(job, plan.run_key, when)


def other_targets(job: BatchJob, uri: str, run_date: date | None = None) -> tuple[str, str] | None:
    """Return (targets of the job, targets in the run's plan) as text, one per line; None if equal.

    `uri` is the run directory. Targets that differ may mean that the user chose the wrong job or
    the wrong run.
    """
    from prefect_raybatch.runs.publish_run import targets_text

    plan = need_plan(Ledger(open_store(uri, job.output.options or None)))
    of_job, of_plan = (
        targets_text(_with_dated_targets(j, plan, run_date).output.publish, plan.run_key)
        for j in (job, planned_job(plan))
    )
    return None if of_job == of_plan else (of_job, of_plan)


# --- preview ------------------------------------------------------------------------------------


def preview_rows(
    job: BatchJob, rows: int = 5, answers: bool = True, engine: type | None = None
) -> Preview:
    """Send the first `rows` rows through every stage of the job, in this process, on one engine.

    Returns the prompts and answers. Without `answers`, no engine starts and the rows are only
    prepared. For a cascade, returns the preview of the first model, whose `larger` is the preview
    of the larger model. Stores and publishes nothing, and reuses no answer of earlier runs.
    `engine` replaces the engine stage in tests.

    For a job that cannot run, raises the errors of `plan_run`. Raises `InsufficientResources` if
    this machine has no GPU for the job's engine, and `EngineStartError` or `EngineFailure` if the
    engine does not start or dies.
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
    """Return the preview of one model's answers to the first `rows` rows.

    The engine is sized by `size`, or for a run of just these rows if that is None.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster import sizes as sized
    from prefect_raybatch.runs.preview import PREVIEW_KEY, PhaseClock, check_gpus_here, preview_spec

    with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
        clock = PhaseClock()
        resolved = _first_rows_of(job, rows, folder)
        small = resolved.job
        capacity = cluster.this_machine(cluster_spec(small))
        if answers:
            check_gpus_here(size_spec(small), capacity)
        run = plan_run(resolved, PREVIEW_KEY)
        ledger = Ledger(run_store(small.output, PREVIEW_KEY))
        plan, shards = load_run(ledger, run)
        spec = compile_planned(small, plan)
        size = size or sized.for_attempt(spec.sizes, plan, capacity)
        return preview_spec(spec, ledger, plan, shards, size, clock, answers, engine)


def _first_rows_of(job: BatchJob, rows: int, folder: str) -> Resolved:
    """Return the job restricted to its first rows, on one local engine.

    Its result is written to `folder`. Publishing, reuse, quality, cost limits and quantization
    trials are switched off.
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
        "output.publish": [],
        "output.keep_answers": None,
        "limits.max_cost": None,
        "limits.min_rows": None,
        "quality": {},
        "cluster": {"address": LOCAL},
        "reuse": None,
    }
    where = "the job of a preview"
    # Resolve before options is cleared: engine.classifier is read with it.
    resolved = resolve(with_precision(edited(job, changes, where), {}))
    here = {"output.uri": folder, "output.options": {}}
    return replace(resolved, job=edited(resolved.job, here, where))


def warm_caches(job: BatchJob, engine: type | None = None) -> tuple[WarmedCaches, ...]:
    """Fill this machine's caches of compiled code for a job's engine; return what was added.

    Starts an engine in this process with the arguments that it has in a run of all rows, sends it
    the first row, discards the answer, and ends the engine. For a cascade, does so for each of its
    two models that is not hosted. Raises `ConfigError` if all models are hosted, because they have
    no engine here; for other errors see `preview_rows`. `engine` replaces the engine stage in
    tests.
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

    `job` must contain the credentials of its blocks. Starts nothing and reads no input. Raises
    `ConfigError` for invalid dates. Raises it also if neither source nor output.uri contains
    {run_date}, because all dates would have the same rows.
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
    plans: dict[str, list[Plan]] = {}  # by folder; most jobs have one folder for all dates
    return [_planned(job, first + timedelta(days=number), plans) for number in range(days)]


def _planned(job: BatchJob, day: date, plans: dict[str, list[Plan]]) -> DatedRun:
    filled, key = resolve_run(job, None, None, day)
    check_trust(filled)
    root = open_store(filled.output.uri, filled.output.options or None)
    quality = filled.quality

    def plans_of_root() -> list[Plan]:
        if root.uri not in plans:
            plans[root.uri] = plans_below(root)
        return plans[root.uri]

    return dated_run(
        root,
        key,
        day,
        lambda: resolve(filled).identity,
        plans_of_root,
        # The run itself finds which of these is not done yet; it does each once.
        has_later_steps=quality.golden is not None
        or quality.judge.asked
        or bool(filled.output.publish),
    )


def backfill(
    job: BatchJob,
    runs: Sequence[DatedRun],
    run_date: Callable[[DatedRun], RunReport],
    at_most: int = 1,
    stop_on_failure: bool = False,
    observe: Callable[[DatedRun], None] = lambda run: None,
) -> list[DatedRun]:
    """Run the dates in `runs` that are not done; return all runs with their new states.

    The dates run in order, up to `at_most` at once, on one Ray cluster. `run_date` is called in a
    thread and runs one date to its end; `observe` is called with each run that has ended. With
    `stop_on_failure`, no date begins after one has failed, but active ones finish. A signal ends
    all active dates; committed shards are kept. `cluster.on_crash` says what then happens to their
    Ray jobs. Raises `ConfigError` for `at_most` under 1, and the errors of starting the cluster.
    """
    if at_most < 1:
        raise ConfigError(f"at most {at_most} concurrent runs is none. Give 1 or more.")
    todo = [run for run in runs if not run.done]
    if not todo:
        return list(runs)
    cluster = cluster_spec(resolve_run(job, None, None, todo[0].date)[0])
    return run_dates(cluster, runs, run_date, at_most, stop_on_failure, observe)
