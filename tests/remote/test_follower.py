"""The protocol of a run as Ray job: who submits, who attaches, what a crash leaves behind."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_ray import FakeHead, Killed, Turns
from helpers.nights import Killed as NightKilled
from helpers.nights import Nights
from helpers.small import SmallRun, make_job, small_run
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.api import plan_run
from prefect_raybatch.api.sending import OUTPUT_ENV, environment, sendable, submission_of
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import (
    ENDED,
    INFERRING,
    STARTING,
    UNHEARD,
    Heartbeat,
    Listener,
)
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    EngineFailure,
    EngineStartError,
    ErrorBudgetExceeded,
    JobLost,
    JobServerUnavailable,
    JobStopped,
    PrefectUnavailable,
    StoreUnavailable,
)
from prefect_raybatch.flow import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import with_endpoint_fields
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.layout import JOBS, heartbeat_path, job_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.remote import __main__ as remote
from prefect_raybatch.remote import client as servers
from prefect_raybatch.remote import follower as jobs
from prefect_raybatch.remote.client import JobServer
from prefect_raybatch.remote.logs import LogFeed, MarkedLines
from prefect_raybatch.remote.records import JobRecords, Outcome
from prefect_raybatch.runs.backfill import DatedRun, run_dates
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

URL, OTHER = "http://head:8265", "http://old-head:8265"


class World:
    """A small run, its head and the job on it; `step` is what one sleep of a follower brings."""

    def __init__(self, root: Path, shards: int = 4, **groups: Any):
        self.small: SmallRun = small_run(root, 5 * shards, 5, **groups)
        self.head = FakeHead()
        self.heads = {URL: self.head}
        self.plan = self.small.plan
        self.records = JobRecords(self.small.store, "key", self.plan.hash)
        self.run = Run(str(root), "key", self.plan.hash, 5 * shards, shards, False)
        self.slept = 0
        self.attached: list[str] = []
        self.detached = 0
        self.cancelled = False

    def id(self, number: int) -> str:
        return self.records.id_of(number)

    def job(self, **cluster: Any) -> BatchJob:
        return make_job(
            cluster={"job_server": URL, **cluster}, output={"uri": str(self.small.root)}
        )

    def server(self, url: str, patience: float = 300.0, access: Any = None) -> JobServer:
        return JobServer(url, min(patience, 5.0), self.heads.__getitem__, lambda seconds: None)

    def follower(
        self, step: Callable[[], None] | None = None, job: BatchJob | None = None
    ) -> jobs.Follower:
        def sleep(seconds: float) -> None:
            self.slept += 1
            assert self.slept < 500, "the follower waits for ever"
            (step or self.work)()

        job = job or self.job()
        owner = jobs.Owner(
            "flow",
            lambda id, server: self.attached.append(id),
            self._cancelled,
            detached=self._detach,
        )
        return jobs.Follower(
            submission_of(job, job),
            self.run,
            lambda progress: None,
            owner,
            self.server,
            "run",
            sleep,
        )

    def _cancelled(self) -> bool:
        return self.cancelled

    def _detach(self) -> None:
        self.detached += 1

    def work(self) -> None:
        """The live job starts, or commits one shard, or succeeds."""
        for id in self.head.live():
            job = self.head.jobs[id]
            if job.status == "PENDING":
                job.status = "RUNNING"
                return
            pending = [s for s in range(self.plan.shards) if not self.done(s)]
            if pending:
                self.small.commit(pending[0])
            else:
                self.end(id, "SUCCEEDED", Outcome(None, "", 1, 2))

    def done(self, shard: int) -> bool:
        return self.small.ledger.is_committed(shard)

    def end(self, id: str, status: str, outcome: Outcome | None = None) -> None:
        self.head.jobs[id].status = status
        if outcome is not None:
            self.records.end(int(id.rsplit("-", 1)[1]), outcome)

    def submitted(self, number: int = 1, status: str = "RUNNING") -> str:
        """A job that an earlier flow submitted."""
        follower = self.follower()
        assert self.records.add(number, follower.submission.job, URL, "earlier")
        record = self.records.read(number)
        follower.submit_recorded(record, self.server(URL))
        self.head.jobs[record.id].status = status
        return record.id


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- one flow -----------------------------------------------------------------------------------


def test_the_record_is_written_before_the_job_is_submitted(world: World) -> None:
    seen: list[int] = []

    def gate(name: str) -> None:
        if name == "submit":
            seen.append(world.records.newest_number())

    world.head.gate = gate
    progress = world.follower().run_to_end()
    assert seen == [1] and world.head.started == [world.id(1)]
    assert (progress.done, progress.resumed_shards, progress.engine_deaths) == (20, 0, 1)
    assert world.attached == [world.id(1)] and world.detached == 1
    record = world.records.read(1)
    assert (record.id, record.flow_run, record.server) == (world.id(1), "flow", URL)
    (request,) = world.head.submissions
    assert request["entrypoint"] == f"run {world.run.uri} 1"
    assert request["metadata"] == {
        "raybatch_run_key": "key",
        "raybatch_run": world.run.uri,
        "raybatch_on_crash": "reattach",
        "raybatch_flow_run": "flow",
    }
    assert request["submission_id"] == f"raybatch-key-{world.plan.hash[:12]}-1"


def test_a_run_that_is_whole_needs_no_server(world: World) -> None:
    world.small.commit_all()
    world.heads.clear()
    assert world.follower().run_to_end().done == 20
    assert world.records.newest() is None


def test_progress_goes_on_from_the_commits_and_is_seen(world: World) -> None:
    world.small.commit(0)
    seen: list[int] = []
    follower = world.follower()
    follower.watch.observe = lambda progress: seen.append(progress.done)
    progress = follower.run_to_end()
    assert seen[0] == 5 and seen[-1] == 20 and seen == sorted(seen)
    assert progress.resumed_shards == 1
    assert progress.tally.good == 20


class Heard(Listener):
    """Who follows: what was known of the run's phase whenever progress was shown."""

    def __init__(self) -> None:
        self.phase, self.shown = "nothing was said", list[tuple[int, str]]()

    def __call__(self, progress: Any) -> None:
        self.shown.append((progress.tally.shards, self.phase))

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.phase = beat.phase


@pytest.mark.parametrize(
    ("age", "phase", "known", "said"),
    [
        (3.0, INFERRING, 5, INFERRING),
        (3.0, STARTING, 5, STARTING),
        (3.0, STARTING, 0, INFERRING),  # it was written before the first commit
        (600.0, INFERRING, 5, UNHEARD),  # of a driver that is gone
        (3.0, ENDED, 5, UNHEARD),  # of the one before
        (None, "", 0, UNHEARD),
    ],
)
def test_who_attaches_says_what_the_driver_does(
    world: World, age: float | None, phase: str, known: int, said: str
) -> None:
    world.small.commit(0)
    world.submitted()
    if age is not None:
        beat = Heartbeat(time.time() - age, phase=phase, done=known, engines={"ALIVE": 1})
        world.small.store.put(heartbeat_path("theirs"), beat.to_bytes())
    follower, heard = world.follower(), Heard()
    follower.watch.observe = heard
    follower.run_to_end()
    assert heard.shown[0] == (1, said) and heard.shown[-1][0] == 4


def test_a_store_that_does_not_tell_the_phase_is_no_failure(world: World, monkeypatch: Any) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailable("slow down")

    monkeypatch.setattr(jobs, "heartbeat_elsewhere", away)
    follower, heard = world.follower(), Heard()
    follower.watch.observe = heard
    assert follower.run_to_end().done == 20
    assert heard.shown[0] == (0, UNHEARD)


def test_killed_before_the_record_nothing_is_left(world: World, monkeypatch: Any) -> None:
    def add(self: JobRecords, *_: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(JobRecords, "add", add)
        world.follower().run_to_end()
    assert not world.head.jobs and world.records.newest() is None
    world.follower().run_to_end()
    assert world.head.started == [world.id(1)]


def kill_at(world: World, name: str) -> None:
    def gate(now: str) -> None:
        if now == name:
            world.head.gate = lambda name: None
            raise Killed

    world.head.gate = gate
    with pytest.raises(Killed):
        world.follower().run_to_end()


def test_killed_between_record_and_submit_the_same_id_is_submitted(world: World) -> None:
    kill_at(world, "submit")
    assert not world.head.jobs and world.records.newest_number() == 1
    world.follower().run_to_end()
    assert world.head.started == [world.id(1)] and world.records.newest_number() == 1


def test_killed_after_the_submit_the_next_try_follows_that_job(world: World) -> None:
    kill_at(world, "submitted")
    assert world.head.live() == [world.id(1)]
    world.follower().run_to_end()
    assert world.head.started == [world.id(1)] and world.records.newest_number() == 1


def test_the_lost_answer_of_a_submit_is_no_second_job(world: World) -> None:
    world.head.deaf = 1
    world.follower().run_to_end()
    assert world.head.started == [world.id(1)]


def test_a_job_that_succeeded_meanwhile_is_collected(world: World) -> None:
    id = world.submitted(status="SUCCEEDED")
    world.small.commit_all()
    follower = world.follower()
    follower.watch.own.seen[:] = False  # as if the commits came after the first look
    record, server = follower.attach()
    assert record.id == id
    assert follower.follow(record, server).status == "SUCCEEDED"
    assert follower.watch.whole and world.head.started == [id]


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_an_ended_job_of_an_unfinished_run_gets_a_successor(world: World, status: str) -> None:
    world.submitted(status=status)
    world.follower().run_to_end()
    assert world.head.started == [world.id(1), world.id(2)]
    assert world.records.newest_number() == 2


def test_a_head_without_memory_gets_the_same_job_again(world: World) -> None:
    world.submitted()
    lost = iter([True])

    def step() -> None:
        if next(lost, False):
            world.head.jobs.clear()
        world.work()

    assert world.follower(step).run_to_end().done == 20
    assert world.head.started == [world.id(1)] * 2 and world.records.newest_number() == 1


def test_an_old_outcome_does_not_explain_a_new_job(world: World) -> None:
    """After a restart of the head, which has forgotten the job that failed."""
    failed = Outcome("EngineStartError", "no such model")
    with pytest.raises(EngineStartError):
        world.follower(lambda: world.end(world.id(1), "FAILED", failed)).run_to_end()
    world.head.jobs.clear()
    with pytest.raises(JobLost, match=world.id(2)):
        world.follower(lambda: world.end(world.id(2), "FAILED")).run_to_end()
    assert world.head.started == [world.id(1), world.id(2)]


def test_a_server_that_only_the_run_directory_names_is_not_asked(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a record may be planted: its server would get this flow's keys, and could say that the
    run is at work for ever. The job there, if it lives, is superseded."""
    world.submitted()
    world.heads[OTHER] = FakeHead()
    asked: list[str] = []
    world.head.gate = asked.append
    job = make_job(cluster={"job_server": OTHER}, output={"uri": str(world.small.root)})
    found, server = world.follower(job=job).attach()
    assert (found.number, server.url) == (2, OTHER) and asked == []
    assert world.heads[OTHER].started == [world.id(2)]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"recorded at '{URL}', but cluster.job_server is {OTHER}" in warning
    assert "set cluster.job_server to its server" in warning


def test_a_planted_record_gets_no_keys(world: World, caplog: pytest.LogCaptureFixture) -> None:
    planted = "http://me:s3cr3t@evil.example.com:8265/s3cr3t"
    asked: list[str] = []
    follower = world.follower()
    follower.server_at = lambda url, **more: asked.append(url) or world.server(url, **more)
    assert world.records.add(1, follower.submission.job, planted, "earlier")
    assert follower.run_to_end().done == 20
    assert set(asked) == {URL} and world.head.started == [world.id(2)]
    assert "evil.example.com" in caplog.text and "s3cr3t" not in caplog.text


def test_two_flows_with_two_servers_do_not_take_the_run_from_each_other_for_ever(
    world: World,
) -> None:
    def step() -> None:
        if world.records.newest_number() == 1:
            world.records.add(2, sendable(world.job()), OTHER, "another")
            world.end(world.id(1), "FAILED")

    with pytest.raises(
        ConfigError, match=r"another flow is working on this run at the other server"
    ):
        world.follower(step).run_to_end()
    assert world.head.started == [world.id(1)]


def test_a_planted_record_of_this_server_is_not_submitted(world: World) -> None:
    """It stands there as if its flow had been killed before the submit."""
    env = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    for planted in (world.job(on_crash="stop"), make_job(engine={"env": env})):
        number = world.records.newest_number() + 1
        world.records.add(number, sendable(planted), URL, "earlier")
    assert world.follower().run_to_end().done == 20
    assert world.head.started == [world.id(3)]


def test_a_server_that_is_gone_for_good_is_left_behind(world: World) -> None:
    world.submitted()
    world.heads[OTHER] = FakeHead()
    world.head.down = 10**6
    job = make_job(cluster={"job_server": OTHER}, output={"uri": str(world.small.root)})
    found, server = world.follower(job=job).attach()
    assert (found.number, server.url) == (2, OTHER)
    assert world.heads[OTHER].started == [world.id(2)]


# --- how a job ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        ("FAILED", Outcome("EngineStartError", "no such model"), EngineStartError),
        ("FAILED", Outcome("EngineFailure", "three passes"), EngineFailure),
        ("FAILED", Outcome("ErrorBudgetExceeded", "too many"), ErrorBudgetExceeded),
        ("FAILED", Outcome("TypeError", "of ours"), TypeError),
        ("FAILED", Outcome("RayActorError", "gone"), JobLost),
        ("FAILED", Outcome("system", "no class of ours"), JobLost),
        ("FAILED", None, JobLost),
        ("SUCCEEDED", None, JobLost),
        ("STOPPED", None, JobStopped),
    ],
)
def test_the_error_of_the_job_is_raised_here(
    world: World, status: str, outcome: Outcome | None, error: type[Exception]
) -> None:
    follower = world.follower(lambda: world.end(world.id(1), status, outcome))
    with pytest.raises(error, match=outcome.message if outcome else world.id(1)):
        follower.run_to_end()
    assert follower.attached and not follower.job_may_continue
    assert world.records.newest_number() == 1  # whether to try again is Prefect's to say


FAILED = "Job entrypoint command failed with exit code 1, last available logs:\n"


@pytest.mark.parametrize(
    ("logged", "error"),
    [
        ("noise\n[raybatch ERROR] ConfigError: may not write\n", ConfigError),
        ("[raybatch ERROR] ConfigError: may not write\n[raybatch ...] to s3://b\n", ConfigError),
        ("[raybatch ERROR] StoreUnavailable: may not write\nnoise", StoreUnavailable),
        ("[raybatch ERROR] the engine crashed: may not write", JobLost),
        ("[raybatch ERROR] OSError: may not write", JobLost),
        ("[raybatch WARNING] ConfigError: may not write", JobLost),
        ("[raybatch ERROR] ConfigError: may not write\n[raybatch INFO] going on", JobLost),
    ],
)
def test_an_error_that_the_job_only_printed_is_raised_here(
    world: World, logged: str, error: type[Exception]
) -> None:
    """Without a record, because the node's policy does not let it write to the run directory."""

    def step() -> None:
        world.head.jobs[world.id(1)].message = FAILED + logged
        world.end(world.id(1), "FAILED")

    with pytest.raises(error, match="may not write") as caught:
        world.follower(step).run_to_end()
    assert type(caught.value) is error
    if "..." in logged:
        assert str(caught.value) == "may not write\nto s3://b"


def test_a_job_that_made_way_for_a_newer_one_is_no_failure(world: World) -> None:
    first = world.submitted()
    steps = iter([True])

    def step() -> None:
        if next(steps, False):  # another flow took job 1 for dead
            world.end(first, "FAILED")
            world.submitted(2)
        world.work()

    assert world.follower(step).run_to_end().done == 20
    assert world.attached == [first, world.id(2)]


def test_a_flow_that_finds_all_committed_follows_no_job(world: World) -> None:
    world.submitted()
    for shard in range(world.plan.shards):
        world.small.commit(shard)
    assert world.follower().run_to_end().done == 20
    assert world.attached == [] and world.detached == 1


def test_a_busy_head_is_no_failure_and_one_that_stays_away_is(world: World) -> None:
    world.submitted()
    world.head.down = 3
    world.follower().run_to_end()
    other = World(world.small.root / "other")
    other.submitted()
    follower = other.follower(lambda: setattr(other.head, "down", 10**6))
    with pytest.raises(JobServerUnavailable, match="running job continues"):
        follower.run_to_end()
    assert follower.job_may_continue and not other.detached
    assert JobServerUnavailable.transient


def test_a_head_that_is_away_is_told_once_with_what_to_do_and_so_is_its_return(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.submitted()
    world.head.down = 12
    passed = [0.0]
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: passed[0]))

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    server = JobServer(URL, connect=lambda url: world.head, sleep=sleep)
    with caplog.at_level(logging.INFO):
        assert server.find(world.id(1))
    away, back = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "has not answered for 16 s (connection refused)" in away and "raybatch doctor" in away
    assert "retrying for another 284 s" in away and "cluster.job_server" in away
    assert back.endswith("answers again after 120 s")
    assert sum(one.getMessage().endswith("; retrying") for one in caplog.records) == 5


def test_not_found_of_a_proxy_is_no_answer(world: World) -> None:
    def proxy(id: str) -> Any:
        raise RuntimeError("Request failed with status code 404: default backend.")

    world.submitted()
    world.head.get_job_info = proxy  # type: ignore[method-assign]
    with pytest.raises(JobServerUnavailable):
        world.server(URL).find(world.id(1))


def test_a_refused_request_is_not_repeated(world: World) -> None:
    def submit(**_: Any) -> str:
        raise RuntimeError("Request failed with status code 400: bad runtime_env")

    world.head.submit_job = submit  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="bad runtime_env"):
        world.follower().run_to_end()


# --- signals ------------------------------------------------------------------------------------


class TerminationSignal(BaseException):
    pass


def interrupted(world: World, job: BatchJob | None = None) -> None:
    def step() -> None:
        world.work()
        if world.done(0):
            raise TerminationSignal

    with pytest.raises(TerminationSignal):
        world.follower(step, job).run_to_end()


def test_a_cancelled_flow_run_stops_its_job_and_keeps_the_commits(world: World) -> None:
    world.cancelled = True
    interrupted(world)
    assert world.head.stopped == [world.id(1)] and world.head.live() == []
    assert world.done(0)
    world.cancelled = False
    assert world.follower().run_to_end().resumed_shards >= 1
    assert world.head.started == [world.id(1), world.id(2)]


def test_an_interrupted_flow_run_leaves_its_job(world: World) -> None:
    interrupted(world)
    assert world.head.stopped == [] and world.head.live() == [world.id(1)]


def test_on_crash_stop_takes_the_job_with_it(world: World) -> None:
    interrupted(world, world.job(on_crash="stop"))
    assert world.head.stopped == [world.id(1)]


def test_on_crash_stop_replaces_the_job_of_a_dead_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submitted()
    world.follower(job=world.job(on_crash="stop")).attach()
    assert world.head.stopped == []  # this process wrote the record
    monkeypatch.setattr(jobs.os, "getpid", lambda: -1)
    record, _ = world.follower(job=world.job(on_crash="stop")).attach()
    assert record.number == 2 and world.head.live() == [world.id(2)]


def test_a_job_that_does_not_stop_is_no_reason_to_swallow_the_signal(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "STOP_WAIT", 0.2)
    world.cancelled = world.head.stubborn = True
    interrupted(world)
    assert "has not stopped" in caplog.text


# --- many flows ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_never_two_jobs_at_work(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Up to four flows in any order of steps, killed anywhere, on a head that fails jobs, forgets
    them and loses answers; each step of the protocol is a gate."""
    draw = random.Random(seed)
    world = World(tmp_path_factory.mktemp("run"), shards=2)
    turns = Turns(draw, kills=draw.choice([0, 0.02, 0.1]))
    world.head.gate = turns.gate
    working: list[str] = []

    def tick() -> None:
        chance = draw.random()
        if chance < 0.02:
            world.head.jobs.clear()  # and with the head everything that ran there
        elif chance < 0.04:
            world.head.deaf = 1
        for id in world.head.live():
            job, number = world.head.jobs[id], int(id.rsplit("-", 1)[1])
            move = draw.random()
            if job.status == "PENDING" and move < 0.5:
                late = world.records.newest_number() > number
                job.status = "FAILED" if late else "RUNNING"
            elif job.status == "RUNNING" and move < 0.1:
                job.status = "FAILED"
            elif job.status == "RUNNING" and move < 0.5:
                pending = [s for s in range(2) if not world.done(s)]
                if pending:
                    world.small.commit(pending[0])
                else:
                    job.status = "SUCCEEDED"
        at_work = [i for i in world.head.live() if world.head.jobs[i].status == "RUNNING"]
        assert len(at_work) <= 1, f"{at_work} work at the same time"
        working.extend(at_work)

    class Gated(JobRecords):
        def newest_number(self) -> int:
            turns.gate("list")
            return super().newest_number()

        def add(self, *given: Any) -> bool:
            turns.gate("add")
            return super().add(*given)

    def flow(step: Callable[[], None] = lambda: turns.gate("sleep")) -> int:
        while True:
            follower = world.follower(step)
            follower.records = Gated(world.small.store, "key", world.plan.hash)
            try:
                return follower.run_to_end().done
            except (JobLost, JobStopped):  # Prefect would try again
                continue

    world.slept = -(10**6)
    turns.play([flow] * draw.randint(1, 4), tick)
    assert all(r == 10 or isinstance(r, Killed) for r in turns.results.values()), turns.results
    world.head.gate = lambda name: None
    assert flow(tick) == 10


def test_the_loser_of_the_race_for_a_number_follows_the_winner(world: World) -> None:
    world.submitted(status="FAILED")
    follower = world.follower()
    ours = follower.records.add

    def add(number: int, *given: Any) -> bool:
        follower.records.add = ours  # type: ignore[method-assign]
        world.submitted(number)
        return ours(number, *given)

    follower.records.add = add  # type: ignore[method-assign]
    record, _ = follower.attach()
    assert record.number == 2 and record.flow_run == "earlier"
    assert world.head.started == [world.id(1), world.id(2)]


def test_a_night_that_reuses_answers_is_followed_over_both_of_its_ledgers(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.write("a", "b", "c", "d", "e", "a", "b", "f")
    job = nights.job()
    run = plan_run(nights.job(cluster={"job_server": URL}), "n1")
    assert BatchJob.from_dict(sendable(nights.job(cluster={"job_server": URL}))).reuse == "latest"
    ledger = Ledger(open_store(run.uri))
    plan = ledger.load_plan()
    assert plan is not None
    seen: list[tuple[int, int]] = []
    watch = jobs.Watch(ledger, plan, lambda p: seen.append((p.whole_done, p.whole)))
    watch.begin()
    nights.stop_after = 1
    while not watch.look_now():
        with suppress(NightKilled):
            nights.infer(job, run)
        nights.stop_after = 1  # a shard a try
    done = [done for done, _ in seen]
    assert {whole for _, whole in seen} == {6 + 8}
    assert done == sorted(done) and (done[0], done[-1]) == (0, 14) and len(set(done)) >= 4
    assert (watch.progress.rows, watch.progress.done) == (8, 8)
    assert infer_in_place(job, job, run).done == 8


# --- the job's own side -------------------------------------------------------------------------


@pytest.fixture
def at_work(world: World, monkeypatch: pytest.MonkeyPatch) -> list[BatchJob]:
    seen: list[BatchJob] = []

    def infer_run(job: BatchJob, run: Run, observe: Any) -> Any:
        seen.append(job)
        world.small.commit_all()
        return jobs.Watch(world.small.ledger, world.plan, observe).progress

    monkeypatch.setattr(remote, "infer_run", infer_run)
    for name, value in world.follower().env.items():
        monkeypatch.setenv(name, value)
    return seen


def test_the_job_works_from_its_record(world: World, at_work: list[BatchJob]) -> None:
    sent = sendable(world.job().model_copy(update={"name": "nightly"}))
    world.records.add(1, sent, URL, None)
    assert remote.work(world.run.uri, 1) == 0
    assert at_work[0].cluster.address == "auto" and at_work[0].cluster.job_server is None
    assert world.records.outcome(1) == Outcome()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"prompt": {"template": "Say {tags}"}}, r"prompt\.template: .*Company"),
        ({"prompt": {"function": "helpers.functions:ask"}}, r"prompt\.function: None -> "),
        ({"prompt": {"template": "What is {Company}?", "system": "x"}}, r"prompt\.system"),
        ({"engine": {"model": "/evil"}}, r"engine\.model: 'demo' -> '/evil'"),
        ({"engine": {"adapter": "/evil"}}, r"engine\.adapters\.: None -> '/evil'"),
        ({"engine": {"seed": 7}}, r"engine\.seed: None -> 7"),
        ({"sampling": {"max_tokens": 9}}, r"sampling\.max_tokens"),
        ({"source": {"uri": "/etc/passwd", "format": "csv"}}, r"source\.uri: .*/etc/passwd"),
        ({"output": {"uri": "o", "column": "x"}}, r"output\.column: 'response' -> 'x'"),
        (
            {"output": {"uri": "o", "schema_model": "evil:Answer"}},
            r"output\.schema_model: None -> ",
        ),
        ({"name": "other"}, r"name: 'nightly' -> 'other'"),
    ],
)
@pytest.mark.parametrize("started_by", ["a flow", "hand"])
def test_a_recorded_job_that_is_not_the_plans_is_not_run(
    world: World,
    at_work: list[BatchJob],
    monkeypatch: pytest.MonkeyPatch,
    started_by: str,
    groups: dict[str, Any],
    words: str,
) -> None:
    world.records.add(1, sendable(make_job(**groups)), URL, None)
    if started_by == "hand":
        monkeypatch.delenv(jobs.DIGEST_ENV)
    with pytest.raises(CorruptRun, match=r"0001\.json .*so it was not started") as caught:
        remote.work(world.run.uri, 1)
    assert started_by == "a flow" or re.search(words, str(caught.value)), str(caught.value)
    assert at_work == []
    outcome = world.records.outcome(1)
    assert outcome is not None and outcome.error == "CorruptRun"


def test_a_record_that_was_changed_after_its_submit_is_not_run(
    world: World, at_work: list[BatchJob]
) -> None:
    """Also in fields that change no answer, but what the run reaches."""
    target = {"format": "parquet", "uri": "/tmp/evil"}
    for group in (
        {"engine": {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}},
        {"output": {"uri": "o", "publish": [target]}},
        {"source": {"uri": "data/in.parquet", "options": {"endpoint_url": "http://evil"}}},
        {"limits": {"max_failed_rows": 10**6}},
    ):
        number = world.records.newest_number() + 1
        world.records.add(number, sendable(make_job(**group)), URL, None)
        with pytest.raises(CorruptRun, match="differs from the job that was submitted"):
            remote.work(world.run.uri, number)
    assert at_work == []


def test_the_fields_that_a_person_accepted_may_differ(
    world: World, at_work: list[BatchJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(jobs.DIGEST_ENV)
    accepted = Accepted("sampling.max_tokens", "16", "9", "me@here", 1.5)
    run = replace(world.run, accepted=(accepted,))
    sent = sendable(make_job(sampling={"max_tokens": 9, "temperature": 0.5}))
    world.records.add(1, sent, URL, None, run)
    with pytest.raises(CorruptRun, match=r"sampling\.temperature") as caught:
        remote.work(world.run.uri, 1)
    assert "max_tokens" not in str(caught.value)
    world.records.add(2, sendable(make_job(sampling={"max_tokens": 9})), URL, None, run)
    assert remote.work(world.run.uri, 2) == 0 and len(at_work) == 1


def test_a_job_that_has_been_succeeded_does_not_work(world: World, at_work: list[BatchJob]) -> None:
    for number in (1, 2):
        world.records.add(number, sendable(world.job()), URL, None)
    assert remote.work(world.run.uri, 1) == remote.SUPERSEDED
    assert at_work == []


def test_a_job_leaves_its_error_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def infer_run(*_: Any) -> Any:
        raise EngineStartError("no such model")

    monkeypatch.setattr(remote, "infer_run", infer_run)
    world.records.add(1, sendable(world.job()), URL, None)
    assert remote.work(world.run.uri, 1) == 1
    outcome = world.records.outcome(1)
    assert outcome is not None
    assert (outcome.error, outcome.message) == ("EngineStartError", "no such model")


def test_a_running_job_ends_when_a_newer_one_is_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    class Over(threading.Event):
        looks = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.looks += 1
            if self.looks == 2:
                world.records.add(2, {}, URL, None)
            return self.is_set()

    monkeypatch.setattr(remote.os, "kill", lambda pid, number: killed.append(number))
    world.records.add(1, {}, URL, None)
    over = Over()
    remote.guard(world.records, 1, over)
    assert killed == [remote.signal.SIGTERM] and over.looks == 2
    over.set()
    remote.guard(world.records, 1, over)  # the work is done: nothing to guard
    assert len(killed) == 1


@pytest.mark.parametrize(
    "damage", [b"{}", b"[]", b'{"number": 7}', b"x", b'{"id": "raybatch-other-1"}']
)
def test_a_record_that_is_not_ours_is_refused(world: World, damage: bytes) -> None:
    world.small.store.put(f"{JOBS}/0001.json", damage)
    with pytest.raises(CorruptRun, match=r"0001\.json"):
        world.records.newest()


# --- secrets ------------------------------------------------------------------------------------

HOSTED = {"url": "http://model/v1", "model": "m"}


@pytest.mark.parametrize(
    ("group", "fields", "field"),
    [
        ("source", {"uri": "s3://b/in", "options": {"secret": "s3cr3t"}}, "source.options.secret"),
        ("output", {"uri": "s3://b/o", "options": {"key": "s3cr3t"}}, "output.options.key"),
        (
            "output",
            {"uri": "s3://b/o", "options": {"client_kwargs": {"aws_secret_access_key": "s3cr3t"}}},
            "output.options.client_kwargs.aws_secret_access_key",
        ),
        (
            "source",
            {"uri": "s3://b/in", "options": {"endpoint_url": "http://me:s3cr3t@host"}},
            "source.options.endpoint_url",
        ),
        ("engine", {"env": {"HF_TOKEN": "s3cr3t"}}, "engine.env.HF_TOKEN"),
        ("engine", {"hf_token": "s3cr3t"}, "engine.hf_token"),
        ("engine", {"endpoint": {**HOSTED, "key": "s3cr3t"}}, "engine.endpoint.key"),
        (
            "output",
            {
                "uri": "o",
                "escalate": {
                    "when": {"logprob_below": -0.5},
                    "to": {"endpoint": {**HOSTED, "key": "s3cr3t"}},
                },
            },
            "output.escalate.to.endpoint.key",
        ),
    ],
)
def test_a_secret_is_refused_with_the_remedy(
    world: World, group: str, fields: dict[str, Any], field: str
) -> None:
    job = make_job(**{group: fields, "cluster": {"job_server": URL}})
    with pytest.raises(ConfigError, match=field) as error:
        submission_of(job, job)
    assert "s3cr3t" not in str(error.value)


def test_keys_of_blocks_reach_neither_record_nor_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "s3cr3t")
    job = make_job(
        output={"uri": str(world.small.root), "credentials_block": "aws-credentials/nightly"},
        engine={"env": {"TOKENIZERS_PARALLELISM": "false"}},
        cluster={"job_server": URL},
    )
    options = {"key": "AKIA", "secret": "s3cr3t"}
    loaded = job.model_copy(update={"output": job.output.model_copy(update={"options": options})})
    submission = submission_of(job, loaded, "http://prefect:4200/api")
    follower = jobs.Follower(
        submission, world.run, lambda progress: None, jobs.Owner(),
        world.server, "run", lambda seconds: world.work(),
    )  # fmt: skip
    follower.run_to_end()
    request = json.dumps(world.head.submissions)
    record = world.small.store.read(f"{JOBS}/0001.json").decode()
    for secret in ("s3cr3t", "AKIA"):
        assert secret not in request and secret not in record
    env = world.head.submissions[0]["runtime_env"]["env_vars"]
    assert env["PREFECT_API_URL"] == "http://prefect:4200/api" and "PREFECT_API_KEY" not in env
    assert json.loads(env[OUTPUT_ENV])["credentials_block"] == "aws-credentials/nightly"
    assert world.records.read(1).job["engine"]["env"] == {"TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"output": {"uri": "o", "credentials_block": "a/b"}}, "output.credentials_block"),
        ({"engine": {"endpoint": {"block": "hosted-model/a"}}}, "engine.endpoint.block"),
    ],
)
def test_blocks_need_an_api_that_the_cluster_can_reach(
    fields: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**fields, cluster={"job_server": URL})
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for url in ("", "http://me:pw@prefect/api"):
        with pytest.raises(ConfigError, match="PREFECT_API_URL") as caught:
            environment(job, url)
        assert str(caught.value).startswith(named)
    assert environment(job, "http://prefect/api")["PREFECT_API_URL"] == "http://prefect/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://other/api")  # of a command
    assert environment(job, "")["PREFECT_API_URL"] == "http://other/api"


@pytest.mark.parametrize(
    ("own", "key", "most"),
    [
        ({}, "s3cr3t", 5),
        ({"key": "${MY_KEY}"}, "${MY_KEY}", 5),
        ({"max_in_flight": 64}, "s3cr3t", 64),
    ],
)
def test_a_job_on_the_cluster_has_the_limits_of_its_record_and_its_own_key_or_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], key: str, most: int
) -> None:
    endpoint = {"block": "hosted-model/a", **own}
    output = {"uri": str(tmp_path)}
    job = make_job(engine={"endpoint": endpoint}, output=output, cluster={"job_server": URL})
    block = {**HOSTED, "key": "s3cr3t", "max_in_flight": 5}
    loaded = with_endpoint_fields(job, block)
    world = World(tmp_path, engine={"endpoint": {**endpoint, **HOSTED}})
    seen: list[BatchJob] = []

    def infer_run(job: BatchJob, run: Run, observe: Any) -> Any:
        seen.append(job)
        world.small.commit_all()
        return jobs.Watch(world.small.ledger, world.plan, observe).progress

    submission = submission_of(job, loaded, "http://prefect/api")
    assert "s3cr3t" not in json.dumps([submission.job, submission.env])
    assert submission.env["PREFECT_API_URL"] == "http://prefect/api"
    world.records.add(1, submission.job, URL, None)
    monkeypatch.setenv(OUTPUT_ENV, submission.env[OUTPUT_ENV])
    monkeypatch.delenv(jobs.DIGEST_ENV, raising=False)
    monkeypatch.setattr(remote, "infer_run", infer_run)
    changed = {**block, "max_in_flight": 9, "requests_per_minute": 1}  # since the job was sent
    monkeypatch.setattr(tasks, "endpoint_of", lambda *names: changed)
    assert remote.work(world.run.uri, 1) == 0
    at_work = seen[0].engine.endpoint
    assert (at_work.key, at_work.max_in_flight) == (key, most)
    assert (at_work.model, at_work.requests_per_minute) == ("m", None)


def test_a_block_that_cannot_be_loaded_on_the_cluster_is_recorded_as_such(
    world: World, at_work: list[BatchJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a lost job: a wrong block is not retried, and an outage of the API says so."""
    monkeypatch.delenv(jobs.DIGEST_ENV)
    source = {"uri": "data/in.parquet", "credentials_block": "object-store/a"}
    world.records.add(1, sendable(make_job(source=source)), URL, None)

    def options_of(name: str) -> dict[str, Any]:
        raise PrefectUnavailable("no answer")

    monkeypatch.setattr(tasks, "options_of", options_of)
    with pytest.raises(PrefectUnavailable):
        remote.work(world.run.uri, 1)
    assert world.records.outcome(1) == Outcome("PrefectUnavailable", "no answer")
    assert isinstance(jobs.error_of(Outcome("PrefectUnavailable", "x")), PrefectUnavailable)
    assert at_work == []


@pytest.mark.parametrize(
    "url", ["ray://head:10001", "head:8265", "http://", "http://a:b@h:1", "ftp://h"]
)
def test_only_a_job_server_is_a_job_server(url: str) -> None:
    with pytest.raises(ConfigError, match="30 s" if "ray:" in url else "http://host:8265"):
        make_job(cluster={"job_server": url})


def test_address_and_job_server_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="remove one"):
        make_job(cluster={"job_server": URL, "address": "auto"})


# --- logs ---------------------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.text: str | None = ""
        self.now = 0.0
        self.out: list[tuple[int, str]] = []
        self.feed = LogFeed(
            lambda: self.text, lambda level, text: self.out.append((level, text)), lambda: self.now
        )

    def add(self, text: str, after: float = 10.0) -> list[tuple[int, str]]:
        before = len(self.out)
        self.text = (self.text or "") + text
        self.now += after
        self.feed.poll()
        return self.out[before:]


def test_only_our_lines_are_passed_on_each_once() -> None:
    log = Log()
    assert log.add("2026 INFO ray noise\n[raybatch INFO] begun\n(pid=7) [raybatch INFO] x\n") == [
        (logging.INFO, "begun")
    ]
    assert log.add("[raybatch WARNI") == []  # half a line
    assert log.add("NG] shard 3 was lost\n") == [(logging.WARNING, "shard 3 was lost")]
    log.text = None  # not to be had right now
    assert log.add("") == []


def test_a_message_of_many_lines_stays_one() -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 1, "two\nlines", None, None)
    log = Log()
    assert log.add(MarkedLines("%(message)s").format(record) + "\nother\n") == [
        (logging.ERROR, "two\nlines")
    ]


def test_repetitions_are_counted_and_a_flood_is_bounded() -> None:
    log = Log()
    same = "".join(f"[raybatch WARNING] shard {i} was lost\n" for i in range(1000))
    words = "".join(
        f"[raybatch INFO] about {chr(65 + i % 26) * (1 + i // 26)}\n" for i in range(99)
    )
    assert len(log.add(same + words)) == 30
    assert log.add("[raybatch ERROR] errors pass\n") == [(logging.ERROR, "errors pass")]
    later = log.add("[raybatch WARNING] shard 7 was lost\n", after=60)
    assert "1069 more log lines" in later[0][1]
    assert later[1:] == [(logging.WARNING, "shard 7 was lost")]


def test_an_endless_log_is_left_to_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_raybatch.remote.logs.MOST_LOG_BYTES", 1000)
    log = Log()
    assert "too long" in log.add("x" * 2000 + "\n")[-1][1]
    assert log.add("[raybatch ERROR] not read\n") == []


def test_the_clients_address_is_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_ADDRESS would win over the argument of Ray's client."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")
    with pytest.raises(Exception, match=r"127\.0\.0\.1:3"):
        servers.connect_client("http://127.0.0.1:3")
    assert servers.os.environ["RAY_API_SERVER_ADDRESS"] == "http://127.0.0.1:2"


def test_ray_does_not_keep_prefects_place_for_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect turns SIGTERM into a cancellation; Ray's handler would make a crash of it."""
    import signal

    import ray

    from prefect_raybatch.cluster import connect as cluster

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    def theirs(number: int, frame: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "capacity", lambda: cluster.Capacity(1, 0, 1, "here"))
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with cluster.connected(cluster_spec(make_job())):
            assert signal.getsignal(signal.SIGTERM) is theirs
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with cluster.connected(cluster_spec(make_job())):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # Ray's cleans up
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_accepted_of_a_run_reaches_its_job(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job takes on what the person did, and says so in its own note; one that was submitted
    before that goes on without it, which is told."""
    accepted = Accepted("engine.revision", "a", "b", "me@here", 1.5)
    world.submitted()
    assert "accepted" not in json.loads(world.small.store.read(job_path(1)))
    world.run = replace(world.run, accepted=(accepted,), model={"name": "other", "revision": "b"})
    world.follower().run_to_end()
    assert (
        f"the Ray job {world.id(1)} was submitted before the change of engine.revision"
        in caplog.text
    )

    world = World(world.small.root / "another")
    world.run = replace(world.run, accepted=(accepted,), model={"name": "other", "revision": "b"})
    told: list[Run] = []

    def infer(job: BatchJob, run: Run, observe: Any) -> Any:
        told.append(run)
        return Progress(run.rows, run.shards)

    def started(name: str) -> None:
        if name == "submit":
            monkeypatch.setattr(remote, "infer_run", infer)
            assert remote.work(world.run.uri, 1) == 0

    world.head.gate = started
    world.follower().run_to_end()
    (run,) = told
    assert (run, run.accepted, run.model) == (world.run, (accepted,), world.run.model)


@pytest.mark.parametrize("on_crash", ["reattach", "stop"])
def test_an_interrupted_backfill_ends_as_each_of_its_runs_would(
    world: World, monkeypatch: pytest.MonkeyPatch, on_crash: str
) -> None:
    job = world.job(on_crash=on_crash)
    submitted = threading.Event()
    owner = jobs.Owner("flow", lambda id, server: submitted.set(), lambda: False)
    ended: list[BaseException] = []

    def follow(night: DatedRun) -> Any:
        follower = jobs.Follower(
            submission_of(job, job), world.run, lambda progress: None, owner, world.server
        )
        try:
            return follower.run_to_end()
        except BaseException as error:
            ended.append(error)
            raise

    def interrupted(work: Any) -> Any:
        assert submitted.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_raybatch.runs.backfill.as_completed", interrupted)
    night = DatedRun(date(2026, 11, 1), "key", world.run.uri)
    with pytest.raises(KeyboardInterrupt):
        run_dates(cluster_spec(job), [night], follow, 1, False, lambda run: None)
    assert [type(error) for error in ended] == [KeyboardInterrupt]
    assert world.head.stopped == ([world.id(1)] if on_crash == "stop" else [])
