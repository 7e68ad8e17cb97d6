"""Warm engines: engines that outlast their run.

A run leases running engines of its kind, and returns them when it ends. They belong to the process.
While `keep` is in effect, they wait for the next run; they end if engines of another kind need
their resources, or after a time limit. Prewarmed engines, started while the input of their run is
copied, wait here for that run only, also without `keep`. Ray is passed in as `HostAccess`, so that
this module can be tested without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.stages.engine import EngineLaunch


log = logging.getLogger(__name__)

Host = Any  # an actor that holds an engine: Ray has no type for a class chosen at run time
ActorOptions = Mapping[str, Any]  # options of ray.remote by name

IDLE_SECONDS = 600.0  # seconds that an engine waits for another run
TIDY_EVERY = 5.0  # seconds between looks for engines that have waited long enough


@dataclass(frozen=True)
class WarmKind:
    """The kind of an engine; an engine can replace another with an equal `key`.

    `engine` is the class of its stage, `options` are those of its Ray actor, `calls` is the maximum
    number of concurrent calls, and `takes` are the resources that it holds, by Ray's names.
    `arguments` are those of vLLM; two kinds with an equal `base` differ only in these.
    """

    key: str
    engine: type
    options: ActorOptions = field(compare=False)
    calls: int
    takes: Mapping[str, float] = field(compare=False)
    arguments: EngineFields = field(default_factory=dict, compare=False, repr=False)
    base: str = field(default="", compare=False)

    def differing_arguments(self, other: WarmKind) -> str:
        """Return the vLLM arguments that differ from another kind's, with credentials masked.

        Return "" if the kinds also differ in something else.
        """
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

    def make(self, kind: WarmKind) -> object:
        """Start an actor for an engine of a `kind`; the engine starts with the first run."""

    def begin(self, host: object, launch: EngineLaunch) -> object:
        """Start the engine of an actor before a run leases it; return a handle for `begun`."""

    def begun(self, starts: Sequence[object]) -> bool:
        """Return whether all these starts have ended, successfully or not."""

    def idle(self, hosts: Sequence[object]) -> list[bool]:
        """Return for each host whether it is alive and empty, and its node is not being drained."""

    def leaving(self, hosts: Sequence[object]) -> list[bool]:
        """Return for each host whether its node is being drained."""

    def leftover_hosts(self) -> Sequence[tuple[WarmKind, object]]:
        """Return (kind, actor) of the engines that earlier commands left for this process."""

    def end(self, hosts: Sequence[object], kindly: bool) -> None:
        """End the actors; with `kindly`, let each close its engine first."""


@dataclass(eq=False)
class _IdleHost:
    kind: WarmKind
    host: object
    since: float
    is_prewarmed: bool = False  # prewarmed for a run that is still being planned


class WarmEngines:
    """The engines of a process that wait for a run, and the leases on the others."""

    def __init__(self, access: HostAccess, clock: Callable[[], float] = time.monotonic):
        self.access, self.clock = access, clock
        self._lock = threading.Lock()
        self._idle: list[_IdleHost] = []
        self._keepers: list[float] = []  # the `idle_seconds` of each `keep` in effect
        self._over = threading.Event()

    @property
    def is_keeping(self) -> bool:
        """Return whether a `keep` is in effect, so that engines wait for another run."""
        return bool(self._keepers)

    def keep(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Keep engines until the matching `drop`, each idle for at most `idle_seconds`."""
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
        """Undo a `keep` with these `idle_seconds`; the last `drop` ends all waiting engines."""
        with self._lock:
            self._keepers.remove(idle_seconds)
            if self._keepers:
                return
            self._over.set()
        self.end_idle()

    @contextmanager
    def lease(self, kind: WarmKind | None, most: int = 0) -> Iterator[WarmLease | None]:
        """Lease at most `most` engines of a kind for the block, running ones first.

        Yields None if no engines are kept and none was prewarmed, or if the kind cannot be kept.
        """
        mine: list[_IdleHost] = []
        others: set[str] = set()
        if kind is not None:
            with self._lock:
                mine = [one for one in self._idle if one.kind == kind][:most]
                self._idle = [one for one in self._idle if one not in mine]
                kept = [one for one in self._idle if not one.is_prewarmed]
                others = {one.kind.differing_arguments(kind) for one in kept if one.kind != kind}
        if kind is None or not (mine or self._keepers):
            yield None
            return
        if len(mine) < most and (differences := sorted(others - {""})):
            log.info(
                "an engine of an earlier run cannot be reused: it has %s. To share engines, set "
                "these in `engine` of both jobs",
                "; or ".join(differences),
            )
        early = [one.host for one in mine if one.is_prewarmed]
        lease = WarmLease(self.access, kind, [one.host for one in mine], early)
        if len(mine) > len(early):
            used = counted(len(mine) - len(early), "engine")
            log.info("reusing %s of an earlier run", used)
        try:
            yield lease
        finally:
            self._give_back(lease)

    def _give_back(self, lease: WarmLease) -> None:
        hosts, lease.hosts = lease.hosts, []
        if not hosts:
            return
        # Requests of a stopped run may still be in an engine; do not mix them with the next run's.
        idle = self.access.idle(hosts)
        free = [host for host, is_idle in zip(hosts, idle, strict=True) if is_idle]
        self.access.end([host for host in hosts if host not in free], kindly=False)
        with self._lock:
            if kept := bool(self._keepers):
                self._idle += [_IdleHost(lease.kind, host, self.clock()) for host in free]
        if not kept:
            self.access.end(free, kindly=True)

    @property
    def kinds(self) -> list[WarmKind]:
        """Return the kinds of waiting engines, the longest waiting first."""
        with self._lock:
            return list(dict.fromkeys(one.kind for one in self._idle))

    def waiting(self, kind: WarmKind) -> int:
        """Return how many engines of a kind wait for a run."""
        with self._lock:
            return sum(one.kind == kind for one in self._idle)

    def start_prewarmed(self, kind: WarmKind, launch: EngineLaunch, count: int) -> PrewarmedHosts:
        """Start `count` engines for a later run, which leases them by their kind."""
        early = PrewarmedHosts(self.access)
        for _ in range(count):
            host = self.access.make(kind)
            with self._lock:
                self._idle.append(_IdleHost(kind, host, self.clock(), is_prewarmed=True))
            early.add(host, self.access.begin(host, launch))
        return early

    @property
    def prewarmed_resources(self) -> dict[str, float]:
        """Return the resources of prewarmed engines that no run has taken yet."""
        held: Counter[str] = Counter()
        with self._lock:
            for one in self._idle:
                if one.is_prewarmed:
                    held.update(one.kind.takes)
        return dict(held)

    def end_prewarmed(self, early: PrewarmedHosts, but: int = 0) -> int:
        """End the engines of `early` that no run has taken, except `but` of them.

        Return how many were ended.
        """
        with self._lock:
            untaken = [one for one in self._idle if one.is_prewarmed and one.host in early.hosts][
                but:
            ]
            self._idle = [one for one in self._idle if one not in untaken]
        if untaken:  # an engine that is still starting cannot be asked to close
            self.access.end([one.host for one in untaken], kindly=early.begun())
        return len(untaken)

    def make_room(self, short: Mapping[str, float]) -> bool:
        """End idle engines, the longest idle first, until their resources cover `short`.

        `short` is how much of each resource is lacking. Return whether any engine was ended.
        """
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
        self._end(gone, "another run needs their resources")
        return bool(gone)

    def tidy(self) -> None:
        """End engines that have waited long enough, and those whose node is being drained."""
        with self._lock:
            longest = max(self._keepers, default=0.0)
            waited = [one for one in self._idle if self.clock() - one.since >= longest]
            gone = [one for one in waited if not one.is_prewarmed]  # their time limit is in `early`
            left = self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, f"no run needed them for {longest:g} s")
        leaving = self.access.leaving([one.host for one in left]) if left else []
        with self._lock:  # except those that a run has leased meanwhile
            going = [one for one, goes in zip(left, leaving, strict=True) if goes]
            gone = [one for one in going if one in self._idle]
            self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, "their nodes are being drained")

    def end_idle(self) -> None:
        """End all waiting engines."""
        with self._lock:
            gone, self._idle = self._idle, []
        self._end(gone, "no further run is expected")

    def forget(self) -> None:
        """Forget all waiting engines: the cluster is gone, or other commands use them."""
        with self._lock:
            self._idle.clear()

    def adopt(self) -> bool:
        """Add engines that earlier commands left in this cluster; return whether there are any."""
        try:
            found = [
                _IdleHost(kind, host, self.clock()) for kind, host in self.access.leftover_hosts()
            ]
        except Exception as error:
            log.info("engines of earlier commands cannot be used: %s", error)
            return False
        with self._lock:
            self._idle += found
        return bool(found)

    def _end(self, gone: Sequence[_IdleHost], why: str) -> None:
        if gone:
            log.info("%s ended: %s", counted(len(gone), "idle engine"), why)
            self.access.end([one.host for one in gone], kindly=True)

    def _tidying(self, over: threading.Event) -> None:
        while not over.wait(TIDY_EVERY):
            self.tidy()


class PrewarmedHosts:
    """Engines that were started before their run was planned."""

    def __init__(self, access: HostAccess):
        self.access = access
        self.hosts: list[object] = []
        self._starts: list[object] = []

    def add(self, host: object, start: object) -> None:
        self.hosts.append(host)
        self._starts.append(start)

    def begun(self) -> bool:
        """Return whether each engine has started or failed to start."""
        return self.access.begun(self._starts)


class WarmLease:
    """The engines of one run, reused or started by it; those in `early` may still be starting."""

    def __init__(
        self, access: HostAccess, kind: WarmKind, hosts: list[object], early: Sequence[object] = ()
    ):
        self.access, self.kind, self.hosts, self.early = access, kind, hosts, list(early)

    @property
    def holds(self) -> dict[str, float]:
        """Return the resources that its engines hold now, by Ray's names."""
        return {name: value * len(self.hosts) for name, value in self.kind.takes.items()}

    def engines(self, count: int) -> list[object]:
        """Return at least `count` live engines for a new pass.

        Replaces engines that died, are not empty, or are on a node that is being drained.
        """
        # Do not query an engine that is still starting: it would answer late, and it is empty.
        early, self.early = self.early, []
        asked = [host for host in self.hosts if host not in early]
        idle = self.access.idle(asked) if asked else []
        gone = [host for host, is_idle in zip(asked, idle, strict=True) if not is_idle]
        self.access.end(gone, kindly=False)
        self.hosts = [host for host in self.hosts if host not in gone]
        while len(self.hosts) < count:
            self.hosts.append(self.access.make(self.kind))
        return list(self.hosts)
