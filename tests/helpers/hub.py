"""A Hugging Face hub of one folder, for `HF_ENDPOINT`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
OLD = "b" * 40


@contextmanager
def hub(name: str, folder: Path, asked: list[str]) -> Iterator[str]:
    """Its URL: repository `name` has at `COMMIT`, which is its branch `main`, and at `OLD`, its tag
    `v1`, the files of `folder`. What it was asked goes to `asked`."""
    commits = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD, OLD: OLD}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
            api, files = f"/api/models/{name}", f"/{name}/resolve/"
            if path.startswith(f"{api}/tree/"):
                self._json(self._tree())
            elif path == api or path.startswith(f"{api}/revision/"):
                self._info(path.removeprefix(f"{api}/revision/") if path != api else "main")
            elif path.startswith(files):
                revision, _, file = path.removeprefix(files).partition("/")
                self._file(commits.get(revision), folder / file)
            else:
                self._missing("RepoNotFound")

        do_HEAD = do_GET

        def _tree(self) -> list[dict[str, Any]]:
            return [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                for f in sorted(folder.iterdir())
            ]

        def _info(self, revision: str) -> None:
            if revision not in commits:
                self._missing("RevisionNotFound")
                return
            files = [{"rfilename": one["path"]} for one in self._tree()]
            self._json({"id": name, "sha": commits[revision], "siblings": files})

        def _file(self, commit: str | None, path: Path) -> None:
            if commit is None or not path.is_file():
                self._missing("EntryNotFound")
                return
            data = path.read_bytes()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            wanted = self.headers.get("range", "")
            if wanted.startswith("bytes="):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                part = data[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                self._send(206, part, headers)
            else:
                self._send(200, data, headers)

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _missing(self, code: str) -> None:
            self._send(404, b"", {"X-Error-Code": code})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
