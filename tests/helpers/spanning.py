"""A stand-in for an engine whose GPUs are on several nodes.

vLLM's Ray executor runs on no CPU. This one starts its workers as that does: one in each bundle of
the placement group that its actor is in.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from helpers.engines import FakeEngine
from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.stages.block import lost_block_like
from prefect_raybatch.stages.engine import EngineLaunch


class SpanningEngine(FakeEngine):
    """Starts a worker in each bundle and notes their nodes. The first block it gets is lost."""

    def __init__(self, launch: EngineLaunch):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        super().__init__(launch)
        self.folder = Path(launch.env["PLACES"])
        group = ray.util.get_current_placement_group()
        self.workers = [
            ray.remote(Worker)
            .options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
            for bundle in range(len(group.bundle_specs))
        ]
        noted = {
            "own": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "workers": ray.get([worker.place.remote() for worker in self.workers]),
            "backend": launch.arguments["distributed_executor_backend"],
        }
        number = len(list(self.folder.glob("*.json")))
        (self.folder / f"{number}.json").write_text(json.dumps(noted))

    def __call__(self, table: pa.Table) -> pa.Table:
        if not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            return lost_block_like(table, Loss(ENGINE_DIED, "a worker of another node is gone"))
        return super().__call__(table)


class Worker:
    def place(self) -> tuple[str, list[str]]:
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]
