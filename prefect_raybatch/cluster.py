"""Connects to a Ray cluster or starts a local one, and says whether a job fits it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.errors import InsufficientResources
from prefect_raybatch.job import BatchJob

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """What the cluster has in all (logical CPUs, GPUs, nodes) and where it is."""

    cpus: float
    gpus: float
    nodes: int
    address: str
    node_gpus: float = 0.0  # of the node with most
    accelerators: tuple[str, ...] = ()  # Ray's names


@dataclass(frozen=True)
class Needs:
    """What a job takes while it runs: engines, and at least one task of each CPU stage."""

    cpus: float
    gpus: float
    device: str


def address_of(job: BatchJob) -> str | None:
    """The cluster a job would use; None when one is started here."""
    return job.cluster.address or os.environ.get("RAY_ADDRESS") or None


@contextmanager
def connected(job: BatchJob) -> Iterator[Capacity]:
    """A connection to the job's cluster for the block; stops only what it started itself.

    Raises `InsufficientResources` with the address when no cluster answers.
    """
    import ray

    if ray.is_initialized():  # inside somebody's pipeline: theirs to stop
        yield capacity()
        return
    address = address_of(job)
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # else lines of plans and timings
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    # Ray's C++ side logs an error for each engine that may be restarted, which is on purpose.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    if not address:
        quiet |= {"num_cpus": local_cpus(job), "include_dashboard": False}
    try:
        with _sigterm_kept():
            ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InsufficientResources(
            f"no Ray cluster answers at {address or 'this machine'}: {error}"
        ) from None
    try:
        yield capacity()
    finally:
        ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray puts its own handler for SIGTERM in place of Prefect's, which would turn cancelling into
    a crash; whoever had set one gets it back. Ray's stays where there was none."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def local_cpus(job: BatchJob) -> int:
    """Logical CPUs of a local cluster: the machine's, but never fewer than the job's stages take,
    since Ray would wait for ever for the missing one (a pool of actors can hold them all)."""
    return max(os.cpu_count() or 1, math.ceil(_stage_cpus(job) + job.engine.num_cpus))


def capacity() -> Capacity:
    """Of the cluster this process is connected to."""
    import ray

    total = ray.cluster_resources()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    mark = "accelerator_type:"
    return Capacity(
        total.get("CPU", 0.0),
        total.get("GPU", 0.0),
        len(alive),
        ray.get_runtime_context().gcs_address,
        max((node.get("GPU", 0.0) for node in alive), default=0.0),
        tuple(sorted(name.removeprefix(mark) for name in total if name.startswith(mark))),
    )


def actor_states(kind: str) -> dict[str, int]:
    """How many of this driver's actors whose class name holds `kind` are in which of Ray's states
    (ALIVE, RESTARTING, PENDING_CREATION, ...); those that are dead for good are left out."""
    import ray
    from ray._private import state  # its public cover needs the dashboard

    if not ray.is_initialized():
        return {}
    found = state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    names = (
        actor["State"]
        for actor in found.values()
        if kind in f"{actor.get('ActorClassName')} {actor.get('Name')}"
    )
    return dict(Counter(name for name in names if name != "DEAD"))


def device(job: BatchJob, gpus: float) -> str:
    """cpu or gpu, as the job says or as the cluster has."""
    if job.engine.device != "auto":
        return job.engine.device
    return "gpu" if gpus >= 1 else "cpu"


def needs(job: BatchJob, gpus: float) -> Needs:
    """What the job takes on a cluster with `gpus` GPUs."""
    kind = device(job, gpus)
    wanted = job.engine.gpus if kind == "gpu" else 0
    return Needs(job.engine.replicas * job.engine.num_cpus + _stage_cpus(job), wanted, kind)


def check_fit(job: BatchJob, have: Capacity) -> Needs:
    """Raises `InsufficientResources` before an engine starts if the cluster can never hold it."""
    want = needs(job, have.gpus)
    short = []
    if want.gpus > have.gpus:
        short.append(
            f"{want.gpus:g} GPUs ({job.engine.replicas} engines * "
            f"{job.engine.gpus_per_replica}, {job.engine.engines_per_gpu} engines a GPU) of "
            f"{have.gpus:g}; lower engine.replicas or "
            "tensor_parallel_size, or set engine.device: cpu"
        )
    elif want.gpus and job.engine.gpus_per_replica > have.node_gpus:
        short.append(
            f"{job.engine.gpus_per_replica} GPUs on one node for an engine, where no node has more "
            f"than {have.node_gpus:g}; lower tensor_parallel_size or pipeline_parallel_size"
        )
    kind = job.engine.accelerator_type
    if want.gpus and kind and kind not in have.accelerators:
        short.append(
            f"accelerator {kind}, where the cluster has {', '.join(have.accelerators) or 'none'}; "
            "correct engine.accelerator_type"
        )
    if want.cpus > have.cpus:
        short.append(
            f"{want.cpus:g} logical CPUs of {have.cpus:g}; lower engine.replicas, engine.num_cpus "
            "or cluster.prepare/finish.num_cpus"
        )
    if short:
        raise InsufficientResources(
            f"the Ray cluster at {have.address} is too small: needs " + "; and ".join(short)
        )
    return want


def _stage_cpus(job: BatchJob) -> float:
    return job.cluster.prepare.num_cpus + job.cluster.finish.num_cpus
