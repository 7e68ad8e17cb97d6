"""The run history of a job as an artifact, and the drift of its answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from prefect.artifacts import ImageArtifact, MarkdownArtifact

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.flow.artifacts import artifact_key, put
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.flow.nights import nights_of_deployment, with_nights
from prefect_raybatch.job.output import Output
from prefect_raybatch.quality.told import put_told, read_told
from prefect_raybatch.report.plots import data_uri, of_history
from prefect_raybatch.report.run_history import (
    HistoryLine,
    HistoryPage,
    history_markdown,
    remarks,
)
from prefect_raybatch.report.verdict import DRIFT_REMARK, FALLEN_REMARK
from prefect_raybatch.runs.run_history import RUNS_SHOWN, changed_fields, history_of
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import open_store

log = logging.getLogger(__name__)


@dataclass
class FlowNotes:
    """Notes about a run that a flow and its tasks share, beside their parameters.

    `output` is the job's output URI before {run_date} is filled in; `remarks` are what is unusual
    about the completed run, and `seconds` is its whole time, Prefect's own start included.
    """

    output: str
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0


_notes: ContextVar[FlowNotes | None] = ContextVar("flow_notes", default=None)


@contextmanager
def flow_notes(output: str) -> Iterator[FlowNotes]:
    """Keep notes about the run of the block."""
    notes = FlowNotes(output)
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def written_uri(uri: str) -> str:
    """Return a job's output URI as written, which all its runs have in common."""
    notes = _notes.get()
    return uri if notes is None else notes.output


def read_history(name: str, uri: str, options: StoreOptions | None) -> HistoryPage:
    """Return the history of the job `name` by its records.

    `uri` is the output URI as written in the job, which may contain {run_date}; `options` have its
    credentials.
    """
    (page,) = history_of(uri, options, name)
    return page


def with_all_nights(page: HistoryPage, uri: str) -> HistoryPage:
    """Return a history with the nights of which only Prefect knows."""
    return with_nights(page, nights_of_deployment(), uri, RUNS_SHOWN)


def put_history(page: HistoryPage, run_key: str) -> None:
    """Show a history as artifacts of the run `run_key`, unless it is empty."""
    if not page.runs:  # the run has no plan yet
        return
    key = artifact_key(page.job)
    text = MarkdownArtifact(markdown=history_markdown(page), description="Run history.")
    put(text, f"{key}-history", run_key)
    picture = of_history(page.runs)
    if picture is not None:
        # Also a separate artifact: Prefect's newer page shows no images within Markdown.
        image = ImageArtifact(image_url=data_uri(picture), description="Run history, plotted.")
        put(image, f"{key}-history-plots", run_key)


def show_history(
    name: str,
    output: Output,
    run_key: str,
    tell: bool = False,
    uri: str | None = None,
    limited: bool = False,
) -> None:
    """Show the history of the job `name` whose run has just ended.

    `output` has the credentials; `uri` is its URI as written in the job. `tell` emits an event if
    the run has far fewer rows than usual, unless `limited`, or if it drifted. An accuracy that fell
    is told whatever `tell` says, until a record says that it was. An error here is only logged and
    never fails the run.
    """
    try:
        written = uri or output.uri
        page = with_all_nights(read_history(name, written, output.options or None), written)
        put_history(page, run_key)
        line = next((line for line in page.runs if line.run_key == run_key), None)
    except Exception as error:
        log.warning("could not show the run history: %s: %s", type(error).__name__, error)
        return
    if line is None or line.good is None:
        return
    unusual = [] if limited else remarks(page, line)
    if (notes := _notes.get()) is not None:
        about = {DRIFT_REMARK: bool(line.drift), FALLEN_REMARK: line.has_fallen}
        notes.remarks = [*unusual, *(text for text, applies in about.items() if applies)]
        notes.seconds = line.elapsed or 0.0
    try:
        _tell_fallen(line, name, output.options or None)
    except RayBatchError as error:
        log.warning("could not record that the accuracy fell: %s", error)
    if tell:
        _tell_few_rows(line, name, unusual)
        _tell_drift(line, name, changed_fields(page, line, output.options))


def _tell_fallen(line: HistoryLine, job: str, options: StoreOptions | None) -> None:
    """Emit one event for all measures by which the accuracy fell, unless a record says it was.

    The record is written afterwards, so an attempt that ended between judgement and event, or
    between event and record, only leads to a second event.
    """
    fallen = {measure: series for measure, series in line.series.items() if series.rings}
    e_values = {measure: series.e_value for measure, series in fallen.items()}
    if not fallen:
        return
    store = open_store(line.run, dict(options) if options else None)
    try:
        if read_told(store) == e_values:
            return
    except RayBatchError as error:  # twice is better than never
        log.warning("could not read whether the fall of accuracy was told before: %s", error)
    texts = [f"{measure}: {series.text()}" for measure, series in fallen.items()]
    for text in texts:
        log.warning("run %s: %s", line.run_key, text)
    RunEvents(line.run_key, job).emit(
        "accuracy.fell", run=line.run, about="; ".join(texts), e_values=e_values
    )
    put_told(store, e_values)


def _tell_few_rows(line: HistoryLine, job: str, unusual: list[str]) -> None:
    for text in unusual:
        log.warning("%s", text)
        RunEvents(line.run_key, job).emit("rows.low", run=line.run, rows=line.rows, about=text)


def _tell_drift(line: HistoryLine, job: str, changed: str) -> None:
    """Emit one event for all drift, so that a run sends one notification.

    `changed` names the fields of the job that changed since the run before, if any.
    """
    if not line.drift:
        return
    texts = [shift.line() for shift in line.drift]
    if changed:
        texts.append(f"the job changed in {changed} since then")
    for text in texts:
        log.warning("the run has drifted from those before it: %s", text)
    RunEvents(line.run_key, job).emit(
        "answers.drifted",
        run=line.run,
        before=line.drift[0].before,
        about="; ".join(texts),
        moved={shift.kind: round(shift.moved, 4) for shift in line.drift},
    )
