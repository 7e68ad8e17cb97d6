"""What must hold after every single change of a file. Knows names and JSON, not the package."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping

import pyarrow.parquet as pq

ONCE = ("commit", "plan", "success", "layout")  # written once, never changed, never deleted

ADVICE = "_raybatch/superseded.json"


def kind_of(key: str) -> str:
    """What a file is, by its path below the root of all runs."""
    path = key.partition("/")[2]
    parts = path.split("/")
    if path == "_SUCCESS":
        return "success"
    if parts[0] in ("data", "_quarantine"):
        return "result"
    if parts[0] != "_raybatch" or len(parts) < 2:
        return "other"
    known = {"plan.json": "plan", "layout.json": "layout", "commits": "commit"}
    if len(parts) == 2 and parts[1].endswith(".parquet"):
        return "table"
    return known.get(parts[1], parts[1])


class Watch:
    """Notes each change that no interleaving may bring about; `files` gives all there are now."""

    def __init__(self, files: Callable[[], Mapping[str, bytes]]) -> None:
        self.files = files
        self.faults: list[str] = []
        self.ended: dict[str, dict[str, str]] = {}  # run to {path: SHA-256} of its result
        self.results: dict[str, bytes] = {}  # of the runs that have ended, as they ended
        self.left_alone: Callable[[], str | None] = lambda: None  # by whoever makes the change

    def changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        kind, (run, _, path) = kind_of(key), key.partition("/")
        if run == self.left_alone() and path != ADVICE:
            self.faults.append(f"{key} of a run that is repaired is changed")
        if before is not None and before != after:
            if kind in ONCE:
                self.faults.append(f"{key} is {'deleted' if after is None else 'replaced'}")
            if kind == "result" and after is None:
                self.faults.append(f"{key}, a file of the result, is deleted")
            if kind == "pieces" and after is None:
                self._piece_deleted(run, path)
        if kind == "success" and before is None and after is not None:
            self._succeeded(run, after)
        if kind == "result" and run in self.ended and after is not None:
            named = self.ended[run].get(path)
            as_named = named == hashlib.sha256(after).hexdigest()
            # Who stood still since before the end may put back what was lost since.
            put_back = before is None and named and _same_rows(self.results[key], after)
            if not (as_named or put_back):
                self.faults.append(f"{key} is not what _SUCCESS names, which was there before")

    def _piece_deleted(self, run: str, path: str) -> None:
        if run in self.ended:
            return
        name = path.rpartition("/")[2]
        commit = f"{run}/_raybatch/commits/{name.partition('-')[0]}.json"
        body = self.files().get(commit)
        if body is None:
            self.faults.append(f"{run}/{path} is deleted, and its shard may be committed with it")
        elif name in _named(body):
            self.faults.append(f"{run}/{path} is deleted, and the result is not there")

    def _succeeded(self, run: str, body: bytes) -> None:
        named = {part["path"]: part["sha256"] for part in json.loads(body)["parts"]}
        self.ended[run] = named
        files = {
            key: data
            for key, data in self.files().items()
            if key.startswith(f"{run}/") and kind_of(key) == "result"
        }
        self.results |= files
        there = {
            key.partition("/")[2]: hashlib.sha256(data).hexdigest() for key, data in files.items()
        }
        if there != named:
            wrong = sorted({*there.items()} ^ {*named.items()})
            self.faults.append(f"{run}/_SUCCESS names other files than are there: {wrong}")


def _named(commit: bytes) -> set[str]:
    """The pieces of a commit; of one that has rotted since, none."""
    try:
        return {piece["path"] for piece in json.loads(commit)["pieces"]}
    except ValueError:
        return set()


def _same_rows(one: bytes, other: bytes) -> bool:
    """Whether two Parquet files hold the same, if in other bytes."""
    return bool(pq.read_table(io.BytesIO(one)).equals(pq.read_table(io.BytesIO(other))))
