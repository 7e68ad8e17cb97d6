"""Warm engines: engines that outlast their run.

A run leases engines of its kind that already run, and returns them when it ends. Between `keep` and
`drop`, returned engines wait for the next run. They end after a time limit, or if a run needs their
resources for engines of another kind. Prewarmed engines, started while the input of their run is
copied, wait for that run even without `keep`. Ray is passed in as `HostAccess`, so that this module
can be tested without it.
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
    """The kind of an engine: an engine can replace another one if their kinds are equal.

    Only three fields are compared: `key` (a hash of settings), `engine` (the class of the engine
    stage) and `calls` (the maximum number of concurrent calls). `options` are Ray's options for the
    actor, and `takes` are the resources that the actor holds, by Ray's names. `arguments` are
    vLLM's. `base` is a hash of all settings in `key` but `arguments`: kinds with an equal `base`
    differ at most in `arguments` and `calls`.
    """

    key: str
    engine: type
    options: ActorOptions = field(compare=False)
    calls: int
    takes: Mapping[str, float] = field(compare=False)
    arguments: EngineFields = field(default_factory=dict, compare=False, repr=False)
    base: str = field(default="", compare=False)

    def differing_arguments(self, other: WarmKind) -> str:
        """Return text with the vLLM arguments that differ from another kind's; credentials masked.

        Returns "" if the kinds differ in more than these arguments.
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
    """The operations on hosts: Ray actors that hold one engine each."""

    def make(self, kind: WarmKind) -> object:
        """Start and return a host for an engine of a `kind`.

        It holds no engine yet: `begin` or a run starts the engine.
        """

    def begin(self, host: object, launch: EngineLaunch) -> object:
        """Start the engine in a host (a Ray actor) before a run leases it.

        Returns a handle to pass to `begun`.
        """

    def begun(self, starts: Sequence[object]) -> bool:
        """Return whether all these starts (handles of `begin`) have ended, even if by failing."""

    def idle(self, hosts: Sequence[object]) -> list[bool]:
        """Return for each host whether a run can use it.

        It must be alive, have no rows in its engine, and not be on a node that is being drained.
        """

    def on_drained_nodes(self, hosts: Sequence[object]) -> list[bool]:
        """Return for each host whether its node is being drained."""

    def leftover_hosts(self) -> Sequence[tuple[WarmKind, object]]:
        """Return (kind, host) of each engine of an earlier command that still runs in the cluster.

        Ends hosts that do not answer. Returns [] if engines are not to outlast their command.
        """

    def end(self, hosts: Sequence[object], kindly: bool) -> None:
        """End the hosts; with `kindly`, wait until each has closed its engine."""


@dataclass(eq=False)
class _IdleHost:
    kind: WarmKind
    host: object
    since: float
    is_prewarmed: bool = False  # prewarmed for a run that is still being planned


class WarmEngines:
    """The warm engines of a process: those that wait for a run, and those that runs lease."""

    def __init__(self, access: HostAccess, clock: Callable[[], float] = time.monotonic):
        self.access, self.clock = access, clock
        self._lock = threading.Lock()
        self._idle: list[_IdleHost] = []
        self._keepers: list[float] = []  # the `idle_seconds` of each `keep` in effect
        self._over = threading.Event()

    @property
    def is_keeping(self) -> bool:
        """Return whether returned engines wait for another run: a `keep` has no `drop` yet."""
        return bool(self._keepers)

    def keep(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Let returned engines wait for another run, until `drop` is called as often as `keep`.

        Each waits for at most `idle_seconds`; of several calls, the longest time counts.
        """
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
        """Undo one `keep` with these `idle_seconds`; the last `drop` ends all waiting engines."""
        with self._lock:
            self._keepers.remove(idle_seconds)
            if self._keepers:
                return
            self._over.set()
        self.end_idle()

    @contextmanager
    def lease(self, kind: WarmKind | None, most: int = 0) -> Iterator[WarmLease | None]:
        """Lease at most `most` waiting engines of a kind for the block; the lease can start more.

        Yields None if `kind` is None (engines that cannot be shared), or if engines are not kept
        and none was prewarmed.
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
        """Return the kinds of waiting engines, each once, the longest waiting first."""
        with self._lock:
            return list(dict.fromkeys(one.kind for one in self._idle))

    def waiting(self, kind: WarmKind) -> int:
        """Return how many engines of a kind wait for a run."""
        with self._lock:
            return sum(one.kind == kind for one in self._idle)

    def start_prewarmed(self, kind: WarmKind, launch: EngineLaunch, count: int) -> PrewarmedHosts:
        """Start `count` engines of a kind, with `launch`, for a run that will lease them later."""
        early = PrewarmedHosts(self.access)
        for _ in range(count):
            host = self.access.make(kind)
            with self._lock:
                self._idle.append(_IdleHost(kind, host, self.clock(), is_prewarmed=True))
            early.add(host, self.access.begin(host, launch))
        return early

    @property
    def prewarmed_resources(self) -> dict[str, float]:
        """Return {Ray's resource name: amount} held by prewarmed engines that no run has leased."""
        held: Counter[str] = Counter()
        with self._lock:
            for one in self._idle:
                if one.is_prewarmed:
                    held.update(one.kind.takes)
        return dict(held)

    def end_prewarmed(self, early: PrewarmedHosts, but: int = 0) -> int:
        """End the engines of `early` that no run has leased; return how many were ended.

        The first `but` of them are not ended.
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
        """End waiting engines, the longest waiting first, until their resources cover `short`.

        `short` is {Ray's resource name: amount that a run lacks}; amounts of 0 or less are ignored.
        Returns whether any engine was ended.
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
        """End engines that have waited for the time limit, and those whose node is being drained.

        Prewarmed engines have another time limit, in `prewarm`.
        """
        with self._lock:
            longest = max(self._keepers, default=0.0)
            waited = [one for one in self._idle if self.clock() - one.since >= longest]
            gone = [one for one in waited if not one.is_prewarmed]  # their limit is in `prewarm`
            left = self._idle = [one for one in self._idle if one not in gone]
        self._end(gone, f"no run needed them for {longest:g} s")
        leaving = self.access.on_drained_nodes([one.host for one in left]) if left else []
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
        """Remove all waiting engines from this object without ending them.

        Call it if the cluster is gone, or if other commands use the engines.
        """
        with self._lock:
            self._idle.clear()

    def adopt(self) -> bool:
        """Add engines that earlier commands left in this cluster to those that wait here.

        Returns whether any were added. An error is only logged.
        """
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
    """The hosts (Ray actors) that hold the prewarmed engines of one run."""

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
    """The engines leased by one run: `hosts` are the Ray actors that hold them, all of one `kind`.

    Those in `early` were prewarmed and may still be starting.
    """

    def __init__(
        self, access: HostAccess, kind: WarmKind, hosts: list[object], early: Sequence[object] = ()
    ):
        self.access, self.kind, self.hosts, self.early = access, kind, hosts, list(early)

    @property
    def holds(self) -> dict[str, float]:
        """Return {Ray's resource name: amount} that the leased engines hold now."""
        return {name: value * len(self.hosts) for name, value in self.kind.takes.items()}

    def engines(self, count: int) -> list[object]:
        """Return at least `count` hosts of engines for a new pass, each alive and without rows.

        Ends hosts that died, still have rows, or are on a node that is being drained, and starts
        others if too few are left.
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
