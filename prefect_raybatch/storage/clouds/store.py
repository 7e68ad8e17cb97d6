"""A prefix of a bucket of Google Cloud Storage, or of a container of Azure Blob Storage."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from prefect_raybatch.errors import ConfigError, StoreUnavailable
from prefect_raybatch.storage import bucket
from prefect_raybatch.storage.base import (
    FileInfo,
    in_batches,
    local_size,
    reading_local_file,
    too_large,
)
from prefect_raybatch.storage.bucket import BucketStore, content, part_size
from prefect_raybatch.storage.clouds.answers import cloud_answer
from prefect_raybatch.storage.uri import checked

_DELETE_THREADS = 16

_Result = TypeVar("_Result")


class CloudStore(BucketStore):
    """Objects below `root`: gs://bucket/prefix or az://container/prefix."""

    most_put_bytes = 4 * 2**30  # Azure allows 5,000 MiB

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        import obstore

        def get(client: Any) -> bytes | int:
            found = obstore.get(client, self._key(path))
            size = int(found.meta["size"])
            if max_bytes is not None and size > max_bytes:
                return size
            return _whole(found.bytes(), size)

        body = self._call("read", path, get)
        if isinstance(body, int):
            raise too_large(self._place(path), body, max_bytes or 0)
        return bytes(body)

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        import obstore

        folder = self._key(prefix) if prefix else self._prefix
        skip = len(self._prefix) + 1 if self._prefix else 0
        if not recursive:
            found = self._call(
                "list",
                prefix,
                lambda client: obstore.list_with_delimiter(client, folder or None)["objects"],
            )
            for item in sorted(found, key=lambda item: str(item["path"])):
                yield _info(item["path"][skip:], item)
            return
        pages: Any = None
        last, again = "", False  # path listed last; whether the listing began again before it
        is_sorted = True

        def page(client: Any) -> Any:
            nonlocal pages, again
            try:
                size = bucket.LISTING_PAGE
                pages = pages or iter(obstore.list(client, folder or None, chunk_size=size))
                return next(pages, [])
            except Exception:
                pages, again = None, bool(last)
                raise

        # No `offset`: Azurite and Azure's servers before 2025 ignore it and list from the start.
        # With a hierarchical namespace, Azure's paths are not sorted: `A/1` comes before `A-B/1`.
        while found := self._call("list", prefix, page):
            paths = [str(item["path"]) for item in found]
            if again and last in paths:
                found, again = found[paths.index(last) + 1 :], False
            elif again and is_sorted and paths[-1] > last:  # `last` was deleted meanwhile
                found, again = [item for item in found if item["path"] > last], False
            elif again:
                continue
            is_sorted = is_sorted and paths == sorted(paths) and paths[0] >= last
            last = paths[-1]
            for item in sorted(found, key=lambda item: str(item["path"])):
                yield _info(item["path"][skip:], item)
        if again:
            raise StoreUnavailable(
                f"list {self._place(prefix)}: the listing was interrupted, and {last} was deleted "
                "before it began again"
            )

    def folders(self) -> Iterator[str]:
        import obstore

        found = self._call(
            "list", "", lambda client: obstore.list_with_delimiter(client, self._prefix or None)
        )
        for folder in found["common_prefixes"]:
            yield folder.rstrip("/").rpartition("/")[2]

    def stat(self, path: str) -> FileInfo:
        return _info(path, self._head(path))

    def _head(self, path: str) -> Any:
        import obstore

        return self._call("read", path, lambda client: obstore.head(client, self._key(path)))

    def put(self, path: str, data: bytes) -> FileInfo:
        return FileInfo(path, len(data), _etag(self._put(path, data, "overwrite")), None)

    def _put(self, path: str, data: Any, mode: Any) -> Any:
        """PUT `data` in one request; return obstore's result, or None if a condition fails.

        The condition is in `mode`, as obstore takes it: "overwrite" (no condition), "create", or a
        dict with the version to replace.
        """
        import obstore

        # Large bodies, which are memory maps, get more time.
        extra = len(data) // bucket.SLOWEST if len(data) > bucket.SINGLE_PUT_BYTES else 0
        return self._call(
            "write",
            path,
            lambda client: obstore.put(
                client, self._key(path), data, mode=mode, use_multipart=False
            ),
            conditional=mode != "overwrite",
            extra_seconds=extra,
        )

    def _create(self, path: str, data: bytes) -> bool:
        return self._put(path, data, "create") is not None

    def _create_from_file(self, path: str, source: str) -> bool:
        return self._put_mapped(path, source, "create")

    def replace_file(
        self, path: str, local_path: str | os.PathLike[str], expected: FileInfo
    ) -> bool:
        source = os.fspath(local_path)
        size = local_size(source)
        head = self._head(path)
        if _etag(head) != expected.etag:
            return False
        if size > self.most_put_bytes:
            self._upload(path, source, size)
            return True
        # Google compares the generation, Azure the ETag.
        mode = {name: head[name] for name in ("e_tag", "version") if head[name]}
        if size <= bucket.SINGLE_PUT_BYTES:
            return self._put(path, content(source), mode) is not None
        return self._put_mapped(path, source, mode)

    def _put_mapped(self, path: str, source: str, mode: Any) -> bool:
        """PUT a memory-mapped local file in one request; return whether the condition held.

        The condition is in `mode`: see `_put`.
        """
        with reading_local_file(source), open(source, "rb") as handle:
            body = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._put(path, body, mode) is not None

    def _upload(self, path: str, source: str, size: int) -> None:
        import obstore

        def send(client: Any) -> Any:
            with open(source, "rb") as handle:
                return obstore.put(
                    client,
                    self._key(path),
                    handle,
                    chunk_size=part_size(size),
                    max_concurrency=bucket.PARALLEL_PARTS,
                )

        together = bucket.PARALLEL_PARTS * part_size(size)
        self._call("write", path, send, extra_seconds=together // bucket.SLOWEST)

    def delete(self, paths: Iterable[str]) -> None:
        with ThreadPoolExecutor(_DELETE_THREADS) as pool:
            for batch in in_batches(paths, bucket.LISTING_PAGE):
                for path in batch:
                    checked(path)
                for _ in pool.map(self._delete_one, batch):
                    pass

    def _delete_one(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self._call("delete", path, lambda client: obstore.delete(client, self._key(path)))

    def _range(self, info: FileInfo, start: int, stop: int) -> bytes | None:
        import obstore

        def get(client: Any) -> bytes:
            options: Any = {"range": (start, stop), "if_match": f'"{info.etag}"'}
            return _whole(
                obstore.get(client, self._key(info.path), options=options).bytes(), stop - start
            )

        found = self._call("read", info.path, get, conditional=True)
        return None if found is None else bytes(found)

    def now(self) -> float:
        return self.connection.clock() or time.time()

    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        """Return an empty tuple: obstore cannot list interrupted uploads.

        Azure drops their blocks after a week. At Google, a lifecycle rule of the bucket can remove
        them.
        """
        return ()

    def _place(self, path: str) -> str:
        return f"{self.uri}/{path}" if path else self.uri

    def _call(
        self,
        operation: str,
        path: str,
        send: Callable[[Any], _Result],
        conditional: bool = False,
        extra_seconds: int = 0,
    ) -> Any:
        """Call `send(client)`, and again after growing random pauses, until it is answered.

        One try may take ANSWER_SECONDS + `extra_seconds`. Makes at least MIN_TRIES tries, and then
        gives up after `retry_seconds`, or at once if there are no credentials. With `conditional`,
        returns None if the condition of the request does not hold. For any other failure, raises
        the error that `CloudAnswer.error` returns.
        """
        began, tries, pause = time.monotonic(), 0, bucket.FIRST_PAUSE
        link, place = self.connection, self._place(path)
        client = link.client(extra_seconds)
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        while True:
            try:
                return send(client)
            except (AlreadyExistsError, PreconditionError) as error:
                if conditional:
                    return None
                failure: Exception = error
            except (BaseError, OSError) as error:
                failure = error
            tries += 1
            answer = cloud_answer(failure, link.scrub(failure))
            if answer.certificate and (problem := link.ca_problem()):
                raise ConfigError(f"{place}: {problem}") from None
            wait = random.uniform(0.5, 1.0) * pause
            deadline = began + self.retry_seconds
            # Without credentials, each try waits 10 s for a metadata server that does not exist.
            late = tries >= bucket.MIN_TRIES and (
                answer.without_token or time.monotonic() + wait > deadline
            )
            if late or not answer.worth_retrying:
                # Not chained: the client's own texts can hold URLs with credentials.
                raise answer.error(link.scheme, operation, place, tries, link.endpoint()) from None
            link.silence.warn(place, link.endpoint(), began, deadline, answer.text)
            time.sleep(wait)
            pause = min(2 * pause, bucket.LONGEST_PAUSE)


def _whole(body: Any, size: int) -> bytes:
    """Return `body` as bytes; raise OSError, which is retried, if it is not `size` bytes long."""
    if len(body) != size:
        raise OSError(f"{len(body)} of {size} bytes arrived")
    return bytes(body)


def _etag(found: Any) -> str:
    return str(found["e_tag"] or "").strip('"')


def _info(path: str, found: Any) -> FileInfo:
    return FileInfo(path, found["size"], _etag(found), None, found["last_modified"].timestamp())
