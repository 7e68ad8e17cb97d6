"""Engines that start while the input is copied: whether, for whom, and when they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from helpers.engines import FAILS, FakeEngine, NotedEngine
from helpers.heard import wait_for
from helpers.hosts import FakeHosts
from helpers.ray_head import start_head
from helpers.small import MODEL, make_job
from helpers.without_ray import instead_of_ray

from prefect_raybatch import cpu_limit, source
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import prewarm
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.pipeline import warm_kind_of
from prefect_raybatch.cluster.prewarm import (
    Guess,
    Prewarming,
    plan_prewarm,
    prewarm_allowed,
    why_no_prewarm,
)
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import IDLE_SECONDS, WarmEngines
from prefect_raybatch.compile.job import compile_job, compile_planned
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import InsufficientResources, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.model.memory import describe
from prefect_raybatch.sizing.sizes import Capacity, imagined
from prefect_raybatch.storage import open_store

ROWS = 48
ROOT = Path(__file__).parents[2]
ENGINE_THERE = 300  # seconds until an engine of a cluster of its own is up on a busy machine
LLAMA_8B = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "max_position_embeddings": 4352,
}
CPUS = Capacity(4.0, 0.0, 1, "here")
GUESS = Guess(1_000_000, (80.0, 100.0, 120.0))


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use four CPUs, as the cluster of these tests has, on any machine."""
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 4)


def held_model() -> tuple[threading.Event, Callable[[], dict[str, Any]]]:
    """A model that is known once the event is set."""
    gate = threading.Event()

    def pinned() -> dict[str, Any]:
        assert gate.wait(60)
        return MODEL

    return gate, pinned


def csv_job(folder: Path, **groups: Any) -> BatchJob:
    folder.mkdir(exist_ok=True)
    lines = ["id,Company", *(f"{i},Company {i}" for i in range(ROWS))]
    (folder / "in.csv").write_text("\n".join(lines) + "\n")
    given = {
        "source": {"uri": str(folder / "in.csv"), "rows_per_shard": 6},
        "engine": {"model": "demo", "device": "cpu", "max_model_len": 256},
        "output": {"uri": str(folder / "out")},
        "limits": {"max_failed_rows": 1},
    }
    return make_job(name=folder.name, **{**given, **groups})


# --- whether --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({}, ""),
        ({"engine": {"max_model_len": "auto"}}, "depends on the rows"),
        ({"engine": {"quantization": "try-fp8"}}, "sampled rows"),
        ({"engine": {"replicas": [1, 4]}}, "is a range"),
        (
            {"engine": {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}},
            "span nodes",
        ),
        ({"reuse": "latest", "output": {"uri": "out", "keep_answers": True}}, "with reuse"),
        ({"cluster": {"job_server": "http://head:8265"}}, "has not joined"),
    ],
)
def test_a_job_tells_by_itself_why_its_engines_start_late(groups: Any, why: str) -> None:
    told = why_no_prewarm(compile_job(make_job(**groups)))
    assert why in told and bool(why) == bool(told)


def planned(capacity: Capacity = CPUS, guess: Guess = GUESS, **engine: Any) -> Any:
    return plan_prewarm(
        compile_job(make_job(engine={"model": "demo", **engine})), MODEL, capacity, guess
    )


def test_an_engine_on_a_cpu_is_certain_whatever_the_rows_are() -> None:
    found = planned(guess=Guess(0, prewarm.ANY_ROW), device="cpu")
    assert isinstance(found, prewarm.PrewarmPlan), found
    assert found.engines == 1 and found.kind.takes == {"CPU": 1.0, "GPU": 0.0}
    assert found.gpus_an_engine == 0.0


def test_a_cpu_stays_free_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert planned(device="cpu", replicas=3).engines == 3
    assert "take 4 of 4 CPUs, and the copy needs 1" in planned(device="cpu", replicas=4)
    # A local cluster may count more CPUs than the machine has.
    more = replace(CPUS, cpus=16.0)
    assert "take 4 of 4 CPUs" in planned(more, device="cpu", replicas=4)


def test_a_copy_on_a_cluster_keeps_half_of_it() -> None:
    def planned_on(replicas: int) -> Any:
        engine = {"model": "demo", "device": "cpu", "replicas": replicas}
        job = make_job(engine=engine, cluster={"address": "head:6379"})
        return plan_prewarm(compile_job(job), MODEL, replace(CPUS, cpus=16.0), GUESS)

    assert planned_on(8).engines == 8
    assert "take 9 of 16 CPUs, and the copy needs 8" in planned_on(9)


def test_engines_of_which_some_might_get_no_shard_start_late() -> None:
    few = replace(GUESS, rows=1_000)
    have = replace(CPUS, cpus=64.0)
    assert "number of shards" in planned(have, few, device="cpu", replicas=3)
    assert "number of shards" in planned(have, Guess(0, GUESS.row_bytes), device="cpu", replicas=3)
    assert planned(have, few, device="cpu").engines == 1, "one has work, however few there are"


def test_sizes_that_follow_from_the_length_of_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sized, "model_sizes", lambda *_: (describe(LLAMA_8B, {}), ""))
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 16)
    have = imagined("H200", 1, 16)
    unknown = Guess(1_000_000, prewarm.ANY_ROW)
    told = planned(have, unknown)
    both = "set engine.engines_per_gpu [1, 2]; engine.max_num_seqs [1024, 256, 512]"
    assert f"depend on the length of rows ({both})" in told
    both = "set engine.engines_per_gpu [1, 3, 4]; engine.max_num_seqs [1024, 256, 512]"
    told = planned(imagined("B200", 1, 16), unknown)
    assert f"depend on the length of rows ({both})" in told
    named = {"engines_per_gpu": 1, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    found = planned(have, unknown, **named)
    assert found.engines == 1 and found.gpus_an_engine == 1.0
    near = planned(have, GUESS, max_num_seqs=256, engines_per_gpu=2)
    assert near.engines == 2 and near.gpus_an_engine == 0.5


def test_a_cluster_that_cannot_hold_them_is_inferences_to_tell_of() -> None:
    with pytest.raises(InsufficientResources):
        planned(device="gpu", engines_per_gpu=1)


def test_the_first_block_is_taken_for_the_others_give_or_take_a_half() -> None:
    found = Guess.of(source.Inventory((), None, 100.0, "csv"), images=False)
    assert found.row_bytes[0] == pytest.approx(100 / 1.5)
    assert found.row_bytes[-1] == pytest.approx(150) and 100 in found.row_bytes
    assert Guess.of(source.Inventory((), None, 9.0, "csv"), True).row_bytes == prewarm.ANY_ROW


# --- from the copy to the run, without Ray --------------------------------------------------------


class FakeRay:
    """A cluster that is there once it is started, with what the hosts leave of it."""

    def __init__(self, hosts: FakeHosts):
        self.hosts, self.there = hosts, False
        self.made: list[Any] = []

    def joined(self) -> bool:
        return self.there

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        self.there = True
        self.made.append("start")

    def end(self) -> None:
        self.there = False
        self.made.append("end")

    def free(self) -> dict[str, float]:
        return self.hosts.free


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hosts() -> FakeHosts:
    return FakeHosts(cpus=4.0, gpus=0.0)


@pytest.fixture
def ray(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay(hosts)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        cluster, "CLUSTER_SESSION", ClusterSession(made, WarmEngines(hosts), sleep=lambda _: None)
    )
    monkeypatch.setattr(cluster, "capacity", lambda: CPUS)
    monkeypatch.setattr(prewarm, "WORTH_BYTES", 0)
    monkeypatch.setattr(prewarm, "COPY_LOOK", 0.01)
    return made


@pytest.fixture
def begun(ray: FakeRay, tmp_path: Path) -> Iterator[tuple[Prewarming, BatchJob]]:
    """An early start whose engine is made."""
    job = csv_job(tmp_path / "job")
    with prewarm_allowed() as found:
        found.clock = Clock()
        found.begin(compile_job(job), lambda: MODEL)
        wait_for(lambda: found.hosts is not None)
        yield found, job


def taken(found: Prewarming, key: str = "", most: int = 1) -> tuple[Any, list[Any]]:
    """What a run finds begun, and the engines of its first pass; with a `key`, of another kind."""
    plan = found.plan
    assert plan is not None
    kind = replace(plan.kind, key=key or plan.kind.key)
    user, needs = Tenant("run"), {"CPU": 2.0}
    with cluster.CLUSTER_SESSION.joined(user, None, 4):
        begun = found.settle(kind, most)
        with cluster.CLUSTER_SESSION.admitted(user, needs, {"CPU": 4.0}, kind, most) as lease:
            return begun, lease.engines(1) if lease else []


def test_a_run_takes_the_engine_that_was_started_for_it(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts, ray: FakeRay
) -> None:
    found, _ = begun
    spec = hosts.specs[0]
    assert spec.untaken and spec.attempt == found.name and spec.tell is not None
    hosts.starting = hosts.busy = {0}  # it does not answer yet
    told, engines = taken(found)
    assert told.name == found.name and engines == [0] and hosts.made == [0]
    assert hosts.ended == [(0, False)], "nobody keeps engines: it ends with the run"
    assert found.settle(None, 1) == prewarm.PrewarmedEngines(), "told once"
    wait_for(lambda: not ray.there)
    assert ray.made == ["start", "end"]


def test_engines_are_kept_for_the_next_run_where_somebody_does(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts, tmp_path: Path
) -> None:
    found, job = begun
    with cluster.CLUSTER_SESSION.kept_warm():
        assert taken(found)[1] == [0] and not hosts.ended
        with prewarm_allowed() as other:  # the next run's would be a second one
            other.begin(compile_job(job), lambda: MODEL)
            assert other.thread is not None
            other.thread.join(60)
        assert taken(found)[1] == [0]
    assert hosts.made == [0] and hosts.ended == [(0, True)]


def test_a_run_of_another_kind_ends_them_and_starts_its_own(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts
) -> None:
    told, engines = taken(begun[0], "another")
    assert told.name == "" and engines == [] and hosts.ended == [(0, True)]


def test_gpu_seconds_until_the_run_has_them_are_counted_once(
    begun: tuple[Prewarming, BatchJob],
) -> None:
    found, _ = begun
    assert found.plan is not None
    found.plan = replace(found.plan, gpus_an_engine=0.5)
    found.clock.now = 40.0  # type: ignore[attr-defined]
    assert taken(found, "another")[0].gpu_seconds == 20.0
    found.clock.now = 90.0  # type: ignore[attr-defined]
    assert taken(found)[0].gpu_seconds == 0.0


@pytest.fixture
def half_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that take a CPU count as such that hold half a GPU."""
    given = prewarm.plan_prewarm
    monkeypatch.setattr(
        prewarm, "plan_prewarm", lambda *of: replace(cast(Any, given(*of)), gpus_an_engine=0.5)
    )


def test_a_limit_on_costs_ends_them_while_the_input_is_copied(
    half_gpus: None,
    ray: FakeRay,
    hosts: FakeHosts,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosts.starting, clock = {0}, Clock()
    cost = {"limits": {"max_cost": 10.0}, "cluster": {"price_per_gpu_hour": 3600.0}}
    with prewarm_allowed() as found:
        found.clock = clock
        found.begin(compile_job(csv_job(tmp_path / "job", **cost)), lambda: MODEL)
        wait_for(lambda: found.hosts is not None)
        clock.now = 19.0
        time.sleep(0.1)
        assert not hosts.ended
        clock.now = 21.0
        wait_for(lambda: not ray.there)
        assert [id for id, _ in hosts.ended] == [0], "also what starts still"
        clock.now = 500.0
        begun, engines = taken(found)
        assert (begun.gpu_seconds, engines) == (10.5, [])
    (said,) = [r.getMessage() for r in caplog.records if "max_cost" in r.getMessage()]
    assert said.startswith("1 engine ended: ") and "raise limits.max_cost" in said


def test_nothing_starts_early_that_a_limit_on_costs_cannot_count(
    half_gpus: None,
    ray: FakeRay,
    hosts: FakeHosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "capacity", lambda: replace(CPUS, accelerators=("T4",)))
    cost = {"limits": {"max_cost": 10.0}, "cluster": {"price_by_card": {"L4": 0.6}}}
    with prewarm_allowed() as found:
        found.begin(compile_job(csv_job(tmp_path / "job", **cost)), lambda: MODEL)
        assert found.thread is not None
        found.thread.join(60)
        assert not hosts.made


def test_what_is_planned_for_nothing_ends_with_the_block_at_once(
    ray: FakeRay, hosts: FakeHosts, tmp_path: Path
) -> None:
    def failing() -> None:
        with prewarm_allowed() as found:
            found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
            wait_for(lambda: found.hosts is not None)
            hosts.starting = {0}
            raise SourceError("line 7")

    with pytest.raises(SourceError, match="line 7"):
        failing()
    assert hosts.ended == [(0, False)], "one that starts still is not waited for"
    assert ray.made == ["start", "end"] and not named("raybatch-engines")


def test_the_process_that_is_told_to_end_ends_them(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts, ray: FakeRay
) -> None:
    cluster.CLUSTER_SESSION.stop_all()
    wait_for(lambda: not ray.there)
    assert hosts.ended == [(0, True)]


def test_an_engine_that_is_up_waits_only_so_long_for_the_copy(
    ray: FakeRay, hosts: FakeHosts, tmp_path: Path
) -> None:
    hosts.starting, clock = {0}, Clock()
    with prewarm_allowed() as found:
        found.clock = clock
        found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
        wait_for(lambda: found.hosts is not None)
        clock.now = 5000.0
        time.sleep(0.1)
        assert not hosts.ended, "what starts still does not wait"
        hosts.starting = set()

        def later() -> bool:  # its time begins when it is seen to be up
            clock.now += IDLE_SECONDS + 1
            return not ray.there

        wait_for(later)
        assert hosts.ended == [(0, True)]
        assert taken(found)[1] == []


def test_another_run_that_needs_their_room_has_it(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts
) -> None:
    user = Tenant("another")
    with cluster.CLUSTER_SESSION.joined(user, None, 4):
        with cluster.CLUSTER_SESSION.admitted(user, {"CPU": 3.0}, {"CPU": 4.0}):
            assert not hosts.ended
        with cluster.CLUSTER_SESSION.admitted(user, {"CPU": 4.0}, {"CPU": 4.0}):
            assert hosts.ended == [(0, True)]


@pytest.mark.parametrize("how", ["claimed", "held", "waited for"])
def test_nothing_starts_in_the_room_of_other_runs(
    how: str, ray: FakeRay, hosts: FakeHosts, tmp_path: Path
) -> None:
    user, total, told = Tenant("another"), {"CPU": 4.0}, threading.Event()

    def third() -> None:
        one = Tenant("a third", lambda text: told.set())
        with (
            cluster.CLUSTER_SESSION.joined(one, None, 4),
            cluster.CLUSTER_SESSION.admitted(one, total, total),
        ):
            pass

    waits = threading.Thread(target=third, daemon=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster.CLUSTER_SESSION.joined(user, None, 4))
        if how == "held":
            hosts.free["CPU"] = 1.0
        else:
            needs = {"CPU": 3.0 if how == "claimed" else 1.0}
            stack.enter_context(cluster.CLUSTER_SESSION.admitted(user, needs, total))
        if how == "waited for":
            waits.start()
            assert told.wait(60)
        with prewarm_allowed() as found:
            found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
            assert found.thread is not None
            found.thread.join(60)
            assert not hosts.made
    if how == "waited for":
        waits.join(60)


def test_the_copy_leaves_engines_their_room_until_they_have_it(
    ray: FakeRay, hosts: FakeHosts, tmp_path: Path
) -> None:
    """On a cluster the copy has more to do than it has CPUs: it would take all of them at once."""
    gate, pinned = held_model()
    job = csv_job(tmp_path / "job", cluster={"address": "head:6379"})
    with prewarm_allowed() as found:
        assert found.copy_room(4) is None
        found.begin(compile_job(job), pinned)
        assert found.copy_room(4) == 2 and found.copy_room(1) == 1
        assert found.copy_room(4) == 2
        hosts.free["CPU"] = 2.0
        gate.set()
        wait_for(lambda: found.hosts is not None)
        assert found.copy_room(4) is None and hosts.made == [0]
    with prewarm_allowed() as found:
        found.begin(compile_job(csv_job(tmp_path / "other", engine={"replicas": [1, 4]})), pinned)
        assert found.copy_room(4) is None


def test_a_small_input_starts_nothing(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "WORTH_BYTES", 1 << 20)
    with prewarm_allowed() as found:
        found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
        assert found.thread is not None
        found.thread.join(60)
    assert not ray.made


def test_engines_of_a_run_to_come_do_not_wait_as_those_of_an_earlier_one(
    begun: tuple[Prewarming, BatchJob], hosts: FakeHosts
) -> None:
    warm, now = cluster.CLUSTER_SESSION.warm, time.monotonic()
    with cluster.CLUSTER_SESSION.kept_warm(1.0):
        warm.clock = lambda: now + 1000.0
        warm.tidy()
        assert not hosts.ended


def test_a_process_that_is_told_to_end_can_end_its_engines(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with prewarm_allowed() as found:
            found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"sampling": {"choice": ["a", "b"], "max_tokens": 4}},
        {"output": {"uri": "", "probabilities": True}},
        {"engine": {"model": "demo", "device": "cpu", "max_num_seqs": 64, "env": {"A": "1"}}},
        {"engine": {"model": "demo", "device": "cpu", "order": "run"}},
        {"limits": {"hang_seconds": 9}},
    ],
    ids=lambda groups: next(iter(groups), "plain"),
)
def test_what_is_started_is_what_the_planned_run_starts(
    groups: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if "output" in groups:
        groups = {**groups, "sampling": {"choice": ["a", "b"]}}
        groups["output"] = {**groups["output"], "uri": str(tmp_path / "job/out")}
    job = csv_job(tmp_path / "job", **groups)
    resolved = resolve(job)
    asked = compile_job(resolved.job)
    found = plan_prewarm(asked, resolved.with_adapters(), CPUS, prewarm.guessed(asked.read, False))
    run = plan_run(job, "key")
    ledger = Ledger(open_store(run.uri))
    plan = ledger.load_plan()
    assert plan is not None and isinstance(found, prewarm.PrewarmPlan), found
    spec = compile_planned(job, plan)
    size = sized.for_attempt(spec.sizes, plan, CPUS)
    assert found.kind == warm_kind_of(spec, plan.model, size)
    assert found.engines == size.pool.fewest


def test_a_run_that_is_there_first_starts_its_own(
    ray: FakeRay, hosts: FakeHosts, tmp_path: Path
) -> None:
    gate, pinned = held_model()
    with prewarm_allowed() as found:
        found.begin(compile_job(csv_job(tmp_path / "job")), pinned)
        assert found.settle(None, 1) == prewarm.PrewarmedEngines()
        gate.set()
    assert not hosts.made and not ray.made


def test_a_cluster_that_does_not_answer_is_the_runs_to_tell_of(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(address: str | None, cpus: int, access: ClusterAccess) -> None:
        raise InsufficientResources("no room")

    monkeypatch.setattr(ray, "start", away)
    with prewarm_allowed() as found:
        found.begin(compile_job(csv_job(tmp_path / "job")), lambda: MODEL)
        assert found.thread is not None
        found.thread.join(60)
        with (
            pytest.raises(InsufficientResources),
            cluster.CLUSTER_SESSION.joined(Tenant("a"), None, 2),
        ):
            pytest.fail("it was joined")


def named(thread: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == thread]


# --- with Ray -------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 2)
    monkeypatch.setattr(prewarm, "WORTH_BYTES", 0)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def has_begun(folder: Path) -> bool:
    """Whether an engine has noted its start: the file is there before its line is."""
    path = folder / "notes"
    return path.exists() and path.read_text().endswith("\n")


def noted(folder: Path, **engine: Any) -> BatchJob:
    env = {"ENGINE_NOTES": str(folder / "notes")}
    given = {"model": "demo", "device": "cpu", "max_model_len": 256, "env": env}
    return csv_job(folder, engine={**given, **engine})


def slow_copy(monkeypatch: pytest.MonkeyPatch, until: Path) -> list[float]:
    """The copy goes on until an engine has noted its start; when it was over."""
    copy, over = source.snapshot, list[float]()

    def slow(*given: Any) -> Any:
        made = copy(*given)
        wait_for(until.exists, ENGINE_THERE)
        over.append(time.time())
        return made

    monkeypatch.setattr(source, "snapshot", slow)
    return over


@pytest.mark.whole
def test_the_engine_starts_before_the_copy_is_over_and_nothing_else_changes(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = csv_job(tmp_path / "plain")
    with monkeypatch.context() as patch:
        instead_of_ray(patch)
        run = plan_run(plain, "key")
        infer_run(plain, run, engine=FakeEngine)
        finalize_run(plain, run)
    job = noted(tmp_path / "early")
    over = slow_copy(monkeypatch, tmp_path / "early/notes")
    with prewarm_allowed(NotedEngine):
        began = plan_run(job, "key")
        progress = infer_run(job, began, engine=NotedEngine)
    report = finalize_run(job, began)
    (start, *later) = notes(tmp_path / "early")
    assert start["what"] == "started" and start["at"] < over[0]
    assert [note["what"] for note in later] == ["taken over"] and start["pid"] == later[0]["pid"]
    assert progress.tally.rows == ROWS and report.failed == (FAILS < ROWS)
    assert pq.read_table(f"{began.uri}/data").equals(pq.read_table(f"{run.uri}/data"))
    assert not cluster.is_joined() and not alive(start["pid"])


ON_A_CLUSTER = """
import json, os, sys, time
from pathlib import Path
from cluster.test_early import ROWS, noted
from helpers.engines import NotedEngine
from prefect_raybatch import source
from prefect_raybatch.cluster import prewarm, side_by_side
from prefect_raybatch.cluster.prewarm import prewarm_allowed
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.source import Source
from prefect_raybatch.api import finalize_run
from prefect_raybatch.api import infer_run
from prefect_raybatch.api import plan_run
from prefect_raybatch.source import cuts

prewarm.WORTH_BYTES = side_by_side.WORTH_A_START = side_by_side.WORTH_A_TASK = 0
cuts.CUT_BYTES = 700_000  # each file is a task
folder, copy = Path(sys.argv[1]), source.snapshot
job, many = noted(folder), folder / "many"
many.mkdir()
for number in range(12):
    ids = [*range(4 * number, 4 * number + 4), *range(1000, 31000)]
    lines = ["id,Company", *(f"{i},Company {i}" for i in ids)]
    (many / f"{number:02d}.csv").write_text(chr(10).join(lines))
read = Source(uri=str(many), filter="id < 1000", rows_per_shard=6)
job = job.model_copy(update={"source": read, "cluster": Cluster(address=sys.argv[2])})
over = []

def slowly(work, item):
    until = time.monotonic() + (3 if item[0] < 11 else 200)  # the last one waits for the engine
    while not (folder / "notes").exists() and time.monotonic() < until:
        time.sleep(0.1)
    return item[0], work(item[1])

def timed(*given):
    made = copy(*given)
    over.append(time.time())
    return made

def reached(cluster, size, reachable, real=side_by_side.copying_for):
    return real(cluster, size, True)  # the cluster is on this machine, whose disk it reads

source.snapshot, side_by_side._numbered, side_by_side.copying_for = timed, slowly, reached
with prewarm_allowed(NotedEngine):
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=NotedEngine)
assert finalize_run(job, run).good == progress.tally.rows - 1 == ROWS - 1
print("over", over[0])
"""


@pytest.mark.timeout(700)
@pytest.mark.whole
def test_a_copy_on_a_cluster_and_engines_that_start_beside_it_share_its_cpus(
    tmp_path: Path,
) -> None:
    """Two CPUs: one for the engine, one for the tasks that copy."""
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    with start_head(2, PYTHONPATH=paths) as head:
        env = {**os.environ, "PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled"}
        command = [sys.executable, "-c", ON_A_CLUSTER, str(tmp_path / "job"), head.address]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    start, *later = notes(tmp_path / "job")
    (over,) = (line for line in done.stdout.splitlines() if line.startswith("over "))
    assert start["at"] < float(over.split()[1]), done.stderr[-3000:]
    assert [note["what"] for note in later] == ["taken over"] and start["pid"] == later[0]["pid"]
    data = pq.read_table(tmp_path / "job/out/key/data").to_pylist()
    assert [row["id"] for row in data] == [n for n in range(ROWS) if n != FAILS]
    assert [row["response"] for row in data] == [f"answer {row['id']}" for row in data]


def test_a_copy_that_fails_ends_the_engine_and_says_why(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = noted(tmp_path / "job")

    def failing(*given: Any) -> Any:
        wait_for(lambda: has_begun(tmp_path / "job"), ENGINE_THERE)
        raise SourceError("in.csv, line 7: wrong")

    monkeypatch.setattr(source, "snapshot", failing)
    with pytest.raises(SourceError, match="line 7"), prewarm_allowed(NotedEngine):
        plan_run(job, "key")
    assert not cluster.is_joined()
    (start,) = notes(tmp_path / "job")
    wait_for(lambda: not alive(start["pid"]), 120)


@pytest.mark.whole
def test_engines_that_are_not_the_plans_end_and_others_start(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = noted(tmp_path / "job")
    slow_copy(monkeypatch, tmp_path / "job/notes")

    def guessed_wrongly(*given: Any) -> Any:
        plan = plan_prewarm(*given)
        assert isinstance(plan, prewarm.PrewarmPlan), plan
        return replace(plan, kind=replace(plan.kind, key="another"))

    monkeypatch.setattr(prewarm, "plan_prewarm", guessed_wrongly)
    with prewarm_allowed(NotedEngine):
        run = plan_run(job, "key")
        progress = infer_run(job, run, engine=NotedEngine)
    assert progress.tally.rows == ROWS
    first, second = notes(tmp_path / "job")
    assert first["what"] == second["what"] == "started" and first["pid"] != second["pid"]


ENDED = """
import os, sys, time
from pathlib import Path
from cluster.test_early import noted
from helpers.engines import NotedEngine
from prefect_raybatch import cpu_limit, source
from prefect_raybatch.cluster import prewarm
from prefect_raybatch.cluster.prewarm import prewarm_allowed
from prefect_raybatch.api import plan_run

prewarm.WORTH_BYTES = 0
cpu_limit.usable_cpus = lambda: 2
folder = Path(sys.argv[1])
source.snapshot = lambda *given: time.sleep(600)
with prewarm_allowed(NotedEngine):
    plan_run(noted(folder), "key")
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(one, marks=pytest.mark.nightly) for one in (signal.SIGINT, signal.SIGTERM)),
        signal.SIGKILL,
    ],
)
def test_no_engine_outlives_a_process_that_ends_while_it_copies(
    number: signal.Signals, tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    command = [sys.executable, "-c", ENDED, str(tmp_path / "job")]
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        try:
            wait_for(lambda: has_begun(tmp_path / "job"), ENGINE_THERE)
            (start,) = notes(tmp_path / "job")
            process.send_signal(number)
            assert process.wait(120) != 0
            wait_for(lambda: not alive(start["pid"]), 120)
        finally:
            process.kill()


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
