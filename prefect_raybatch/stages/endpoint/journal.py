"""Stores answers of a hosted model until their shard is committed, so that none is billed twice.

Answers are written at least once a second, each time as a new object: object stores cannot append.
A file holds JSON lines: each an answer (`HostedAnswer.to_json`) with the key of its request. The
request of a line that cannot be read is sent again.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterable

from prefect_raybatch.errors import StoreError
from prefect_raybatch.ledger.layout import JOURNAL
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)
WRITE_EVERY = 0.5  # seconds between two writes
MOST_JOURNAL_BYTES = 256 << 20  # size limit of a file that is read


class Journal:
    """Writes the answers that one engine receives, in a thread, to the run directory `store`."""

    def __init__(self, store: Store):
        self.store = store
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._writing = threading.Lock()
        self._lines: dict[int, list[str]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="raybatch-journal", daemon=True)
        self._thread.start()

    def add(self, shard: int, key: str, answer: HostedAnswer) -> None:
        """Queue the answer to the request `key` of a shard; it is written within a second."""
        line = json.dumps({"key": key, **answer.to_json()})
        with self._lock:
            self._lines.setdefault(shard, []).append(line)
        self._wake.set()

    def close(self) -> None:
        """Stop the thread, then write all queued answers."""
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
        """Write the queued answers, one file per shard, before returning.

        A failed write is logged, and its answers are dropped.
        """
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, {}
            for shard, some in lines.items():
                path = f"{JOURNAL}/{shard:08d}/{uuid.uuid4().hex}.jsonl"
                try:
                    self.store.put(path, "\n".join(some).encode())
                except StoreError as error:  # the journal only saves money: the run goes on
                    log.warning("cannot write %s: %s", path, error)


def read_journal(store: Store, shards: Iterable[int]) -> dict[str, HostedAnswer]:
    """Read the journals of these shards; return their answers by request key."""
    found: dict[str, HostedAnswer] = {}
    for shard in shards:
        for info in store.list(f"{JOURNAL}/{shard:08d}"):
            try:
                data = store.read(info.path, MOST_JOURNAL_BYTES)
            except FileNotFoundError:  # another driver finished the run and removed it
                continue
            for line in data.decode("utf-8", "replace").splitlines():
                entry = _entry(line)
                if entry is None:
                    log.warning("%s: a line cannot be read; its row is asked again", info.path)
                else:
                    found[entry[0]] = entry[1]
    return found


def remove_journal(store: Store) -> None:
    """Delete the journals of a run. Call it once all shards are committed."""
    store.delete([info.path for info in store.list(JOURNAL)])


def _entry(line: str) -> tuple[str, HostedAnswer] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("key"), str):
        return None
    answer = HostedAnswer.from_json(value)
    return None if answer is None else (value["key"], answer)
