"""The pods of `cluster.kubernetes`: their resources, and whether the job's engines fit on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from prefect_raybatch.bounded import read_regular_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import missing_path
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.escalate import larger_fields
from prefect_raybatch.job.job_file import MAX_JOB_BYTES
from prefect_raybatch.job.kubernetes import GPU, Kubernetes, check_manifest, quantity
from prefect_raybatch.words import counted
from prefect_raybatch.yaml_text import read_yaml_documents


class PodGroup(NamedTuple):
    """A group of `pods` identical pods. Ray has `gpus` GPUs and `cpus` CPUs on each."""

    name: str
    pods: int
    gpus: int
    cpus: float


def check_made_cluster(access: ClusterAccess, engine: Engine, larger: Engine | None) -> None:
    """Raise `ConfigError` if the cluster that a job creates can never hold the job's engines.

    Does nothing if the job creates no cluster. `larger` is the second engine of a cascade, or None.
    """
    if access.kubernetes is None:
        return
    check_shape(access.kubernetes, engine)
    if larger is not None:
        try:
            check_shape(access.kubernetes, larger)
        except ConfigError as error:
            raise ConfigError(larger_fields(str(error))) from None


def check_shape(kubernetes: Kubernetes, engine: Engine) -> None:
    """Raise `ConfigError` if the workers have too few GPUs for the fewest replicas of the engine.

    Also raises it for an unusable manifest. Accepts any workers for engines on CPUs, and workers
    without GPUs if `engine.device` is auto. Contacts no server.
    """
    groups = worker_groups(kubernetes)
    if engine.device == "cpu":
        return
    most = max((group.gpus for group in groups), default=0)
    total = sum(group.pods * group.gpus for group in groups)
    if not total:
        if engine.device == "gpu":
            raise ConfigError(
                f"cluster.kubernetes: no worker has a GPU ({GPU}), and engine.device is gpu; set "
                "gpus_per_worker, or engine.device: cpu"
            )
        return
    each = engine.gpus_per_replica
    parallel = f"engine.tensor_parallel_size {engine.tensor_parallel_size} * "
    parallel += f"pipeline_parallel_size {engine.pipeline_parallel_size}"
    if each > most and not engine.spans_nodes:
        raise ConfigError(
            f"cluster.kubernetes: an engine needs {counted(each, 'GPU')} ({parallel}) on one node, "
            f"and a worker has {most}; raise gpus_per_worker to {each}, lower the parallel sizes, "
            "or set engine.distributed_executor_backend: ray"
        )
    fewest = engine.replicas[0] if isinstance(engine.replicas, list) else engine.replicas
    if fewest == "auto":
        fewest = 1
    need = int(fewest) * each
    rooms = total // each if engine.spans_nodes else sum(g.pods * (g.gpus // each) for g in groups)
    if rooms * each < need:
        raise ConfigError(
            f"cluster.kubernetes: {counted(fewest, 'replica')} of {counted(each, 'GPU')} "
            f"({parallel}) need {counted(need, 'GPU')}, and {_groups_text(groups)} have room for "
            f"{counted(rooms * each, 'GPU')}; raise workers, or lower engine.replicas"
        )


def _groups_text(groups: list[PodGroup]) -> str:
    return " and ".join(f"{counted(g.pods, 'worker')} of {counted(g.gpus, 'GPU')}" for g in groups)


def worker_groups(kubernetes: Kubernetes) -> list[PodGroup]:
    """Return the groups of worker pods; raise `ConfigError` for an unusable manifest file."""
    body = given_manifest(kubernetes)
    if body is not None:
        return groups_of(body["spec"])
    shape = kubernetes.shape
    return [PodGroup("workers", shape.workers, shape.gpus, _whole(shape.worker_cpu))]


def pod_groups(kubernetes: Kubernetes) -> list[PodGroup]:
    """Return the groups of all pods, head first; raise `ConfigError` for an unusable manifest."""
    body = given_manifest(kubernetes)
    if body is not None:
        head = _pods("head", 1, body["spec"]["headGroupSpec"])
    else:
        head = PodGroup("head", 1, 0, float(kubernetes.shape.head_ray_cpus))
    return [head, *worker_groups(kubernetes)]


def groups_of(spec: Mapping[str, Any]) -> list[PodGroup]:
    """Return the groups of worker pods in the spec of a RayCluster."""
    return [
        _pods(
            str(group["groupName"]),
            int(group["replicas"]) * int(group.get("numOfHosts") or 1),
            group,
        )
        for group in spec["workerGroupSpecs"]
    ]


def _pods(name: str, pods: int, group: Mapping[str, Any]) -> PodGroup:
    told = group.get("rayStartParams") or {}
    cpus = float(told["num-cpus"]) if "num-cpus" in told else _of_pod(group, "cpu")
    gpus = int(told["num-gpus"]) if "num-gpus" in told else int(_of_pod(group, GPU))
    return PodGroup(name, pods, gpus, cpus)


def _of_pod(group: Mapping[str, Any], resource: str) -> float:
    """Return how much of `resource` a pod of the group has; 0 if the pod does not name it.

    Like KubeRay, reads the limits of the first container, which runs Ray. For CPUs without a limit,
    reads the requests.
    """
    resources = group["template"]["spec"]["containers"][0].get("resources") or {}
    named = resources.get("limits") or {}
    if resource not in named and resource == "cpu":
        named = resources.get("requests") or {}
    return _whole(named.get(resource, 0))


def _whole(amount: object) -> float:
    """Return a Kubernetes quantity such as 500m as a whole number, rounded up as in KubeRay."""
    return float(math.ceil(quantity(amount)))


def given_manifest(kubernetes: Kubernetes) -> dict[str, Any] | None:
    """Return the RayCluster manifest that the job sets, inline or as a file; None if it sets none.

    Raises `ConfigError` if the file cannot be read, or does not contain exactly one valid
    RayCluster.
    """
    if kubernetes.manifest is not None:
        return copy.deepcopy(kubernetes.manifest)
    if kubernetes.manifest_file is None:
        return None
    where = f"cluster.kubernetes.manifest_file: {kubernetes.manifest_file}"
    try:
        text = read_regular_file(kubernetes.manifest_file, MAX_JOB_BYTES).decode()
        found = [document.value for document in read_yaml_documents(text)]
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: {missing_path(kubernetes.manifest_file)}; check the path"
        ) from None
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    kinds = [item for item in found if isinstance(item, dict) and item.get("kind") == "RayCluster"]
    if len(kinds) != 1:
        raise ConfigError(
            f"{where} contains {counted(len(kinds), 'RayCluster')}; it must contain one"
        )
    # Name and namespace may differ: the file may also be applied by hand.
    described = {**(kinds[0].get("metadata") or {}), "name": None, "namespace": None}
    try:
        check_manifest({**kinds[0], "metadata": described})
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return {**kinds[0]}
