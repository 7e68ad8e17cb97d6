"""A real Ray head and its job server, with a command in place of the driver."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.ray_head import Head
from helpers.small import SmallRun, make_job, small_run
from helpers.tls import untrusted_server

from prefect_raybatch.api.sending import submission_of
from prefect_raybatch.errors import ConfigError, JobServerUnavailable, JobStopped
from prefect_raybatch.remote import follower as jobs
from prefect_raybatch.remote.client import JobServer
from prefect_raybatch.runs.run import Run

SCRIPT = """
import sys, time, pathlib
run, number = pathlib.Path(sys.argv[1]), sys.argv[2]
print("noise of a library")
print(f"[raybatch INFO] job {number} has begun", flush=True)
while not (run / "go").exists():
    time.sleep(0.1)
print("[raybatch WARNING] job is over", flush=True)
"""


@pytest.fixture
def url(ray_head: Head) -> str:
    return ray_head.url


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


class Signal(BaseException):
    pass


def follower(
    small: SmallRun, url: str, folder: Path, step: Callable[[], None] = lambda: None, **owner: Any
) -> jobs.Follower:
    script = folder / "job.py"
    script.write_text(SCRIPT)
    job = make_job(output={"uri": str(small.root)}, cluster={"job_server": url})
    run = Run(str(small.root), "a key", small.plan.hash, 20, 4, False)

    def sleep(seconds: float) -> None:
        time.sleep(0.2)
        step()

    return jobs.Follower(
        submission_of(job, job),
        run,
        lambda progress: None,
        jobs.Owner(**owner),
        command=f"{sys.executable} {script}",
        sleep=sleep,
    )


def ours(server: JobServer, small: SmallRun) -> list[str]:
    at = str(small.root)
    return [job.id for job in server.jobs() if job.metadata.get("raybatch_run") == at]


def test_a_job_is_submitted_left_found_again_and_followed_to_its_end(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefect_raybatch")
    small, server = small_run(tmp_path / "run"), JobServer(url)
    first = follower(small, url, tmp_path, lambda: _signal_when(server, first, "RUNNING"))
    with pytest.raises(Signal):
        first.run_to_end()
    (id,) = ours(server, small)
    assert id == f"raybatch-a-key-{small.plan.hash[:12]}-1"
    found = server.find(id)
    assert found is not None and found.live, "the job outlives the flow that submitted it"
    assert found.metadata["raybatch_run"] == str(tmp_path / "run")

    server.submit(id, "false", {}, {})  # a second submit finds the first
    assert ours(server, small) == [id] and server.find(id) == found

    def step() -> None:
        if "job 1 has begun" in caplog.text:
            small.commit_all()
            (tmp_path / "run/go").touch()

    progress = follower(small, url, tmp_path, step).run_to_end()
    assert (progress.done, progress.tally.good) == (20, 20)
    assert ours(server, small) == [id]
    told = [(r.levelno, r.message) for r in caplog.records if r.name.endswith("remote.logs")]
    assert told == [(logging.INFO, "job 1 has begun"), (logging.WARNING, "job is over")]


def _signal_when(server: JobServer, follower: jobs.Follower, status: str) -> None:
    found = server.find(follower.records.id_of(1))
    if found is not None and found.status == status:
        raise Signal


def test_cancelling_stops_the_job(url: str, tmp_path: Path) -> None:
    small, server = small_run(tmp_path / "run"), JobServer(url)

    def step() -> None:
        _signal_when(server, first, "RUNNING")

    first = follower(small, url, tmp_path, step, cancelled=lambda: True)
    with pytest.raises(Signal):
        first.run_to_end()
    found = server.find(first.records.id_of(1))
    assert found is not None and found.status == "STOPPED"


def test_a_job_that_somebody_stops_is_an_error_that_is_not_retried(
    url: str, tmp_path: Path
) -> None:
    small, server = small_run(tmp_path / "run"), JobServer(url)
    first = follower(small, url, tmp_path, lambda: server.stop(first.records.id_of(1)) and None)
    with pytest.raises(JobStopped, match="was stopped"):
        first.run_to_end()
    assert not JobStopped.transient
    (tmp_path / "run/go").touch()
    small.commit_all()
    assert follower(small, url, tmp_path).run_to_end().done == 20


def test_a_policy_of_the_head_that_refuses_the_run_is_an_error_that_is_not_retried(
    url: str, tmp_path: Path
) -> None:
    small = small_run(tmp_path / "run")
    policy = tmp_path / "policy.yaml"
    policy.write_text("read: [/nowhere]\nwrite: [/nowhere]\n")
    first = follower(small, url, tmp_path)
    first.command = f"env RAYBATCH_POLICY={policy} {sys.executable} -m prefect_raybatch.remote"
    with pytest.raises(ConfigError, match=rf"^run directory: .* under the policy in {policy}"):
        first.run_to_end()
    assert first.records.outcome(1) is None


def test_a_job_that_nobody_knows_is_none_and_a_server_that_is_away_is_not(url: str) -> None:
    assert JobServer(url).find("raybatch-nothing-1") is None
    assert JobServer(url).logs("raybatch-nothing-1") is None
    with pytest.raises(JobServerUnavailable):
        JobServer("http://127.0.0.1:9", patience=1).find("raybatch-nothing-1")


def test_a_certificate_that_is_not_trusted_is_no_outage(tmp_path: Path) -> None:
    slept: list[float] = []
    with untrusted_server(tmp_path) as url:
        server = JobServer(url, patience=5, sleep=slept.append)
        with pytest.raises(ConfigError, match=r"self-signed certificate\. Set REQUESTS_CA_BUNDLE"):
            server.find("a job")
    assert slept == []


def test_a_file_of_certificates_that_is_no_pem_is_no_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    wrong = tmp_path / "ca.der"
    wrong.write_bytes(b"\x30\x82")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(wrong))
    with untrusted_server(tmp_path) as url:
        server = JobServer(url, patience=5, sleep=slept.append)
        with pytest.raises(
            ConfigError, match=r"REQUESTS_CA_BUNDLE: '.*ca\.der' is not a readable PEM"
        ):
            server.find("a job")
    assert slept == []


def test_headers_for_a_proxy_are_sent_and_wrong_ones_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            body = b'{"ray_version": "2.60.0", "version": "4", "ray_commit": "x"}'
            if "/jobs" in self.path:
                body = b"[]"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("RAY_JOB_HEADERS", '{"Authorization": "Bearer planted"}')
    assert JobServer(address, patience=5).jobs() == []
    assert seen and set(seen) == {"Bearer planted"}
    monkeypatch.setenv("RAY_JOB_HEADERS", "Bearer planted")
    with pytest.raises(ConfigError, match="RAY_JOB_HEADERS must be a JSON object") as told:
        JobServer(address, patience=5).jobs()
    assert "planted" not in str(told.value)
    server.shutdown()


def test_a_server_that_is_away_is_told_in_the_network_s_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(JobServerUnavailable) as caught:
        JobServer("http://127.0.0.1:9", patience=1).find("a job")
    said = (
        "Ray's job server at http://127.0.0.1:9 is unavailable: Connection refused. A running job"
    )
    assert str(caught.value).startswith(said)
    assert "Max retries" not in caplog.text
