"""Records which events of a completed run were sent, so that none is sent twice."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter

from prefect_raybatch.ledger.layout import SENT_EVENTS
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import read_json
from prefect_raybatch.storage import Store

_RECORD: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def read_sent(store: Store) -> dict[str, str]:
    """Return {event name: id of the latest sent event of that name}; {} if none is recorded."""
    try:
        return read_json(_RECORD, read_record(store, SENT_EVENTS), SENT_EVENTS)
    except FileNotFoundError:
        return {}


def put_sent(store: Store, ids: Mapping[str, str]) -> None:
    """Write {event name: id} of the sent events, replacing an earlier record."""
    put_record(store, SENT_EVENTS, dump(dict(ids)))
