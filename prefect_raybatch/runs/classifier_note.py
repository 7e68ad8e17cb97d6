"""Describes the classifier that answers rows of a run, from the run's own copy of it."""

from __future__ import annotations

from prefect_raybatch.compile.job import planned_job
from prefect_raybatch.distill.classifier import Classifier
from prefect_raybatch.ledger.increments import OF_LARGER, increment_of, requests_ledger
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.report.records import ClassifierNote


def classifier_note(ledger: Ledger, plan: Plan) -> ClassifierNote | None:
    """Return the report's note on the classifier that answers rows of a run; None if none does.

    In a cascade, the classifier is its first model.
    """
    file = planned_job(plan).engine.classifier
    if file is None:
        return None
    increment = increment_of(plan)
    if increment is not None and increment.ledger == OF_LARGER and increment.asks is not None:
        ledger, plan = requests_ledger(ledger.store), Plan.from_bytes(dump(increment.asks))
    data = ledger.classifier(plan)
    if data is None:
        return None
    made = Classifier.from_bytes(data, file)
    note = ClassifierNote(file, made.training.encoder, made.labels)
    if (measured := made.measured) is None:
        return note
    return ClassifierNote(
        *(note.file, note.encoder, note.labels),
        run=measured.run,
        trained=measured.trained,
        tested=measured.tested,
        same=measured.same,
    )
