"""What lies between the processes and the files: who asks what when, and what goes wrong there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from random import Random
from typing import Any, NamedTuple

from .scheduler import Scheduler
from .watch import Watch, kind_of

# What a store may keep badly: all that is proved as it is written. A plan or a commit cannot be.
PROVED = ("pieces", "result", "row_sums", "input", "table")


@dataclass
class Weather:
    """What goes wrong in a schedule, as probabilities of a request."""

    crash: float = 0.0
    stop: float = 0.0  # frozen, to go on later
    wake: float = 0.02  # of a frozen process, a turn
    unsent: float = 0.0  # no answer, nothing done
    unheard: float = 0.0  # done, and the answer lost
    replayed: float = 0.0  # a PUT arrives once more, later
    stale: float = 0.0  # a listing of before
    spoiled: float = 0.0  # other bytes are kept than were sent
    clock: float = 0.0  # of a machine is set back

    @property
    def clear(self) -> bool:
        """Nothing happens of which a process may rightly say that the run is damaged."""
        return not (self.stale or self.spoiled)


class File(NamedTuple):
    data: bytes
    etag: str
    modified: float


@dataclass
class Wire:
    """The files of a store that keeps its promises, and the requests on their way to it."""

    scheduler: Scheduler
    weather: Weather
    watch: Watch
    files: dict[str, File] = field(default_factory=dict)
    journal: list[tuple[str, File | None]] = field(default_factory=list)  # what was there before
    late: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    spoiled: int = 0

    def happens(self, name: str) -> bool:
        """Draws whether the fault `name` befalls the request of the process that runs."""
        scheduler = self.scheduler
        if not scheduler.inside or not scheduler.process.disturbed:
            return False
        rate = getattr(self.weather, name)
        if not rate or scheduler.rng.random() >= rate:
            return False
        scheduler.note(f"{scheduler.process}   ... {name}")
        return True

    def asked(self, what: str, apply: Callable[[], Any]) -> Any:
        """A request that may be repeated at will."""
        self.scheduler.point(what)
        if self.happens("unsent"):
            raise ConnectionResetError(f"no answer to {what}")
        found = apply()
        if self.happens("unheard"):
            raise ConnectionResetError(f"the answer to {what} was lost")
        return found

    def sent(self, what: str, key: str, apply: Callable[[bytes], Any], data: bytes) -> Any:
        """A PUT: it may arrive twice, the second time at any later moment."""
        self.scheduler.point(what)
        if self.happens("replayed"):
            self.late.append((what, lambda: apply(data)))
        if self.happens("unsent"):
            raise ConnectionResetError(f"no answer to {what}")
        kept = data
        if self.may_spoil(key) and self.happens("spoiled"):
            kept = spoil(data, self.scheduler.rng)
            self.spoiled += 1
        found = apply(kept)
        if self.happens("unheard"):
            raise ConnectionResetError(f"the answer to {what} was lost")
        return found

    def may_spoil(self, key: str) -> bool:
        return self.spoiled < 2 and kind_of(key) in PROVED

    def deliver(self) -> None:
        """One of the late requests arrives."""
        what, apply = self.late.pop(self.scheduler.rng.randrange(len(self.late)))
        self.scheduler.note(f"late: {what}")
        try:
            apply()
        except Exception as refused:
            self.scheduler.note(f"  refused: {refused}")

    def write(self, key: str, data: bytes) -> File:
        before = self.files.get(key)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.files[key] = File(data, etag, self.scheduler.now)
        self.journal.append((key, before))
        self.watch.changed(key, before and before.data, data)
        return self.files[key]

    def remove(self, key: str) -> None:
        before = self.files.pop(key, None)
        if before is not None:
            self.journal.append((key, before))
            self.watch.changed(key, before.data, None)

    def shown(self, prefix: str) -> dict[str, File]:
        """The files below `prefix`, or those of a moment ago."""
        found = {key: file for key, file in self.files.items() if key.startswith(prefix)}
        if self.happens("stale"):
            recent = [at for at, (key, _) in enumerate(self.journal) if key.startswith(prefix)]
            for at in reversed(recent[-self.scheduler.rng.randrange(1, 9) :]):
                key, before = self.journal[at]
                if before is None:
                    found.pop(key, None)
                else:
                    found[key] = before
        return found

    def date(self) -> str:
        return formatdate(self.scheduler.now, usegmt=True)


def spoil(data: bytes, rng: Random) -> bytes:
    """`data` with a bit turned, or cut off."""
    at = rng.randrange(len(data)) if data else 0
    return data[:at] + (bytes([data[at] ^ 1]) + data[at + 1 :] if rng.random() < 0.7 else b"")
