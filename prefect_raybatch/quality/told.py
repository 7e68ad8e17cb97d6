"""Records for which e-values a run's alarm about its accuracy was emitted."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter

from prefect_raybatch.ledger.layout import ALARM_TOLD
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import Number, read_json
from prefect_raybatch.storage import Store

_TOLD: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, Number])


def read_told(store: Store) -> dict[str, float]:
    """Return the e-values for which the alarm was emitted, by how the accuracy was measured."""
    try:
        return read_json(_TOLD, read_record(store, ALARM_TOLD), ALARM_TOLD)
    except FileNotFoundError:
        return {}


def put_told(store: Store, e_values: Mapping[str, float]) -> None:
    """Record that the alarm was emitted."""
    put_record(store, ALARM_TOLD, dump(dict(e_values)))
