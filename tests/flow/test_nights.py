"""Scheduled runs without a run directory: asked of a real Prefect server, shown in the history."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers.heard import wait_for
from helpers.nights import Nights
from helpers.prefect_server import Prefect, artifacts_of
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import (
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Pending,
    Running,
    Scheduled,
)
from prefect.utilities.callables import parameter_schema

from prefect_raybatch import batch_inference
from prefect_raybatch.api import plan_run
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.flow import prefect_runs, tasks

pytestmark = pytest.mark.usefixtures("prefect_api")

POOL = "nights-pool"
DEPLOYMENT = "without-a-worker"  # others of the server are other tests'
FIRST = datetime(2026, 3, 1, 1, tzinfo=UTC)


def key(day: int, job: str = "nightly") -> str:
    return f"{job}-2026030{day}T010000Z"


def deployed_without_a_worker(server: Prefect, which: Any) -> UUID:
    with get_client(sync_client=True) as client:
        if POOL not in [pool["name"] for pool in server.ask("work_pools/filter", {})]:
            server.ask("work_pools/", {"name": POOL, "type": "process"})
        schema = parameter_schema(which).model_dump()
        return client.create_deployment(
            client.create_flow(which), DEPLOYMENT, work_pool_name=POOL,
            parameter_openapi_schema=schema,
        )  # fmt: skip


@flow(name="a flow of somebody's own")
def own_flow() -> None:
    pass


@pytest.fixture
def deployment(prefect_process: Prefect) -> UUID:
    return deployed_without_a_worker(prefect_process, batch_inference)


def scheduled(deployment: UUID, day: int, state: Any, **parameters: Any) -> UUID:
    """A flow run for 2026-03-0DAY that got into this state."""
    start = Scheduled(scheduled_time=FIRST + timedelta(days=day - 1))
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters, state=start)
        if state is not None:
            client.set_flow_run_state(run.id, state, force=True)
        return run.id


def called(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 0


def test_the_history_lists_every_scheduled_run_with_state_reason_and_command(
    deployment: UUID, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    runs = Nights(tmp_path)
    runs.write("a", "b")
    job = runs.job(reuse=None)
    plan_run(job, key(8, "atwork"))
    runs.night(key(1), job)
    runs.stop_after = 0
    with pytest.raises(Exception):  # noqa: B017 - a kill, whatever it is called
        runs.infer(job, plan_run(job, key(2)))
    (tmp_path / "out" / key(2) / "_raybatch/last_attempt.json").unlink(missing_ok=True)
    given = {"job": job.to_dict()}
    monkeypatch.setattr(prefect_runs, "PENDING_AFTER", -60.0)
    scheduled(deployment, 1, Completed(), **given)
    gone = scheduled(
        deployment, 2, Crashed(message="no heartbeat\nfor 90 s. Continue with: x y"), **given
    )
    refused = scheduled(
        deployment, 3, Cancelled(message="Deployment concurrency limit reached."), **given
    )
    early = scheduled(deployment, 4, Failed(message="pull step: no such branch"), **given)
    scheduled(deployment, 5, None, **given)
    scheduled(deployment, 6, Scheduled(name="AwaitingConcurrencySlot"), **given)
    scheduled(deployment, 7, Pending(), **given)
    # Made up since, at work, of another job, of another output: none of them is missed.
    scheduled(deployment, 8, Crashed(), **given)
    scheduled(deployment, 9, Completed(), **given, scheduled_for="2026-03-08T01:00:00Z")
    scheduled(deployment, 9, Running(), **given)
    leaving = scheduled(deployment, 8, Running(), **given, run_key=key(8, "atwork"))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(leaving, Cancelling())
    other = {**given["job"], "output": {"uri": "s3://elsewhere/out"}}
    scheduled(deployment, 1, Crashed(), job=other, run_key="elsewhere")
    scheduled(deployment, 1, Crashed(), job={**given["job"], "name": "newcomer"}, run_key="n1")

    called("history", str(tmp_path / "out"), "--json")
    pages = {page["job"]: page["runs"] for page in json.loads(capsys.readouterr().out)["jobs"]}
    nights = [run for run in pages["nightly"] if "-202603" in run["run_key"]]
    found = {run["run_key"]: run for run in nights}  # others of the server are other tests'
    assert {k: run["state"] for k, run in found.items()} == {
        key(1): "completed", key(2): "crashed", key(3): "cancelled", key(4): "failed",
        key(5): "late", key(6): "waiting", key(7): "pending", key(8, "atwork"): "cancelling",
    }  # fmt: skip
    assert found[key(2)]["rows"] == 2
    assert found[key(2)]["failure"] == "no heartbeat for 90 s"
    retry = "prefect flow-run retry"
    assert [found[key(day)]["command"] for day in (2, 3, 4, 5)] == [
        f"{retry} {gone}", f"{retry} {refused}", f"{retry} {early}",
        f"prefect worker start --pool {POOL}",
    ]  # fmt: skip
    made_up = found[key(7)]["command"]
    assert made_up.startswith(f"prefect deployment run batch_inference/{DEPLOYMENT} -p ")
    assert "scheduled_for=2026-03-07T01:00:00+00:00" in made_up
    assert "was still active" in found[key(3)]["failure"]
    assert [run["state"] for run in pages["newcomer"]] == ["crashed"]

    called("history", str(tmp_path / "out"), "--job", "nightly")
    text = capsys.readouterr().out.replace("\n", " ")
    assert f"{key(2)} crashed: no heartbeat for 90 s**" in text
    assert f"{key(5)}: no worker of work pool {POOL}" in text
    assert f"continue with: `{retry} {early}`" in text


def test_a_prefect_that_is_away_leaves_the_history_of_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    runs = Nights(tmp_path)
    runs.write("a")
    runs.night("n1", runs.job(reuse=None))
    monkeypatch.setattr(prefect_runs, "API_SECONDS", 0.2)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        called("history", str(tmp_path / "out"))
    assert "| n1 |" in capsys.readouterr().out
    assert "never started" in caplog.text


def test_the_page_of_a_flow_run_lists_the_runs_of_its_deployment(
    prefect_process: Prefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a flow whose parameters name no job: the key follows from the scheduled start."""
    deployment = deployed_without_a_worker(prefect_process, own_flow)
    current = scheduled(deployment, 2, Running())
    missed = scheduled(deployment, 1, Crashed(message="host lost"))
    monkeypatch.setattr(prefect_runs, "root_run", lambda: current)
    found = prefect_runs.runs_of_deployment()
    page = prefect_runs.with_prefect_runs(prefect_runs.HistoryPage("mine", ()), found, "out", 14)
    assert key(1, "mine") in [line.run_key for line in page.runs]
    assert f"prefect flow-run retry {missed}" in [line.command for line in page.runs]
    assert key(2, "mine") not in [line.run_key for line in page.runs]


def test_a_night_that_never_started_is_in_the_history_before_the_next_run_ends(
    prefect_process: Prefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run waits for what it must show while it is at work."""
    runs = Nights(tmp_path)
    runs.write("a", "b")
    job = runs.job(name="awaited", reuse=None)
    runs.night(key(4, "awaited"), job)
    run = plan_run(job, key(6, "awaited"))
    deployment = deployed_without_a_worker(prefect_process, own_flow)
    missed = scheduled(deployment, 5, Crashed(message="host lost"))
    current = scheduled(deployment, 6, Running())
    monkeypatch.setattr(prefect_runs, "root_run", lambda: current)
    seen: list[str] = []

    def infer_run(job: Any, run: Any, observe: Any) -> Any:
        observe(Progress(run.rows, run.shards))
        for artifact in wait_for(lambda: artifacts_of("raybatch-awaited-history")):
            seen.append(str(artifact.data))
        return runs.infer(job, run, observe)

    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer_run)

    @flow
    def night() -> None:
        tasks.infer_shards(job, run)

    assert night(return_state=True).is_completed()
    text = seen[0].replace("\\", "")
    assert f"**{run.run_key} is running**" in text
    assert f"{key(5, 'awaited')} crashed: host lost" in text
    assert f"prefect flow-run retry {missed}" in text


def test_the_time_of_a_run_is_that_of_its_flow_run() -> None:
    line = prefect_runs.HistoryLine("k", "out/k", "completed", good=1, rows=1, elapsed=82.0)
    night = prefect_runs.PrefectRun(None, None, "k", FIRST, 275.0)
    page = prefect_runs.with_prefect_runs(
        prefect_runs.HistoryPage("j", (line,)), [night], "out", 14
    )
    assert page.runs[0].elapsed == 275.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3://b/out", "s3://b/out/", True),
        ("s3://b/out", "s3://c/out", False),
        ("/a/out", "/b/out", False),
        ("../out/dev", "out/dev", True),
        ("../out/dev", "/srv/out/dev", True),
        ("out/dev", "s3://b/dev", False),
    ],
)
def test_places_of_jobs_and_of_commands_are_compared(one: str, other: str, same: bool) -> None:
    assert prefect_runs.is_same_place(one, other) is same
