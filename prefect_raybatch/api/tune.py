"""Tunes a job: tries engine settings on a sample of its rows, or finds a cascade's threshold."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable
from typing import Any

from prefect_raybatch.api import Sender, dry_run, finalize_run, plan_run
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.compare.threshold import SampleAnswers, TunedCascade, threshold_of_sample
from prefect_raybatch.compile.job import compile_job, compile_planned, read_spec
from prefect_raybatch.compile.resolved import Resolved, resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, first_of, larger_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.memory import experts_of
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.alterations import alterations
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.runs.tune import (
    COPIED_ROWS,
    FOLDER,
    Bench,
    Trial,
    Tuned,
    axes,
    outcome,
    remove_trials,
    tried,
)
from prefect_raybatch.sizing.agreement import CONFIDENCE, sample_size
from prefect_raybatch.storage import join, open_store

log = logging.getLogger(__name__)


def _check_tunable(job: BatchJob) -> None:
    """Raise `ConfigError` for a hosted model (no vLLM engine) or a cascade (two engines)."""
    if job.engine.endpoint.asked:
        raise ConfigError(
            "tuning tries settings of vLLM's engines, and engine.endpoint has none. Set its "
            "max_in_flight and limits as its server allows"
        )
    if job.output.escalate.engine is not None:
        raise ConfigError(
            "tuning tries one engine, and output.escalate has two. Remove output.escalate to tune "
            "the first one, or find the threshold with --cascade"
        )


def tune(
    job: BatchJob,
    minutes: float = 5.0,
    trial_seconds: float = 30.0,
    deadline: float | None = None,
    observe: Callable[[Trial], None] = lambda trial: None,
    engine: type | None = None,
) -> Tuned:
    """Try engine settings on a sample of the job's rows; return the trials and the best settings.

    Each trial lasts `trial_seconds` after its first shard. All together take about `minutes` from
    the first row in an engine. The first trial runs the unchanged job. The first start of an
    engine, which may compile kernels, does not count, but later starts do, so a large model leaves
    time for few settings. `deadline` is the time for the whole input in seconds; the result says
    how many replicas meet it. `observe` is called with each trial. `engine` replaces the engine
    stage in tests. Raises `ConfigError` for a hosted model or a cascade and if no trial worked, and
    errors of planning.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import Tenant

    _check_tunable(job)
    resolved = resolve(job).pinned()
    rows = dry_run(resolved).rows
    sample, key = _sampled(resolved.job), uuid.uuid4().hex[:12]
    run = plan_run(Resolved.of(sample, resolved.pinned_model), key)
    store = open_store(run.uri, job.output.options or None)
    try:
        plan, shards = load_run(Ledger(store), run)
        user = Tenant(f"tuning of {job.name}")
        spec = compile_job(resolved.job)
        # Take the whole cluster: another run beside a trial would distort its measurement.
        with cluster.connected(spec.cluster, user) as capacity:
            with cluster.admitted(spec.sizes, capacity, None, user):
                bench = Bench(
                    # Without the job's quantization trials, because those may change answers.
                    lambda changes: compile_planned(
                        edited(sample, changes, "the tuned job"), plan
                    ).decide(precision={}),
                    *(plan, shards, store, capacity, trial_seconds, engine),
                )
                options = alterations(spec, capacity, _experts(resolved))
                trials = tried(bench, axes(spec.sizes, capacity), options, 60 * minutes, observe)
            trials = bench.compared(trials, user)
    finally:
        remove_trials(open_store(job.output.uri, job.output.options or None), f"{FOLDER}/{key}")
    return outcome(trials, options, job.limits.min_agreement, rows, deadline)


def _experts(resolved: Resolved) -> int:
    """Return the number of experts in a layer of the model; 0 for a dense or unknown one."""
    try:
        return experts_of(models.read_config(resolved.model)[0])
    except ConfigError as error:  # the check of the model reports a missing config.json
        log.info("the number of experts is unknown: %s", error)
        return 0


def _sampled(job: BatchJob) -> BatchJob:
    """Return the job of the trials: small shards, in a folder separate from other runs."""
    from prefect_raybatch import source

    rows = job.source.rows_per_shard or job.engine.batch_size
    changes: dict[str, Any] = {
        "source.rows_per_shard": min(rows, job.engine.batch_size),
        # Rows are inferred in input order: nothing is reused, kept or reordered.
        "engine.order": "input" if job.engine.order == "input" else "auto",
        "output.uri": join(job.output.uri, FOLDER),
        "output.keep_answers": None,
        "reuse": None,
    }
    if source.needs_snapshot(read_spec(job.source)):
        name = "limit" if job.source.sample is None else "sample"
        changes[f"source.{name}"] = min(job.source.most_rows or COPIED_ROWS, COPIED_ROWS)
    return edited(job, changes, "the job of a trial")


def tune_cascade(
    job: BatchJob,
    agreement: float = 0.95,
    sender: Sender | None = None,
) -> TunedCascade:
    """Find the threshold below which the larger model of a cascade must answer a row.

    With it, at least the share `agreement` of the cascade's answers equal those of the larger model
    alone. Both models answer a random sample of the rows, in two runs that are removed afterwards;
    after a crash, the same call resumes these runs. `sender` says how they are sent to a Ray job
    server and who observes them. Raises `ConfigError` for a job without a threshold, and for too
    few rows.
    """
    spec = compile_job(job)
    cascade = spec.cascade
    if cascade is None or cascade.measure is None or spec.first is None:
        raise ConfigError(
            "--cascade needs a threshold to tune. Set output.escalate with "
            "when.probability_below or when.logprob_below to any value"
        )
    if not 0 < agreement < 1:
        raise ConfigError(f"--agreement {agreement:g} must be between 0 and 1. Example: 0.95")
    if job.source.limit is not None:
        raise ConfigError(
            "source.limit takes the first rows, and --cascade needs a random sample. Remove it, or "
            "set source.sample"
        )
    by = sender or Sender(job)
    changes, place = _cascade_sample(job, sample_size(agreement, CONFIDENCE))
    sent, sample = (edited(one, changes, "the job of a sample") for one in (by.job, job))
    first = _answered(first_of(sent), first_of(sample), "first", by)
    larger = _answered(larger_of(sent), larger_of(sample), "larger", by)
    options = job.output.options or None
    try:
        return threshold_of_sample(
            cascade,
            agreement,
            SampleAnswers.of(first, options, spec.first.finish, cascade),
            SampleAnswers.of(larger, options, spec.finish),
        )
    finally:
        remove_trials(open_store(job.output.uri, options), place)


def _cascade_sample(job: BatchJob, rows: int) -> tuple[dict[str, Any], str]:
    """Return the changes for a sample of `rows` rows, and the folder for its runs.

    The changes are {field: value}; the folder is below output.uri.
    """
    text = f"{resolve(job).identity.fingerprint} {rows}"
    folder = f"{FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    changes: dict[str, Any] = {
        "source.sample": min(rows, job.source.sample or rows),
        "output.uri": join(job.output.uri, folder),
        "output.columns": [],
        "output.publish": [],
        "limits.min_rows": None,
        "limits.deadline": None,
        "limits.max_failed_rows": None,
        "limits.max_failed_fraction": 1.0,  # rows that the larger model failed are not compared
        "quality": {},
    }
    return changes, folder


def _answered(job: BatchJob, loaded: BatchJob, key: str, sender: Sender) -> RunReport:
    """Run the job; return its report. `loaded` is `job` with the credentials of its blocks."""
    run = plan_run(loaded, key)
    infer_in_place(job, loaded, run, sender.observe, sender.owner)
    return finalize_run(loaded, run)
