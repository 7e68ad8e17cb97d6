"""Keeps answers of a hosted model until their shard is committed, so that none is paid twice.

Answers are written at least once a second, each time as a new object: object stores cannot append.
A file holds JSON lines of {key, content, finish, prompt, output}. What cannot be read is asked
again.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from prefect_raybatch.errors import StoreError
from prefect_raybatch.ledger.layout import JOURNAL
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)
WRITE_EVERY = 0.5  # seconds between two writes
MOST_JOURNAL_BYTES = 256 << 20  # of one file
ENTRY_FIELDS = {"key": str, "content": str, "finish": str, "prompt": int, "output": int}


class Journal:
    """The journal of one engine; `store` is rooted at the run directory."""

    def __init__(self, store: Store):
        self.store = store
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._writing = threading.Lock()
        self._lines: dict[int, list[str]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="raybatch-journal", daemon=True)
        self._thread.start()

    def add(self, shard: int, entry: Mapping[str, Any]) -> None:
        """Keep an answer; it is written within a second."""
        with self._lock:
            self._lines.setdefault(shard, []).append(json.dumps(entry))
        self._wake.set()

    def close(self) -> None:
        """Write what is left, and end."""
        self._closed.set()
        self._wake.set()
        self._thread.join(60)
        self.write()  # what came during the thread's last write

    def _main(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            self._closed.wait(WRITE_EVERY)
            self.write()

    def write(self) -> None:
        """Write the answers that came since the last write; all have been written on return."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, {}
            for shard, some in lines.items():
                path = f"{JOURNAL}/{shard:08d}/{uuid.uuid4().hex}.jsonl"
                try:
                    self.store.put(path, "\n".join(some).encode())
                except StoreError as error:  # it only saves money: the run goes on
                    log.warning("cannot write %s: %s", path, error)


def read_journal(store: Store, shards: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return the answers in the journals of shards by the key of their request."""
    found: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for info in store.list(f"{JOURNAL}/{shard:08d}"):
            for line in (
                store.read(info.path, MOST_JOURNAL_BYTES).decode("utf-8", "replace").splitlines()
            ):
                entry = _entry(line)
                if entry is None:
                    log.warning("%s: a line cannot be read; its row is asked again", info.path)
                else:
                    found[entry["key"]] = entry
    return found


def remove_journal(store: Store) -> None:
    """Remove the journals of a run whose shards are all committed."""
    store.delete([info.path for info in store.list(JOURNAL)])


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or set(entry) != set(ENTRY_FIELDS):
        return None
    return entry if all(type(entry[name]) is kind for name, kind in ENTRY_FIELDS.items()) else None
