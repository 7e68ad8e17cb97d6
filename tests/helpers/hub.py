"""A Hugging Face Hub of folders, for `HF_ENDPOINT`: as much of its API as downloads and streaming
need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40
OLD = "b" * 40

Answer = tuple[int, dict[str, str]]  # a status and headers


@dataclass
class Repositories:
    """What a Hub has: folders of files by (repository, commit), `models/OWNER/NAME` or
    `datasets/OWNER/NAME`, and which commit a branch or tag is. `refuse` may answer a request in
    its place, by path and headers; `asked` are the requests."""

    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuse: Callable[[str, Mapping[str, str]], Answer | None] = lambda path, headers: None

    def add(self, name: str, folder: Path, commit: str = COMMIT, *names: str) -> None:
        """A commit of a repository, and the branches and tags that are at it from now on."""
        self.commits.setdefault(name, {})[commit] = folder
        for one in names or ("main",):
            self.names.setdefault(name, {})[one] = commit

    def find(self, path: str) -> tuple[str, str] | None:
        """(repository, what follows it) in the path of a request, without /api."""
        for name in self.commits:
            place = f"/{name}"
            if path == place or path.startswith(f"{place}/"):
                return name, path[len(place) + 1 :]
        return None


@contextmanager
def hub(name: str, folder: Path, asked: list[str]) -> Iterator[str]:
    """The URL of a Hub: model `name` has at `COMMIT`, which is its branch `main`, and at `OLD`, its
    tag `v1`, the files of `folder`. What it was asked goes to `asked`."""
    repositories = Repositories(asked=asked)
    repositories.add(f"models/{name}", folder)
    repositories.add(f"models/{name}", folder, OLD, "v1")
    with serve(repositories) as url:
        yield url


@contextmanager
def serve(repositories: Repositories) -> Iterator[str]:
    """The URL of a Hub that has `repositories`, which may change while it runs."""

    class Handler(_Handler):
        there = repositories

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    there: Repositories

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.there.asked.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
        refused = self.there.refuse(path, dict(self.headers))
        if refused is not None:
            self._send(refused[0], b"", refused[1])
            return
        api = path.startswith("/api/")
        kind = "" if api or path.startswith("/datasets/") else "/models"
        found = self.there.find(kind + path.removeprefix("/api"))
        if found is None:
            self._missing("RepoNotFound")
        elif api:
            self._api(*found, body)
        else:
            revision, _, file = found[1].removeprefix("resolve/").partition("/")
            self._file(found[0], revision, file)

    do_HEAD = do_POST = do_GET

    def _api(self, name: str, rest: str, body: bytes) -> None:
        what, _, rest = (rest or "revision/main").partition("/")
        revision, _, inner = rest.partition("/")
        commit = self._commit(name, revision)
        if commit is None:
            self._missing("RevisionNotFound")
            return
        folder = self.there.commits[name][commit]
        if what == "revision":
            files = [{"rfilename": str(f.relative_to(folder))} for f in _files(folder)]
            value: Any = {"id": name.partition("/")[2], "sha": commit, "siblings": files}
            self._json({**value, "lastModified": "2026-07-01T12:00:00.000Z"})
        elif what == "paths-info":
            text = body.decode()
            paths = json.loads(text)["paths"] if text[:1] == "{" else parse_qs(text)["paths"]
            self._json([_entry(folder, folder / p) for p in paths if (folder / p).exists()])
        elif not (folder / inner).is_dir():
            self._missing("EntryNotFound")
        else:
            deep = "recursive=true" in urlsplit(self.path).query.lower()
            found = (folder / inner).rglob("*") if deep else (folder / inner).iterdir()
            self._json([_entry(folder, path) for path in sorted(found)])

    def _commit(self, name: str, revision: str) -> str | None:
        commit = self.there.names[name].get(revision, revision)
        return commit if commit in self.there.commits[name] else None

    def _file(self, name: str, revision: str, file: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            self._missing("RevisionNotFound")
            return
        path = self.there.commits[name][commit] / file
        if not path.is_file():
            self._missing("EntryNotFound")
            return
        data = path.read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(path)}"'}
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

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}
