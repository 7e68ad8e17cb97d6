"""The state of a RayCluster's pods: how many are ready, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefect_raybatch.kuberay.api import quota_text
from prefect_raybatch.kuberay.manifest import JsonMapping
from prefect_raybatch.words import counted

NODE_TYPE = "ray.io/node-type"
LASTING = frozenset(("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"))
NOT_PULLED = LASTING | {"ErrImagePull"}
NO_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
CRASHES = 3  # restarts of a head before giving up


@dataclass(frozen=True)
class PodsState:
    """The state of a cluster's pods.

    `head` says whether the head is ready. `workers` counts the ready workers; there should be
    `wanted`. `fatal` describes a fault that waiting does not fix. `trouble` describes a fault that
    waiting may fix, such as a missing node that an autoscaler may add. Each is "" if there is none.
    """

    head: bool
    workers: int
    wanted: int
    fatal: str = ""
    trouble: str = ""

    @property
    def ready(self) -> bool:
        return self.head and self.workers >= self.wanted

    @property
    def text(self) -> str:
        if not self.head:
            return "head not ready"
        return f"{self.workers} of {counted(self.wanted, 'worker')} ready"


def pods_state(
    pods: Sequence[JsonMapping], wanted: int, warnings: Sequence[JsonMapping] = ()
) -> PodsState:
    """Return the state of a cluster that should have `wanted` workers.

    `pods` are its pods and `warnings` its Warning events, oldest first, as Kubernetes returns them.
    """
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    ready = [pod for pod in alive if _is_ready(pod)]
    kinds = [pod["metadata"].get("labels", {}).get(NODE_TYPE) for pod in ready]
    waiting = [pod for pod in alive if not _is_ready(pod)]
    fatal = next((text for pod in waiting for text in _fatal(pod)), "")
    trouble = next((text for pod in waiting for text in _trouble(pod)), "") or next(
        (text for event in reversed(warnings) for text in _of_event(event)), ""
    )
    return PodsState("head" in kinds, kinds.count("worker"), wanted, fatal, trouble)


def _is_ready(pod: JsonMapping) -> bool:
    return any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in _status(pod).get("conditions") or ()
    )


def _status(pod: JsonMapping) -> JsonMapping:
    return pod.get("status") or {}


def _containers(pod: JsonMapping) -> Iterator[tuple[JsonMapping, JsonMapping]]:
    """Yield (status, its `waiting` state) of each container of a pod.

    The `waiting` state is {} if the container is not waiting.
    """
    status = _status(pod)
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            yield container, (container.get("state") or {}).get("waiting") or {}


def _fatal(pod: JsonMapping) -> Iterator[str]:
    name = pod["metadata"]["name"]
    head = pod["metadata"].get("labels", {}).get(NODE_TYPE) == "head"
    for container, waiting in _containers(pod):
        reason, message = waiting.get("reason"), str(waiting.get("message") or "")[:300]
        if reason in LASTING:
            yield (
                f"the image {container.get('image')} of pod {name} cannot be pulled ({reason}: "
                f"{message}). Fix image, or give the service account an imagePullSecret"
            )
        if reason == "CrashLoopBackOff" and head and container.get("restartCount", 0) >= CRASHES:
            last = (container.get("lastState") or {}).get("terminated") or {}
            why = f"{last.get('reason') or 'Error'}, exit code {last.get('exitCode')}"
            yield (
                f"the head keeps crashing: {counted(container['restartCount'], 'restart')}, the "
                f"last after {why}. See kubectl logs {name} --previous. Usual causes: another Ray "
                "version in the image, or too little memory for the head"
            )


def _trouble(pod: JsonMapping) -> Iterator[str]:
    name = pod["metadata"]["name"]
    for condition in _status(pod).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield (
                f"pod {name} cannot be scheduled: {str(condition.get('message') or '')[:300]}. Add "
                "nodes (an autoscaler may be doing so), or request less per worker"
            )
    for container, waiting in _containers(pod):
        reason, message = waiting.get("reason"), str(waiting.get("message") or "")[:300]
        if reason in NOT_PULLED:
            yield f"the image {container.get('image')} of pod {name} is not pulled yet: {message}"
        if reason in NO_CONTAINER:
            yield (
                f"pod {name} cannot start: {reason}: {message}. Fix the Secret or ConfigMap that "
                "it uses"
            )
        if reason == "CrashLoopBackOff":
            yield f"pod {name} keeps crashing. See kubectl logs {name} --previous"


def _of_event(event: JsonMapping) -> Iterator[str]:
    message, reason = str(event.get("message") or ""), str(event.get("reason") or "")
    if "quota" in message:
        yield quota_text(message)
    elif reason.startswith(("FailedToCreate", "FailedCreate", "FailedMount", "FailedAttach")):
        yield f"{reason}: {message[:300]}"
