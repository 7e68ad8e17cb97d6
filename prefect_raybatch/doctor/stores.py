"""Checks a store by trying each operation that a run needs; returns a URL to read its clock."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prefect_raybatch.doctor.check_result import CheckContext, CheckResult, failed, passed, warned
from prefect_raybatch.errors import (
    AccessDenied,
    CredentialsUnusable,
    RayBatchError,
    StoreError,
    UnsafeStore,
)
from prefect_raybatch.schemes import EXTRAS, store_scheme
from prefect_raybatch.storage import CloudStore, Store, open_store
from prefect_raybatch.storage.permissions import PERMISSIONS, Operation

STORE_PATIENCE = 10.0  # seconds to wait for a store's answer
LISTED = "use a store that docs/exactly-once.md lists"
OTHER = "fix the endpoint, bucket, keys, permissions or free space that it names"
NO_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or name a credentials "
    "block in output.credentials_block, or use a machine with a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or name a "
    "credentials block in output.credentials_block, or use a machine with a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or name a credentials block in "
    "output.credentials_block, or use a machine with a managed identity",
}
UNREPLACED = "none for runs: only a damaged file of a finished result cannot be replaced there"


def check_output(context: CheckContext) -> Iterator[CheckResult]:
    """Check the output of a job: a finding for each failure and warning, and one if none failed."""
    if (store := _output(context)) is None:
        return
    wrong = [one for one in check_steps(store) if one.mark != "pass"]
    for one in wrong:
        yield CheckResult("output", one.mark, f"{one.check}: {one.found}", one.remedy)
    if all(one.mark == "warn" for one in wrong):
        yield passed("output", f"{store.uri}: can write, list and delete; put-if-absent works")


def check_store(context: CheckContext) -> Iterator[CheckResult]:
    """Check the output of a job, with a finding for each step, passed or failed."""
    if (store := _output(context)) is not None:
        yield from check_steps(store)


def _output(context: CheckContext) -> Store | None:
    job = context.keyed()
    if job is None:
        return None
    store = open_store(job.output.uri, job.output.options or None)
    store.retry_seconds = STORE_PATIENCE
    return store


def check_steps(store: Store) -> Iterator[CheckResult]:
    """Try each store operation of a run in a new folder `_probe-UUID`, then delete its files.

    If a permission is missing, the other operations are still tried, so that all missing
    permissions are reported at once. Missing credentials and other errors of the store end the
    check.
    """
    folder = f"_probe-{uuid.uuid4()}"
    names = [f"{folder}/file", f"{folder}/race"]
    denied: set[str] = set()

    def told(error: Exception) -> str:
        """Return the error's message without the names of this check's folder and files."""
        return re.sub(rf"/{folder}(/file|/race)?", "", str(error))

    try:
        for step, (operation, act, success) in STORE_STEPS.items():
            if step in ("create", "replace") and "write" in denied:
                continue
            try:
                act(store, names)
            except AccessDenied as error:
                denied.add(step)
                left = f"{store.uri}/{folder}" if step == "delete" and "write" not in denied else ""
                yield failed(step, told(error), _grant(store, operation, left))
                continue
            except UnsafeStore as error:
                make, remedy = (failed, LISTED) if step != "replace" else (warned, UNREPLACED)
                yield make(step, told(error), remedy)
                continue
            except CredentialsUnusable as error:
                yield failed(step, told(error), NO_KEYS[store_scheme(store.uri)])
                return
            except StoreError as error:
                yield failed(step, told(error), OTHER)
                return
            except FileNotFoundError:
                if "write" not in denied:
                    yield failed(step, f"{store.uri}: a file that was just written is gone", LISTED)
                    continue
            yield passed(step, f"{store.uri}: {success}" if step == "write" else success)
    finally:
        with suppress(RayBatchError):  # the findings say why
            store.delete(names)


def _grant(store: Store, operation: Operation, left: str) -> str:
    needed = PERMISSIONS[store_scheme(store.uri)][operation]
    text = f"grant {needed} on {store.uri}, to the credentials of the flow and of all nodes"
    return f"{text}; then delete {left}" if left else text


def _write(store: Store, names: list[str]) -> None:
    store.put(names[0], b"old")


def _read(store: Store, names: list[str]) -> None:
    if store.read(names[0]) != b"old":
        raise UnsafeStore(f"{store.uri}: a file that was just written has other content")


def _list(store: Store, names: list[str]) -> None:
    folder = names[0].rpartition("/")[0]
    if [info.path for info in store.list(folder)] != names[:1] and store.holds(names[0]):
        raise UnsafeStore(f"{store.uri}: a file that was just written is not listed")


def _create(store: Store, names: list[str]) -> None:
    store.probe_race(names[1])


def _replace_seen(store: Store, names: list[str]) -> None:
    seen = store.stat(names[0])
    current = store.put(names[0], b"newer")
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for which in (seen, current):
            path = os.path.join(folder, "file")
            with open(path, "wb") as handle:
                handle.write(b"newest")
            results.append(store.replace_file(names[0], path, which))
    if results != [False, True]:
        raise UnsafeStore(f"{store.uri}: the store does not honour replace-if-match")


def _delete(store: Store, names: list[str]) -> None:
    store.delete(names)


STORE_STEPS: Mapping[str, tuple[Operation, Callable[[Store, list[str]], None], str]] = {
    "write": ("write", _write, "files can be written"),
    "read": ("read", _read, "files can be read"),
    "list": ("list", _list, "files can be listed"),
    "create": ("write", _create, "of several writers of one new file, one wins"),
    "replace": (
        "write",
        _replace_seen,
        "a file is replaced only while it is the one that was seen",
    ),
    "delete": ("delete", _delete, "files can be deleted"),
}


def clock_url(uri: str, options: Mapping[str, Any]) -> str | None:
    """Return a URL in the store of `uri` whose HTTP response has the store's time.

    `options` are those of the store. None for a local folder.
    """
    scheme = store_scheme(uri)
    if not scheme:
        return None
    if scheme in EXTRAS:
        store = open_store(uri, options)
        return store.connection.endpoint() if isinstance(store, CloudStore) else None
    client = options.get("client_kwargs") or {}
    given = (options.get("endpoint_url"), client.get("endpoint_url"))
    variables = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    return next(filter(None, (*given, *variables)), "https://s3.amazonaws.com")
