"""Private files of this user in places where others may write, such as a temporary folder.

Another user can put a link, a pipe or a file under a name that is easy to guess. So files lie in a
folder with a random name that nobody else can enter, and opening one never blocks and never follows
a link.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def private_folders(prefix: str) -> Iterator[Path]:
    """Yield this user's existing folders from `make_private_folder`, sorted by name."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}-{os.getuid()}-*")):
        try:
            found = path.lstat()
        except OSError:  # removed meanwhile
            continue
        ours = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if ours and stat.S_ISDIR(found.st_mode):
            yield path


def make_private_folder(prefix: str) -> Path:
    """Return a temporary folder that only this user can enter, creating it if there is none.

    All processes of the user share it. Two processes that create it at the same moment get a folder
    each.
    """
    for path in private_folders(prefix):
        return path
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getuid()}-"))


def open_regular(path: Path, flags: int, mode: str) -> IO[str]:
    """Open a file of this user without blocking.

    Raise `OSError` for a link, a pipe, a device or a file of another user.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(descriptor)
        raise OSError(errno.EPERM, "is not a regular file of this user; remove it", str(path))
    return open(descriptor, mode, encoding="utf-8", errors="replace")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, replacing an existing one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
        file.write(text)


def open_lock(path: Path) -> IO[str]:
    """Open, or create, a lock file that several processes of this user share."""
    return open_regular(path, os.O_RDWR | os.O_CREAT, "w")
