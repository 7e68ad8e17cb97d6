"""An Iceberg REST catalog over a catalog in SQLite: the protocol's own requests and answers, by
pyiceberg's models of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

STATUS: dict[type[Exception], int] = {
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    CommitFailedException: 409,
    TableAlreadyExistsError: 409,
}


@dataclass
class RestCatalogServer:
    """What the server has and whom it lets in: bearers of `token`, which `client` (an id and its
    secret) is given. `refuse` may answer a request with a status, by method and path; `asked` are
    the requests; a path in `silent` is done once and not answered."""

    catalog: Catalog
    token: str
    client: tuple[str, str]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    refuse: Callable[[str, str], int | None] = lambda method, path: None
    silent: dict[str, bool] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def rest_catalog(root: Path, **more: str) -> Iterator[RestCatalogServer]:
    """A running catalog that keeps tables and its own base below `root`; `more` are properties of
    the catalog behind it."""
    properties = {"uri": f"sqlite:///{root}/rest.db", "warehouse": f"file://{root}/warehouse"}
    catalog = load_catalog("behind", **{"type": "sql", **properties, **more})
    there = RestCatalogServer(catalog, "token-of-the-catalog", ("nightly", "secret-of-the-client"))

    class Handler(_Handler):
        server_has = there

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield there
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_has: RestCatalogServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server_has.asked.append(f"{self.command} {path}")
        status = self.server_has.refuse(self.command, path)
        if status is not None:
            self._error(status, "RefusedByTheTest", "as the test wants")
        elif path == "/v1/oauth/tokens":
            self._give_token({name: one[0] for name, one in parse_qs(body.decode()).items()})
        elif self.headers.get("authorization") != f"Bearer {self.server_has.token}":
            self._error(401, "NotAuthorizedException", "the token is not one of ours")
        elif path == "/v1/config":
            self._send(200, {"defaults": {}, "overrides": {}})
        else:
            try:
                with self.server_has.lock:
                    answer = self._answer(path.removeprefix("/v1/namespaces/"), body)
                if not self.server_has.silent.pop(path, False):
                    self._send(200, answer)
                else:
                    self.close_connection = True
            except tuple(STATUS) as error:
                self._error(STATUS[type(error)], type(error).__name__, str(error))

    do_POST = do_HEAD = do_DELETE = do_GET

    def _give_token(self, form: dict[str, str]) -> None:
        if (form.get("client_id"), form.get("client_secret")) != self.server_has.client:
            self._send(401, {"error": "invalid_client", "error_description": "unknown client"})
            return
        token = {"access_token": self.server_has.token, "token_type": "bearer", "expires_in": 3600}
        self._send(200, token)

    def _answer(self, path: str, body: bytes) -> Any:
        """To a request for a namespace or a table in it."""
        catalog = self.server_has.catalog
        namespace, _, name = path.partition("/tables")
        if path == namespace:
            told = catalog.load_namespace_properties(tuple(namespace.split("\x1f")))
            return {"namespace": namespace.split("\x1f"), "properties": told}
        identifier = (*namespace.split("\x1f"), name.lstrip("/"))
        if self.command == "POST" and not name:
            # The client leaves out what is null; its own model of the request asks for it.
            absent = dict.fromkeys(("location", "partition-spec", "write-order"))
            asked = CreateTableRequest.model_validate(absent | json.loads(body))
            made = catalog.create_table(
                (*namespace.split("\x1f"), asked.name),
                schema=asked.table_schema,
                location=asked.location,
                partition_spec=asked.partition_spec or UNPARTITIONED_PARTITION_SPEC,
                sort_order=asked.write_order or UNSORTED_SORT_ORDER,
                properties=asked.properties,
            )
            return _told(made)
        if self.command == "POST":
            commit = CommitTableRequest.model_validate_json(body)
            done = catalog.commit_table(
                catalog.load_table(identifier), commit.requirements, commit.updates
            )
            return json.loads(done.model_dump_json(by_alias=True))
        return _told(catalog.load_table(identifier))

    def _error(self, status: int, kind: str, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": kind, "code": status}})

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _told(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json(by_alias=True))
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
