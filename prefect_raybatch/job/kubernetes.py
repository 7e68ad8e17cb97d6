"""The Ray cluster that a run creates on Kubernetes: `cluster.kubernetes` of a job file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import field_validator, model_validator

from prefect_raybatch.job.checks import SERVER, check_duration, seconds_of
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.secrets import PASSWORD, SAFE_NAMES, safe_variable

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
VARIABLE_NAME = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
COUNT = re.compile(r"\d{1,9}")
SCALES: dict[str | None, Decimal] = {
    None: Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(1000),
    **{letter: Decimal(1000**power) for power, letter in enumerate("MGTP", 2)},
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTP", 1)},
}
GPU = "nvidia.com/gpu"
HEAD_URL = "http://{name}-head-svc.{namespace}.svc:8265"
# Values for fields that are not set. They are no pydantic defaults, because Prefect's form would
# send those and so request a cluster: only an empty group means no cluster.
WORKERS, GPUS, WORKER_CPU, WORKER_MEMORY = 1, 1, "8", "32Gi"
HEAD_CPU, HEAD_MEMORY = "2", "8Gi"
# With less, Ray keeps an object store of 30 % of 32 GiB or more on the disk: see check_shm.
POD_SHM = "10Gi"
READY_WITHIN, LEASE, LEAST_LEASE = "30m", "1h", 120.0
SHAPE = (
    *("image", "workers", "gpus_per_worker", "worker_cpu", "worker_memory", "head_cpu"),
    *("head_memory", "shm", "service_account", "env", "secrets"),
)


def quantity(text: object) -> Decimal:
    """Return a Kubernetes quantity as a number: 0.5 for 500m, 8 for 8, 2**35 for 32Gi.

    Raises ValueError for anything else.
    """
    match = None if isinstance(text, bool) else QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(
            f"{text!r} is not a Kubernetes quantity; write for example 500m or 8 for CPUs, 512Mi "
            "or 32Gi for memory"
        )
    return Decimal(match[1]) * SCALES[match[2]]


@dataclass(frozen=True)
class PodShape:
    """Sizes of the pods of a cluster without a manifest: the job's fields, with defaults filled in.

    `workers` is the number of worker pods and `gpus` the GPUs of each. The other fields are
    Kubernetes quantities of one pod, such as 500m or 32Gi.
    """

    workers: int
    gpus: int
    worker_cpu: str
    worker_memory: str
    head_cpu: str
    head_memory: str
    shm: str

    @property
    def head_ray_cpus(self) -> int:
        """Return the number of CPUs that Ray may use on the head: whole ones, at least 1."""
        return max(1, int(quantity(self.head_cpu)))


def _filled(url: str, name: str, namespace: str) -> str:
    # str.format would also fill in parts of a value, such as {name[0]}.
    return url.replace("{name}", name).replace("{namespace}", namespace)


class Kubernetes(Group):
    """A Ray cluster that KubeRay creates for the run and that is deleted afterwards."""

    image: str | None = field(
        None,
        title="Image",
        text="Container image of the head and the workers. It must contain this "
        "package and the same versions of Ray and Python as the flow.",
    )
    workers: int | None = field(
        None, title="Workers", text=f"Number of worker pods. Default: {WORKERS}.", ge=1
    )
    gpus_per_worker: int | None = field(
        None,
        title="GPUs per worker",
        text=f"GPUs of each worker pod ({GPU}). Default: {GPUS}; 0 for a CPU cluster.",
        ge=0,
    )
    worker_cpu: str | None = field(
        None,
        title="CPUs per worker",
        text=f"CPUs of each worker pod, as a Kubernetes quantity. Default: {WORKER_CPU}.",
    )
    worker_memory: str | None = field(
        None,
        title="Memory per worker",
        text=f"Memory of each worker pod, as a Kubernetes quantity. Default: {WORKER_MEMORY}.",
    )
    head_cpu: str | None = field(
        None,
        title="Head CPUs",
        text=f"CPUs of the head pod, as a Kubernetes quantity. Default: {HEAD_CPU}.",
    )
    head_memory: str | None = field(
        None,
        title="Head memory",
        text=f"Memory of the head pod, as a Kubernetes quantity. Default: {HEAD_MEMORY}.",
    )
    shm: str | None = field(
        None,
        title="Shared memory per pod",
        text=f"Size of /dev/shm in each pod, as a Kubernetes quantity. Default: {POD_SHM}.",
    )
    service_account: str | None = field(
        None,
        title="Service account",
        text="Kubernetes service account of the pods. Default: the namespace's default account.",
    )
    env: dict[str, str] = field(
        {},
        title="Environment variables",
        text="Environment variables of the pods. Put keys into secrets instead.",
    )
    secrets: list[str] = field(
        [],
        title="Secrets",
        text="Names of Kubernetes Secrets whose entries become environment variables of the pods.",
    )
    manifest: dict[str, Any] | None = field(
        None,
        title="Manifest",
        text="Complete RayCluster manifest (ray.io/v1), in place of the fields above.",
    )
    manifest_file: str | None = field(
        None,
        title="Manifest file",
        text="Path of a YAML file with a RayCluster manifest, on the machine where the flow runs.",
    )
    namespace: str | None = field(
        None,
        title="Namespace",
        text="Kubernetes namespace of the cluster. Default: that of the flow's pod, "
        "otherwise that of the kubeconfig, otherwise default.",
    )
    context: str | None = field(
        None,
        title="Context",
        text="Context in the kubeconfig. Default: the current context, or the service "
        "account if the flow runs in a pod.",
    )
    url: str | None = field(
        None,
        title="Job server URL",
        text="URL of the cluster's job server for a flow outside the cluster network, "
        "such as an ingress. {name} and {namespace} are filled in. Default: "
        "http://{name}-head-svc.{namespace}.svc:8265.",
    )
    ready_within: str | None = field(
        None,
        title="Start timeout",
        text=f"Time to wait until all pods are ready, such as 45m. Default: {READY_WITHIN}.",
    )
    lease: str | None = field(
        None,
        title="Lease",
        text="Time that the cluster may outlive its flow, such as 2h. Default: "
        f"{LEASE}. After that, `raybatch reconcile` deletes it.",
    )
    keep: str | None = field(
        None,
        title="Retention",
        text="Time to keep the cluster after the run for debugging, such as 30m; then "
        "`raybatch reconcile` deletes it. Default: delete it when the run ends.",
    )

    @field_validator("worker_cpu", "worker_memory", "head_cpu", "head_memory", "shm", mode="before")
    @classmethod
    def _quantities(cls, value: object) -> object:
        if value is None:
            return None
        if not quantity(value) > 0:
            raise ValueError(f"{value!r} is not above 0; write a larger quantity")
        return str(value)

    @field_validator("worker_memory", "head_memory", "shm")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is not None and quantity(value) < 2**20:
            raise ValueError(f"{value!r} is less than 1 MiB; did you mean {value}Gi?")
        return value

    @field_validator("namespace", "service_account")
    @classmethod
    def _names(cls, value: str | None) -> str | None:
        if value is not None and not DNS_LABEL.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a Kubernetes name; use only lower-case letters, digits and -"
            )
        return value

    @field_validator("secrets")
    @classmethod
    def _secrets(cls, value: list[str]) -> list[str]:
        for name in value:
            if not DNS_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a Secret; use only lower-case letters, digits, - "
                    "and ."
                )
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not VARIABLE_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a variable; use letters, digits, _, - and ."
                )
            _refuse_key(name, name)
        return value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        filled = _filled(value, "name", "namespace")
        if "{" in filled or "}" in filled:
            raise ValueError(
                f"{value!r} has other text in braces; use only {{name}} and {{namespace}}"
            )
        if not SERVER.match(filled):
            raise ValueError(
                f"{value!r} is not the URL of a job server; write only http://host:8265"
            )
        return value.rstrip("/")

    _durations = field_check("ready_within", "lease", "keep", by=check_duration)

    @field_validator("lease")
    @classmethod
    def _lease(cls, value: str | None) -> str | None:
        if value is not None and seconds_of(value) < LEAST_LEASE:
            raise ValueError(
                f"{value!r} is too short for the flow to renew it in time; write at least "
                f"{LEAST_LEASE:g}s"
            )
        return value

    _manifest = field_check("manifest", by=lambda value: check_manifest(value))

    @model_validator(mode="after")
    def _one_shape(self) -> Kubernetes:
        given = [name for name in ("manifest", "manifest_file") if getattr(self, name)]
        if len(given) == 2:
            raise ValueError("manifest and manifest_file exclude each other; remove one of them")
        beside = [name for name in SHAPE if getattr(self, name) not in (None, {}, [])]
        if given and beside:
            raise ValueError(
                f"{beside[0]} cannot be combined with {given[0]}, which defines it; remove one of "
                "them"
            )
        if self != Kubernetes.model_construct() and not given and not self.image:
            raise ValueError(
                "image is missing; set the image of the head and the workers, or a manifest"
            )
        return self

    @property
    def asked(self) -> Kubernetes | None:
        """Return the group, or None if it is empty: the job then creates no cluster."""
        return self if self.image or self.manifest or self.manifest_file else None

    def server_url(self, name: str, namespace: str) -> str:
        """Return the URL of the job server of cluster `name` in this Kubernetes `namespace`.

        This is the job's `url` with both names filled in. If `url` is not set, it is the URL of the
        cluster's head pod.
        """
        return _filled(self.url or HEAD_URL, name, namespace)

    @property
    def shape(self) -> PodShape:
        return PodShape(
            self.workers or WORKERS,
            GPUS if self.gpus_per_worker is None else self.gpus_per_worker,
            self.worker_cpu or WORKER_CPU,
            self.worker_memory or WORKER_MEMORY,
            self.head_cpu or HEAD_CPU,
            self.head_memory or HEAD_MEMORY,
            self.shm or POD_SHM,
        )

    @property
    def lease_seconds(self) -> float:
        return seconds_of(self.lease or LEASE)

    @property
    def ready_seconds(self) -> float:
        return seconds_of(self.ready_within or READY_WITHIN)

    @property
    def keep_seconds(self) -> float:
        return seconds_of(self.keep) if self.keep else 0.0


def check_manifest(value: Mapping[str, object]) -> None:
    """Raise ValueError if a run cannot use this RayCluster manifest; the message names the field.

    Credentials in clear text are refused, too.
    """
    kind = (value.get("apiVersion"), value.get("kind"))
    if kind != ("ray.io/v1", "RayCluster"):
        raise ValueError(
            f"apiVersion and kind are {kind[0]} and {kind[1]}; write ray.io/v1 and RayCluster"
        )
    metadata = _mapping(value.get("metadata") or {}, "metadata")
    for name in ("name", "namespace"):
        if metadata.get(name):
            how = "the run key" if name == "name" else "cluster.kubernetes.namespace"
            raise ValueError(f"metadata.{name} is set from {how}; remove it")
    for name in ("labels", "annotations"):
        for key, text in _mapping(metadata.get(name) or {}, f"metadata.{name}").items():
            if not isinstance(text, str):
                raise ValueError(f"metadata.{name}.{key}: {text!r} is not text; put it in quotes")
    spec = _mapping(value.get("spec"), "spec")
    _check_group(_mapping(spec.get("headGroupSpec"), "spec.headGroupSpec"), "spec.headGroupSpec")
    groups = spec.get("workerGroupSpecs")
    if not isinstance(groups, list) or not groups:
        raise ValueError(
            "spec.workerGroupSpecs is not a list of worker groups; write at least one group"
        )
    names = []
    for at, group in enumerate(groups):
        where = f"spec.workerGroupSpecs[{at}]"
        _check_group(_mapping(group, where), where)
        names.append(group.get("groupName"))
        if not isinstance(names[-1], str) or not DNS_LABEL.fullmatch(names[-1]):
            raise ValueError(
                f"{where}.groupName: {names[-1]!r} is not a valid name; write one such as gpu"
            )
        if names[-1] in names[:-1]:
            raise ValueError(f"{where}.groupName: duplicate name {names[-1]}; rename one")
        replicas = group.get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise ValueError(
                f"{where}.replicas: {replicas!r} is not a number of pods; write 0 or more"
            )


def _check_group(group: Mapping[str, object], where: str) -> None:
    told = _mapping(group.get("rayStartParams") or {}, f"{where}.rayStartParams")
    for name in ("num-cpus", "num-gpus"):
        if name in told and not COUNT.fullmatch(str(told[name])):
            raise ValueError(
                f'{where}.rayStartParams.{name}: {told[name]!r} is not a number; write "4"'
            )
    for name, value in told.items():
        # The shell that starts Ray fills in $NAME, whose value comes from a Secret.
        if PASSWORD.fullmatch(str(name)) and not str(value).startswith("$"):
            _refuse_key(str(name), f"{where}.rayStartParams: {name}")
    template = _mapping(group.get("template"), f"{where}.template")
    pod = _mapping(template.get("spec"), f"{where}.template.spec")
    for at, container in enumerate(containers(pod, f"{where}.template.spec")):
        place = f"{where}.template.spec.containers[{at}]"
        image = _mapping(container, place).get("image")
        if not isinstance(image, str) or not image:
            raise ValueError(f"{place}.image is missing; set it")
        resources = _mapping(container.get("resources") or {}, f"{place}.resources")
        for kind in ("requests", "limits"):
            named = _mapping(resources.get(kind) or {}, f"{place}.resources.{kind}")
            for name, amount in named.items():
                try:
                    quantity(amount)
                except ValueError as error:
                    raise ValueError(f"{place}.resources.{kind}.{name}: {error}") from None
        for variable in container.get("env") or ():
            name = str(_mapping(variable, f"{place}.env").get("name"))
            if "value" in variable:
                _refuse_key(name, f"{place}.env: {name}")


def containers(pod: Mapping[str, object], where: str = "spec") -> Iterator[Mapping[str, Any]]:
    """Yield the containers in a pod's spec; raise `ValueError` if there are none."""
    found = pod.get("containers")
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"{where}.containers is not a list of containers; write at least one container"
        )
    yield from found


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where} must be a mapping and is of type {type(value).__name__}; write fields below "
            "it"
        )
    return value


def _refuse_key(name: str, where: str) -> None:
    if not safe_variable(name):
        raise ValueError(
            f"{where} may be a key, and everybody who can read the cluster's pods would see it; "
            "put it into a Secret and name that in secrets (envFrom or valueFrom in a manifest), "
            f"or, if it is not secret, name it in {SAFE_NAMES} in the environment of the flow"
        )
