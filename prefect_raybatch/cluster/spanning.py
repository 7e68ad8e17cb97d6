"""Lets one engine use GPUs of several nodes, by a Ray placement group for each engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class _Made(PlacementGroupSchedulingStrategy):
    """A scheduling strategy that creates its placement group when an actor starts with it.

    Ray Data also asks for an actor's options without starting an actor, to measure the memory of
    tasks. If the group were created then, it would take the GPUs from the engine, and the run would
    hang.
    """

    def __init__(self, make: Callable[[], PlacementGroup]):
        self._make = make
        self._group: PlacementGroup | None = None
        self.placement_group_bundle_index = 0
        self.placement_group_capture_child_tasks = True

    @property
    def placement_group(self) -> PlacementGroup:  # type: ignore[override]
        if self._group is None:
            self._group = self._make()
        return self._group


class SpanningGroups:
    """Creates a placement group for each engine that may span nodes.

    Ray Data calls the object for the options of each engine's actor. A group has one bundle for
    each of the engine's `gpus` GPUs, on as few nodes as possible. The actor is in the first bundle,
    which also has the actor's `num_cpus`. vLLM finds the group through the actor and starts a
    worker in each bundle.
    """

    def __init__(self, gpus: int, num_cpus: float, accelerator: str | None = None):
        bundle: dict[str, float] = {"GPU": 1}
        if accelerator:
            bundle[f"accelerator_type:{accelerator}"] = 0.001
        first = {**bundle, **({"CPU": num_cpus} if num_cpus else {})}
        self.bundles = [first, *[dict(bundle) for _ in range(gpus - 1)]]
        self.groups: list[PlacementGroup] = []

    def __call__(self) -> dict[str, _Made]:
        return {"scheduling_strategy": _Made(self._make)}

    def _make(self) -> PlacementGroup:
        self.groups.append(placement_group(self.bundles, strategy="PACK"))
        return self.groups[-1]

    def remove(self) -> None:
        """Remove the groups, to release their GPUs; Ray would keep them until the driver ends."""
        while self.groups:
            group = self.groups.pop()
            if ray.is_initialized():
                with contextlib.suppress(RayError):  # the cluster is gone, with its groups
                    remove_placement_group(group)
