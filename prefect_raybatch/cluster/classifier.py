"""Reads the classifier of a run, whose plan fixes its content."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_raybatch.distill.classifier import Classifier, classifier_identity, read_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.records import Plan


def planned_classifier(
    name: str | None, options: Mapping[str, object], plan: Plan
) -> Classifier | None:
    """Return the classifier in the file `name`, None if there is none; `options` of its store.

    Raises `ConfigError` if the file changed since the run was planned.
    """
    if name is None:
        return None
    data = read_file(name, options)
    if classifier_identity(data) != plan.parts.get("engine.classifier"):
        raise ConfigError(
            f"engine.classifier: {name} changed since the run was planned. Restore the file, or "
            "use another --run-key"
        )
    return Classifier.from_bytes(data, f"engine.classifier: {name}")
