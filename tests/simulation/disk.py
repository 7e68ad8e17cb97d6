"""A disk below the package's own local store: real files, and each call that others see a point."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_raybatch.storage import local

from .scheduler import Scheduler, Stand
from .watch import Watch
from .wire import Wire, spoil

RECENT = 8  # changes of which a listing may know nothing yet


class Disk:
    """The calls of `os` that the local store makes below `root`."""

    def __init__(self, root: Path, wire: Wire) -> None:
        self.root, self.wire = str(root), wire
        self.scheduler: Scheduler = wire.scheduler
        self.watch: Watch = wire.watch
        self.recent: list[str] = []
        self.ticks = 0

    def inside(self, path: Any) -> bool:
        return isinstance(path, str) and path.startswith(f"{self.root}/")

    def key(self, path: str) -> str:
        return path[len(self.root) + 1 :]

    def point(self, call: str, path: Any) -> None:
        if self.inside(path):
            self.scheduler.point(f"{call} {self.key(path)}")

    def content(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None

    def _seen(self, target: str, before: bytes | None) -> None:
        """After a file appeared under a name that is listed."""
        self.ticks += 1
        when = int(self.scheduler.now * 1e9) + self.ticks
        os.utime(target, ns=(when, when))
        self.recent.append(target)
        if self.wire.may_spoil(self.key(target)) and self.wire.happens("spoiled"):
            self.wire.spoiled += 1
            beside = f"{target}.spoiled"
            Path(beside).write_bytes(spoil(self.content(target) or b"", self.scheduler.rng))
            os.utime(beside, ns=(when, when))
            os.replace(beside, target)
        self.watch.changed(self.key(target), before, self.content(target))

    def link(self, source: str, target: str) -> None:
        self.point("link", target)
        os.link(source, target)
        self._seen(target, None)

    def replace(self, source: str, target: str) -> None:
        self.point("rename", target)
        before = self.content(target)
        os.replace(source, target)
        self._seen(target, before)

    def unlink(self, path: str) -> None:
        self.point("unlink", path)
        before = self.content(path)
        os.unlink(path)
        if before is not None and local.TEMPORARY not in path:
            self.watch.changed(self.key(path), before, None)

    def stat(self, path: str) -> os.stat_result:
        self.point("stat", path)
        return os.stat(path)

    def mkdir(self, path: str) -> None:
        self.point("mkdir", path)
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        self.point("rmdir", path)
        os.rmdir(path)

    @contextmanager
    def scandir(self, path: str) -> Iterator[list[os.DirEntry[str]]]:
        self.point("list", path)
        with os.scandir(path) as entries:
            found = list(entries)
        if self.inside(path) and self.wire.happens("stale"):
            unseen = self.recent[-self.scheduler.rng.randrange(1, RECENT + 1) :]
            found = [entry for entry in found if entry.path not in unseen]
        yield found

    def walk(self, top: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in os.walk(top):
            folders.sort()
            yield folder, folders, sorted(names)

    def open(self, path: str, mode: str = "r") -> Any:
        self.point("open", path)
        return open(path, mode)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts these calls under the package's local store."""
        calls = ("link", "replace", "unlink", "stat", "mkdir", "rmdir", "scandir", "walk")
        stand = Stand(os, fsync=lambda descriptor: None, **{c: getattr(self, c) for c in calls})
        local.os, local.open = stand, self.open  # type: ignore[attr-defined]
        local.shutil = Stand(shutil)  # type: ignore[assignment]
        try:
            yield
        finally:
            local.os, local.shutil = os, shutil
            del local.open  # type: ignore[attr-defined]

    def files(self) -> dict[str, bytes]:
        """All files that a listing shows."""
        found = {}
        for path in sorted(Path(self.root).rglob("*")):
            if path.is_file() and not path.name.startswith(local.TEMPORARY):
                found[str(path.relative_to(self.root))] = path.read_bytes()
        return found
