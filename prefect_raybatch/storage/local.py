"""A local folder as a store: files appear by rename or hard link, complete and synced."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat as stat_module
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

from prefect_raybatch.errors import StoreError, UnsafeStore
from prefect_raybatch.storage.base import (
    RACE_TRIES,
    FileInfo,
    Store,
    in_batches,
    local_size,
    not_found,
    too_large,
)
from prefect_raybatch.storage.uri import checked, join

TEMPORARY = ".tmp-"  # files being written; never listed
DELETED_AT_ONCE = 10_000  # files whose folders are checked before any file is deleted


class LocalStore(Store):
    """A store in a local folder. Files appear by rename or hard link of a synced temporary file.

    A link could lead out of the output folder, to files that must not be deleted. So nothing is
    listed, written or deleted through a link to a folder below `top`, the folder that was opened
    first; `top` itself may be a link. With `links`, listings do follow links to folders: use it
    only for data that is read and never written or deleted.
    """

    def __init__(self, root: str, links: bool = False, top: str | None = None) -> None:
        self.uri = root
        self.links = links
        self.top = top or root

    def sub(self, prefix: str) -> LocalStore:
        return LocalStore(join(self.uri, prefix), self.links, self.top)

    def above(self) -> LocalStore | None:
        folder = os.path.dirname(self.uri)
        return None if folder == self.uri else LocalStore(folder)

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        place = self._path(path)
        with self.open(path) as handle, _os_errors(place):
            if max_bytes is not None and (size := os.fstat(handle.fileno()).st_size) > max_bytes:
                raise too_large(place, size, max_bytes)
            return handle.read()

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        top = checked(prefix) if prefix else ""
        if not self.links:
            self._refuse_link(top)
        yield from self._walk(top, recursive, frozenset())

    def folders(self) -> Iterator[str]:
        with suppress(FileNotFoundError), _os_errors(self.uri), os.scandir(self.uri) as entries:
            yield from sorted(entry.name for entry in entries if self._entered(entry))

    def _walk(
        self, folder: str, recursive: bool, above: frozenset[tuple[int, int]]
    ) -> Iterator[FileInfo]:
        """Yield the files of `folder`, sorted by path as S3 does.

        A link to a folder is yielded as a file. If the store follows links, it is entered instead.
        `above` has the (device, inode) of each folder on the way here; a folder that is among them
        is not entered again.
        """
        place = os.path.join(self.uri, folder)
        try:
            with _os_errors(place):
                here = os.stat(place)
                with os.scandir(place) as entries:
                    # Only names: a DirEntry takes three times the memory, and caches its stat.
                    found = sorted(e.name + "/" * self._entered(e) for e in entries)
        except FileNotFoundError:
            return
        identity = (here.st_dev, here.st_ino)
        found.reverse()
        while found:  # so that yielded names are not kept
            name = found.pop()
            path = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                if recursive and identity not in above:
                    yield from self._walk(path[:-1], recursive, above | {identity})
            elif not name.startswith(TEMPORARY):
                file = os.path.join(place, name)
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    with _os_errors(file):
                        info = os.stat(file)
                    if stat_module.S_ISREG(info.st_mode) or stat_module.S_ISDIR(info.st_mode):
                        yield _local_info(path, info)

    def _entered(self, entry: os.DirEntry[str]) -> bool:
        return entry.is_dir(follow_symlinks=self.links)

    def _refuse_link(self, folder: str) -> None:
        """Raise StoreError if `folder` is a link, or lies in one.

        `folder` is relative to the root. Only links below `top` count.
        """
        place = self.top
        below = os.path.relpath(os.path.join(self.uri, folder), self.top)
        for part in below.split("/"):
            place = os.path.normpath(os.path.join(place, part))
            if place != self.top and os.path.islink(place):
                raise StoreError(
                    f"{place} is a link. In output folders and run directories links to folders "
                    "are not followed, because the files behind them may belong to others. Replace "
                    "it with a folder (or mount the other disk there), or use the folder that it "
                    "points to, then run the same command again"
                )

    def stat(self, path: str) -> FileInfo:
        place = self._path(path)
        with _os_errors(place):
            found = os.stat(place)
        if not stat_module.S_ISREG(found.st_mode):
            raise not_found(place)
        return _local_info(path, found)

    def put(self, path: str, data: bytes) -> FileInfo:
        self._land(path, data, len(data), os.replace)
        return self.stat(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        for _ in range(RACE_TRIES):
            try:
                # A link, never O_EXCL: a writer killed after O_EXCL leaves an empty "commit".
                self._land(path, data, len(data), _link)
                return True
            except FileExistsError:
                # NFS can repeat a link call whose answer was lost, and then our own file exists.
                with suppress(FileNotFoundError):  # created, and deleted since: try again
                    return self.read(path) == data
        raise StoreError(
            f"{self._path(path)} exists but is not a readable file. Remove it, then run the same "
            "command again"
        )

    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        self._land_file(path, local_path, os.replace)
        return self.stat(path)

    def put_file_if_absent(self, path: str, local_path: str | os.PathLike[str]) -> bool:
        try:
            self._land_file(path, local_path, _link)
        except FileExistsError:
            return False
        return True

    def replace_file(
        self, path: str, local_path: str | os.PathLike[str], expected: FileInfo
    ) -> bool:
        self._refuse_link(os.path.dirname(path))
        with _locked(self._path(path)) as found:
            # If another process had the lock first, it has replaced the file that this one locked.
            now = self.stat(path)
            if (now, now.inode) != (expected, expected.inode) or now.inode != found:
                return False
            self._land_file(path, local_path, os.replace)
            return True

    def _land_file(
        self,
        path: str,
        local_path: str | os.PathLike[str],
        show: Callable[[str, str], None],
    ) -> None:
        """Make a local file appear at `path` by `show(file, target)`, which renames or links it.

        The file system may refuse that across file systems, without permission or without hard
        links. Then the file is copied beside the target, and `show` gets the copy. Other errors are
        raised.
        """
        source = os.fspath(local_path)

        def place(temporary: str, target: str) -> None:
            try:
                # The mode that the umask gives: temporary files are often for their owner only.
                os.chmod(source, stat_module.S_IMODE(os.stat(temporary).st_mode))
                _sync(source)
                show(source, target)
            except (OSError, UnsafeStore) as error:
                elsewhere = (errno.EXDEV, errno.EPERM, errno.EACCES)
                if isinstance(error, OSError) and error.errno not in elsewhere:
                    raise
                shutil.copyfile(source, temporary)
                _sync(temporary)
                show(temporary, target)

        self._land(path, b"", local_size(source), place)

    def delete(self, paths: Iterable[str]) -> None:
        folders: set[str] = set()
        for some in in_batches(paths, DELETED_AT_ONCE):
            known = {os.path.dirname(path) for path in some} - folders
            for folder in known:
                self._refuse_link(folder)
            folders |= known
            for path in some:
                place = self._path(path)
                with suppress(FileNotFoundError), _os_errors(place):
                    os.unlink(place)
        for folder in folders:
            while folder:  # as on S3, a folder exists only while it has files
                try:
                    os.rmdir(os.path.join(self.uri, folder))
                except OSError:
                    break
                folder = os.path.dirname(folder)

    def open(self, path: str) -> BinaryIO:
        place = self._path(path)
        with _os_errors(place):
            return io.BufferedReader(_LocalFile(place))

    def now(self) -> float:
        return time.time()

    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        self._refuse_link("")
        found = []
        for folder, _, names in os.walk(self.uri, onerror=_raise_unless_absent):
            for name in names:
                if not name.startswith(TEMPORARY):
                    continue
                file = os.path.join(folder, name)
                path = os.path.relpath(file, self.uri)
                with suppress(FileNotFoundError):  # finished meanwhile
                    with _os_errors(file):
                        info = _local_info(path, os.stat(file))
                    if info.modified is not None and info.modified < before:
                        found.append(info)
        if remove:
            self.delete(info.path for info in found)
        return tuple(found)

    def _path(self, path: str) -> str:
        return os.path.join(self.uri, checked(path))

    def _land(self, path: str, data: bytes, size: int, place: Callable[[str, str], None]) -> None:
        """Write and sync a temporary file beside `path`, then call `place(temporary, target)`.

        `place` renames or links the temporary file to the target, and may raise FileExistsError.
        `size` (bytes) is only for the message of a full disk.
        """
        target = self._path(path)
        self._refuse_link(os.path.dirname(path))
        folder = os.path.dirname(target)
        with _os_errors(target, writing=size):
            for attempt in range(RACE_TRIES):
                temporary, handle = _temporary_in(folder)
                try:
                    with handle:
                        handle.write(data)
                        handle.flush()
                        os.fsync(handle.fileno())
                    place(temporary, target)
                    _sync(folder)
                    return
                except FileNotFoundError:
                    # Removed by a cleanup while this process was suspended: write it again.
                    if os.path.exists(temporary) or attempt + 1 == RACE_TRIES:
                        raise
                finally:
                    with suppress(OSError):  # already renamed, or ignored by listings
                        os.unlink(temporary)


class _LocalFile(io.FileIO):
    """A file whose reads raise StoreError: a disk may fail long after the file was opened."""

    def __init__(self, place: str) -> None:
        super().__init__(place, "rb", opener=_open_without_waiting)
        self._place = place

    def readinto(self, buffer: Any) -> int:
        with _os_errors(self._place):
            return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        with _os_errors(self._place):
            return super().readall() or b""


def _open_without_waiting(place: str, flags: int) -> int:
    """Open a file; raise OSError for a pipe or a device in its place, which could block."""
    descriptor = os.open(place, flags | os.O_NONBLOCK)
    if stat_module.S_ISDIR(mode := os.fstat(descriptor).st_mode) or stat_module.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a pipe or a device is in place of the file; remove it")


def _raise_unless_absent(error: OSError) -> None:
    """Raise an error that `os.walk` passes to its `onerror`; ignore it if the folder is gone.

    Without this function, `os.walk` silently leaves out folders that it cannot read.
    """
    with suppress(FileNotFoundError), _os_errors(str(error.filename)):
        raise error


def _local_info(path: str, found: os.stat_result) -> FileInfo:
    return FileInfo(
        path,
        found.st_size,
        None,
        found.st_mtime_ns,
        found.st_mtime,
        found.st_ctime_ns,
        found.st_dev,
        found.st_ino,
    )


def _link(temporary: str, target: str) -> None:
    """Create the hard link `target` to the file `temporary`.

    Raises FileExistsError if `target` exists, and UnsafeStore on a file system without hard links.
    """
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise UnsafeStore(
                f"{target}: this file system has no hard links, which exactly-once needs. Choose "
                "an output on another file system or on S3"
            ) from error
        raise


@contextmanager
def _locked(place: str) -> Iterator[int]:
    """Hold an exclusive flock on a file during the `with` block; yield the file's inode."""
    with ExitStack() as stack:
        with _os_errors(place):  # NFS locks only files that are open for writing
            handle = stack.enter_context(open(place, "r+b"))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise UnsafeStore(
                f"{place} must be replaced, but this file system has no locks ({error.strerror}). "
                "Remove this file, then run the same command again"
            ) from error
        with _os_errors(place):
            inode = os.fstat(handle.fileno()).st_ino
        yield inode


def _temporary_in(folder: str) -> tuple[str, BinaryIO]:
    """Return (name, open file) of a new file in `folder`, creating the folder if needed.

    The mode follows the umask.
    """
    path = os.path.join(folder, f"{TEMPORARY}{uuid.uuid4()}")
    for _ in range(RACE_TRIES):  # a `delete` elsewhere may remove the folder while it is empty
        _make_folder(folder)
        with suppress(FileNotFoundError):
            return path, open(path, "xb")
    raise OSError(errno.ENOENT, "the folder was deleted again and again", folder)


def _make_folder(folder: str) -> None:
    """Create a folder and missing parents, and sync the parent of each new one."""
    parent = os.path.dirname(folder)
    if os.path.isdir(folder) or parent == folder:
        return
    _make_folder(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", folder) from None
    with suppress(FileNotFoundError):
        _sync(parent)


def _sync(path: str) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders on some network mounts
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _os_errors(place: str, writing: int | None = None) -> Iterator[None]:
    """Within the block, convert operating system errors about `place` into this package's errors.

    `writing` is the number of bytes to write, None when reading. When reading, the error for a
    missing file is FileNotFoundError. FileExistsError is raised unchanged.
    """
    absent = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if writing is None and isinstance(error, absent):
            raise not_found(place) from error
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"disk full at {place}: {reason}, {writing or 0} bytes needed. Free some space"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            doing = "read" if writing is None else "write"
            raise StoreError(
                f"no permission to {doing} {place}: {reason}. Check the owner and mode of the "
                "folder, and how it is mounted"
            ) from error
        raise StoreError(f"{place}: {reason}") from error
