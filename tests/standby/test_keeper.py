"""The keeper of a standing cluster, with a made-up cluster and real sockets."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import called
from helpers.hosts import FakeHosts

from prefect_raybatch.cluster.ray_process import RayProcess
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import WarmEngines, WarmKind
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.stages.engine import EngineStage
from prefect_raybatch.standby import claim
from prefect_raybatch.standby.claim import (
    StandingEngine,
    claim_cluster,
    standing_clusters,
    stop_clusters,
)
from prefect_raybatch.standby.keeper import KEEPER_CLUSTER, Keeper

ENGINE = StandingEngine("demo", {"CPU": 1.0}, True)
WAIT = 60.0


class FakeCluster:
    """A cluster with `left` engines; `fails` to start with that message, if any."""

    def __init__(self) -> None:
        self.left, self.fails, self.breaks = [ENGINE], "", False
        self.asked: list[bool] = []  # whether a command used it
        self.up = threading.Event()
        self.may_start = threading.Event()
        self.ended, self.may_end = threading.Event(), threading.Event()
        self.may_start.set()
        self.may_end.set()

    def start(self, cpus: int) -> str:
        if self.fails:
            raise RuntimeError(self.fails)
        assert self.may_start.wait(WAIT)
        self.up.set()
        return "here:1"

    def engines(self, in_use: bool) -> list[StandingEngine]:
        self.asked.append(in_use)
        if self.breaks:
            raise ValueError("the engine has ended")
        return self.left

    def end(self) -> None:
        assert self.may_end.wait(WAIT)
        self.ended.set()


@pytest.fixture
def folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder for temporary files, with a path that is short enough for sockets."""
    tmp_path_factory.getbasetemp()  # pytest's own lies elsewhere, for the tests that come later
    with tempfile.TemporaryDirectory(prefix="rb", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


Start = Callable[..., FakeCluster]


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes commands start keepers with these clusters, in threads of the test."""
    threads: list[threading.Thread] = []
    clusters: list[FakeCluster] = []

    def popen(command: list[str], pass_fds: list[int], **_: Any) -> None:
        descriptor, cpus, digest, seconds = command[-4:]
        listener = socket.socket(fileno=os.dup(int(descriptor)))
        kept = clusters.pop(0)
        keeper = Keeper(listener, kept, int(cpus), digest, float(seconds))
        threads.append(threading.Thread(target=keeper.serve, daemon=True))
        threads[-1].start()

    monkeypatch.setattr(claim.subprocess, "Popen", popen)

    def add(**fields: Any) -> FakeCluster:
        clusters.append(FakeCluster())
        for name, value in fields.items():
            setattr(clusters[-1], name, value)
        return clusters[-1]

    yield add
    stop_clusters()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def claimed(cpus: int = 2, seconds: float = 600.0) -> claim.Claim:
    found = claim_cluster(cpus, seconds)
    assert found is not None and found.address() == "here:1"
    return found


def test_a_cluster_serves_one_command_at_a_time(start: Start) -> None:
    kept = start()
    first = claimed()
    assert claim_cluster(2, 600.0) is None
    (found,) = standing_clusters()
    assert found.used_by == os.getpid() and found.engines == (ENGINE,)
    assert stop_clusters() == (0, [os.getpid()]), "a command that works is not disturbed"
    first.close()
    claimed().close()
    assert standing_clusters()[0].used_by is None and not kept.ended.is_set()
    assert stop_clusters() == (1, [])
    assert kept.ended.is_set() and standing_clusters() == []


def test_a_command_waits_for_a_cluster_that_starts_for_another_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = start()
    kept.may_start.clear()
    first = claim_cluster(2, 600.0)
    waits: list[float | None] = []
    receive = claim.KeeperConnection.receive

    def noted(connection: claim.KeeperConnection, seconds: float | None) -> Any:
        waits.append(seconds)
        kept.may_start.set()
        return receive(connection, seconds)

    monkeypatch.setattr(claim.KeeperConnection, "receive", noted)
    assert claim_cluster(2, 600.0) is None, "the first command uses it"
    assert waits[0] == claim.KEEPER_START, "Ray may take long to start"
    assert first is not None and first.address() == "here:1"
    first.close()


def test_a_cluster_that_starts_too_slowly_for_another_command_stays_within_reach(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = start()
    kept.may_start.clear()
    first = claim_cluster(2, 600.0)
    with monkeypatch.context() as patch:
        patch.setattr(claim, "KEEPER_START", 0.01)
        assert claim_cluster(2, 600.0) is None
    kept.may_start.set()
    assert first is not None and first.address() == "here:1"
    first.close()
    claimed().close()


def test_a_process_with_thousands_of_open_files_keeps_a_cluster(start: Start) -> None:
    with ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        start()
        claimed().close()
        claimed().close()
        assert standing_clusters()[0].used_by is None


def test_listing_engines_does_not_disturb_the_command_that_uses_them(start: Start) -> None:
    kept = start(breaks=True)
    held = claimed()
    (found,) = standing_clusters()
    assert found.used_by == os.getpid() and found.engines == ()
    assert kept.asked == [True] and not kept.ended.is_set(), "a silent one may be starting"
    held.close()
    assert kept.ended.wait(WAIT)


@pytest.mark.parametrize("change", ["environment", "folder", "cpus"])
def test_a_command_that_differs_gets_a_new_cluster(
    change: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = start(), start()
    claimed().close()
    if change == "environment":
        monkeypatch.setenv("HF_TOKEN", "another")
    elif change == "folder":
        monkeypatch.chdir(tmp_path)
    other = claimed(cpus=3 if change == "cpus" else 2)
    assert old.ended.is_set() and not new.ended.is_set()
    other.close()


def test_another_terminal_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    before = claim.command_digest()
    monkeypatch.setenv("COLUMNS", "33")
    assert claim.command_digest() == before


def test_a_cluster_ends_without_engines_or_when_idle(start: Start) -> None:
    empty, idle = start(left=[]), start()
    claimed().close()
    assert empty.ended.wait(WAIT)
    claimed(seconds=0.0).close()
    assert idle.ended.wait(WAIT)


def test_a_new_cluster_waits_for_the_end_of_the_one_before(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two engines would be on a GPU that has room for one."""
    old, new = start(left=[]), start()
    old.may_end.clear()
    claimed().close()  # it has no engines, so it ends
    found: list[claim.Claim] = []
    later = threading.Thread(target=lambda: found.append(claimed()))
    waits = threading.Event()
    flock = fcntl.flock

    def locks(file: Any, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{file.fileno()}").endswith(KEEPER_CLUSTER):
            waits.set()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", locks)
    later.start()
    assert waits.wait(WAIT)
    assert not new.up.is_set() and not old.ended.is_set()
    old.may_end.set()
    later.join(WAIT)
    assert old.ended.is_set() and new.up.is_set()
    found[0].close()


def test_a_cluster_that_does_not_start_leaves_the_command_its_own(start: Start) -> None:
    start(fails="no room")
    found = claim_cluster(2, 600.0)
    assert found is not None and found.address() is None
    found.close()


def test_a_keeper_survives_what_is_no_request(start: Start, folder: Path) -> None:
    start()
    claimed().close()
    (path,) = folder.glob("*/keeper.socket")
    for message in (b"", b"[", b"[1]", b'"use"', b"{}"):
        with socket.socket(socket.AF_UNIX) as found:
            found.connect(str(path))
            found.sendall(message)
    assert len(standing_clusters()) == 1


def test_a_socket_of_a_killed_keeper_is_replaced(start: Start, folder: Path) -> None:
    start()
    claimed().close()
    stop_clusters()
    (path,) = folder.glob("*/keeper.socket")
    assert path.exists()
    start()
    claimed().close()


def test_the_commands_list_and_stop_them(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no engine waits" in called(capsys, "engines")[1]
    start()
    held = claimed()
    code, out, _ = called(capsys, "engines")
    assert code == 0 and "demo" in out and f"used by process {os.getpid()}" in out
    code, _, err = called(capsys, "engines", "stop")
    assert code == 1 and str(os.getpid()) in err
    held.close()
    assert "ends in" in called(capsys, "engines")[1]
    assert called(capsys, "engines", "stop")[0] == 0
    assert called(capsys, "engines", "--json")[1].strip() == "[]"


def test_a_cluster_that_is_gone_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("ray.init", lambda **given: options.append(given))
    process = RayProcess()
    process.standing = lambda: closed
    with socket.socket() as unheard:  # bound, and nobody listens
        unheard.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unheard.getsockname()[1]}"
        process.start(None, 2, ClusterAccess())
    assert (options[0]["address"], options[0]["num_cpus"]) == ("local", 2)
    assert not process.is_standing


# --- engines of earlier commands ------------------------------------------------------------------

KIND = WarmKind("a", EngineStage, {}, 8, {"CPU": 1.0})
OTHER = replace(KIND, key="b")


class Joining:
    """A cluster that earlier commands left."""

    def __init__(self, hosts: FakeHosts):
        self.hosts, self.there = hosts, False

    def joined(self) -> bool:
        return self.there

    def start(self, *_: object) -> None:
        self.there = True

    def end(self) -> None:
        self.there = False

    def free(self) -> dict[str, float]:
        return self.hosts.free


def test_a_run_takes_the_engines_that_earlier_commands_left() -> None:
    hosts = FakeHosts(cpus=2.0)
    hosts.left = [(KIND, hosts.make(KIND)), (OTHER, hosts.make(OTHER))]
    shared = ClusterSession(Joining(hosts), WarmEngines(hosts), sleep=lambda _: None)
    user, total = Tenant("run"), {"CPU": 2.0}
    with shared.kept_warm(600.0):
        with shared.joined(user, None, 2):
            with shared.admitted(user, {"CPU": 1.0}, total, KIND, 1) as lease:
                assert lease is not None and lease.engines(1) == [0]
            assert not hosts.ended
            with shared.admitted(user, {"CPU": 2.0}, total, None):
                assert [host for host, _ in hosts.ended] == [1, 0], "they make room"
        shared.warm.forget()
