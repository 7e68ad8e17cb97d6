"""Actors that hold engines, made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect_raybatch.cluster.warm import WarmKind


class FakeHosts:
    """Hands out a number for each actor that is started, and notes those that are ended. `busy`
    have something in them, or are dead; `free` is what is left of a cluster of that size."""

    def __init__(self, cpus: float = 4.0, gpus: float = 0.0) -> None:
        self.free = {"CPU": cpus, "GPU": gpus}
        self.made: list[int] = []
        self.kinds: dict[int, WarmKind] = {}
        self.ended: list[tuple[int, bool]] = []
        self.busy: set[int] = set()

    def make(self, kind: WarmKind) -> int:
        self.made.append(len(self.made))
        self.kinds[self.made[-1]] = kind
        self._take(kind.takes, 1)
        return self.made[-1]

    def idle(self, hosts: Sequence[Any]) -> list[bool]:
        return [host not in self.busy for host in hosts]

    def end(self, hosts: Sequence[Any], kindly: bool) -> None:
        for host in hosts:
            self.ended.append((host, kindly))
            self._take(self.kinds[host].takes, -1)

    def _take(self, takes: Mapping[str, float], times: int) -> None:
        for name, value in takes.items():
            self.free[name] = self.free.get(name, 0.0) - times * value
