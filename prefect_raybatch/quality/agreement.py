"""A record of how often a cascade's two models agree, on rows that both of them answered."""

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
    """The agreement of a cascade's two models on rows of a run that both answered.

    `plan` is the hash of the run's plan. Of `rows` rows, `agreed` had equal answers. `key`
    identifies the models and the rule that decides which rows are unsure. `series` compares the run
    with earlier ones.
    """

    plan: str
    key: str
    agreed: Count
    rows: Count
    series: ShareSeries


_RECORD = TypeAdapter(Agreement)


def put_agreement(store: Store, agreement: Agreement) -> None:
    """Write agreement.json to the run directory `store`, replacing an earlier one."""
    put_record(store, AGREEMENT_RECORD, with_checksum(dump(asdict(agreement))))


def read_agreement(store: Store) -> Agreement | None:
    """Return the agreement in agreement.json of the run directory `store`, None if it has none.

    Raises `CorruptRun` for a malformed record.
    """
    try:
        data = read_record(store, AGREEMENT_RECORD)
    except FileNotFoundError:
        return None
    text = without_checksum(data, f"{store.uri}/{AGREEMENT_RECORD}")
    return read_json(_RECORD, text, AGREEMENT_RECORD)
