"""Engines that outlast their run: which are up, who has them, when they go.

A run leases the engines that are up and are of its kind, and gives them back when it ends. They
belong to the process: while somebody keeps them they wait for the next run, make room for engines
of another kind, and go when they have waited long enough. Starting, asking and ending them is
handed in: all this can be tested without Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0  # that an engine waits for another run
TIDY_EVERY = 5.0  # seconds between two looks for engines that have waited long enough


@dataclass(frozen=True)
class WarmKind:
    """What an engine is: `key` is equal where one can stand in for the other. `engine` is the class
    of its stage, `options` are those of its actor in Ray's words, `calls` the blocks that may be in
    it at once, and `takes` what it holds, by Ray's names of resources."""

    key: str
    engine: type
    options: Mapping[str, Any] = field(compare=False)
    calls: int
    takes: Mapping[str, float] = field(compare=False)


class HostAccess(Protocol):
    """What is asked of the actors that hold engines."""

    def make(self, kind: WarmKind) -> Any:
        """Starts one; its engine starts with the first run."""

    def idle(self, hosts: Sequence[Any]) -> list[bool]:
        """Whether each is there with no block in it."""

    def end(self, hosts: Sequence[Any], kindly: bool) -> None:
        """Ends them and what they hold; `kindly`: each may end its engine by itself."""


@dataclass(eq=False)
class _Kept:
    kind: WarmKind
    host: Any
    since: float


class WarmEngines:
    """The engines of a process that wait for a run, and the leases on the others."""

    def __init__(self, access: HostAccess, clock: Callable[[], float] = time.monotonic):
        self.access, self.clock = access, clock
        self._lock = threading.Lock()
        self._idle: list[_Kept] = []
        self._keepers: list[float] = []  # how long engines may wait, of each who keeps them
        self._over = threading.Event()

    @property
    def kept(self) -> bool:
        """Whether anybody wants engines to wait for another run."""
        return bool(self._keepers)

    def keep(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Engines wait from now on, each for at most so long; as often as `drop` is called."""
        with self._lock:
            first = not self._keepers
            self._keepers.append(idle_seconds)
            if not first:
                return
            over = self._over = threading.Event()
        threading.Thread(
            target=self._tidying, args=(over,), name="raybatch-idle", daemon=True
        ).start()

    def drop(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Takes a `keep` back; the last one ends all that wait."""
        with self._lock:
            self._keepers.remove(idle_seconds)
            if self._keepers:
                return
            self._over.set()
        self.end_idle()

    @contextmanager
    def lease(self, kind: WarmKind | None, most: int = 0) -> Iterator[WarmLease | None]:
        """At most so many engines of a kind for the block, those that are up first; None where
        nobody keeps any, or the kind cannot be kept."""
        if kind is None or not self._keepers:
            yield None
            return
        with self._lock:
            mine = [one for one in self._idle if one.kind == kind][:most]
            self._idle = [one for one in self._idle if one not in mine]
        lease = WarmLease(self.access, kind, [one.host for one in mine])
        if mine:
            log.info("%s of an earlier run up and used again", counted(len(mine), "engine"))
        try:
            yield lease
        finally:
            self._give_back(lease)

    def _give_back(self, lease: WarmLease) -> None:
        hosts, lease.hosts = lease.hosts, []
        if not hosts:
            return
        # What a run that was stopped has left in an engine would go on beside the next one's rows.
        idle = self.access.idle(hosts)
        free = [host for host, is_idle in zip(hosts, idle, strict=True) if is_idle]
        self.access.end([host for host in hosts if host not in free], kindly=False)
        with self._lock:
            if kept := bool(self._keepers):
                self._idle += [_Kept(lease.kind, host, self.clock()) for host in free]
        if not kept:
            self.access.end(free, kindly=True)

    def make_room(self, short: Mapping[str, float]) -> bool:
        """Ends engines that wait, the one that has waited longest first, until what they held
        covers what is `short`; whether any was ended."""
        left = {name: need for name, need in short.items() if need > 0}
        gone = []
        with self._lock:
            for one in list(self._idle):
                if not any(need > 0 for need in left.values()):
                    break
                if any(one.kind.takes.get(name, 0.0) and need > 0 for name, need in left.items()):
                    self._idle.remove(one)
                    gone.append(one)
                    left = {n: need - one.kind.takes.get(n, 0.0) for n, need in left.items()}
        self._end(gone, "another run needs what they hold")
        return bool(gone)

    def tidy(self) -> None:
        """Ends the engines that have waited long enough."""
        with self._lock:
            longest = max(self._keepers, default=0.0)
            gone = [one for one in self._idle if self.clock() - one.since >= longest]
            self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, f"no run came in {longest:g} s")

    def end_idle(self) -> None:
        """Ends all that wait."""
        with self._lock:
            gone, self._idle = self._idle, []
        self._end(gone, "nobody keeps them any more")

    def forget(self) -> None:
        """The cluster is gone, with all that was in it."""
        with self._lock:
            self._idle.clear()

    def _end(self, gone: Sequence[_Kept], why: str) -> None:
        if gone:
            log.info("%s ended: %s", counted(len(gone), "idle engine"), why)
            self.access.end([one.host for one in gone], kindly=True)

    def _tidying(self, over: threading.Event) -> None:
        while not over.wait(TIDY_EVERY):
            self.tidy()


class WarmLease:
    """The engines of one run: those that were up, and such as it has started."""

    def __init__(self, access: HostAccess, kind: WarmKind, hosts: list[Any]):
        self.access, self.kind, self.hosts = access, kind, hosts

    @property
    def holds(self) -> dict[str, float]:
        """What its engines hold now, by Ray's names of resources."""
        return {name: value * len(self.hosts) for name, value in self.kind.takes.items()}

    def engines(self, count: int) -> list[Any]:
        """At least so many that live, for a pass that begins; others in place of those that died or
        that an earlier pass left something in."""
        idle = self.access.idle(self.hosts) if self.hosts else []
        gone = [host for host, is_idle in zip(self.hosts, idle, strict=True) if not is_idle]
        self.access.end(gone, kindly=False)
        self.hosts = [host for host in self.hosts if host not in gone]
        while len(self.hosts) < count:
            self.hosts.append(self.access.make(self.kind))
        return list(self.hosts)
