"""Engines that outlast their run: which are up, who has them, when they end.

A run leases running engines of its kind, and returns them when it ends. They belong to the process:
while somebody keeps them, they wait for the next run, make room for engines of another kind, and
end when they have waited long enough. Prewarmed engines, started while the input of their run is
copied, wait in the same place for that run alone, and nobody need keep them. Starting, querying and
ending them is passed in, so this module can be tested without Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0  # that an engine waits for another run
TIDY_EVERY = 5.0  # seconds between two looks for engines that have waited long enough


@dataclass(frozen=True)
class WarmKind:
    """The kind of an engine: `key` is equal if one can replace the other. `engine` is the class of
    its stage, `options` are those of its actor in Ray's terms, `calls` is the number of blocks that
    may be in it at once, and `takes` what it holds, by Ray's resource names. `arguments` are those
    of vLLM, and `base` is equal if two kinds differ only in these."""

    key: str
    engine: type
    options: Mapping[str, Any] = field(compare=False)
    calls: int
    takes: Mapping[str, float] = field(compare=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    base: str = field(default="", compare=False)

    def beside(self, other: WarmKind) -> str:
        """Return the vLLM arguments in which this kind differs from another, if nothing else
        does; credentials among them are masked."""
        if self.base != other.base:
            return ""
        names = sorted(self.arguments.keys() | other.arguments.keys())
        pairs = [(name, self.arguments.get(name), other.arguments.get(name)) for name in names]
        return ", ".join(
            f"{name} {hide_argument(one, name)}, not {hide_argument(two, name)}"
            for name, one, two in pairs
            if one != two
        )


class HostAccess(Protocol):
    """The operations on actors that hold engines."""

    def make(self, kind: WarmKind) -> Any:
        """Start an actor; its engine starts with the first run."""

    def begin(self, host: Any, spec: Any) -> Any:
        """Start its engine with that spec before a run has it; return a handle for `begun`."""

    def begun(self, starts: Sequence[Any]) -> bool:
        """Return whether all of these starts are over, successfully or not."""

    def idle(self, hosts: Sequence[Any]) -> list[bool]:
        """Return for each whether it lives with no block in it, on a node that stays."""

    def leaving(self, hosts: Sequence[Any]) -> list[bool]:
        """Return for each whether its node is being drained."""

    def end(self, hosts: Sequence[Any], kindly: bool) -> None:
        """End them and what they hold; `kindly`: each may end its engine by itself."""


@dataclass(eq=False)
class _Kept:
    kind: WarmKind
    host: Any
    since: float
    early: bool = False  # started for a run that is planned yet


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
        """Return whether anybody wants engines to wait for another run."""
        return bool(self._keepers)

    def keep(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Let engines wait from now on, each for at most `idle_seconds`, until the matching
        `drop`."""
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
        """Undo a `keep`; the last one ends all waiting engines."""
        with self._lock:
            self._keepers.remove(idle_seconds)
            if self._keepers:
                return
            self._over.set()
        self.end_idle()

    @contextmanager
    def lease(self, kind: WarmKind | None, most: int = 0) -> Iterator[WarmLease | None]:
        """Lease at most `most` engines of a kind for the block, running ones first. Yields None if
        nobody keeps any and none was prewarmed, or if the kind cannot be kept."""
        mine: list[_Kept] = []
        others: set[str] = set()
        if kind is not None:
            with self._lock:
                mine = [one for one in self._idle if one.kind == kind][:most]
                self._idle = [one for one in self._idle if one not in mine]
                kept = [one for one in self._idle if not one.early]
                others = {one.kind.beside(kind) for one in kept if one.kind != kind}
        if kind is None or not (mine or self._keepers):
            yield None
            return
        if len(mine) < most and (told := sorted(others - {""})):
            log.info(
                "an engine of an earlier run is up and cannot be used: it has %s; jobs that are to "
                "share engines name these in `engine`",
                "; or ".join(told),
            )
        early = [one.host for one in mine if one.early]
        lease = WarmLease(self.access, kind, [one.host for one in mine], early)
        if len(mine) > len(early):
            used = counted(len(mine) - len(early), "engine")
            log.info("%s of an earlier run up and used again", used)
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

    @property
    def kinds(self) -> list[WarmKind]:
        """Return the kinds of waiting engines, the longest waiting first."""
        with self._lock:
            return list(dict.fromkeys(one.kind for one in self._idle))

    def waiting(self, kind: WarmKind) -> int:
        """Return how many of a kind wait for a run."""
        with self._lock:
            return sum(one.kind == kind for one in self._idle)

    def start_early(self, kind: WarmKind, spec: Any, count: int) -> EarlyHosts:
        """Start `count` engines for a later run, which leases them by their kind."""
        made = EarlyHosts(self.access)
        for _ in range(count):
            host = self.access.make(kind)
            with self._lock:
                self._idle.append(_Kept(kind, host, self.clock(), early=True))
            made.add(host, self.access.begin(host, spec))
        return made

    @property
    def early(self) -> dict[str, float]:
        """Return what prewarmed engines hold that no run has taken yet."""
        held: Counter[str] = Counter()
        with self._lock:
            for one in self._idle:
                if one.early:
                    held.update(one.kind.takes)
        return dict(held)

    def end_early(self, made: EarlyHosts, but: int = 0) -> int:
        """End those of these that no run has taken, except `but` of them; return how many."""
        with self._lock:
            found = [one for one in self._idle if one.early and one.host in made.hosts][but:]
            self._idle = [one for one in self._idle if one not in found]
        if found:  # one that starts still would not listen
            self.access.end([one.host for one in found], kindly=made.begun())
        return len(found)

    def make_room(self, short: Mapping[str, float]) -> bool:
        """End waiting engines, the longest waiting first, until what they held covers `short`;
        return whether any was ended."""
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
        """End engines that have waited long enough, and those whose node is being drained."""
        with self._lock:
            longest = max(self._keepers, default=0.0)
            waited = [one for one in self._idle if self.clock() - one.since >= longest]
            gone = [one for one in waited if not one.early]  # whose copy is waited for elsewhere
            left = self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, f"no run came in {longest:g} s")
        leaving = self.access.leaving([one.host for one in left]) if left else []
        with self._lock:  # but for such as a run has taken meanwhile
            going = [one for one, goes in zip(left, leaving, strict=True) if goes]
            gone = [one for one in going if one in self._idle]
            self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, "their nodes leave the cluster")

    def end_idle(self) -> None:
        """End all waiting engines."""
        with self._lock:
            gone, self._idle = self._idle, []
        self._end(gone, "nobody keeps them any more")

    def forget(self) -> None:
        """Forget everything, because the cluster is gone."""
        with self._lock:
            self._idle.clear()

    def _end(self, gone: Sequence[_Kept], why: str) -> None:
        if gone:
            log.info("%s ended: %s", counted(len(gone), "idle engine"), why)
            self.access.end([one.host for one in gone], kindly=True)

    def _tidying(self, over: threading.Event) -> None:
        while not over.wait(TIDY_EVERY):
            self.tidy()


class EarlyHosts:
    """Engines that were started before their run was planned."""

    def __init__(self, access: HostAccess):
        self.access = access
        self.hosts: list[Any] = []
        self._starts: list[Any] = []

    def add(self, host: Any, start: Any) -> None:
        self.hosts.append(host)
        self._starts.append(start)

    def begun(self) -> bool:
        """Return whether all are up, or have failed to start."""
        return self.access.begun(self._starts)


class WarmLease:
    """The engines of one run: those that were up, and those that it started. Those in `early` may
    still be starting."""

    def __init__(
        self, access: HostAccess, kind: WarmKind, hosts: list[Any], early: Sequence[Any] = ()
    ):
        self.access, self.kind, self.hosts, self.early = access, kind, hosts, list(early)

    @property
    def holds(self) -> dict[str, float]:
        """Return what its engines hold now, by Ray's resource names."""
        return {name: value * len(self.hosts) for name, value in self.kind.takes.items()}

    def engines(self, count: int) -> list[Any]:
        """Return at least `count` live engines for a new pass; replaces those that died, whose node
        is being drained, or in which an earlier pass left something."""
        # One that starts still answers late, and no pass can have left anything in it.
        early, self.early = self.early, []
        asked = [host for host in self.hosts if host not in early]
        idle = self.access.idle(asked) if asked else []
        gone = [host for host, is_idle in zip(asked, idle, strict=True) if not is_idle]
        self.access.end(gone, kindly=False)
        self.hosts = [host for host in self.hosts if host not in gone]
        while len(self.hosts) < count:
            self.hosts.append(self.access.make(self.kind))
        return list(self.hosts)
