"""Writes result, report and `_SUCCESS` of a run; reads the report of a finished run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from prefect_raybatch.batches.outputs import put_answer_files
from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.accepted import Accepted, all_accepted
from prefect_raybatch.ledger.increments import (
    Answers,
    Increment,
    answer_files,
    begin_requests_phase,
    increment_of,
)
from prefect_raybatch.ledger.layout import REPORT, REPORT_HTML, REPORT_PAGE
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.published import all_published
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.model.pinned import ENDPOINT
from prefect_raybatch.quality.accuracy import Accuracy, read_accuracy
from prefect_raybatch.quality.agreement import Agreement, read_agreement
from prefect_raybatch.quality.judgement import Judgement, read_judgement
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.advice import advise
from prefect_raybatch.report.records import RunReport, put_report, read_report, with_judgement
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.arrangement import measured_arrangement
from prefect_raybatch.runs.cascade import with_shares, with_tokens_of
from prefect_raybatch.runs.classifier_note import classifier_note
from prefect_raybatch.runs.costs import with_cost
from prefect_raybatch.runs.drivers import most_gpus, read_attempts
from prefect_raybatch.runs.precision import precision_of
from prefect_raybatch.runs.rejected_answers import rejected_answers
from prefect_raybatch.runs.starts import attempts_seconds, engine_deaths, read_starts
from prefect_raybatch.sizing.shards import (
    SEQUENCES,
    concurrent_batches,
    known_max_num_seqs,
    problems,
)
from prefect_raybatch.sizing.sizes import certain_engines
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.ledger.plan_tables import Shards
    from prefect_raybatch.ledger.records import Part
    from prefect_raybatch.result.finalize import Result
    from prefect_raybatch.result.parts import PartTask

log = logging.getLogger(__name__)
DAY = 86_400.0  # seconds


def finalize_spec(
    spec: RunSpec,
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    progress: Progress | None = None,
    asks_server: bool = True,
) -> RunReport:
    """Write the result, the report and `_SUCCESS` of a run; return the report.

    All shards must be committed: raises `IncompleteRun` if one is missing, `CorruptRun` if the
    coverage is wrong. For a finished run, only removes files that are no longer needed; with
    `asks_server`, also those at a hosted model's server.
    """
    from prefect_raybatch.result.finalize import finalize

    layout, endpoint = spec.output.layout, spec.engine.model.endpoint if asks_server else None
    if ledger.finished(plan) is not None:
        return _finished_report(ledger, plan, layout.compact, endpoint)
    try:
        result = finalize(
            ledger,
            plan,
            shards,
            spec.finish.row_number,
            layout.file_bytes,
            layout.compact,
            layout.read_back,
            partial(write_parts, spec.cluster),
        )
    except CorruptRun:
        if ledger.finished(plan) is None:
            raise
        # Another finalizer was done first and tidied up.
        return _finished_report(ledger, plan, True, endpoint)
    made = completed_report(spec, ledger, plan, result.tally, result.parts, progress)
    if ledger.finished(plan) is not None:
        # Another finalizer was done first: the report on disk is its own.
        return _finished_report(ledger, plan, True, endpoint)
    put_reports(ledger.store, made)
    success = _success(spec, plan, result, made.accepted)
    put_answer_files(spec.read, spec.finish, spec.engine.model, ledger.store, plan, success)
    ledger.succeed(success)
    return _finished_report(ledger, plan, True, endpoint)


def completed_report(
    spec: RunSpec,
    ledger: Ledger,
    plan: Plan,
    tally: Tally,
    parts: Sequence[Part],
    progress: Progress | None = None,
) -> RunReport:
    """Build the report of a run whose result files, listed in `parts`, are written.

    `tally` has the counts of all commits. `progress` adds figures that only the process of the last
    attempt knows. If raw answers are kept or were looked up, also writes answers.json, which names
    their files.
    """
    store, accepted = ledger.store, all_accepted(ledger)
    made = reports.build(
        store.uri,
        plan,
        tally,
        "completed",
        parts,
        resumed_shards=progress.resumed_shards if progress else 0,
        notes=(*_notes(spec.sizes, plan, tally), *retry_notes(plan), *map(str, accepted)),
        engine_deaths=max(engine_deaths(ledger), progress.engine_deaths if progress else 0),
        losses=progress.losses if progress else None,
        dashboard=last_dashboard(store),
    )
    made = replace(
        made,
        elapsed=round(attempts_seconds(ledger, plan), 1),
        accepted=accepted,
        starts=read_starts(ledger),
        precision=precision_of(store),
        classifier=classifier_note(ledger, plan),
    )
    made = replace(made, arrangement=measured_arrangement(ledger, plan, tally, made))
    made = replace(made, advice=advise(made, spec))
    increment = increment_of(plan)
    if increment is not None and increment.looks_up:
        # If a requests phase only put rows in order, later runs cannot use its answers.
        days = spec.reuse.keep_days if spec.reuse.keeps else 0.0
        made = _with_reuse(made, ledger, plan, increment, tally, days)
    asks = _requests_report(store, increment)
    if increment is None or spec.cascade is None:
        return with_cost(made, ledger, plan, spec.cluster.prices, asks)
    made = with_tokens_of(made, asks)
    made = with_cost(made, ledger, plan, spec.cluster.prices)
    return with_shares(made, store, plan, spec.cascade, asks, tally.stats.others)


def report_again(ledger: Ledger, plan: Plan, parts: Sequence[Part]) -> RunReport:
    """Build the report of a finished run again, from its commits; `parts` are its result files.

    It lacks the figures that only the process of the last attempt knew. Like `completed_report`,
    this may write answers.json.
    """
    from prefect_raybatch.result.survey import survey

    spec = compile_plan(plan)
    tally = survey(ledger, plan, ledger.shards(plan), pieces=False).tally
    return completed_report(spec, ledger, plan, tally, parts)


def put_reports(store: Store, report: RunReport) -> None:
    """Write the report to the run directory as JSON, Markdown and HTML."""
    put_report(store, report)
    put_pages(store, report)


def put_pages(store: Store, report: RunReport) -> None:
    """Write the report to the run directory as Markdown and HTML."""
    store.put(REPORT_PAGE, reports.markdown(report).encode())
    store.put(REPORT_HTML, html_page(report).encode())


def _requests_report(store: Store, increment: Increment | None) -> RunReport | None:
    begun = None if increment is None else begin_requests_phase(store, increment)
    return None if begun is None else load_report(begun[0].store)


def write_parts(
    cluster: ClusterSpec, write: Callable[[PartTask], Part], tasks: Iterator[PartTask], size: int
) -> Iterator[Part]:
    """Write the files of a result; yield the record of each, in any order.

    `write` writes the file of one task. It runs on the cluster's workers if the rows have enough
    bytes (`size`) to gain from it, else in this process.
    """
    from prefect_raybatch.cluster.side_by_side import TASKS_A_CPU, run_in_parallel, workers_for
    from prefect_raybatch.result.finalize import write_sequentially

    with workers_for(cluster, size) as workers:
        if workers > 1:
            log.info("writing the result on %s", counted(workers, "CPU"))
            yield from run_in_parallel(write, tasks, TASKS_A_CPU * workers)
        else:
            yield from write_sequentially(write, tasks, size)


def _with_reuse(
    report: RunReport,
    ledger: Ledger,
    plan: Plan,
    increment: Increment,
    tally: Tally,
    days: float | None,
) -> RunReport:
    """Return the report with what reuse saved, and with the engine figures of the requests phase.

    Also writes answers.json, which names the files of raw answers. The answers are kept for `days`
    from now. If `days` is None, they are kept as long as the run.
    """
    begun, seconds = begin_requests_phase(ledger.store, increment), increment.seconds
    if begun is not None:
        asks = load_report(begun[0].store)
        seconds = _seconds_an_answer(begun[0], asks) if asks.good else seconds
        report = _with_engine_figures(report, asks)
    Answers(
        run_key=plan.run_key,
        plan=plan.hash,
        context=increment.context,
        parts=increment.parts,
        files=answer_files(plan, increment, ledger.store),
        until=None if days is None else time.time() + days * DAY,
        seconds=seconds,
        rejected=rejected_answers(ledger, plan, increment) if tally.failed else {},
    ).put(ledger.store)
    counts = increment.counts
    saved = {"reused": counts.reused, "merged": counts.merged, "asked": counts.asked}
    saved["saved_tokens"] = int(tally.stats.saved_tokens or 0)
    rows = counts.reused + counts.merged
    more = {} if seconds is None else {"saved_seconds": round(rows * seconds, 1)}
    return replace(report, reuse={**saved, **more})


def _seconds_an_answer(ledger: Ledger, phase_report: RunReport) -> float:
    """Return the GPU-seconds per answer of a requests phase, from its ledger and report."""
    gpus = max(most_gpus(read_attempts(ledger)), phase_report.engines, 1)
    return round(phase_report.seconds * gpus / phase_report.good, 6)


def _with_engine_figures(report: RunReport, phase_report: RunReport) -> RunReport:
    """Return `report` with the engines, start times and cached tokens of the requests phase.

    `phase_report` is the report of that phase. Its seconds and engine deaths are added to those of
    `report`.
    """
    cached = phase_report.tokens.get("cached_tokens", 0.0)
    report = replace(
        report,
        **{
            name: getattr(phase_report, name) for name in ("figures", "workers", "nodes", "engines")
        },
        other_engines=phase_report.other_engines,
        engine_deaths=report.engine_deaths + phase_report.engine_deaths,
        starts=phase_report.starts,
        seconds=round(report.seconds + phase_report.seconds, 1),
        tokens={**report.tokens, "cached_tokens": cached},
    )
    if report.seconds:
        report = replace(report, rows_per_s=round(report.rows / report.seconds, 1))
    return report


def _success(spec: RunSpec, plan: Plan, result: Result, accepted: tuple[Accepted, ...]) -> Success:
    return Success(
        rows=plan.rows,
        data=result.tally.good,
        quarantine=result.tally.failed,
        skipped=result.tally.skipped,
        parts=tuple(result.parts),
        compact=spec.output.layout.compact,
        row_number=spec.finish.row_number,
        finished=time.time(),
        plan=plan.hash,
        layout=result.layout,
        manifest=result.manifest,
        accepted=accepted,
    )


def _notes(spec: SizeSpec, plan: Plan, tally: Tally) -> list[str]:
    seqs = known_max_num_seqs(spec.max_num_seqs, tally.stats.figures()) or SEQUENCES
    concurrent = concurrent_batches(spec.max_concurrent_batches, plan.rows_per_shard, seqs)
    shards = f"rows a shard: {plan.rows_per_shard:,} (the run's plan)"
    hints = [str(hint) for hint in (plan.context or {}).get("hints", ())]
    found = problems(
        rows=plan.rows,
        rows_per_shard=plan.rows_per_shard,
        concurrent=concurrent,
        engines=certain_engines(spec),
        seqs=seqs,
    )
    return [shards, *found, *hints]


def retry_notes(plan: Plan) -> list[str]:
    """Return a note that names the run whose failed rows are retried; [] for any other run."""
    if plan.parent is None:
        return []
    return [f"a retry of failed rows of run {plan.parent}, with the row numbers of that run"]


def _finished_report(
    ledger: Ledger, plan: Plan, tidy: bool, endpoint: EndpointSpec | None
) -> RunReport:
    """Return the report of a finished run; with `tidy`, first remove files no longer needed."""
    if tidy:
        _tidy(ledger, plan, endpoint)
    return load_report(ledger.store)


def _tidy(ledger: Ledger, plan: Plan, endpoint: EndpointSpec | None) -> None:
    """Remove files that a finished run no longer needs.

    These are the journal and the batches of a hosted model, then pieces, copies of answers in row
    order, and notes on result files. Raises `CorruptRun` before it removes the first piece if a
    file of the result in data/ or quarantine/ is missing or changed.
    """
    from prefect_raybatch.result.reap import obsolete_answers, obsolete_notes, orphans
    from prefect_raybatch.stages.endpoint.journal import remove_journal
    from prefect_raybatch.stages.hosted_batches.stage import forget_batches

    if plan.model["source"] == ENDPOINT:
        remove_journal(ledger.store)
        if endpoint is not None:
            forget_batches(endpoint, ledger.store)
    ledger.store.delete(info.path for info in orphans(ledger, plan))
    ledger.store.delete(info.path for info in obsolete_answers(ledger, plan))
    ledger.store.delete(info.path for info in obsolete_notes(ledger, plan))


def load_report(
    store: Store,
    accuracy: Accuracy | None = None,
    judgement: Judgement | None = None,
    agreement: Agreement | None = None,
) -> RunReport:
    """Return the report of a finished run; raise `CorruptRun` if it is missing.

    `accuracy`, `judgement` and `agreement`, if set, are used in place of those in the run
    directory.
    """
    try:
        found = read_report(store)
    except FileNotFoundError:
        raise CorruptRun(
            f"{store.uri} is finished but has no {REPORT}. Run: raybatch repair {store.uri}"
        ) from None
    found = replace(
        found,
        published=all_published(store),
        accuracy=accuracy or read_accuracy(store),
        agreement=agreement or read_agreement(store),
    )
    return with_judgement(found, judgement or read_judgement(store))


def html_page(report: RunReport) -> str:
    """Return the report as one HTML file, with the current time in its footer."""
    from prefect_raybatch.report.html import html

    return html(report, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def last_dashboard(store: Store) -> str:
    """Return the URL of Ray's dashboard in the latest heartbeat; "" if there is none."""
    from prefect_raybatch.driver.heartbeat import newest

    try:
        beat = newest(store)
    except RayBatchError as error:  # the run does not need this link
        log.info("heartbeats cannot be read: %s", error)
        return ""
    return beat.dashboard if beat else ""
