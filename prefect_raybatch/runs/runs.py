"""What the Prefect tasks and the command line do, as plain functions.

The way through a run: `plan_run` -> `infer_run` -> `finalize_run`; each can be
called again after a crash and goes on where the records say.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import ConfigError, CorruptRun, InsufficientResources, RayBatchError
from prefect_raybatch.job.batch_job import NAME, BatchJob, Output, check_run_key
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import Plan, RunReport
from prefect_raybatch.ledger.same_job import check_same
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.model import check as model_check
from prefect_raybatch.model import pinned as models
from prefect_raybatch.plan import plan as planning
from prefect_raybatch.plan import prompt_lengths as counting
from prefect_raybatch.plan.fingerprint import fingerprint
from prefect_raybatch.plan.prompt_lengths import Tokens
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.advice import advise
from prefect_raybatch.report.charts import charts
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.sizing import sizes
from prefect_raybatch.sizing.explain import Figure, figures
from prefect_raybatch.sizing.shards import SEQUENCES, problems, sequences_seen
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.storage import Store, is_remote, join, open_store

if TYPE_CHECKING:
    import numpy as np
    import ray.data

    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.result.finalize import Result

log = logging.getLogger(__name__)
SHOWN = 20  # attempts whose heartbeats a status looks at, the latest
REPORT, REPORT_PAGE = "_raybatch/report.json", "_raybatch/report.md"
REPORT_HTML = "_raybatch/report.html"


@dataclass(frozen=True)
class Run:
    """A run as tasks hand it on: small, plain and without secrets."""

    uri: str
    run_key: str
    plan_hash: str
    rows: int
    shards: int
    finished: bool


@dataclass(frozen=True)
class DryRun:
    """What `raybatch plan` shows; `tokens` where asked for or needed for max_model_len: auto."""

    job: str
    rows: int
    files: int
    format: str
    sizing: Sizing
    columns: tuple[str, ...]
    model: dict[str, Any]
    run: str
    needs: dict[str, Any]
    have: dict[str, Any]
    figures: tuple[Figure, ...]
    problems: tuple[str, ...]
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Status:
    """What a run directory says now. `rate` is rows a second over the latest commits; `beats` are
    the heartbeats of attempts that have not said that they ended, newest first; `strays` are files
    among the commits that are none; `stopped` says why the latest attempt stopped, where it was the
    error budget."""

    run: str
    run_key: str
    job: str
    state: str
    rows: int
    done: int
    good: int
    quarantined: int
    skipped: int
    shards: int
    committed: int
    pending: int
    rate: float
    seconds_left: float | None
    failures: dict[str, int]
    attempts: tuple[dict[str, Any], ...]
    beats: tuple[dict[str, Any], ...]
    strays: tuple[str, ...] = ()
    stopped: Stop | None = None


# --- where a run is -----------------------------------------------------------------------------


def run_store(job: BatchJob, run_key: str) -> Store:
    """The store rooted at the job's run directory of that key."""
    return open_store(join(job.output.uri, check_run_key(run_key)), job.output.options or None)


def default_run_key(job: BatchJob, scheduled: datetime | None = None) -> str:
    """Job name and the scheduled start; without one, the newest unfinished run of this job, so
    that running again after a crash continues, else a new key of this second."""
    if scheduled is not None:
        return f"{job.name}-{scheduled.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    wanted = fingerprint(job, model_identity(job))[0]
    root = open_store(job.output.uri, job.output.options or None)
    unfinished = []
    for key in run_keys(root):
        ledger = Ledger(root.sub(key))
        try:
            plan = ledger.load_plan()
            if plan is None or plan.fingerprint != wanted or ledger.finished(plan) is not None:
                continue
        except CorruptRun:  # another format, or not ours: nothing to continue
            continue
        unfinished.append((plan.created, key))
    if unfinished:
        return max(unfinished)[1]
    return f"{job.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def run_keys(root: Store) -> list[str]:
    """Names right below `root` that may be run directories."""
    return sorted(name for name in root.folders() if NAME.match(name))


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


# --- plan ---------------------------------------------------------------------------------------


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


def model_identity(job: BatchJob) -> dict[str, Any] | None:
    """The model's identity where it can be told without the network: a folder's contents."""
    if job.engine.model == models.DEMO or not _is_hub_name(job.engine.model):
        return models.resolve(job.engine)
    return None


def _is_hub_name(model: str) -> bool:
    return not is_remote(model) and not os.path.exists(model)


def run_of(store: Store, plan: Plan, ledger: Ledger) -> Run:
    """The run that a plan stands for, as tasks hand it on."""
    return Run(
        store.uri,
        plan.run_key,
        plan.hash,
        plan.rows,
        plan.shards,
        ledger.finished(plan) is not None,
    )


def dry_run(
    job: BatchJob, run_key: str | None = None, what_if: Capacity | None = None, sample: int = 0
) -> DryRun:
    """What a run would do, without writing and without Ray, unless a cluster is named: then its
    capacity is asked. `what_if` takes the cluster's place. `problems` is empty when the run can
    start and its engines are kept busy. `sample` rows are made into prompts to see how long they
    are (0: none, unless max_model_len is auto)."""
    from prefect_raybatch import source

    check_places(job)
    check_trust(job)
    check_schema_names(job)
    fingerprint(job)
    snapshot = source.needs_snapshot(job.source)
    found = source.peek(job.source) if snapshot else source.inventory(job.source)
    planning.check_against_schema(job, found.schema)
    model = models.resolve(job.engine)
    model_check.check(job, model, files=what_if is None)
    tokens = None
    if sample or job.engine.max_model_len == "auto":
        sample = sample or counting.SAMPLE
        tokens = (
            counting.of_heads(job, model, sample)
            if snapshot
            else counting.of_files(job, model, found, sample=sample)
        )
        job = planning.settled(job, tokens.context())
    rows = sum(file.rows for file in found.files)
    have, wrong = (what_if, []) if what_if else sized.ask(job)
    known, unknown = sized.model_sizes(job, model, have)
    expected = sizes.expected_engines(job, what_if) if what_if else sized.expected_engines(job)
    try:
        size = sizes.resolve(job, rows, found.row_bytes, have, known, unknown, expected=expected)
    except (ConfigError, InsufficientResources) as error:
        wrong.append(str(error))
        size = sizes.resolve(job, rows, found.row_bytes, have, expected=expected)
    wrong += size.problems
    needs = sized.needs(job, have, size, wrong)
    return DryRun(
        job=job.name,
        rows=rows,
        files=len(found.files),
        format=found.format,
        sizing=size,
        columns=tuple(found.schema.names),
        model=model,
        run=join(job.output.uri, run_key or f"{job.name}-..."),
        needs=needs,
        have=asdict(have),
        figures=tuple(figures(job, have, size, known)),
        problems=tuple(wrong),
        tokens=tokens,
    )


# --- infer --------------------------------------------------------------------------------------


def infer_run(
    job: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    engine: type | None = None,
) -> Progress:
    """Reads, infers and commits every pending shard; returns the progress at the end.

    Starts no engine when nothing is pending. An observer that is a `heartbeat.Listener` is told of
    beats as well. `engine` replaces the engine stage in tests.
    """
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.driver.driver import Driver
    from prefect_raybatch.driver.monitor import Monitor
    from prefect_raybatch.driver.stall import interruptible

    check_trust(job)
    store = open_store(run.uri, job.output.options or None)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    job = planning.settled(job, plan.context)
    attempt = uuid.uuid4().hex
    lazy = _LazyPipeline()
    monitor = Monitor(attempt, plan, store, job.limits, observe, lazy.engines)
    user = User(job.name, monitor.held)
    run_pass: Any = lazy
    # A signal is raised in the main thread; a run in another one must be told. And a nightly run
    # that nobody watches needs `fail_on_stall`: Ray waits for ever for room in a cluster, which
    # neither `hang_seconds` (engines) nor `function_seconds` (functions) sees.
    in_thread = threading.current_thread() is not threading.main_thread()
    if job.limits.fail_on_stall or in_thread:
        run_pass = interruptible(lazy, lambda: monitor.failure, lazy.stop, user.halted)
    driver = Driver(plan, shards, ledger, job.limits, run_pass, lazy.quarantine, monitor)
    progress = driver.resume()
    if driver.done.all():
        return progress
    monitor(progress)
    # Also where the plan is an earlier attempt's: what it found may since have changed.
    store.probe()
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.pipeline import Pipeline

    whoami = _whoami(plan)
    driver.on_stop = partial(_note_stop, ledger, attempt, whoami)
    ledger.note_attempt(attempt, whoami)
    with ExitStack() as stack:
        stack.enter_context(monitor)
        capacity = stack.enter_context(cluster.connected(job, user))
        monitor.dashboard = cluster.dashboard()
        if monitor.dashboard:
            log.info("Ray's dashboard: %s", monitor.dashboard)
        size = sized.for_attempt(job, plan, ledger, capacity)
        cluster.check_fit(job, capacity, size.pool)
        for warning in size.warnings:
            log.warning(warning)
        stack.enter_context(cluster.admitted(job, capacity, size.pool, user))
        lazy.pipeline = Pipeline(
            job,
            plan,
            shards,
            store,
            attempt,
            size,
            dict(job.source.options),
            # Another attempt may be alive. Ours is noted before we look, so that of two that start
            # at the same moment one at least sees the other.
            shuffle=attempt if len(ledger.attempts()) > 1 else None,
            **({"engine": engine} if engine else {}),
        )
        driver.suspects = size.pool.engines * (1 + size.concurrent)
        return driver.run()


def _note_stop(ledger: Ledger, attempt: str, whoami: dict[str, Any], stop: Stop) -> None:
    try:
        ledger.note_attempt(attempt, {**whoami, "stopped": stop.to_dict()})
    except RayBatchError as error:  # the run ends with what it ends with
        log.warning("the failed rows are not noted in the run directory: %s", error)


class _LazyPipeline:
    """Stands for the pipeline until the ledger has said that there is something to do: importing
    Ray and starting a cluster take seconds that a finished run need not wait."""

    pipeline: Any = None

    def __call__(self, units: Any, isolated: bool) -> Any:
        return self.pipeline(units, isolated)

    def quarantine(self, unit: Any, reason: str) -> Any:
        return self.pipeline.quarantine(unit, reason)

    def engines(self) -> dict[str, int]:
        return self.pipeline.engines() if self.pipeline is not None else {}

    def stop(self) -> None:
        if self.pipeline is not None:
            self.pipeline.stop()


def load_run(ledger: Ledger, run: Run) -> tuple[Plan, Shards]:
    plan = ledger.load_plan()
    if plan is None:
        raise CorruptRun(f"{run.uri}: the plan has disappeared")
    if plan.hash != run.plan_hash:
        raise CorruptRun(f"{run.uri}: the plan is not the one this flow began with")
    return plan, ledger.shards(plan)


def _whoami(plan: Plan) -> dict[str, Any]:
    import getpass

    user = "unknown"
    with suppress(OSError, KeyError):  # containers run under numbers without a name
        user = getpass.getuser()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.hash,
    }


# --- finalize -----------------------------------------------------------------------------------


def finalize_run(job: BatchJob, run: Run, progress: Progress | None = None) -> RunReport:
    """Writes the result and _SUCCESS; returns the report. A finished run gives its report again.

    Raises `IncompleteRun` while shards are missing, `CorruptRun` when coverage does not hold.
    """
    from prefect_raybatch.result.finalize import finalize

    store = open_store(run.uri, job.output.options or None)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    job = planning.settled(job, plan.context)
    # The layout is the plan's, so that any two finalizers write the same files.
    output = BatchJob.from_dict(plan.job, "plan.json").output
    if ledger.finished(plan) is not None:
        return _end(ledger, plan, output.compact)
    try:
        result = finalize(
            ledger, plan, shards, output.row_number, output.file_mb << 20, output.compact
        )
    except CorruptRun:
        if ledger.finished(plan) is None:
            raise
        return _end(ledger, plan, True)  # another finalizer was done first and tidied up
    made = reports.build(
        run.uri,
        plan,
        result.tally,
        "completed",
        result.parts,
        resumed_shards=progress.resumed_shards if progress else 0,
        notes=(*_notes(job, plan, result.tally), *_of_whom(plan)),
        engine_deaths=progress.engine_deaths if progress else 0,
        losses=progress.losses if progress else None,
        dashboard=_dashboard(store),
    )
    made = replace(made, advice=advise(made, job))
    if ledger.finished(plan) is not None:
        return _end(ledger, plan, True)  # the report is the other finalizer's too
    put_record(store, REPORT, made.to_bytes())
    store.put(REPORT_PAGE, reports.markdown(made).encode())
    store.put(REPORT_HTML, html_page(made).encode())
    ledger.succeed(_success(plan, output, result))
    return _end(ledger, plan, True)


def _success(plan: Plan, output: Output, result: Result) -> Success:
    return Success(
        rows=plan.rows,
        data=result.tally.good,
        quarantine=result.tally.failed,
        skipped=result.tally.skipped,
        parts=tuple(result.parts),
        compact=output.compact,
        row_number=output.row_number,
        finished=time.time(),
        plan=plan.hash,
    )


def _notes(job: BatchJob, plan: Plan, tally: Tally) -> list[str]:
    seqs = sequences_seen(job, tally.whole.figures()) or SEQUENCES
    engines = sizes.certain_engines(job)
    shards = f"rows a shard: {plan.rows_per_shard:,} (the run's plan)"
    return [shards, *problems(job, plan.rows, plan.rows_per_shard, engines, seqs)]


def _of_whom(plan: Plan) -> list[str]:
    if plan.parent is None:
        return []
    return [f"these are failed rows of run {plan.parent}, under the row numbers they have there"]


def _end(ledger: Ledger, plan: Plan, tidy: bool) -> RunReport:
    """The report of a finished run; `tidy` removes the pieces that its result does not need.

    Whose `_SUCCESS` it is and whether the parts are there is looked at again, by `orphans`.
    """
    from prefect_raybatch.result.reap import orphans

    if tidy:
        ledger.store.delete(info.path for info in orphans(ledger, plan))
    return load_report(ledger.store)


def load_report(store: Store) -> RunReport:
    """The report of a finished run; raises `CorruptRun` when it is gone."""
    try:
        return RunReport.from_bytes(read_record(store, REPORT))
    except FileNotFoundError:
        raise CorruptRun(f"{store.uri} is finished but has no {REPORT}") from None


def html_page(report: RunReport) -> str:
    """The report as one HTML file, with the present time in its footer."""
    from prefect_raybatch.report.html import html

    return html(report, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def _dashboard(store: Store) -> str:
    """Ray's dashboard as the latest heartbeat names it; "" where none does."""
    from prefect_raybatch.driver.heartbeat import newest

    try:
        beat = newest(store)
    except RayBatchError as error:  # a link is not worth the run
        log.info("heartbeats cannot be read: %s", error)
        return ""
    return beat.dashboard if beat else ""


# --- look ---------------------------------------------------------------------------------------


def report_of(uri: str, options: dict[str, Any] | None = None) -> RunReport:
    """The report of a run directory: the one that was written at its end, or, while there is none
    and for one of an earlier version, what the commits say now."""
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    final = load_report(store) if ledger.finished(plan) is not None else None
    if final is not None and final.charts.cells:
        return final
    tally, listing = Tally(), ledger.listing(plan)
    for commit in ledger.commits(plan, listing):
        tally.add(commit)
    if final is None:
        state, notes = ("unfinished" if tally.shards else "planned"), _of_whom(plan)
        stop = _stop_of(_attempts(ledger), listing.done)
        notes += [f"stopped: {stop.line()}", *stop.lines()] if stop else []
        return reports.build(
            store.uri, plan, tally, state, notes=notes, dashboard=_dashboard(store)
        )
    return replace(final, charts=charts(tally, plan.shards))


def status(uri: str, options: dict[str, Any] | None = None) -> Status:
    """Reads a run directory, also while it runs and from another machine."""
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    tally, listing = Tally(), ledger.listing(plan)
    for commit in ledger.commits(plan, listing):
        tally.add(commit)
    finished = ledger.finished(plan) is not None
    rate = 0.0 if finished else tally.recent_rate()
    attempts = _attempts(ledger)
    state = "completed" if finished else "unfinished" if tally.shards else "planned"
    return Status(
        run=store.uri,
        run_key=plan.run_key,
        job=plan.job_name,
        state=state,
        rows=plan.rows,
        done=tally.rows,
        good=tally.good,
        quarantined=tally.failed,
        skipped=tally.skipped,
        shards=plan.shards,
        committed=tally.shards,
        pending=plan.shards - tally.shards,
        rate=round(rate or tally.steady_rate, 1),
        seconds_left=round((plan.rows - tally.rows) / rate, 1) if rate else None,
        failures=tally.failures,
        attempts=tuple(attempts),
        beats=() if finished else tuple(_beats(store, attempts)),
        strays=tuple(listing.strays),
        stopped=_stop_of(attempts, listing.done),
    )


def _attempts(ledger: Ledger) -> list[dict[str, Any]]:
    found = []
    for name in ledger.attempts():
        try:
            found.append({"attempt": name, **ledger.read_attempt(name)})
        except (CorruptRun, FileNotFoundError) as fault:  # for people only: the rest still is told
            log.warning("the note of attempt %s is not shown: %s", name, fault)
    return sorted(found, key=lambda attempt: str(attempt.get("started")))


def _stop_of(attempts: list[dict[str, Any]], done: np.ndarray) -> Stop | None:
    """Why the latest attempt stopped, unless the shard it held back is committed meanwhile."""
    stop = Stop.from_note(attempts[-1]) if attempts else None
    if stop is None or type(stop.shard) is not int or not 0 <= stop.shard < len(done):
        return None
    return None if done[stop.shard] else stop


def _beats(store: Store, attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Heartbeats of attempts that have not ended, with `age` in seconds by this clock."""
    from prefect_raybatch.driver.heartbeat import ENDED, read_beats

    now = time.time()
    known = {str(attempt["attempt"]): attempt for attempt in attempts[-SHOWN:]}
    found = [
        {**known[name], **asdict(beat), "age": round(now - beat.at, 1)}
        for name, beat in read_beats(store, known).items()
        if beat.phase != ENDED
    ]
    return sorted(found, key=lambda beat: beat["age"])
