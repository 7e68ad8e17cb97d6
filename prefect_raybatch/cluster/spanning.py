"""GPUs of several nodes for one engine: a Ray placement group for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class _Made(PlacementGroupSchedulingStrategy):
    """A scheduling strategy whose placement group is created when an actor starts in it.

    Ray Data also requests an actor's options without starting one, to watch the memory of tasks. A
    group created then would take the GPUs from the engine, and the run would hang.
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
    """The placement groups of engines that may span nodes; a call returns options for an actor.

    Ray Data calls it for each engine's actor. A group has a bundle for each of the engine's `gpus`,
    on as few nodes as possible. The actor is in the first bundle and takes its CPUs from it. vLLM
    finds the group through the actor and starts a worker in each bundle.
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
        """Release the GPUs, which Ray would keep until the driver ends."""
        while self.groups:
            group = self.groups.pop()
            if ray.is_initialized():
                with contextlib.suppress(RayError):  # the cluster is gone, with its groups
                    remove_placement_group(group)
