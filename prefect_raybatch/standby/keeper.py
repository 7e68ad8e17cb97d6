"""The process that owns a standing cluster: lends it to commands, and ends it when idle.

    python -m prefect_raybatch.standby.keeper DESCRIPTOR CPUS DIGEST IDLE_SECONDS

DESCRIPTOR is the listening socket, DIGEST what `claim.command_digest` returned for the command that
started it. Ray ends the cluster with this process, even after `kill -9`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.ray_process import RayProcess
from prefect_raybatch.cluster.warm_hosts import RayHosts
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.standby.claim import KeeperConnection, StandingCluster, StandingEngine
from prefect_raybatch.storage.private import open_lock
from prefect_raybatch.words import error_text

REQUEST_WAIT = 5.0  # seconds in which a connected command sends its request
KEEPER_CLUSTER = "keeper.cluster"  # file beside the socket that a keeper with a cluster locks
FIRST_SECONDS = 60.0  # time in which the command that started the keeper connects


class KeptCluster(Protocol):
    """The operations on a cluster that its keeper needs."""

    def start(self, cpus: int) -> str:
        """Start the cluster; return its address."""

    def engines(self, in_use: bool) -> Sequence[StandingEngine]:
        """Return the engines that answer.

        Engines that do not answer are ended, unless a command uses the cluster (`in_use`).
        """

    def end(self) -> None:
        """End the engines and the cluster."""


class OwnedCluster:
    """The local Ray cluster that this process starts and ends."""

    def __init__(self) -> None:
        self.ray, self.hosts = RayProcess(), RayHosts()

    def start(self, cpus: int) -> str:
        self.ray.start(None, cpus, ClusterAccess())
        return self.ray.address()

    def engines(self, in_use: bool) -> list[StandingEngine]:
        found = self.hosts.standing(end_silent=not in_use)
        idle = self.hosts.idle([host for _, host, _ in found])
        return [
            StandingEngine(model, dict(kind.takes), empty)
            for (kind, _, model), empty in zip(found, idle, strict=True)
        ]

    def end(self) -> None:
        if self.ray.joined():
            self.hosts.end([host for _, host, _ in self.hosts.standing()], kindly=True)
            self.ray.end()


class Keeper:
    """Lends a cluster to one command at a time, until it has been idle for `idle_seconds`.

    The cluster ends sooner if a command ends and leaves no engine in it. An unused cluster also
    ends at a request to stop, or when it does not suit the next command: that command has another
    `digest`, or needs more CPUs.
    """

    def __init__(
        self,
        listener: socket.socket,
        kept: KeptCluster,
        cpus: int,
        digest: str,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.listener, self.kept = listener, kept
        self.cpus, self.digest, self.idle_seconds = cpus, digest, idle_seconds
        self.clock, self.since = clock, clock() + FIRST_SECONDS
        self.over = False
        self.user: KeeperConnection | None = None
        self.user_pid: int | None = None
        self._ending: list[KeeperConnection] = []  # of commands that wait for the end
        self._address = ""

    def serve(self) -> None:
        """Start the cluster, lend it to commands until it is to end, then end it.

        First waits for an earlier keeper's cluster to end, because its engines hold the GPUs.
        """
        with open_lock(Path(self.listener.getsockname()).parent / KEEPER_CLUSTER) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._serve()

    def _serve(self) -> None:
        try:
            try:
                self._address = self.kept.start(self.cpus)
            except Exception as error:
                self._refuse(error_text(error))
                return
            while not self.over:
                self._wait()
        finally:
            self.listener.close()  # from now on, commands start a cluster of their own
            self.kept.end()
            for connection in self._ending:
                connection.close()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the cluster ends if no command comes."""
        return max(0.0, self.since + self.idle_seconds - self.clock())

    def _refuse(self, why: str) -> None:
        """Tell the command that waits for the cluster why it did not start."""
        self.listener.settimeout(FIRST_SECONDS)
        try:
            connection = KeeperConnection(self.listener.accept()[0])
        except OSError:
            return
        if connection.receive(REQUEST_WAIT):
            connection.send({"error": why})
        connection.close()

    def _wait(self) -> None:
        """Handle the next event: a new command, the end of the current one, or the idle limit."""
        waits = [self.listener]
        if self.user is not None:
            waits.append(self.user.socket)
        seconds = None if self.user is not None else self.seconds_left
        ready = wait(waits, seconds)  # select takes no descriptor above 1,023
        if self.user is not None and self.user.socket in ready:
            self._released()
        elif self.listener in ready:
            self._answer(KeeperConnection(self.listener.accept()[0]))
        elif not ready:
            self.over = True

    def _released(self) -> None:
        """Take the cluster back from a command that has ended; let it end if it has no engines."""
        if self.user is not None:
            self.user.close()
        self.user, self.user_pid, self.since = None, None, self.clock()
        self.over = not self._engines()

    def _answer(self, connection: KeeperConnection) -> None:
        """Read the request of a new connection and answer it.

        The connection stays open if its command gets the cluster, or waits for the end of the
        cluster.
        """
        request = connection.receive(REQUEST_WAIT) or {}
        kept_open = False
        try:
            if "state" in request:
                connection.send(self._state())
            elif not {"use", "stop"} & request.keys():
                return
            elif self.user is not None:
                connection.send({"busy": self.user_pid})
            elif "use" in request and self._suits(request["use"]):
                connection.send({"address": self._address})
                self.user, self.user_pid = connection, request["use"]["pid"]
                self.idle_seconds = request["use"]["idle_seconds"]
                kept_open = True
            else:
                connection.send({"ends": os.getpid()})
                self._ending.append(connection)
                self.over = kept_open = True
        except (OSError, KeyError, TypeError):  # the command is gone, or runs other code
            kept_open = False
            if "use" in request and self.user is None:
                self.over = not self._engines()
        finally:
            if not kept_open:
                connection.close()

    def _engines(self) -> tuple[StandingEngine, ...]:
        """Return the engines of the cluster; none if Ray does not list them."""
        try:
            return tuple(self.kept.engines(self.user is not None))
        except Exception:  # an error of Ray must not end the cluster of a command that works
            return ()

    def _suits(self, use: JsonObject) -> bool:
        return bool(use["digest"] == self.digest and use["cpus"] <= self.cpus)

    def _state(self) -> JsonObject:
        engines = self._engines()
        left = self.idle_seconds if self.user is not None else self.seconds_left
        return asdict(StandingCluster(os.getpid(), engines, self.user_pid, left))


def main() -> None:
    """Run a keeper with the arguments of the command line, until its cluster has ended."""
    descriptor, cpus, digest, idle_seconds = sys.argv[1:]
    cluster.end_by_sigterm()
    listener = socket.socket(fileno=int(descriptor))
    Keeper(listener, OwnedCluster(), int(cpus), digest, float(idle_seconds)).serve()


if __name__ == "__main__":
    main()
