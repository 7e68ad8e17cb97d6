"""Fetches an image's bytes: from the row itself, a declared folder, a store, or over http(s)."""

from __future__ import annotations

import base64
import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.policy.policy import is_within
from prefect_raybatch.schemes import STORES, options_for
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.stages.images.decode import BadImage
from prefect_raybatch.stages.images.http import Http, ImageUnavailable
from prefect_raybatch.storage import open_store

SHOWN = 200  # characters of a path or URL in a message


@dataclass(frozen=True)
class ImagePlaces:
    """The sources from which the images of rows may be read.

    `media_root` is the folder of local files, None to allow none. `options` are the options of the
    input's store, used for images in a store of the same kind. `seconds` bounds a fetch from a
    store, and one try over http(s). `allow_private` applies to http(s), see `Http`. Images in a
    store must lie in one of `store_folders`; None allows all.
    """

    media_root: str | None = None
    options: StoreOptions = field(default_factory=dict, repr=False)
    max_bytes: int = 20_000_000
    seconds: float = 20.0
    allow_private: bool = False
    store_folders: tuple[str, ...] | None = None

    def fetch(self, value: object) -> bytes:
        """Return the bytes of the image `value`: bytes, {bytes, path}, a path or a URL.

        A data URL may have up to two bytes more than `max_bytes`. Raises BadImage for permanent
        faults, else ImageUnavailable.
        """
        if isinstance(value, Mapping):
            data, path = value.get("bytes"), value.get("path")
            value = data if data is not None else path
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        if not isinstance(value, str):
            raise BadImage(
                f"the value is {type(value).__name__}, not an image. Use bytes, {{bytes, path}}, "
                "a path or a URL"
            )
        if not value.strip() or "\0" in value:
            raise BadImage("the path is empty or contains a NUL character")
        if value[:5].lower() == "data:":
            return self._from_data_url(value)
        scheme = value.split("://", 1)[0].lower() if "://" in value else ""
        if scheme in STORES:
            return self._from_store(value)
        if scheme in ("", "file"):
            return self._local(value)
        if scheme in ("http", "https"):
            return Http(self.max_bytes, self.seconds, self.allow_private).fetch(value)
        raise BadImage(
            f"{value[:SHOWN]} has the unsupported scheme {scheme!r}. Use a local path, s3://, "
            "gs://, az://, http:// or https://"
        )

    def _from_data_url(self, url: str) -> bytes:
        header, _, text = url.partition(",")
        if not header.lower().endswith(";base64"):
            raise BadImage("the data URL is not of the form data:image/png;base64,... Encode it so")
        if len(text) // 4 * 3 > self.max_bytes + 2:
            raise BadImage(_too_large("the data URL", self.max_bytes))
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise BadImage(f"the data URL is not valid base64: {error}. Encode it anew") from None

    def _from_store(self, uri: str) -> bytes:
        folder, _, name = uri.rpartition("/")
        if not name or folder.count("/") < 2:
            raise BadImage(f"{uri[:SHOWN]} does not name a file in a bucket (SCHEME://BUCKET/KEY)")
        if self.store_folders is not None and not is_within(uri, self.store_folders):
            raise BadImage(
                f"{uri[:SHOWN]} is in no folder that the operator's policy allows. Copy the image "
                "to such a folder, or add its folder to read in the file of RAYBATCH_POLICY"
            )
        try:
            store = open_store(folder, options_for(folder, self.options))
            store.retry_seconds = self.seconds
            return store.read(name, self.max_bytes)
        except FileNotFoundError:
            raise BadImage(f"{uri[:SHOWN]} does not exist") from None
        except CorruptRun:  # how a store reports a file larger than the limit
            raise BadImage(_too_large(uri, self.max_bytes)) from None
        except (StoreUnavailable, CredentialsUnusable) as error:  # no row is to blame for these
            raise ImageUnavailable(str(error)) from None
        except (ConfigError, StoreError) as error:
            raise BadImage(str(error)) from None

    def _local(self, path: str) -> bytes:
        if self.media_root is None:
            raise BadImage(
                f"{path[:SHOWN]} is a local path, but source.media_root is not set. Set it to the "
                "folder that holds the images"
            )
        plain = unquote(path.partition("://")[2]) if "://" in path else path
        root = os.path.realpath(self.media_root.removeprefix("file://"))
        if ".." in plain.split("/"):
            raise BadImage(f"{path[:SHOWN]} contains '..', which is not allowed")
        real = os.path.realpath(os.path.join(root, plain))  # follows every symbolic link
        if real != root and not real.startswith(root.rstrip("/") + "/"):
            raise BadImage(f"{path[:SHOWN]} is outside of source.media_root")
        return _read(real, path, self.max_bytes)


def _read(real: str, path: str, most: int) -> bytes:
    # Does not wait for the writer of a pipe, nor follow a link that replaced the file meanwhile.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(real, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadImage(f"{path[:SHOWN]} is not a file")
            data = file.read(most + 1)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):  # a network file system
            raise ImageUnavailable(f"{path[:SHOWN]}: {error.strerror}") from None
        raise BadImage(f"{path[:SHOWN]} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise BadImage(_too_large(path, most))
    return data


def _too_large(place: str, most: int) -> str:
    return f"{place[:SHOWN]} has more bytes than prompt.images.max_bytes {most}"
