"""Runs a user's function in a child process (`child`), where it cannot end or hang the stage.

The child reports when a row begins. A failure after that report is the row's. A failure between two
rows belongs to no row: its cause is the idle limit, or a thread that the function left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.stages.calls.child import HEADER, RAISED, REFUSED

START_SECONDS = 120.0  # least time limit for a child to start and import the function's module
CHILD_LOOK = 0.5  # seconds between checks whether the child lives
CHILD_STARTS = 3  # tries to start a child, if each ends before it begins the row
# Consecutive rows that hang before the block is given up: then the cause is probably a service that
# does not answer, and not a row.
HUNG = 3
BOOT = (  # the child gets this process's sys.path, so that it finds the same modules
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from prefect_raybatch.stages.calls.child import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


class FunctionDied(Exception):
    """A user's function ended its process during a row; the row's error class in quarantine."""


class FunctionHung(Exception):
    """A user's function exceeded its time limit; the row's error class in quarantine."""


class NoChild(RuntimeError):
    """No process for a user's function could be started: a fault of the node, not of a row."""


class BlockHung(NoChild):
    """A user's function hung for `HUNG` consecutive rows.

    The block's rows are retried in smaller blocks, to see whether the rows are the cause.
    """


class _Ended(Exception):
    """The child process has ended, or its connection is closed."""


class _Late(Exception):
    """The child did not answer within the time limit."""


def raised(kind: str, text: str) -> Exception:
    """Return an exception whose class is named `kind`, as the original class may be unavailable."""
    made: Exception = type(kind, (Exception,), {})(text)
    return made


class IsolatedFunction:
    """The function `name` of a job's `field`; each call with a row runs in a child process.

    `seconds` is the time limit for a row, None: no limit. If the child ends during a row, another
    child gets the row, until `deaths` children have ended.

    The constructor raises `ConfigError` if the function cannot be imported, and `NoChild` if no
    child starts. A call raises:
    - a copy of the exception that the function raised;
    - `FunctionDied` if `deaths` children ended during the row;
    - `FunctionHung` if the row exceeded the time limit;
    - `BlockHung` instead, if the row is the last of `HUNG` consecutive rows that exceeded it;
    - `NoChild` if no child begins the row.
    """

    def __init__(self, name: str, field: str, seconds: float | None, deaths: int = 1) -> None:
        self.name, self.field = name, field
        self.seconds, self.deaths = seconds, deaths
        self._hung = 0  # number of consecutive rows that hung, up to the latest
        self.child()

    def child(self) -> WorkerProcess:
        """Return this thread's child process for the function; start one if none is alive."""
        children: dict[tuple[object, ...], WorkerProcess] = _kept.__dict__.setdefault(
            "children", {}
        )
        # A function sent by value may have been edited: the name is the same, the payload is not.
        key = (self.name, self.field, getattr(self.name, "payload", None))
        child = children.get(key)
        if child is None or not child.lives:
            child = children[key] = WorkerProcess(self.name, self.field, self.seconds)
        return child

    def __call__(self, row: object) -> object:
        data = pickle.dumps(row)
        ended = ""
        for _ in range(self.deaths):
            child = self._begun(data)
            try:
                kind, *rest = child.hear(self.seconds)
            except _Late:
                child.close()
                raise self._late() from None
            except _Ended:
                ended = child.close()
                continue
            self._hung = 0
            if kind == RAISED:
                raise raised(*map(str, rest))
            return rest[0]
        self._hung = 0
        times = f", in each of {self.deaths} tries" if self.deaths > 1 else ""
        raise FunctionDied(
            f"{self.field} {self.name} ended its process ({ended}){times}. Fix the function "
            "for this row, then retry the row"
        )

    def _late(self) -> Exception:
        text = (
            f"{self.field} {self.name} did not return within limits.function_seconds "
            f"({self.seconds:g} s), so its process was killed. Fix the function, or raise the "
            "limit"
        )
        self._hung += 1
        return (
            BlockHung(f"{text} ({HUNG} rows in a row)")
            if self._hung == HUNG
            else FunctionHung(text)
        )

    def _begun(self, data: bytes) -> WorkerProcess:
        """Send the pickled row `data` to a child; return the child once it has begun the row."""
        ended = ""
        for _ in range(CHILD_STARTS):
            try:
                child = self.child()
            except ConfigError as error:
                # not the job's fault: the function could be imported for an earlier row
                raise NoChild(str(error)) from None
            try:
                child.say(data)
                child.hear(START_SECONDS)
            except (_Ended, _Late):
                ended = child.close()
                continue
            return child
        raise NoChild(
            f"{self.field} {self.name}: its process ended {CHILD_STARTS} times before a row "
            f"began ({ended}). Check that its module runs on this node"
        )


class WorkerProcess:
    """A child process that calls one function; `lives` is true until it ends or is closed."""

    def __init__(self, name: str, field: str, seconds: float | None) -> None:
        self._wire, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", BOOT, json.dumps([str(path) for path in sys.path])]
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), field],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its own children can be killed with it
            )
        # Kills the child when this object is collected, and when this process ends.
        self._close = weakref.finalize(self, _kill, self.process, self._wire)
        limit = None if seconds is None else max(seconds, START_SECONDS)
        try:
            self.say(pickle.dumps(name))
            kind, *rest = self.hear(limit)
        except _Ended:
            raise NoChild(
                f"{field} {name}: its process ended while it imported the function's module "
                f"({self.close()})"
            ) from None
        except _Late:
            self.close()
            raise NoChild(
                f"{field} {name}: the import of its module took over {limit:g} s"
            ) from None
        if kind == REFUSED:
            self.close()
            raise ConfigError(*rest)

    @property
    def lives(self) -> bool:
        return self._close.alive and self.process.poll() is None

    def close(self) -> str:
        """Kill the process if it still runs; return how it ended, as text for an error message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The child's end of the socket closes a little before the child ends.
            self.process.wait(CHILD_LOOK)
        code = self.process.poll()
        self._close()
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def say(self, data: bytes) -> None:
        """Send a pickled row, or the function's name. Raises _Ended, _Late."""
        self._wire.settimeout(START_SECONDS)
        try:
            self._wire.sendall(HEADER.pack(len(data)) + data)
        except TimeoutError:
            raise _Late from None
        except OSError:
            raise _Ended from None

    def hear(self, seconds: float | None) -> tuple[int, *tuple[object, ...]]:
        """Return the child's next message (kind, *values); wait for `seconds` (None: no limit).

        Raises _Ended or _Late.
        """
        waited = _Waited(seconds)
        (size,) = HEADER.unpack(self._read(HEADER.size, waited))
        message: tuple[int, *tuple[object, ...]] = pickle.loads(self._read(size, waited))
        return message

    def _read(self, size: int, waited: _Waited) -> bytearray:
        data, dead = bytearray(), False
        while len(data) < size:
            self._wire.settimeout(waited.left())
            try:
                part = self._wire.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                # Processes that the child started may hold its end of the socket open.
                if dead:
                    raise _Ended from None
                dead = self.process.poll() is not None
                continue
            except OSError:
                raise _Ended from None
            if not part:
                raise _Ended
            data += part
        return data


class _Waited:
    """A timer of `seconds` (None: no limit) that pauses while this process is suspended."""

    def __init__(self, seconds: float | None) -> None:
        self.rest, self.since = seconds, time.monotonic()

    def left(self) -> float:
        """Return the seconds that the next wait may take; raise _Late after the limit."""
        now = time.monotonic()
        if self.rest is not None:
            self.rest -= min(now - self.since, 2 * CHILD_LOOK)
            if self.rest <= 0:
                raise _Late
        self.since = now
        return CHILD_LOOK if self.rest is None else min(self.rest, CHILD_LOOK)


def _kill(process: subprocess.Popen[bytes], wire: socket.socket) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wire.close()


# Children by function, kept for the next block: an import may take seconds. Each thread has others,
# since a child serves one caller. A child ends with its thread or this process, or when idle.
_kept = threading.local()
