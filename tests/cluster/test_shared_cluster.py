"""Several jobs at once in one process: one Ray cluster, whose turn it is, who shuts it down."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FAILS, FakeEngine
from helpers.heard import wait_for
from helpers.hosts import FakeHosts
from helpers.ray_head import ROOT
from helpers.small import make_job

from prefect_raybatch import cpu_limit
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.ray_process import START_TRIES
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import WarmEngines
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import (
    ClusterUnavailable,
    ConfigError,
    InsufficientResources,
    JobStopped,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.sizing.sizes import Capacity

ROWS = 48


class FakeRay:
    """A cluster that notes what is done to it. `lingers`: looks until what was held is free."""

    def __init__(self, there: bool = False, lingers: int = 0):
        self.there, self.lingers = there, lingers
        self.made: list[Any] = []
        self.entered = False
        self.tokens: list[str | None] = []  # of each start
        self.gate: threading.Event | None = None

    def joined(self) -> bool:
        return self.there

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        assert not self.there, "Ray: you called ray.init twice"
        self.entered = True
        if self.gate:
            assert self.gate.wait(120)
        self.there = True
        self.made.append((address, cpus))
        self.tokens.append(access.token)

    def end(self) -> None:
        assert self.there
        self.there = False
        self.made.append("end")

    def free(self) -> dict[str, float]:
        self.lingers -= 1
        return {"CPU": 0.0 if self.lingers >= 0 else 2.0}


class Runs:
    """Runs in threads, each of which works until it is let go."""

    def __init__(self, shared: ClusterSession, cpus: float = 2.0):
        self.shared, self.total = shared, {"CPU": cpus}
        self.events: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.go: dict[str, threading.Event] = {}
        self.users: dict[str, Tenant] = {}
        self.threads: list[threading.Thread] = []

    def start(
        self, name: str, cpus: float = 2.0, address: str | None = None, local: int = 2
    ) -> None:
        user = self.users[name] = Tenant(name, lambda text: self.told(name, text))
        self.go[name] = threading.Event()

        def work() -> None:
            try:
                with self.shared.joined(user, address, local):
                    self.events.append(f"{name} joined")
                    with self.shared.admitted(user, {"CPU": cpus}, self.total):
                        self.events.append(f"{name} works")
                        assert self.go[name].wait(120)
            except BaseException as error:
                self.errors[name] = error
            self.events.append(f"{name} ended")

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def told(self, name: str, text: str) -> None:
        self.events.append(f"{name} waits" if text else f"{name} goes on")

    def until(self, event: str) -> None:
        wait_for(lambda: event in self.events)

    def end(self, *names: str) -> None:
        for name in names or self.go:
            self.go[name].set()
            self.until(f"{name} ended")


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def shared(ray: FakeRay) -> ClusterSession:
    return ClusterSession(ray, WarmEngines(FakeHosts()), sleep=lambda _: None)


def test_runs_that_start_at_once_start_one_cluster_and_the_last_one_ends_it(
    ray: FakeRay, shared: ClusterSession
) -> None:
    ray.gate, found = threading.Event(), Runs(shared)
    for name in "abc":
        found.start(name, 0.5)
    ray.gate.set()
    for name in "abc":
        found.until(f"{name} works")  # they fit beside each other
    found.end("a", "b")
    assert ray.made == [(None, 2)]
    found.end("c")
    assert ray.made == [(None, 2), "end"] and not found.errors
    found.start("d")
    found.end("d")
    assert ray.made == [(None, 2), "end"] * 2


def test_runs_that_do_not_fit_take_turns_in_order_and_say_so(
    ray: FakeRay, shared: ClusterSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefect_raybatch")
    found = Runs(shared)
    found.start("a", 1.5)
    found.until("a works")
    found.start("b", 1.5)
    found.until("b waits")
    found.start("c", 0.25)  # would fit beside a, but b was first
    found.until("c waits")
    said = " ".join(caplog.messages)
    assert "b needs 1.5 of 2 CPUs, which a uses" in said
    assert "c needs 0.25 of 2 CPUs, which a uses" in said
    assert "they are free, after b" in said
    found.end("a")
    found.until("b works")
    found.until("c works")
    assert found.events.index("b works") < found.events.index("c works")
    assert "b goes on" in found.events and "c goes on" in found.events
    found.end("b", "c")
    assert ray.made == [(None, 2), "end"]


def test_a_run_that_takes_more_than_there_is_works_alone(shared: ClusterSession) -> None:
    found = Runs(shared)
    found.start("a", 8)
    found.until("a works")
    found.end()


def test_a_run_larger_than_the_local_cluster_gets_a_new_one_after_the_others(
    ray: FakeRay, shared: ClusterSession
) -> None:
    found = Runs(shared)
    found.start("a", 1)
    found.until("a works")
    found.start("large", local=4)
    found.until("large waits")
    found.start("b", 1)  # it would fit, and would put the large one off for ever
    time.sleep(0.1)
    assert "b joined" not in found.events
    found.end("a")
    found.until("large works")
    assert ray.made == [(None, 2), "end", (None, 4)]
    found.until("b joined")
    found.end("large", "b")
    assert ray.made[-1] == "end" and len(ray.made) == 4 and not found.errors


def test_two_addresses_in_one_process_are_an_error_that_names_both(
    ray: FakeRay, shared: ClusterSession
) -> None:
    found = Runs(shared)
    found.start("a", 1, "one:6379")
    found.until("a works")
    found.start("b", 1, "two:6379")
    found.until("b ended")
    error = found.errors["b"]
    assert isinstance(error, ConfigError) and not error.transient
    assert all(text in str(error) for text in ("one:6379", "two:6379", "a in this process"))
    found.end("a")
    assert ray.made == [("one:6379", 2), "end"]


def test_a_cluster_of_the_callers_own_is_used_and_left_alone(
    ray: FakeRay, shared: ClusterSession
) -> None:
    ray.there = True
    found = Runs(shared)
    found.start("a", 1, "one:6379")
    found.start("b", 1)
    found.until("a works")
    found.until("b works")
    found.end()
    assert ray.there and ray.made == [] and not found.errors


def test_a_run_within_a_run_is_an_error_not_a_wait_for_ever(shared: ClusterSession) -> None:
    with (
        shared.joined(Tenant("outer"), None, 2),
        pytest.raises(ConfigError, match="inner was started within another run"),
        shared.joined(Tenant("inner"), None, 2),
    ):
        pass
    with shared.joined(Tenant("next"), None, 2):
        pass


def test_a_start_that_fails_leaves_the_door_open(ray: FakeRay, shared: ClusterSession) -> None:
    ray.there = True

    def start(address: str | None, cpus: int, access: ClusterAccess) -> None:
        raise InsufficientResources("no")

    broken = FakeRay()
    broken.start = start  # type: ignore[method-assign]
    door = ClusterSession(broken, WarmEngines(FakeHosts()))
    for _ in range(2):
        with pytest.raises(InsufficientResources), door.joined(Tenant("a"), None, 2):
            pass
    assert broken.made == []


def test_a_cluster_is_joined_with_the_access_of_the_run_that_joins_it(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another run asks for the cluster while Ray starts."""
    asked: list[str] = []

    class Door(ClusterSession):
        def joined(self, user: Tenant, *more: Any) -> AbstractContextManager[None]:
            asked.append(user.name)
            return super().joined(user, *more)

    monkeypatch.setattr(cluster, "CLUSTER_SESSION", Door(ray, WarmEngines(FakeHosts())))
    monkeypatch.setattr(cluster, "capacity", lambda: None)
    ray.gate = threading.Event()

    def run(name: str) -> None:
        access = ClusterAccess("10.0.0.1:6379", token=f"token of {name}")
        spec = replace(cluster_spec(make_job()), loaded=access)
        with cluster.connected(spec, Tenant(name)):
            pass

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in ("one", "two")]
    threads[0].start()
    wait_for(lambda: ray.entered)
    threads[1].start()
    wait_for(lambda: "two" in asked)
    ray.gate.set()
    for thread in threads:
        thread.join(120)
    assert ray.tokens[0] == "token of one"


def test_a_run_waits_until_actors_of_the_one_before_have_let_go(shared: ClusterSession) -> None:
    ray = FakeRay(lingers=3)
    found = Runs(ClusterSession(ray, WarmEngines(FakeHosts()), sleep=lambda _: None))
    found.start("a", 1)
    found.until("a works")
    assert ray.lingers == 3  # nobody was there before it
    found.start("b", 2)
    found.until("b waits")
    found.end("a")
    found.until("b works")
    assert ray.lingers < 0
    found.end()


def test_a_look_at_the_cluster_keeps_it_for_the_look(ray: FakeRay, shared: ClusterSession) -> None:
    with shared.visited() as there:
        assert not there
    found = Runs(shared)
    found.start("a")
    found.until("a works")
    with shared.visited() as there:
        found.end("a")
        assert there and ray.there
    assert ray.made == [(None, 2), "end"]


def test_all_runs_stop_with_the_process(ray: FakeRay, shared: ClusterSession) -> None:
    found = Runs(shared)
    found.start("a")
    found.until("a works")
    found.start("b")
    found.until("b waits")
    shared.stop_all()
    found.until("b ended")
    assert isinstance(found.errors["b"], JobStopped)
    assert isinstance(found.users["a"].halted(), JobStopped)
    found.end("a")
    assert ray.made[-1] == "end"
    found.start("c")  # the process went on after all
    found.until("c works")
    assert found.users["c"].halted() is None
    found.end("c")


ENDING = """
import signal, os, threading, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from prefect_raybatch.cluster.ray_process import START_TRIES
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import WarmEngines

there, at_work, waits = [], threading.Event(), threading.Event()
shared = ClusterSession(SimpleNamespace(
    joined=lambda: bool(there), start=lambda *_: there.append(1), end=there.clear, free=dict
), WarmEngines(SimpleNamespace(found=list)))

def work(name):
    user = Tenant(name, lambda text: waits.set())
    with shared.joined(user, None, 2), shared.admitted(user, {{"CPU": 2}}, {{"CPU": 2}}):
        at_work.set()
        user.stopped.wait(600)
        print(name, type(user.halted()).__name__, flush=True)

def ended(*_):
    raise {error}

signal.signal(signal.SIGTERM, ended)
with ThreadPoolExecutor() as pool:
    first = pool.submit(work, "a")
    at_work.wait(60)
    second = pool.submit(work, "b")
    assert waits.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


@pytest.mark.parametrize("error", ["SystemExit(7)", "KeyboardInterrupt"])
def test_a_signal_ends_runs_in_threads_that_the_main_thread_waits_for(error: str) -> None:
    """As Prefect's task runner does: its `with` waits for every task that was submitted."""
    text = ENDING.format(error=error)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout.splitlines() == ["a JobStopped"], done.stderr
    assert done.returncode != 0


BESIDE = """
import sys, threading, time
from contextlib import ExitStack
from helpers.small import make_job
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.compile.job import cluster_spec

def hold():
    with cluster.connected(cluster_spec(make_job())):
        time.sleep(600)

with ExitStack() as stack:
    stack.callback(print, "ended in order", flush=True)
    stack.callback(time.sleep, 4)  # Ray's C++ side ended it by SIGABRT after 3 s
    if sys.argv[1] == "early":
        stack.enter_context(cluster.cluster_starting(cluster_spec(make_job())))
    else:
        threading.Thread(target=hold, daemon=True).start()
    until = time.monotonic() + 120
    while not cluster.is_joined() and time.monotonic() < until:
        time.sleep(0.1)
    if sys.argv[1] != "early":
        stack.enter_context(cluster.connected(cluster_spec(make_job(name="second"))))
    print(cluster.is_joined(), flush=True)
    time.sleep(600)
"""


@pytest.mark.whole
@pytest.mark.parametrize("started", ["early", "by another run"])
def test_sigterm_ends_in_order_a_process_whose_ray_another_thread_started(started: str) -> None:
    """Ray takes care of the signal only where the main thread starts it."""
    command = [sys.executable, "-c", BESIDE, started]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "True\n"
            process.terminate()
            said = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert (said, process.returncode) == ("ended in order\n", 143)


def test_log_lines_stay_in_the_page_until_the_last_run_of_several_ends() -> None:
    from prefect.logging.handlers import APILogHandler

    from prefect_raybatch.flow import tasks

    def shown() -> int:
        return sum(isinstance(handler, APILogHandler) for handler in tasks.OUR_LOGGER.handlers)

    level = tasks.OUR_LOGGER.level
    first, second = tasks.logs_in_page(), tasks.logs_in_page()
    first.__enter__()
    second.__enter__()
    assert shown() == 1 and tasks.OUR_LOGGER.isEnabledFor(logging.INFO)
    first.__exit__(None, None, None)
    assert shown() == 1 and tasks.OUR_LOGGER.isEnabledFor(logging.INFO)
    second.__exit__(None, None, None)
    assert shown() == 0 and tasks.OUR_LOGGER.level == level


# --- with Ray -----------------------------------------------------------------------------------


def job_in(folder: Path) -> BatchJob:
    folder.mkdir()
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pq.write_table(table, folder / "in.parquet")
    return make_job(
        name=folder.name,
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 6},
        output={"uri": str(folder / "out")},
        limits={"max_failed_rows": 1},
    )


@pytest.mark.whole
def test_the_cluster_outlives_the_thread_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Linux kills Ray's processes with that thread, and Ray then ends this process."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    started, joined = threading.Event(), threading.Event()

    def first() -> None:
        with cluster.CLUSTER_SESSION.joined(Tenant("first"), None, 1):
            started.set()
            joined.wait(60)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert started.wait(120)
    with cluster.CLUSTER_SESSION.joined(Tenant("second"), None, 1):
        joined.set()
        thread.join(60)
        assert not thread.is_alive()
        time.sleep(1)
        seven = ray.remote(num_cpus=1)(lambda: 7)
        assert ray.get(seven.remote(), timeout=60) == 7
    assert not ray.is_initialized()
    # Ray turns tokens on for a cluster of its own: as a driver of one without them, this process
    # would lose its actors.
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize("before", [None, "disabled"])
def test_a_cluster_that_does_not_start_leaves_rays_tokens_as_they_were(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    import ray

    def init(**options: Any) -> None:
        os.environ["RAY_AUTH_MODE"] = "token"
        raise RuntimeError("the raylet did not start")

    monkeypatch.setenv("RAY_AUTH_MODE", before or "")
    if before is None:
        monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(InsufficientResources, match="did not start"),
        cluster.connected(cluster_spec(make_job(name="a"))),
    ):
        pass
    assert os.environ.get("RAY_AUTH_MODE") == before


@pytest.mark.parametrize("late", [2, 3])
def test_a_cluster_that_is_late_is_started_again(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    import ray

    starts: list[Any] = []

    def init(**options: Any) -> None:
        starts.append(options)
        if len(starts) <= late:
            raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "capacity", lambda: Capacity(1, 0, 1, "here"))
    if late < START_TRIES:
        with cluster.connected(cluster_spec(make_job(name="a"))):
            pass
    else:
        with (
            pytest.raises(ClusterUnavailable, match="timed out") as caught,
            cluster.connected(cluster_spec(make_job(name="a"))),
        ):
            pass
        assert caught.value.transient
    assert len(starts) == 3


@pytest.mark.whole
@pytest.mark.timeout(1500)
def test_two_jobs_at_once_share_a_cluster_that_the_last_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.data import DataContext

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 2)
    events: list[str] = []  # without the starts that Ray gives up on a machine under load
    init, shutdown = ray.init, ray.shutdown

    def noted_init(*args: Any, **options: Any) -> Any:
        made = init(*args, **options)
        events.append("start")
        return made

    def noted_shutdown() -> None:
        events.extend(["end"] if ray.is_initialized() else [])
        shutdown()

    monkeypatch.setattr(ray, "init", noted_init)
    monkeypatch.setattr(ray, "shutdown", noted_shutdown)
    settings = DataContext.get_current()
    done: dict[str, Progress | BaseException] = {}
    planned = threading.Barrier(2, timeout=600)  # so that neither has ended before the other joins

    def work(job: BatchJob) -> None:
        try:
            run = plan_run(job, "key")
            planned.wait()
            done[job.name] = infer_run(job, run, engine=FakeEngine)
            finalize_run(job, run)
        except BaseException as error:
            done[job.name] = error

    jobs = [job_in(tmp_path / name) for name in ("one", "two")]
    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    for job in jobs:
        found = done[job.name]
        assert isinstance(found, Progress), found
        assert found.tally.rows == ROWS and found.tally.failed == (FAILS < ROWS)
        assert (tmp_path / job.name / "out/key/_SUCCESS").exists()
    assert events == ["start", "end"] and not ray.is_initialized()
    assert DataContext.get_current() is settings  # the caller's, however the two were interleaved


# --- started before its first run -----------------------------------------------------------------


def test_a_cluster_that_was_started_early_is_the_first_runs(
    ray: FakeRay, shared: ClusterSession
) -> None:
    ray.gate, found = threading.Event(), Runs(shared)
    with shared.starting_cluster(None, 2):
        found.start("a")  # while it starts
        ray.gate.set()
        found.until("a works")
        with shared.visited() as there:
            assert there
        found.end("a")
        wait_for(lambda: not ray.there)  # the run was the last: nobody waits for the block's end
    assert ray.made == [(None, 2), "end"] and not found.errors


def test_one_that_nobody_came_to_use_ends_with_the_block(
    ray: FakeRay, shared: ClusterSession
) -> None:
    with shared.starting_cluster(None, 2):
        wait_for(lambda: ray.there)
        with shared.visited() as there:  # a look is no run
            assert there
        assert ray.there
    assert ray.made == [(None, 2), "end"]


def test_a_larger_run_gets_a_cluster_of_its_size(ray: FakeRay, shared: ClusterSession) -> None:
    found = Runs(shared, cpus=4.0)
    with shared.starting_cluster(None, 2):
        wait_for(lambda: ray.there)
        found.start("a", cpus=4.0, local=4)
        found.until("a works")
        found.end("a")
    assert ray.made == [(None, 2), "end", (None, 4), "end"] and not found.errors


def test_an_early_start_that_fails_is_told_by_the_run(ray: FakeRay, shared: ClusterSession) -> None:
    def away(address: str | None, cpus: int, access: ClusterAccess) -> None:
        raise InsufficientResources("no room")

    ray.start = away  # type: ignore[method-assign]
    early = shared.starting_cluster(None, 2)
    with early, pytest.raises(InsufficientResources), shared.joined(Tenant("a"), None, 2):
        pytest.fail("it was joined")


def test_an_error_of_the_block_ends_what_was_started_for_it(
    ray: FakeRay, shared: ClusterSession
) -> None:
    with pytest.raises(KeyboardInterrupt), shared.starting_cluster(None, 2):
        wait_for(lambda: ray.there)
        raise KeyboardInterrupt
    assert ray.made == [(None, 2), "end"]


def test_nothing_starts_here_for_a_cluster_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CLUSTER_SESSION", None)  # any use of it would fail
    job = job_in(tmp_path / "job")
    for place in ({"address": "10.0.0.1:6379"}, {"job_server": "http://head:8265"}):
        given = job.model_copy(update={"cluster": job.cluster.model_copy(update=place)})
        with cluster.cluster_starting(cluster_spec(given)):
            pass
