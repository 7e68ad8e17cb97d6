"""The agreement of a cascade's two models on the rows that a run checked, as a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from prefect_raybatch.ledger.layout import AGREEMENT_RECORD
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import Count, StrictRecord, read_json
from prefect_raybatch.quality.alarm import ShareSeries
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Agreement(StrictRecord):
    """The agreement of a cascade's two models on the checked rows of the run with this `plan`.

    Of `rows` rows that both answered, `agreed` had equal answers. `key` identifies the models and
    the rule by which rows are unsure. `series` compares the run with earlier ones.
    """

    plan: str
    key: str
    agreed: Count
    rows: Count
    series: ShareSeries


_RECORD = TypeAdapter(Agreement)


def put_agreement(store: Store, agreement: Agreement) -> None:
    """Write agreement.json of a run."""
    put_record(store, AGREEMENT_RECORD, with_checksum(dump(asdict(agreement))))


def read_agreement(store: Store) -> Agreement | None:
    """Return the agreement of a run, or None; raise `CorruptRun` for a malformed record."""
    try:
        data = read_record(store, AGREEMENT_RECORD)
    except FileNotFoundError:
        return None
    text = without_checksum(data, f"{store.uri}/{AGREEMENT_RECORD}")
    return read_json(_RECORD, text, AGREEMENT_RECORD)
