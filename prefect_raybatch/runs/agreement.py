"""Adds to a cascade's report how often its two models agree, in this run and in earlier ones."""

from __future__ import annotations

import hashlib

from prefect_raybatch.ledger.forks import original_key
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.quality.agreement import Agreement, put_agreement, read_agreement
from prefect_raybatch.quality.alarm import AGREEMENT, continued
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report, put_pages
from prefect_raybatch.runs.series import MeasuredRun, series_before
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

# Parts of a plan's fingerprint that say what is compared: both models, and which rows are checked.
AGREEMENT_PARTS = (
    "model.identity",
    "first.model.identity",
    "engine.classifier",
    "output.escalate.when.fails_schema",
    "output.escalate.when.logprob_below",
    "output.escalate.when.probability_below",
)


def with_agreement(
    report: RunReport,
    options: StoreOptions | None,
    written: str,
    needs_earlier: bool = False,
) -> RunReport:
    """Add to a finished cascade's report how often its two models agree; return the report.

    Checked rows are rows that both models answered, to compare them. The agreement is the share of
    checked rows with equal answers. It is compared with earlier runs and recorded, and the report's
    pages are written again. Earlier runs are looked for under `written`, the job's output.uri
    before placeholders are filled in.

    Returns `report` unchanged in each of these cases:
    - The run checked no row.
    - It is a retry of failed rows, which are no random sample of the input.
    - It has an agreement on record.
    - `needs_earlier` is set, and no earlier run has an agreement. A later run can still compute
      this run's agreement from its report.
    """
    if not report.cascade or not report.cascade[0].checked:
        return report
    store = open_store(report.run, dict(options) if options else None)
    plan, before = need_plan(Ledger(store)), report.agreement
    run = _measured(plan, report)
    if run is None or (before is not None and before.plan == plan.hash):
        return report
    earlier = series_before(written, options, plan, agreement_in, run.key)
    if earlier is None and needs_earlier:
        return report
    counts = (run.key, run.right, run.rows)
    series = continued(earlier, *counts, run=original_key(plan), measure=AGREEMENT)
    agreement = Agreement(plan.hash, *counts, series)
    report = load_report(store, agreement=agreement)
    put_pages(store, report)
    put_agreement(store, agreement)  # last: until then, the next call writes the pages again
    return report


def agreement_in(store: Store) -> MeasuredRun | None:
    """Return how often a cascade's two models agreed in a finished run.

    Reads the run's record of agreement or, without such a record, its report. Returns None if there
    is no record and the run checked no row or is a retry of failed rows.
    """
    record = read_agreement(store)
    if record is not None:
        counts = (record.key, record.agreed, record.rows)
        return MeasuredRun(*counts, AGREEMENT, record.series)
    return _measured(need_plan(Ledger(store)), load_report(store))


def _measured(plan: Plan, report: RunReport) -> MeasuredRun | None:
    if plan.parent is not None or not report.cascade or not report.cascade[0].checked:
        return None
    first = report.cascade[0]
    parts = {name: plan.parts.get(name) for name in AGREEMENT_PARTS}
    key = hashlib.sha256(dump(parts)).hexdigest()[:16]
    return MeasuredRun(key, first.agreed, first.checked, AGREEMENT)
