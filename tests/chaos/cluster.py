"""Real Ray clusters of one or several nodes, each node on a loopback address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from helpers import environ

from . import processes

ROOT = Path(__file__).resolve().parents[2]
MARK = "CHAOS_NODE"
STORE_BYTES = 80 << 20
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # a head on another address than 127.0.0.1 would ask for tokens
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_worker_niceness": "0",  # else trials starve beside other work
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # a driver without its head gives up
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


def base_env() -> dict[str, str]:
    """The environment of drivers and nodes: our code and the tests on the path, no other Ray."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_", "CHAOS_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    kept |= {**SETTINGS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**kept, "RAYBATCH_POLICY": environ.POLICY}  # allows the variables of the hooks


class Nodes:
    """Nodes of the cluster at `address`, whose head is somebody else's."""

    head = ""

    def __init__(self, address: str, env: dict[str, str] | None = None) -> None:
        self.id = uuid.uuid4().hex[:8]
        self.env = {**base_env(), **(env or {})}
        self.address = address
        self.folder = Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp"))  # sockets want short names

    def add_node(self, host: str, cpus: int, gpus: int = 0) -> None:
        # There Ray notes the address that a later ray.init() takes, in any process here.
        place = ("--temp-dir", str(self.folder))
        self._start(host, cpus, "--num-gpus", str(gpus), "--address", self.address, *place)

    def begin_node(self, host: str, cpus: int, gpus: int = 0) -> subprocess.Popen[bytes]:
        """The same as a machine starts it: `ray start --block`, which takes SIGTERM for a notice
        that the node must leave. Returns at once."""
        args = ("--num-gpus", str(gpus), "--address", self.address, "--temp-dir", str(self.folder))
        with open(self._log(host), "w") as file:
            return subprocess.Popen(
                self._command(host, cpus, *args, "--block"),
                env={**self.env, MARK: self._mark(host)},
                stdout=file,
                stderr=file,
            )

    def _command(self, host: str, cpus: int, *args: str) -> list[str]:
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--node-ip-address", host, "--num-cpus", str(cpus), *args]
        command += ["--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
        command += ["--include-log-monitor", "false"]  # nobody hears its workers
        return [*command, "--min-worker-port", "0", "--max-worker-port", "0"]

    def _log(self, host: str) -> Path:
        return self.folder / f"start-{host}.log"

    def _start(self, host: str, cpus: int, *args: str) -> None:
        command, log = self._command(host, cpus, *args), self._log(host)
        with open(log, "w") as file:
            done = subprocess.run(
                command,
                env={**self.env, MARK: self._mark(host)},
                stdout=file,
                stderr=file,
                timeout=120,
            )
        if done.returncode:
            raise RuntimeError(f"ray start on {host} failed:\n{log.read_text()[-1500:]}")

    def _mark(self, host: str) -> str:
        return f"{self.id}-{host}"

    def pids(self, host: str) -> list[int]:
        return processes.marked(MARK, self._mark(host))

    def kill_node(self, host: str) -> None:
        """All processes of the node at once, as when its power goes."""
        for _ in range(5):
            left = self.pids(host)
            if not left:
                return
            processes.kill(left)
            time.sleep(0.1)

    def freeze_node(self, host: str) -> None:
        """All processes of the node stop answering, their connections stay open."""
        processes.kill(self.pids(host), signal.SIGSTOP)

    def stop(self) -> None:
        hosts = {path.stem.removeprefix("start-") for path in self.folder.glob("start-*.log")}
        for host in sorted(hosts, key=lambda host: host == self.head):
            self.kill_node(host)
        shutil.rmtree(self.folder, ignore_errors=True)


class RayCluster(Nodes):
    """A head and further nodes; `address` is what a driver connects to."""

    def __init__(
        self, head: str, cpus: int, env: dict[str, str] | None = None, gpus: int = 0
    ) -> None:
        super().__init__("", env)
        self.head = head
        for _ in range(3):
            self.address = f"{head}:{free_port(head)}"
            port = self.address.rpartition(":")[2]
            client = str(free_port(head))
            try:
                self._start(
                    head,
                    cpus,
                    *(
                        "--num-gpus",
                        str(gpus),
                        "--head",
                        "--port",
                        port,
                        "--ray-client-server-port",
                        client,
                    ),
                    *("--include-dashboard=false", "--temp-dir", str(self.folder), "--no-monitor"),
                )
                return
            except RuntimeError as error:
                failed = error
                self.kill_node(head)
        raise failed


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
