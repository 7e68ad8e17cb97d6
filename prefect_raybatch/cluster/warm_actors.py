"""Warm engines on Ray: the actors that hold them, and those that forward blocks to them."""

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

from prefect_raybatch.cluster.warm import ActorOptions, Host, WarmKind
from prefect_raybatch.ledger.failures import (
    ENGINE_DIED,
    ENGINES_DIED,
    NODE_LOST,
    STARTED_AND_DIED,
    Loss,
)
from prefect_raybatch.ledger.records import digest
from prefect_raybatch.stages.block import is_passthrough, lost_block_like
from prefect_raybatch.stages.engine import GIVEN_BACK, EngineLaunch

log = logging.getLogger(__name__)

REACH_AGAIN = 1.0  # seconds between attempts to reach an actor that Ray restarts
LOOK_AGAIN = 0.5  # seconds between looks whether an engine is empty
SPARE_CALLS = 16  # calls in addition to blocks, such as `begin` and `is_idle`
HOST_CALLS = 64  # minimum number of blocks, so that runs with other numbers can share engines


def warm_kind(
    engine: type, launch: EngineLaunch, resources: ActorOptions, calls: int
) -> WarmKind | None:
    """Return the kind of the engines that run the stage `engine` with `launch` on Ray `resources`.

    `calls` is how many blocks an engine works on at once. Returns None if runs cannot share the
    engines: a user's logits processor may keep state, and arguments that are objects cannot be
    compared.
    """
    if launch.arguments.get("logits_processors"):
        return None
    counts = {
        "engine": f"{engine.__module__}.{engine.__qualname__}",
        # An engine loads adapters on demand, so they are not part of its kind.
        "model": {name: value for name, value in launch.model.items() if name != "adapters"},
        "arguments": launch.arguments,
        "env": launch.env,
        "engines_per_gpu": launch.engines_per_gpu,
        "gpu_bytes": launch.gpu_bytes,
        "share": launch.share,
        "hang_seconds": launch.hang_seconds,
        "encodes": launch.encodes,
        "resources": resources,
    }
    try:
        key = digest(json.dumps(counts, sort_keys=True).encode())
        base = digest(json.dumps({**counts, "arguments": None}, sort_keys=True).encode())
    except (TypeError, ValueError):  # an argument that is an object
        return None
    # Ray restarts a host without limit, because a host serves many runs. Each run limits how often
    # its engines may die.
    options = {**resources, "max_restarts": -1, "max_task_retries": 0}
    takes = {"CPU": float(resources.get("num_cpus", 0)), "GPU": float(resources.get("num_gpus", 0))}
    most = max(HOST_CALLS, calls) + SPARE_CALLS
    return WarmKind(key, engine, options, most, takes, launch.arguments, base)


class EngineHost:
    """A Ray actor that holds one engine, for one run after another.

    In its methods, `token` identifies a pass of a run, and `by` the Forwarder that sends blocks of
    the pass. `leaving` returns whether the actor's node is being drained; then the actor accepts no
    more blocks. `kind` is the engine's kind if the engine outlasts its command, else None.
    """

    def __init__(
        self,
        engine: type,
        leaving: Callable[[], bool] = lambda: False,
        kind: WarmKind | None = None,
    ):
        self.engine, self._leaving, self.kind = engine, leaving, kind
        self.stage: Any = None
        self._lock, self._begins = threading.Lock(), threading.Lock()
        self._token, self._by = "", ""
        self._ready = ""  # the token of the pass that the stage works for
        self._inside = 0

    def take(self, token: str, by: str) -> bool:
        """Reserve this engine for Forwarder `by` of the pass `token`; return whether that worked.

        It fails if another Forwarder of the same pass has reserved it, or if its node is being
        drained.
        """
        if self.is_on_drained_node():
            return False
        with self._lock:
            if self._token == token and self._by != by:
                return False
            self._token, self._by = token, by
            return True

    def begin(self, token: str, launch: EngineLaunch) -> None:
        """Start or reconfigure the engine for the pass `token`; return once it is ready.

        Restarts an engine in which blocks of an earlier pass are left.
        """
        with self._begins:
            if self._ready == token:
                return
            with self._lock:
                if left := self._inside:
                    log.warning(
                        "%d blocks of an earlier run are in the engine: restarting it", left
                    )
            if self.stage is not None and (left or not hasattr(self.stage, "take_over")):
                self._end_stage()
            if self.stage is None:
                self.stage = self.engine(launch)
            else:
                self.stage.take_over(launch)
            self._ready = token

    def answer(self, token: str, table: pa.Table) -> pa.Table | bool | None:
        """Return the engine stage's output for a block of the pass `token`.

        Returns None if this process was restarted, so that `begin` must be called first, and False
        if the node is being drained, so that another engine must take the block.
        """
        if self.is_on_drained_node():
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

    def described(self) -> tuple[WarmKind | None, str]:
        """Return (`kind`, name of the engine's model); the name is "" before the first run."""
        launch: EngineLaunch | None = getattr(self.stage, "launch", None)
        return self.kind, str(launch.model.get("source")) if launch is not None else ""

    def is_idle(self) -> bool:
        """Return whether another run can use the engine.

        It must have no blocks, and its node must not be being drained.
        """
        return self.is_empty() and not self.is_on_drained_node()

    def is_empty(self) -> bool:
        with self._lock:
            return not self._inside

    def is_on_drained_node(self) -> bool:
        return self._leaving()

    def close(self) -> None:
        """End the engine, so that its GPU is free before the actor ends."""
        with self._begins:
            self._end_stage()

    def _end_stage(self) -> None:
        stage, self.stage, self._ready = self.stage, None, ""
        close = getattr(stage, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class Deaths:
    """The numbers of deaths of an engine's process at which a pass stops using the engine.

    `starting` limits the deaths during one start. `in_a_row` limits the deaths without an answered
    block in between.
    """

    starting: int
    in_a_row: int


class Forwarder:
    """The engine stage of a pass with warm engines: it sends each block to an engine's host.

    The host holds the engine's resources, not this actor. If the host's node is being drained,
    `made` starts a new host of the same `kind`. The new host takes the remaining blocks and ends
    with the pass. If this actor's own node is being drained (`leaving` returns True), its blocks
    fail, and Ray Data replaces the actor on another node. `restarts` returns how often Ray has
    restarted a host. Once the host's deaths reach a limit of `most`, every further block fails at
    once.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        hosts: Sequence[Host],
        token: str,
        kind: WarmKind,
        made: Callable[[WarmKind], Host],
        leaving: Callable[[], bool],
        most: Deaths,
        restarts: Callable[[Host], int],
    ):
        import ray

        self.launch, self.token = launch, token
        self.kind, self._made, self._leaving = kind, made, leaving
        # The id survives a restart of this actor, so the actor finds its host again.
        self.id = ray.get_runtime_context().get_actor_id() or ""
        self._most, self._restarts = most, restarts
        self._gone: Loss | None = None  # why each further block fails
        self._alive_at = 0  # restarts of the host at its last answer
        self._answered = False  # whether it has answered since its last death
        self._lock = threading.Lock()
        self.host = self._claim_host(list(hosts))
        self._alive_at = restarts(self.host)
        self._begun = False
        self._begin()

    def _claim_host(self, hosts: list[Host]) -> Host:
        """Reserve the first host that answers and is free; return it.

        A host is free if no other forwarder of the pass has reserved it and its node is not being
        drained. If no host is free, return the last that answered, without reserving it. This
        happens e.g. when this forwarder replaces a dead one, whose reservation remains.
        """
        import ray
        from ray.exceptions import RayActorError

        up = {host.is_idle.remote(): host for host in hosts}
        waiting, last = list(up), hosts[0]
        while waiting:
            (answer, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                taken = ray.get(up[answer].take.remote(self.token, self.id))
            except RayActorError as error:
                log.warning("could not reach an engine's actor: %s", error)
                continue
            last = up[answer]
            if taken:
                break
        return last

    def _begin(self) -> None:
        """Let the host start its engine for this pass; wait for a host that Ray is restarting.

        After too many deaths during the start, gives the host up: all blocks fail.
        """
        import ray
        from ray.exceptions import ActorUnavailableError

        with self._lock:
            if self._begun or self._gone:
                return
            before = self._restarts(self.host)
            while not self._begun:
                try:
                    ray.get(self.host.begin.remote(self.token, self.launch))
                    self._begun = True
                except ActorUnavailableError as error:
                    died = self._restarts(self.host) - before
                    if died >= self._most.starting:
                        self._gone = Loss(
                            STARTED_AND_DIED,
                            f"an engine's process died while starting, {died} times in a row: "
                            f"{_death_text(error)}",
                        )
                        return
                    time.sleep(REACH_AGAIN)

    def _move(self, host: Host) -> None:
        """Use a new host instead of `host`, whose node is being drained.

        The old one ends once it has no blocks.
        """
        with self._lock:
            if self.host is not host:  # another thread has replaced it
                return
            self.host, self._begun = self._made(self.kind), False
            self._alive_at = self._restarts(self.host)
        log.warning("the node of an engine is being drained: another engine replaces it")
        threading.Thread(target=_end_when_empty, args=(host,), daemon=True).start()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the engine stage's output for a block; a block of lost rows if the engine dies."""
        import ray
        from ray.exceptions import RayActorError

        if is_passthrough(table):
            return table
        try:
            while True:
                self._begin()
                if self._gone is not None:
                    return lost_block_like(table, self._gone)
                host = self.host
                made = ray.get(host.answer.remote(self.token, table))
                if made is False:
                    if self._leaving():
                        return lost_block_like(table, GIVEN_BACK)
                    self._move(host)
                elif made is not None:
                    self._answered = True
                    return made
                else:
                    self._begun = False
        except RayActorError as error:
            self._begun = False
            if "node has died" in str(error):
                return lost_block_like(table, NODE_LOST)
            self._count_death(host, error)
            # The death is already counted in Ray's table of actors.
            return lost_block_like(table, Loss(ENGINE_DIED, _death_text(error), counted=True))

    def _count_death(self, host: Host, error: Exception) -> None:
        """Count a death of the host; give it up after too many without an answer in between."""
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
                    f"an engine died {died} times in a row without an answer in between: "
                    f"{_death_text(error)}",
                )


def _end_when_empty(host: Host) -> None:
    """End a host once it has no blocks, so that its node can leave before the drain deadline."""
    import ray

    with contextlib.suppress(Exception):  # the host or the cluster is gone
        while not ray.get(host.is_empty.remote()):
            time.sleep(LOOK_AGAIN)
        ray.get(host.close.remote())
        ray.kill(host)


def _death_text(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"the process of the engine's actor ended: {message[:300]}"
