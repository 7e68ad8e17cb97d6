"""Explains why a task failed, in the places where an operator looks first.

These are the state's message, the first error in the logs, and the artifact
`raybatch-JOB-failure`, each with the command that fixes it.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from textwrap import TextWrapper
from typing import Any
from uuid import UUID

from prefect import Flow, get_run_logger
from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import MissingContextError
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run, task_run

from prefect_raybatch.driver.stops import Sample, Stop
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
from prefect_raybatch.job.limits import MAX_FAILED, Limits
from prefect_raybatch.job.secrets import MASK
from prefect_raybatch.report.report import table_lines

log = logging.getLogger(__name__)

ROWS_SHOWN = 20
LONGEST_LINE = 300  # characters of Ray's message about an error
JOB_TO_CHANGE = (ConfigError, EngineStartError, InsufficientResources)  # fixed by changing the job
# The widest line that the Prefect page shows without scrolling. Keeps the indent of lists.
WRAPPED = TextWrapper(96, drop_whitespace=False, replace_whitespace=False)
LEASE_LOST = "Concurrency lease renewal failed"  # how Prefect's log line begins
LEASE_CAUSE = (
    "The lease of the deployment's concurrency limit expired: Prefect's server was unreachable for "
    "too long, or lost its leases in a restart. "
)
KEEP_LEASES = (
    " To keep leases over a restart, start the server with "
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem"
)
LEASE_KEPT_ON = f"{LEASE_CAUSE}This run continues; the next run may start beside it.{KEEP_LEASES}"
LEASE_ADVICE = (
    f"{LEASE_CAUSE}Prefect ends this flow run. Committed shards are kept.{KEEP_LEASES}.\n"
    "What to do:\n"
)
CANCELLED_BY_PREFECT = "Execution was cancelled by the runtime environment"  # a crash's message
LEASE_CRASH = "Prefect ended this flow run, probably because its concurrency lease expired."
HOPELESS = 0.9  # share of failed rows above which no higher limit is suggested
SPARE_FAILED = 1.5  # factor on the failed rows that the share so far predicts
LAST_TASKS = {False: "finalize-run-", True: "publish-run-"}  # by whether the job publishes
COMMAND = "command"  # attribute of an explained error: the command that continues the run
PLAIN_MESSAGE = "plain"  # attribute of an explained error: its message before the explanation


@dataclass(frozen=True)
class Cause:
    """The failure of a task and what to do about it.

    `task` and `job` are names. `error` is the name of the exception's class, `remedy` the advice
    and `command` a command line that carries it out. `run` is the run directory, None if unknown;
    `rows` are examples of failed rows.
    """

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
        """Return the message, the remedy and the command, for the state and the log."""
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
            lines += ["", "## Examples of failed rows", "", *table_lines(_table(self.rows))]
        return "\n".join(lines) + "\n"


@contextmanager
def explained(
    task: str,
    name: str,
    run_key: str | None,
    retries: int = 0,
    run: str | None = None,
    sample: Callable[[], Sequence[Sample]] | None = None,
    stop: Callable[[], Stop | None] = lambda: None,
    limits: Limits | None = None,
) -> Iterator[None]:
    """Explain an exception of the `with` block in Prefect, then raise it again.

    The explanation is logged and shown as an artifact. For a `RayBatchError`, it is also appended
    to the message. These exceptions are raised without an explanation:

    - `RunDrained`,
    - an exception after which Prefect retries the task (at most `retries` times),
    - an exception that an inner block has explained,
    - any exception outside of Prefect.

    `task` is the task's name, `name` the job's. `run_key` and the run directory `run` are None if
    not known yet. `sample` returns examples of failed rows. `stop` returns the numbers of failed
    and tried rows; it is called if the error budget ended the run. `limits` are the job's.
    """
    try:
        yield
    except Exception as error:
        make_storable(error)
        if is_explained(error) or not (flow_run.get_id() or task_run.get_id()):
            raise  # explained by an inner block, or outside of Prefect
        if not RunEvents(run_key or name, name).failed(error, retries):
            raise
        rows = sample() if sample and not isinstance(error, StoreError) else ()
        kind, message = _kind_and_message(error)
        budget = stop() if isinstance(error, ErrorBudgetExceeded) else None
        remedy = _remedy(error, _changes(error, limits, budget))
        command = command_for(error, limits, run_key, run, budget)
        if MASK in command:
            remedy += f" Write your own values in place of {MASK} in the command."
        cause = Cause(task, name, run_key or name, kind, message, remedy, command, run, rows)
        _report(cause)
        setattr(error, PLAIN_MESSAGE, str(error))
        setattr(error, COMMAND, command)
        if isinstance(error, RayBatchError):
            error.args = (prefect_text(cause.text),)  # becomes the state's message
        raise


def is_explained(error: object) -> bool:
    """Return whether the Prefect page already explains this error."""
    return getattr(error, PLAIN_MESSAGE, None) is not None


def _kind_and_message(error: BaseException) -> tuple[str, str]:
    """Return the name of an error's class, and its message.

    Messages of Ray's errors contain tracebacks of other processes; only their last line is
    returned.
    """
    if type(error).__module__.partition(".")[0] != "ray":
        return type(error).__name__, str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return type(error).__name__, (lines[-1] if lines else "")[:LONGEST_LINE]


def _remedy(error: BaseException, changes: Mapping[str, Any]) -> str:
    """Return what to do about an error.

    For a `ConfigError` in a deployment's flow run, names the deployment whose job to change. If the
    flow takes no `changes` of its job's fields, names the fields and the flow or deployment.
    """
    start = continuing.started() if type(error) is ConfigError or changes else None
    if type(error) is ConfigError and start is not None and start.deployment:
        return (
            f"Change the field that the message names in {start.place_of_job}, then run it again."
        )
    if changes and start is not None and not start.takes_changes:
        fields = " and ".join(f"{field} to {value}" for field, value in changes.items())
        return (
            f"Fix the cause, or set {fields} in the job of {start.place_of_job}; then run it again."
        )
    return error.remedy if isinstance(error, RayBatchError) else RayBatchError.remedy


def _report(cause: Cause) -> None:
    """Log the cause and show it as an artifact; a failure to do so must not hide the error."""
    with suppress(MissingContextError):
        get_run_logger().error("%s failed: %s: %s", cause.task, cause.error, cause.text)
    try:
        text = f"Why {cause.task} failed."
        page = MarkdownArtifact(markdown=cause.markdown(), description=text)
        put(page, f"{artifact_key(cause.job)}-failure", cause.run_key)
    except Exception as error:
        log.warning("could not show the failure in Prefect: %s: %s", type(error).__name__, error)


def command_for(
    error: Exception,
    limits: Limits | None,
    run_key: str | None,
    run: str | None,
    stop: Stop | None = None,
) -> str:
    """Return the command that fixes the error or continues the run.

    `limits` are the job's; `run` is the run directory. `stop` holds the numbers of failed and tried
    rows if the error budget ended the run, else it is None.
    """
    if isinstance(error, CorruptRun) and run:
        return f"raybatch verify {shlex.quote(run)}"
    if isinstance(error, PlanMismatch) and run_key:
        run_key = f"{run_key}-2"
    new_run = isinstance(error, (*JOB_TO_CHANGE, PlanMismatch))
    return continuing.command(run_key, _changes(error, limits, stop), new_run)


def _changes(error: Exception, limits: Limits | None, stop: Stop | None = None) -> dict[str, float]:
    """Return {job field: value} with which the run can continue after the error; {} without any."""
    if isinstance(error, ErrorBudgetExceeded) and limits is not None:
        return raised_limits(limits, stop)
    if isinstance(error, CostExceeded) and limits is not None and limits.max_cost:
        return {"limits.max_cost": 2 * limits.max_cost}
    return {}


def raised_limits(limits: Limits, stop: Stop | None) -> dict[str, float]:
    """Return {job field: value} with higher limits on failed rows, which should let the run pass.

    A new limit is at least twice the present one. It is also at least 1.5 times the failures to
    expect in the whole run, if as many rows fail as among those tried so far. Returns {} if over 90
    % of the tried rows failed, because no limit helps then.
    """
    share = stop.failed / stop.tried if stop is not None and stop.tried else 0.0
    if share > HOPELESS:
        return {}
    rows = 0 if stop is None else stop.rows
    raised: dict[str, float] = {}
    if limits.max_failed_rows:
        raised["limits.max_failed_rows"] = max(
            2 * limits.max_failed_rows, math.ceil(round(SPARE_FAILED * share * rows, 6))
        )
    if limits.max_failed_fraction or not limits.max_failed_rows:
        fraction = max(2 * (limits.max_failed_fraction or MAX_FAILED), SPARE_FAILED * share)
        raised["limits.max_failed_fraction"] = min(1.0, math.ceil(round(100 * fraction, 6)) / 100)
    return raised


def crash_advice() -> str | None:
    """Return a text on how to continue the run if it crashes; None without a deployment.

    It is logged when a run begins, because a run that loses its process or host cannot log any
    more. The Prefect page shows the first lines of the log.
    """
    start = continuing.started()
    if start is None or start.deployment is None:
        return None
    return (
        "If this run crashes, committed shards are kept. Continue it with: "
        f"prefect flow-run retry {start.run}"
    )


def log_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Log why Prefect marked a flow run Crashed, and how to continue it.

    Register it as the `on_crashed` hook of a flow. Prefect passes the arguments by these names.
    """
    with get_client(sync_client=True) as client:
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        )
    done = [t.name for t in task_runs if t.state is not None and t.state.is_completed()]
    output = continuing.changed_job(flow_run.parameters).get("output") or {}
    publishes = isinstance(output, Mapping) and bool(output.get("publish"))
    is_complete = any(name.startswith(LAST_TASKS[publishes]) for name in done)
    flow_run_logger(flow_run, flow).error(
        "%s", crash_text(state.message or "", flow_run.id, is_complete)
    )


def crash_text(message: str, run: UUID, is_complete: bool) -> str:
    """Return why the flow run `run` crashed, and how to continue it.

    `message` is the message of the flow run's Crashed state. With `is_complete`, the result exists
    and nothing is left to do.
    """
    cause = LEASE_CRASH if message.startswith(CANCELLED_BY_PREFECT) else f"Crashed: {message}"
    if is_complete:
        return f"{cause} The result is complete."
    return f"{cause} Committed shards are kept. Continue with: prefect flow-run retry {run}"


def _retry_command() -> str:
    root = continuing.root_run()
    return f"prefect flow-run retry {root}" if root else "run it again with the same run key"


def _quoted(text: str) -> list[str]:
    """Return the text as an indented code block, wrapped to the width of the page."""
    lines = [part for line in visible(text).split("\n") for part in (WRAPPED.wrap(line) or [""])]
    return [f"    {line}" for line in lines]


def _lines_of(command: str) -> list[str]:
    """Break a command into lines that fit the page and can be pasted as one command."""
    if not command.startswith(("prefect ", "raybatch ")):
        return [command]  # a call as Python
    words = [shlex.quote(word) for word in shlex.split(command)]
    starts = [at for at, word in enumerate(words) if at and word.startswith("-")]
    lines = [""]
    for start, end in pairwise([0, *starts, len(words)]):
        part = " ".join(words[start:end])
        if not lines[-1] or len(lines[-1]) + len(part) + len("  \\") <= WRAPPED.width:
            lines[-1] += f" {part}" if lines[-1] else part
        else:
            lines[-1] += " \\"
            lines.append(f"  {part}")
    return lines


def _table(rows: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {"row": f"{row.row:,}", "stage": row.stage, "error": row.error, "message": row.message}
        for row in rows
    ]


class _ShortErrors(logging.Filter):
    """Drops the tracebacks that Prefect logs for an error that is already explained.

    Replaces Prefect's message about a lost lease (`LEASE_LOST`) with advice.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(LEASE_LOST):
            ends = record.levelno >= logging.ERROR
            text = f"{LEASE_ADVICE}  {_retry_command()}" if ends else LEASE_KEPT_ON
            record.msg, record.args = text, ()
            record.exc_info = record.exc_text = None
            return True
        error = record.exc_info[1] if record.exc_info else None
        if is_explained(error) and (
            isinstance(error, RayBatchError) or type(error).__module__.startswith("ray.")
        ):
            start = str(record.msg).partition(": ")[0]
            record.msg, record.args = f"{start}: {type(error).__name__}; see the error above", ()
            record.exc_info = record.exc_text = None
        return True


for _name in ("prefect.task_runs", "prefect.flow_runs"):
    for _filter in (_ShortErrors(), STORABLE_LINES):
        logging.getLogger(_name).addFilter(_filter)
