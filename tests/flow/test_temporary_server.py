"""The server that Prefect starts for a flow: when it ends, and when it must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import environ
from helpers.processes import until

START = """
import sys, time
from prefect.server.api.server import SubprocessASGIServer
from prefect_raybatch.flow.temporary_server import start_temporary_server
start_temporary_server()
try:
    print(SubprocessASGIServer().server_process.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path: Path):
    """A process with a server, leader of a group as in a terminal."""
    env = environ.clean() | {"PREFECT_HOME": str(tmp_path), "HTTP_PROXY": "http://127.0.0.1:9"}
    env["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    command = [sys.executable, "-c", f"import prefect_raybatch.flow\n{START}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        yield process
        process.kill()


def test_it_survives_ctrl_c_and_ends_with_a_driver_that_is_killed(
    driver: subprocess.Popen[str],
) -> None:
    """It also starts although a proxy is set, which it could not be reached through."""
    assert driver.stdout is not None
    server = psutil.Process(int(driver.stdout.readline()))
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout.readline() == "interrupted\n"
    assert server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    driver.kill()
    until(lambda: not server.is_running(), 60, "the end of the server")
