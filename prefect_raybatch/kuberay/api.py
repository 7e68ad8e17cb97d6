"""The API server of a Kubernetes cluster, with retries and plain error messages.

Wraps the official client (the extra `kubernetes`). It adds one answer for a missing object, a pause
and a retry while the server is away, and the remedy for each kind of rejection.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ClusterUnavailable, ConfigError, InsufficientResources
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.kuberay.manifest import MADE_HERE, MANAGED_BY

log = logging.getLogger(__name__)

API_GROUP, API_VERSION, PLURAL = "ray.io", "v1", "rayclusters"
CLUSTER_OF_POD = "ray.io/cluster"
API_PATIENCE = 300.0  # seconds without a good answer before a caller hears of it
TIMEOUT = (5.0, 25.0)  # seconds to connect, and for an answer
LONGEST_API_PAUSE = 15.0
AWAY = frozenset((429, 500, 502, 503, 504))
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The verbs that a flow uses, by (group, resource): those of deployments/kuberay-rbac.yaml.
VERBS = {
    (API_GROUP, PLURAL): ("get", "list", "create", "patch", "delete"),
    ("", "pods"): ("list",),
    ("", "events"): ("list",),
}
NO_CLIENT = (
    "cluster.kubernetes needs the package kubernetes, which is not installed here: "
    "pip install 'prefect-raybatch[kubernetes]'"
)
NO_CONFIG = (
    "cluster.kubernetes: no kubeconfig and not in a pod: run the flow in a pod with a service "
    "account, or name a kubeconfig in KUBECONFIG (kubectl config view shows the one in use)"
)


class Conflict(Exception):
    """Somebody else has changed the object since it was read."""


class KubeApi:
    """RayClusters of one namespace, and the state of their pods.

    Methods wait up to `patience` seconds for an API server that is away, which is reported once,
    and then raise `ClusterUnavailable`. They raise `ConfigError` for what a person must fix and
    `InsufficientResources` for a quota.
    """

    def __init__(
        self,
        made: Kubernetes,
        patience: float = API_PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.patience, self._sleep = patience, sleep
        self._timeout = TIMEOUT
        client, found = _client(made)
        self.namespace = made.namespace or found or "default"
        self.server = str(client.configuration.host)
        from kubernetes.client import AuthorizationV1Api, CoreV1Api, CustomObjectsApi

        self._custom, self._core = CustomObjectsApi(client), CoreV1Api(client)
        self._authorization = AuthorizationV1Api(client)

    @contextmanager
    def briefly(self, seconds: float) -> Iterator[None]:
        """Wait no longer than `seconds` in the block, because a cancelling user waits for it."""
        before = self.patience, self._timeout
        self.patience, self._timeout = seconds, (seconds / 4, seconds / 2)
        try:
            yield
        finally:
            self.patience, self._timeout = before

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the RayCluster of that name; None if there is none."""
        found = self._ask("get", PLURAL, name, self._custom.get_namespaced_custom_object, name)
        return found

    def create(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Create it; return None if one of its name exists already."""
        name = str(body["metadata"]["name"])
        try:
            return self._ask(
                *("create", PLURAL, name, self._custom.create_namespaced_custom_object),
                body=dict(body),
                field_validation="Strict",  # else a field that KubeRay does not know is dropped
            )
        except Conflict:
            return None

    def annotate(self, found: Mapping[str, Any], notes: Mapping[str, str]) -> dict[str, Any] | None:
        """Set annotations of a RayCluster as it was read. Raises `Conflict` if it was changed
        since; returns None if it is gone."""
        meta = found["metadata"]
        version = {"resourceVersion": meta["resourceVersion"]}
        return self._ask(
            *("patch", PLURAL, meta["name"], self._custom.patch_namespaced_custom_object),
            meta["name"],
            body={"metadata": {"annotations": dict(notes), **version}},
        )

    def delete(self, found: Mapping[str, Any], unchanged: bool = False) -> bool:
        """Delete a RayCluster as it was read, with its pods; return False if it is gone. Raises
        `Conflict` if another one has its name now or, with `unchanged`, if it was changed."""
        from kubernetes.client import V1DeleteOptions, V1Preconditions

        meta = found["metadata"]
        version = meta["resourceVersion"] if unchanged else None
        options = V1DeleteOptions(
            preconditions=V1Preconditions(uid=meta["uid"], resource_version=version),
            propagation_policy="Background",
        )
        gone = self._ask(
            *("delete", PLURAL, meta["name"], self._custom.delete_namespaced_custom_object),
            meta["name"],
            body=options,
        )
        return gone is not None

    def clusters(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the RayClusters of the namespace that runs of this package created."""
        found = self._ask(
            *("list", PLURAL, "", self._custom.list_namespaced_custom_object),
            label_selector=f"{MANAGED_BY}={MADE_HERE}",
            limit=limit,
        )
        return list((found or {}).get("items", ()))

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return the pods of the RayCluster of that name."""
        found = self._ask(
            *("list", "pods", "", self._core.list_namespaced_pod),
            label_selector=f"{CLUSTER_OF_POD}={name}",
        )
        return list((found or {}).get("items", ()))

    def warnings(self, name: str) -> list[dict[str, Any]]:
        """Return warnings about the RayCluster and its pods, the latest last."""
        found = self._ask(
            *("list", "events", "", self._core.list_namespaced_event),
            field_selector="type=Warning",
        )
        about = [
            event
            for event in (found or {}).get("items", ())
            if str((event.get("involvedObject") or {}).get("name", "")).startswith(name)
        ]
        return sorted(about, key=lambda event: str(event.get("lastTimestamp") or ""))

    def forbidden(self) -> list[str]:
        """Return which of the verbs that a flow uses this user may not, e.g. `create
        rayclusters`."""
        return [
            f"{verb} {resource}"
            for (group, resource), verbs in VERBS.items()
            for verb in verbs
            if not self._may(verb, group, resource)
        ]

    def _may(self, verb: str, group: str, resource: str) -> bool:
        asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        body: Any = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        found = self._patiently(
            "create",
            "selfsubjectaccessreviews",
            "",
            lambda: self._authorization.create_self_subject_access_review(
                body, _preload_content=False, _request_timeout=self._timeout
            ),
        )
        return bool((found or {}).get("status", {}).get("allowed"))

    def _ask(
        self, verb: str, resource: str, name: str, call: Callable[..., Any], *more: Any, **also: Any
    ) -> dict[str, Any] | None:
        kind = (
            (self.namespace,)
            if resource != PLURAL
            else (API_GROUP, API_VERSION, self.namespace, PLURAL)
        )
        also |= {"_preload_content": False, "_request_timeout": self._timeout}
        return self._patiently(verb, resource, name, lambda: call(*kind, *more, **also))

    def _patiently(
        self, verb: str, resource: str, name: str, call: Callable[[], Any]
    ) -> dict[str, Any] | None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        deadline = time.monotonic() + self.patience
        pause, said = 0.5, False
        while True:
            found: dict[str, Any] | None = None
            trouble = ""
            try:
                found = json.loads(call().data)
            except ApiException as error:
                if error.status in AWAY:
                    trouble = f"{error.status} {error.reason}"
                else:
                    self._raise_refused(error, verb, resource, name)
            except (HTTPError, OSError, ValueError) as error:  # no answer, or none of its own
                trouble = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
                trouble = trouble or type(error).__name__
            if not trouble:
                if said:
                    log.info("Kubernetes' API server at %s answers again", self.server)
                return found
            if time.monotonic() + pause > deadline:
                raise ClusterUnavailable(
                    f"Kubernetes' API server at {self.server} gives no good answer: {trouble}; "
                    "look at the address in the kubeconfig, and whether it can be reached from here"
                )
            if not said:
                said = True
                log.warning(
                    "Kubernetes' API server at %s does not answer (%s), asking again for %.0f s",
                    *(self.server, trouble, self.patience),
                )
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_API_PAUSE)

    def _raise_refused(self, error: Any, verb: str, resource: str, name: str) -> None:
        """Raise the error for an answer, unless it says that there is no object of that name."""
        status = _status(error.body)
        said = str(status.get("message") or error.reason or error.status)
        details = status.get("details") or {}
        if error.status == 404:
            if details.get("kind") == "namespaces" or f'namespaces "{self.namespace}"' in said:
                raise ConfigError(
                    f"cluster.kubernetes: there is no namespace {self.namespace} at {self.server}; "
                    f"kubectl create namespace {self.namespace}, or name another in namespace"
                )
            if name and str(details.get("name")) == name:
                return
            raise ConfigError(
                f"cluster.kubernetes: {self.server} knows no RayCluster of {API_GROUP}; "
                "install the KubeRay operator with its CRDs (helm install kuberay-operator)"
            )
        if error.status == 409:
            raise Conflict(said)
        if error.status == 401:
            raise ConfigError(
                f"cluster.kubernetes: {self.server} does not accept these credentials: {said}; "
                "renew those of the kubeconfig (kubectl get pods fails, too), or the pod's account"
            )
        if error.status == 403 and "quota" in said:
            raise InsufficientResources(f"{quota_text(said)}: namespace {self.namespace}")
        if error.status == 403:
            group = API_GROUP if resource == PLURAL else ""
            raise ConfigError(
                f"cluster.kubernetes: may not {verb} {resource} in namespace {self.namespace}: "
                f'{said}; add to a Role there the rule {{apiGroups: ["{group}"], resources: '
                f"[{resource}], verbs: [{verb}]}} (deployments/kuberay-rbac.yaml has all of them)"
            )
        raise ConfigError(
            f"cluster.kubernetes: {self.server} refuses to {verb} {resource} {name}: {said[:600]}; "
            "correct the manifest, or the fields it was made from"
        )


def quota_text(said: str) -> str:
    """Return a rejection by a quota with what to do."""
    return f"a quota is used up ({said[:300]}); ask for less, wait, or have the quota raised"


def _status(body: Any) -> dict[str, Any]:
    """Return the Status object of an answer; empty if it is none."""
    try:
        found = json.loads(body or "{}")
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _client(made: Kubernetes) -> tuple[Any, str | None]:
    """Return (client, its default namespace). A kubeconfig named in the job takes precedence over
    the service account of a pod, and that over the kubeconfig in the home directory."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(NO_CLIENT) from None
    settings = client.Configuration()
    named = made.context or os.environ.get("KUBECONFIG")
    try:
        if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            own = SERVICE_ACCOUNT / "namespace"
            namespace = own.read_text().strip() if own.exists() else None
        else:
            # The client looks for the variable only once, when it is imported.
            file = os.environ.get("KUBECONFIG") or None
            config.load_kube_config(file, made.context, client_configuration=settings)
            every, current = config.list_kube_config_contexts(file)
            if made.context:
                current = next(one for one in every if one["name"] == made.context)
            namespace = (current.get("context") or {}).get("namespace")
    except config.ConfigException as error:
        if made.context:
            raise ConfigError(f"cluster.kubernetes.context: {made.context}: {error}") from None
        raise ConfigError(f"{NO_CONFIG}: {error}") from None
    settings.retries = 0  # what is worth another try is tried again here, with pauses
    return client.ApiClient(settings), namespace
