"""Finds the family of a run: its root run, and all runs that retry failed rows of the family.

The runs of a family lie side by side under one output root. The root run read the input. Retry runs
have its key with `.r1`, `.r2` and so on, even if they retry rows of a retry run; `Plan.parent` is
the key of the run whose rows they retry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.ledger.forks import MOST_FORKS, continued_key
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import no_run
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, is_remote, join, open_store

MOST_CHILDREN = 9999  # retry runs of a root run; their numbers have at most four digits


@dataclass(frozen=True)
class Member:
    """A run of a family (a root run and its retries); `summary` is its `_SUCCESS`, or None."""

    key: str
    ledger: Ledger
    plan: Plan
    summary: Success | None

    @property
    def failed(self) -> int:
        """Return the number of quarantined rows; raise `CorruptRun` if the run is not finished."""
        if self.summary is None:
            raise CorruptRun(
                f"{self.ledger.store.uri} is not finished: it has no _SUCCESS. Finish it first"
            )
        return self.summary.quarantine


@dataclass
class Family:
    """A root run and its retry runs (children), by run key: the root first, then by number.

    `base` is the root run's key and `root` the folder that contains all the runs; `next_key` is the
    free key for the next child. `strays` has one sentence for each child directory that is
    unreadable or whose parent is not in the family.

    A root run may be a repaired run, which continues damaged runs. `former` has the retries of
    these damaged runs; it is empty until `read_former` is called.
    """

    root: Store
    base: str
    members: dict[str, Member]
    next_key: str
    strays: list[str] = field(default_factory=list)
    former: dict[str, Member] = field(default_factory=dict)

    def children(self, key: str) -> list[Member]:
        """Return the runs that retry failed rows of run `key`."""
        retries = (*self.members.values(), *self.former.values())
        return [member for member in retries if member.plan.parent == key]

    def takers(self, key: str) -> list[Member]:
        """Return the runs that may have retried failed rows of run `key`.

        These are the children of run `key`. If it is a repaired run, they include the children of
        the damaged runs that it continues, as far as `read_former` has read them.
        """
        former = self.former.values() if key == self.base else ()
        firsts = (member for member in former if member.plan.parent not in self.former)
        return [*self.children(key), *firsts]

    def read_former(self) -> None:
        """Read into `former` the retry runs of the damaged runs that the root run continues.

        Does nothing if the root run is not a repaired run. Adds a sentence to `strays` for each of
        these retry runs that is unreadable or has no parent in its family.
        """
        for family in former_families(self.root, self.members[self.base].plan):
            self.strays += family.strays
            self.former |= family.members

    def is_fully_retried(self, member: Member) -> bool:
        """Return whether the runs that retry rows of `member` contain all its failed rows.

        Unfinished retry runs count, too. Raises `CorruptRun` if `member` is not finished.
        """
        taken = sum(child.plan.rows for child in self.children(member.key))
        return taken >= member.failed


def locate_run(run_dir: str, options: StoreOptions | None = None) -> tuple[Store, str]:
    """Return (store of the output root, run key) of a run directory.

    Raises `ConfigError` for a name that no run can have, and for a URI without a parent folder.

    A symbolic link is resolved, so that child runs are written beside the run that it points to.
    """
    uri = without_link(run_dir)
    root, _, key = uri.rpartition("/")
    if not root or root.endswith(":/"):
        raise ConfigError(
            f"{run_dir!r} is not a run directory: it has no parent folder. Name a folder below "
            "output.uri"
        )
    return open_store(root, options), check_run_key(key)


def without_link(run_dir: str) -> str:
    """Return the normalized URI of a run directory, with a symbolic link replaced by its target."""
    uri = join(run_dir)
    return os.path.realpath(uri) if not is_remote(uri) and os.path.islink(uri) else uri


def load_family(root: Store, key: str) -> Family:
    """Read the family of run `key` below the folder `root`: the root run and all its retry runs.

    Raises `NoSuchRun` if the run does not exist, and `CorruptRun` if it or a run that it descends
    from cannot be read. Problems of other runs are listed in `strays`.
    """
    member = _member(root, key)
    if member is None:
        raise no_run(root.sub(key))
    first = root_member(root, member)
    family = Family(root, first.key, {first.key: first}, "")
    _read_retries(family)
    return family


def _read_retries(family: Family) -> None:
    """Add the retries of a family's root run and their retries; set its `next_key`."""
    highest = 0
    # A child takes the number after the highest plan, by put-if-absent: as it must have seen all
    # lower ones, two that start at once meet at one number, and never take the same rows. Numbers
    # are asked for one by one, since a listing may show a later run and not yet an earlier one.
    listed = _highest_listed(family.root, family.base)
    number = 0
    while number < MOST_CHILDREN:
        number += 1
        plan = _try(family.root, f"{family.base}.r{number}", family)
        if plan is not None:
            highest = number
        elif number > listed:
            break
    family.next_key = check_run_key(f"{family.base}.r{highest + 1}")


def former_families(root: Store, plan: Plan) -> Iterator[Family]:
    """Yield the families of the damaged runs that the repaired run of `plan` continues.

    The run that was damaged last comes first. `members` of each family has only the retries, not
    the damaged run. A damaged run may itself be a repaired run that continues another one. Its plan
    names that one; if the plan is missing or unreadable, the run's key tells it (X.m2 continues
    X.m1), unless the run of that key was planned at another time than the original run.
    """
    forked_from = plan.forked_from
    for _ in range(MOST_FORKS):
        if forked_from is None:
            return
        key = forked_from["run_key"]
        damaged = None
        with suppress(CorruptRun):
            damaged = _plan(Ledger(root.sub(key)))
        if damaged is not None:
            is_other = forked_from.get("plan", damaged.hash) != damaged.hash
            if is_other or damaged.first_created != plan.first_created:
                return
        family = Family(root, key, {}, "")
        _read_retries(family)
        yield family
        if damaged is not None:
            forked_from = damaged.forked_from
        else:
            earlier = continued_key(key)
            forked_from = None if earlier is None else {"run_key": earlier}


def _try(root: Store, key: str, family: Family) -> Plan | CorruptRun | None:
    """Read the run directory `key` and add its run to the family if its parent is a member.

    Return the run's plan, the error if it cannot be read, or None if the directory holds no run.
    Problems are added to `family.strays`.
    """
    try:
        member = _member(root, key)
    except CorruptRun as fault:
        family.strays.append(f"{key}: {fault}")
        return fault
    if member is None:
        return None
    parent = member.plan.parent
    # A parent is read before: its number is lower, since it had to finish first.
    if parent == family.base or parent in family.members:
        family.members[key] = member
    elif parent is not None:
        family.strays.append(f"{key} retries rows of {parent}, which does not exist")
    return member.plan


def root_member(root: Store, member: Member) -> Member:
    """Return the root run of `member`'s family in the folder `root`; `member` if it has no parent.

    Raises `CorruptRun` if an ancestor of `member` is missing or unreadable.
    """
    seen = {member.key}
    while member.plan.parent is not None:
        parent = member.plan.parent
        try:
            above = None if parent in seen else _member(root, check_run_key(parent))
        except ConfigError as error:
            raise CorruptRun(f"{member.ledger.store.uri}: run key of the parent: {error}") from None
        if above is None:
            raise CorruptRun(
                f"{member.key} retries rows of {parent}, but {root.uri}/{parent} does not exist. "
                "Restore that run directory"
            )
        seen.add(parent)
        member = above
    return member


def _member(root: Store, key: str) -> Member | None:
    ledger = Ledger(root.sub(key))
    plan = _plan(ledger)
    return None if plan is None else Member(key, ledger, plan, ledger.finished(plan))


def _plan(ledger: Ledger) -> Plan | None:
    """Return the plan, or None; raise `CorruptRun` if it is unreadable or of another folder."""
    plan = ledger.load_plan()
    if plan is not None:
        check_named(ledger, plan)
    return plan


def check_named(ledger: Ledger, plan: Plan) -> None:
    """Raise `CorruptRun` unless the run directory has the name of its run key."""
    if plan.run_key != ledger.store.uri.rpartition("/")[2]:
        raise CorruptRun(
            f"{ledger.store.uri} holds run {plan.run_key!r}, and retries find a run by the name of "
            "its folder. Rename the folder back"
        )


def _highest_listed(root: Store, base: str) -> int:
    pattern = re.compile(re.escape(base) + r"\.r([1-9]\d{0,3})\Z")
    return max((int(m[1]) for name in root.folders() if (m := pattern.match(name))), default=0)
