"""URIs of files and folders, local or in a bucket, normalized so that they can be compared."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.schemes import INSTALL, STORES, SUPPORTED, store_place

_WILDCARD = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def is_remote(uri: str) -> bool:
    """Return whether `uri` has a scheme other than `file` (the store is not contacted)."""
    return _scheme(uri) not in ("", "file")


def join(uri: str, *parts: str) -> str:
    """Return `uri` (normalized) with relative `parts` appended.

    Raises ConfigError if a part could lead out of `uri`, such as `..`.
    """
    root = normalize(uri)
    return "/".join([root.rstrip("/"), *(checked(part) for part in parts)]) if parts else root


def contains(outer_uri: str, inner_uri: str) -> bool:
    """Return whether `inner_uri` is `outer_uri` or lies in it; local links are followed."""
    outer, inner = (
        uri if is_remote(uri) else os.path.realpath(uri)
        for uri in (normalize(outer_uri), normalize(inner_uri))
    )
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def split_glob(uri: str) -> tuple[str, str | None]:
    """Return a root without wildcards and the pattern below it.

    `s3://b/data/2024-*/x.parquet` gives `("s3://b/data", "2024-*/x.parquet")`. For a URI without
    `*`, `?` or `[`, returns (normalized URI, None). Raises ConfigError for a wildcard in the
    bucket.
    """
    wildcard = _WILDCARD.search(uri)
    if wildcard is None:
        return normalize(uri), None
    cut = uri.rfind("/", 0, wildcard.start())
    root, pattern = (uri[:cut] or "/", uri[cut + 1 :]) if cut >= 0 else (".", uri)
    if is_remote(uri) and root.endswith(":/"):
        raise ConfigError(
            f"{uri}: wildcards in the bucket name are not supported. Write the name of the bucket"
        )
    return normalize(root), checked(pattern)


def _scheme(uri: str) -> str:
    """Return the scheme of `uri` in lower case, "" for a plain path."""
    match = _SCHEME.match(uri)
    return match.group(1).lower() if match else ""


def normalize(uri: str) -> str:
    """Return the one form of a URI or path in which this package compares locations.

    This is the URI of a bucket, or an absolute local path, without a trailing slash. Raises
    ConfigError for an unsupported scheme.
    """
    scheme = _scheme(uri)
    rest = uri[len(scheme) + 3 :] if scheme else uri
    if not rest or "\0" in rest:
        raise ConfigError(f"{uri!r} is not a location. Use {SUPPORTED}")
    if scheme in STORES:
        place = store_place(uri)
        checked(rest.rstrip("/"))
        return place.rstrip("/")
    if scheme == "file":
        if not rest.startswith("/"):
            host, _, rest = rest.partition("/")
            if host != "localhost":
                raise ConfigError(f"{uri!r} names another host. Write file:///folder")
            rest = "/" + rest
        rest = unquote(rest)
    elif scheme:
        raise ConfigError(f"{uri!r}: {scheme}:// is not supported. Use {SUPPORTED}. {INSTALL}")
    path = os.path.abspath(os.path.expanduser(rest))
    return "/" + path.lstrip("/")  # abspath keeps a double slash at the start


def checked(path: str) -> str:
    """Return `path`; raise ConfigError unless it is relative and stays inside the store's root."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ConfigError(
            f"{path!r} is not a valid path in a store: it must be relative, without empty parts, "
            "'.', '..' or NUL"
        )
    return path
