"""How far engines may run ahead of the commits: a backpressure policy for Ray Data.

What an engine has answered and nobody has committed is inferred again after a crash. Ray itself
bounds that in bytes only, which is nothing for short rows: while the first finish worker starts,
engines could answer the whole input (tried: 1,000 of 1,200 rows were lost to one kill).
"""

from __future__ import annotations

from typing import Any

from ray.data import DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

BLOCKS = "prefect_raybatch.window"


def limit_in_flight(context: DataContext, blocks: int) -> None:
    """Lets at most `blocks` shards be between an engine's door and the driver, in `context`."""
    context.set_config(BLOCKS, blocks)
    context.set_config(
        ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, Window]
    )


class Window(BackpressurePolicy):
    """Gives engines no new block while too many are in them or behind them.

    Counts what is there now, never what came in less what went out: a block that was lost with its
    engine would be counted for ever.
    """

    def can_add_input(self, op: Any) -> bool:
        if not isinstance(op, ActorPoolMapOperator):
            return True
        behind = sum(self._held(stage) for stage in _after(op))
        held = op.num_active_tasks() + self._topology[op].total_enqueued_output_blocks() + behind
        return bool(held < self._data_context.get_config(BLOCKS, held + 1))

    def _held(self, op: Any) -> int:
        """Blocks in a stage after the engine; what waits before it is its predecessor's output."""
        inside = getattr(op, "internal_input_queue_num_blocks", lambda: 0)()
        waiting = self._topology[op].total_enqueued_output_blocks()
        return int(inside + op.num_active_tasks() + waiting)


def _after(op: Any) -> list[Any]:
    """The operators after `op`, which form a line."""
    found = []
    while op.output_dependencies:
        op = op.output_dependencies[0]
        found.append(op)
    return found
