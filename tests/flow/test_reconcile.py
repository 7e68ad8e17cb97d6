"""Ray jobs and flow runs kept in step, against a real Prefect server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from helpers.fake_ray import FakeHead, job
from helpers.small import job_dict
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
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

from prefect_raybatch.errors import ConfigError, JobServerUnavailable
from prefect_raybatch.flow import reconcile as flow_runs
from prefect_raybatch.flow.blocks.cluster import RayCluster
from prefect_raybatch.flow.reconcile import GRACE, Action, reconcile_jobs, restart_crashed
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.remote.client import JobServer

URL, ID = "http://head:8265", "raybatch-k-abc-1"

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    made = FakeHead()

    def at(url: str, *, access: ClusterAccess) -> JobServer:
        assert url == URL and access == ClusterAccess(job_server=URL)
        return JobServer(url, 1.0, lambda url: made, lambda seconds: None)

    monkeypatch.setattr(flow_runs, "JobServer", at)
    forget()
    yield made
    forget()


def forget() -> None:
    """No flow run's label may reach the next test, here or elsewhere. Runs that are scheduled have
    none, and a deployment of another test gets new ones as fast as they are deleted."""
    begun = FlowRunFilterState(name=FlowRunFilterStateName(not_any_=["Scheduled"]))
    with get_client(sync_client=True) as client:
        while found := client.read_flow_runs(flow_run_filter=FlowRunFilter(state=begun)):
            for run in found:
                client.delete_flow_run(run.id)


@flow
def nightly() -> None:
    pass


def flow_run(state: Any, follows: str | None = None, since: float = 0.0) -> FlowRun:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(nightly, state=Running())
        client.set_flow_run_state(run.id, state, force=True)
        if follows:
            labels = {"raybatch.job": follows, "raybatch.job_server": URL}
            client.update_flow_run_labels(run.id, {**labels, "raybatch.followed_since": since})
        return client.read_flow_run(run.id)


def submitted(head: FakeHead, run: FlowRun | None, status: str = "RUNNING", **more: str) -> None:
    metadata = {"raybatch_flow_run": str(run.id)} if run else {}
    head.jobs[ID] = job(ID, status, {**metadata, **more})


def state_of(run: FlowRun) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run.id).state


@pytest.fixture
def much_later(monkeypatch: pytest.MonkeyPatch) -> float:
    """For reconciliation it is later than the grace allows; the time of its clock."""
    clock = SimpleNamespace(time=lambda: time.time() + 2 * GRACE, sleep=time.sleep)
    monkeypatch.setattr(flow_runs, "time", clock)  # other threads of this process use time itself
    return float(clock.time())


def whats(actions: list[Action]) -> list[str]:
    return [action.what for action in actions]


@pytest.mark.parametrize("state", [Completed(), Failed(), Cancelled()])
def test_a_job_whose_flow_run_has_ended_is_stopped(head: FakeHead, state: Any) -> None:
    submitted(head, flow_run(state))
    assert whats(reconcile_jobs(URL, dry_run=True)) == ["stopped"] and not head.stopped
    (action,) = reconcile_jobs(URL)
    assert action.what == "stopped" and state.name in action.why
    assert head.stopped == [ID] and not head.live()
    assert reconcile_jobs(URL) == []


def test_a_job_of_a_running_flow_run_is_kept(head: FakeHead) -> None:
    submitted(head, flow_run(Running()))
    assert whats(reconcile_jobs(URL)) == ["kept"] and head.live()


def test_the_job_of_a_crashed_flow_run_waits_for_the_next_try(head: FakeHead) -> None:
    run = flow_run(Crashed())
    submitted(head, run)
    assert whats(reconcile_jobs(URL)) == ["kept"] and head.live()
    submitted(head, run, raybatch_on_crash="stop")
    assert whats(reconcile_jobs(URL)) == ["stopped"] and not head.live()


def test_a_job_that_another_flow_run_follows_is_kept(head: FakeHead) -> None:
    submitted(head, flow_run(Failed()))
    flow_run(Running(), follows=ID, since=time.time())
    assert whats(reconcile_jobs(URL)) == ["kept"] and head.live()


def test_a_job_that_nobody_of_ours_submitted_is_kept(head: FakeHead) -> None:
    submitted(head, None)
    assert whats(reconcile_jobs(URL)) == ["kept"]
    submitted(head, None, raybatch_flow_run="0" * 8 + "-0000-4000-8000-" + "0" * 12)
    assert whats(reconcile_jobs(URL)) == ["kept"]
    head.jobs["theirs"] = job("theirs", "RUNNING")
    assert len(reconcile_jobs(URL)) == 1 and head.stopped == []


def test_a_process_that_died_while_cancelling_is_helped(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flow_run(Cancelling(), follows=ID)
    submitted(head, run)
    assert whats(reconcile_jobs(URL)) == ["kept"]  # it may be at it
    monkeypatch.setattr(flow_runs, "CANCEL", 0.0)
    assert whats(reconcile_jobs(URL)) == ["stopped"] and head.stopped == [ID]


def test_a_flow_run_whose_job_has_vanished_is_told(head: FakeHead, much_later: float) -> None:
    run = flow_run(Running(), follows=ID, since=1.0)
    assert whats(reconcile_jobs(URL, dry_run=True)) == ["crashed"] and state_of(run).is_running()
    (action,) = reconcile_jobs(URL, settle=0.01)
    assert (action.what, action.flow_run) == ("crashed", str(run.id))
    assert state_of(run).is_crashed() and ID in state_of(run).message
    assert f"prefect flow-run retry {run.id}" in state_of(run).message


def test_a_flow_that_submits_anew_in_time_is_left_alone(
    head: FakeHead, much_later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flow_run(Running(), follows=ID, since=1.0)
    monkeypatch.setattr(flow_runs.time, "sleep", lambda seconds: submitted(head, run))
    assert reconcile_jobs(URL, settle=90) == [] and state_of(run).is_running()


def test_a_retry_is_not_judged_by_the_job_of_the_attempt_before(head: FakeHead) -> None:
    """Its labels stay until it follows a job itself, for which it may wait long."""
    run = flow_run(Running(), follows=ID, since=1.0)
    for _ in range(2):  # unknown to the server, then failed long ago
        assert reconcile_jobs(URL, settle=0) == [] and state_of(run).is_running()
        head.jobs[ID] = job(ID, "FAILED")
        head.jobs[ID].end_time = 1000
    assert [a.flow_run for a in reconcile_jobs(URL, grace=0, settle=0)] == [str(run.id)]


def test_a_flow_run_has_time_to_notice_itself(head: FakeHead, much_later: float) -> None:
    young = flow_run(Running(), follows=ID, since=much_later)
    done = flow_run(Running(), follows="raybatch-done-1", since=1.0)
    head.jobs["raybatch-done-1"] = job("raybatch-done-1", "SUCCEEDED")
    failed = flow_run(Running(), follows="raybatch-failed-1", since=1.0)
    head.jobs["raybatch-failed-1"] = job("raybatch-failed-1", "FAILED")
    head.jobs["raybatch-failed-1"].end_time = much_later * 1000
    assert reconcile_jobs(URL, settle=0) == []
    head.jobs["raybatch-failed-1"].end_time = 1000
    assert [a.flow_run for a in reconcile_jobs(URL, settle=0)] == [str(failed.id)]
    assert state_of(young).is_running() and state_of(done).is_running()


def test_a_server_that_is_away_condemns_nobody(head: FakeHead) -> None:
    run = flow_run(Running(), follows=ID, since=1.0)
    head.down = 10**6
    with pytest.raises(JobServerUnavailable):
        reconcile_jobs(URL, settle=0)
    assert state_of(run).is_running()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the URL of a job server"):
        reconcile_jobs("ray://head:10001")


def test_a_saved_block_stands_for_the_server_and_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = FakeHead(), list[ClusterAccess]()

    def at(url: str, *, access: ClusterAccess) -> JobServer:
        asked.append(access)
        return JobServer(url, 1.0, lambda url: made, lambda seconds: None)

    monkeypatch.setattr(flow_runs, "JobServer", at)
    RayCluster(job_server=URL, headers={"X-Key": "k"}, token="t").save("reconciled", overwrite=True)
    submitted(made, flow_run(Failed()))
    (action,) = reconcile_jobs("ray-cluster/reconciled")
    assert action.what == "stopped" and made.stopped == [ID]
    assert (asked[0].job_server, asked[0].token, asked[0].headers["X-Key"]) == (URL, "t", "k")

    RayCluster(address="h:6379").save("reconciled", overwrite=True)
    with pytest.raises(ConfigError, match="ray-cluster/reconciled sets neither job_server nor"):
        reconcile_jobs("ray-cluster/reconciled")
    with pytest.raises(ConfigError, match="Prefect has no block ray-cluster/none"):
        reconcile_jobs("ray-cluster/none")


def test_the_api_is_that_of_prefects_settings() -> None:
    """A profile names it as well as the environment does."""
    with temporary_settings({PREFECT_API_URL: "http://of-the-profile:4200/api"}):
        assert flow_runs.owner().api == "http://of-the-profile:4200/api"


def test_a_flow_run_labels_itself_and_knows_when_it_is_cancelled(head: FakeHead) -> None:
    seen: list[Any] = []

    @flow
    def follows() -> None:
        owner = flow_runs.owner()
        owner.attached(ID, URL)
        seen.append(owner.cancelled())
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(owner.id, Cancelling(), force=True)  # type: ignore[arg-type]
            seen.append(owner.cancelled())
            for _ in range(2):
                run = client.read_flow_run(owner.id)  # type: ignore[arg-type]
                seen.append({k: run.labels[k] for k in ("raybatch.job", "raybatch.job_server")})
                owner.detached()

    follows(return_state=True)
    labels = {"raybatch.job": ID, "raybatch.job_server": URL}
    assert seen == [False, True, labels, {**labels, "raybatch.job": ""}]
    assert flow_runs.owner().id is None


def test_a_task_knows_whether_it_is_tried_again(head: FakeHead) -> None:
    seen: list[bool] = []

    @task(retries=2, retry_delay_seconds=0)
    def tried() -> None:
        seen.append(flow_runs.owner(2).retried())
        raise OSError("away")

    @flow
    def tries() -> None:
        tried()

    tries(return_state=True)
    assert seen == [True, True, False]


@flow(name="batch_inference")
def night_of_ours() -> None:
    pass


@pytest.fixture
def deployment() -> Iterator[UUID]:
    with get_client(sync_client=True) as client:
        made = client.create_deployment(client.create_flow(night_of_ours), name="crashes")
        forget()
        yield made
        forget()
        of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[made]))
        for run in client.read_flow_runs(flow_run_filter=of_it):  # those that are scheduled
            client.delete_flow_run(run.id)
        client.delete_deployment(made)


def ended(
    deployment: UUID, key: str, *states: Any, job: Any = None, changes: Any = None
) -> FlowRun:
    """A flow run named `key` that had these states; by default, it was Running and crashed."""
    given = {"job": job_dict(**(job or {})), "overrides": changes}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployment, name=key, parameters=given)
        for state in states or (Running(), CRASHED):
            client.set_flow_run_state(run.id, state, force=True)
        return client.read_flow_run(run.id)


CRASHED = Crashed(message="gone")


def test_a_crashed_run_of_a_deployment_is_scheduled_again_under_its_run_key(
    deployment: UUID,
) -> None:
    night, often = ended(deployment, "a"), ended(deployment, "b", *[Running(), CRASHED] * 3)
    taken = ended(deployment, "c")
    ended(deployment, "c", Running())
    ended(deployment, "d", Running(), Completed())  # an earlier retry of the same run
    ended(deployment, "d")
    ended(deployment, "e")
    ended(deployment, "e", Running(), Completed())
    elsewhere = flow_run(Crashed())  # has no deployment: nobody would start it
    assert whats(restart_crashed(dry_run=True)).count("restarted") == 2
    assert state_of(night).is_crashed()
    found = {action.job: action for action in restart_crashed()}
    assert {key: found[key].what for key in found} == {
        "a": "restarted",
        "b": "kept",
        "c": "kept",
        "d": "restarted",
        "e": "kept",
    }
    assert "crashed 3 times" in found["b"].why and "another flow run" in found["c"].why
    assert state_of(night).is_scheduled() and state_of(often).is_crashed()
    assert state_of(taken).is_crashed() and state_of(elsewhere).is_crashed()
    assert whats(restart_crashed()).count("restarted") == 0
    assert restart_crashed(hours=0) == []


def test_a_flow_run_whose_process_never_begins_is_restarted_twice(deployment: UUID) -> None:
    """Prefect counts only processes that began, and each crash is younger than the first."""
    night = ended(deployment, "a", Pending(), CRASHED, CRASHED)  # two reports of a crash
    with get_client(sync_client=True) as client:
        for _ in range(2):
            assert whats(restart_crashed()) == ["restarted"]
            for state in (Pending(), CRASHED):
                client.set_flow_run_state(night.id, state, force=True)
    (action,) = restart_crashed()
    assert action.what == "kept" and "crashed 3 times" in action.why


def test_the_hours_count_from_the_first_crash(
    deployment: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = ended(deployment, "a")
    now = state_of(night).timestamp.timestamp() + 3600  # an hour after the first crash
    monkeypatch.setattr(flow_runs, "time", SimpleNamespace(time=lambda: now))
    with get_client(sync_client=True) as client:
        for state in (Scheduled(), CRASHED):
            client.set_flow_run_state(night.id, state, force=True)
    first, latest = night.state.timestamp, state_of(night).timestamp  # type: ignore[union-attr]
    between = (now - (first + (latest - first) / 2).timestamp()) / 3600
    assert restart_crashed(hours=between) == []
    assert whats(restart_crashed(hours=1.1)) == ["restarted"]


def test_runs_of_other_folders_and_jobs_under_the_same_key_are_told_apart(
    deployment: UUID,
) -> None:
    runs = [
        ended(deployment, "a"),
        ended(deployment, "a", job={"output": {"uri": "other"}}),
        ended(deployment, "a", changes={"output.uri": "third"}),
        ended(deployment, "a", job={"name": "other"}),
    ]
    ended(deployment, "a", Running(), Completed(), job={"output": {"uri": "fourth"}})
    ended(deployment, "a", Running(), job={"name": "fifth"})
    taken = ended(deployment, "a", job={"output": {"uri": "sixth/"}})
    ended(deployment, "a", Running(), changes={"output.uri": "sixth"})
    found = {action.flow_run: action.what for action in restart_crashed()}
    assert found == {**{str(run.id): "restarted" for run in runs}, str(taken.id): "kept"}
