"""`raybatch doctor`: each check with a planted fault, and the command's output."""

from __future__ import annotations

import json
import os
import py_compile
import resource
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from helpers import environ
from helpers.findings import found, one
from helpers.nvidia import ABSENT, Card, show
from helpers.openai_server import openai_server
from helpers.ray_head import Head
from helpers.small import make_job
from helpers.web_server import served
from packaging.specifiers import SpecifierSet
from prefect.settings import PREFECT_API_URL, temporary_settings
from ray._private.utils import resolve_object_store_memory
from s3server import S3Server, proxy

from prefect_raybatch import cpu_limit, doctor, installed
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cluster.ray_process import WORKER_PYTHON
from prefect_raybatch.doctor import CheckContext, CheckResult, machine, places, services, stores
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.edits import with_endpoint_fields


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# --- versions -----------------------------------------------------------------------------------


def test_versions_are_compared_with_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    assert {f.mark for f in found(machine.check_versions).values()} == {"pass"}

    def version(name: str) -> str:
        if name == "s3fs":
            raise metadata.PackageNotFoundError(name)
        return {"ray": "2.9.0", "vllm": "0.1.0"}.get(name) or real(name)

    monkeypatch.setattr(machine.metadata, "version", version)
    got = found(machine.check_versions)
    assert got["ray"].mark == "fail" and "2.9.0, but" in got["ray"].found
    assert got["ray"].remedy.startswith("pip install 'ray")
    assert got["s3fs"].mark == "fail" and got["s3fs"].found == "not installed"
    assert got["vllm"].mark == "fail" and "[gpu]" in got["vllm"].remedy
    assert got["prefect"].mark == got["pyarrow"].mark == "pass"


def test_a_python_out_of_range_and_a_missing_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.ranges()[1]
    monkeypatch.setattr(machine, "ranges", lambda: (">=4", {**real, "ray": SpecifierSet()}))
    monkeypatch.setattr(installed, "ENGINE_EXTRAS", {"no-such-engine": "cpu"})
    got = found(machine.check_versions)
    assert got["python"].mark == "fail" and ">=4" in got["python"].found
    assert got["vllm"].mark == "warn" and got["ray"].mark == "pass"


def python_with(folder: Path, code: str) -> Path:
    """Return a program in place of the workers' Python: ours, with code that runs before."""
    program = folder / "python"
    start = f"import sys; {code}; exec(sys.argv.pop(1))"
    program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "{start}" "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("code", "mark", "told"),
    [
        ("pass", "pass", "the same versions"),
        ("sys.version_info = (3, 10)", "fail", "Python 3.10, here"),
        ("sys.argv.remove('ray')", "fail", "ray missing, here"),
        ("sys.exit(3)", "fail", "does not work"),
    ],
)
def test_the_environment_of_the_workers_is_compared(
    code: str, mark: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKER_PYTHON, str(python_with(tmp_path, code)))
    assert "vllm" not in found(machine.check_versions)
    got = found(machine.check_workers)
    assert got["workers"].mark == mark and told in got["workers"].found
    assert bool(got["workers"].remedy) is (mark == "fail")
    assert code == "sys.exit(3)" or got["vllm"].mark == "pass"


def test_the_environment_of_workers_on_other_machines_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(machine.check_workers) == {}
    monkeypatch.setenv(WORKER_PYTHON, "/only/on/the/nodes/python")
    assert found(machine.check_workers, make_job(cluster={"address": "head:6379"})) == {}
    assert found(machine.check_workers)["workers"].mark == "fail"


# --- GPUs and CPU -------------------------------------------------------------------------------


GPU = {"model": "demo", "device": "gpu"}


def test_cards_and_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, Card("L4", 23034), Card("L4", 23034, 20000))
    got = found(machine.check_gpus)
    assert got["GPU 0"].mark == "pass" and "22 GiB" in got["GPU 0"].found
    assert got["GPU 1"].mark == "warn" and "19.5 GiB in use" in got["GPU 1"].found


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert found(machine.check_gpus)["GPUs"].mark == "warn"
    got = one(machine.check_gpus, make_job(engine=GPU))
    assert got.mark == "fail" and "Driver Not Loaded" in got.found


def test_no_card_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, error=ABSENT)
    assert one(machine.check_gpus, make_job(engine=GPU)).mark == "fail"
    for place in ({"address": "head:6379"}, {"job_server": "http://head:8265"}):
        away = make_job(engine=GPU, cluster=place)  # the GPUs are elsewhere
        assert set(found(machine.check_gpus, away)) == {"CPU"}


@pytest.mark.parametrize(
    ("flags", "mark"),
    [("fpu avx2 avx512f", "pass"), ("fpu avx2", "warn"), ("fpu sse", "fail"), (None, "warn")],
)
def test_what_the_cpu_can_do(
    flags: str | None, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, error=ABSENT)
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"flags\t: {flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", info)
    assert one(machine.check_gpus).mark == mark
    in_float32 = one(machine.check_gpus, make_job(engine={"dtype": "float32"})).mark
    assert in_float32 == ("pass" if "avx2" in (flags or "") else mark)
    assert one(machine.check_gpus, make_job()).mark == in_float32  # as the bundled model is
    other = make_job(engine={"model": "owner/name"})
    assert one(machine.check_gpus, other).mark == mark


# --- the engine ---------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, no_cards: None) -> Callable[[str], CheckResult]:
    """What is found when this Python is in the place of an engine's process."""

    def ask(code: str, job: BatchJob | None = None) -> CheckResult:
        monkeypatch.setattr(machine, "FORWARD", [sys.executable, "-c", code])
        return one(machine.check_engine, job)

    return ask


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs and with vLLM for CPUs."""
    show(monkeypatch, error=ABSENT)
    monkeypatch.setattr(metadata, "version", lambda name: "0.29.0")


def test_an_engine_that_answers(answers: Callable[..., CheckResult]) -> None:
    assert answers("pass").mark == "pass"


@pytest.mark.parametrize(("number", "said"), [(4, "SIGILL: illegal"), (9, "SIGKILL: killed")])
def test_an_engine_that_a_signal_ends(
    number: int, said: str, answers: Callable[..., CheckResult]
) -> None:
    got = answers(f"import os; os.kill(os.getpid(), {number})")
    assert got.mark == "fail" and f"exit code -{number} ({said}" in got.found


def test_an_engine_that_does_not_start(answers: Callable[..., CheckResult]) -> None:
    got = answers("import sys; print('noise', file=sys.stderr); raise ValueError('no such dtype')")
    assert got.mark == "fail" and "does not run: ValueError: no such dtype" in got.found


@pytest.mark.parametrize(("load", "mark"), [(0.5, "fail"), (1000.0, "warn")])
def test_an_engine_that_hangs(
    load: float, mark: str, answers: Callable[..., CheckResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it may only be slow."""
    monkeypatch.setattr(machine, "START_LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    got = answers("import time; time.sleep(60)")
    assert got.mark == mark and "after 0.3 s (load" in got.found


def test_the_jobs_dtype_and_environment_are_tried(answers: Callable[..., CheckResult]) -> None:
    code = "import os, sys; sys.exit(os.environ['OMP_NUM_THREADS'] + os.environ['A'] + sys.argv[1])"
    job = make_job(engine={"dtype": "float32", "env": {"A": "b", "OMP_NUM_THREADS": "7"}})
    found = answers(code, job).found
    assert "does not run: 7b{" in found and '"dtype": "float32"' in found


@pytest.mark.parametrize("kept", [False, True])
def test_compile_caches_that_end_with_the_container_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
) -> None:
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "kept" / name))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / ("kept" if kept else "lost")))
    mounted = [("/", "overlay"), (str(tmp_path / "kept"), "ext4")]
    monkeypatch.setattr(
        psutil,
        "disk_partitions",
        lambda all: [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounted],
    )
    show(monkeypatch)
    assert not found(machine.check_caches)  # a CPU compiles nothing unless asked to
    show(monkeypatch, Card())
    finding = one(machine.check_caches)
    assert (finding.mark, "FlashInfer's" in finding.found) == (
        ("pass", False) if kept else ("warn", True)
    )
    assert "vLLM's" not in finding.found
    hosted = {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    assert not found(machine.check_caches, make_job(engine=hosted))


@pytest.mark.parametrize(
    ("compiled", "writes", "warned"),
    [(False, False, True), (False, True, False), (True, False, False)],
)
def test_an_engine_that_each_start_compiles_again_is_named(
    compiled: bool, writes: bool, warned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("vllm", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        if compiled:
            py_compile.compile(str(tmp_path / name / "__init__.py"), doraise=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    findings = found(machine.check_bytecode)
    assert [finding.mark for finding in findings.values()] == ["warn"] * warned
    assert all(str(tmp_path / "vllm") in finding.remedy for finding in findings.values())


@pytest.mark.parametrize("device", ["auto", "gpu", "cpu"])
def test_where_gpus_compute_the_cpu_is_not_tried(
    device: str, no_cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "FORWARD", [sys.executable, "-c", "pass"])
    show(monkeypatch, Card())
    assert len(found(machine.check_engine, make_job(engine={"device": device}))) == (
        device == "cpu"
    )

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert found(machine.check_engine, make_job(engine={"device": device})) == {}


# --- limits -------------------------------------------------------------------------------------


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_blocks, f_bavail, f_frsize = 16384, 16384, 4096  # Docker's 64 MiB

    monkeypatch.setattr(machine.os, "statvfs", lambda path: Small)
    got = one(machine.check_shm)
    assert got.mark == "warn" and "0.1 GiB" in got.found and "--shm-size" in got.remedy
    monkeypatch.undo()
    monkeypatch.setattr(machine, "SHM", tmp_path / "none")
    assert one(machine.check_shm).mark == "warn"


@pytest.mark.parametrize(
    ("memory", "shm", "mark"),  # in GiB
    [(48, 8, "warn"), (48, 10, "pass"), (32, 8, "warn"), (16, 8, "pass"), (400, 200, "pass")],
)
def test_shared_memory_holds_the_object_store_that_ray_makes(
    memory: int, shm: int, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mounted:
        f_blocks = f_bavail = shm
        f_frsize = 1 << 30

    monkeypatch.setattr(machine.os, "statvfs", lambda path: Mounted)
    monkeypatch.setattr(machine, "memory_bytes", lambda: float(memory << 30))
    assert one(machine.check_shm).mark == mark
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: shm << 30)
    size = resolve_object_store_memory(memory << 30)
    assert machine.object_store_bytes(memory << 30, shm << 30) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize(
    ("soft", "mark"),
    [(256, "fail"), (1024, "warn"), (65536, "pass"), (resource.RLIM_INFINITY, "pass")],
)
def test_open_files(soft: int, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (soft, soft))
    assert one(machine.check_files).mark == mark


class Listed:
    def __init__(self, pid: int, ppid: int, name: str, status: str = "sleeping") -> None:
        self.pid = pid
        self.info = {"pid": pid, "ppid": ppid, "name": name, "cmdline": [], "status": status}


def test_engines_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(machine.check_engines).mark in ("pass", "fail")  # the real list can be read
    listed = [
        Listed(11, 1, "VLLM::EngineCore"),
        Listed(12, 1, "VLLM::EngineCore", psutil.STATUS_ZOMBIE),
        Listed(13, 10, "VLLM::Worker"),
        Listed(14, 1, "sshd"),
    ]
    monkeypatch.setattr(machine.psutil, "process_iter", lambda names: listed)
    monkeypatch.setattr(machine, "driver_is_first", lambda: False)
    got = one(machine.check_engines)
    assert got.mark == "fail" and got.remedy == "kill 11"
    monkeypatch.setattr(machine, "driver_is_first", lambda: True)  # a container's own engines
    assert one(machine.check_engines).mark == "pass"


# --- Prefect and clocks -------------------------------------------------------------------------


@contextmanager
def http(answers: dict[str, Any], ahead: float = 0.0, status: int = 200) -> Iterator[str]:
    """A server that answers these paths with JSON, its clock `ahead` seconds before ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path, {})).encode()
            self.send_response_only(status if self.path in answers else 404)
            self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


API = {"/api/health": True, "/api/admin/version": "3.7.0"}


@pytest.mark.parametrize(
    ("version", "mark"), [(metadata.version("prefect"), "pass"), ("2.20.1", "warn")]
)
def test_the_prefect_api_and_its_version(version: str, mark: str) -> None:
    with (
        http({**API, "/api/admin/version": version}) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api"}),
    ):
        got = one(services.check_prefect)
    assert got.mark == mark and f"server {version}" in got.found


def test_a_prefect_api_that_is_away_or_none() -> None:
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        got = one(services.check_prefect)
    assert got.mark == "fail" and "does not answer" in got.found
    assert "prefect server start" in got.remedy
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert one(services.check_prefect).mark == "warn"


PROFILE = 'active = "here"\n[profiles.here]\nPREFECT_API_URL = "http://server/api"\n'


@pytest.mark.parametrize(
    ("file", "text", "url"),
    [
        ("home/profiles.toml", PROFILE, "http://server/api"),
        ("home/profiles.toml", PROFILE.replace("URL", "KEY"), None),
        ("prefect.toml", '[api]\nurl = "http://server/api"\n', "http://server/api"),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "http://server/api"\n', "http://server/api"),
        (".env", "prefect_api_url=http://server/api\n", "http://server/api"),
        (".env", "HF_TOKEN=x\n", None),
        ("PREFECT_API_URL", "http://server/api", "http://server/api"),
    ],
)
def test_prefect_is_imported_only_where_its_settings_may_name_an_api(
    file: str, text: str, url: str | None, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    env = environ.clean() | {"PREFECT_HOME": str(tmp_path / "home")}
    if file.startswith("PREFECT_"):
        env[file] = text
    else:
        (tmp_path / file).write_text(text, encoding="utf-8")
    program = (
        "import sys; from prefect_raybatch.doctor.services import prefect_api; "
        "print(prefect_api(), 'prefect' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.split() == [str(url), str(url is not None)], said.stderr


@pytest.mark.parametrize(
    ("ahead", "mark"), [(0.0, "pass"), (60.0, "warn"), (-60.0, "warn"), (1200.0, "fail")]
)
def test_the_clock_against_prefects_server(ahead: float, mark: str) -> None:
    with http(API, ahead) as url, temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        got = one(services.check_clock)
    assert got.mark == mark and "from Prefect's server" in got.found
    if mark != "pass":
        assert f"{-ahead:+.0f}"[:2] in got.found


def test_the_clock_against_the_object_store() -> None:
    with http({}, 1200.0, 403) as url, temporary_settings(restore_defaults={PREFECT_API_URL}):
        output = {"uri": "s3://b/out", "options": {"endpoint_url": url}}
        got = one(services.check_clock, make_job(output=output))
        assert got.mark == "fail" and "the object store" in got.found
        assert found(services.check_clock) == {}, "there is nothing to compare with"


@pytest.mark.parametrize("answer", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nDate: today\r\n\r\n"])
def test_a_server_without_a_valid_date_is_not_compared(answer: bytes) -> None:
    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)

    with served(Odd) as url, temporary_settings(restore_defaults={PREFECT_API_URL}):
        output = {"uri": "s3://b/out", "options": {"endpoint_url": url}}
        assert found(services.check_clock, make_job(output=output)) == {}


# --- the cluster --------------------------------------------------------------------------------


@pytest.fixture
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_local_cluster(no_address: None) -> None:
    assert "a local one" in one(services.check_cluster).found
    many = make_job(engine={"model": "demo", "replicas": 4000})
    assert one(services.check_cluster, many).mark == "warn"


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    got = one(services.check_cluster, make_job(cluster={"address": address}))
    assert got.mark == "fail" and address in got.found and "ray start" in got.remedy
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert one(services.check_cluster).mark == "fail"


def test_an_address_where_something_else_listens() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        address = f"127.0.0.1:{server.server_address[1]}"
        got = one(services.check_cluster, make_job(cluster={"address": address}))
    assert got.mark == "fail" and "is not a Ray head" in got.found


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        services, "JOIN_CLUSTER", "import sys; sys.exit('Version mismatch: Ray 2.9')"
    )
    monkeypatch.setattr(services, "unreachable_reason", lambda address: "")
    got = one(services.check_cluster, make_job(cluster={"address": "head:6379"}))
    assert got.mark == "fail" and "Version mismatch" in got.found


def test_a_cluster_that_answers(ray_head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: joined, counted, and compared with what the job takes."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    at = {"address": ray_head.address}
    got = one(services.check_cluster, make_job(cluster=at))
    assert got.mark == "pass" and "1 node, 4 CPUs, 0 GPUs" in got.found, got
    large = make_job(cluster=at, engine={"model": "demo", "replicas": 9})
    only = {"cluster": doctor.CHECKS["cluster"]}
    (verdict,) = doctor.examine(CheckContext(large), only)[-1:]
    assert verdict.mark == "fail" and "too small" in verdict.found, verdict


@pytest.mark.parametrize(
    ("version", "mark"), [(metadata.version("ray"), "pass"), ("2.9.0", "fail")]
)
def test_a_job_server(version: str, mark: str) -> None:
    with http({"/api/version": {"ray_version": version}}) as url:
        got = services.job_server(ClusterAccess(job_server=url))
    assert got.mark == mark and version in got.found
    nobody = ClusterAccess(job_server=f"http://127.0.0.1:{free_port()}")
    assert services.job_server(nobody).mark == "fail"


# --- what a job names ---------------------------------------------------------------------------


def test_a_folder_as_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(output={"uri": str(tmp_path / "out")})
    assert one(stores.check_output, job).mark == one(places.check_disk, job).mark == "pass"
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "out"])  # nothing is left behind
    monkeypatch.setattr(places, "DISK_GOOD", 1 << 60)
    assert one(places.check_disk, job).mark == "warn"
    monkeypatch.setattr(places, "DISK_LEAST", 1 << 60)
    assert one(places.check_disk, job).mark == "fail"
    assert found(stores.check_output) == found(places.check_disk) == {}


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    got = one(stores.check_output, make_job(output={"uri": str(tmp_path / "file" / "out")}))
    assert got.mark == "fail" and "file" in got.found


def on_s3(options: dict[str, Any], bucket: str = "doctor") -> BatchJob:
    return make_job(output={"uri": f"s3://{bucket}/out", "options": options})


def test_an_object_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STORE_PATIENCE", 1.0)
    assert one(stores.check_output, on_s3(s3.options)).mark == "pass"
    missing = one(stores.check_output, on_s3(s3.options, "nowhere"))
    assert missing.mark == "fail" and "nowhere" in missing.found
    wrong = one(stores.check_output, on_s3({**s3.options, "secret": "hush-hush"}))
    assert wrong.mark == "fail" and "hush" not in str(wrong)
    away = {**s3.options, "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    away.pop("client_kwargs", None)
    assert one(stores.check_output, on_s3(away)).mark == "fail"


def test_a_store_that_ignores_the_condition_or_forbids_deleting(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "STORE_PATIENCE", 1.0)
    with proxy(
        s3, lambda method, path, headers: "strip" if "If-None-Match" in headers else "pass"
    ) as p:
        options = {"key": s3.key, "secret": s3.secret, "endpoint_url": p.endpoint}
        got = one(stores.check_output, on_s3(options))
    assert got.mark == "fail" and "put-if-absent" in got.found
    with proxy(s3, lambda method, path, headers: "503" if "delete" in path else "pass") as p:
        options = {"key": s3.key, "secret": s3.secret, "endpoint_url": p.endpoint}
        assert one(stores.check_output, on_s3(options)).mark == "fail"


def test_the_source(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,Company\n1,Acme\n")
    job = make_job(source={"uri": str(tmp_path / "in.csv")})
    assert "Company" in one(places.check_source, job).found
    for wrong in (
        {"source": {"uri": str(tmp_path / "none.csv")}},
        {"source": {"uri": str(tmp_path / "in.csv")}, "prompt": {"template": "{Firm}"}},
    ):
        only = {"source": doctor.CHECKS["source"]}
        (got,) = doctor.examine(CheckContext(make_job(**wrong)), only)
        assert (
            got.mark == "fail" and got.remedy and ("none.csv" in got.found or "Firm" in got.found)
        )
    assert found(places.check_source) == {}


def model_folder(folder: Path, *without: str) -> dict[str, str]:
    folder.mkdir()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model-1.safetensors": "x",
        "model-2.safetensors": "y",
        places.INDEX: json.dumps(index),
    }
    for name in set(files) - set(without):
        (folder / name).write_text(files[name])
    return {"model": str(folder)}


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ((), None),
        (("model-2.safetensors",), "model-2.safetensors"),
        (("model-1.safetensors", "model-2.safetensors", places.INDEX), "weights"),
        (("tokenizer.json",), "tokenizer.json"),
        (("config.json",), "config.json"),
    ],
)
def test_a_model_folder(without: tuple[str, ...], named: str | None, tmp_path: Path) -> None:
    job = make_job(engine=model_folder(tmp_path / "m", *without))
    (got,) = doctor.examine(CheckContext(job), checks={"model": doctor.CHECKS["model"]})
    assert got.mark == ("fail" if named else "pass")
    assert named is None or named in got.found


def test_each_model_of_a_cascade_has_its_own_finding() -> None:
    away = {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "large"}
    escalate = {"to": {"endpoint": away}, "when": {"probability_below": 0.8}}
    job = make_job(sampling={"choice": ["a", "b"]}, output={"uri": "out", "escalate": escalate})
    first, larger = places.check_model(CheckContext(job, lambda job: job))
    assert (first.mark, larger.mark) == ("pass", "fail")
    assert "large: output.escalate.to.endpoint.url:" in larger.found and "DNS" in larger.remedy


def test_the_finding_of_a_judge_names_its_fields_as_the_job_does(tmp_path: Path) -> None:
    with openai_server(models=("other",)) as server:
        hosted = {"endpoint": {"url": server.url, "model": "large"}, "prompt": "Right: {answer}?"}
        _, judge = places.check_model(
            CheckContext(make_job(quality={"judge": hosted}), lambda job: job)
        )
    assert judge.found.startswith("large: quality.judge.endpoint.model: the server has no model")
    own = {"model": str(tmp_path / "none"), "prompt": "Right: {answer}?"}
    with pytest.raises(ConfigError, match=r"^quality\.judge\.model: .*none"):
        list(places.check_model(CheckContext(make_job(quality={"judge": own}), lambda job: job)))


def test_models_by_other_names(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(places.check_model, make_job()).mark == "pass"  # the bundled one
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    from prefect_raybatch.storage import open_store

    folder = Path(model_folder(tmp_path / "m", "model-2.safetensors")["model"])
    store = open_store("s3://doctor/m", s3.options)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    there = make_job(engine={"model": "s3://doctor/m"})
    assert "model-2.safetensors" in one(places.check_model, there).found
    store.put("model-2.safetensors", b"y")
    assert one(places.check_model, there).mark == "pass"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = make_job(engine={"model": "nobody/none"})
    (got,) = doctor.examine(CheckContext(hub), checks={"model": doctor.CHECKS["model"]})
    assert got.mark == "fail" and "nobody/none" in got.found


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor_fn.py").write_text("def ask(row): return 'x'\n")
    (tmp_path / "doctor_bad.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def job(name: str) -> BatchJob:
        return make_job(prompt={"function": name})

    assert one(places.check_functions, job("doctor_fn:ask")).mark == "pass"
    assert "no function" in one(places.check_functions, job("doctor_fn:tell")).found
    assert "PYTHONPATH" in one(places.check_functions, job("doctor_none:ask")).remedy
    assert "at import" in one(places.check_functions, job("doctor_bad:ask")).found
    assert found(places.check_functions, make_job()) == {}


# --- the whole ----------------------------------------------------------------------------------


def test_a_check_that_hangs_or_raises_stops_no_other() -> None:
    gate = threading.Event()
    waited: list[bool] = []

    def hang(context: CheckContext) -> list[CheckResult]:
        gate.wait(300)
        waited.append(True)
        return []

    def fall(context: CheckContext) -> list[CheckResult]:
        raise ZeroDivisionError("planted")

    def fine(context: CheckContext) -> list[CheckResult]:
        return [CheckResult("fine", "pass", "all")]

    checks: Any = {"hang": (hang, 0.3, "a"), "fall": (fall, 60, "fix it"), "fine": (fine, 60, "c")}
    got = {finding.check: finding for finding in doctor.examine(checks=checks)}
    assert not waited  # it still hangs
    gate.set()
    assert got["hang"].mark == "fail" and "0.3 s" in got["hang"].found
    assert got["fall"] == CheckResult("fall", "fail", "ZeroDivisionError: planted", "fix it")
    assert got["fine"].mark == "pass"


@pytest.mark.parametrize("has_job", [True, False])
def test_a_block_that_cannot_be_loaded_is_one_finding(has_job: bool) -> None:
    def with_keys(job: BatchJob) -> BatchJob:
        raise ConfigError("credentials_block: 'x/y' cannot be loaded")

    names = ("blocks", "output", "source", "model", "clock")
    checks = {name: doctor.CHECKS[name] for name in names} if has_job else doctor.STORE_CHECKS
    job = make_job(output={"uri": "s3://bucket/out"})
    (got,) = doctor.examine(CheckContext(job, with_keys), checks)
    assert (got.check, got.mark) == ("blocks", "fail") and "x/y" in got.found
    without = {name: check for name, check in checks.items() if name != "blocks"}
    wrong = doctor.examine(CheckContext(job, with_keys), without)
    assert wrong and all(one.mark == "fail" and "x/y" in one.found for one in wrong)


def test_the_checks_of_a_hosted_model_take_the_fields_of_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 2)  # as the job asks for
    away = {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "large"}
    job = make_job(engine={"endpoint": {"block": "hosted-model/x"}})
    checks = {name: doctor.CHECKS[name] for name in ("blocks", "cluster", "GPUs", "model")}
    context = CheckContext(job, lambda job: with_endpoint_fields(job, away))
    got = {finding.check: finding for finding in doctor.examine(context, checks)}
    assert got["cluster"].mark == "pass", got["cluster"]
    assert "by raybatch run" not in str(got)
    assert "cannot be reached" in got["model"].found, got["model"]


PLANTED = {
    "a": (lambda context: [CheckResult("a", "pass", "good [bracket]")], 5, ""),
    "b": (lambda context: [CheckResult("b", "fail", "bad", "fix [it]")], 5, ""),
    "c": (lambda context: [CheckResult("c", "warn", "hm", "think")], 5, ""),
}


@pytest.mark.parametrize(("names", "status"), [("abc", 1), ("ac", 0)])
def test_the_command(
    names: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.examine, "__defaults__", (None, {n: PLANTED[n] for n in names}))
    for arguments in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == status
        text = capsys.readouterr().out
        if "--json" in arguments:
            value = json.loads(text)
            assert value["ok"] is (status == 0)
            assert next(f["mark"] for f in value["findings"]) == "pass"
        else:
            assert "good [bracket]" in text and "-> think" in text
            assert ("-> fix [it]" in text) is (status == 1)
            assert f"1 pass, 1 warn, {status} fail" in text


def test_the_command_with_a_job_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(make_job().to_dict()))
    seen: list[Any] = []

    def examine(context: CheckContext) -> list[CheckResult]:
        job = context.job
        seen.append(job and (job.name, job.engine.replicas, context.keyed() == job))
        return []

    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(tmp_path / "job.yaml"), "--set", "engine.replicas=3"])
    assert ended.value.code == 0 and seen == [("nightly", 3, True)]


def test_a_folder_that_is_not_there_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create the folder"):
        cli.doctor(str(tmp_path / "results"))
