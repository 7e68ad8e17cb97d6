"""Actors that hold engines, made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_raybatch.cluster.warm import WarmKind


class FakeHosts:
    """Hands out a number for each actor that is started, and notes those that are ended. `busy`
    have something in them, or are dead; the nodes of `going` leave; `free` is what is left of a
    cluster of that size; `specs` are those of early starts, of which `starting` are not over;
    earlier commands have `left` some."""

    def __init__(self, cpus: float = 4.0, gpus: float = 0.0) -> None:
        self.free = {"CPU": cpus, "GPU": gpus}
        self.made: list[int] = []
        self.left: list[tuple[WarmKind, int]] = []
        self.kinds: dict[int, WarmKind] = {}
        self.ended: list[tuple[int, bool]] = []
        self.busy: set[int] = set()
        self.going: set[int] = set()
        self.specs: dict[int, Any] = {}
        self.starting: set[int] = set()

    def make(self, kind: WarmKind) -> int:
        self.made.append(len(self.made))
        self.kinds[self.made[-1]] = kind
        self._take(kind.takes, 1)
        return self.made[-1]

    def begin(self, host: int, spec: Any) -> int:
        self.specs[host] = spec
        return host

    def begun(self, starts: Sequence[int]) -> bool:
        return not self.starting & set(starts)

    def idle(self, hosts: Sequence[Any]) -> list[bool]:
        return [host not in self.busy | self.going for host in hosts]

    def on_drained_nodes(self, hosts: Sequence[Any]) -> list[bool]:
        return [host in self.going for host in hosts]

    def leftover_hosts(self) -> list[tuple[WarmKind, int]]:
        return list(self.left)

    def end(self, hosts: Sequence[Any], kindly: bool) -> None:
        for host in hosts:
            self.ended.append((host, kindly))
            self._take(self.kinds[host].takes, -1)

    def _take(self, takes: Mapping[str, float], times: int) -> None:
        for name, value in takes.items():
            self.free[name] = self.free.get(name, 0.0) - times * value


class Handle:
    """A class's object as Ray hands out its actors; a call is done at once, in this thread."""

    def __init__(self, held: Any) -> None:
        self.held, self.killed = held, False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.held, name))


def calls_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls for actors that are `Handle`s."""
    monkeypatch.setattr("ray.get", lambda answer, **_: answer)
    monkeypatch.setattr("ray.wait", lambda waiting, **_: (waiting[:1], waiting[1:]))
    monkeypatch.setattr("ray.kill", lambda handle: setattr(handle, "killed", True))
    here = SimpleNamespace(get_actor_id=lambda: "me")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
