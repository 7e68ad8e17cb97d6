"""Reads the classifier of a run, whose plan fixes its content."""

from __future__ import annotations

from prefect_raybatch.distill.classifier import Classifier, classifier_identity, read_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.spec.run import RunSpec


def planned_classifier(spec: RunSpec, plan: Plan) -> Classifier | None:
    """Return the classifier of a run; None for a run without one.

    Raises `ConfigError` if the file changed since the run was planned.
    """
    name = spec.finish.classifier
    if name is None:
        return None
    data = read_file(name, spec.output.options)
    if classifier_identity(data) != plan.parts.get("engine.classifier"):
        raise ConfigError(
            f"engine.classifier: {name} changed since the run was planned. Restore the file, or "
            "use another --run-key"
        )
    return Classifier.from_bytes(data, f"engine.classifier: {name}")
