"""Runs the job of a call such as `ask`, and keeps the engine for the next call."""

from __future__ import annotations

import atexit
import re
import time
from contextlib import ExitStack, closing
from html import escape
from typing import TYPE_CHECKING, Any

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cli.show import TerminalProgress, describe_progress
from prefect_raybatch.cli.terminal import err
from prefect_raybatch.cluster.connect import CLUSTER_SESSION, warm_engines
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.run import Run, run_keys
from prefect_raybatch.stages.text_answers import CUT_OFF
from prefect_raybatch.storage import open_store

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import Progress

KEEP_SECONDS = 600.0  # time that an engine waits for the next call
KEY_LENGTH = 24  # hex digits of the fingerprint that name the runs of a call
REDRAW_SECONDS = 0.2  # time between two states of the bar in a notebook


class _KeptEngines:
    """Keeps the engines of this process running for the next call."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    def keep(self, seconds: float) -> None:
        """Keep all engines running until `seconds` have passed without a call.

        Engines that were kept before are included. Does nothing in a block of `warm_engines`, which
        sets the time itself.
        """
        if self._stack is None and CLUSTER_SESSION.warm.is_keeping:
            return
        stack = ExitStack()
        stack.enter_context(warm_engines(seconds))
        self.end()
        self._stack = stack

    def end(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


_KEPT = _KeptEngines()
atexit.register(_KEPT.end)


def end_engines() -> None:
    """End the engine that waits for the next call of `ask`, and the local cluster with it."""
    _KEPT.end()


def run_call(
    resolved: Resolved, keep_seconds: float, progress: bool | None, engine: type | None
) -> RunReport:
    """Run the call's job, or continue or reuse its stored run; return the report.

    `keep_seconds`, `progress` and `engine` are the options of `ask`. `progress` None shows a bar in
    a notebook and on a terminal, and nothing elsewhere.
    """
    job, run = resolved.job, _newest_run(resolved)
    if keep_seconds:
        _KEPT.keep(keep_seconds)
    with closing(_progress(progress)) as show:
        done = infer_run(job, run, show, engine)
    if not keep_seconds:
        _KEPT.end()
    return finalize_run(job, run, done)


def _newest_run(resolved: Resolved) -> Run:
    """Return the newest run of a call's job; plan one if there is none.

    If the newest run is finished, but a retry may answer some of its failed rows, plan a further
    run and return that. The further run reuses the stored answers, and sends requests only for the
    failed rows.
    """
    job, key = resolved.job, resolved.identity.fingerprint[:KEY_LENGTH]
    root = open_store(job.output.uri, job.output.options or None)
    numbered = (re.fullmatch(rf"{key}-(\d+)", name) for name in run_keys(root))
    number = max((int(match[1]) for match in numbered if match), default=0)
    run = plan_run(resolved, f"{key}-{number}")
    if run.finished and _may_succeed(job.prompt, job.sampling, finalize_run(job, run)):
        return plan_run(resolved, f"{key}-{number + 1}")
    return run


def _may_succeed(prompt: Prompt, sampling: Sampling, report: RunReport) -> bool:
    """Return whether a retry may answer some of the failed rows.

    A row that failed before its request (a null, a prompt that is too long) fails again, unless the
    prompt comes from a function or has images. With temperature 0, an answer that was cut off is
    cut off again.
    """
    prompts_vary = prompt.function is not None or bool(prompt.images.columns)
    answers_vary = prompts_vary or sampling.temperature > 0
    failures = (FailureKey.parse(text) for text in report.failures)
    return any(
        prompts_vary if one.stage == "prepare" else answers_vary or one.error != CUT_OFF
        for one in failures
    )


def _progress(progress: bool | None) -> TerminalProgress:
    quiet = not (err.is_jupyter or err.is_terminal if progress is None else progress)
    return NotebookProgress(quiet) if err.is_jupyter else TerminalProgress(quiet)


class NotebookProgress(TerminalProgress):
    """The progress of a call, shown as a bar below the cell of a notebook."""

    def __init__(self, quiet: bool):
        super().__init__(quiet)
        self.draws = True
        self._display: Any = None
        self._drawn = 0.0

    def draw(self, progress: Progress) -> None:
        """Show progress as an HTML bar, in place of the previous one."""
        from IPython.display import HTML, display

        now, whole = time.monotonic(), progress.whole
        if now - self._drawn < REDRAW_SECONDS and progress.whole_done < whole:
            return
        self._drawn = now
        note = escape(describe_progress(progress, self.phase, self.about))
        bar = HTML(f'<progress max="{whole}" value="{progress.whole_done}"></progress> {note}')
        if self._display is None:
            self._display = display(bar, display_id=True)
        else:
            self._display.update(bar)
