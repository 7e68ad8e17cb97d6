"""Removes old complete runs, together with the runs that retried their failed rows.

A run, its retries, their retries and so on are a family, which is kept or removed as a whole. A
repaired run belongs to the family of the run that it continues, since the retries of both count.
Everything is checked before anything is removed. A run directory first gets a file that marks its
removal, and its plan and `_SUCCESS` are removed last. So until the end, it looks like a finished
run with missing files, and never like an unfinished run that could be resumed. The mark lets the
next call complete an interrupted removal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prefect_raybatch.compile.job import planned_job
from prefect_raybatch.errors import ConfigError, RayBatchError, StoreError
from prefect_raybatch.ledger.forks import continued_key
from prefect_raybatch.ledger.last_attempt import advice, read_last_attempt
from prefect_raybatch.ledger.layout import LAST_ATTEMPT, PLAN, PRUNED, SUCCESS, SUPERSEDED_BY
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.published import unpublished_labels
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.runs.attempts import open_step_of
from prefect_raybatch.runs.listing import (
    COMPLETED,
    DAMAGED,
    PRUNING,
    RunLine,
    lines_of,
    recency_key,
)
from prefect_raybatch.runs.run import STORE_AWAY
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

_LAST = (PLAN, SUCCESS, PRUNED)  # removed last, in this order
_AT_ONCE = 1000  # files of one delete
_RETRY_KEY = re.compile(r"(.+)\.r([1-9]\d{0,3})\Z")


@dataclass
class Pruned:
    """The runs that `prune_runs` removed (with `dry_run`: would remove), and those that it kept.

    `removed` maps the keys of removed runs to their bytes, `lines` the same keys to their entries
    in the list of runs. `kept` maps the keys of the other runs to the reason for keeping them. The
    record of an attempt without a plan counts as a run.
    """

    output: str
    dry_run: bool
    removed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    lines: dict[str, RunLine] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.removed.values())


def prune_runs(
    output: str,
    keep: int,
    *,
    job: str | None = None,
    older_than: float = 0.0,
    dry_run: bool = False,
    options: StoreOptions | None = None,
) -> Pruned:
    """Remove the complete runs below `output` except for the newest `keep` of each job.

    With `job`, only runs of the job of this name are removed. With `dry_run`, nothing is removed.

    A run and the runs that retried its failed rows or repaired it are removed together. All of them
    must be complete, and the last must have finished over `older_than` seconds ago. An attempt that
    failed before there was a plan is removed under these conditions: its record is the only file,
    it ended over `older_than` seconds ago, and its job has kept runs, all of which finished later.
    Without `job`, interrupted removals are completed.

    Incomplete runs, runs that are not yet published, judged or measured, unreadable directories and
    the targets of links are never removed. Raises `ConfigError` for `keep` under 1, and the store's
    errors.
    """
    if keep < 1:
        raise ConfigError(
            f"keep {keep}: give at least 1. The newest run of each job is always kept"
        )
    root = open_store(output, dict(options) if options else None)
    before = root.now() - older_than
    found = Pruned(root.uri, dry_run)
    lines = lines_of(root)
    newest: dict[str, list[RunLine]] = {}
    for first, members in _families(root, lines):
        if job is not None and first.job != job:
            continue
        reason = _reason_to_keep(first, members, before)
        if reason is None:
            complete = newest.setdefault(first.job, [])
            complete.append(first)
            if len(complete) <= keep:
                reason = f"one of the newest {keep} of {first.job}"
            else:
                reason = _steps_left(root, members)
        _note(root, found, members, reason)
    for line in lines:
        if line.state == PRUNING and job is None:
            _note(root, found, [line], None)
        elif line.is_attempt and job in (None, line.job):
            runs_kept = newest.get(line.job, [])[:keep]
            _note(root, found, [line], _reason_to_keep_attempt(root, line, runs_kept, before))
    # Later retries first: a run whose parent is gone would not be readable.
    order = sorted(found.removed, key=lambda key: (-_retry_number(found.lines[key]), key))
    found.removed = {key: found.removed[key] for key in order}
    if not dry_run:
        _remove_all(root, found)
    return found


def _remove_all(root: Store, pruned: Pruned) -> None:
    """Remove the runs and attempts in `pruned.removed`, in that order."""
    for key in pruned.removed:
        if pruned.lines[key].is_attempt:
            root.delete([f"{key}/{LAST_ATTEMPT}"])
        else:
            _remove(root, key)


def _note(root: Store, pruned: Pruned, members: list[RunLine], reason: str | None) -> None:
    """Add a run and its retries (`members`) to `pruned`, as kept for `reason` or as removed.

    Without a reason, they are nevertheless kept if their files cannot be listed.
    """
    sizes: dict[str, int] = {}
    if reason is None:
        try:
            sizes = {line.run_key: _size(root.sub(line.run_key)) for line in members}
        except STORE_AWAY:
            raise
        except StoreError as error:
            reason = f"its files cannot be listed: {error}"
    for line in members:
        if reason is not None:
            pruned.kept[line.run_key] = reason
        else:
            pruned.removed[line.run_key] = sizes[line.run_key]
            pruned.lines[line.run_key] = line


def _families(root: Store, lines: list[RunLine]) -> list[tuple[RunLine, list[RunLine]]]:
    """Return (first run, all runs) of each family.

    A family is a run with its retries and the runs that continue it after a repair. The family
    whose first run was planned last comes first; a repaired run counts as planned when the original
    was. An unreadable directory counts as a retry if its key ends in .rNUMBER, and as a repaired
    run if its key ends in .mNUMBER. Attempts without a plan and half removed runs are left out. If
    a run in a chain of repairs is left out, the next one counts as the repair of the one before it.
    A run that was repaired before it was complete is a family by itself: it has no retries. `root`
    is the folder of the runs.
    """
    by_key = {line.run_key: line for line in lines if line.state != PRUNING and not line.is_attempt}
    repaired = {_parent(root, line, by_key) for line in by_key.values() if line.forked_from}
    alone = {
        line.run_key
        for line in by_key.values()
        if line.run_key in repaired and line.state not in (COMPLETED, DAMAGED)
    }
    found: dict[str, list[RunLine]] = {}
    for line in by_key.values():
        first = above = line
        seen = {line.run_key}
        while (key := _parent(root, above, by_key)) in by_key and key not in seen:
            above = by_key[key]
            seen.add(key)
            if line.run_key not in alone and key not in alone:
                first = above
        found.setdefault(first.run_key, []).append(line)
    families = [(by_key[key], members) for key, members in found.items()]
    return sorted(families, key=lambda family: _age_key(family[0]), reverse=True)


def _age_key(first: RunLine) -> tuple[object, ...]:
    """Return the sort key of a family by its `first` run; later planned runs have greater keys."""
    return first.first_created or 0.0, *recency_key(first)


def _parent(root: Store, line: RunLine, by_key: Mapping[str, RunLine]) -> str:
    """Return the key of the run that `line` retries or continues; "" if there is none.

    For an unreadable directory, it is derived from its key: X for X.r1 and X.m1, X.m1 for X.m2. If
    that run is not in `by_key` and is itself a repaired run, returns the key of the run that it
    continued. A user may also have chosen a key such as X.m1, so this needs the record of the
    repair, in a run in the folder `root`.
    """
    if line.state != DAMAGED or line.parent or line.forked_from:
        key = line.parent or line.forked_from or ""
    else:
        match = _RETRY_KEY.match(line.run_key)
        key = match[1] if match else continued_key(line.run_key) or ""
    nearest = key
    while nearest and nearest not in by_key:
        nearest = continued_key(nearest) or ""
    is_repaired = nearest not in ("", key) and root.sub(nearest).holds(SUPERSEDED_BY)
    return nearest if is_repaired else key


def _retry_number(line: RunLine) -> int:
    """Return the number at the end of a retry's run key, 0 for another run.

    A retry has a greater number than the retry whose failed rows it retries.
    """
    match = _RETRY_KEY.match(line.run_key)
    return int(match[2]) if match and (line.parent or line.state == PRUNING) else 0


def _reason_to_keep(first: RunLine, members: list[RunLine], before: float) -> str | None:
    """Return why a family of runs (`members`) must be kept; None if it may be removed.

    It must be kept in each of these cases:
    - A member is not complete.
    - A member finished after `before` (seconds since 1970).
    - The `first` run is a retry. The run that it retries is then missing.
    """
    if first.parent is not None:
        return (
            f"it retries failed rows of {first.parent}, which does not exist; delete its folder if "
            "you no longer need it"
        )
    for line in members:
        if line.state != COMPLETED:
            state = f"{line.state}: {line.trouble}" if line.trouble else line.state
            return f"{line.run_key} is not complete ({state})"
    latest = max(line.finished or line.created or 0.0 for line in members)
    return "younger than asked for" if latest > before else None


def _steps_left(root: Store, members: list[RunLine]) -> str | None:
    """Return a text on the first step that one of the complete runs `members` still lacks.

    The steps are measuring, judging and publishing. A run that a repaired run continues needs none
    of them. If the records of a run cannot be read, the text says why. Returns None if no step is
    left.
    """
    by_key = {line.run_key: line for line in members}
    repaired = {_parent(root, line, by_key) for line in members if line.forked_from}
    for line in members:
        if line.run_key in repaired:
            continue
        try:
            step = _step_left(root.sub(line.run_key), line.run_key)
        except STORE_AWAY:
            raise
        except RayBatchError as error:
            return (
                f"the records of {line.run_key} cannot be read ({error}); delete its folder if you "
                "no longer need it"
            )
        if step is not None:
            return step
    return None


def _step_left(store: Store, key: str) -> str | None:
    """Return a text on a step that the complete run `key` in `store` still lacks.

    Returns None if no step is left.
    """
    read_last_attempt(store)  # raises if it is damaged, which `open_step_of` ignores
    step = open_step_of(store)
    if step is not None and step.under_way:
        return f"{key} is {step.under_way}; wait, or delete its folder if that process is gone"
    if step is not None:
        todo = advice(step.first_step)
        return f"a step of {key} is not done ({step.undone}); {todo}, or delete its folder"
    plan = need_plan(Ledger(store))
    # Only then is the whole job parsed: it may be one of another version of this package.
    has_targets = bool(plan.job.get("output", {}).get("publish"))
    missing = unpublished_labels(store, planned_job(plan).output.publish) if has_targets else []
    if missing:
        return (
            f"{key} is not published to {', '.join(missing)}; run `raybatch publish` on it, or "
            "delete its folder"
        )
    return None


def _reason_to_keep_attempt(
    root: Store, line: RunLine, runs_kept: list[RunLine], before: float
) -> str | None:
    """Return why the record of an attempt without a plan is kept; None if it may be removed.

    It is kept in each of these cases:
    - The attempt has no recorded end.
    - It ended after `before` (seconds since 1970).
    - It ended after a run in `runs_kept` finished, or `runs_kept` is empty.
    - Its directory holds other files. A process that plans the run may be using them.
    """
    if line.finished is None:
        return "it may still be planning"
    if line.finished > before:
        return "younger than asked for"
    oldest = min((run.finished or 0.0 for run in runs_kept), default=0.0)
    if line.finished > oldest:
        return "no kept run has finished since it failed"
    if {info.path for info in root.sub(line.run_key).list()} != {LAST_ATTEMPT}:
        return "its folder holds other files too; run it again under this key, or delete the folder"
    return None


def _size(store: Store) -> int:
    """Return the bytes of the files in a run directory, without the file that marks its removal."""
    return sum(info.size for info in store.list() if info.path != PRUNED)


def _remove(root: Store, key: str) -> None:
    """Remove the run directory `key` below `root`.

    Deletes through the root's store, so that no empty folder is left.
    """
    store = root.sub(key)
    store.put_if_absent(PRUNED, dump({"pruned": store.now()}))
    for names in _batches(store):
        root.delete(f"{key}/{name}" for name in names)
    for path in _LAST:  # one after the other, each gone before the next
        root.delete([f"{key}/{path}"])


def _batches(store: Store) -> Iterator[list[str]]:
    names: list[str] = []
    for info in list(store.list()):
        if info.path not in _LAST:
            names.append(info.path)
        if len(names) == _AT_ONCE:
            yield names
            names = []
    yield names
