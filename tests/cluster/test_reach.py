"""Addresses where no Ray cluster answers: a word within seconds, where Ray waits for minutes."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpack
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from helpers.small import input_rows, job_dict, make_job, small_run

from prefect_raybatch import bounded
from prefect_raybatch.api import precheck
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import pipeline as passes
from prefect_raybatch.cluster import ray_process, reach
from prefect_raybatch.cluster.sharing import Tenant
from prefect_raybatch.compile.job import cluster_spec, compile_job
from prefect_raybatch.errors import ClusterUnavailable, ConfigError, InsufficientResources
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.ledger.records import Receipt

# What Ray's GCS and an HTTP/2 proxy without a head behind it were seen to answer.
SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00"
GCS = SETTINGS + b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88"
PROXY = SETTINGS + b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x8d"


@contextmanager
def answering(*parts: bytes) -> Iterator[str]:
    """The address of somebody who answers each connection with these bytes, then waits."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            kept = []
            while True:
                try:
                    line, _ = listening.accept()
                    kept.append(line)
                    for part in parts:
                        line.sendall(part)
                        time.sleep(0.05)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_head_that_answers_is_reached() -> None:
    with answering(GCS) as address:
        reach.check_reachable(address)
    with answering(GCS[:7], GCS[7:20], GCS[20:]) as address:
        reach.check_reachable(address)


@pytest.mark.parametrize("parts", [(), (PROXY,), (b"HTTP/1.1 400 Bad Request\r\n\r\n",)])
def test_somebody_who_listens_is_no_head(parts: tuple[bytes, ...]) -> None:
    with (
        answering(*parts) as address,
        pytest.raises(ClusterUnavailable, match="is not a Ray head") as found,
    ):
        reach.check_reachable(address)
    assert address in str(found.value) and reach.REACH_SECONDS < 5


def test_where_nobody_listens_is_one_line_that_names_the_address() -> None:
    address = closed_address()
    with pytest.raises(ClusterUnavailable) as found:
        reach.check_reachable(address)
    text = str(found.value)
    assert text.startswith(f"no Ray cluster answers at {address}: Connection refused. Start it")
    assert "\n" not in text and found.value.transient


def test_a_name_that_is_looked_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "REACH_SECONDS", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: gate.wait(60))
    with pytest.raises(ClusterUnavailable, match=r"head:6379: no answer within 0\.1 s"):
        reach.check_reachable("head:6379")
    gate.set()


def test_auto_where_no_cluster_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", none)
    with pytest.raises(ClusterUnavailable, match="at auto: none was started on this machine"):
        reach.check_reachable("auto")
    address = closed_address()
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", lambda _: address)
    with pytest.raises(ClusterUnavailable, match=f"at auto: {address}: Connection refused"):
        reach.check_reachable("auto")


def test_ray_is_not_asked_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray would wait for minutes")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", never)
    job = make_job(cluster={"address": closed_address()})
    with (
        pytest.raises(InsufficientResources, match="Connection refused"),
        cluster.connected(cluster_spec(job), Tenant("nightly")),
    ):
        pass


def nothing_but_the_attempt(folder: Path) -> None:
    """Check that the run directory holds no plan, only how the attempt went, if anything."""
    files = {path.name for path in (folder / "out").rglob("*") if path.is_file()}
    assert files <= {"last_attempt.json"}


def test_a_run_ends_with_a_line_before_prefect_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "prefect_raybatch.cli.drive.run_flow", lambda *_: pytest.fail("a flow was started")
    )
    pq.write_table(input_rows(0, 5), tmp_path / "in.parquet")
    address = closed_address()
    job = job_dict(
        source={"uri": str(tmp_path / "in.parquet")},
        engine={"model": "demo"},
        cluster={"address": address},
        output={"uri": str(tmp_path / "out")},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(tmp_path / "job.yaml"), "--run-key", "k"])
    said = capsys.readouterr().err
    assert ended.value.code == 75 and address in said and "ClusterUnavailable" in said
    nothing_but_the_attempt(tmp_path)


@pytest.mark.parametrize("blocks", [{}, {"credentials_block": "s3-credentials/keys"}])
def test_a_prefect_server_that_is_away_is_one_line(
    blocks: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pq.write_table(input_rows(0, 5), tmp_path / "in.parquet")
    job = job_dict(
        source={"uri": str(tmp_path / "in.parquet"), **blocks},
        engine={"model": "demo"},
        output={"uri": str(tmp_path / "out")},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    url = f"http://{closed_address()}/api"
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(SystemExit) as ended:
        cli.main(["run", str(tmp_path / "job.yaml"), "--run-key", "k"])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 75 and f"no Prefect API answers at {url}" in said
    assert "prefect server start" in said and "--no-prefect" in said
    assert "Traceback" not in said
    nothing_but_the_attempt(tmp_path)


def test_reconciling_needs_an_api_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = f"http://{closed_address()}/api"
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(SystemExit) as ended:
        cli.main(["reconcile", "http://127.0.0.1:1"])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 75 and f"no Prefect API answers at {url}" in said


def test_a_call_without_a_limit_is_cut_off() -> None:
    assert bounded.within(60, lambda: 7) == 7
    assert bounded.within(60, lambda: None) is None
    setting: ContextVar[str] = ContextVar("setting", default="none")
    setting.set("the caller's")
    assert bounded.within(60, setting.get) == "the caller's"
    with pytest.raises(ZeroDivisionError):
        bounded.within(60, lambda: 1 // 0)
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        bounded.within(0.05, lambda: gate.wait(60))
    gate.set()


@pytest.mark.parametrize("hangs", ["before", "after"])
def test_a_head_that_hangs_holds_up_no_pass_and_blames_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr(passes, "ANSWER", 0.2)
    gate, went_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[Any]:
        gate.wait(300)
        went_on.set()
        return []

    def built(units: Any, isolated: bool) -> Any:
        if hangs == "after":
            monkeypatch.setattr("ray.nodes", hang)
            monkeypatch.setattr(passes, "forget_starts", hang)

    run = small_run(tmp_path)
    size: Any = None
    pipeline = passes.Pipeline(compile_job(run.job), run.plan, run.shards, run.store, "a", size, {})
    died = Receipt.of_lost(run.whole(0), "a", Loss(ENGINE_DIED, "killed"))
    monkeypatch.setattr("ray.nodes", hang if hangs == "before" else list)
    monkeypatch.setattr(passes, "forget_starts", hang if hangs == "before" else len)
    monkeypatch.setattr(pipeline, "dataset_of", built)
    monkeypatch.setattr(passes, "receipts_in", lambda dataset: iter([died]))
    told, unheard = pipeline([run.whole(0), run.whole(1)], False)
    pipeline.forget()
    assert not went_on.is_set()
    assert told is died and unheard.unit == run.whole(1)
    assert unheard.lost is not None and not unheard.lost.may_be_caused_by_row
    assert "Ray's head does not answer" in unheard.lost.message
    gate.set()
    assert went_on.wait(60)


def test_a_head_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ray.shutdown` was seen to wait for a GCS and for a raylet that are stopped."""
    gate, kept = threading.Event(), list[Any]()
    monkeypatch.setattr(ray_process, "END_SECONDS", 0.2)
    monkeypatch.setattr("ray.shutdown", lambda: gate.wait(300))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.init", lambda **options: kept.append(options))
    monkeypatch.setattr("atexit.unregister", kept.append)
    ours = ray_process.RayProcess()
    ours.end()
    assert kept == [ray.shutdown]
    assert not ours.joined(), "a run would work in a cluster that is half left"
    with pytest.raises(ClusterUnavailable, match="cannot leave the Ray cluster of an earlier run"):
        ours.start(None, 1, ClusterAccess())
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "raybatch-bounded":
            thread.join(60)
    assert ours.joined()
    ours.start(None, 1, ClusterAccess())
    assert kept[1]["address"] == "local"


def test_a_job_server_is_not_taken_for_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect_raybatch.storage import open_store

    monkeypatch.setenv("RAY_ADDRESS", closed_address())  # the job server's own word is asked later
    pq.write_table(input_rows(0, 5), tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet")},
        engine={"model": "demo"},
        cluster={"job_server": "http://head:8265"},
        output={"uri": str(tmp_path / "out")},
    )
    precheck(job, open_store(str(tmp_path / "out/k")))


REFUSED = SETTINGS + (
    b"\x00\x00\x7d\x01\x05\x00\x00\x00\x01\x88@\x0ccontent-type\x10application/grpc"
    b"\x00\x0bgrpc-status\x0216\x00\x0cgrpc-message>InvalidAuthToken: Authentication token is"
    b" missing or incorrect"
)


def test_a_token_that_is_missing_is_told_from_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with answering(REFUSED) as address:
        here, blocks = ClusterAccess(address), ClusterAccess(address, block="ray-cluster/gpus")
        told = {
            "none": reach.token_refusal(address, here),
            "none in the block": reach.token_refusal(address, blocks),
            "of the block": reach.token_refusal(address, replace(blocks, token="t" * 300)),
        }
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
        told["of the environment"] = reach.token_refusal(address, here)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert reach.token_refusal(address, here) == told["none"]
        with pytest.raises(ConfigError) as found:
            reach.check_reachable(address, blocks)
    assert all(told.values())
    assert str(found.value) == str(told["none in the block"]) and "\n" not in str(found.value)
    assert str(told["none"]).startswith(f"the Ray cluster at {address} requires Ray's token")
    assert "name that in cluster.block" in str(told["none"])
    assert "token of the block ray-cluster/gpus" in str(told["none in the block"])
    assert "rejects Ray's token from the block ray-cluster/gpus" in str(told["of the block"])
    assert "rejects Ray's token from this environment" in str(told["of the environment"])
    with answering(GCS) as address:  # no token is wanted there
        assert reach.token_refusal(address, ClusterAccess(address)) is None


def test_a_long_token_is_sent_as_it_is() -> None:
    """One that a cloud signs has a thousand characters."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        got: list[bytes] = []

        def take() -> None:
            with listening.accept()[0] as line:
                line.settimeout(10)
                got.append(b"")
                while b"t" * 1200 not in got[0]:
                    got[0] += line.recv(4096)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert reach.token_refusal(address, ClusterAccess(address, token="t" * 1200)) is None
        thread.join(60)
    frame = got[0][got[0].index(b"\r\n\r\nSM\r\n\r\n") + 10 + 9 :]
    headers = dict(hpack.Decoder().decode(frame[9 : 9 + int.from_bytes(frame[:3])]))
    assert headers["authorization"] == "Bearer " + "t" * 1200
    assert headers[":path"].endswith("/CheckAlive")


@pytest.mark.parametrize(
    ("variable", "length", "remedy"),
    [("TMPDIR", 41, "RAY_TMPDIR"), ("RAY_TMPDIR", 41, "RAY_TMPDIR"), ("TMPDIR", 72, "TMPDIR")],
)
def test_a_long_folder_for_temporary_files_is_told_before_anything_starts(
    variable: str, length: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's sockets allow 39 bytes, those of vLLM 70 where Ray has a folder of its own."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    if length > 70:
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    folder = "/tmp/" + "x" * (length - 5)
    Path(folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked up once a process
    monkeypatch.setenv(variable, folder)
    try:
        with pytest.raises(ConfigError, match=rf"{variable}={folder} .* Set {remedy} to"):
            reach.check_temp_folder()
        monkeypatch.setenv(variable, "/tmp")
        monkeypatch.setattr(tempfile, "tempdir", None)
        reach.check_temp_folder()
    finally:
        Path(folder).rmdir()
