"""A record of how often a cascade's two models agree, on rows that both of them answered."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import AGREEMENT_RECORD
from prefect_raybatch.ledger.strict import Count, StrictRecord
from prefect_raybatch.quality.alarm import ShareSeries


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


_FILE = JsonRecord(AGREEMENT_RECORD, Agreement)
read_agreement, put_agreement = _FILE.read, _FILE.put
