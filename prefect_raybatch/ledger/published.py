"""`_raybatch/published/`: the targets that a finished run was published to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.ledger.layout import PUBLISHED, PUBLISHED_NAME, published_path
from prefect_raybatch.ledger.record_files import (
    put_record,
    put_record_if_absent,
    read_record,
)
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Published(StrictRecord):
    """The record that a run was published to a target; `plan` is the hash of the run's plan.

    `target` is the target's name, `place` its address and `mode` how rows were added. `rows` counts
    the rows. `version` is the version of the target table that contains the rows, as its format
    writes it; "" for a target without versions. `at` is the time in seconds since 1970.
    """

    target: str
    format: str
    place: str
    mode: str
    plan: str
    rows: Count
    version: str
    at: Number

    def to_bytes(self) -> bytes:
        return dump(asdict(self))


_RECORD = TypeAdapter(Published)


def read_published(store: Store, target: str) -> Published | None:
    """Return the record of a target; None if the run was not published to it."""
    path = published_path(target)
    try:
        return read_json(_RECORD, read_record(store, path), path)
    except FileNotFoundError:
        return None


def all_published(store: Store) -> tuple[Published, ...]:
    """Return the records of all targets, sorted by name."""
    matches = (PUBLISHED_NAME.match(info.path) for info in store.list(PUBLISHED))
    records = (read_published(store, match[1]) for match in matches if match)
    return tuple(sorted((one for one in records if one), key=lambda one: one.target))


def unpublished_labels(store: Store, targets: Sequence[PublishTarget]) -> list[str]:
    """Return the names of those `targets` to which the run in `store` is not published yet."""
    published = {record.target for record in all_published(store)}
    return [target.label for target in targets if target.label not in published]


def record_published(store: Store, record: Published) -> Published:
    """Write the record of a target unless one exists; return the stored record.

    Raises `CorruptRun` if the stored record belongs to another plan.
    """
    if put_record_if_absent(store, published_path(record.target), record.to_bytes()):
        return record
    existing = read_published(store, record.target)
    if existing is None or existing.plan != record.plan:
        raise CorruptRun(f"{store.uri}/{published_path(record.target)} is for another plan")
    return existing


def replace_published(store: Store, record: Published) -> Published:
    """Replace the record of a target, which was published to again, and return the new one."""
    put_record(store, published_path(record.target), record.to_bytes())
    return record
