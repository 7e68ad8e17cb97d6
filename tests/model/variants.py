"""The variants of the protocol that were weighed, and what is known of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from . import ledger
from .explorer import Explored, explore
from .ledger import Rules

BAD = "bad bytes are readable"
DOUBLED = "a reader that globs doubles rows"
OTHERS = "the files are not those that _SUCCESS names"
LOST = "the result is lost"
PIECE = "the piece that a shard is committed with is gone"
UNNAMED = "_SUCCESS does not name each row once"
TWICE = "a row is retried twice"

# By module, the invariant of the TLA+ that each fault breaks.
INVARIANTS = {
    "Ledger": {
        BAD: "Sound",
        DOUBLED: "Single",
        OTHERS: "Named",
        LOST: "Lasting",
        PIECE: "Kept",
        UNNAMED: "Whole",
    },
    "Retry": {TWICE: "Once"},
}


@dataclass(frozen=True)
class Variant:
    """Rules, and every fault that their states have. `large`: a minute of states."""

    name: str
    rules: Rules
    faults: tuple[str, ...] = ()
    large: bool = False
    module: ClassVar[str] = "Ledger"

    def explored(self, enough: Collection[str] = ()) -> Explored:
        rules = self.rules
        following, faults_of = partial(ledger.following, rules), partial(ledger.faults_of, rules)
        return explore(ledger.first(rules), following, faults_of, enough)

    def constants(self) -> dict[str, str]:
        rules = self.rules
        texts = {"Parts": f'"{rules.parts}"', "Reap": f'"{rules.reap}"'}
        flags = {"Layout": rules.layout, "Committed": rules.committed}
        texts |= {name: str(flag).upper() for name, flag in flags.items()}
        return texts | {n.title(): str(getattr(rules, n)) for n in ("spoil", "repeat", "stale")}


@dataclass(frozen=True)
class Retrying:
    """Retries that ask for each number, or believe a listing."""

    name: str
    asked: bool
    faults: tuple[str, ...] = ()
    large: bool = False
    module: ClassVar[str] = "Retry"

    def explored(self, enough: Collection[str] = ()) -> Explored:
        following = partial(ledger.following_retries, self.asked)
        return explore(ledger.first_retries(), following, ledger.faults_of_retries, enough)

    def constants(self) -> dict[str, str]:
        return {"Asked": str(self.asked).upper(), "Stale": "1"}


VARIANTS = (
    Variant("plain PUT, fixed names", Rules("plain", committed=True), (BAD, OTHERS)),
    Variant(
        "names by content, others tidied away",
        Rules("content", committed=True),
        (BAD, DOUBLED, LOST, OTHERS),
    ),
    Variant(
        "put-if-absent, a bad part deleted", Rules("deleted", committed=True), (BAD, LOST, OTHERS)
    ),
    Variant("put-if-absent and If-Match", Rules(committed=True)),
    Variant("no common layout", Rules(layout=False, committed=True), (BAD, DOUBLED, OTHERS)),
    Variant("reap by age", Rules(reap="age", spoil=0, repeat=0), (PIECE,)),
    Variant("commits, reap and a stale list", Rules(spoil=0, repeat=0), large=True),
    Variant("all of it", Rules(), large=True),
)
RETRIES = (
    Retrying("retries ask for each number", True),
    Retrying("retries believe a listing", False, (TWICE,)),
)
