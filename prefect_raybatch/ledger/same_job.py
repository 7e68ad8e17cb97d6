"""Compares a job with the job that planned a run, by the parts of their fingerprints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from prefect_raybatch.errors import PlanMismatch
from prefect_raybatch.job.secrets import masked
from prefect_raybatch.ledger.many_uris import bounded_parts
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.spec.run import Identity

ENGINE_PARTS = ("engine", "output.escalate.to")  # parts with the arguments of the job's engines


def difference(old: JsonObject, new: JsonObject) -> list[str]:
    """Return a line `field: old -> new` for each field in which two fingerprints' parts differ.

    Fields of nested groups have dotted names.
    """
    return [f"{key}: {before} -> {after}" for key, (before, after) in differing(old, new).items()]


def differing(old: JsonObject, new: JsonObject) -> dict[str, tuple[str, str]]:
    """Return {dotted field: (old, new)} where two fingerprints' parts differ, as short texts."""
    differences = {}
    flat_old, flat_new = _flat(bounded_parts(old)), _flat(bounded_parts(new))
    for key in sorted(set(flat_old) | set(flat_new)):
        before, after = flat_old.get(key), flat_new.get(key)
        if before != after:
            differences[key] = _short(before), _short(after)
    return differences


def check_same(
    plan: Plan,
    identity: Identity,
    where: str,
    left_out: Collection[str] = (),
    accepts: bool = False,
) -> None:
    """Raise `PlanMismatch`, listing the differences, unless `identity` is the job of `plan`.

    The job is the same if the fingerprints are equal. `left_out` are fields whose differences a
    person accepted. Differences in these fields alone are ignored, unless the job has masked values
    (secrets): a masked value may have changed as well, so `PlanMismatch` is raised. `where` names
    the run in the message. `accepts`: the command has --accept, so the message may suggest it.
    """
    if plan.fingerprint == identity.fingerprint:
        return
    differences = differing(plan.parts, identity.parts)
    lines = [
        _changed_code(key, plan, identity, accepts) or f"{key}: {before} -> {after}"
        for key, (before, after) in differences.items()
        if key not in left_out
    ]
    parts = identity.parts
    hidden = [field for name in ENGINE_PARTS for field in masked(parts.get(name, {}), name)]
    if differences and not lines and not hidden:
        return
    if not lines:  # only hidden values can differ
        lines = [f"{', '.join(hidden) or 'a field'}: changed (value hidden)"]
    raise PlanMismatch(
        f"{where} was planned by a job that differs from this one, so it cannot be continued:\n  "
        + "\n  ".join(lines)
        + "\nUse another --run-key, or undo these changes."
    )


def _changed_code(key: str, plan: Plan, identity: Identity, accepts: bool) -> str:
    """Return a line saying that the code of a user function changed.

    `key` is a differing field, such as prompt.function.source. Returns "" if it is not a function's
    code, or if the job names another function.
    """
    field, _, last = key.rpartition(".")
    function = identity.parts.get(field)
    if last != "source" or function is None or plan.parts.get(field) != function:
        return ""
    place, _, name = function.rpartition(":")
    where = "the notebook or script" if place == "__main__" else place
    may = accepts and plan.increment is None
    remedy = f" (--accept {key} continues with the new code)" if may else ""
    return f"{key}: the code of {name} in {where} changed{remedy}"


def _flat(value: JsonObject, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"
