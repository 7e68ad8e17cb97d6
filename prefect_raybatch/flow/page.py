"""The Prefect page of an active run: progress, a table of its state, log lines, events."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import Artifact, ImageArtifact, MarkdownArtifact, ProgressArtifact
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.states import Crashed

from prefect_raybatch.bounded import within
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import (
    COSTS,
    ENDED,
    INFERRING,
    MAKING,
    STARTING,
    UNHEARD,
    WAITING,
    Counts,
    Heartbeat,
    Listener,
    Listeners,
    Ticker,
    alive,
    heartbeat_elsewhere,
    to_larger_text,
)
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.flow.artifacts import artifact_key, of_run, put, update
from prefect_raybatch.flow.away import NO_ANSWER, ApiWatch, outages_logged_once, watched
from prefect_raybatch.flow.cancelling import CANCEL_LOOK, CancelWatch
from prefect_raybatch.flow.continuing import root_run
from prefect_raybatch.flow.events import LiveEvents, RunEvents
from prefect_raybatch.flow.run_history import put_history, read_history, with_deployment_runs
from prefect_raybatch.harmless import link, markdown_text
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.report import plots
from prefect_raybatch.report.charts import charts
from prefect_raybatch.report.report import duration, table_lines
from prefect_raybatch.runs.run import Run
from prefect_raybatch.runs.run_history import usual_time
from prefect_raybatch.runs.starts import attempts_seconds
from prefect_raybatch.sizing.shards import SEQUENCES, concurrent_batches, known_max_num_seqs
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import counted, money

log = logging.getLogger(__name__)

MARK_SECONDS = 5.0  # to send the log and mark flow runs; Ray ends the process after about 10 s
PAGE_LOOK = 1.0  # seconds between two calls of `Page.tick`
ROW_UNIT = ("row", "rows")
PROGRESS_EVERY = 5.0  # minimum seconds between updates; for other parts of the page see below
TABLE_EVERY = 10.0
PLOTS_EVERY = 30.0
LOG_EVERY = 15.0
REMOTE_AFTER = 15.0  # seconds without a heartbeat of a remote driver until its records are read
REMOTE_EVERY = 10.0

# Fields of a heartbeat that only the driver knows; the others follow from the commits.
OF_DRIVER = ("phase", "engines", "alarms", "quiet", "about", "dashboard", "gpu_seconds", *COSTS)

Observer = Callable[[Progress], None]


class Page(Listener):
    """Shows a run in the Prefect page; a context manager around the work.

    Works in its own thread, so that a slow or unreachable API never delays the run. `observers`
    receive the same updates immediately. `sizes` are the numbers that the job itself sets, such as
    max_num_seqs and rows_per_shard. `written` is the job's output URI before {run_date} is filled
    in; earlier runs are looked for there. By default, it is `output.uri`.
    """

    def __init__(
        self,
        run: Run,
        output: Output,
        limits: Limits,
        cluster: ClusterSpec,
        sizes: SizeSpec,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[Observer] = (),
        written: str | None = None,
    ):
        self.uri, self.options = written or output.uri, output.options or None
        self.run, self.sizes, self.clock = run, sizes, clock
        self.observers = Listeners(observers)
        self.job_name, self._currency = cluster.name, cluster.prices.currency
        self.key = artifact_key(cluster.name)
        self.events = LiveEvents(
            RunEvents(run.run_key, cluster.name),
            run.uri,
            limits.reported(run.rows),
            seconds_of(limits.deadline) if limits.deadline else None,
            limits.max_cost,
            self._currency,
        )
        self.followed = cluster.access.remote  # its driver is in another process
        self.counts: Counts | None = None
        self._first: Counts | None = None  # before the first commit of this attempt
        self.progress: Progress | None = None
        self._beat: Heartbeat | None = None
        self._heard = self._asked = clock()
        self._began = self._closing = False
        self._artifacts: dict[str, UUID] = {}
        self._shown: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self._ticker = Ticker("the Prefect page", PAGE_LOOK, self.tick)
        self.api = ApiWatch(clock)
        self._open = ExitStack()
        self._flow_runs: list[UUID] = []

    def __enter__(self) -> Page:
        self.log = get_run_logger()
        self._flow_runs = active_flow_runs()
        self.api = self._open.enter_context(watched(self.clock))
        watch = Ticker("Prefect's API", PAGE_LOOK, self.api.look)
        cancel = Ticker("cancellation", CANCEL_LOOK, CancelWatch().look)
        for part in (outages_logged_once(), watch, cancel, self._ticker):
            self._open.enter_context(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._open.close()

    def __call__(self, progress: Progress) -> None:
        self.observers(progress)
        counts = Counts.whole(progress)
        self._first = self._first or counts
        self.counts, self.progress = counts, progress

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.observers.on_heartbeat(beat)
        self._beat, self._heard = beat, self.clock()

    def on_process_end(self, cause: str) -> None:
        """Mark this process's flow runs Crashed for the reason `cause`, then end the process.

        Called when Ray is about to end the process without an exception, within seconds. A retry
        may begin as soon as a flow run is Crashed, and the worker removes the flow run's folder
        when this process ends. So it must end before the process of the retry starts.
        """
        self.observers.on_process_end(cause)
        if self._flow_runs:
            mark_crashed(self._flow_runs, cause)
            os._exit(1)

    def tick(self) -> None:
        """Update the parts of the page that have changed, each at its own minimum interval.

        If the API rejects a part, the others are still shown, and the part is retried when it is
        due again.
        """
        now = self.clock()
        beat = self.state(now)
        if beat is None:
            return
        if not self._began:
            self._began = True
            # A small run may have committed shards before the first tick.
            first = (
                beat
                if self._first is None
                else Heartbeat.of(self._first, beat.at, phase=beat.phase)
            )
            self.events.started(first, self._worked())
        self.events.see(beat, now)
        if (seconds := self.api.pop_outage()) is not None:
            self.events.outage(seconds)
        share = 100.0 * beat.done / beat.rows if beat.rows else 100.0
        drawn = (beat.committed, alive(beat.engines))
        # Once all is committed, the driver's phase is not shown.
        doing = (beat.phase, starting(beat)) if beat.done < beat.rows else ()
        told = (beat.done, beat.held_back, doing)
        parts: tuple[tuple[str, float, Any, Callable[[], None]], ...] = (
            ("line", LOG_EVERY, told, lambda: self.log.info(progress_line(beat, self._unit))),
            ("progress", PROGRESS_EVERY, (share, starting(beat)), lambda: self._show_share(beat)),
            ("live", TABLE_EVERY, beat, lambda: self._show_state(beat)),
            ("plots", PLOTS_EVERY, drawn, lambda: self._show_plots(beat)),
            # Once, and last, because it reads the reports of several runs.
            ("history", PLOTS_EVERY, True, self._show_history),
        )
        failed = None
        for what, every, value, show in parts:
            if not self._is_due(what, every, now, value):
                continue
            try:
                show()
            except Exception as error:
                failed = error
            else:
                self._shown[what] = value
        if failed is not None and not isinstance(failed, NO_ANSWER):
            raise failed

    def _show_history(self) -> None:
        """Show the history of the job, including scheduled runs that never started.

        Also sets the usual duration of the job's runs in `self.events`.
        """
        try:
            page = read_history(self.job_name, self.uri, self.options)
        except RayBatchError as error:  # the page shows everything else without it
            self.log.info("could not read how long earlier runs took: %s", error)
            return
        self.events.usual = usual_time(page, self.run.run_key)
        with self.api.within():
            put_history(with_deployment_runs(page, self.uri), self.run.run_key)

    def _worked(self) -> float:
        """Return the total seconds that earlier attempts took; 0 if there are none or unknown."""
        try:
            ledger = Ledger(open_store(self.run.uri, self.options))
            plan = ledger.load_plan()
            return 0.0 if plan is None else attempts_seconds(ledger, plan)
        except RayBatchError as error:  # the page shows everything else without it
            self.log.info(
                "could not read how long earlier attempts took; the deadline ignores them: %s",
                error,
            )
            return 0.0

    def _show_share(self, beat: Heartbeat) -> None:
        share = 100.0 * beat.done / beat.rows if beat.rows else 100.0
        text = f"Committed {self._unit[1]}, in percent."
        if now := starting(beat):
            text += f" {markdown_text(now.capitalize())}."
        costs = cost_figures(self._beat, self._currency) if self._beat is not None else {}
        text += "".join(f" {name.capitalize()}: {value}." for name, value in costs.items())
        self.show(ProgressArtifact(progress=share, description=text), "progress")

    def _show_state(self, beat: Heartbeat) -> None:
        table = "\n".join(table_lines(live_rows(beat, self._unit, self._currency)))
        text = f"Current state of the run, updated every {TABLE_EVERY:.0f} seconds."
        self.show(MarkdownArtifact(markdown=table, description=text), "live")

    def _show_plots(self, beat: Heartbeat) -> None:
        image = self.image(beat)
        if image is not None:
            text = "Throughput over time, and the state of each shard."
            self.show(ImageArtifact(image_url=image, description=text), "plots")

    def image(self, beat: Heartbeat) -> str | None:
        """Return the plots of the run so far as a data URI; None before the first commit."""
        if self.progress is None:
            return None
        engines = 0 if beat.phase == ENDED else alive(beat.engines)
        a_shard = max(1, round(self.run.rows / max(1, self.run.shards)))
        tally = self.progress.tally
        seqs = known_max_num_seqs(self.sizes.max_num_seqs, tally.stats.figures()) or SEQUENCES
        working = engines * concurrent_batches(self.sizes.max_concurrent_batches, a_shard, seqs)
        return plots.live(charts(tally, self.progress.shards), working)

    @property
    def _unit(self) -> tuple[str, str]:
        return self.progress.unit if self.progress is not None else ROW_UNIT

    def state(self, now: float) -> Heartbeat | None:
        """Return the state of the run, reported by its driver or read from its records.

        Return None before the first progress.
        """
        counts = self.counts
        if counts is None:
            return None
        if self.followed and now - self._heard > REMOTE_AFTER and now - self._asked > REMOTE_EVERY:
            self._asked = now
            store = open_store(self.run.uri, self.options)
            self._beat = heartbeat_elsewhere(store, counts, over=counts.done == counts.rows)
        beat = self._beat
        more: dict[str, Any] = {"phase": UNHEARD} if self.followed else {}
        if beat is not None:
            beat = beat.with_committed(self.progress.done) if self.progress is not None else beat
            more = {name: getattr(beat, name) for name in OF_DRIVER}
            counts = replace(
                counts,
                passes=beat.passes,
                engine_deaths=beat.engine_deaths,
                held_back=max(counts.held_back, beat.held_back),
            )
        return Heartbeat.of(counts, time.time(), **more)

    def _is_due(self, what: str, every: float, now: float, value: object) -> bool:
        early = now < self._due.get(what, float("-inf")) and not self._closing
        if early or self._shown.get(what) == value:
            return False
        self._due[what] = now + every
        return True

    def show(self, artifact: Artifact, kind: str) -> None:
        """Create this flow run's artifact of this `kind`, or update the one that exists.

        Updating avoids a new version every few seconds, and a retry continues the same artifact.
        """
        known = self._artifacts.get(kind)
        with self.api.within():
            if known is None:
                self._artifacts[kind] = put(artifact, f"{self.key}-{kind}", self.run.run_key)
            else:
                artifact.description = f"{artifact.description} {of_run(self.run.run_key)}"
                update(known, artifact)


def live_rows(
    beat: Heartbeat, unit: tuple[str, str] = ROW_UNIT, currency: str = ""
) -> list[dict[str, str]]:
    """Return the run's current state as table rows {"": name, "now": value}.

    `unit` is (singular, plural) of what is counted.
    """
    figures = {
        "state": f"{beat.phase}: {beat.about}" if beat.about else beat.phase,
        unit[1]: f"{beat.done:,} of {beat.rows:,}",
        "failed": _failed(beat),
        **({"to the larger model": f"{beat.to_larger:,}"} if beat.to_larger else {}),
        "shards": f"{beat.committed:,} of {beat.shards:,}",
        f"{unit[1]}/s": f"{beat.rate:,.1f}",
        "tokens/s in / out": f"{beat.prompt_tokens_rate:,.0f} / {beat.output_tokens_rate:,.0f}",
        "time left": duration(beat.seconds_left),
        "engines alive": f"{alive(beat.engines)} ({counted(beat.engine_deaths, 'death')})",
        "pass": f"{beat.passes}",
        **cost_figures(beat, currency),
        **({"Ray dashboard": link(beat.dashboard)} if beat.dashboard else {}),
    }
    return [{"": name, "now": value} for name, value in figures.items()]


def starting(beat: Heartbeat) -> str:
    """Return the driver's phase and its details, e.g. `starting engines: cluster 3 s`.

    Details exist while engines start, while a cluster is created (what it waits for) and while a
    hosted model's limit holds requests back (which limit). Without details, returns "".
    """
    told = beat.phase in (STARTING, MAKING, INFERRING) and beat.about
    return f"{beat.phase}: {beat.about}" if told else ""


def cost_figures(beat: Heartbeat, currency: str = "") -> dict[str, str]:
    """Return {name: text} of the cost so far and the estimated total; {} if unknown."""
    if beat.cost_run is None:
        return {}
    end = {} if beat.cost_end is None else {"estimated total cost": money(beat.cost_end, currency)}
    return {"cost": money(beat.cost_run, currency), **end}


def progress_line(beat: Heartbeat, unit: tuple[str, str] = ROW_UNIT) -> str:
    """Return progress in one line: rows, share, failures, and the rate with the time left.

    While the time left is unknown, shows the phase instead. `unit` is (singular, plural) of what is
    counted.
    """
    share = beat.done / beat.rows if beat.rows else 1.0
    waits = beat.phase == WAITING and not beat.alarms and beat.about
    pace = starting(beat) or (f"{beat.phase}: {beat.about}" if waits else beat.phase)
    if beat.seconds_left is not None:
        left = f"{beat.rate:,.0f} {unit[1]}/s, {duration(beat.seconds_left)} left"
        told = waits or (beat.phase == INFERRING and beat.about)
        pace = f"{left}, {beat.about}" if told else left
    rows = counted(beat.rows, *unit)
    failed = f"{_failed(beat)} failed{to_larger_text(beat.to_larger)}"
    return f"{beat.done:,} of {rows} ({share:.0%}), {pace}, {failed}"


def _failed(beat: Heartbeat) -> str:
    if not beat.held_back:
        return f"{beat.failed:,}"
    return f"{beat.failed + beat.held_back:,} ({beat.held_back:,} not committed yet)"


def active_flow_runs() -> list[UUID]:
    """Return the ids of the outermost flow run and of the current one, each once.

    Returns [] outside of a flow run.
    """
    root, current = root_run(), flow_run.get_id()
    return [] if root is None else list(dict.fromkeys((root, UUID(str(current or root)))))


def mark_crashed(flow_runs: list[UUID], cause: str) -> None:
    """Send queued log lines to Prefect, then mark flow runs as Crashed, for the reason `cause`.

    `flow_runs` holds ids, the outermost first. Otherwise the worker would mark them, with only the
    exit status as the reason; Prefect keeps the first mark. An error is only logged.
    """
    text = f"{cause}. Continue with: prefect flow-run retry {flow_runs[0]}"

    def mark() -> None:
        APILogWorker.drain_all(timeout=MARK_SECONDS / 2)
        with get_client(sync_client=True) as client:
            for run in flow_runs:
                client.set_flow_run_state(run, Crashed(message=text), force=True)

    try:
        within(MARK_SECONDS, mark)
    except Exception as error:
        log.warning("Prefect was not told of it: %s: %s", type(error).__name__, error)
