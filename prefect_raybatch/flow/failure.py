"""Explains why a task failed, where an operator looks first: the state's message, the first error
in the logs, and the artifact `raybatch-JOB-failure`, each with the command that fixes it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from textwrap import TextWrapper
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run, task_run

from prefect_raybatch.driver.stops import Sample
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    CostExceeded,
    EngineStartError,
    ErrorBudgetExceeded,
    InsufficientResources,
    PlanMismatch,
    RayBatchError,
    StoreError,
)
from prefect_raybatch.flow import continuing
from prefect_raybatch.flow.artifacts import artifact_key, put
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.flow.texts import STORABLE_LINES, make_storable, prefect_text
from prefect_raybatch.harmless import code_span, fenced, markdown_text, visible
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.limits import MAX_FAILED
from prefect_raybatch.report.report import table_lines

log = logging.getLogger(__name__)

ROWS_SHOWN = 20
LONGEST_LINE = 300  # characters of an error's text from elsewhere
JOB_TO_CHANGE = (ConfigError, EngineStartError, InsufficientResources)  # mended by changing the job
# So wide that the page shows the whole of it; the indent of lists stays.
WRAPPED = TextWrapper(96, drop_whitespace=False, replace_whitespace=False)
LEASE_LOST = "Concurrency lease renewal failed"  # as Prefect's line about it begins
LEASE_TOLD = (
    "Prefect ends this run: its server has been away too long, or was started again and has "
    "forgotten which runs its deployment's concurrency limit counts. What is committed is kept; a "
    "server with PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE="
    "prefect.server.concurrency.lease_storage.filesystem does not forget.\nWhat to do:\n"
)
COMMAND = "command"  # attribute of an error that was told: the command that continues the run
TOLD = "plain"  # attribute of an error that was told: its message before that


@dataclass(frozen=True)
class Cause:
    """What failed, why, and what to do: `task` of the run `run_key`, at `run` if known; `rows` are
    some of the failed rows."""

    task: str
    job: str
    run_key: str
    error: str
    message: str
    remedy: str
    command: str
    run: str | None = None
    rows: Sequence[Sample] = ()

    @property
    def text(self) -> str:
        """Return the reason and what to do, as in the state and in the log."""
        return f"{self.message}\nWhat to do: {self.remedy}\n  {self.command}"

    def markdown(self) -> str:
        lines = [
            f"# {markdown_text(self.job)}: {markdown_text(self.task)} failed",
            "",
            f"Run {code_span(self.run_key)}" + (f" in {code_span(self.run)}" if self.run else ""),
            "",
            f"**{markdown_text(self.error)}**",
            "",
            *_quoted(self.message),
            "",
            "## What to do",
            "",
            markdown_text(self.remedy),
            "",
            *fenced(_lines_of(self.command)),
        ]
        if self.rows:
            lines += ["", "## Some of the rows that failed", "", *table_lines(_table(self.rows))]
        return "\n".join(lines) + "\n"


@contextmanager
def explained(
    task: str,
    job: BatchJob | str,
    run_key: str | None,
    retries: int = 0,
    run: str | None = None,
    sample: Callable[[], Sequence[Sample]] | None = None,
) -> Iterator[None]:
    """Explain an exception of the block, and raise it again. One that Prefect will retry is only
    reported as an event. Takes the job or its name, and the run's key and directory, None if not
    known yet."""
    name = job if isinstance(job, str) else job.name
    try:
        yield
    except Exception as error:
        make_storable(error)
        if was_told(error) or not (flow_run.get_id() or task_run.get_id()):
            raise  # told within, or called as a plain function, of which no page knows
        if not RunEvents(run_key or name, name).failed(error, retries):
            raise
        rows = sample() if sample and not isinstance(error, StoreError) else ()
        kind, message = _of(error)
        remedy = error.remedy if isinstance(error, RayBatchError) else RayBatchError.remedy
        command = command_for(error, job, run_key, run)
        cause = Cause(task, name, run_key or name, kind, message, remedy, command, run, rows)
        _tell(cause)
        setattr(error, TOLD, str(error))
        setattr(error, COMMAND, command)
        if isinstance(error, RayBatchError):
            error.args = (prefect_text(cause.text),)  # Prefect makes the state's message of it
        raise


def was_told(error: object) -> bool:
    """Return whether the page already explains why this error was raised."""
    return getattr(error, TOLD, None) is not None


def _of(error: BaseException) -> tuple[str, str]:
    """Return class and message of an error. Ray's own contain tracebacks of other processes, whose
    last line says what happened."""
    if type(error).__module__.partition(".")[0] != "ray":
        return type(error).__name__, str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return type(error).__name__, (lines[-1] if lines else "")[:LONGEST_LINE]


def _tell(cause: Cause) -> None:
    """Report the cause; an unreachable page must not hide the error itself."""
    with suppress(MissingContextError):
        get_run_logger().error("%s failed: %s: %s", cause.task, cause.error, cause.text)
    try:
        text = f"Why {cause.task} failed."
        page = MarkdownArtifact(markdown=cause.markdown(), description=text)
        put(page, f"{artifact_key(cause.job)}-failure", cause.run_key)
    except Exception as error:
        log.warning("the failure is not shown in the page: %s: %s", type(error).__name__, error)


def command_for(error: Exception, job: BatchJob | str, run_key: str | None, run: str | None) -> str:
    """Return the command that an operator types next."""
    if isinstance(error, CorruptRun) and run:
        return f"raybatch verify {shlex.quote(run)}"
    changes: dict[str, Any] = {}
    if isinstance(error, ErrorBudgetExceeded) and isinstance(job, BatchJob):
        changes = _raised(job)
    if isinstance(error, CostExceeded) and isinstance(job, BatchJob) and job.limits.max_cost:
        changes = {"limits.max_cost": 2 * job.limits.max_cost}
    if isinstance(error, PlanMismatch) and run_key:
        run_key = f"{run_key}-2"
    new_run = isinstance(error, (*JOB_TO_CHANGE, PlanMismatch))
    return continuing.command(run_key, changes, new_run)


def _raised(job: BatchJob) -> dict[str, float]:
    """Return the job's limit of failed rows doubled, for a person to adjust."""
    limits = job.limits
    if limits.max_failed_rows:
        return {"limits.max_failed_rows": 2 * limits.max_failed_rows}
    if limits.max_failed_fraction:
        return {"limits.max_failed_fraction": min(1.0, 2 * limits.max_failed_fraction)}
    return {"limits.max_failed_fraction": 2 * MAX_FAILED}


def said_beforehand() -> str | None:
    """Return what a run whose process or host is lost can no longer say, for the first lines of its
    log: the page shows these, and nothing of the state's message. None for a run without a
    deployment."""
    found = continuing.started()
    if found is None or found.deployment is None:
        return None
    return (
        "should this run end as Crashed, its process or host is lost; what is committed is kept, "
        f"and this goes on with it: prefect flow-run retry {found.run}"
    )


def _go_on() -> str:
    root = continuing.root_run()
    return f"prefect flow-run retry {root}" if root else "run it again under the same run key"


def _quoted(text: str) -> list[str]:
    """Return the text verbatim as a code block, whose lines the page does not break."""
    lines = [part for line in visible(text).split("\n") for part in (WRAPPED.wrap(line) or [""])]
    return [f"    {line}" for line in lines]


def _lines_of(command: str) -> list[str]:
    """Return a command in lines that the page shows completely and that can be pasted as one
    command."""
    if not command.startswith(("prefect ", "raybatch ")):
        return [command]  # a call as Python
    words = [shlex.quote(word) for word in shlex.split(command)]
    starts = [at for at, word in enumerate(words) if at and word.startswith("-")]
    made = [""]
    for start, end in pairwise([0, *starts, len(words)]):
        part = " ".join(words[start:end])
        if not made[-1] or len(made[-1]) + len(part) + len("  \\") <= WRAPPED.width:
            made[-1] += f" {part}" if made[-1] else part
        else:
            made[-1] += " \\"
            made.append(f"  {part}")
    return made


def _table(rows: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {"row": f"{one.row:,}", "stage": one.stage, "error": one.error, "message": one.message}
        for one in rows
    ]


class _Short(logging.Filter):
    """Shortens Prefect's log of an error: it logs the traceback once for the task and once for the
    flow, but an explained error needs none. If Prefect ends a flow run itself, add what to do to
    its message."""

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(LEASE_LOST):
            record.msg, record.args = f"{LEASE_LOST}. {LEASE_TOLD}  {_go_on()}", ()
            record.exc_info = record.exc_text = None
            return True
        error = record.exc_info[1] if record.exc_info else None
        if was_told(error) and (
            isinstance(error, RayBatchError) or type(error).__module__.startswith("ray.")
        ):
            said = str(record.msg).partition(": ")[0]
            record.msg, record.args = f"{said}: {type(error).__name__}, as said above", ()
            record.exc_info = record.exc_text = None
        return True


for _name in ("prefect.task_runs", "prefect.flow_runs"):
    for _filter in (_Short(), STORABLE_LINES):
        logging.getLogger(_name).addFilter(_filter)
