"""Shows the run history of a job as an artifact, and sends events if a completed run is unusual."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from prefect.artifacts import ImageArtifact, MarkdownArtifact

from prefect_raybatch.flow.artifacts import artifact_key, put
from prefect_raybatch.flow.completion import ASSET, CompletionEvents
from prefect_raybatch.flow.prefect_runs import runs_of_deployment, with_prefect_runs
from prefect_raybatch.job.output import Output
from prefect_raybatch.quality.alarm import ACCURACY, AGREEMENT
from prefect_raybatch.report.plots import data_uri, history_plot
from prefect_raybatch.report.run_history import (
    HistoryLine,
    HistoryPage,
    history_markdown,
    unusual_figures,
)
from prefect_raybatch.report.verdict import (
    DISAGREEMENT_REMARK,
    DRIFT_REMARK,
    FALLEN_REMARK,
    LOST_ALARM_REMARK,
)
from prefect_raybatch.runs.run_history import RUNS_SHOWN, changed_fields, history_of
from prefect_raybatch.spec.options import StoreOptions

log = logging.getLogger(__name__)


@dataclass
class FlowNotes:
    """Data on a run that a flow and its tasks share outside of their parameters.

    `output` is the job's output URI before {run_date} is filled in. Once the run is completed,
    `remarks` say what is unusual about it, and `seconds` is its whole duration, including Prefect's
    own start.
    """

    output: str
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0


_notes: ContextVar[FlowNotes | None] = ContextVar("flow_notes", default=None)


@contextmanager
def flow_notes(output: str) -> Iterator[FlowNotes]:
    """Yield new `FlowNotes`; tasks called in the `with` block find them in a context variable."""
    notes = FlowNotes(output)
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def written_uri(uri: str) -> str:
    """Return the job's output URI before {run_date} is filled in, from the flow's notes.

    Outside of `flow_notes`, return `uri`.
    """
    notes = _notes.get()
    return uri if notes is None else notes.output


def read_history(name: str, uri: str, options: StoreOptions | None) -> HistoryPage:
    """Return the history of the job `name` from the records in its output folder.

    `uri` is the output URI as written in the job, which may contain {run_date}; `options` are its
    store options, with credentials.
    """
    (page,) = history_of(uri, options, name)
    return page


def with_deployment_runs(page: HistoryPage, uri: str) -> HistoryPage:
    """Return the history plus runs that only Prefect has records of, e.g. ones that never started.

    Only runs of the current flow run's deployment are added. `uri` is the output URI as written in
    the job.
    """
    return with_prefect_runs(page, runs_of_deployment(), uri, RUNS_SHOWN)


def put_history(page: HistoryPage, run_key: str) -> None:
    """Show a history as artifacts of the run `run_key`, unless it is empty."""
    if not page.runs:  # the run has no plan yet
        return
    key = artifact_key(page.job)
    text = MarkdownArtifact(markdown=history_markdown(page), description="Run history.")
    put(text, f"{key}-history", run_key)
    picture = history_plot(page.runs)
    if picture is not None:
        # Also a separate artifact: Prefect's newer page shows no images within Markdown.
        image = ImageArtifact(image_url=data_uri(picture), description="Run history, plotted.")
        put(image, f"{key}-history-plots", run_key)


def show_history(
    name: str, output: Output, run_key: str, uri: str | None = None
) -> tuple[HistoryPage, HistoryLine] | None:
    """Show, as artifacts, the history of the job `name` whose run `run_key` has just ended.

    `output` has the credentials. `uri` is the output URI as written in the job; None if that is
    `output.uri`. Returns (history, the run's line in it). Returns None if the run is not completed,
    or after an error, which is only logged.
    """
    try:
        written = uri or output.uri
        page = with_deployment_runs(read_history(name, written, output.options or None), written)
        put_history(page, run_key)
        line = next((line for line in page.runs if line.run_key == run_key), None)
    except Exception as error:
        log.warning("could not show the run history: %s: %s", type(error).__name__, error)
        return None
    return None if line is None or line.good is None else (page, line)


def send_history_events(
    events: CompletionEvents,
    name: str,
    output: Output,
    uri: str | None = None,
    limited: bool = False,
) -> None:
    """Show the history of the job `name`; send events if its completed run is unusual.

    Also sets the remarks and duration in the `FlowNotes`. `uri` is the output URI as written in the
    job, None if that is `output.uri`. With `limited`, only part of the input was read, so rows and
    duration are not compared with earlier runs. An error of the history is only logged.
    """
    shown = show_history(name, output, events.run.run_key, uri)
    if shown is None:
        return
    page, line = shown
    few, slow = ("", "") if limited else unusual_figures(page, line)
    if (notes := _notes.get()) is not None:
        about = {
            few: few,
            slow: slow,
            DRIFT_REMARK: line.drift,
            FALLEN_REMARK: line.has_fallen(ACCURACY),
            DISAGREEMENT_REMARK: line.has_fallen(AGREEMENT),
            LOST_ALARM_REMARK: any(series.lost_alarm for series in line.series.values()),
        }
        notes.remarks = [text for text, applies in about.items() if applies]
        notes.seconds = line.elapsed or 0.0
    for share in (ACCURACY, AGREEMENT):
        _send_fallen(events, line, share)
    _send_few_rows(events, line, few)
    if slow and not events.is_sent(ASSET):
        log.warning("%s", slow)
    _send_drift(events, line, lambda: changed_fields(page, line, output.options))


def _send_fallen(events: CompletionEvents, line: HistoryLine, share: str) -> None:
    """Send one event if `share` (ACCURACY or AGREEMENT) fell below that of the job's first runs.

    The share is measured in several ways: by golden rows, by the judge, by the larger model. The
    event names each measurement that fell, with its e-value, which is the evidence of the fall (see
    `quality/alarm.py`). The event is sent again if an e-value has changed.
    """
    found = [(way, series) for way, series in line.series.items() if series.measure == share]
    fallen = {way: series for way, series in found if series.rings}
    e_values = {measure: series.e_value for measure, series in fallen.items()}
    version, name = repr(sorted(e_values.items())), f"{share}.fell"
    if not fallen or events.is_sent(name, version):
        return
    texts = [f"{measure}: {series.text()}" for measure, series in fallen.items()]
    for text in texts:
        log.warning("run %s: %s", line.run_key, text)
    about = "; ".join(texts)
    if share == AGREEMENT:
        events.send("agreement.fell", version, run=line.run, about=about, e_values=e_values)
    else:
        events.send("accuracy.fell", version, run=line.run, about=about, e_values=e_values)


def _send_few_rows(events: CompletionEvents, line: HistoryLine, text: str) -> None:
    if not text or events.is_sent("rows.low"):
        return
    log.warning("%s", text)
    events.send("rows.low", run=line.run, rows=line.rows, about=text)


def _send_drift(events: CompletionEvents, line: HistoryLine, changed: Callable[[], str]) -> None:
    """Send one event that lists all shifts of the answers that are larger than usual between runs.

    `changed` returns the names of the job's fields that changed since the run before, "" if none.
    """
    if not line.drift or events.is_sent("answers.drifted"):
        return
    texts = [shift.line() for shift in line.drift]
    if fields := changed():
        texts.append(f"the job changed in {fields} since then")
    for text in texts:
        log.warning("the run has drifted from those before it: %s", text)
    events.send(
        "answers.drifted",
        run=line.run,
        before=line.drift[0].before,
        about="; ".join(texts),
        moved={shift.kind: round(shift.moved, 4) for shift in line.drift},
    )
