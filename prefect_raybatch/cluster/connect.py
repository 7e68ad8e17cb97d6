"""Connects to a Ray cluster or starts a local one, and checks whether a job fits it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prefect_raybatch import cpu_limit, nvml
from prefect_raybatch.cluster.ray_process import WORKER_PYTHON, RayProcess
from prefect_raybatch.cluster.sharing import ClusterSession, Tenant
from prefect_raybatch.cluster.warm import IDLE_SECONDS, WarmEngines, WarmKind, WarmLease
from prefect_raybatch.cluster.warm_hosts import RayHosts
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.imports.start import actor_options, import_process
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.ray_cluster import pod_groups
from prefect_raybatch.sizing.cards import card
from prefect_raybatch.sizing.sizes import (
    Capacity,
    Pool,
    capacity_of_pods,
    max_model_copies,
    pool_for,
)
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)
KNOCK = 2.0  # seconds a node has to accept a connection

Nodes = list[dict[str, Any]]  # rows of Ray's table of nodes


@dataclass(frozen=True)
class Needs:
    """The minimum CPUs and GPUs of a run: for its fewest engines and a task of each CPU stage.

    `device` is where the engines run: "gpu" or "cpu".
    """

    cpus: float
    gpus: float
    device: str


def address_of(cluster: ClusterSpec) -> str | None:
    """Return the address of the existing cluster that a job joins; None if it joins none.

    It is cluster.address or, without one, RAY_ADDRESS. None means that the cluster is started on
    this machine, or created on Kubernetes for the run.
    """
    if cluster.access.kubernetes is not None:
        return None
    address = cluster.access.address or os.environ.get("RAY_ADDRESS")
    return None if address in ("", LOCAL) else address


RAY, HOSTS = RayProcess(), RayHosts()
CLUSTER_SESSION = ClusterSession(RAY, WarmEngines(HOSTS))


@contextmanager
def warm_engines(idle_seconds: float = IDLE_SECONDS) -> Iterator[None]:
    """Keep engines running between the runs of a flow.

    A later run in the block reuses them, with their prefix cache, if its engines would start with
    the same model, arguments and environment.

        with warm_engines():
            first = batch_inference(...)
            second = batch_inference(...)

    The block also keeps the Ray cluster if the runs start one. A waiting engine ends when another
    run needs its resources, after `idle_seconds`, or at the end of the block. The engines belong to
    this process: runs with cluster.job_server are separate Ray jobs and start their own.

    Raises `ConfigError` unless `idle_seconds` is above 0.
    """
    if not idle_seconds > 0:
        raise ConfigError(
            f"warm_engines(idle_seconds={idle_seconds!r}): the seconds that an engine waits for "
            f"the next run must be above 0, such as {IDLE_SECONDS:g}"
        )
    with CLUSTER_SESSION.kept_warm(idle_seconds):
        yield


@contextmanager
def outlasting(
    standing: Callable[[], str | None], idle_seconds: float, waiting: bool
) -> Iterator[None]:
    """Within the block, let runs join a local cluster that outlives this process.

    `standing` returns the address of that cluster; None if it did not start. `waiting` is True if
    engines of earlier commands may wait there. Runs lease waiting engines, and leave their own
    engines there. If `standing` returns None, or the cluster does not answer, runs start a local
    cluster that ends with the block. An engine ends when it has waited `idle_seconds` for a run.
    """
    RAY.standing, HOSTS.outlast, HOSTS.waiting = standing, True, waiting
    with CLUSTER_SESSION.kept_warm(idle_seconds):
        try:
            yield
        finally:
            if RAY.is_standing:
                CLUSTER_SESSION.warm.forget()
            RAY.standing, HOSTS.outlast, HOSTS.waiting = lambda: None, False, False


@contextmanager
def engines_imported(cluster: ClusterSpec) -> Iterator[None]:
    """Import vLLM in a separate process within the block, so that engines start faster.

    The actors of engines on a local cluster are forked from that process. Does nothing if the run
    does not start a local cluster, if engines of earlier commands may be waiting, or if this
    machine has GPUs of different kinds.
    """
    local = not (cluster.access.remote or address_of(cluster) or RAY.joined() or HOSTS.waiting)
    have = this_machine(cluster) if local and cluster.engine_env is not None else None
    # vLLM queries the first GPU's features at import. If GPUs differ, each engine must see its own.
    if have is None or len(have.accelerators) > 1:
        yield
        return
    from prefect_raybatch.stages.engine import CPU_ENV, POOLING_ENV

    # Read when torch is loaded. Ray gives an actor as many threads as it has CPUs.
    threads = {"OMP_NUM_THREADS": str(max(1, int(cluster.engine_cpus)))}
    defaults = CPU_ENV
    if have.gpus:
        defaults = threads | POOLING_ENV if cluster.core_in_actor else threads
    with import_process(os.environ.get(WORKER_PYTHON), cluster.engine_env, defaults):
        yield


def forked_options(cluster: ClusterSpec) -> dict[str, object]:
    """Return the Ray options for forking an engine's actor from the process that has imported vLLM.

    {} if it cannot be forked from there, e.g. on a remote cluster.
    """
    remote = cluster.access.remote or address_of(cluster)
    return {} if remote else actor_options(cluster.engine_env)


@contextmanager
def connected(cluster: ClusterSpec, user: Tenant | None = None) -> Iterator[Capacity]:
    """Connect to the cluster of a run, or start it, for the block; yield its capacity.

    All runs of this process share the connection. The last one to leave closes it, and stops the
    cluster if it was started here. `user` is the run as a tenant of the cluster; by default a new
    one.

    Raises `ClusterUnavailable` with the address if no cluster answers. Raises `ConfigError` if runs
    of this process are in another cluster, if the job sets `cluster.kubernetes`, or if Ray's token
    is missing or wrong.
    """
    if cluster.access.kubernetes is not None:
        raise ConfigError(
            "cluster.kubernetes creates a cluster only for a run. For this command, set "
            "cluster.address to an existing cluster, or remove both"
        )
    user = user or Tenant(cluster.name)
    user.access = cluster.access
    end_by_sigterm()
    with CLUSTER_SESSION.joined(user, address_of(cluster), local_cpus(cluster)):
        yield capacity()


@contextmanager
def cluster_starting(cluster: ClusterSpec) -> Iterator[None]:
    """Start a run's local cluster in another thread, while the block prepares the run.

    Does nothing if the run uses an existing or a remote cluster.
    """
    if cluster.access.remote or address_of(cluster):
        yield
        return
    end_by_sigterm()
    with CLUSTER_SESSION.starting_cluster(None, local_cpus(cluster)):
        yield


@contextmanager
def admitted(
    spec: SizeSpec,
    capacity: Capacity,
    pool: Pool | None,
    user: Tenant,
    kind: WarmKind | None = None,
) -> Iterator[WarmLease | None]:
    """Wait until the resources of the run `user` are free; hold them for the block.

    With a `pool`, these are the resources of all its engines and of the CPU stages. If `pool` is
    None, they are all resources of the cluster (`capacity`). Yields a lease of warm engines of this
    `kind`. Yields None if `kind` is None, or if engines are not kept warm and none was prewarmed.
    """
    most = {"CPU": capacity.cpus, "GPU": capacity.gpus}
    takes = dict(most)
    if pool is not None:  # for its maximum number of engines, or they would starve other runs
        cpus = pool.engines * spec.cpus + spec.stage_cpus
        takes = {"CPU": min(cpus, capacity.cpus), "GPU": min(pool.gpus[1], capacity.gpus)}
    engines = 0 if pool is None else pool.engines
    with CLUSTER_SESSION.admitted(user, takes, most, kind, engines) as lease:
        yield lease


def end_by_sigterm() -> None:
    """Make SIGTERM raise `SystemExit`, so that `finally` clauses run before the process ends.

    Call this in the main thread before another thread starts Ray: Ray installs such a handler only
    if the main thread starts it. Does nothing in other threads, where Python accepts no handlers,
    or if SIGTERM has a handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def local_cpus(cluster: ClusterSpec) -> int:
    """Return how many logical CPUs a local cluster gets: all usable ones, or more if needed.

    A task of each CPU stage and an engine must fit at once. With fewer CPUs, Ray would wait
    forever, because a pool of actors can hold all of them.
    """
    stage_cpus = cluster.prepare.num_cpus + cluster.finish.num_cpus
    return max(cpu_limit.usable_cpus(), math.ceil(stage_cpus + cluster.engine_cpus))


def capacity() -> Capacity:
    """Return the capacity of the cluster that this process is connected to."""
    import ray

    total = ray.cluster_resources()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [node for node in alive if node.get("GPU", 0) >= 1]
    mark = "accelerator_type:"
    return Capacity(
        total.get("CPU", 0.0),
        total.get("GPU", 0.0),
        len(alive),
        ray.get_runtime_context().gcs_address,
        tuple(sorted(node["GPU"] for node in gpus)),
        tuple(sorted(name.removeprefix(mark) for name in total if name.startswith(mark))),
        min((node.get("CPU", 0.0) / node["GPU"] for node in gpus), default=0.0),
        # The driver can measure only the GPUs of its own node.
        _measured() if len(alive) == 1 and gpus else 0,
    )


def glance(cluster: ClusterSpec) -> Capacity | None:
    """Return the capacity of a run's cluster as far as it is known without joining it.

    The first case that applies decides:

    - For a run on Kubernetes, return the capacity of the pods that it will request.
    - For a cluster with a job server, return None.
    - If this process has joined a cluster, return that cluster's capacity.
    - If the run starts a local cluster, return this machine's capacity.
    - For any other cluster, return None.
    """
    made = cluster.access.kubernetes
    if made is not None:
        return capacity_of_pods(pod_groups(made), cluster.accelerator)
    if cluster.access.remote:
        return None
    with CLUSTER_SESSION.visited() as there:
        if there:
            return capacity()
    return None if address_of(cluster) else this_machine(cluster)


def this_machine(cluster: ClusterSpec) -> Capacity:
    """Return the capacity that a local cluster of the run has, or would have, on this machine."""
    cards, _ = nvml.gpus_here()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        cards = cards[: len([name for name in visible.split(",") if name.strip()])]
    cpus, count = local_cpus(cluster), len(cards)
    return Capacity(
        cpus,
        count,
        1,
        "this machine",
        (count,) if count else (),
        tuple(sorted({found.name if (found := card(c.name)) else c.name for c in cards})),
        cpus / count if count else 0.0,
        _measured(),
    )


def _measured() -> int:
    """Return the memory, in bytes, of this machine's smallest GPU; 0 if none is visible."""
    return int(min((gpu.mib for gpu in nvml.gpus_here()[0]), default=0)) << 20


def dashboard_url() -> str:
    """Return the URL of the dashboard of the cluster that this process is in; "" if it has none."""
    from prefect_raybatch.stages.ray_internals import dashboard_address

    url = dashboard_address()
    return url if not url or "://" in url else f"http://{url}"


def nodes(ask: Callable[[Callable[[], Nodes]], Nodes] = lambda work: work()) -> set[str]:
    """Return the ids of the live nodes of the cluster that this process has joined.

    Each node is contacted, because Ray takes up to half a minute to notice that one is dead. `ask`
    is called with `ray.nodes` and returns its result. It can limit the time of the call.
    """
    import ray

    found = set()
    for node in ask(ray.nodes):
        place = node["NodeManagerAddress"], node["NodeManagerPort"]
        with suppress(OSError):
            if node["Alive"]:
                socket.create_connection(place, KNOCK).close()
                found.add(node["NodeID"])
    return found


def leaving() -> dict[str, float | None]:
    """Return {address: seconds until the node ends, None if unknown} of nodes being drained."""
    from prefect_raybatch.stages.ray_internals import leaving_nodes

    found = leaving_nodes() if is_joined() else {}
    if not found:
        return {}
    import ray

    names = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return {names.get(id, id[:8]): left for id, left in found.items()}


def is_joined() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    return CLUSTER_SESSION.ray.joined()


def actor_states(kind: str) -> dict[str, int]:
    """Count this driver's actors by Ray state (ALIVE, RESTARTING, PENDING_CREATION, ...).

    Counts actors with `kind` in their name or class name, except permanently dead ones.
    """
    import ray

    from prefect_raybatch.stages.ray_internals import actors_of_this_job

    if not ray.is_initialized():
        return {}
    names = (
        actor["State"]
        for actor in actors_of_this_job(detached=RAY.is_standing)
        if kind in f"{actor.get('ActorClassName')} {actor.get('Name')}"
    )
    return dict(Counter(name for name in names if name != "DEAD"))


def actor_deaths(kind: str) -> dict[str, tuple[int, str]]:
    """Return {actor id: (number of deaths, text)} for this driver's actors.

    Counts actors with `kind` in their name or class name. The text names process id and node; while
    Ray restarts an actor, those of the process that died. It is "" if no process has started. An
    actor that was ended on purpose has not died.
    """
    import ray

    from prefect_raybatch.stages.ray_internals import actors_of_this_job, has_died

    if not ray.is_initialized():
        return {}
    found, names = {}, dict[str, str]()
    for actor in actors_of_this_job(detached=RAY.is_standing):
        if kind not in f"{actor.get('ActorClassName')} {actor.get('Name')}":
            continue
        place, host = actor["Address"], actor["Address"]["IPAddress"]
        if actor["Pid"] and not host:
            names = names or {n["NodeID"]: str(n["NodeManagerAddress"]) for n in ray.nodes()}
            host = names.get(place["NodeID"], place["NodeID"][:8])
        words = f"process {actor['Pid']} on node {host}" if actor["Pid"] else ""
        died = int(actor["NumRestarts"]) + has_died(actor)
        found[str(actor["ActorID"])] = (died, words)
    return found


def needs(spec: SizeSpec, pool: Pool) -> Needs:
    """Return the minimum resources that a run needs with a pool of engines."""
    cpus = pool.fewest * spec.cpus + spec.stage_cpus
    return Needs(cpus, pool.gpus[0], pool.device)


def check_fit(spec: SizeSpec, capacity: Capacity, pool: Pool | None = None) -> Needs:
    """Return the run's minimum resources; raise `InsufficientResources` if the cluster lacks them.

    `capacity` is all that the cluster has, whether free or not. `pool` is the run's pool of
    engines. By default, it is the pool that the run would choose for that capacity.
    """
    pool = pool or pool_for(spec, capacity)
    want = needs(spec, pool)
    short = []
    parallel = f"tensor_parallel_size {spec.tensor} * pipeline_parallel_size {spec.pipeline}"
    replicas = counted(pool.replicas[0], "replica")
    if want.gpus > capacity.gpus:
        short.append(
            f"{counted(want.gpus, 'GPU')} ({replicas} * {parallel}), but has {capacity.gpus:g}; "
            "lower engine.replicas or engine.tensor_parallel_size, or set engine.device: cpu"
        )
    elif want.gpus and max_model_copies(spec, capacity) < pool.replicas[0]:
        short.append(
            f"{counted(spec.gpus_per_replica, 'GPU')} on one node for each of {replicas} "
            f"({parallel}), but the nodes have {_list(capacity.gpus_by_node)}, and an "
            "engine cannot span nodes; lower engine.replicas, tensor_parallel_size or "
            "pipeline_parallel_size, or set engine.distributed_executor_backend: ray"
        )
    kind = spec.accelerator
    if want.gpus and kind and kind not in capacity.accelerators:
        short.append(
            f"accelerator {kind}, but has {', '.join(capacity.accelerators) or 'none'}; "
            "correct engine.accelerator_type"
        )
    if want.cpus > capacity.cpus:
        short.append(
            f"{want.cpus:g} logical CPUs, but has {capacity.cpus:g}; lower engine.replicas, "
            "engine.engines_per_gpu, engine.num_cpus or cluster.prepare/finish.num_cpus"
        )
    if short:
        raise InsufficientResources(
            f"the Ray cluster at {capacity.address} is too small: it needs " + "; and ".join(short)
        )
    return want


def _list(gpus: tuple[float, ...]) -> str:
    return ", ".join(f"{count:g}" for count in gpus) or "none"
