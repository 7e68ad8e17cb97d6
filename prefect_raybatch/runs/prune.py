"""Removes old runs: complete ones alone, with the runs that retried their failed rows.

A run is marked first, and its plan and `_SUCCESS` go last: whoever reads it meanwhile finds a
finished run whose files are missing, and never one that seems to be unfinished and would be
resumed. What was cut off in the middle is found by its mark, and removed by the next call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.layout import PLAN, PRUNED, SUCCESS
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.runs.listing import COMPLETED, PRUNING, RunLine, lines_of
from prefect_raybatch.storage import Store, open_store

LAST = (PLAN, SUCCESS, PRUNED)  # in that order
AT_ONCE = 1000  # files of one delete


@dataclass
class Pruned:
    """What was removed, or would be: run keys with their bytes; and what stays, with the reason."""

    output: str
    dry_run: bool
    removed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.removed.values())


def prune(
    output: str,
    keep: int,
    *,
    job: str | None = None,
    older_than: float = 0.0,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Removes the complete runs below `output` but for the newest `keep` of each job.

    A run and those that retried its failed rows go together, once all of them are complete and
    finished over `older_than` seconds ago. Never removed are runs that are not complete, and what
    is not readable. Raises `ConfigError` for `keep` under 1 and the store's errors.
    """
    if keep < 1:
        raise ConfigError(f"keep {keep}: at least 1, the newest complete run of each job, stays")
    root = open_store(output, dict(options) if options else None)
    found = Pruned(root.uri, dry_run)
    lines = lines_of(root)
    families = _families(lines)
    newest: dict[str, int] = {}
    for first, members in families:
        if job is not None and first.job != job:
            continue
        why = _kept(members, root.now() - older_than)
        if why is None:
            newest[first.job] = newest.get(first.job, 0) + 1
            if newest[first.job] <= keep:
                why = f"one of the newest {keep} of {first.job}"
        for line in members:
            if why is not None:
                found.kept[line.run_key] = why
            else:
                found.removed[line.run_key] = 0
    for line in lines:
        if line.state == PRUNING and job is None:
            found.removed[line.run_key] = 0
    # The runs that retry others first: a family without its first run would not be readable.
    firsts = {line.run_key for line in lines if line.parent is None}
    for key in sorted(found.removed, key=lambda key: (key in firsts, key)):
        found.removed[key] = _remove(root, key, dry_run)
    return found


def _families(lines: list[RunLine]) -> list[tuple[RunLine, list[RunLine]]]:
    """(the run that read the input, it and its descendants), newest first."""
    by_key = {line.run_key: line for line in lines if line.state != PRUNING}
    found: dict[str, list[RunLine]] = {}
    for line in by_key.values():
        first, seen = line, {line.run_key}
        while first.parent in by_key and first.parent not in seen:
            first = by_key[first.parent]
            seen.add(first.run_key)
        found.setdefault(first.run_key, []).append(line)
    return [(by_key[key], members) for key, members in found.items()]


def _kept(members: list[RunLine], before: float) -> str | None:
    """Why none of a family goes, whatever its age; None where it may."""
    for line in members:
        if line.state != COMPLETED:
            return f"{line.run_key} is {line.state}"
    latest = max(line.finished or line.created or 0.0 for line in members)
    return "younger than asked for" if latest > before else None


def _remove(root: Store, key: str, dry_run: bool) -> int:
    """Removes a run directory; its bytes. By the root's store, so that its folder goes too."""
    store, size = root.sub(key), 0
    if not dry_run:
        store.put_if_absent(PRUNED, dump({"pruned": store.now()}))
    for names, some in _batches(store):
        size += some
        if not dry_run:
            root.delete(f"{key}/{name}" for name in names)
    if not dry_run:
        for path in LAST:  # one after the other, each gone before the next
            root.delete([f"{key}/{path}"])
    return size


def _batches(store: Store) -> Iterator[tuple[list[str], int]]:
    names: list[str] = []
    size = 0
    for info in list(store.list()):
        size += info.size if info.path != PRUNED else 0
        if info.path not in LAST:
            names.append(info.path)
        if len(names) == AT_ONCE:
            yield names, size
            names, size = [], 0
    yield names, size
