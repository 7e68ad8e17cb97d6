"""Engines that outlast their run: leases, room for others, the cluster that is kept for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from helpers.engine_stage import block, lost_rows
from helpers.heard import wait_for
from helpers.hosts import FakeHosts, Handle, calls_in_process
from helpers.small import MODEL
from ray.exceptions import ActorUnavailableError

from prefect_raybatch import warm_engines
from prefect_raybatch.cluster import warm_actors
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import WarmEngines, WarmKind
from prefect_raybatch.cluster.warm_actors import Deaths, EngineHost, Forwarder, warm_kind
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.adapted import Adapted
from prefect_raybatch.stages.block import is_lost, losses
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage

MOST = Deaths(starting=4, in_a_row=8)
KIND = WarmKind("a", EngineStage, {}, 8, {"CPU": 1.0, "GPU": 1.0})
OTHER = replace(KIND, key="b")


class FakeRay:
    """A cluster with what the hosts leave of it; notes its starts and ends."""

    def __init__(self, hosts: FakeHosts, there: bool = False):
        self.hosts, self.there = hosts, there
        self.made: list[Any] = []

    def joined(self) -> bool:
        return self.there

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        self.there = True
        self.made.append((address, cpus))

    def end(self) -> None:
        self.there = False
        self.made.append("end")

    def free(self) -> dict[str, float]:
        return self.hosts.free


@pytest.fixture
def hosts() -> FakeHosts:
    return FakeHosts(cpus=4.0, gpus=2.0)


@pytest.fixture
def warm(hosts: FakeHosts) -> WarmEngines:
    return WarmEngines(hosts)


def used(warm: WarmEngines, kind: WarmKind, count: int = 1, most: int = 2) -> list[Any]:
    """What a run of one pass with so many engines gets."""
    with warm.lease(kind, most) as lease:
        assert lease is not None
        return lease.engines(count)


# --- leases ---------------------------------------------------------------------------------------


def test_engines_go_from_run_to_run_until_nobody_keeps_them(
    warm: WarmEngines, hosts: FakeHosts
) -> None:
    warm.keep()
    assert used(warm, KIND, 2) == used(warm, KIND, 2) == [0, 1]
    assert used(warm, OTHER) == [2], "an engine of another kind is no stand-in"
    assert used(warm, KIND, 1, most=1) == [0]
    assert not hosts.ended
    warm.drop()
    assert sorted(hosts.ended) == [(0, True), (1, True), (2, True)]
    with warm.lease(KIND, 2) as lease:
        assert lease is None, "nobody keeps engines"


def test_two_runs_at_once_have_engines_of_their_own(warm: WarmEngines, hosts: FakeHosts) -> None:
    warm.keep()
    with warm.lease(KIND, 1) as one, warm.lease(KIND, 1) as two:
        assert one is not None and two is not None
        assert one.engines(1) == [0] and two.engines(1) == [1]
        assert one.holds == {"CPU": 1.0, "GPU": 1.0}
        warm.drop()
        assert not hosts.ended, "what is in use ends with its run"
    assert sorted(hosts.ended) == [(0, True), (1, True)]


def test_an_engine_with_something_left_in_it_is_no_runs_heir(
    warm: WarmEngines, hosts: FakeHosts
) -> None:
    warm.keep()
    with warm.lease(KIND, 2) as lease:
        assert lease is not None and lease.engines(2) == [0, 1]
        hosts.busy = {0}  # or dead
        assert lease.engines(2) == [1, 2], "the next pass has another in its place"
        hosts.busy = {1}  # as a run leaves it that was stopped
    assert hosts.ended == [(0, False), (1, False)]
    assert used(warm, KIND) == [2]


def test_a_kind_that_cannot_be_kept_is_started_as_ever(warm: WarmEngines) -> None:
    warm.keep()
    with warm.lease(None, 2) as lease:
        assert lease is None


def test_engines_whose_node_leaves_end_and_no_run_gets_them(
    warm: WarmEngines, hosts: FakeHosts
) -> None:
    warm.keep()
    used(warm, KIND, 2)
    hosts.going = {1}
    warm.tidy()
    assert hosts.ended == [(1, True)]
    hosts.going = {0}
    assert used(warm, KIND) == [2], "of a notice that came since"
    with warm.lease(KIND, 2) as lease:
        assert lease is not None and lease.engines(1) == [2]
        hosts.going = {2}
    assert [host for host, _ in hosts.ended] == [1, 0, 2], "nor does one wait there for the next"


def test_a_run_is_told_why_the_engine_that_is_up_is_not_its_own(
    warm: WarmEngines, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = (
        replace(KIND, key=str(length), arguments={"max_model_len": length, "seed": 0})
        for length in (512, 576)
    )
    warm.keep()
    with caplog.at_level("INFO"):
        used(warm, short)
        used(warm, replace(OTHER, base="another model", arguments=long.arguments))
        assert "cannot be reused" not in caplog.text
        used(warm, long)
    assert "it has max_model_len 512, not 576. To share engines" in caplog.text


def test_the_engine_that_waited_longest_makes_room_and_no_more_than_needed(
    warm: WarmEngines, hosts: FakeHosts
) -> None:
    warm.keep()
    used(warm, KIND)
    used(warm, OTHER)
    assert not warm.make_room({"CPU": 0.0, "GPU": -1.0})
    assert warm.make_room({"CPU": 0.5, "GPU": 0.5})
    assert hosts.ended == [(0, True)]
    assert not warm.make_room({"memory": 1.0}), "none holds any"
    assert used(warm, OTHER) == [1]


def test_engines_that_wait_too_long_go(hosts: FakeHosts) -> None:
    now = [0.0]
    warm = WarmEngines(hosts, lambda: now[0])
    warm.keep(100.0)
    warm.keep(30.0)
    used(warm, KIND)
    now[0] = 60.0
    warm.tidy()
    assert not hosts.ended, "one of those who keep them wants them for longer"
    warm.drop(100.0)
    warm.tidy()
    assert hosts.ended == [(0, True)]
    warm.drop(30.0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_to_wait_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"warm_engines\(idle_seconds=.*above 0"):
        warm_engines(seconds).__enter__()


# --- the cluster ----------------------------------------------------------------------------------


@pytest.fixture
def ray(hosts: FakeHosts) -> FakeRay:
    return FakeRay(hosts)


@pytest.fixture
def shared(ray: FakeRay, warm: WarmEngines) -> ClusterSession:
    return ClusterSession(ray, warm, sleep=lambda _: None)


def run_on(
    shared: ClusterSession, kind: WarmKind | None = KIND, cpus: int = 4, address: str | None = None
) -> list[Any]:
    """A run of one pass with an engine that takes a CPU and a GPU; the engine that it had."""
    user = Tenant("run")
    needs = {"CPU": 2.0, "GPU": 1.0}
    with (
        shared.joined(user, address, cpus),
        shared.admitted(user, needs, {"CPU": 4.0, "GPU": 2.0}, kind, 1) as lease,
    ):
        return [] if lease is None else lease.engines(1)


def test_the_cluster_is_started_once_for_all_runs_of_the_block(
    shared: ClusterSession, ray: FakeRay, hosts: FakeHosts
) -> None:
    assert run_on(shared) == [] and ray.made == [(None, 4), "end"]
    with shared.kept_warm():
        assert run_on(shared) == run_on(shared) == [0]
        assert ray.made[2:] == [(None, 4)]
        with shared.kept_warm():
            pass
        assert run_on(shared) == [0]
    assert ray.made[3:] == ["end"] and hosts.ended == [(0, True)]


def test_a_run_of_another_kind_gets_the_room_of_engines_that_wait(
    shared: ClusterSession, hosts: FakeHosts
) -> None:
    with shared.kept_warm():
        assert run_on(shared) == [0]
        assert run_on(shared, OTHER) == [1] and not hosts.ended, "there is room for both"
        third = replace(KIND, key="c")
        assert run_on(shared, third) == [2]
        assert hosts.ended == [(0, True)]
        assert run_on(shared, OTHER) == [1]
        assert run_on(shared, None) == [] and hosts.ended[1:] == [(2, True)]


@pytest.mark.parametrize(("cpus", "address"), [(6, None), (4, "elsewhere:6379")])
def test_a_run_that_the_kept_cluster_does_not_suit_gets_another(
    shared: ClusterSession, ray: FakeRay, hosts: FakeHosts, cpus: int, address: str | None
) -> None:
    with shared.kept_warm():
        run_on(shared)
        assert run_on(shared, KIND, cpus, address) == [1]
        assert ray.made == [(None, 4), "end", (address, cpus)] and hosts.ended == [(0, True)]
    assert ray.made[3:] == ["end"]


def test_a_cluster_of_the_callers_own_is_kept_by_the_caller(
    shared: ClusterSession, ray: FakeRay, hosts: FakeHosts
) -> None:
    ray.there = True
    with shared.kept_warm():
        assert run_on(shared) == run_on(shared) == [0]
        assert run_on(shared, OTHER) == [1] and run_on(shared, replace(KIND, key="c")) == [2]
        assert hosts.ended == [(0, True)], "there, too, who waits makes room"
    assert ray.there and not ray.made and len(hosts.ended) == 3


def test_engines_of_a_cluster_that_its_owner_has_ended_are_forgotten(
    shared: ClusterSession, ray: FakeRay, hosts: FakeHosts
) -> None:
    with shared.kept_warm():
        run_on(shared)
        ray.there = False
        assert run_on(shared) == [1] and not hosts.ended
    assert hosts.ended == [(1, True)]


def test_the_block_ends_what_a_run_that_failed_has_left(
    shared: ClusterSession, ray: FakeRay, hosts: FakeHosts
) -> None:
    def failing() -> None:
        with (
            shared.kept_warm(),
            shared.joined(Tenant("run"), None, 4),
            shared.admitted(Tenant("run"), {}, {}, KIND, 1) as lease,
        ):
            assert lease is not None and lease.engines(1) == [0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert hosts.ended == [(0, True)] and ray.made == [(None, 4), "end"]


# --- what an engine is ----------------------------------------------------------------------------

SPEC = EngineLaunch(dict(MODEL), {"temperature": 0.0}, {"max_num_seqs": 8}, env={"A": "1"})


def kind_of(
    launch: EngineLaunch = SPEC, engine: type = EngineStage, **more: Any
) -> WarmKind | None:
    given = {"resources": {"num_cpus": 1, "num_gpus": 0.5}, "calls": 4, **more}
    return warm_kind(engine, launch, given["resources"], given["calls"])


def test_runs_that_ask_otherwise_share_an_engine() -> None:
    asks = replace(
        SPEC,
        sampling={"temperature": 1.0, "choice": ["a"]},
        attempt="other",
        done=lambda shard: True,
        sort=False,
        merge=False,
        labels=("a",),
        early_stop="decided",
        tell=lambda engine, marks: None,
    )
    kind = kind_of()
    assert kind is not None and kind == kind_of(asks) == kind_of(calls=9)
    assert kind.takes == {"CPU": 1.0, "GPU": 0.5} and kind.calls > 9


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**MODEL, "identity": "1" * 64}},
        {"arguments": {"max_num_seqs": 9}},
        {"env": {"A": "2"}},
        {"engines_per_gpu": 2},
        {"gpu_bytes": 1},
        {"share": {"gpu_memory_utilization": 0.5}},
        {"hang_seconds": 5.0},
        {"encodes": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_an_engine_is_started_with_tells_it_from_others(change: dict[str, Any]) -> None:
    assert kind_of(replace(SPEC, **change)) != kind_of()


def test_so_do_the_room_for_adapters_its_stage_and_what_it_holds() -> None:
    """Other adapters in the same room are told apart in the engine, by their numbers."""
    one, two = ({"a": {"source": "a", "revision": None, "identity": x}} for x in "12")
    room = replace(SPEC, arguments={**SPEC.arguments, "enable_lora": True, "max_loras": 1})
    adapted = [
        replace(room, model={**MODEL, "adapters": some}, adapted=Adapted("a", some))
        for some in (one, two)
    ]
    assert kind_of(adapted[0]) == kind_of(adapted[1])
    kinds = [kind_of(), kind_of(adapted[0]), kind_of(engine=EngineHost)]
    kinds += [kind_of(resources={"num_cpus": 2}), kind_of(calls=1000)]
    assert len({(kind.key, kind.calls) for kind in kinds if kind is not None}) == len(kinds)


def test_an_engine_with_a_state_of_the_users_or_with_objects_is_not_kept() -> None:
    mine = {"logits_processors": ["mine:Processor"]}
    assert kind_of(replace(SPEC, arguments=mine)) is None
    assert kind_of(replace(SPEC, arguments={"compilation_config": object()})) is None


# --- the actor that holds one ---------------------------------------------------------------------


class Stage:
    """Notes what is done to it; a block waits for `gate`."""

    gate: threading.Event | None = None

    def __init__(self, launch: EngineLaunch):
        self.specs, self.closed = [launch.attempt], False

    def take_over(self, launch: EngineLaunch) -> None:
        self.specs.append(launch.attempt)

    def close(self) -> None:
        self.closed = True

    def __call__(self, table: pa.Table) -> pa.Table:
        if self.gate is not None:
            assert self.gate.wait(60)
        return table.append_column("by", pa.array([self.specs[-1]] * table.num_rows))


TABLE = pa.table({"x": [1, 2]})


def begun(host: EngineHost, token: str, **spec: Any) -> Any:
    host.begin(token, replace(SPEC, attempt=token, **spec))
    return host.stage


def test_a_host_serves_one_pass_after_the_other_with_one_engine() -> None:
    host = EngineHost(Stage)
    assert host.answer("one", TABLE) is None, "its process is new and knows no pass"
    stage = begun(host, "one")
    assert begun(host, "one") is begun(host, "two") is stage and stage.specs == ["one", "two"]
    answer = host.answer("two", TABLE)
    assert answer is not None and answer["by"].to_pylist() == ["two", "two"]
    assert host.answer("one", TABLE) is None, "a pass that is over"
    host.close()
    assert stage.closed and host.answer("two", TABLE) is None


def test_blocks_of_a_run_that_was_stopped_do_not_work_beside_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Stage, "gate", gate)
    host = EngineHost(Stage)
    stage = begun(host, "one")
    inside = threading.Thread(target=host.answer, args=("one", TABLE), daemon=True)
    inside.start()
    wait_for(lambda: not host.is_idle())
    assert begun(host, "two") is not stage and stage.closed
    gate.set()
    inside.join(60)
    wait_for(host.is_idle)


def test_a_stage_that_cannot_be_passed_on_is_made_anew() -> None:
    class Plain:
        def __init__(self, launch: EngineLaunch):
            self.spec = launch

    host = EngineHost(Plain)
    assert begun(host, "one") is not begun(host, "two")


def test_each_forwarder_of_a_pass_takes_a_host_of_its_own() -> None:
    host = EngineHost(Stage)
    assert host.take("one", "a") and host.take("one", "a"), "its own, again after a death"
    assert not host.take("one", "b")
    assert host.take("two", "b"), "of the next pass"


def forwarding(hosts: list[Handle], made: list[Handle], leaving: bool = False) -> Forwarder:
    """The actor of a pass that sends blocks to these hosts; others are `made` from the list."""
    return Forwarder(
        SPEC, hosts, "one", KIND, lambda kind: made.pop(), lambda: leaving, MOST, restarts_of
    )


def restarts_of(handle: Handle) -> int:
    return getattr(handle.held, "restarts", 0)


class MortalHost(EngineHost):
    """Its process dies as often as `starting` says when it begins, and with each block that is in
    `kills`; then Ray has started it again."""

    def __init__(self, starting: int = 0, kills: Sequence[int] = ()) -> None:
        super().__init__(Stage)
        self.restarts, self.starting, self.kills = 2, starting, set(kills)

    def begin(self, token: str, launch: EngineLaunch) -> None:
        if self.starting:
            self.starting -= 1
            self.die()
        super().begin(token, launch)

    def answer(self, token: str, table: pa.Table) -> pa.Table | bool | None:
        if "n" in table.column_names and table["n"][0].as_py() in self.kills:
            self.die()
        return super().answer(token, table)

    def die(self) -> None:
        self.restarts += 1
        self.stage, self._ready = None, ""
        raise ActorUnavailableError("it died", actor_id=None)


def test_blocks_go_to_another_engine_where_the_node_of_theirs_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_in_process(monkeypatch)
    going: list[bool] = []
    old = Handle(EngineHost(Stage, lambda: bool(going)))
    new = Handle(EngineHost(Stage))
    forwarder = forwarding([old], [new])
    assert len(forwarder(TABLE)) == 2 and not new.held.stage
    stage = old.held.stage
    going.append(True)
    assert not old.held.is_idle() and old.held.is_on_drained_node()
    assert len(forwarder(TABLE)) == 2 and new.held.stage
    wait_for(lambda: old.killed)  # what it had begun is over: its node need not wait
    assert stage.closed and not new.killed
    assert forwarding([old, new], []).host is new, "one that takes its place"


@pytest.mark.parametrize(("deaths", "answered"), [(3, True), (4, False)])
def test_an_engine_that_dies_as_it_starts_is_waited_for_so_often(
    monkeypatch: pytest.MonkeyPatch, deaths: int, answered: bool
) -> None:
    calls_in_process(monkeypatch)
    monkeypatch.setattr(warm_actors, "REACH_AGAIN", 0.0)
    host = MortalHost(starting=deaths)
    made = forwarding([Handle(host)], [])(block(Unit(3, 0, 2)))
    if answered:
        assert len(made) == 2 and not is_lost(made)
    else:
        ((_, _, why, fatal),) = lost_rows(made)
        assert why.startswith("EngineStartDied: an engine's process died while starting, 4 times")
        assert not fatal


def test_an_engine_that_dies_at_work_is_given_up_where_it_answers_nothing_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_in_process(monkeypatch)
    host = MortalHost(kills=[*range(7), *range(10, 30)])
    forward = forwarding([Handle(host)], [])

    def kind(number: int) -> str:
        table = block(Unit(number, 0, 1)).append_column("n", pa.array([number]))
        made = forward(table)
        return losses(made)[0].kind if is_lost(made) else "answered"

    assert [kind(number) for number in range(7)] == ["EngineDied"] * 7
    assert [kind(number) for number in (8, 9)] == ["answered"] * 2
    assert [kind(number) for number in range(10, 18)] == ["EngineDied"] * 8
    assert kind(18) == kind(8) == "EnginesDied", "it is asked no more"


def test_an_actor_on_a_node_that_leaves_gives_its_blocks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_in_process(monkeypatch)
    old = Handle(EngineHost(Stage, lambda: True))
    (back,) = lost_rows(forwarding([old], [], leaving=True)(block(Unit(3, 0, 2))))
    assert back[:2] == (3, 0) and "node is being drained" in back[2] and not back[3]
