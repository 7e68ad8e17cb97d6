"""What befalls a few schedules as a whole: power that fails, and files that rot.

Drawn apart from all else, so that the seeds of the other schedules mean what they meant.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .watch import kind_of
from .wire import spoil
from .world import KEY, World

if TYPE_CHECKING:
    from collections.abc import Mapping

FORK = f"{KEY}.m1"


class PowerLoss:
    """The machine of a disk and of all processes on it goes off, once, at step `at`: what was not
    synced may be gone. Never where `at` is None."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"{world.scheduler.seed} power")
        likely = world.kind == "disk" and self.rng.random() < 0.35
        self.at = self.rng.randrange(10, 700) if likely else None
        world.disk.unsynced.watched = likely

    @property
    def due(self) -> bool:
        return self.at is not None and self.world.scheduler.steps >= self.at

    def strike(self) -> None:
        """After all processes are dead."""
        self.at = None
        for key in self.world.disk.lose(self.rng):
            run, _, path = key.partition("/")
            self.world.scheduler.note(f"... {key} was not synced")
            if path == "_SUCCESS":
                self.world.watch.ended.pop(run, None)


class Rot:
    """One or two files of the run, of those that it cannot make again, are lost or changed; never
    where `left` is 0."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"{world.scheduler.seed} rot")
        self.left = self.rng.choice([1, 1, 2]) if self.rng.random() < 0.2 else 0
        self.planned, self.happened = self.left > 0, False
        self.soon = self.rng.choice([0.0, 0.003, 0.03])  # of a turn

    def strike(self) -> None:
        """Now, or later where there is nothing yet that could rot."""
        files = self.world.files()
        keys = sorted(self._candidates(files))
        if not self.left or not keys:
            return
        self.left -= 1
        self.happened = True
        key = self.rng.choice(keys)
        data = files[key]
        changed: bytes | None = spoil(data, self.rng)
        if kind_of(key) == "commit":
            changed = data[: len(data) // 2]  # a bit may turn in what nothing hangs on
        if self.rng.random() < 0.5 and kind_of(key) != "commit":
            changed = None
        self.world.scheduler.note(f"... {key} is {'lost' if changed is None else 'changed'}")
        self.world.damage(key, changed)

    def _candidates(self, files: Mapping[str, bytes]) -> list[str]:
        ended = KEY in self.world.watch.ended
        kinds = {"commit", "result" if ended and self.world.compact else "pieces"}
        commits = [files[key] for key in files if kind_of(key) == "commit"]
        return [
            key
            for key in files
            if key.startswith(f"{KEY}/")
            and kind_of(key) in kinds
            and (kind_of(key) != "pieces" or _named(key, commits))
        ]


def _named(piece: str, commits: list[bytes]) -> bool:
    name = piece.rpartition("/")[2].encode()
    return any(name in body for body in commits)
