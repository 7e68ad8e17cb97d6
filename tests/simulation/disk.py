"""A disk below the package's own local store: real files, and each call that others see a point."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_raybatch.storage import local

from .scheduler import Scheduler, Stand
from .watch import Watch
from .wire import Wire, spoil

RECENT = 8  # changes of which a listing may know nothing yet


class Unsynced:
    """What would be lost if the power failed: names whose folder was not synced since, each by
    itself, and the contents of files that were not. Folders count as there once they are made."""

    def __init__(self) -> None:
        self.watched = False
        self.names: dict[str, list[bytes | None]] = {}  # path to what was there before each change
        self.synced: set[int] = set()  # inodes

    def change(self, path: str, before: bytes | None) -> None:
        if self.watched and local.TEMPORARY not in path:
            self.names.setdefault(path, []).append(before)

    def sync(self, path: str, inode: int, folder: bool) -> None:
        self.synced.add(inode)
        if folder:
            for name in [name for name in self.names if os.path.dirname(name) == path]:
                del self.names[name]

    def lose(self, root: str, rng: random.Random, now: float) -> Iterator[str]:
        """Paths of what is lost, in part or whole, at `now` by the machine's clock."""
        for path, before in sorted(self.names.items()):
            kept = rng.randrange(len(before) + 1)
            if kept < len(before):
                yield path
                self._restore(path, before[kept], now)
        self.names.clear()
        for path in sorted(Path(root).rglob("*")):
            if path.is_file() and path.stat().st_ino not in self.synced:
                yield str(path)
                data = path.read_bytes()
                self._restore(str(path), data[: rng.choice([0, len(data) // 2])], now)

    def _restore(self, path: str, data: bytes | None, now: float) -> None:
        Path(path).unlink(missing_ok=True)
        if data is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
            os.utime(path, (now, now))  # or a calm reaper would think it younger than itself
            self.synced.add(os.stat(path).st_ino)


class _Locked:
    """That this open file is locked, as soon as no other holds the lock."""

    def __init__(self, handle: Any, how: int) -> None:
        self.handle, self.how = handle, how

    def done(self) -> bool:
        try:
            fcntl.flock(self.handle, self.how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Disk:
    """The calls of `os` that the local store makes below `root`."""

    def __init__(self, root: Path, wire: Wire) -> None:
        self.root, self.wire = str(root), wire
        self.scheduler: Scheduler = wire.scheduler
        self.watch: Watch = wire.watch
        self.recent: list[str] = []
        self.ticks = 0
        self.unsynced = Unsynced()

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
        self.unsynced.change(target, before)
        self.ticks += 1
        when = int(self.scheduler.now * 1e9) + self.ticks
        os.utime(target, ns=(when, when))
        self.recent.append(target)
        if self.wire.may_spoil(self.key(target)) and self.wire.happens("spoiled"):
            self.wire.spoiled += 1
            beside = f"{target}.spoiled"
            Path(beside).write_bytes(spoil(self.content(target) or b"", self.scheduler.rng))
            os.utime(beside, ns=(when, when))
            self.unsynced.synced.add(os.stat(beside).st_ino)
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
        self.unsynced.change(path, before)
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

    def walk(self, top: str, **more: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in os.walk(top, **more):
            folders.sort()
            yield folder, folders, sorted(names)

    def open(self, path: str, mode: str = "r") -> Any:
        self.point("open", path)
        handle = open(path, mode)  # noqa: SIM115
        if mode == "xb":
            self.unsynced.synced.discard(os.fstat(handle.fileno()).st_ino)
        return handle

    def copyfile(self, source: str, target: str) -> None:
        shutil.copyfile(source, target)
        self.unsynced.synced.discard(os.stat(target).st_ino)

    def fsync(self, descriptor: int) -> None:
        if not self.unsynced.watched:
            return
        found = os.fstat(descriptor)
        path, folder = os.readlink(f"/proc/self/fd/{descriptor}"), stat.S_ISDIR(found.st_mode)
        if folder:
            self.point("sync", f"{path}/")
        self.unsynced.sync(path, found.st_ino, folder)

    def flock(self, handle: Any, how: int) -> None:
        """Waits as a process does; in earnest it would be all of them, which share a thread."""
        self.scheduler.wait(_Locked(handle, how))

    def lose(self, rng: random.Random) -> list[str]:
        """The power fails: keys of what was lost by it."""
        return [self.key(path) for path in self.unsynced.lose(self.root, rng, self.scheduler.now)]

    def damage(self, key: str, data: bytes | None) -> None:
        """Other bytes where some are, as if nothing had been written; None: nothing any more."""
        path = Path(self.root, key)
        if data is None:
            return path.unlink()
        times = path.stat().st_mtime_ns
        with path.open("r+b") as handle:
            handle.write(data)
            handle.truncate()
        os.utime(path, ns=(times, times))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts these calls under the package's local store."""
        calls = ("link", "replace", "unlink", "stat", "mkdir", "rmdir", "scandir", "walk")
        stand = Stand(os, **{c: getattr(self, c) for c in (*calls, "fsync")})
        local.os, local.open = stand, self.open  # type: ignore[attr-defined]
        local.shutil = Stand(shutil, copyfile=self.copyfile)  # type: ignore[assignment]
        local.fcntl = Stand(fcntl, flock=self.flock)  # type: ignore[assignment]
        try:
            yield
        finally:
            local.os, local.shutil, local.fcntl = os, shutil, fcntl
            del local.open  # type: ignore[attr-defined]

    def files(self) -> dict[str, bytes]:
        """All files that a listing shows."""
        found = {}
        for path in sorted(Path(self.root).rglob("*")):
            if path.is_file() and not path.name.startswith(local.TEMPORARY):
                found[str(path.relative_to(self.root))] = path.read_bytes()
        return found
