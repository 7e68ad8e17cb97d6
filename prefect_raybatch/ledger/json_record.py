"""Reads and writes records that have a JSON file of their own, with a checksum."""

from __future__ import annotations

from dataclasses import asdict
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.record_files import put_record, put_record_if_absent, read_record
from prefect_raybatch.ledger.records import dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import StrictRecord, read_json
from prefect_raybatch.storage import Store

_R = TypeVar("_R", bound=StrictRecord)


class JsonRecord(Generic[_R]):
    """A record of type `kind` in the file at `path` of each run directory."""

    def __init__(self, path: str, kind: type[_R]) -> None:
        self.path, self._adapter = path, TypeAdapter(kind)

    def read(self, store: Store) -> _R | None:
        """Return the record of the run directory `store`; None if it has none.

        Raises `CorruptRun` if the record is malformed, too large or does not match its checksum.
        """
        try:
            data = read_record(store, self.path)
        except FileNotFoundError:
            return None
        return read_json(
            self._adapter, without_checksum(data, f"{store.uri}/{self.path}"), self.path
        )

    def put(self, store: Store, record: _R) -> None:
        """Write the record to the run directory `store`, replacing an earlier one."""
        put_record(store, self.path, record_bytes(record))

    def put_if_absent(self, store: Store, record: _R) -> _R:
        """Write the record unless one exists; return the stored one."""
        if put_record_if_absent(store, self.path, record_bytes(record)):
            return record
        stored = self.read(store)
        if stored is None:
            raise CorruptRun(f"{store.uri}/{self.path} exists, but cannot be read")
        return stored


def record_bytes(record: StrictRecord) -> bytes:
    """Return the content of a record's file: JSON with a checksum."""
    return with_checksum(dump(asdict(record)))
