"""A small API server of Kubernetes over real HTTP: RayClusters, pods and events of one namespace.

It keeps what clients must rely on: a name can be created once (409), an object that was changed
since it was read is not changed again (409 by resourceVersion), preconditions of a delete, status
as a subresource, label selectors, finalizers that hold an object until they are gone, rights by
verb (403), and Status objects as answers.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

NAMESPACE = "ray"
GROUPS = {"rayclusters": "ray.io", "pods": "", "events": ""}
VERSIONS = {"rayclusters": "ray.io/v1", "pods": "v1", "events": "v1"}
KINDS = {"rayclusters": "RayCluster", "pods": "Pod", "events": "Event"}
REASONS = {
    **{403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid"},
    **{503: "ServiceUnavailable", 401: "Unauthorized"},
}


class Refused(Exception):
    def __init__(self, code: int, message: str, **details: Any):
        self.code, self.message, self.details = code, message, details


class KubeServer:
    """The objects by resource and name; `denied` are (verb, resource) that are forbidden, `away` is
    how many requests more get 503, `quota` refuses RayClusters. `asked` are the requests so far."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in GROUPS}
        self.denied: set[tuple[str, str]] = set()
        self.away, self.quota, self.installed = 0, "", True
        self.asked: list[tuple[str, str, str]] = []
        self.operate: Callable[[str, dict[str, Any]], None] = lambda what, found: None
        self.url = ""
        self._versions = itertools.count(1)
        self.lock = threading.RLock()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The RayCluster of that name."""
        return self.objects["rayclusters"][name]

    @property
    def names(self) -> list[str]:
        return sorted(self.objects["rayclusters"])

    def kubeconfig(self, path: Path) -> Path:
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "test"}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE},
                }
            ],
        }
        path.write_text(yaml.safe_dump(value))
        return path

    # --- what an operator and a kubelet do ------------------------------------------------------

    def put(self, resource: str, body: dict[str, Any]) -> None:
        """As somebody else with all rights writes it."""
        with self.lock:
            self._keep(resource, copy.deepcopy(body))

    def pod(self, cluster: str, kind: str, at: int = 0, **status: Any) -> None:
        """A pod of the cluster; without a status it is ready."""
        name = f"{cluster}-{kind}-{at}"
        labels = {"ray.io/cluster": cluster, "ray.io/node-type": kind}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.put("pods", {"metadata": {"name": name, "labels": labels}, "status": status or ready})

    def come_up(self, cluster: str, workers: int) -> None:
        self.pod(cluster, "head")
        for at in range(workers):
            self.pod(cluster, "worker", at)

    def warning(self, about: str, reason: str, message: str) -> None:
        name = f"{about}.{uuid.uuid4().hex[:8]}"
        self.put(
            "events",
            {
                "metadata": {"name": name},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "involvedObject": {"name": about},
                "lastTimestamp": datetime.now(UTC).isoformat(),
            },
        )

    def release(self, name: str) -> None:
        """Takes the finalizers from a RayCluster, which ends it if it is to be deleted."""
        with self.lock:
            found = self[name]
            found["metadata"]["finalizers"] = []
            if found["metadata"].get("deletionTimestamp"):
                self._remove("rayclusters", name)

    # --- requests -------------------------------------------------------------------------------

    def answer(self, method: str, url: str, body: Any) -> Any:
        parts = urlsplit(url)
        path, query = parts.path.strip("/").split("/"), parse_qs(parts.query)
        if path[-1] == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            allowed = (asked["verb"], asked["resource"]) not in self.denied
            return {**body, "status": {"allowed": allowed}}
        at = path.index("namespaces")
        namespace, resource, *rest = path[at + 1 :]
        name = rest[0] if rest else ""
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method)
        verb = verb or ("get" if name else "list")
        with self.lock:
            self.asked.append((verb, resource, name))
            self._admit(verb, resource, namespace)
            if verb == "list":
                return self._list(resource, query)
            if verb == "create":
                return self._create(resource, body)
            found = self.objects[resource].get(name)
            if found is None:
                raise Refused(404, f'{resource} "{name}" not found', name=name, kind=resource)
            if verb == "patch":
                return self._patch(resource, found, body, status=rest[1:] == ["status"])
            return self._delete(resource, found, body) if verb == "delete" else found

    def _admit(self, verb: str, resource: str, namespace: str) -> None:
        if self.away:
            self.away -= 1
            raise Refused(503, "the server is currently unable to handle the request")
        group = GROUPS[resource]
        if (verb, resource) in self.denied:
            raise Refused(
                403,
                f'{resource} is forbidden: User "system:serviceaccount:ray:flow" cannot {verb} '
                f'resource "{resource}" in API group "{group}" in the namespace "{namespace}"',
                kind=resource,
            )
        if resource == "rayclusters" and not self.installed:
            raise Refused(404, "404 page not found", plain=True)
        if namespace != NAMESPACE:
            raise Refused(404, f'namespaces "{namespace}" not found', name=namespace)

    def _list(self, resource: str, query: Mapping[str, list[str]]) -> dict[str, Any]:
        items = list(self.objects[resource].values())
        for part in ",".join(query.get("labelSelector", ())).split(","):
            key, _, value = part.partition("=")
            items = [
                one
                for one in items
                if not key or one["metadata"].get("labels", {}).get(key) == value
            ]
        for part in query.get("fieldSelector", ()):
            key, _, value = part.partition("=")
            items = [one for one in items if one.get(key) == value]
        items = items[: int(query["limit"][0])] if "limit" in query else items
        return {
            "apiVersion": VERSIONS[resource],
            "kind": f"{KINDS[resource]}List",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }

    def _create(self, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        if self.quota:
            raise Refused(403, f'{resource} "{name}" is forbidden: {self.quota}', name=name)
        if name in self.objects[resource]:
            raise Refused(409, f'{resource} "{name}" already exists', name=name)
        if unknown := set(body) - {"apiVersion", "kind", "metadata", "spec"}:
            raise Refused(422, f"strict decoding error: unknown field {sorted(unknown)[0]!r}")
        made = self._keep(resource, body)
        self.operate("made", made)
        return made

    def _keep(self, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        meta = body["metadata"]
        meta.setdefault("uid", str(uuid.uuid4()))
        meta["resourceVersion"] = str(next(self._versions))
        meta["namespace"] = NAMESPACE
        self.objects[resource][meta["name"]] = body
        return body

    def _patch(
        self, resource: str, found: dict[str, Any], change: dict[str, Any], status: bool
    ) -> dict[str, Any]:
        wanted = (change.get("metadata") or {}).get("resourceVersion")
        if wanted and wanted != found["metadata"]["resourceVersion"]:
            raise Refused(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        change = {"status": change.get("status")} if status else {**change, "status": {}}
        return self._keep(resource, merged(found, change))

    def _delete(self, resource: str, found: dict[str, Any], options: Any) -> dict[str, Any]:
        meta = found["metadata"]
        for name, value in ((options or {}).get("preconditions") or {}).items():
            if value is not None and meta[name] != value:
                raise Refused(409, f"Precondition failed: {name} in precondition: {value}")
        if meta.get("finalizers"):
            meta["deletionTimestamp"] = datetime.now(UTC).isoformat()
            return self._keep(resource, found)
        self._remove(resource, meta["name"])
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _remove(self, resource: str, name: str) -> None:
        gone = self.objects[resource].pop(name)
        pods = self.objects["pods"]
        for pod in [p for p in pods.values() if p["metadata"]["labels"]["ray.io/cluster"] == name]:
            del pods[pod["metadata"]["name"]]
        self.operate("gone", gone)


def merged(value: Any, change: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(change, Mapping):
        return change
    kept = dict(value) if isinstance(value, Mapping) else {}
    for name, inner in change.items():
        if inner is None:
            kept.pop(name, None)
        elif inner != {} or name not in kept:
            kept[name] = merged(kept.get(name), inner)
    return kept


@contextmanager
def serving(server: KubeServer) -> Iterator[KubeServer]:
    """The server at an address of its own, for the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            try:
                code, answer = 201 if self.command == "POST" else 200, None
                with server.lock:
                    text = json.dumps(server.answer(self.command, self.path, body))
            except Refused as refused:
                code, answer = refused.code, status_of(refused)
                text = refused.message if refused.details.get("plain") else json.dumps(answer)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PATCH = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def status_of(refused: Refused) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": refused.message,
        "reason": REASONS[refused.code],
        "details": refused.details,
        "code": refused.code,
    }
