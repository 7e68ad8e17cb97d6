"""Which clusters on Kubernetes a job may have made: names, numbers, and what pods may contain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.ray_cluster import given_manifest
from prefect_raybatch.job.trusted_places import Reach
from prefect_raybatch.policy.allowed import (
    CLUSTER_FIELDS,
    CONTAINER_FIELDS,
    GROUP_FIELDS,
    POD_FIELDS,
    RESERVED_NAMESPACES,
    SECURITY_FIELDS,
    VOLUME_KINDS,
)
from prefect_raybatch.policy.in_force import POLICY_FILE
from prefect_raybatch.policy.policy import JobPolicy, KubernetesLimits, matches_any

WHERE = "cluster.kubernetes"


def check_made_pods(job: BatchJob, policy: JobPolicy) -> None:
    """Raise `ConfigError` for a cluster that the policy does not allow: the job's own, and that of
    its RayCluster block where this is loaded."""
    loaded = job.cluster.access_if_loaded
    for made in (job.cluster.kubernetes.asked, loaded.kubernetes if loaded else None):
        if made is not None:
            check_pods(made, policy)


def check_pods(made: Kubernetes, policy: JobPolicy) -> None:
    """Raise `ConfigError` naming the first thing that the policy does not allow."""
    limits, reach = policy.kubernetes, Reach(policy)
    namespace = made.namespace
    reserved = namespace is not None and RESERVED_NAMESPACES.fullmatch(namespace)
    if reserved and namespace not in limits.namespaces:
        _refuse("namespace", f"{namespace} belongs to the system", "namespaces")
    _check_names("namespace", [namespace], limits.namespaces, "namespaces")
    _check_names("context", [made.context], limits.contexts, "contexts")
    _check_names("image", [made.image], limits.images, "images")
    _check_names(
        "service_account", [made.service_account], limits.service_accounts, "service_accounts"
    )
    _check_names("secrets", made.secrets, limits.secrets, "secrets")
    if made.url is not None and policy.limited:
        reach.connect_url(f"{WHERE}.url", made.url)
    if made.manifest_file is not None and policy.limited:
        reach.read(f"{WHERE}.manifest_file", made.manifest_file)
    if (made.manifest or made.manifest_file) and not limits.manifest:
        _refuse("manifest", "a manifest decides all about the pods", "manifest: true")
    body = given_manifest(made)
    pods = made.shape.workers if body is None else sum(_pods_of(body["spec"]))
    if pods > limits.max_workers:
        _refuse("workers", f"{pods:,} are more than {limits.max_workers:,}", "max_workers")
    if body is not None:
        _check_manifest(body["spec"], limits)


def _pods_of(spec: Mapping[str, Any]) -> Iterator[int]:
    """Yield the most pods of each group of workers, with what an autoscaler may add."""
    for group in spec["workerGroupSpecs"]:
        numbers = [group.get(name) for name in ("replicas", "minReplicas", "maxReplicas")]
        if not spec.get("enableInTreeAutoscaling"):
            numbers = numbers[:1]
        most = max((number for number in numbers if isinstance(number, int)), default=0)
        hosts = group.get("numOfHosts") or 1
        yield most * (hosts if isinstance(hosts, int) else 1)


def _check_names(
    field: str, names: Iterable[str | None], allowed: tuple[str, ...], where: str
) -> None:
    for name in names:
        if name is not None and not matches_any(name, allowed):
            _refuse(field, f"{name} is not among {', '.join(allowed) or 'none'}", where)


def _check_manifest(spec: Mapping[str, Any], limits: KubernetesLimits) -> None:
    if limits.privileged:
        return
    _check_fields(spec, CLUSTER_FIELDS, "manifest.spec")
    groups = [("headGroupSpec", spec["headGroupSpec"])]
    groups += [
        (f"workerGroupSpecs[{at}]", group) for at, group in enumerate(spec["workerGroupSpecs"])
    ]
    for name, group in groups:
        place = f"manifest.spec.{name}"
        _check_fields(group, GROUP_FIELDS, place)
        for key in _mapping(group["template"].get("metadata")).get("annotations") or {}:
            if "apparmor" in str(key) or "seccomp" in str(key):
                _refuse_pod(f"{place}.template.metadata.annotations.{key}")
        _check_pod(group["template"]["spec"], f"{place}.template.spec", limits)


def _check_pod(pod: Mapping[str, Any], place: str, limits: KubernetesLimits) -> None:
    _check_fields(pod, POD_FIELDS, place)
    _check_security(pod.get("securityContext"), f"{place}.securityContext")
    _check_names(
        f"{place}.serviceAccountName",
        [pod.get("serviceAccountName")],
        limits.service_accounts,
        "service_accounts",
    )
    for at, volume in enumerate(_list(pod.get("volumes"))):
        where = f"{place}.volumes[{at}]"
        _check_fields(volume, {"name", *VOLUME_KINDS}, where)
        secret = _mapping(volume.get("secret")).get("secretName")
        _check_names(f"{where}.secret", [secret], limits.secrets, "secrets")
    for secret in _list(pod.get("imagePullSecrets")):
        _check_names(f"{place}.imagePullSecrets", [secret.get("name")], limits.secrets, "secrets")
    for kind in ("initContainers", "containers"):
        for at, container in enumerate(_list(pod.get(kind))):
            _check_container(container, f"{place}.{kind}[{at}]", limits)


def _check_container(container: Mapping[str, Any], place: str, limits: KubernetesLimits) -> None:
    _check_fields(container, CONTAINER_FIELDS, place)
    _check_security(container.get("securityContext"), f"{place}.securityContext")
    _check_names(f"{place}.image", [container.get("image")], limits.images, "images")
    for port in _list(container.get("ports")):
        for name in ("hostPort", "hostIP"):
            if port.get(name):
                _refuse_pod(f"{place}.ports.{name}")
    for source in _list(container.get("envFrom")):
        secret = _mapping(source.get("secretRef")).get("name")
        _check_names(f"{place}.envFrom", [secret], limits.secrets, "secrets")
    for variable in _list(container.get("env")):
        reference = _mapping(_mapping(variable.get("valueFrom")).get("secretKeyRef"))
        _check_names(f"{place}.env", [reference.get("name")], limits.secrets, "secrets")


def _check_security(value: object, place: str) -> None:
    for name, item in _mapping(value).items():
        if name in ("seccompProfile", "appArmorProfile"):
            if _mapping(item).get("type") != "RuntimeDefault":
                _refuse_pod(f"{place}.{name}")
        elif name == "capabilities":
            if _mapping(item).get("add"):
                _refuse_pod(f"{place}.capabilities.add")
        elif name == "privileged":
            if item is not False:
                _refuse_pod(f"{place}.privileged")
        elif name not in SECURITY_FIELDS:
            _refuse_pod(f"{place}.{name}")
        else:
            values = SECURITY_FIELDS[name]
            if values is not None and item not in values:
                _refuse_pod(f"{place}.{name}")


def _check_fields(value: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    for name in value:
        if name not in known:
            _refuse_pod(f"{place}.{name}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Mapping[str, Any]]:
    return [_mapping(one) for one in value] if isinstance(value, (list, tuple)) else []


def _refuse_pod(place: str) -> None:
    _refuse(place, "is not among the fields that a pod may have", "privileged: true")


def _refuse(field: str, why: str, remedy: str) -> None:
    raise ConfigError(
        f"{WHERE}.{field}: {why}; if a job may have this, the operator adds it to kubernetes "
        f"({remedy}) in the file of {POLICY_FILE}"
    )
