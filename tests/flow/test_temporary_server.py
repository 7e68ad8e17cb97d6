"""The server that Prefect starts for a flow: when it ends, and when it must not."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers import environ
from helpers.processes import running, until

# A flow of a user's own: Prefect starts the server before any of its code runs.
FLOW = """
import time
from prefect import flow
from prefect.server.api.server import SubprocessASGIServer
import prefect_raybatch as rb

@flow
def mine():
    print(SubprocessASGIServer().server_process.pid, flush=True)
    time.sleep(600)

mine()
"""


# Process 1 of a namespace, where it can choose process ids. The server of a script has ended, and
# another process has its id when the script ends. It blocks SIGTERM, which then stays pending. The
# script's watcher becomes a child of process 1.
REUSED = """
import os, signal, subprocess, sys
from pathlib import Path

server = subprocess.Popen(["sleep", "600"])
command = [sys.executable, "-c", sys.argv[1], str(server.pid)]
script = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
script.stdout.readline()
server.kill()
server.wait()
Path("/proc/sys/kernel/ns_last_pid").write_text(str(server.pid - 1))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
other = subprocess.Popen(["sleep", "600"])
assert other.pid == server.pid
script.stdin.close()
script.wait()
os.wait()  # for the watcher
status = Path(f"/proc/{other.pid}/status").read_text()
pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
print("signalled" if pending >> (signal.SIGTERM - 1) & 1 else "left alone")
"""
GUARDED = """
import sys
from types import SimpleNamespace
from prefect_raybatch.temporary_server import guard_temporary_server

running = SimpleNamespace(pid=int(sys.argv[1]), poll=lambda: None)
started = SimpleNamespace(server_process=running)
guard_temporary_server(SimpleNamespace(SubprocessASGIServer=lambda: started))
print("guarded", flush=True)
sys.stdin.read()
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def test_a_process_that_got_the_id_of_the_server_is_left_alone() -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    command = [*NAMESPACE, sys.executable, "-c", REUSED, GUARDED]
    done = subprocess.run(command, capture_output=True, text=True, env=environ.clean(), timeout=60)
    assert done.stdout.strip() == "left alone", done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Prefect's for all tests, since making its database takes most of a start."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def script(home: Path) -> Iterator[subprocess.Popen[str]]:
    """A script with a server, leader of a group as in a terminal.

    It also starts although a proxy is set, which the server could not be reached through."""
    env = environ.clean() | {"PREFECT_HOME": str(home), "HTTP_PROXY": "http://127.0.0.1:9"}
    env["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    command = [sys.executable, "-c", FLOW]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        yield process
        process.kill()


def server_of(script: subprocess.Popen[str]) -> psutil.Process:
    assert script.stdout is not None
    return psutil.Process(int(script.stdout.readline()))


@pytest.mark.whole
def test_the_server_ends_with_a_script_that_is_killed(script: subprocess.Popen[str]) -> None:
    server = server_of(script)
    script.kill()
    until(lambda: not running([server]), 60, "the end of the server")


@pytest.mark.whole
def test_the_flow_run_of_an_interrupted_script_is_crashed(
    script: subprocess.Popen[str], home: Path
) -> None:
    """A terminal sends SIGINT to the whole group."""
    server = server_of(script)
    os.killpg(script.pid, signal.SIGINT)
    until(lambda: script.poll() is not None, 120, "the end of the script")
    until(lambda: not running([server]), 60, "the end of the server")
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        latest = "SELECT state_name FROM flow_run ORDER BY created DESC LIMIT 1"
        assert database.execute(latest).fetchall() == [("Crashed",)]
