"""The automations of deployments/automations.py, and a receiver of what they send."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prefect.blocks.notifications import CustomWebhookNotificationBlock

from helpers.ray_head import ROOT


def automations_script() -> Any:
    path = ROOT / "deployments/automations.py"
    spec = importlib.util.spec_from_file_location("automations", path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@contextmanager
def pager() -> Iterator[list[dict[str, Any]]]:
    """What was sent to the block custom-webhook/on-call."""
    pages: list[dict[str, Any]] = []

    class Pager(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            pages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Pager)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    CustomWebhookNotificationBlock(
        name="pager",
        url=f"http://127.0.0.1:{server.server_port}/",
        json_data={"subject": "{{subject}}", "body": "{{body}}"},
    ).save("on-call", overwrite=True)
    try:
        yield pages
    finally:
        server.shutdown()
