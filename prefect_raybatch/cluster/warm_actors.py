"""Engines that outlast their run, on Ray: the actors that hold them, and the actors of a pass that
forward its blocks to them."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prefect_raybatch.cluster.warm import WarmKind
from prefect_raybatch.ledger.failures import (
    ENGINE_DIED,
    ENGINES_DIED,
    NODE_LOST,
    STARTED_AND_DIED,
    Loss,
)
from prefect_raybatch.ledger.records import digest
from prefect_raybatch.stages.block import lost_all, passes_by
from prefect_raybatch.stages.engine import GIVEN_BACK, EngineLaunch

log = logging.getLogger(__name__)

REACH_AGAIN = 1.0  # seconds between two tries to reach an actor that Ray starts anew
LOOK_AGAIN = 0.5  # seconds between two looks whether an engine has nothing left in it
SPARE_CALLS = 16  # beside the blocks: a run that begins, one that asks whether it is idle
HOST_CALLS = 64  # blocks at least, so that runs that differ in these alone share engines


def warm_kind(
    engine: type, spec: EngineLaunch, resources: dict[str, Any], calls: int
) -> WarmKind | None:
    """Return the kind of an engine with this spec and these Ray `resources`; None if it cannot be
    passed from one run to another, because a user's logits processor may keep state."""
    if spec.arguments.get("logits_processors"):
        return None
    counts = {
        "engine": f"{engine.__module__}.{engine.__qualname__}",
        # An engine loads adapters when rows ask for them: only the room for them is its own.
        "model": {name: value for name, value in spec.model.items() if name != "adapters"},
        "arguments": spec.arguments,
        "env": spec.env,
        "engines_per_gpu": spec.engines_per_gpu,
        "gpu_bytes": spec.gpu_bytes,
        "share": spec.share,
        "hang_seconds": spec.hang_seconds,
        "encodes": spec.encodes,
        "resources": resources,
    }
    try:
        key = digest(json.dumps(counts, sort_keys=True).encode())
        base = digest(json.dumps({**counts, "arguments": None}, sort_keys=True).encode())
    except (TypeError, ValueError):  # an argument that is an object
        return None
    # A host that dies is started anew by Ray as often as it dies: how often an engine may die is
    # bounded where runs are driven, and a host has many runs.
    options = {**resources, "max_restarts": -1, "max_task_retries": 0}
    takes = {"CPU": float(resources.get("num_cpus", 0)), "GPU": float(resources.get("num_gpus", 0))}
    most = max(HOST_CALLS, calls) + SPARE_CALLS
    return WarmKind(key, engine, options, most, takes, spec.arguments, base)


class EngineHost:
    """The engine stage of one run after the other, in an actor that belongs to none of them.

    A run is identified by a `token`, one for each pass; `by` is its actor that forwards blocks.
    `leaving` returns, in the actor, whether its node is being drained: then it accepts no more
    blocks and no run.
    """

    def __init__(self, engine: type, leaving: Callable[[], bool] = lambda: False):
        self.engine, self._leaving = engine, leaving
        self.stage: Any = None
        self._lock, self._begins = threading.Lock(), threading.Lock()
        self._token, self._by = "", ""
        self._ready = ""  # the token of the pass that the stage works for
        self._inside = 0

    def take(self, token: str, by: str) -> bool:
        """Return whether that actor gets this engine: it is the first of its pass to ask."""
        if self.leaves():
            return False
        with self._lock:
            if self._token == token and self._by != by:
                return False
            self._token, self._by = token, by
            return True

    def begin(self, token: str, spec: EngineLaunch) -> None:
        """Work for that pass; return when the engine is up, or raise if it refuses."""
        with self._begins:
            if self._ready == token:
                return
            with self._lock:
                if left := self._inside:
                    log.warning("%d blocks of a run that has ended are inside: a new engine", left)
            if self.stage is not None and (left or not hasattr(self.stage, "take_over")):
                self._end_stage()
            if self.stage is None:
                self.stage = self.engine(spec)
            else:
                self.stage.take_over(spec)
            self._ready = token

    def answer(self, token: str, table: pa.Table) -> pa.Table | bool | None:
        """Return the engine stage's output for a block; None if it does not know the pass, because
        its process was restarted; False if its node is being drained and the block must go
        elsewhere."""
        if self.leaves():
            return False
        if self._ready != token:
            return None
        with self._lock:
            self._inside += 1
        try:
            return self.stage(table)
        finally:
            with self._lock:
                self._inside -= 1

    def is_idle(self) -> bool:
        """Return whether another run can have it: no block is inside, and its node stays."""
        return self.is_empty() and not self.leaves()

    def is_empty(self) -> bool:
        with self._lock:
            return not self._inside

    def leaves(self) -> bool:
        return self._leaving()

    def close(self) -> None:
        """End the engine, so that its GPU is free before the actor is."""
        with self._begins:
            self._end_stage()

    def _end_stage(self) -> None:
        stage, self.stage, self._ready = self.stage, None, ""
        close = getattr(stage, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class Deaths:
    """How often an engine's process may die in one pass: while it starts, and in a row without an
    answered block. Ray itself restarts it as often as it dies."""

    starting: int
    in_a_row: int


class Forwarder:
    """Stands for the engine stage in a pass: each block goes to an actor that holds an engine and
    comes back answered. It holds no resources; the hosts do.

    If the node of its engine is being drained, another engine `made` of the `kind` takes what is
    not yet begun; that engine is this actor's own and ends with the pass. `leaving` returns whether
    this actor's own node is being drained: then it hands over to its replacement elsewhere.
    `restarts` returns how often Ray has restarted a host. Once its process has died more often than
    `most` allows, every further block is lost at once.
    """

    def __init__(
        self,
        spec: EngineLaunch,
        hosts: Sequence[Any],
        token: str,
        kind: WarmKind,
        made: Callable[[WarmKind], Any],
        leaving: Callable[[], bool],
        most: Deaths,
        restarts: Callable[[Any], int],
    ):
        import ray

        self.spec, self.token = spec, token
        self.kind, self._made, self._leaving = kind, made, leaving
        # the same for an actor that Ray starts anew, which so finds the host that it had
        self.id = ray.get_runtime_context().get_actor_id() or ""
        self._most, self._restarts = most, restarts
        self._gone: Loss | None = None  # why each further block is lost
        self._alive_at = 0  # restarts of the host when it last answered or was taken
        self._answered = False  # whether it has answered since its last death
        self._lock = threading.Lock()
        self.host = self._found(list(hosts))
        self._alive_at = restarts(self.host)
        self._begun = False
        self._begin()

    def _found(self, hosts: list[Any]) -> Any:
        """Return a host that no other forwarder of the pass has, running ones first. If others have
        all of them (one of these died, and this one replaces it), return any."""
        import ray
        from ray.exceptions import RayActorError

        up = {host.is_idle.remote(): host for host in hosts}
        waiting, last = list(up), hosts[0]
        while waiting:
            (answer, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                taken = ray.get(up[answer].take.remote(self.token, self.id))
            except RayActorError as error:
                log.warning("an engine's actor cannot be had: %s", error)
                continue
            last = up[answer]
            if taken:
                break
        return last

    def _begin(self) -> None:
        """Make the host work for this pass; wait for one that Ray is restarting."""
        import ray
        from ray.exceptions import ActorUnavailableError

        with self._lock:
            if self._begun or self._gone:
                return
            before = self._restarts(self.host)
            while not self._begun:
                try:
                    ray.get(self.host.begin.remote(self.token, self.spec))
                    self._begun = True
                except ActorUnavailableError as error:
                    died = self._restarts(self.host) - before
                    if died >= self._most.starting:
                        self._gone = Loss(
                            STARTED_AND_DIED,
                            f"an engine's process died as it started, {died} times one after the "
                            f"other: {_how_it_died(error)}",
                        )
                        return
                    time.sleep(REACH_AGAIN)

    def _move(self, host: Any) -> None:
        """Replace an engine whose node is being drained; it ends once it is empty."""
        with self._lock:
            if self.host is not host:  # another thread was first
                return
            self.host, self._begun = self._made(self.kind), False
            self._alive_at = self._restarts(self.host)
        log.warning("the node of an engine leaves the cluster: another one takes what is left")
        threading.Thread(target=_end_when_empty, args=(host,), daemon=True).start()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the block as the engine stage outputs it; never raises for what happens to an
        engine."""
        import ray
        from ray.exceptions import RayActorError

        if passes_by(table):
            return table
        try:
            while True:
                self._begin()
                if self._gone is not None:
                    return lost_all(table, self._gone)
                host = self.host
                made = ray.get(host.answer.remote(self.token, table))
                if made is False:
                    if self._leaving():
                        return lost_all(table, GIVEN_BACK)
                    self._move(host)
                elif made is not None:
                    self._answered = True
                    return made
                else:
                    self._begun = False
        except RayActorError as error:
            self._begun = False
            if "node has died" in str(error):
                return lost_all(table, NODE_LOST)
            self._count_death(host, error)
            # Ray's table of actors counts the death.
            return lost_all(table, Loss(ENGINE_DIED, _how_it_died(error), counted=True))

    def _count_death(self, host: Any, error: Exception) -> None:
        """Give the host up if it died too often without an answered block in between."""
        restarts = self._restarts(host)
        with self._lock:
            if self.host is not host:
                return
            if self._answered:
                self._alive_at, self._answered = restarts - 1, False
            died = restarts - self._alive_at
            if died >= self._most.in_a_row and self._gone is None:
                self._gone = Loss(
                    ENGINES_DIED,
                    f"an engine died {died} times one after the other, and answered nothing in "
                    f"between: {_how_it_died(error)}",
                )


def _end_when_empty(host: Any) -> None:
    """End it when empty, so that its node need not wait for the end of the drain notice."""
    import ray

    with contextlib.suppress(Exception):  # it is gone, or the cluster is
        while not ray.get(host.is_empty.remote()):
            time.sleep(LOOK_AGAIN)
        ray.get(host.close.remote())
        ray.kill(host)


def _how_it_died(error: Exception) -> str:
    told = " ".join(str(error).split())
    return f"the process of the engine's actor ended: {told[:300]}"
