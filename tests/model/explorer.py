"""Visits all states of a model, breadth first: the shortest way to each thing that must not be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

S = TypeVar("S", bound=Hashable)
MOST_STATES = 5_000_000


@dataclass
class Explored:
    """How many states, the steps to the farthest, and those to the first with each fault."""

    states: int = 0
    depth: int = 0
    faults: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.faults:
            return f"holds in all {self.states:,} states"
        told = [f"{fault} ({len(steps)} steps)" for fault, steps in self.faults.items()]
        return f"{'; '.join(told)}, in {self.states:,} states"


def explore(
    first: S,
    following: Callable[[S], Iterable[tuple[str, S]]],
    faults_of: Callable[[S], Iterable[str]],
    enough: Collection[str] = (),
) -> Explored:
    """Every state that can be reached from `first`, also behind those that must not be; no more
    once all the faults `enough` are found."""
    came: dict[S, tuple[S, str] | None] = {first: None}
    waiting, found = deque([(first, 0)]), Explored()
    while waiting:
        state, found.depth = waiting.popleft()
        for fault in faults_of(state):
            if fault not in found.faults:
                found.faults[fault] = _way(came, state)
        if enough and set(enough) <= set(found.faults):
            break
        for label, after in following(state):
            if after not in came:
                came[after] = (state, label)
                waiting.append((after, found.depth + 1))
        if len(came) > MOST_STATES:
            raise ValueError(f"more than {MOST_STATES:,} states: make the model smaller")
    found.states = len(came)
    return found


def _way(came: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came[state]) is not None:
        state = before[0]
        steps.append(before[1])
    return tuple(reversed(steps))
