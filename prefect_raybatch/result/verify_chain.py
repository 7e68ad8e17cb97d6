"""Verifies a run together with its retry runs: each row is in exactly one place.

Each run is verified by itself first. Then every input row of the first run must be found once: in
the data of some run, among the rows that some run left out, or in a run's quarantine without being
retried by another run.

The first run may be a repaired one, which supersedes damaged runs. Rows that failed in it may have
been retried by the retry runs of the damaged runs, so these count too, but only for such rows. A
retry of a damaged run that took no such row is left out.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.family import Family, Member, load_family
from prefect_raybatch.ledger.row_numbers import among, name_rows
from prefect_raybatch.result.rows import failed_numbers, rows_of_member
from prefect_raybatch.result.verify import MOST_NAMED, Verdict, verify
from prefect_raybatch.storage import Store


@dataclass
class Link:
    """One run of a chain of retry runs, with its numbers of rows.

    `parent` is the key of the run that it retries. Of its `quarantined` (failed) rows, `retried`
    are retried by other runs.
    """

    run_key: str
    parent: str | None
    finished: bool
    rows: int
    data: int
    quarantined: int
    skipped: int
    retried: int = 0


@dataclass
class ChainVerdict:
    """The findings of `verify_chain` about the chain whose first run is in directory `run`.

    `ok`: every run is finished and without faults, and every row is in exactly one place. `rows` is
    the number of input rows of the first run.
    """

    run: str
    rows: int
    runs: list[Link] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.runs) and not self.faults

    @property
    def data(self) -> int:
        return sum(link.data for link in self.runs)

    @property
    def quarantined(self) -> int:
        """Return the number of failed rows that no run has retried."""
        return sum(link.quarantined - link.retried for link in self.runs)

    @property
    def skipped(self) -> int:
        return sum(link.skipped for link in self.runs)

    def to_dict(self) -> dict[str, object]:
        sums = {"data": self.data, "quarantined": self.quarantined, "skipped": self.skipped}
        return {
            "ok": self.ok,
            "run": self.run,
            "rows": self.rows,
            **sums,
            "runs": [link.__dict__ for link in self.runs],
            "faults": self.faults,
        }

    def fault(self, text: str) -> None:
        if len(self.faults) < MOST_NAMED:
            self.faults.append(text)
        elif len(self.faults) == MOST_NAMED:
            self.faults.append("... and more")


def verify_chain(root: Store, key: str) -> ChainVerdict:
    """Verify the whole chain of retry runs that run `key` in folder `root` belongs to.

    Memory: four bytes per row of the input, and eight per row that failed or was retried. Raises
    `NoSuchRun` if there is no such run, `CorruptRun` if a run that it descends from is unreadable.
    """
    family = load_family(root, key)
    first = family.members[family.base]
    if first.summary is None or first.failed:
        family.read_former()
    found = ChainVerdict(first.ledger.store.uri, first.plan.rows)
    for stray in family.strays:
        found.fault(stray)
    taken = {
        name: _numbers(member, found)
        for name, member in (family.members | family.former).items()
        if member.plan.parent is not None
    }
    if family.former and first.summary is not None:
        with suppress(CorruptRun):  # `_member` notes it
            failed = failed_numbers(first)
            for name in list(family.former):
                taken[name] = taken[name][among(failed, taken[name])]
                if not len(taken[name]):
                    del family.former[name]
    where = _Where(found)
    for member in (family.members | family.former).values():
        verdict = _verify(member, found)
        if verdict is None:
            continue
        link = Link(
            member.key,
            member.plan.parent,
            verdict.finished,
            verdict.rows,
            verdict.data,
            verdict.quarantined,
            verdict.skipped,
        )
        found.runs.append(link)
        if verdict.finished:
            _member(family, member, taken, where, link)
    if not found.faults:
        where.all_there()
    return found


def _numbers(member: Member, chain: ChainVerdict) -> np.ndarray:
    try:
        return member.ledger.numbers(member.plan).all()
    except CorruptRun as fault:
        chain.fault(f"{member.key}: {fault}")
        return np.zeros(0, np.int64)


def _verify(member: Member, chain: ChainVerdict) -> Verdict | None:
    """Verify one run of the chain by itself; return None if it is unreadable.

    Faults are added to `chain`.
    """
    try:
        verdict = verify(member.ledger.store)
    except CorruptRun as fault:
        chain.fault(f"{member.key}: {fault}")
        return None
    for text in verdict.faults:
        chain.fault(f"{member.key}: {text}")
    return verdict


def _member(
    family: Family,
    member: Member,
    taken: dict[str, np.ndarray],
    where: _Where,
    link: Link,
) -> None:
    """Record in `where` which file each row of a run is in; add faults to the chain.

    Failed rows that other runs retry are not recorded, but counted in `link`. `taken` is {key of a
    retry run: row numbers that it retries}. For a retry run of a damaged run, only these rows are
    recorded and counted.
    """
    chain = where.found
    children = [child.key for child in family.takers(member.key)]
    for first, second in combinations(children, 2):
        both = np.intersect1d(taken[first], taken[second], assume_unique=True)
        if len(both):
            chain.fault(
                f"{name_rows(both)} of {member.key} are retried by both {first} and {second}"
            )
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *(taken[key] for key in children)]))
    failed = [np.zeros(0, np.int64)]
    counts = Counter[str]()
    try:
        for kind, path, numbers in rows_of_member(member):
            if member.key in family.former:
                numbers = numbers[among(taken[member.key], numbers)]
            counts[kind] += len(numbers)
            if kind == "quarantine":
                failed.append(numbers)
                numbers = numbers[~among(every, numbers)]
            where.note(f"{member.key}/{path}", numbers)
    except CorruptRun as fault:
        chain.fault(f"{member.key}: {fault}")
        return
    if member.key in family.former:
        link.rows, link.skipped = len(taken[member.key]), counts["left out"]
        link.data, link.quarantined = counts["data"], counts["quarantine"]
    in_quarantine = np.sort(np.concatenate(failed))
    for key in children:
        unexpected = taken[key][~among(in_quarantine, taken[key])]
        if len(unexpected):
            chain.fault(
                f"{key} retries {name_rows(unexpected)}, which are not in the quarantine of "
                f"{member.key}"
            )
    link.retried = int(among(every, in_quarantine).sum())


class _Where:
    """Records which file of the chain holds each input row of the first run.

    `file` is uint32[rows]: an index into `names`, 0 for a row that was not found in a file yet.
    """

    def __init__(self, chain: ChainVerdict):
        self.found = chain
        self.file = np.zeros(chain.rows, np.uint32)
        self.names = [""]

    def note(self, name: str, numbers: np.ndarray) -> None:
        """Record that rows `numbers` are in file `name`.

        Adds a fault for rows beyond the input and for rows that are already in a file.
        """
        if not len(numbers):
            return
        inside = (numbers >= 0) & (numbers < len(self.file))
        if not inside.all():
            row = numbers[~inside][0]
            self.found.fault(f"{name}: row {row} is beyond the {len(self.file)} rows of the input")
            numbers = numbers[inside]
        before = self.file[numbers]
        if before.any():
            at = int(np.flatnonzero(before)[0])
            both = f"{self.names[before[at]]} and {name}"
            self.found.fault(f"row {numbers[at]} is in both {both}{_more(before)}")
        self.names.append(name)
        self.file[numbers] = len(self.names) - 1

    def all_there(self) -> None:
        missing = np.flatnonzero(self.file == 0)
        if len(missing):
            self.found.fault(f"{name_rows(missing)} are in no run")


def _more(flags: np.ndarray) -> str:
    others = int(np.count_nonzero(flags)) - 1
    return f", and so are {others:,} more rows" if others else ""
