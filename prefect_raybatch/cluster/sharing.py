"""Shares one Ray cluster among all runs of this process.

A process can be in only one Ray cluster, and `ray.init` and `ray.shutdown` do not count their
callers. So this module counts the runs, and lets a run wait until the resources that it needs are
free. Ray is passed in as `RayAccess`, so that this can be tested without Ray.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prefect_raybatch.cluster.warm import (
    IDLE_SECONDS,
    PrewarmedHosts,
    WarmEngines,
    WarmKind,
    WarmLease,
)
from prefect_raybatch.errors import ConfigError, JobStopped
from prefect_raybatch.job.cluster import ClusterAccess

if TYPE_CHECKING:
    from prefect_raybatch.stages.engine import EngineLaunch


log = logging.getLogger(__name__)

WAIT_LOOK = 1.0  # seconds between looks while a run waits
LET_GO = 60.0  # seconds that actors of an earlier run may take to release their resources
BUSY_WAIT_SECONDS = (
    10.0  # the same while other runs work, whose tasks take and release free resources
)
END_SECONDS = 60.0  # seconds that an unused cluster may take to end
ROUNDING = 1e-6  # tolerance for sums of fractions

_inside: ContextVar[bool] = ContextVar("inside", default=False)


class RayAccess(Protocol):
    """The operations on Ray by which a process joins, measures and leaves a cluster."""

    def joined(self) -> bool:
        """Return whether this process is in a cluster."""

    def start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        """Join the cluster at `address`, or start a local one with `cpus` CPUs if it is None.

        `access` has the token and headers for the cluster.
        """

    def end(self) -> None:
        """Leave the cluster, and end it if it was started here."""

    def free(self) -> Mapping[str, float]:
        """Return the free resources of the cluster as {Ray's resource name: amount}."""


@dataclass(eq=False)
class Tenant:
    """A user of the process's cluster: a run, or other code that works on the cluster.

    `waits` is called with the reason why the user has to wait, and with "" once it can go on; it
    must return quickly. `stopped` is set when the process must end. `works` is False for a user
    that only queries the cluster, or keeps it for a later run. `access` is how to connect to the
    cluster, used if this user is the first to join it.
    """

    name: str
    waits: Callable[[str], None] = lambda text: None
    stopped: threading.Event = field(default_factory=threading.Event)
    works: bool = True
    access: ClusterAccess = field(default_factory=ClusterAccess)

    def halted(self) -> JobStopped | None:
        """Return the error to raise if this user was stopped; None if it was not."""
        if not self.stopped.is_set():
            return None
        return JobStopped(
            f"{self.name} was stopped with its process. Committed shards are kept; run the same "
            "command again to continue"
        )


class ClusterSession:
    """The cluster of this process and its users.

    Users join the cluster, and get resources, in the order in which they ask, so that a run with
    large needs is not overtaken forever.
    """

    def __init__(
        self,
        ray: RayAccess,
        warm: WarmEngines,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.ray, self.warm, self.sleep = ray, warm, sleep
        self._changed = threading.Condition()
        self._users: list[Tenant] = []
        self._door: list[Tenant] = []  # users that wait to join, in order of arrival
        self._turns: list[Tenant] = []  # users that wait for resources, in order of request
        self._claims: dict[Tenant, Mapping[str, float]] = {}
        self._busy = False  # a thread starts or ends the cluster, without the lock
        self._ours = False  # whether this object started the cluster and ends it
        self._address: str | None = None
        self._cpus = 0
        self._worked = False  # whether a run has worked on it, so that actors may remain
        self._watcher: threading.Thread | None = None

    @contextmanager
    def joined(self, user: Tenant, address: str | None, cpus: int) -> Iterator[None]:
        """Join the cluster at `address` (None: a local one with `cpus` CPUs or more) for the block.

        The last user to leave ends the cluster if this object started it and it is not kept warm.
        Raises `ConfigError` while users are in a cluster at another address. Also raises it if the
        caller is in another such block already, because it would wait for itself.
        """
        self._enter(user, address, cpus)
        token = _inside.set(True)
        try:
            yield
        except BaseException as error:
            if _ends_process(error) and threading.current_thread() is threading.main_thread():
                self.stop_all(but=user)
            raise
        finally:
            _inside.reset(token)
            self._leave(user)

    @contextmanager
    def kept_warm(self, idle_seconds: float = IDLE_SECONDS) -> Iterator[None]:
        """Keep cluster and engines for later runs within the block; both end with it.

        An engine that waits longer than `idle_seconds` ends earlier.
        """
        self.warm.keep(idle_seconds)
        try:
            yield
        finally:
            self.warm.drop(idle_seconds)
            with self._changed:
                self._end_unused()

    @contextmanager
    def admitted(
        self,
        user: Tenant,
        needs: Mapping[str, float],
        total: Mapping[str, float],
        kind: WarmKind | None = None,
        most: int = 0,
    ) -> Iterator[WarmLease | None]:
        """Wait until `needs` fit into `total` beside the other runs, then hold them for the block.

        Both are {Ray's resource name: amount}. A run is admitted in any case while no other holds
        resources. Yields a lease of at most `most` engines of this `kind`. Yields None if `kind` is
        None, or if engines are not kept warm and none was prewarmed. Raises `JobStopped` if `user`
        is stopped while it waits.
        """

        def ready() -> bool:
            return self._turns[0] is user and (not self._claims or not self._short(needs, total))

        with self._changed:
            self._turns.append(user)
            try:
                self._wait(user, ready, lambda: self._why(user, needs, total))
                self._claims[user] = needs
            finally:
                self._turns.remove(user)
                self._changed.notify_all()
        try:
            with self.warm.lease(kind, most) as lease:
                self._end_prewarmed(total)
                self._until_free(user, needs, {} if lease is None else lease.holds)
                yield lease
        finally:
            with self._changed:
                del self._claims[user]
                self._worked = True
                self._changed.notify_all()

    def prewarm_engines(
        self,
        kind: WarmKind,
        launch: EngineLaunch,
        count: int,
        total: Mapping[str, float],
        spare: Mapping[str, float],
    ) -> PrewarmedHosts | None:
        """Start `count` engines of a kind for a later run; return None if there is no room.

        There is room if no run waits for resources, no engine of this kind waits for a run, and the
        free resources cover the new engines and `spare`. If another run needs the resources of
        these engines, they are ended. `total` has all resources of the cluster.
        """
        with self._changed:
            if self._turns or self.warm.waiting(kind):
                return None
            needs = {name: value * count for name, value in kind.takes.items()}
            for name, value in spare.items():
                needs[name] = needs.get(name, 0.0) + value
            for name, value in self.warm.prewarmed_resources.items():
                needs[name] = needs.get(name, 0.0) + value
            free = self.ray.free()
            if self._short(needs, total) or any(
                need > free.get(name, 0.0) + ROUNDING for name, need in needs.items() if need
            ):
                return None
            self._worked = True  # so that a run of another kind waits until they have ended
            return self.warm.start_prewarmed(kind, launch, count)

    def _end_prewarmed(self, total: Mapping[str, float]) -> None:
        """End prewarmed engines if they and the admitted runs together need more than `total`.

        The needs of the runs are added up, instead of asking Ray for free resources, because Ray
        does not count an actor that was just created.
        """
        early = self.warm.prewarmed_resources
        if not early:
            return
        with self._changed:
            claims = list(self._claims.values())
        over = {
            name: sum(claim.get(name, 0.0) for claim in claims) + held - total.get(name, 0.0)
            for name, held in early.items()
        }
        if any(lack > ROUNDING for lack in over.values()):
            self.warm.make_room(over)

    @contextmanager
    def visited(self) -> Iterator[bool]:
        """Yield whether this process is in a cluster.

        If that cluster has users, it stays at least until the end of the block.
        """
        guest = Tenant("a query of the cluster", works=False)
        with self._changed:
            there = not self._busy and self.ray.joined()
            counted = there and bool(self._users)
            if counted:
                self._users.append(guest)
        try:
            yield there
        finally:
            if counted:
                self._leave(guest)

    @contextmanager
    def starting_cluster(self, address: str | None, cpus: int) -> Iterator[None]:
        """Start the cluster in a thread; keep it until a run joins it or the block ends.

        A failed start is only logged, because the run tries again and reports the failure.
        """
        user, over = Tenant("the next run", works=False), threading.Event()

        def hold() -> None:
            try:
                with self.joined(user, address, cpus), self._changed:
                    while not (over.is_set() or user.stopped.is_set() or self._working()):
                        self._changed.wait(WAIT_LOOK)
            except Exception as error:
                log.info("could not start the cluster early: %s", error)

        thread = threading.Thread(target=hold, name="raybatch-early", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            with self._changed:
                self._changed.notify_all()
            thread.join(END_SECONDS)

    def _working(self) -> bool:
        return any(user.works for user in self._users)

    def stop_all(self, but: Tenant | None = None) -> None:
        """Stop all users of the cluster, those that wait to join included, except `but`."""
        with self._changed:
            for user in (*self._users, *self._door):
                if user is not but:
                    user.stopped.set()
            self._changed.notify_all()

    # --- joining and leaving ----------------------------------------------------------------

    def _enter(self, user: Tenant, address: str | None, cpus: int) -> None:
        if _inside.get():
            raise ConfigError(
                f"{user.name} was started within another run, and each would wait for the other. "
                "Start it after that run, or in a separate flow"
            )

        def ready() -> bool:
            if self._busy or self._door[0] is not user:
                return False
            return not self._users or not self._ours or address is not None or cpus <= self._cpus

        def why() -> str:
            if self._busy or not self._users or self._door[0] is not user:
                return ""
            return (
                f"{user.name} needs {cpus} CPUs, but the local cluster has {self._cpus}: it waits "
                f"until {self._names()} has ended, then starts a larger cluster"
            )

        with self._changed:
            self._check(address)
            self._door.append(user)
            if cpus > self._cpus and not self._working():  # only holders, which must make room
                for early in self._users:
                    early.stopped.set()
                self._changed.notify_all()
            self._watch()
            try:
                self._wait(user, ready, why)
                self._check(address)
                start = not self.ray.joined()
                if not start and self._outgrown(address, cpus):
                    self._end_unused(outgrown=True)
                    start = True
                if start:
                    self._start(address, cpus, user.access)
                elif not self._users and not self._kept:  # started and ended by other code
                    self._ours, self._worked = False, self.warm.is_keeping
                self._users.append(user)
            finally:
                self._door.remove(user)
                self._changed.notify_all()

    def _check(self, address: str | None) -> None:
        if self._users and self._ours and address != self._address:
            raise ConfigError(
                f"cluster.address: {address or 'a local cluster'}, but {self._names()} in this "
                f"process uses {self._address or 'a local one'}, and a process can use only one "
                "Ray cluster. Set the same address in both, or run them in separate processes"
            )

    def _start(self, address: str | None, cpus: int, access: ClusterAccess) -> None:
        with self._unlocked():
            try:
                self.ray.start(address, cpus, access)
            except BaseException:
                if self.ray.joined():  # a signal arrived after Ray had started
                    self.ray.end()
                raise
        self.warm.forget()  # engines of a former cluster
        self._ours, self._address, self._cpus = True, address, cpus
        self._worked = self.warm.adopt()

    def _leave(self, user: Tenant) -> None:
        with self._changed:
            self._users.remove(user)
            try:
                self._end_unused()
            finally:
                self._changed.notify_all()

    @property
    def _kept(self) -> bool:
        """Return whether the cluster was started here and is kept for later runs."""
        return self._ours and self.warm.is_keeping and self.ray.joined()

    def _outgrown(self, address: str | None, cpus: int) -> bool:
        """Return whether a cluster kept for later runs must be replaced for the next one.

        It must if it is at another `address`, or is a local cluster with fewer than `cpus` CPUs.
        """
        if self._users or not self._kept:
            return False
        return address != self._address or (address is None and cpus > self._cpus)

    def _end_unused(self, outgrown: bool = False) -> None:
        """End the cluster if it was started here and has no users.

        A cluster that is kept for later runs is ended only with `outgrown` (see `_outgrown`).
        """
        if self._busy or self._users or not self._ours or (self.warm.is_keeping and not outgrown):
            return
        self._ours = False
        with self._unlocked():
            self.warm.end_idle()
            if self.ray.joined():
                self.ray.end()
        self._changed.notify_all()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Release the lock within the block; `_busy` keeps others from starting or ending Ray."""
        self._busy = True
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._busy = False

    # --- waiting for resources --------------------------------------------------------------

    def _wait(self, user: Tenant, ready: Callable[[], bool], why: Callable[[], str]) -> None:
        reason = ""
        try:
            while True:
                if error := user.halted():
                    raise error
                if ready():
                    return
                if not reason and (reason := why()):
                    log.info("%s", reason)
                    user.waits(reason)
                self._changed.wait(WAIT_LOOK)
        finally:
            if reason:
                user.waits("")

    def _short(self, needs: Mapping[str, float], total: Mapping[str, float]) -> bool:
        taken = self._claims.values()
        return any(
            sum(claim.get(name, 0.0) for claim in taken) + need > total.get(name, 0.0) + ROUNDING
            for name, need in needs.items()
        )

    def _why(self, user: Tenant, needs: Mapping[str, float], total: Mapping[str, float]) -> str:
        resources = ", ".join(
            f"{need:g} of {total.get(name, 0.0):g} {name}s" for name, need in needs.items() if need
        )
        ahead = [other.name for other in self._turns[: self._turns.index(user)]]
        behind = f", after {', '.join(ahead)}" if ahead else ""
        working = ", ".join(other.name for other in self._claims)
        return (
            f"{user.name} needs {resources}, which {working or 'another run'} uses: it waits until "
            f"they are free{behind}"
        )

    def _until_free(
        self, user: Tenant, needs: Mapping[str, float], holds: Mapping[str, float]
    ) -> None:
        """Wait until the free resources that Ray reports cover `needs`.

        Resources that the `user` holds already (`holds`) count as free. Ends idle engines if that
        helps. The wait is limited, since Ray frees the resources of ended actors with a delay and
        other runs use some. After it, the run starts in any case.
        """
        with self._changed:
            if not self._worked:
                return
            until = time.monotonic() + (BUSY_WAIT_SECONDS if len(self._claims) > 1 else LET_GO)
        while not user.stopped.is_set():
            free = self.ray.free()
            short = {
                name: need - holds.get(name, 0.0) - free.get(name, 0.0)
                for name, need in needs.items()
            }
            if all(lack <= ROUNDING for lack in short.values()):
                return
            self.warm.make_room(short)
            if time.monotonic() > until:
                log.debug("%s starts although Ray reports only %s free", user.name, dict(free))
                return
            self.sleep(0.1)

    def _names(self) -> str:
        return ", ".join(user.name for user in self._users)

    # --- the end of the process -------------------------------------------------------------

    def _watch(self) -> None:
        """Start a thread that stops all users when a signal ends the main thread.

        Signals reach only the main thread. While it waits for other threads (Prefect's task runner,
        an executor), runs in those threads would not learn of a signal. Does nothing if called in
        the main thread.
        """
        if threading.current_thread() is threading.main_thread() or self._watcher is not None:
            return
        self._watcher = threading.Thread(target=self._watching, name="raybatch-watch", daemon=True)
        self._watcher.start()

    def _watching(self) -> None:
        seen: BaseException | None = None
        while True:
            time.sleep(WAIT_LOOK)
            with self._changed:
                if not self._users and not self._door:
                    self._watcher = None
                    return
            error = _ending()
            if error is not None and error is seen:  # seen twice, so not about to be caught
                log.warning("the process ends (%s): stopping its runs", type(error).__name__)
                self.stop_all()
                seen = None
            else:
                seen = error


def _ends_process(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal that ends the process.

    Prefect's exception is recognized by its name, so that Prefect need not be imported.
    """
    ends = isinstance(error, (KeyboardInterrupt, SystemExit))
    return ends or type(error).__name__ == "TerminationSignal"


def _ending() -> BaseException | None:
    """Return the exception of a signal that the main thread is handling now; None without one."""
    found: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
    if isinstance(found, tuple):  # Python 3.11
        found = found[1]
    return found if isinstance(found, BaseException) and _ends_process(found) else None
