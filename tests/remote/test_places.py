"""Which end of a run's work ends the cluster that was made for it, and which leaves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.kube_server import KubeServer
from helpers.small import make_job, small_run

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.api.sending import infer_on_cluster
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.cluster.connect import connected, glance
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import MAKING, Heartbeat, Listener
from prefect_raybatch.errors import (
    AccessDenied,
    ConfigError,
    EngineFailure,
    EngineStartError,
    JobServerUnavailable,
    RayBatchError,
    StoreUnavailable,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import judging_job
from prefect_raybatch.kuberay.manifest import HOLDER, RunIdentity
from prefect_raybatch.kuberay.run_cluster import NOBODY, is_past, notes_of
from prefect_raybatch.remote import places
from prefect_raybatch.remote.follower import Owner, Submission
from prefect_raybatch.runs.run import Run


class FakeFollower:
    """Follows a job that ends as a test says; `attached` is whether there was one."""

    attached = job_may_continue = True
    ends: Callable[[], Progress]
    urls: list[str]

    def __init__(self, submission: Submission, *_: object):
        self.urls.append(str(submission.access.job_server))

    def run_to_end(self) -> Progress:
        return type(self).ends()


class World:
    def __init__(self, root: Path, kube: KubeServer, patch: pytest.MonkeyPatch):
        self.small, self.kube = small_run(root, 10, 5), kube
        plan = self.small.plan
        self.run = Run(str(root), plan.run_key, plan.hash, plan.rows, plan.shards, False)
        kube.operate = self.operate
        self.come_up = True

        class Following(FakeFollower):
            urls: list[str] = []

        self.follower = Following
        patch.setattr(places, "Follower", Following)

    def operate(self, what: str, found: dict) -> None:
        if what == "made" and self.come_up:
            self.kube.come_up(found["metadata"]["name"], 1)

    def job(
        self, on_crash: str = "reattach", quality: dict[str, object] | None = None, **fields: object
    ) -> BatchJob:
        made = {"image": "raybatch:1", **fields}
        cluster = {"kubernetes": made, "on_crash": on_crash}
        output = {"uri": str(self.small.root)}
        return make_job(cluster=cluster, output=output, quality=quality or {})

    def infer(
        self,
        ends: BaseException | None = None,
        owner: Owner | None = None,
        observe: Callable[[Progress], None] = lambda progress: None,
        job: BatchJob | None = None,
    ) -> Progress:
        def end() -> Progress:
            assert self.kube.names, "the cluster is there while the job works"
            if ends is not None:
                raise ends
            return Progress(10, 2)

        self.follower.ends = staticmethod(end)
        job = job or self.job()
        return infer_in_place(job, job, self.run, observe, owner)

    @property
    def clusters(self) -> list[str]:
        return self.kube.names


@pytest.fixture
def world(tmp_path: Path, kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "run", kube, monkeypatch)


def test_the_job_goes_to_the_head_of_the_cluster_that_was_made(world: World) -> None:
    assert world.infer().rows == 10
    name = RunIdentity(world.run.run_key, "", "", "").name
    assert world.follower.urls == [f"http://{name}-head-svc.ray.svc:8265"]
    assert world.clusters == []


def test_what_is_waited_for_shows_among_the_phases_of_a_start(world: World) -> None:
    class Heard(Listener):
        beats: list[Heartbeat] = []

        def on_heartbeat(self, beat: Heartbeat) -> None:
            self.beats.append(beat)

    heard = Heard()
    world.infer(observe=heard)
    (beat,) = heard.beats
    assert beat.phase == MAKING and beat.about.startswith("1 of 1 worker ready, ")
    assert beat.rows == 10 and beat.at <= time.time()


GONE, RETRIED = Owner(cancelled=lambda: True), Owner(retried=lambda: True)


@pytest.mark.parametrize(
    ("error", "live", "owner", "stays"),
    [
        (EngineStartError("no model"), False, Owner(), False),
        (EngineStartError("no model"), False, RETRIED, False),  # no retry helps
        (EngineFailure("died"), False, RETRIED, True),
        (EngineFailure("died"), False, Owner(), False),
        (JobServerUnavailable("away"), True, RETRIED, True),  # the retry finds the job
        (JobServerUnavailable("away"), True, Owner(), True),  # as the next flow does
        (StoreUnavailable("away"), True, Owner(), True),
        (ConfigError("expired certificate"), True, Owner(), True),
        (AccessDenied("no commits"), True, Owner(), False),
        (KeyboardInterrupt(), True, Owner(), True),  # interrupted: the job goes on
        (KeyboardInterrupt(), True, GONE, False),
        (SystemExit(143), True, Owner(), True),
    ],
)
def test_it_is_ended_unless_its_job_goes_on(
    world: World, error: BaseException, live: bool, owner: Owner, stays: bool
) -> None:
    world.follower.job_may_continue = live
    with pytest.raises(type(error)):
        world.infer(error, owner)
    assert bool(world.clusters) is stays
    if stays:  # and the next try takes it
        world.infer()
        assert [verb for verb, *_ in world.kube.asked].count("create") == 1
        assert world.clusters == []


def test_on_crash_stop_ends_it_when_the_flow_is_interrupted(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        world.infer(KeyboardInterrupt(), job=world.job(on_crash="stop"))
    assert world.clusters == []


def test_one_without_a_job_is_ended_in_any_case(world: World) -> None:
    world.follower.attached = False
    for error in (KeyboardInterrupt(), JobServerUnavailable("away")):
        with pytest.raises(type(error)):
            world.infer(error, RETRIED, job=world.job(keep="1h"))
        assert world.clusters == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), JobServerUnavailable("away")])
def test_one_whose_job_cannot_be_asked_for_is_left(world: World, error: BaseException) -> None:
    """It is an earlier attempt's, whose job may be at work."""
    with pytest.raises(KeyboardInterrupt):
        world.infer(KeyboardInterrupt())
    world.follower.attached = world.follower.job_may_continue = False
    with pytest.raises(type(error)):
        world.infer(error)
    assert len(world.clusters) == 1
    with pytest.raises(type(error)):
        world.infer(error, GONE, job=world.job(on_crash="stop"))
    assert bool(world.clusters) is isinstance(error, Exception)


def test_one_that_does_not_come_up_is_ended(world: World) -> None:
    world.come_up = False
    with pytest.raises(RayBatchError, match="head not ready after"):
        world.infer(job=world.job(ready_within="0.001s"))
    assert world.clusters == []


def test_a_whole_run_makes_none_and_ends_what_is_left_of_it(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        world.infer(KeyboardInterrupt())
    for shard in range(world.small.plan.shards):
        world.small.commit(shard)
    world.come_up = False
    world.follower.ends = staticmethod(lambda: Progress(10, 2))
    job = world.job()
    assert infer_in_place(job, job, world.run).rows == 10
    assert world.clusters == []
    infer_in_place(job, job, world.run)
    assert [verb for verb, *_ in world.kube.asked].count("create") == 1


def test_what_never_fits_is_said_before_anybody_is_asked(world: World) -> None:
    job = make_job(
        cluster={"kubernetes": {"image": "a"}},
        engine={"tensor_parallel_size": 2},
        output={"uri": str(world.small.root)},
    )
    with pytest.raises(ConfigError, match="an engine needs 2 GPUs"):
        world.infer(job=job)
    with pytest.raises(ConfigError, match="an engine needs 2 GPUs"):
        dry_run(job)
    with pytest.raises(ConfigError, match="an engine needs 2 GPUs"):
        plan_run(job, "another")
    assert world.kube.asked == []


def test_what_needs_a_cluster_that_is_there_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")  # of whom the job does not speak
    job = world.job()
    have = glance(cluster_spec(job))  # of the pods that it asks for
    assert have is not None and have.address == "created by cluster.kubernetes"
    with (
        pytest.raises(ConfigError, match="creates a cluster only for a run"),
        connected(cluster_spec(job)),
    ):
        pass


JUDGED = {"judge": {"model": "demo", "prompt": "Is {response} right?"}}


def test_the_cluster_stays_for_the_judge_and_ends_with_it(world: World) -> None:
    job = world.job(quality=JUDGED)
    world.infer(job=job)
    (name,) = world.clusters
    assert notes_of(world.kube[name])[HOLDER] == NOBODY and not is_past(world.kube[name])
    world.small.commit_all()
    world.infer(job=job)  # the same command again, e.g. after a kill before the judge
    assert world.clusters == [name]

    judging = judging_job(job, str(world.small.root / "rows.parquet"), "runs")
    small = small_run(world.small.root.parent / "judge", 4, 2)
    run = Run(str(small.root), small.plan.run_key, small.plan.hash, 4, 2, False)
    infer_on_cluster(judging, judging, run, cluster_of=world.run)
    assert [verb for verb, *_ in world.kube.asked].count("create") == 1
    assert world.clusters == []


def test_a_judge_whose_job_cannot_be_sent_is_found_before_any_row_is_answered(
    world: World,
) -> None:
    judge = {**JUDGED["judge"], "engine": {"env": {"HF_TOKEN": "hf-secret-0123"}}}
    with pytest.raises(
        ConfigError, match=r"^quality\.judge\.engine\.env\.HF_TOKEN may be a secret"
    ):
        world.infer(job=world.job(quality={"judge": judge}))
    assert world.clusters == []
