"""Finds folders whose files must not be read one by one: tables and run directories.

A table's files include rows that the table no longer has; only its log tells which are valid. A
run's files hold answers and failures, and are complete once `_SUCCESS` is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from prefect_raybatch.errors import SourceError, StoreError
from prefect_raybatch.ledger.layout import (
    DATA_FOLDER,
    PLAN,
    QUARANTINE_FOLDER,
    RECORDS,
    RESULT_FOLDERS,
    SUCCESS,
)
from prefect_raybatch.storage import Store, is_remote, open_store, read_ahead

RUN = "run"
FILES_LOOKED_AT = 1000  # files of a log folder that are looked at: one page of a listing
THREADS = 8  # folders above the input that are looked up at once
OPENED = {"Delta": "delta", "Iceberg": "iceberg", "Lance": "lance"}  # kind: source.format


def mark(path: str) -> tuple[str, str] | None:
    """Return (folder, kind) if the presence of a file `path` shows a table or a run; else None.

    `folder` is the part of `path` that is the table or the run. `kind` is the table's format
    (Delta, Hudi, Iceberg, Lance) or RUN.
    """
    parts = path.split("/")
    for kind, name in (("Delta", "_delta_log"), ("Hudi", ".hoodie")):
        if name in parts[:-1]:
            return "/".join(parts[: parts.index(name)]), kind
    above, (folder, name) = "/".join(parts[:-2]), ["", *parts][-2:]
    if folder == "metadata" and (
        name == "version-hint.text" or name.endswith((".metadata.json", ".metadata.json.gz"))
    ):
        return above, "Iceberg"
    if folder == "_versions" and name.endswith(".manifest"):
        return above, "Lance"
    return (above, RUN) if f"{folder}/{name}" == PLAN else None


def detect_folder_kind(store: Store) -> str | None:
    """Return what is at the root of `store`: a table's format, RUN, or None.

    A folder that this user may not list counts as absent. Raises transient errors of the store.
    """

    def listed(name: str, recursive: bool = False) -> bool:
        return any(mark(info.path) for info in islice(store.list(name, recursive), FILES_LOOKED_AT))

    looks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("Delta", partial(listed, "_delta_log", recursive=True)),
        ("Hudi", partial(listed, ".hoodie", recursive=True)),
        ("Iceberg", partial(store.holds, "metadata/version-hint.text")),
        ("Iceberg", partial(listed, "metadata")),
        ("Lance", partial(listed, "_versions")),
        (RUN, partial(store.holds, PLAN)),
    )
    for kind, found in looks:
        try:
            if found():
                return kind
        except StoreError as error:
            # Users may often list only the input, so a folder that they may not list is no error.
            if error.transient:
                raise
    return None


def saved_dataset(store: Store) -> bool:
    """Return whether a folder was written by `save_to_disk` of Hugging Face's `datasets`.

    Its Arrow files may be read as plain files as well: they hold all its rows.
    """
    try:
        return store.holds("dataset_dict.json") or (
            store.holds("dataset_info.json") and store.holds("state.json")
        )
    except StoreError as error:
        if error.transient:
            raise
        return False


class Places:
    """Remembers which folders are tables or runs, from listings and from its own look-ups."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._kinds: dict[str, str | None] = {}
        self._found: dict[str, tuple[tuple[str, str], ...]] = {}

    def note(self, folder: str, kind: str) -> None:
        """Remember that `folder` is a table of format `kind`, or a run if `kind` is RUN."""
        self._kinds[folder] = kind

    def look_above(self, folder: str) -> None:
        """Look up whether `folder` and its parents are tables or runs, once for each."""
        unknown = [place for place in _upwards(folder) if place not in self._kinds]
        if not unknown:
            return
        stores = [open_store(place, self._options) for place in unknown]
        kinds = read_ahead(detect_folder_kind, stores, THREADS, len(stores))
        self._kinds |= dict(zip(unknown, kinds, strict=True))

    def around(self, folder: str) -> tuple[tuple[str, str], ...]:
        """Return (folder, kind) of the nearest table or run that is or contains `folder`.

        The result is a tuple of such pairs, usually with one pair; () if there is no table or run.
        Only folders that were noted or looked up before count. If `folder` is reached by symbolic
        links, looks up its real path as well: a table or run around that path is a second pair.
        """
        if folder not in self._found:
            real = folder if is_remote(folder) else os.path.realpath(folder)
            if real != folder:
                self.look_above(real)
            found = (self._nearest(place) for place in dict.fromkeys((folder, real)))
            self._found[folder] = tuple(hit for hit in found if hit)
        return self._found[folder]

    def _nearest(self, folder: str) -> tuple[str, str] | None:
        for place in _upwards(folder):
            kind = self._kinds.get(place)
            if kind:
                return place, kind
        return None

    def refuse(self, root: str, uris: Sequence[str], whole: bool, named: bool) -> None:
        """Raise SourceError if files of a source.uri entry must not be read as plain files.

        These are the files of a table, the results of an unfinished run, a run's records, and the
        answers of a run together with its failed rows. `uris` are the files of the entry, and
        `root` is the folder in which they were found. `whole`: the entry reads everything in
        `root`. `named`: the entry is the path of a file, which may be a run's record.
        """
        self.look_above(root)
        runs: dict[str, set[str]] = {}
        for uri in uris or [f"{root}/"]:
            linked = not is_remote(uri) and os.path.islink(uri)
            for path in (uri, os.path.realpath(uri)) if linked else (uri,):
                if linked:
                    self.look_above(os.path.dirname(path))
                for place, kind in self.around(path.rpartition("/")[0] or "/"):
                    if kind != RUN:
                        raise SourceError(_table(place, kind))
                    runs.setdefault(place, set()).add(_below(place, path))
        for run, parts in runs.items():
            taken = whole and f"{run}/".startswith(f"{root.rstrip('/')}/")
            if taken or parts & {*RESULT_FOLDERS.values(), RECORDS}:
                mixed = taken or {DATA_FOLDER, QUARANTINE_FOLDER} <= parts
                self._refuse_run(run, mixed, not named and RECORDS in parts)

    def _refuse_run(self, run: str, mixed: bool, records: bool) -> None:
        try:
            open_store(run, self._options).stat(SUCCESS)
        except FileNotFoundError:
            raise SourceError(
                f"source.uri: the run in {run} is not finished (it has no {SUCCESS}), so rows are "
                "missing. Finish it with the command that started it, then run this job again"
            ) from None
        if records:
            raise SourceError(
                f"source.uri: {run}/{RECORDS} has the records of a run, not its result. Use "
                f"{run}/data, or the pieces listed in the manifest in {run}/{RECORDS}"
            )
        if mixed:
            raise SourceError(
                f"source.uri: {run} is a run directory: besides the answers in data/ it has failed "
                f"rows in {QUARANTINE_FOLDER}/. Use {run}/data (or {run}/{QUARANTINE_FOLDER} for "
                "the failed rows)"
            )


def _below(place: str, uri: str) -> str:
    """Return the first path part of `uri` below the folder `place`."""
    return uri[len(place.rstrip("/")) + 1 :].partition("/")[0]


def _upwards(folder: str) -> Iterator[str]:
    """Yield the folder and its parents, up to the root or the bucket."""
    top = folder.find("/", folder.index("://") + 3) if is_remote(folder) else 0
    while True:
        yield folder
        cut = folder.rfind("/")
        if cut < 0 or (is_remote(folder) and (top < 0 or cut < top)) or folder == "/":
            return
        folder = folder[:cut] or "/"


def _table(place: str, kind: str) -> str:
    said = (
        f"source.uri: {place} is {'an' if kind == 'Iceberg' else 'a'} {kind} table: its files "
        "include rows that the table no longer has (deleted, rewritten), so they cannot be read as "
        "plain files"
    )
    if kind in OPENED:
        return (
            f"{said}. Set source.uri to the folder of the table, and source.format to auto or "
            f"{OPENED[kind]}; select parts of it with source.filter"
        )
    return (
        f"{said}. Export its rows to Parquet (for example with Spark) and set source.uri to that "
        "folder"
    )
