"""Decides from earlier runs how many engines share a GPU, and the `max_num_seqs` of each engine.

Also records this decision and what the run measured with it. The rules are in `learning/`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.errors import ConfigError, CorruptRun, InsufficientResources, RayBatchError
from prefect_raybatch.installed import engine_version
from prefect_raybatch.learning.coming_run import PlannedRows, coming_run_of
from prefect_raybatch.learning.rules import (
    LEAST_SECONDS,
    ComingRun,
    EarlierRun,
    decide,
    in_trial,
)
from prefect_raybatch.learning.score import PartShards, paired_gain, steady_shards
from prefect_raybatch.ledger.arrangement import (
    Arrangement,
    ArrangementNote,
    ArrangementOutcome,
    TrialOutcome,
    read_arrangement,
    record_arrangement,
)
from prefect_raybatch.ledger.ledger import READERS, Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.report.records import RunReport, read_report
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.drivers import most_gpus, read_attempts
from prefect_raybatch.runs.listing import COMPLETED, RunLine, line_of, recency_key
from prefect_raybatch.runs.run import run_keys
from prefect_raybatch.sizing.sizes import Capacity, Sizing
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.result import OutputSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.vllm.phases import ON_CLUSTER, ON_TURN
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

RUNS_READ = 20  # newest runs of the job whose records are read
TRIAL_INTERRUPTED = "the attempt ended in it"  # error of a trial without an outcome
# Errors for which engines may be to blame, by the classes' names.
OF_ENGINES = ("EngineFailure", "EngineStartError", "InsufficientResources")
FOLDERS_READ = 60  # last run directories by name, among which the newest runs are searched


# --- before a run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearningSpec:
    """The parts of a run's spec that are needed to learn from earlier runs of the job.

    `output` says where the earlier runs are. `job` is the job's name.
    """

    sizes: SizeSpec
    engine: EngineSpec
    output: OutputSpec
    job: str


def decided_arrangement(
    spec: LearningSpec,
    plan: Plan,
    shards: Shards,
    ledger: Ledger,
    capacity: Capacity,
    attempt: str,
) -> ArrangementNote | None:
    """Return how the run's engines are to be arranged.

    If no attempt at the run has decided this yet, it is decided from earlier runs and recorded.
    `attempt` is the id of this attempt. Returns None in each of these cases:
    - The job forbids to learn from earlier runs, or its model is hosted or of unknown size.
    - The run has two phases, or retries failed rows.
    - Nothing is to be decided (see `coming_run_of`).
    - Shards are committed, but no decision is recorded.
    - The recorded decision cannot be read or does not fit this cluster.
    """
    is_one_phase = plan.increment is None and plan.parent is None
    coming = _coming_run(spec, PlannedRows.of(plan, shards), capacity) if is_one_phase else None
    if coming is None:
        return None
    try:
        note = read_arrangement(ledger.store)
    except CorruptRun as error:  # costs only speed
        log.warning("engines are arranged by the cost model: %s", error)
        return None
    if note is None and not ledger.committed(plan).any():
        runs = earlier_runs(spec.output, spec.job, but=plan.run_key)
        note = record_arrangement(ledger.store, decide(coming, runs, attempt))
    if note is None or not all(map(coming.fits, filter(None, (note.incumbent, note.challenger)))):
        return None
    log.info("engines on a GPU x sequences: %s, %s", note.incumbent, note.why)
    return note


def expected_arrangement(
    spec: LearningSpec, rows: PlannedRows, capacity: Capacity, run_key: str
) -> ArrangementNote | None:
    """Return how a run of one phase would probably arrange its engines.

    The lengths of its rows are assumed to be spread as in the newest earlier run. Returns None if
    the run would not learn from earlier runs. Writes nothing.
    """
    coming = _coming_run(spec, rows, capacity)
    if coming is None:
        return None
    runs = earlier_runs(spec.output, spec.job, but=run_key)
    if runs:
        spread = runs[0].decided.work.tokens[2:]
        mean = sum(spread) / len(spread) if sum(spread) > 0 else 1.0
        deciles = tuple(length / mean for length in spread) or rows.deciles
        coming = _coming_run(spec, replace(rows, deciles=deciles), capacity) or coming
    return decide(coming, runs, "")


def _coming_run(spec: LearningSpec, rows: PlannedRows, capacity: Capacity) -> ComingRun | None:
    if not spec.engine.learn or spec.engine.model.endpoint is not None:
        return None
    model, _ = sized.model_sizes(spec.sizes, rows.model, capacity)
    if model is None:
        return None
    try:
        return coming_run_of(spec.sizes, rows, capacity, model, engine_version())
    except (ConfigError, InsufficientResources):  # the run itself will report it
        return None


def earlier_runs(output: OutputSpec, job: str, but: str) -> list[EarlierRun]:
    """Return the newest runs of a job below `output.uri`, except for the run key `but`.

    They are newest first, and at most RUNS_READ. Runs without a decision, retries of failed rows
    and runs that cannot be read are left out. Returns [] if the output cannot be read.
    """
    try:
        root = open_store(output.uri, dict(output.options) or None)
        keys = [key for key in run_keys(root) if key != but]
        dated = re.compile(rf"{re.escape(job)}-\d")  # not the keys of a job with a longer name
        own = list(filter(dated.match, keys)) or [k for k in keys if k.startswith(job)] or keys
        with ThreadPoolExecutor(READERS) as pool:
            lines = list(pool.map(partial(line_of, root), own[-FOLDERS_READ:]))
        found = [line for line in lines if line is not None and _is_of_job(line, job)]
        found.sort(key=recency_key, reverse=True)
        return list(_readable(root, found[:RUNS_READ]))
    except RayBatchError as error:
        log.warning("earlier runs cannot be read, so nothing is learned from them: %s", error)
        return []


def _is_of_job(line: RunLine, job: str) -> bool:
    return line.job == job and line.parent is None and line.has_plan


def _readable(root: Store, lines: Iterable[RunLine]) -> Iterator[EarlierRun]:
    for line in lines:
        try:
            run = _earlier_run(root.sub(line.run_key), line)
        except (RayBatchError, FileNotFoundError, ArithmeticError) as error:
            log.warning("nothing is learned from run %s: %s", line.run_key, error)
            continue
        if run is not None:
            yield run


def _earlier_run(store: Store, line: RunLine) -> EarlierRun | None:
    if line.state != COMPLETED:
        note = read_arrangement(store)
        if note is None:
            return None
        error = line.failure.partition(": ")[2]  # after the step that failed
        return EarlierRun(line.run_key, note, has_failed=error.startswith(OF_ENGINES))
    report = read_report(store)
    outcome = report.arrangement
    if outcome is None:
        return None
    rate = report.rows / (report.seconds * outcome.gpus) if report.seconds * outcome.gpus else 0.0
    return EarlierRun(line.run_key, outcome.decided, outcome, rows_per_gpu_s=rate)


# --- while it works -----------------------------------------------------------------------------


def used_fields(size: Sizing) -> dict[str, object]:
    """Return the fields of an attempt's record that say how its engines are arranged."""
    pool = size.pool
    return {"arranged": [pool.engines_per_gpu, size.max_num_seqs], "gpus": pool.gpus[1]}


def trial_fields(error: str, deaths: int) -> dict[str, object]:
    """Return the fields of an attempt's record about its trial of another arrangement.

    `error` says why the trial did not work, or ""; `deaths` counts deaths of its engines.
    """
    return {"trial": {"error": error, "deaths": deaths}}


def _trial_error(notes: Sequence[JsonObject]) -> str:
    """Return from attempt records why the trial of another arrangement failed; "" if it worked."""
    if not any("trial" in note for note in notes):
        return TRIAL_INTERRUPTED
    return next((error for note in notes if (error := _trial(note)[0])), "")


def _trial(note: JsonObject) -> tuple[str, int]:
    trial = note.get("trial")
    trial = trial if isinstance(trial, dict) else {}
    error, deaths = trial.get("error"), trial.get("deaths")
    return error if isinstance(error, str) else "", deaths if isinstance(deaths, int) else 0


# --- after a run --------------------------------------------------------------------------------


def measured_arrangement(
    ledger: Ledger, plan: Plan, tally: Tally, report: RunReport
) -> ArrangementOutcome | None:
    """Return how a run's engines were arranged, and what it measured.

    Returns None if no readable decision on the arrangement is recorded, or if no attempt used one.
    `tally` has the counts of all commits, `report` the other figures of the run.
    """
    try:
        note = read_arrangement(ledger.store)
    except CorruptRun as error:
        log.warning("nothing can be learned from this run: %s", error)
        return None
    notes = [] if note is None else read_attempts(ledger)
    if note is None or not any(_arranged(one) for one in notes):
        return None
    gpus = most_gpus(notes)
    why = "" if note.challenger is None else _trial_error(notes)
    deaths = sum(_trial(n)[1] for n in notes)
    parts, has_trial = _shards_of(tally), note.challenger is not None and not why
    is_trial = np.array([has_trial and in_trial(int(n)) for n in parts.numbers], bool)
    own = steady_shards(parts.where(~is_trial))
    trial = None
    if note.challenger is not None:
        gain = paired_gain(steady_shards(parts.where(is_trial)), own)
        trial = TrialOutcome(gain.pairs, _rounded(gain.gain), _rounded(gain.bound), why)
    phases = report.starts[-1].seconds if report.starts else {}
    return ArrangementOutcome(
        decided=note,
        gpus=gpus,
        score=_rounded(own.score(gpus)) if gpus else None,
        busy=_busy(_tally_without_trial(ledger, plan) if has_trial else tally),
        start=round(sum(s for name, s in phases.items() if name not in (ON_CLUSTER, ON_TURN)), 1),
        uncounted=_why_uncounted(note, notes, report, why, deaths),
        has_deaths=report.engine_deaths > deaths,
        trial=trial,
    )


def _shards_of(tally: Tally) -> PartShards:
    series = tally.series
    tokens = np.array(series.prompt) + np.array(series.output)
    return PartShards(
        np.array(series.shard), np.array(series.started), np.array(series.ended), tokens
    )


def _tally_without_trial(ledger: Ledger, plan: Plan) -> Tally:
    tally = Tally()
    for commit in ledger.commits(plan, ledger.listing(plan)):
        if not in_trial(commit.shard):
            tally.add(commit)
    return tally


def _busy(tally: Tally) -> float | None:
    """Return in what share of the time GPUs did not wait for the host; None if not measured.

    Only the time in which the engines had rows counts.
    """
    shares = tally.roofline()
    if "idle_host" not in shares:
        return None
    worked = 1 - shares["idle_rows"] - shares["idle_tail"]
    return round(max(0.0, 1 - shares["idle_host"] / worked), 4) if worked > 0 else None


def _why_uncounted(
    note: ArrangementNote,
    notes: Sequence[JsonObject],
    report: RunReport,
    trial_error: str,
    trial_deaths: int,
) -> str:
    """Return why later runs must not learn from a run's figures; "" if they may."""
    if len(notes) != 1:
        return f"{counted(len(notes), 'attempt')} worked on it"
    if trial_error:
        return "its trial did not work"
    if note.incumbent != _arranged(notes[0]):
        return "its engines were arranged in another way"
    if report.engine_deaths > trial_deaths or report.losses:
        return "engines died, or shards were lost"
    return f"it took under {LEAST_SECONDS:g} s" if report.seconds < LEAST_SECONDS else ""


def _arranged(note: JsonObject) -> Arrangement | None:
    found = note.get("arranged")
    is_pair = isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found)
    return Arrangement(*found) if is_pair and found else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
