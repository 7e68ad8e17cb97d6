"""What an operator is told of a failed task: state, logs and artifact, on a real Prefect server."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import pickle
import re
import shlex
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from helpers.heard import wait_for
from helpers.prefect_server import artifacts_of, events_of
from helpers.retries import first_run
from helpers.small import make_job
from prefect import flow, flow_engine, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed

from prefect_raybatch import (
    BatchJob,
    batch_inference,
    finalize_run,
    infer_shards,
    plan_shards,
    publish_run,
    retry_failed,
)
from prefect_raybatch.driver.stops import Sample, Stop
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    EngineFailure,
    ErrorBudgetExceeded,
    PublishFailed,
    RayBatchError,
)
from prefect_raybatch.flow import away, continuing, failure, page
from prefect_raybatch.flow.away import ApiWatch, outages_logged_once, watched
from prefect_raybatch.flow.cancelling import CancelWatch
from prefect_raybatch.flow.job_flow import job_flow
from prefect_raybatch.flow.tasks import OUR_LOGGER, logs_in_page, tune_engine
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

pytestmark = pytest.mark.usefixtures("prefect_api")


def made_by_a_deployment() -> continuing.FlowStart:
    run = UUID("00000000-0000-0000-0000-000000000007")
    takes = continuing.RUN_PARAMETERS
    return continuing.FlowStart(run, "batch_inference", "batch_inference/nightly", {}, takes, None)


def failing(monkeypatch: pytest.MonkeyPatch, run: Run, error: Exception) -> None:
    """Makes the run's inference fail so."""

    def infer_run(job: BatchJob, run: Run, observe: Any) -> None:
        raise error

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", lambda *_: run)
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)


def logs_of(run: Any, text: str) -> list[str]:
    """The lines of a flow run from the first error on, once one of them holds `text`."""
    lines = all_logs_of(run, text)
    levels = [line.level for line in lines]
    return [line.message for line in lines[levels.index(logging.ERROR) :]]


def all_logs_of(run: Any, text: str) -> list[Any]:
    """The lines of a flow run that has ended, which come to the server in several calls."""
    lines: list[Any] = []
    deadline = time.time() + 120

    def there() -> bool:
        ends = [line for line in lines if line.name == "prefect.flow_runs"]
        ended = any("Finished in state" in line.message for line in ends)
        return ended and any(text in line.message for line in lines)

    with get_client(sync_client=True) as client:
        while not there() and time.time() < deadline:
            time.sleep(0.3)
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))
    return sorted(lines, key=lambda line: line.timestamp)


def page_of(job: str) -> str:
    return str(artifacts_of(f"raybatch-{job}-failure")[0].data)


def test_rows_that_crossed_the_budget_are_shown_with_cause_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = first_run(tmp_path, failed={4: "ValueError", 11: "TypeError"}, finish=False)
    stop = Stop(9, 7, 2, 20, 3, (Sample(17, "prepare", "KeyError", "no | such name"),))
    ledger = Ledger(open_store(made.store.uri))
    note = {"started": "2026-03-01T02:00:00+00:00", "stopped": stop.to_dict()}
    ledger.note_attempt("a" * 32, note)
    plan = made.plan
    run = Run(made.store.uri, plan.run_key, plan.hash, plan.rows, plan.shards, False)
    error = ErrorBudgetExceeded("9 of 20 rows failed, more than 2. Most common:\n  7 rows: prepare")
    failing(monkeypatch, run, error)
    job = make_job(name="over-budget", output={"uri": str(tmp_path)})
    state = batch_inference(job, run.run_key, return_state=True)
    text = str(state.message)
    assert state.is_failed()
    assert "9 of 20 rows failed" in text and "What to do: Fix the cause, or raise" in text
    command = text.rstrip().splitlines()[-1].strip()
    assert command.startswith("batch_inference(job=job, ") and "run_key='key'" in command
    assert "overrides={'limits.max_failed_fraction': 0.02}" in command

    page = page_of("over-budget")
    assert page.startswith("# over-budget: infer_shards failed\n") and command in page
    assert "    9 of 20 rows failed, more than 2. Most common:\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| 4 | engine | ValueError | refused |",
        "| 11 | engine | TypeError | refused |",
        "| 17 | prepare | KeyError | no \\| such name |",
    ]
    lines = logs_of(state.state_details.flow_run_id, "Finished in state")
    assert lines[0].startswith("infer_shards failed: ErrorBudgetExceeded: 9 of 20 rows failed")
    assert not [line for line in lines if "Traceback" in line]
    assert any("ErrorBudgetExceeded; see the error above" in line for line in lines)
    with pytest.raises(ErrorBudgetExceeded) as told:
        state.result()
    assert pickle.loads(pickle.dumps(told.value)).plain == str(error.plain)
    assert told.value.plain and "What to do" not in told.value.plain


@pytest.mark.parametrize(
    ("limits", "failed", "tried", "changes"),
    [
        ({}, 9, 100, {"limits.max_failed_fraction": 0.14}),
        ({}, 1, 100, {"limits.max_failed_fraction": 0.02}),
        ({"max_failed_rows": 5}, 10, 100, {"limits.max_failed_rows": 90}),
        ({"max_failed_rows": 5, "max_failed_fraction": 0.2}, 70, 100,
         {"limits.max_failed_rows": 630, "limits.max_failed_fraction": 1.0}),
        ({}, 100, 100, {}),  # a higher limit would fail again
        ({}, 9, None, {"limits.max_failed_fraction": 0.02}),
    ],
)  # fmt: skip
def test_the_suggested_limit_has_room_for_the_share_that_failed(
    limits: dict[str, Any], failed: int, tried: int | None, changes: dict[str, float]
) -> None:
    stop = Stop(failed, 1, 5, 600, tried=tried)
    assert failure.raised_limits(make_job(limits=limits).limits, stop) == changes


ODD = "'a\0b' and '\ud800'"  # as a row may hold, and an error that quotes it
HELD = "'a\N{SYMBOL FOR NULL}b' and '?'"  # what PostgreSQL and JSON can hold of it


@pytest.mark.parametrize("kind", [ErrorBudgetExceeded, ValueError])
def test_characters_that_prefects_database_refuses_keep_nothing_from_being_told(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL a NUL in an error left a flow run Running, and took events of others along."""
    made = first_run(tmp_path, finish=False)
    plan, name = made.plan, f"odd-{kind.__name__.lower()}"
    run = Run(made.store.uri, plan.run_key, plan.hash, plan.rows, plan.shards, False)

    def infer_run(job: BatchJob, run: Run, observe: Any) -> None:
        logging.getLogger("prefect_raybatch.driver").warning("a row says %s", ODD)
        raise kind(f"no number: {ODD}")

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", lambda *_: run)
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    job = make_job(name=name, output={"uri": str(tmp_path)})
    state = batch_inference(job, plan.run_key, return_state=True)
    assert state.is_failed() and f"no number: {HELD}" in str(state.message)
    assert f"no number: {HELD}" in page_of(name)
    lines = [x.message for x in all_logs_of(state.state_details.flow_run_id, "Finished in state")]
    assert f"a row says {HELD}" in lines
    assert any(line.startswith(f"infer_shards failed: {kind.__name__}") for line in lines)
    with get_client(sync_client=True) as client:
        kept = client.read_flow_run(state.state_details.flow_run_id).state
    assert kept is not None and kept.is_failed()

    def failed() -> list[str]:
        found = events_of(f"raybatch.run.{plan.run_key}")
        mine = [event for event in found if event["resource"]["raybatch.job"] == name]
        return [e["payload"]["message"] for e in mine if e["event"] == "raybatch.run.failed"]

    assert wait_for(failed) == [f"no number: {HELD}"]


def test_lines_are_made_storable_also_where_prefects_settings_name_our_logger() -> None:
    handler = APILogHandler()
    OUR_LOGGER.addHandler(handler)
    try:
        with logs_in_page():
            record = logging.LogRecord("x", logging.INFO, "", 0, "a row says %s", (ODD,), None)
            assert handler.filter(record) and record.getMessage() == f"a row says {HELD}"
    finally:
        OUR_LOGGER.removeHandler(handler)


def test_a_long_command_is_broken_where_a_shell_goes_on() -> None:
    over = json.dumps({"limits.max_failed_fraction": 0.02})
    key = shlex.quote("monday -p " * 5)
    name = "prefect deployment run batch_inference/nightly"
    command = f"{name} -p run_key={key} -p 'overrides={over}' --watch"
    cause = failure.Cause("t", "job", "k", "E", "why", "do", command)
    block = cause.markdown().split("```\n")[1]
    lines = block.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 96
    shown = 'prefect() { printf "%s\\n" "$@"; }; '
    bash = ["bash", "-c"]
    said = subprocess.run([*bash, shown + block], capture_output=True, text=True, check=True)
    whole = subprocess.run([*bash, shown + command], capture_output=True, text=True, check=True)
    assert said.stdout == whole.stdout and f"overrides={over}" in whole.stdout
    short = failure.Cause("t", "job", "k", "E", "why", "do", "raybatch verify /o/k")
    assert "```\nraybatch verify /o/k\n```" in short.markdown()


class RayTaskError(Exception):
    """As Ray raises them: the text is the traceback of another process."""


RayTaskError.__module__ = "ray.exceptions"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineFailure("engines kept dying"), "prefect flow-run retry"),
        (RayTaskError("Traceback (most recent call last):\n  File x\nKeyError: 'a'"), "KeyError"),
        (ZeroDivisionError("division by zero"), "division by zero"),
    ],
)
def test_any_error_of_any_task_is_explained(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_run(*_: Any) -> Run:
        raise error

    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", plan_run)
    monkeypatch.setattr(continuing, "started", made_by_a_deployment)
    name = f"fails-{type(error).__name__.lower()}"

    @flow
    def night() -> None:
        plan_shards.with_options(retry_delay_seconds=0)(make_job(name=name), "k")

    state = night(return_state=True)
    assert state.is_failed()
    page = page_of(name)
    assert said in page and "prefect flow-run retry" in page and "File x" not in page
    lines = logs_of(state.state_details.flow_run_id, "plan_shards failed")
    assert lines[0].startswith(f"plan_shards failed: {type(error).__name__}: ")


@pytest.mark.parametrize(
    ("task", "within"),
    [
        (infer_shards, "infer_in_place"),
        (finalize_run, "finalize"),
        (publish_run, "publish"),
        (tune_engine, "try_settings"),
    ],
)
def test_each_later_task_says_why_it_failed(
    task: Any, within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ConfigError("the field x is wrong")

    monkeypatch.setattr(f"prefect_raybatch.flow.tasks.{within}", fails)
    name, made = f"later-{task.name.replace('_', '-')}", first_run(tmp_path, finish=False)
    output = {
        "uri": str(tmp_path),
        "publish": [{"uri": str(tmp_path / "table"), "format": "delta"}],
    }
    job = make_job(name=name, output=output)
    run = Run(made.store.uri, made.plan.run_key, made.plan.hash, 20, 4, False)

    @flow
    def night() -> None:
        task(job) if task is tune_engine else task(job, run)

    assert night(return_state=True).is_failed()
    page = page_of(name)
    assert page.startswith(f"# {name}: {task.name} failed\n")
    assert "the field x is wrong" in page and "\nnight()\n" in page


def test_an_error_before_any_task_and_one_of_a_retry_are_explained(tmp_path: Path) -> None:
    job = make_job(name="no-key", source={"uri": "in/{run_key}"})
    state = batch_inference(job, "mon/day", return_state=True)
    assert state.is_failed() and "batch_inference failed" in page_of("no-key")
    state = batch_inference(job, overrides={"sampling.max_tokns": 9}, return_state=True)
    assert state.is_failed() and "unknown field 'max_tokns'" in str(state.message)
    retried = retry_failed(str(tmp_path / "nobody"), return_state=True)
    assert retried.is_failed() and "What to do" in str(retried.message)
    assert "plan_retry failed" in page_of("nobody")


@pytest.mark.parametrize(
    ("error", "command"),
    [
        (CorruptRun("x"), "raybatch verify /o/k"),
        (ConfigError("x"), "prefect deployment run batch_inference/nightly -p run_key=k"),
        (EngineFailure("x"), "prefect flow-run retry 00000000-0000-0000-0000-000000000007"),
        (PublishFailed("x"), "prefect flow-run retry 00000000-0000-0000-0000-000000000007"),
    ],
)
def test_the_command_fits_the_error(
    error: RayBatchError, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuing, "started", made_by_a_deployment)
    assert failure.command_for(error, make_job().limits, "k", "/o/k") == command


@pytest.mark.parametrize("deployment", ["f/d", None])
def test_what_a_lost_process_can_say_no_more_is_said_by_its_plan(
    deployment: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a deployment can be told to go on: with the outermost flow run, which keeps the key."""
    run = Run("/o/k", "k", "hash", 20, 4, False)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", lambda *_: run)
    as_started = continuing.started

    def started() -> Any:
        return replace(as_started(), deployment=deployment)

    monkeypatch.setattr(continuing, "started", started)

    @flow
    def night() -> None:
        plan_shards(make_job(name="beforehand"), "k")

    told = night(return_state=True).state_details.flow_run_id
    lines = [line.message for line in all_logs_of(told, "Finished in state Completed()")]
    (at,) = (number for number, line in enumerate(lines) if "20 rows in 4 shards" in line)
    said = [line for line in lines if "If this run crashes" in line]
    assert said == ([lines[at + 1]] if deployment else [])
    assert not said or said[0].endswith(f"prefect flow-run retry {told}")


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_lease_is_told_with_what_becomes_of_the_run(ends: bool) -> None:
    """As Prefect 3.7.7 logs it when it cannot renew a run's place under the concurrency limit."""
    handler = "prefect.concurrency._leases"

    @flow
    def night() -> None:
        leases = importlib.import_module(handler)
        scope = SimpleNamespace(cancel=lambda: None)
        error = httpx.HTTPStatusError("410 Gone", request=None, response=None)
        leases._handle_lease_renewal_failure(error, uuid4(), ends, False, scope)

    told = night(return_state=True).state_details.flow_run_id
    lines = [one.message for one in all_logs_of(told, "Finished in state")]
    (line,) = [one for one in lines if "lease" in one]
    assert line.startswith("The lease of the deployment's concurrency limit expired: ")
    assert "LEASE_STORAGE" in line and "Traceback" not in line and "410 Gone" not in line
    if ends:
        assert line.endswith(f"  prefect flow-run retry {told}")
    else:
        assert "This run continues; the next run may start beside it." in line


@pytest.mark.parametrize("ours", [True, False])
def test_a_flow_of_ours_goes_on_without_its_lease(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage Prefect ended a run whose result was complete."""
    lost = threading.Event()
    leases = importlib.import_module("prefect.concurrency._leases")
    handle = leases._handle_lease_renewal_failure

    def renew(*_: Any) -> bool:
        raise httpx.ConnectError("refused")

    def handled(*arguments: Any) -> None:
        handle(*arguments)
        lost.set()

    monkeypatch.setattr(leases, "_renew_concurrency_lease_with_retries", renew)
    monkeypatch.setattr(leases, "_handle_lease_renewal_failure", handled)

    def night() -> str:
        with flow_engine.maintain_concurrency_lease(
            uuid4(), 300, raise_on_lease_renewal_failure=True
        ):
            while not lost.wait(0.05):
                pass
        return "complete"

    if ours:
        assert job_flow(name="night")(night)(return_state=True).is_completed()
    else:  # as Prefect does it: where this fails, Prefect no longer ends such runs
        with pytest.raises(asyncio.CancelledError):
            flow(night)()


def test_a_cancellation_that_no_worker_notices_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage the worker no longer looks for cancellations: the run worked to its end."""
    made = first_run(tmp_path, finish=False)
    plan = made.plan
    run = Run(made.store.uri, plan.run_key, plan.hash, plan.rows, plan.shards, False)
    monkeypatch.setattr(page, "CancelWatch", partial(CancelWatch, 0.0))
    monkeypatch.setattr(page, "CANCEL_LOOK", 0.05)
    monkeypatch.setattr("prefect_raybatch.flow.tasks.plan_run", lambda *_: run)

    def infer_run(job: BatchJob, run: Run, observe: Any) -> None:
        with get_client(sync_client=True) as client:
            id = UUID(str(flow_run.get_id()))
            client.set_flow_run_state(id, Cancelling(), force=True)
        threading.Event().wait()

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)
    job = make_job(name="unheeded", output={"uri": str(tmp_path)})
    state = batch_inference(job, run.run_key, return_state=True)
    assert state.is_cancelled(), state
    assert "did not notice the cancellation" in str(state.message)
    assert "Committed shards are kept. Continue with: " in str(state.message)


TARGET = {"uri": "x"}


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ({"output": {"publish": []}}, None),
        ({"output": {"publish": [TARGET]}}, {"sampling.max_tokens": 9}),
        ({"output": {"uri": "out"}}, {"output.publish": [TARGET]}),
        (None, {"output.publish": [TARGET]}),  # of a retry of failed rows
        ({"output": {"publish": [TARGET]}}, {"output.publish": []}),
    ],
)
def test_a_crash_is_logged_with_whether_the_result_is_complete(job: Any, overrides: Any) -> None:
    """By Prefect's message of a lost lease, which does not say what was lost."""
    given = (overrides or {}).get("output.publish", (job or {}).get("output", {}).get("publish"))
    publishes = bool(given)
    last = failure.LAST_TASKS[publishes]

    @task
    def finish() -> None:
        pass

    @flow
    def night(job: Any, overrides: Any, work: bool) -> None:
        if publishes or work:
            finish.with_options(task_run_name=f"{failure.LAST_TASKS[False]}k")()
        if work:
            finish.with_options(task_run_name=f"{last}k")()

    message = f"{failure.CANCELLED_BY_PREFECT}."
    for work, end in ((True, "The result is complete."), (False, "prefect flow-run retry")):
        id = night(job, overrides, work, return_state=True).state_details.flow_run_id
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(id)
        # By name, as Prefect's worker calls it.
        failure.log_crash(flow=night, flow_run=run, state=Crashed(message=message))
        lines = logs_of(id, "Prefect ended this flow run")
        (line,) = [line for line in lines if line.startswith("Prefect ended")]
        assert "lease expired" in line and end in line
    assert failure.crash_text("Process exited.", id, False).startswith("Crashed: Process exited. ")
    assert {hook.__name__ for hook in batch_inference.on_crashed_hooks} == {"log_crash"}


def test_the_api_away_and_back_is_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watch = ApiWatch(lambda: now[0])
    loud = ("prefect_raybatch.", "prefect.events.", "prefect._internal.concurrency")

    def messages() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith(loud)]

    def ask(error: Exception | None, seconds: float) -> None:
        with suppress(ConnectionError, ValueError), watch.within():
            for _ in range(10):  # Prefect's client asks again and again
                now[0] += seconds / 10
                watch.look()
            if error is not None:
                raise error

    ask(None, 9.0)
    ask(ValueError("an answer"), 2.0)
    assert not messages()
    for _ in range(3):
        ask(ConnectionError("refused"), 40.0)
    ask(None, 5.0)
    ask(None, 5.0)
    away, back = messages()
    assert re.match(r"Prefect's API at http://127\.0\.0\.1:\d+/api has not answered for 12 s", away)
    # Only this line reaches the page: what was logged before is lost.
    assert back.startswith("Prefect was unreachable for 2 min 05 s. The run continued.")
    assert "lease may have expired" in back
    assert watch.pop_outage() == pytest.approx(125.0) and watch.pop_outage() is None
    with outages_logged_once():
        logging.getLogger("prefect.events.clients").warning("Unable to connect to %r.", "ws://x")
        logging.getLogger("prefect._internal.concurrency").error("x failed to process item %s", 1)
    assert len(messages()) == 2


def test_a_task_says_that_the_api_is_back_which_was_away_as_the_one_before_it_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, run = [0.0], ["one"]
    monkeypatch.setattr(away.flow_run, "get_id", lambda: run[0])
    with watched(lambda: now[0]) as first:
        with suppress(ConnectionError), first.within():
            now[0] += 30.0
            raise ConnectionError("refused")
        late = first.within()
        late.__enter__()  # a call of a thread that outlives the task
    (said,) = caplog.messages
    assert "has not answered for 30 s" in said
    now[0] += 90.0
    run[0] = "another"
    with watched(lambda: now[0]) as other, other.within():
        now[0] += 1.0
    run[0] = "one"
    with watched(lambda: now[0]) as second, second.within():
        late.__exit__(None, None, None)
        now[0] += 4.0
    (said,) = caplog.messages[1:]
    assert "unreachable for 2 min 05 s" in said
    with watched(lambda: now[0]) as third, third.within():
        now[0] += 1.0
    assert third is not second
    assert len(caplog.messages) == 2
