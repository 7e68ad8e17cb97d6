"""The run history of a job as an artifact, and the drift of its answers."""

from __future__ import annotations

import logging

from prefect.artifacts import ImageArtifact, MarkdownArtifact

from prefect_raybatch.flow.artifacts import artifact_key, put
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.report.nights import NightLine, nights_markdown
from prefect_raybatch.report.plots import data_uri, of_nights
from prefect_raybatch.runs.nights import nights_of

log = logging.getLogger(__name__)


def show_nights(
    loaded: BatchJob, run_key: str, tell: bool = False, output: str | None = None
) -> None:
    """Show the history of the job whose run has just ended. `output` is where its runs are, as the
    job is written: with {run_date} in it, each run has a folder of its own. `tell`: emit an event
    if the run's answers shifted. An error here is only logged and never fails the run."""
    try:
        (page,) = nights_of(output or loaded.output.uri, loaded.output.options or None, loaded.name)
        if not page.nights:  # the run has not come to a plan
            return
        key = artifact_key(loaded.name)
        text = MarkdownArtifact(markdown=nights_markdown(page), description="Nights.")
        put(text, f"{key}-nights", run_key)
        picture = of_nights(page.nights)
        if picture is not None:
            # Also as an artifact of its own: Prefect's newer page shows no images within Markdown.
            image = ImageArtifact(image_url=data_uri(picture), description="Nights, drawn.")
            put(image, f"{key}-nights-plots", run_key)
        night = next((night for night in page.nights if night.run_key == run_key), None)
    except Exception as error:
        log.warning("the page of nights is not shown: %s: %s", type(error).__name__, error)
        return
    if night is not None and tell:
        _tell_drift(night, loaded.name)


def _tell_drift(night: NightLine, job: str) -> None:
    """Emit one event for all shifts, so that a run notifies a person once."""
    if not night.shifts:
        return
    lines = [shift.line() for shift in night.shifts]
    for line in lines:
        log.warning("the answers have drifted: %s", line)
    RunEvents(night.run_key, job).emit(
        "answers.drifted",
        run=night.run,
        before=night.shifts[0].before,
        about="; ".join(lines),
        moved={shift.kind: round(shift.moved, 4) for shift in night.shifts},
    )
