"""Implements `HostAccess` of `warm` with Ray: starts, queries and ends actors with engines."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster.warm import Host, WarmKind

if TYPE_CHECKING:
    from prefect_raybatch.stages.engine import EngineLaunch


IDLE_WAIT = 10.0  # seconds in which an engine's actor must answer whether it is idle
EARLY = "early"  # the token of a prewarmed start
ENDING = 30.0  # seconds that engines may take to end by themselves
NAMESPACE = "raybatch"  # of the actors that outlast their command


class RayHosts:
    """Starts, queries and ends hosts: Ray actors that hold one engine each, in the joined cluster.

    If `outlast` is set, hosts that this process starts outlive it, and later processes can find
    them. `waiting` says whether the cluster may have hosts of earlier processes.
    """

    def __init__(self) -> None:
        self.outlast = self.waiting = False

    def standing(self, end_silent: bool = True) -> list[tuple[WarmKind, Host, str]]:
        """Return (kind, host, model's name) of the engines that outlasted their command.

        With `end_silent`, ends hosts that do not answer. Pass False while another command may use
        the cluster, since its hosts may be silent because they are starting.
        """
        import ray

        hosts: list[Host] = []
        for found in ray.util.list_named_actors(all_namespaces=True):
            if found["namespace"] == NAMESPACE:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    hosts.append(ray.get_actor(found["name"], namespace=NAMESPACE))
        answers = self._asked([(host, "described") for host in hosts], IDLE_WAIT)
        pairs = list(zip(hosts, answers, strict=True))
        if end_silent:
            silent = [host for host, answer in pairs if not isinstance(answer, tuple)]
            self.end(silent, kindly=False)
        return [(a[0], host, a[1]) for host, a in pairs if isinstance(a, tuple)]

    def leftover_hosts(self) -> list[tuple[WarmKind, Host]]:
        return [(kind, host) for kind, host, _ in self.standing()] if self.outlast else []

    def make(self, kind: WarmKind) -> Host:
        import ray

        # Imported here, because commands that only show a run need no engine stage.
        from prefect_raybatch.cluster.warm_actors import EngineHost
        from prefect_raybatch.stages.ray_internals import node_is_leaving

        made: Any = ray.remote(EngineHost)
        options = {name: v for name, v in kind.options.items() if name != "max_task_retries"}
        if self.outlast:
            name = f"engine-{uuid.uuid4().hex}"
            options |= {"lifetime": "detached", "name": name, "namespace": NAMESPACE}
        actor = made.options(**options, max_concurrency=kind.calls)
        return actor.remote(kind.engine, node_is_leaving, kind if self.outlast else None)

    def begin(self, host: Host, launch: EngineLaunch) -> object:
        return host.begin.remote(EARLY, launch)

    def begun(self, starts: Sequence[object]) -> bool:
        import ray

        return not ray.wait(list(starts), num_returns=len(starts), timeout=0)[1]

    def idle(self, hosts: Sequence[Host]) -> list[bool]:
        return [found is True for found in self._asked([(h, "is_idle") for h in hosts], IDLE_WAIT)]

    def on_drained_nodes(self, hosts: Sequence[Host]) -> list[bool]:
        return [
            found is True
            for found in self._asked([(h, "is_on_drained_node") for h in hosts], IDLE_WAIT)
        ]

    def end(self, hosts: Sequence[Host], kindly: bool) -> None:
        import ray

        if not ray.is_initialized():
            return
        if kindly:
            self._asked([(host, "close") for host in hosts], ENDING)
        for host in hosts:
            with contextlib.suppress(Exception):  # the cluster has ended, with its actors
                ray.kill(host)

    def _asked(self, calls: Sequence[tuple[Host, str]], seconds: float) -> list[object]:
        """Call (host, method name) pairs on the hosts; return their results in order.

        All must answer within `seconds`; for a call that fails or is late, the result is the
        exception.
        """
        import ray

        found: list[object] = []
        until = time.monotonic() + seconds
        try:
            references = [getattr(host, method).remote() for host, method in calls]
        except Exception as error:  # the cluster has ended
            return [error] * len(calls)
        for reference in references:
            try:
                found.append(ray.get(reference, timeout=max(0.0, until - time.monotonic())))
            except Exception as error:
                found.append(error)
        return found
