"""Calls the API server of a Kubernetes cluster, with retries and plain error messages.

Wraps the official client (the pip extra `kubernetes`). Returns None for a missing object, and
retries while the server is unavailable. The error for a rejection says what to do about it.
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

import yaml

from prefect_raybatch.errors import ClusterUnavailable, ConfigError, InsufficientResources
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.kuberay.manifest import MADE_HERE, MANAGED_BY, JsonMapping, KubeObject
from prefect_raybatch.storage.library_errors import ca_file_problem, certificate_problem, text_of

log = logging.getLogger(__name__)

API_GROUP, API_VERSION, PLURAL = "ray.io", "v1", "rayclusters"
CLUSTER_OF_POD = "ray.io/cluster"
API_PATIENCE = 300.0  # seconds of retries before an error is raised
TIMEOUT = (5.0, 25.0)  # seconds to connect, and for an answer
LONGEST_API_PAUSE = 15.0
UNAVAILABLE_STATUSES = frozenset((429, 500, 502, 503, 504))
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The verbs that a flow uses, by (group, resource), as in deployments/kuberay-rbac.yaml.
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
    "cluster.kubernetes: no kubeconfig, and this is not a pod. Run the flow in a pod with a "
    "service account, or set KUBECONFIG to a kubeconfig (kubectl config view shows the one in use)"
)


class Conflict(Exception):
    """The object was changed since it was read, or it exists already."""


class KubeApi:
    """Reads and changes the RayClusters of one namespace, and reads their pods and events.

    While the API server is unavailable, methods retry for up to `patience` seconds and then raise
    `ClusterUnavailable`. A warning is logged at the first retry only. Methods raise `ConfigError`
    for a problem that a user must fix, and `InsufficientResources` for an exceeded quota.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        patience: float = API_PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.patience, self._sleep = patience, sleep
        self._timeout = TIMEOUT
        client, found = _client(kubernetes)
        self.namespace = kubernetes.namespace or found or "default"
        self.server = str(client.configuration.host)
        self._ca_file = client.configuration.ssl_ca_cert
        from kubernetes.client import AuthorizationV1Api, CoreV1Api, CustomObjectsApi

        self._custom, self._core = CustomObjectsApi(client), CoreV1Api(client)
        self._authorization = AuthorizationV1Api(client)

    @contextmanager
    def briefly(self, seconds: float) -> Iterator[None]:
        """Limit retries in the block to `seconds`, because a user who cancels waits for them."""
        before = self.patience, self._timeout
        self.patience, self._timeout = seconds, (seconds / 4, seconds / 2)
        try:
            yield
        finally:
            self.patience, self._timeout = before

    def get(self, name: str) -> KubeObject | None:
        """Return the RayCluster of that name; None if there is none."""
        return self._ask("get", PLURAL, name, self._custom.get_namespaced_custom_object, name)

    def create(self, body: JsonMapping) -> KubeObject | None:
        """Create a RayCluster; return None if one with its name exists."""
        name = str(body["metadata"]["name"])
        try:
            return self._ask(
                *("create", PLURAL, name, self._custom.create_namespaced_custom_object),
                body=dict(body),
                field_validation="Strict",  # by default, unknown fields are dropped
            )
        except Conflict:
            return None

    def annotate(self, existing: JsonMapping, notes: Mapping[str, str]) -> KubeObject | None:
        """Set annotations of the RayCluster `existing`; return None if it is gone.

        Raises `Conflict` if it has changed since `existing` was read.
        """
        meta = existing["metadata"]
        version = {"resourceVersion": meta["resourceVersion"]}
        return self._ask(
            *("patch", PLURAL, meta["name"], self._custom.patch_namespaced_custom_object),
            meta["name"],
            body={"metadata": {"annotations": dict(notes), **version}},
        )

    def delete(self, existing: JsonMapping, unchanged: bool = False) -> bool:
        """Delete the RayCluster `existing` with its pods; return False if it is gone already.

        Raises `Conflict` if a new cluster has the same name by now. With `unchanged`, also raises
        it if the cluster has changed since `existing` was read.
        """
        from kubernetes.client import V1DeleteOptions, V1Preconditions

        meta = existing["metadata"]
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

    def clusters(self, limit: int | None = None) -> list[KubeObject]:
        """Return the RayClusters of the namespace that runs of this package created.

        `limit` is the most to return; None for all.
        """
        found = self._ask(
            *("list", PLURAL, "", self._custom.list_namespaced_custom_object),
            label_selector=f"{MANAGED_BY}={MADE_HERE}",
            limit=limit,
        )
        return list((found or {}).get("items", ()))

    def pods(self, name: str) -> list[KubeObject]:
        """Return the pods of the RayCluster of that name."""
        found = self._ask(
            *("list", "pods", "", self._core.list_namespaced_pod),
            label_selector=f"{CLUSTER_OF_POD}={name}",
        )
        return list((found or {}).get("items", ()))

    def warnings(self, name: str) -> list[KubeObject]:
        """Return Warning events of the RayCluster `name` and its pods, oldest first.

        An event belongs to them if the name of its object begins with `name`.
        """
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
        """Return the permissions that a run needs and this user lacks, e.g. `list pods`."""
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
    ) -> KubeObject | None:
        kind = (
            (self.namespace,)
            if resource != PLURAL
            else (API_GROUP, API_VERSION, self.namespace, PLURAL)
        )
        also |= {"_preload_content": False, "_request_timeout": self._timeout}
        return self._patiently(verb, resource, name, lambda: call(*kind, *more, **also))

    def _patiently(
        self, verb: str, resource: str, name: str, call: Callable[[], Any]
    ) -> KubeObject | None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        deadline = time.monotonic() + self.patience
        pause, is_logged = 0.5, False
        while True:
            found: KubeObject | None = None
            trouble = ""
            try:
                found = json.loads(call().data)
            except ApiException as error:
                if error.status in UNAVAILABLE_STATUSES:
                    trouble = f"{error.status} {error.reason}"
                else:
                    self._raise_refused(error, verb, resource, name)
            except (HTTPError, OSError, ValueError) as error:  # no answer, or not the API server's
                if problem := certificate_problem(error):
                    raise ConfigError(
                        f"cluster.kubernetes: the TLS certificate of {self.server} is not valid: "
                        f"{problem}. Correct the cluster's server or certificate-authority in the "
                        "kubeconfig, or the pod's service account"
                    ) from None
                if problem := ca_file_problem(("certificate-authority", self._ca_file)):
                    raise ConfigError(
                        f"cluster.kubernetes: kubeconfig of {self.server}: {problem}"
                    ) from None
                trouble = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
                trouble = trouble or type(error).__name__
            if not trouble:
                if is_logged:
                    log.info("the Kubernetes API server at %s answers again", self.server)
                return found
            if time.monotonic() + pause > deadline:
                raise ClusterUnavailable(
                    f"the Kubernetes API server at {self.server} is unavailable: {trouble}. Check "
                    "the address in the kubeconfig, and whether it can be reached from here"
                )
            if not is_logged:
                is_logged = True
                log.warning(
                    "the Kubernetes API server at %s does not answer (%s); retrying for %.0f s",
                    *(self.server, trouble, self.patience),
                )
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_API_PAUSE)

    def _raise_refused(self, error: Any, verb: str, resource: str, name: str) -> None:
        """Raise the error for a rejected request; return if only the object `name` is missing.

        Raises `Conflict`, `InsufficientResources` or, for what a user must fix, `ConfigError`.
        `error` is the client's ApiException.
        """
        status = _status(error.body)
        message = str(status.get("message") or error.reason or error.status)
        details = status.get("details") or {}
        if error.status == 404:
            if details.get("kind") == "namespaces" or f'namespaces "{self.namespace}"' in message:
                raise ConfigError(
                    f"cluster.kubernetes: namespace {self.namespace} does not exist at "
                    f"{self.server}. Create it (kubectl create namespace {self.namespace}), or set "
                    "another in cluster.kubernetes.namespace"
                )
            if name and str(details.get("name")) == name:
                return
            raise ConfigError(
                f"cluster.kubernetes: {self.server} has no resource RayCluster ({API_GROUP}). "
                "Install the KubeRay operator with its CRDs (helm install kuberay-operator)"
            )
        if error.status == 409:
            raise Conflict(message)
        if error.status == 401:
            raise ConfigError(
                f"cluster.kubernetes: {self.server} rejects the credentials: {message}. Renew "
                "those in the kubeconfig (kubectl get pods fails too), or the pod's service account"
            )
        if error.status == 403 and "quota" in message:
            raise InsufficientResources(f"namespace {self.namespace}: {quota_text(message)}")
        if error.status == 403:
            group = API_GROUP if resource == PLURAL else ""
            raise ConfigError(
                f"cluster.kubernetes: no permission to {verb} {resource} in namespace "
                f"{self.namespace}: {message}. Add to a Role there the rule {{apiGroups: "
                f'["{group}"], resources: [{resource}], verbs: [{verb}]}} '
                "(deployments/kuberay-rbac.yaml has all rules)"
            )
        raise ConfigError(
            f"cluster.kubernetes: {self.server} rejects the request to {verb} {resource} {name}: "
            f"{message[:600]}. Fix the manifest, or the fields of cluster.kubernetes"
        )


def quota_text(message: str) -> str:
    """Return Kubernetes' message about an exceeded quota, with advice appended."""
    return f"a quota is exceeded ({message[:300]}). Request less, wait, or raise the quota"


def _status(body: Any) -> KubeObject:
    """Parse the Status object in the body of an error response; {} if there is none."""
    try:
        status = json.loads(body or "{}")
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _client(kubernetes: Kubernetes) -> tuple[Any, str | None]:
    """Return a Kubernetes client, and the namespace of its configuration (None without one).

    The configuration is the first of these that applies:

    - the kubeconfig, if the job names a context or KUBECONFIG is set,
    - in a pod, the pod's service account,
    - the kubeconfig in the home directory.

    Raises `ConfigError` if the configuration is missing or invalid, or if the client is not
    installed.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(NO_CLIENT) from None
    settings = client.Configuration()
    named = kubernetes.context or os.environ.get("KUBECONFIG")
    try:
        if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            own = SERVICE_ACCOUNT / "namespace"
            namespace = own.read_text().strip() if own.exists() else None
        else:
            namespace = _load_kubeconfig(kubernetes.context, settings)
    except config.ConfigException as error:
        if kubernetes.context:
            raise ConfigError(
                f"cluster.kubernetes.context: {kubernetes.context}: {error}"
            ) from None
        raise ConfigError(f"{NO_CONFIG}: {error}") from None
    settings.retries = 0  # retried by `_patiently`
    return client.ApiClient(settings), namespace


def _load_kubeconfig(context: str | None, settings: Any) -> str | None:
    """Copy server and credentials of a kubeconfig's context to `settings`; return its namespace.

    If `context` is None, use the kubeconfig's current context. Returns None if the context names no
    namespace. Raises `ConfigError` if the kubeconfig cannot be read.
    """
    from kubernetes.config import KUBE_CONFIG_DEFAULT_LOCATION, load_kube_config
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    # Passed explicitly: the client reads KUBECONFIG only when it is imported.
    files = os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
    try:
        load_kube_config(files, context, client_configuration=settings)
        # `list_kube_config_contexts` needs a valid current context even if another is used.
        chosen = KubeConfigLoader(KubeConfigMerger(files).config, context).current_context
    except (yaml.YAMLError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cluster.kubernetes: the kubeconfig {files} cannot be read: {text_of(error)}. "
            "Correct it (kubectl config view reads the same file), or set KUBECONFIG to another"
        ) from None
    namespace = (chosen.get("context") or {}).get("namespace")
    return None if namespace is None else str(namespace)
