"""`JobPolicy`: what a job may read, write, connect to, run and name."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import unquote

from prefect_raybatch.policy.allowed import ENGINE_VARIABLES, OWNER_ARGUMENTS, SECRETS
from prefect_raybatch.schemes import STORES, store_place, store_scheme

ANY = "*"
MOST_WORKERS = 4096
WILDCARD = re.compile(r"[*?\[]")
SCHEME_WITHOUT_SLASHES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # some read `file:/etc` as a URL
HOST_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# A host as every library reads it: no list of hosts, no escapes, no letters of other alphabets.
HOST = rf"{HOST_LABEL}(?:\.{HOST_LABEL})*\.?"
ADDRESS = r"[0-9A-Fa-f:.]+"  # IPv6, without a zone
HOST_OR_ADDRESS = re.compile(rf"{HOST}|{ADDRESS}")


@dataclass(frozen=True)
class KubernetesLimits:
    """Limits on clusters that are created for a job on Kubernetes.

    The tuples hold the names that a job may use; a name may contain `*`. `manifest`: a job may
    bring a RayCluster manifest; `privileged`: the manifest may set any field of the pods.
    `max_workers` is the highest number of worker pods.
    """

    namespaces: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    manifest: bool = False
    privileged: bool = False
    max_workers: int = 0


@dataclass(frozen=True)
class JobPolicy:
    """The places, hosts, functions and settings that a job may use.

    `read` and `write` hold folders, local or in a store (s3://...); `hosts` hold host names, with
    or without a port. `"*"` allows any. `limited`: the job comes through Prefect's API or a job
    server, not from its owner. `allow_private`: the job may name hosts at private addresses.
    `title` names the policy in messages.
    """

    title: str
    limited: bool = True
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    function_modules: tuple[str, ...] = ()
    engine_variables: tuple[str, ...] = ()
    engine_arguments: tuple[str, ...] = ()
    secrets: tuple[str, ...] = SECRETS
    blocks: tuple[str, ...] = ()
    allow_private: bool = False
    kubernetes: KubernetesLimits = field(default_factory=KubernetesLimits)

    def may_read(self, uri: str) -> bool:
        """Return whether a file, folder or glob lies in a folder of `read` or `write`."""
        return is_within(uri, (*self.read, *self.write))

    def readable_store_folders(self) -> tuple[str, ...] | None:
        """Return the folders in object stores that a job may read; None if it may read any."""
        folders = (*self.read, *self.write)
        return None if ANY in folders else tuple(filter(store_scheme, folders))

    def may_write(self, uri: str) -> bool:
        """Return whether a file or folder lies in a folder of `write`."""
        return is_within(uri, self.write)

    def may_connect(self, host: str, port: int | None = None) -> bool:
        """Return whether a job may name this host; `port` is None if the job gives no port."""
        if not HOST_OR_ADDRESS.fullmatch(host):
            return False
        name = _host(host)
        return any(_same_host(name, port, one) for one in self.hosts)

    def may_name_secret(self, name: str) -> bool:
        """Return whether a job may name this environment variable as a secret."""
        return matches_any(name, self.secrets)

    def may_name_block(self, name: str) -> bool:
        """Return whether a job may name this saved Prefect block."""
        return matches_any(name, self.blocks)

    def may_use_module(self, module: str) -> bool:
        """Return whether functions and classes may come from this module."""
        return any(
            one == ANY or module == one or module.startswith(f"{one}.")
            for one in self.function_modules
        )

    def may_set_variable(self, name: str) -> bool:
        """Return whether a job may set this environment variable for the engine."""
        return matches_any(name, (*ENGINE_VARIABLES, *self.engine_variables))

    def may_set_argument(self, name: str) -> bool:
        """Return whether this policy lets a job set engine argument `name` to any value.

        It does if it lists the argument, or a mapping that contains the argument. A dotted `name`
        such as `a.b` is a field of the mapping `a`.
        """
        parts = name.split(".")
        above = (".".join(parts[: n + 1]) for n in range(len(parts)))
        return any(matches_any(one, self.engine_arguments) for one in above)


STRICT_POLICY = JobPolicy("the built-in policy, which allows no folder and no host")


def owner_policy_of(operator: JobPolicy) -> JobPolicy:
    """Return the policy for jobs that their owner runs, derived from the `operator` policy.

    It allows all files, hosts, functions, secrets and blocks. Engine settings that run code, and
    privileged pods, are allowed only if the `operator` policy allows them.
    """
    limits = operator.kubernetes
    return JobPolicy(
        title="the policy of a job's owner",
        limited=False,
        read=(ANY,),
        write=(ANY,),
        hosts=(ANY,),
        function_modules=(ANY,),
        engine_variables=operator.engine_variables,
        engine_arguments=(*OWNER_ARGUMENTS, *operator.engine_arguments),
        secrets=(ANY,),
        blocks=(ANY,),
        allow_private=True,
        kubernetes=KubernetesLimits(
            namespaces=(ANY, *limits.namespaces),
            contexts=(ANY,),
            images=(ANY,),
            service_accounts=(ANY,),
            secrets=(ANY,),
            manifest=True,
            privileged=limits.privileged,
            max_workers=max(MOST_WORKERS, limits.max_workers),
        ),
    )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, in which `*` stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def canonical_place(uri: str) -> str | None:
    """Return a local path, file:// or bucket URI in canonical form.

    In a local path, symbolic links and `..` are resolved; a file:// URI becomes a path. For a glob,
    returns the canonical form of the last folder before its first wildcard. Returns None for
    - any other URI, such as `simplecache::file://`, or a file:// URI of another host,
    - a bucket URI with an empty part, `.` or `..`,
    - a path that different libraries may resolve to different files.
    """
    if not uri or "\0" in uri or "::" in uri.partition("/")[0]:
        return None
    scheme, separator, rest = uri.partition("://")
    scheme = scheme.lower() if separator else ""
    if scheme in STORES:
        return _canonical_key(*store_place(uri).split("://", 1))
    if scheme == "file":
        if not rest.startswith("/"):
            host, _, rest = rest.partition("/")
            if host != "localhost":
                return None
            rest = f"/{rest}"
        rest = unquote(rest)
    elif scheme or SCHEME_WITHOUT_SLASHES.match(uri):
        return None
    else:
        rest = uri
    fixed = _before_wildcard(rest)
    if fixed is None or "\0" in fixed:
        return None
    parts = {*re.split(r"[/\\]", _unquoted(rest))}
    if {".", ".."} & parts - {*rest.split("/")}:
        return None
    if ".." in parts and "#" in _unquoted(rest):  # some libraries leave out what follows a #
        return None
    path = os.path.expanduser(fixed)
    place = os.path.realpath(path)
    # After a symbolic link, some libraries resolve `..` to the folder that holds the link; the
    # kernel resolves it to the folder that holds the link's target.
    return place if os.path.realpath(os.path.abspath(path)) == place else None


def _canonical_key(scheme: str, rest: str) -> str | None:
    key = rest.rstrip("/")
    fixed = _before_wildcard(key)
    if fixed is None or not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", _unquoted(key))):
        return None
    return f"{scheme}://{fixed.rstrip('/')}"


def _unquoted(text: str) -> str:
    """Return a text with its percent escapes decoded, repeatedly until none is left.

    Libraries that read tables treat a path or key as a URL. In a URL, `%2e%2e` stands for `..`, the
    parent folder.
    """
    while (plain := unquote(text)) != text:
        text = plain
    return text


def _before_wildcard(path: str) -> str | None:
    """Return the folder of a glob: its path up to the last `/` before the first wildcard.

    A path that exists or has no wildcard is returned whole. None if `..` comes after that folder.
    """
    found = WILDCARD.search(path)
    if found is None or os.path.lexists(path):
        return path
    cut = path.rfind("/", 0, found.start())
    if ".." in path[cut + 1 :].split("/"):
        return None
    return (path[:cut] or "/") if cut >= 0 else "."


def is_within(uri: str, folders: Iterable[str]) -> bool:
    """Return whether a file, folder or glob lies in one of the folders."""
    folders = tuple(folders)
    if ANY in folders:
        return True
    place = canonical_place(uri)
    if place is None:
        return False
    for folder in folders:
        scheme = store_scheme(folder)
        if scheme and folder.endswith("://"):  # any bucket
            # Not a place with an account (@): the policy checks an account in options as a host.
            root: str | None = None if "@" in place.split("/")[2] else f"{scheme}:/"
        else:
            root = canonical_place(folder)
        if root is not None and f"{place}/".startswith(f"{root.rstrip('/')}/"):
            return True
    return False


def _host(name: str) -> str:
    """Return a host name in lower case, and an IP address in its standard notation."""
    name = name.strip("[]").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if re.fullmatch(r"[0-9a-fx.]+", name):
        try:
            return socket.inet_ntoa(socket.inet_aton(name))
        except OSError:
            pass
    return name


def _same_host(name: str, port: int | None, pattern: str) -> bool:
    if pattern == ANY:
        return True
    host, wanted = pattern, ""
    if not pattern.count(":") > 1 or pattern.startswith("["):  # no bare IPv6 address
        match = re.fullmatch(r"(\[.*\]|[^:]*)(?::(\d+))?", pattern)
        if match is None:
            return False
        host, wanted = match[1], match[2] or ""
    if wanted and (port is None or str(port) != wanted):
        return False
    return fnmatchcase(name, host.lower()) if ANY in host else name == _host(host)
