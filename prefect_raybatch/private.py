"""Folders and files that this package makes for itself: for their owner alone."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import IO

OWNER_FOLDER, OWNER_FILE = 0o700, 0o600  # modes


def made_folder(path: Path) -> Path:
    """Return the folder; made for its owner alone where it is not there. One that is there may be
    shared on purpose, and stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=OWNER_FOLDER, exist_ok=True)
    return path


def private_folder(path: Path) -> Path:
    """Return the folder, which nobody else can look into; made where it is not there.

    Raises `PermissionError` where it is somebody else's or no folder: anybody may write to a
    temporary folder, and put another thing there first.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        found = made_folder(path).lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "is not a folder of this user; remove it", str(path))
    if found.st_mode & 0o077:
        path.chmod(OWNER_FOLDER)
    return path


def put_private(path: Path, text: str) -> bool:
    """Write a file for its owner alone; False where one is there, which stays. Nobody sees part of
    it."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with _opened(temporary, os.O_EXCL) as file:
        file.write(text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def write_private(path: Path, text: str) -> None:
    """Write a file for its owner alone, in place of one that is there."""
    with _opened(path, os.O_TRUNC) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), OWNER_FILE)
        file.write(text)


def _opened(path: Path, flags: int) -> IO[str]:
    def opener(name: str, _: int) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, OWNER_FILE)

    return open(path, "w", encoding="utf-8", opener=opener)
