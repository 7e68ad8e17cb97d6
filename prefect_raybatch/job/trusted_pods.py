"""Checks the Kubernetes clusters that jobs create: names, numbers, and the contents of pods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.ray_cluster import given_manifest
from prefect_raybatch.job.trusted_engine import may_have_value
from prefect_raybatch.job.trusted_places import Reach
from prefect_raybatch.policy.allowed import (
    CLUSTER_FIELDS,
    CONTAINER_FIELDS,
    GROUP_FIELDS,
    METADATA_FIELDS,
    POD_ANNOTATIONS,
    POD_FIELDS,
    POD_LABELS,
    REFUSED_LABELS,
    RESERVED_NAMESPACES,
    SECURITY_FIELDS,
    VARIABLE_SOURCES,
    VOLUME_KINDS,
)
from prefect_raybatch.policy.in_force import POLICY_FILE
from prefect_raybatch.policy.policy import JobPolicy, matches_any

WHERE = "cluster.kubernetes"
SAMPLE_NAME = "raybatch-run-00000000"  # of a cluster
POD_NUMBERS = ("replicas", "minReplicas", "maxReplicas", "numOfHosts")
POD_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
POD_HOOKS = ("postStart", "preStop")


def check_made_pods(cluster: Cluster, policy: JobPolicy) -> None:
    """Raise `ConfigError` if the policy forbids the Kubernetes cluster that a job creates.

    Checks the cluster in the job, and the cluster of its RayCluster block if the block is loaded.
    """
    loaded = cluster.access_if_loaded
    for made in (cluster.kubernetes.asked, loaded.kubernetes if loaded else None):
        if made is not None:
            check_pods(made, policy)


def check_pods(kubernetes: Kubernetes, policy: JobPolicy) -> None:
    """Raise `ConfigError` for the first setting of the cluster that the policy rejects."""
    limits, reach = policy.kubernetes, Reach(policy)
    namespace = kubernetes.namespace
    reserved = namespace is not None and RESERVED_NAMESPACES.fullmatch(namespace)
    if reserved and namespace not in limits.namespaces:
        _refuse("namespace", f"{namespace} belongs to the system", "namespaces")
    _check_names("namespace", [namespace], limits.namespaces, "namespaces")
    _check_names("context", [kubernetes.context], limits.contexts, "contexts")
    _check_names("image", [kubernetes.image], limits.images, "images")
    _check_names(
        "service_account", [kubernetes.service_account], limits.service_accounts, "service_accounts"
    )
    _check_names("secrets", kubernetes.secrets, limits.secrets, "secrets")
    _check_variables("env", kubernetes.env, policy)
    if kubernetes.url is not None and policy.limited:
        # The run's own URL is checked once the cluster's name is known: see RunCluster.url.
        url = kubernetes.server_url(SAMPLE_NAME, namespace or "namespace")
        reach.connect_url(f"{WHERE}.url", url)
    if kubernetes.manifest_file is not None and policy.limited:
        reach.read(f"{WHERE}.manifest_file", kubernetes.manifest_file)
    if (kubernetes.manifest or kubernetes.manifest_file) and not limits.manifest:
        _refuse("manifest", "a manifest can set everything about the pods", "manifest: true")
    body = given_manifest(kubernetes)
    pods = kubernetes.shape.workers if body is None else sum(_pods_of(body["spec"]))
    if pods > limits.max_workers:
        _refuse("workers", f"{pods:,} are more than {limits.max_workers:,}", "max_workers")
    if body is not None:
        _check_manifest(body["spec"], policy)


def _pods_of(spec: Mapping[str, Any]) -> Iterator[int]:
    """Yield the maximum number of pods of each worker group in the spec of a RayCluster.

    This is the largest of `replicas`, `minReplicas` and, with an autoscaler, `maxReplicas`, times
    `numOfHosts`. KubeRay creates `minReplicas` pods even without an autoscaler. Raises
    `ConfigError` for a number that is no integer.
    """
    for at, group in enumerate(spec["workerGroupSpecs"]):
        numbers = {name: group.get(name) for name in POD_NUMBERS if group.get(name) is not None}
        for name, number in numbers.items():
            if type(number) is not int:
                place = f"manifest.spec.workerGroupSpecs[{at}].{name}"
                _refuse(place, f"{number!r} is not a number of pods", "none: write a whole number")
        hosts = numbers.pop("numOfHosts", 1)
        if not spec.get("enableInTreeAutoscaling"):
            numbers.pop("maxReplicas", None)
        yield max(numbers.values(), default=0) * hosts


def _check_names(
    field: str, names: Iterable[str | None], allowed: tuple[str, ...], where: str
) -> None:
    for name in names:
        if name is not None and not matches_any(name, allowed):
            _refuse(
                field, f"{name} is not allowed (allowed: {', '.join(allowed) or 'none'})", where
            )


def _check_variables(field: str, variables: Mapping[str, str], policy: JobPolicy) -> None:
    """Raise `ConfigError` for an environment variable that a job may not set on pods.

    Such a variable, or a path in its value, could decide which code a process loads. Does nothing
    for a job that its owner runs.
    """
    for name, value in variables.items() if policy.limited else ():
        if not policy.may_set_variable(name):
            raise ConfigError(
                f"{WHERE}.{field}: a job may not set {name}; put it into the image, or add it to "
                f"engine_variables in the file of {POLICY_FILE}"
            )
        if not may_have_value(name, value, policy):
            raise ConfigError(
                f"{WHERE}.{field}: {name} may not contain a path, a URL or control characters in a "
                "job, since a library may open what it names; correct it, or add the variable to "
                f"engine_variables in the file of {POLICY_FILE}"
            )


def _check_manifest(spec: Mapping[str, Any], policy: JobPolicy) -> None:
    limits = policy.kubernetes
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
        _check_metadata(group["template"].get("metadata"), f"{place}.template.metadata")
        _check_pod(group["template"]["spec"], f"{place}.template.spec", policy)


def _check_metadata(value: object, place: str) -> None:
    metadata = _mapping(value, place)
    _check_fields(metadata, METADATA_FIELDS, place)
    for name in _mapping(metadata.get("annotations"), f"{place}.annotations"):
        if not matches_any(str(name), POD_ANNOTATIONS):
            _refuse_pod(f"{place}.annotations.{name}")
    for name in _mapping(metadata.get("labels"), f"{place}.labels"):
        plain = "/" not in str(name) and name not in REFUSED_LABELS
        if not plain and not matches_any(str(name), POD_LABELS):
            _refuse_pod(f"{place}.labels.{name}")


def _check_pod(pod: Mapping[str, Any], place: str, policy: JobPolicy) -> None:
    limits = policy.kubernetes
    _check_fields(pod, POD_FIELDS, place)
    _check_security(pod.get("securityContext"), f"{place}.securityContext")
    _check_names(
        f"{place}.serviceAccountName",
        [pod.get("serviceAccountName")],
        limits.service_accounts,
        "service_accounts",
    )
    for at, volume in enumerate(_list(pod.get("volumes"), f"{place}.volumes")):
        where = f"{place}.volumes[{at}]"
        _check_fields(volume, {"name", *VOLUME_KINDS}, where)
        secret = _mapping(volume.get("secret"), f"{where}.secret").get("secretName")
        _check_names(f"{where}.secret", [secret], limits.secrets, "secrets")
    for secret in _list(pod.get("imagePullSecrets"), f"{place}.imagePullSecrets"):
        _check_names(f"{place}.imagePullSecrets", [secret.get("name")], limits.secrets, "secrets")
    for kind in ("initContainers", "containers"):
        for at, container in enumerate(_list(pod.get(kind), f"{place}.{kind}")):
            _check_container(container, f"{place}.{kind}[{at}]", policy)


def _check_container(container: Mapping[str, Any], place: str, policy: JobPolicy) -> None:
    limits = policy.kubernetes
    _check_fields(container, CONTAINER_FIELDS, place)
    _check_security(container.get("securityContext"), f"{place}.securityContext")
    _check_names(f"{place}.image", [container.get("image")], limits.images, "images")
    for port in _list(container.get("ports"), f"{place}.ports"):
        for name in ("hostPort", "hostIP"):
            if port.get(name):
                _refuse_pod(f"{place}.ports.{name}")
    for source in _list(container.get("envFrom"), f"{place}.envFrom"):
        secret = _mapping(source.get("secretRef"), f"{place}.envFrom").get("name")
        _check_names(f"{place}.envFrom", [secret], limits.secrets, "secrets")
    for variable in _list(container.get("env"), f"{place}.env"):
        given = {str(variable.get("name")): str(variable.get("value") or "")}
        _check_variables(f"{place}.env", given, policy)
        source = _mapping(variable.get("valueFrom"), f"{place}.env")
        _check_fields(source, VARIABLE_SOURCES, f"{place}.env.valueFrom")
        reference = _mapping(source.get("secretKeyRef"), f"{place}.env.valueFrom")
        _check_names(f"{place}.env", [reference.get("name")], limits.secrets, "secrets")
    for name in POD_PROBES:
        _check_request(container.get(name), f"{place}.{name}")
    hooks = _mapping(container.get("lifecycle"), f"{place}.lifecycle")
    for name in POD_HOOKS:
        _check_request(hooks.get(name), f"{place}.lifecycle.{name}")


def _check_request(value: object, place: str) -> None:
    """Reject a pod's probe or hook that names a host, because the kubelet would contact it."""
    for kind, request in _mapping(value, place).items():
        if kind in ("httpGet", "tcpSocket") and "host" in _mapping(request, f"{place}.{kind}"):
            _refuse_pod(f"{place}.{kind}.host")


def _check_security(value: object, place: str) -> None:
    for name, item in _mapping(value, place).items():
        if name in ("seccompProfile", "appArmorProfile"):
            if _mapping(item, f"{place}.{name}").get("type") != "RuntimeDefault":
                _refuse_pod(f"{place}.{name}")
        elif name == "capabilities":
            _check_fields(_mapping(item, f"{place}.{name}"), {"drop"}, f"{place}.{name}")
        elif name == "privileged":
            if item is not False:
                _refuse_pod(f"{place}.privileged")
        elif name not in SECURITY_FIELDS:
            _refuse_pod(f"{place}.{name}")
        else:
            values = SECURITY_FIELDS[name]
            if values is not None and not any(item is one for one in values):
                _refuse_pod(f"{place}.{name}")


def _check_fields(value: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    for name in value:
        if name not in known:
            _refuse_pod(f"{place}.{name}")


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    """Return a mapping unchanged, or {} for None; raise `ConfigError` for any other value.

    `place` is the value's dotted path, for the error.
    """
    if value is not None and not isinstance(value, Mapping):
        _refuse_pod(place)
    return value or {}


def _list(value: object, place: str) -> list[Mapping[str, Any]]:
    if value is not None and not isinstance(value, (list, tuple)):
        _refuse_pod(place)
    return [_mapping(one, place) for one in value or ()]


def _refuse_pod(place: str) -> NoReturn:
    _refuse(place, "is not a field that a pod may have", "privileged: true")


def _refuse(field: str, why: str, remedy: str) -> NoReturn:
    raise ConfigError(
        f"{WHERE}.{field}: {why}; to allow it, add it to kubernetes ({remedy}) in the file of "
        f"{POLICY_FILE}"
    )
