"""Describes a run that is about to start, for the rules: its work, and what fits. No I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.learning.predict import expected_ratio
from prefect_raybatch.learning.rules import TRIAL_EVERY, TRIAL_FIRST, ComingRun
from prefect_raybatch.ledger.arrangement import Arrangement, WorkKey
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import JsonObject, Plan, dump
from prefect_raybatch.model.memory import Model, gib
from prefect_raybatch.sizing.cost import Tokens
from prefect_raybatch.sizing.engines import (
    MOST_ENGINES,
    MOST_EXPERTS,
    MOST_TOTAL,
    TRIED,
    counted_cpus,
)
from prefect_raybatch.sizing.sizes import Capacity, Sizing, gpu_of, sizes_of
from prefect_raybatch.spec.sizes import SizeSpec

DECILES = tuple(range(10, 100, 10))


def arrangement_of(size: Sizing) -> Arrangement:
    """Return how many engines share a GPU in `size`, and the `max_num_seqs` of each engine."""
    return Arrangement(size.pool.engines_per_gpu, size.max_num_seqs)


def with_arrangement(spec: SizeSpec, arrangement: Arrangement) -> SizeSpec:
    """Return the size spec with the engines per GPU and `max_num_seqs` of `arrangement`."""
    return replace(
        spec,
        engines_per_gpu=arrangement.engines_per_gpu,
        max_num_seqs=arrangement.max_num_seqs,
    )


@dataclass(frozen=True)
class PlannedRows:
    """The rows of a run and its model, as its plan records them.

    `model` is the pinned model. `deciles` are the nine deciles of the shards' bytes per row,
    divided by the mean bytes per row.
    """

    rows: int
    row_bytes: float
    rows_per_shard: int
    shards: int
    model: JsonObject
    deciles: tuple[float, ...] = (1.0,) * len(DECILES)

    @classmethod
    def of(cls, plan: Plan, shards: Shards) -> PlannedRows:
        own = cls(plan.rows, plan.row_bytes, plan.rows_per_shard, plan.shards, plan.model)
        if shards.work is None:
            return own
        lengths = shards.work / np.diff(shards.starts)
        mean = float(shards.work.sum()) / plan.rows or 1.0
        return replace(own, deciles=tuple((np.percentile(lengths, DECILES) / mean).tolist()))


def coming_run_of(
    spec: SizeSpec, plan: PlannedRows, capacity: Capacity, model: Model, vllm: str
) -> ComingRun | None:
    """Describe a run with this plan; return None if it cannot learn an arrangement of engines.

    Returns None in each of these cases:
    - the job sets both the engines per GPU and `max_num_seqs`,
    - the engines run on CPUs, or their number is elastic,
    - the cost model cannot predict a rate, or chooses an arrangement that `_Sizes.fits` rejects.

    `vllm` is the version of vLLM. Raises the errors of `sizes_of`.
    """
    sizes = _Sizes(spec, plan, capacity, model)
    size, card = sizes.by_model, gpu_of(spec.accelerator, capacity).card
    is_open = spec.engines_per_gpu is None or spec.max_num_seqs is None
    if size.pool.device == "cpu" or card is None or not size.rate or not is_open:
        return None
    if size.pool.replicas[0] != size.pool.replicas[1] or not sizes.fits(arrangement_of(size)):
        return None
    return ComingRun(
        work=_work(spec, plan, capacity, size, vllm),
        model=arrangement_of(size),
        fits=sizes.fits,
        expect=partial(expected_ratio, model, card, Tokens.of(spec.row, plan.row_bytes)),
        in_flight=sizes.in_flight,
        rows=plan.rows,
        gpus=size.pool.gpus[1],
        trial_shards=len(range(TRIAL_FIRST, plan.shards, TRIAL_EVERY)),
    )


@dataclass(frozen=True)
class _Sizes:
    """Computes the sizes of a run for any arrangement of its engines."""

    spec: SizeSpec
    plan: PlannedRows
    capacity: Capacity
    model: Model

    @cached_property
    def by_model(self) -> Sizing:
        return self._of(self.spec)

    def fits(self, arrangement: Arrangement) -> bool:
        """Return whether memory, CPUs and the job's own settings allow an arrangement.

        The cost model keeps to the same limits.
        """
        if not self._may_share(arrangement) or not self._may_hold(arrangement):
            return False
        try:
            size = self._of(with_arrangement(self.spec, arrangement))
        except (ConfigError, InsufficientResources):
            return False
        return size.rate > 0 and arrangement_of(size) == arrangement

    def in_flight(self, arrangement: Arrangement) -> int:
        """Return how many shards are in the engines at once, in all engines together."""
        size = self._of(with_arrangement(self.spec, arrangement))
        return size.pool.engines * size.concurrent

    def _may_share(self, arrangement: Arrangement) -> bool:
        spec, engines = self.spec, arrangement.engines_per_gpu
        if spec.engines_per_gpu is not None or engines == 1:
            return spec.engines_per_gpu in (None, engines)
        if spec.gpus_per_replica > 1 or not 1 <= engines <= MOST_ENGINES:
            return False
        return engines * counted_cpus(spec.cpus, spec.pools) <= self.capacity.cpus_a_gpu

    def _may_hold(self, arrangement: Arrangement) -> bool:
        engines, sequences = arrangement.engines_per_gpu, arrangement.max_num_seqs
        if self.spec.max_num_seqs is not None:
            return sequences == self.spec.max_num_seqs
        most = min(TRIED[-1], MOST_EXPERTS if self.model.sparse else MOST_TOTAL // engines)
        most = min(most, self.spec.max_num_batched_tokens or most)
        return TRIED[0] <= sequences <= most

    def _of(self, spec: SizeSpec) -> Sizing:
        plan = self.plan
        return sizes_of(
            *(spec, plan.rows, plan.row_bytes, self.capacity, self.model),
            planned=plan.rows_per_shard,
        )


def _work(
    spec: SizeSpec, plan: PlannedRows, capacity: Capacity, size: Sizing, vllm: str
) -> WorkKey:
    row = Tokens.of(spec.row, plan.row_bytes)
    given = {name: str(hide_argument(value, name)) for name, value in spec.vllm_arguments.items()}
    own = (round(row.own * length, 1) for length in plan.deciles)
    return WorkKey(
        model=_digest({name: value for name, value in plan.model.items() if name != "source"}),
        vllm=vllm,
        card=f"{size.pool.kind}, {gib(size.pool.gpu_bytes)}",
        gpus=size.pool.gpus_a_replica,
        cpus=capacity.cpus_a_gpu,
        grammar=row.form,
        settings=_digest({**given, "max_num_batched_tokens": spec.max_num_batched_tokens}),
        tokens=(row.shared, round(row.expected, 1), *own),
    )


def _digest(value: dict[str, object]) -> str:
    return hashlib.sha256(dump(value)).hexdigest()[:16]
