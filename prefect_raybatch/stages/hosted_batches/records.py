"""Records of a run's batches, so that a later attempt finds the requests already sent.

A slot stands for one input file of a shard and the batch made from it. Its records are written in
this order, each at most once: `file.json` after the upload, `batch.json` after the batch was
created, `answers.jsonl` after it ended. A record that cannot be read counts as missing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import BATCHES
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.storage import Store
from prefect_raybatch.storage.proof import Sums, bad_upload, holds

log = logging.getLogger(__name__)
MOST_RECORD_BYTES = 64 << 20
MOST_ANSWERS_BYTES = 4 << 30
_NAME = re.compile(rf"{BATCHES}/(\d{{8,10}})/(\d{{4,6}})\.(file|batch|answers)\.jsonl?\Z")


@dataclass(frozen=True)
class BatchOutcome:
    """The outcome of an ended batch: its `answers` by request key.

    `why` is the reason why other requests have no answer. `counts` is False if the server did not
    try those requests: then the batch does not count as one of their tries.
    """

    answers: Mapping[str, HostedAnswer]
    why: str
    counts: bool


@dataclass
class Slot:
    """An input file of a shard, the keys of its requests in line order, and its batch.

    `created_again` is true if an earlier call, whose response was lost, may have created another
    batch of the same file.
    """

    shard: int
    number: int
    file_id: str
    keys: Sequence[str]
    batch_id: str | None = None
    created_again: bool = False
    outcome: BatchOutcome | None = None

    def path(self, kind: str) -> str:
        return slot_path(self.shard, self.number, kind)


def slot_path(shard: int, number: int, kind: str) -> str:
    """Return the path of a slot's record; `kind` is file.json, batch.json or answers.jsonl."""
    return f"{BATCHES}/{shard:08d}/{number:04d}.{kind}"


def put_slot(store: Store, slot: Slot) -> bool:
    """Record a slot's uploaded file unless the slot number is taken; return whether it was free."""
    value = {"file_id": slot.file_id, "keys": list(slot.keys)}
    return _put_record(store, slot.path("file.json"), json.dumps(value))


def put_batch(store: Store, slot: Slot, batch_id: str, created_again: bool) -> None:
    """Record the batch made from a slot's input file, unless one is recorded already.

    Then set the slot's `batch_id` and `created_again` from the record, which another driver may
    have written. If the record is damaged, set them from the arguments.
    """
    value = {"batch_id": batch_id, "created_again": created_again}
    _put_record(store, slot.path("batch.json"), json.dumps(value))
    if not read_batch(store, slot):  # the record is damaged
        slot.batch_id, slot.created_again = batch_id, created_again


def read_batch(store: Store, slot: Slot) -> bool:
    """Set a slot's batch fields from the record; return False if it is missing or damaged."""
    value = _read_json(store, slot.path("batch.json"))
    batch_id = value.get("batch_id")
    if not isinstance(batch_id, str):
        return False
    slot.batch_id, slot.created_again = batch_id, value.get("created_again") is True
    return True


def put_outcome(store: Store, slot: Slot, outcome: BatchOutcome) -> bool:
    """Record the outcome of a slot's batch; return False if one is recorded already."""
    # Only with a unique token does the store tell apart equal outcomes of two drivers.
    head = {"why": outcome.why, "counts": outcome.counts, "token": uuid4().hex}
    lines: list[dict[str, Any]] = [head]
    for key, answer in outcome.answers.items():
        lines.append({"key": key, **answer.to_json()})
    text = "\n".join(json.dumps(line) for line in lines)
    return _put_record(store, slot.path("answers.jsonl"), text)


def read_outcome(store: Store, slot: Slot) -> BatchOutcome | None:
    """Return the recorded outcome of a slot's batch; None if there is no record."""
    path = slot.path("answers.jsonl")
    try:
        text = store.read(path, MOST_ANSWERS_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    first, *rest = text.split("\n")
    head = _parsed(first)
    answers = {}
    for line in rest:
        value = _parsed(line)
        answer = HostedAnswer.from_json(value)
        if answer is None or not isinstance(value.get("key"), str):
            log.warning("%s: a line cannot be read; its row is asked again", path)
        else:
            answers[value["key"]] = answer
    return BatchOutcome(answers, str(head.get("why", "")), head.get("counts") is not False)


def read_slots(store: Store, shard: int) -> tuple[list[Slot], int]:
    """Return (slots of a shard in order, with batches and outcomes; the next free slot number).

    The next number is above all recorded ones, also those of damaged slots. So a driver that
    succeeds with `put_slot` under this number has seen all earlier slots.
    """
    infos = list(store.list(f"{BATCHES}/{shard:08d}"))
    matches = (_NAME.match(info.path) for info in infos)
    number = max((int(match[2]) for match in matches if match), default=-1) + 1
    return _slots(store, infos, ended=True), number


def open_slots(store: Store) -> list[Slot]:
    """Return the slots of all shards that have no recorded outcome yet."""
    return _slots(store, store.list(BATCHES), ended=False)


def _slots(store: Store, infos: Iterable[Any], ended: bool) -> list[Slot]:
    kinds: dict[tuple[int, int], set[str]] = {}
    for info in infos:
        if (match := _NAME.match(info.path)) is not None:
            kinds.setdefault((int(match[1]), int(match[2])), set()).add(match[3])
    slots = []
    for (shard, number), there in sorted(kinds.items()):
        if "file" not in there or ("answers" in there and not ended):
            continue
        value = _read_json(store, slot_path(shard, number, "file.json"))
        file_id, keys = value.get("file_id"), value.get("keys")
        if not isinstance(file_id, str) or not isinstance(keys, list):
            continue
        slot = Slot(shard, number, file_id, [str(key) for key in keys])
        if "batch" in there:
            read_batch(store, slot)
        if "answers" in there:
            slot.outcome = read_outcome(store, slot)
        slots.append(slot)
    return slots


def remove_records(store: Store) -> None:
    """Delete the records of a run's batches. Call it once the result is written."""
    store.delete([info.path for info in store.list(BATCHES)])


def cancel_path(attempt: str) -> str:
    """Return the path of the record that marks an attempt as cancelled."""
    return f"{BATCHES}/cancelled/{attempt}.json"


def was_cancelled(store: Store, attempt: str = "") -> bool:
    """Return whether `attempt` was cancelled; with "", whether any attempt was."""
    if attempt:
        return store.holds(cancel_path(attempt))
    return any(True for _ in store.list(f"{BATCHES}/cancelled"))


def _put_record(store: Store, path: str, text: str) -> bool:
    """Write a record unless it exists; return whether the stored record has this text.

    Raises `BadUpload` if the store then holds other bytes than it was sent.
    """
    data = text.encode()
    if not store.put_if_absent(path, data):
        return False
    try:
        is_intact = holds(store, store.stat(path), Sums.of(data))
    except FileNotFoundError:  # another driver finished the run and removed the record
        return True
    if not is_intact:
        raise bad_upload(store, path)
    return True


def _read_json(store: Store, path: str) -> dict[str, Any]:
    try:
        return _parsed(store.read(path, MOST_RECORD_BYTES).decode("utf-8", "replace"), path)
    except FileNotFoundError:
        return {}
    except CorruptRun as error:
        log.warning("%s; the record counts as missing", error)
        return {}


def _parsed(text: str, path: str = "") -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    if path:
        log.warning("%s cannot be read; it counts as missing", path)
    return {}
