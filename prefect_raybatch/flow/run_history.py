"""The run history of a job as an artifact, and the drift of its answers."""

from __future__ import annotations

import logging

from prefect.artifacts import ImageArtifact, MarkdownArtifact

from prefect_raybatch.flow.artifacts import artifact_key, put
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.job.output import Output
from prefect_raybatch.report.plots import data_uri, of_history
from prefect_raybatch.report.run_history import HistoryLine, history_markdown
from prefect_raybatch.runs.run_history import history_of

log = logging.getLogger(__name__)


def show_history(
    name: str, output: Output, run_key: str, tell: bool = False, uri: str | None = None
) -> None:
    """Show the history of the job `name` whose run has just ended.

    `output` has its credentials; `uri` is the output URI as written in the job, which may contain
    {run_date}. `tell` emits an event if the run's answers drifted. An error here is only logged and
    never fails the run.
    """
    try:
        (page,) = history_of(uri or output.uri, output.options or None, name)
        if not page.runs:  # the run has no plan yet
            return
        key = artifact_key(name)
        text = MarkdownArtifact(markdown=history_markdown(page), description="Run history.")
        put(text, f"{key}-history", run_key)
        picture = of_history(page.runs)
        if picture is not None:
            # Also a separate artifact: Prefect's newer page shows no images within Markdown.
            image = ImageArtifact(image_url=data_uri(picture), description="Run history, plotted.")
            put(image, f"{key}-history-plots", run_key)
        line = next((line for line in page.runs if line.run_key == run_key), None)
    except Exception as error:
        log.warning("could not show the run history: %s: %s", type(error).__name__, error)
        return
    if line is not None and tell:
        _tell_drift(line, name)


def _tell_drift(line: HistoryLine, job: str) -> None:
    """Emit one event for all shifts, so that a run sends one notification."""
    if not line.shifts:
        return
    texts = [shift.line() for shift in line.shifts]
    for text in texts:
        log.warning("the answers have drifted since the previous run: %s", text)
    RunEvents(line.run_key, job).emit(
        "answers.drifted",
        run=line.run,
        before=line.shifts[0].before,
        about="; ".join(texts),
        moved={shift.kind: round(shift.moved, 4) for shift in line.shifts},
    )
