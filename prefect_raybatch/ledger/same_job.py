"""Whether a run belongs to a job, and what tells the two apart."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from prefect_raybatch.errors import PlanMismatch
from prefect_raybatch.job.secrets import masked
from prefect_raybatch.ledger.many_uris import bounded_parts
from prefect_raybatch.ledger.records import Plan

# Arguments of an engine that earlier versions counted, and that change speed alone.
FREED = frozenset(
    (
        "performance_mode",
        "optimization_level",
        "compilation_config",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "cudagraph_metrics",
        "stream_interval",
    )
)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line a differing field: `field: old -> new`; groups are taken apart."""
    return [f"{key}: {before} -> {after}" for key, (before, after) in differing(old, new).items()]


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """{field: (old, new)} of what differs, as short texts, by name."""
    found = {}
    flat_old, flat_new = _flat(bounded_parts(old)), _flat(bounded_parts(new))
    for key in sorted(set(flat_old) | set(flat_new)):
        before, after = flat_old.get(key), flat_new.get(key)
        if before != after:
            found[key] = _short(before), _short(after)
    return found


def same_job(plan: Plan, found: str, parts: Mapping[str, Any]) -> bool:
    """Whether the run of that plan is one of the job with fingerprint `found`, made of `parts`.

    Fingerprints of earlier versions hold arguments that are free by now, and a JSON Schema as a
    mapping: without these they are the job's own, unless something in them is hidden and cannot be
    compared.
    """
    if plan.fingerprint == found:
        return True
    counted = plan.parts.get("engine")
    if not isinstance(counted, Mapping):
        return False
    before = parts_with_schema_text(plan.parts, parts)
    if not FREED & set(counted) and before is plan.parts:
        return False
    rest = {name: value for name, value in counted.items() if name not in FREED}
    if any(masked(rest, "engine")):
        return False
    return not difference({**before, "engine": rest}, parts)


def parts_with_schema_text(old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parts `old` with the text of a JSON Schema in `new` where they hold the same one as a
    mapping, without the order of its properties, as earlier versions did; else `old` itself."""
    schema, text = _schema(old), _schema(new)
    if not isinstance(schema, Mapping) or not isinstance(text, str):
        return old
    try:
        if json.loads(text) != schema:
            return old
    except (ValueError, RecursionError):
        return old
    sampling = old["sampling"]
    form = {**sampling["structured_outputs"], "json": text}
    return {**old, "sampling": {**sampling, "structured_outputs": form}}


def _schema(parts: Mapping[str, Any]) -> Any:
    """What `sampling.structured_outputs.json` is there."""
    found: Any = parts
    for name in ("sampling", "structured_outputs", "json"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def check_same(
    plan: Plan,
    found: str,
    parts: Mapping[str, Any],
    where: str,
    left_out: Collection[str] = (),
) -> None:
    """Raises `PlanMismatch` with a readable difference when the run belongs to another job.
    Differences in the fields `left_out` are taken on by a person, and make it no other."""
    if same_job(plan, found, parts):
        return
    differences = differing(plan.parts, parts)
    lines = [
        f"{key}: {before} -> {after}"
        for key, (before, after) in differences.items()
        if key not in left_out
    ]
    hidden = any(masked(parts.get("engine", {}), "engine"))
    if differences and not lines and not hidden:
        return
    if not lines:  # then it is what both hide
        fields = ", ".join(masked(parts.get("engine", {}), "engine")) or "a field"
        lines = [f"{fields}: hidden, and another value than before"]
    raise PlanMismatch(
        f"{where} was made by a job that gives other answers, so it cannot be continued:\n  "
        + "\n  ".join(lines)
        + "\nRun under another --run-key, or put the job back as it was."
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"
