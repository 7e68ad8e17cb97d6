"""This node's cache of models and adapters: private to its user, and checked at each use.

Engines load these files, so nobody else may be able to put a file of their own in their place. Each
entry has a listing of its files beside it. The listing's SHA-256 is the entry's name, which the
plan pins, and the files must match the listing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.storage.private import open_lock

CACHE_VARIABLE = "RAYBATCH_CACHE"
MAX_LISTING_BYTES = 16 << 20
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# The bytes of an entry's listing: a JSON list of [name, size, ETag], or of [name, SHA-256] where
# the content itself is pinned.
FileListing = bytes


def cached_folder(kind: str, identity: str, fetch: Callable[[Path], FileListing]) -> str:
    """Return the folder of a cache entry; fetch it first if needed, in one process at a time.

    `kind` is models or adapters, `identity` the SHA-256 of the entry's listing. `fetch` fills an
    empty folder and returns its listing. Raises `ConfigError` for a cache that others can write to,
    and if listing or files do not match `identity`.
    """
    if not _IDENTITY.fullmatch(identity):
        raise ConfigError(
            f"the plan pins {identity!r}, which is not a SHA-256. Start a new run key"
        )
    folder = _private_folder(kind)
    target, listing_file = folder / identity, folder / f"{identity}.files"
    try:
        lock = open_lock(folder / f"{identity}.lock")
    except OSError as error:
        raise _unsafe(folder / f"{identity}.lock", error.strerror or str(error)) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # An earlier version left folders without a listing, so their files cannot be checked.
        if not (os.path.lexists(target) and os.path.lexists(listing_file)):
            _remove(target)
            part = folder / f"{identity}.part"
            _remove(part)  # left by a process that was killed
            part.mkdir(mode=0o700)
            listing = fetch(part)
            _remove(listing_file)
            listing_file.write_bytes(listing)
            _check_entry(part, listing_file, identity)
            part.rename(target)
        else:
            _check_entry(target, listing_file, identity)
    return str(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _private_folder(kind: str) -> Path:
    """Return the folder for entries of a kind, created if needed, with mode 0700.

    Raises `ConfigError` if it cannot be created or changed, belongs to another user or is writable
    by others, and the errors of `_check_root`.
    """
    default = Path.home() / ".cache" / "prefect_raybatch"
    root = Path(os.environ.get(CACHE_VARIABLE) or default).absolute()
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        folder = root / kind
        for path in (root, folder):
            path.mkdir(mode=0o700, exist_ok=True)
        _check_root(root)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise _unsafe(folder, "is not a folder of this user")
        if status.st_mode & _OTHERS_WRITE:
            raise _unsafe(folder, "is writable by other users")
        folder.chmod(0o700)
    except OSError as error:
        raise _unsafe(root, f"cannot be used ({error.strerror or error})") from None
    return folder


def _check_root(root: Path) -> None:
    """Raise `ConfigError` for a cache root in which others could rename this user's folders.

    `root`, and the folder that it links to if it is a link, must belong to this user or the
    superuser. Others may write to it only if its sticky bit is set.
    """
    owners = {0, os.getuid()}
    if root.lstat().st_uid not in owners or root.stat().st_uid not in owners:
        raise _unsafe(root, "belongs to another user")
    mode = root.stat().st_mode
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        raise _unsafe(root, "is writable by other users")


def _unsafe(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"{path}: {fault}. Engines load models and adapters from it: set {CACHE_VARIABLE} to a "
        "folder that belongs to this user alone"
    )


def _check_entry(folder: Path, listing_file: Path, identity: str) -> None:
    """Raise `ConfigError` unless the listing has the SHA-256 `identity` and `folder` matches it.

    The folder must hold exactly the listed files, as regular files of this user.
    """
    fault = _listing_fault(listing_file, identity) or _entry_fault(folder, listing_file)
    if fault is not None:
        raise ConfigError(
            f"{folder}: {fault}, so it differs from what the run was planned with. Remove it and "
            f"{listing_file.name} to fetch it again"
        )


def _listing_fault(listing_file: Path, identity: str) -> str | None:
    status = listing_file.lstat()
    if fault := _file_fault(status):
        return f"its listing {fault}"
    if status.st_size > MAX_LISTING_BYTES:
        return f"its listing has more than {MAX_LISTING_BYTES:,} bytes"
    if hashlib.sha256(listing_file.read_bytes()).hexdigest() != identity:
        return "the SHA-256 of its listing differs from its name"
    return None


def _entry_fault(folder: Path, listing_file: Path) -> str | None:
    expected: dict[str, list[Any]] = {
        name: facts for name, *facts in json.loads(listing_file.read_bytes())
    }
    for path, status in _walk(folder):
        name = str(path.relative_to(folder))
        if path == folder or stat.S_ISDIR(status.st_mode):
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                return f"{name} is not a folder of this user"
            continue
        if fault := _file_fault(status):
            return f"{name} {fault}"
        facts = expected.pop(name, None)
        if facts is None:
            return f"{name} is not in its listing"
        if isinstance(facts[0], int):
            if status.st_size != facts[0]:
                return f"{name} has {status.st_size:,} bytes, but {facts[0]:,} in its listing"
        elif _sha256(path) != facts[0]:
            return f"the SHA-256 of {name} differs from its listing"
    return f"{min(expected)} is missing" if expected else None


def _file_fault(status: os.stat_result) -> str | None:
    # Its mode does not matter: nobody else can enter the folder.
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return None if ours else "is not a regular file of this user"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield (path, its lstat) of a folder and of everything in it; links are not followed."""
    status = path.lstat()
    yield path, status
    if stat.S_ISDIR(status.st_mode):
        for inner in sorted(path.iterdir()):
            yield from _walk(inner)
