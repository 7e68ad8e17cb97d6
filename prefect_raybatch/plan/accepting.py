"""Decide which differences between a job and its run's plan a user may accept."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import nearest
from prefect_raybatch.job.counted_fields import FINGERPRINTED
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.increments import OF_LARGER
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.same_job import check_same, differing
from prefect_raybatch.spec.run import Identity

_ROWS = "it decides the rows of the run, which are fixed by its plan"
_COLUMNS = "it decides the columns of the result, which must be the same for all rows"
_KEPT = "the run keeps the value in its plan"
# {prefix of a field's name: why it cannot be accepted}; the first match counts.
ACCEPTABLE_OUTPUT = ("output.postprocess", "output.normalize", "output.on_cut_off")
NEVER_ACCEPTED = {
    "name": "it says which job the run belongs to",
    "source.": _ROWS,
    "retry": _ROWS,
    "output.": _COLUMNS,
    "engine.task": _COLUMNS,
    "engine.classifier": "the run keeps to the classifier of its plan",
    "sampling.n": _COLUMNS,
    "sampling.logprobs": _COLUMNS,
    "prompt.images.columns": _COLUMNS,  # the result leaves them out
    "prompt.chat_template": _KEPT,
    "engine.max_model_len_percentile": _KEPT,
}
OF_MODELS = ("engine.model", "engine.revision", "model.identity", "engine.adapters")
# The model and these settings decide the size of a vector and the labels of a classifier.
OF_VECTORS = (*OF_MODELS, "engine.hf_overrides", "engine.pooler_config", "engine.convert")
VECTOR_TASKS = ("embed", "classify")


def check_acceptable(
    plan: Plan,
    identity: Identity,
    where: str,
    fields: Sequence[str],
    by: str,
) -> tuple[Accepted, ...]:
    """Return a record of each difference between plan and job in `fields`, accepted by `by`.

    `identity` is the job's identity, `by` a user, `where` names the run in errors. `fields` are
    dotted names, as in the message of `check_same`. Raises `ConfigError` for an unknown field and
    for a difference that cannot be accepted, and `PlanMismatch` if other fields differ.
    """
    differences = differing(plan.parts, identity.parts)
    known = {*FINGERPRINTED, *differing({}, plan.parts), *differing({}, identity.parts)}
    for name in fields:
        if name not in known:
            raise ConfigError(f"accept: unknown field {name!r}{nearest(name, known)}")
        if name in differences:
            _check_field(plan, name, differences[name])
    if not fields or plan.fingerprint == identity.fingerprint:
        check_same(plan, identity, where, accepts=True)
        return ()
    check_same(plan, identity, where, left_out=fields, accepts=True)
    now = round(time.time(), 3)
    wanted = [name for name in dict.fromkeys(fields) if name in differences]
    return tuple(Accepted(name, *differences[name], by, now) for name in wanted)


def _check_field(plan: Plan, name: str, values: tuple[str, str]) -> None:
    if plan.increment is not None and plan.increment.get("ledger") == OF_LARGER:
        raise ConfigError(
            f"accept: {name} cannot be accepted in a cascade, whose models must answer the same "
            "job. Use another --run-key"
        )
    if plan.increment is not None:
        raise ConfigError(
            f"accept: {name} cannot be accepted in a run that reuses or keeps answers: later runs "
            "would reuse answers made with other settings. Use another --run-key"
        )
    reason = None
    if not name.startswith(ACCEPTABLE_OUTPUT):
        reason = next((why for start, why in NEVER_ACCEPTED.items() if _begins(name, start)), None)
    vectors = plan.parts.get("engine.task") in VECTOR_TASKS
    if vectors and any(_begins(name, start) for start in OF_VECTORS):
        reason = _COLUMNS
    if name == "engine.max_model_len" and "'auto'" in values:
        reason = _KEPT
    if reason is not None:
        raise ConfigError(
            f"accept: {name} ({' -> '.join(values)}) cannot be accepted: {reason}. Change it "
            "back, or use another --run-key"
        )


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) if start.endswith(".") else f"{name}.".startswith(f"{start}.")


def of_model(accepted: Sequence[Accepted]) -> bool:
    """Return whether the accepted differences include another model or other adapters."""
    return any(_begins(one.field, start) for one in accepted for start in OF_MODELS)
