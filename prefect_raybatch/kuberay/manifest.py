"""The RayCluster that a run creates: its name, its labels, its pods."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from prefect_raybatch.job.kubernetes import GPU, Kubernetes
from prefect_raybatch.job.ray_cluster import given_manifest, groups_of

MANAGED_BY, MADE_HERE = "app.kubernetes.io/managed-by", "raybatch"
RUN_KEY, JOB, FINGERPRINT = "raybatch/run-key", "raybatch/job", "raybatch/fingerprint"
RUN_NOTE, SPEC, FLOW_RUN = "raybatch/run", "raybatch/spec", "raybatch/flow-run"  # annotations
HOLDER, DEADLINE = "raybatch/holder", "raybatch/deadline"
KubeObject = dict[str, Any]  # an object of Kubernetes
JsonMapping = Mapping[str, Any]  # an object that is only read
LONGEST_VALUE = 63
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# KubeRay derives names of services and pods from the cluster's, truncated to 50 characters.
NAME_PART = 22


@dataclass(frozen=True)
class RunIdentity:
    """The run that owns a cluster: `run_key`, job name, run directory (`run`) and `fingerprint`.

    `flow_run` is the Prefect flow run that creates the cluster, None outside Prefect.
    """

    run_key: str
    job: str
    run: str
    fingerprint: str
    flow_run: str | None = None

    @property
    def name(self) -> str:
        """The cluster's name, which all flows derive from the run key. At most 40 characters."""
        part = re.sub(r"[^a-z0-9]+", "-", self.run_key.lower()).strip("-")[:NAME_PART].strip("-")
        return f"raybatch-{part}-{_digest(self.run_key)[:8]}"

    @property
    def labels(self) -> dict[str, str]:
        return {
            MANAGED_BY: MADE_HERE,
            RUN_KEY: label_value(self.run_key),
            JOB: label_value(self.job),
            FINGERPRINT: label_value(self.fingerprint),
        }


def label_value(text: str) -> str:
    """Return the text as the value of a Kubernetes label.

    A text that Kubernetes does not accept is shortened and cleaned, with a hash at its end.
    """
    if LABEL.fullmatch(text):
        return text
    tail = _digest(text)[:8]
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: LONGEST_VALUE - len(tail) - 1]
    return f"{cleaned.strip('-_.')}-{tail}".lstrip("-")


def ray_cluster(kubernetes: Kubernetes, owner: RunIdentity) -> KubeObject:
    """Return the RayCluster to create for the run `owner`.

    `kubernetes` are the job's settings in cluster.kubernetes. The caller adds the annotations of
    holder and deadline. Raises `ConfigError` for an unusable manifest file.
    """
    body = given_manifest(kubernetes) or _from_fields(kubernetes)
    spec = body["spec"]
    for template in _templates(spec):
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        template["metadata"]["labels"] = {**labels, **owner.labels}
    described = body.get("metadata") or {}
    notes = {RUN_NOTE: owner.run, SPEC: spec_hash(spec)}
    if owner.flow_run:
        notes[FLOW_RUN] = owner.flow_run
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": owner.name,
            "labels": {**(described.get("labels") or {}), **owner.labels},
            "annotations": {**(described.get("annotations") or {}), **notes},
        },
        "spec": spec,
    }


def spec_hash(spec: JsonMapping) -> str:
    """Return a hash of a RayCluster's spec, by which a changed job is noticed."""
    return _digest(json.dumps(spec, sort_keys=True, default=str))[:32]


def differences(wanted: object, there: object, where: str = "spec") -> Iterator[str]:
    """Yield a text for each field in which the existing object `there` differs from `wanted`.

    Additional fields of the existing object are ignored, because Kubernetes adds defaults. Each
    text begins with the dotted path of its field. `where` is the path of the two objects
    themselves.
    """
    if isinstance(wanted, Mapping) and isinstance(there, Mapping):
        for name, inner in wanted.items():
            yield from differences(inner, there.get(name), f"{where}.{name}")
    elif isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        for at, inner in enumerate(wanted):
            yield from differences(inner, there[at], f"{where}[{at}]")
    elif wanted != there and (wanted or there):
        yield f"{where}: {_short(there)} there, {_short(wanted)} in the job"


def workers_wanted(spec: JsonMapping) -> int:
    """Return the number of pods of all worker groups in the spec of a RayCluster."""
    return sum(group.pods for group in groups_of(spec))


def _from_fields(kubernetes: Kubernetes) -> KubeObject:
    shape = kubernetes.shape
    head = _pod(kubernetes, "ray-head", {"cpu": shape.head_cpu, "memory": shape.head_memory})
    head["spec"]["containers"][0]["ports"] = [
        {"name": "gcs", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
    ]
    resources = {"cpu": shape.worker_cpu, "memory": shape.worker_memory}
    if shape.gpus:
        resources[GPU] = str(shape.gpus)
    return {
        "spec": {
            "rayVersion": metadata.version("ray"),
            "headGroupSpec": {
                "rayStartParams": {
                    "dashboard-host": "0.0.0.0",
                    "num-cpus": str(shape.head_ray_cpus),
                },
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": shape.workers,
                    "minReplicas": shape.workers,
                    "maxReplicas": shape.workers,
                    "rayStartParams": {},
                    "template": _pod(kubernetes, "ray-worker", resources),
                }
            ],
        }
    }


def _pod(kubernetes: Kubernetes, name: str, resources: Mapping[str, str]) -> KubeObject:
    container: KubeObject = {
        "name": name,
        "image": kubernetes.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if kubernetes.env:
        container["env"] = [{"name": key, "value": value} for key, value in kubernetes.env.items()]
    if kubernetes.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in kubernetes.secrets]
    spec: KubeObject = {
        "containers": [container],
        # Without this volume, /dev/shm has 64 MiB, and Ray's object store falls back to disk.
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shape.shm},
            }
        ],
    }
    if kubernetes.service_account:
        spec["serviceAccountName"] = kubernetes.service_account
    return {"spec": spec}


def _templates(spec: JsonMapping) -> Iterator[KubeObject]:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
