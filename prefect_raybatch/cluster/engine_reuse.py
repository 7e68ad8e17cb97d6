"""Finds running engines that are similar enough to those that a run would start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from prefect_raybatch.cluster.warm import WarmKind
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.sizing.sizes import Sizing
from prefect_raybatch.spec.sizes import SizeSpec

log = logging.getLogger(__name__)

# Least rate of reused engines / rate of the run's own, by the cost model: its error is over 2 %.
MIN_SPEED_SHARE = 0.98


@dataclass(frozen=True)
class EngineShape:
    """The engine arguments that are chosen by the length of the rows' prompts."""

    engines_per_gpu: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, size: Sizing) -> EngineShape:
        arguments = size.arguments
        return cls(
            size.pool.engines_per_gpu, arguments.max_num_seqs, arguments.max_num_batched_tokens
        )

    @classmethod
    def of_kind(cls, kind: WarmKind) -> EngineShape | None:
        """Return the shape of engines of this kind; None if one of its arguments is unknown."""
        gpus = kind.takes.get("GPU", 0.0)
        arguments = kind.arguments
        if not {"max_num_seqs", "max_num_batched_tokens"} <= arguments.keys():
            return None
        each = round(1 / gpus) if 0 < gpus < 1 else 1
        return cls(each, arguments["max_num_seqs"], arguments["max_num_batched_tokens"])

    def asked_in(self, spec: SizeSpec) -> SizeSpec:
        """Return `spec` with this shape's arguments added, except any that `spec` sets already."""
        free = {name: to for name, to in asdict(self).items() if getattr(spec, name) is None}
        return replace(spec, **free)


def sizes_for_shape(
    spec: SizeSpec, ask: Callable[[SizeSpec], Sizing], own: Sizing, shape: EngineShape
) -> Sizing | None:
    """Return the sizes of a run with engines of this `shape`; None if the run should not use them.

    `own` are the sizes that the run would choose itself, and `ask` computes the sizes for a spec.
    Returns None if the shape does not fit, if it changes the number of replicas, or if its rate by
    the cost model is less than 98 % of the rate of `own`.
    """
    try:
        near = ask(shape.asked_in(spec))
    except (ConfigError, InsufficientResources):  # so many do not fit
        return None
    same = EngineShape.of(near) == shape and near.pool.replicas == own.pool.replicas
    return near if same and own.rate and near.rate >= MIN_SPEED_SHARE * own.rate else None


def closest_running(
    spec: SizeSpec,
    ask: Callable[[SizeSpec], Sizing],
    own: Sizing,
    kind_of: Callable[[Sizing], WarmKind | None],
    up: Iterable[WarmKind],
) -> tuple[Sizing, WarmKind | None]:
    """Return (sizes for a run, kind of its engines), with sizes of running engines if possible.

    `own` are the sizes that the run would choose itself. They are returned unless running engines
    of a kind in `up` are similar enough (see `sizes_for_shape`). `ask` computes the sizes for a
    spec. `kind_of` returns the kind of engines with given sizes, or None if such engines cannot be
    shared.
    """
    kind, waiting = kind_of(own), list(up)
    if kind is None or kind in waiting:
        return own, kind
    for other in waiting:
        shape = EngineShape.of_kind(other)
        found = sizes_for_shape(spec, ask, own, shape) if shape else None
        if found is not None and kind_of(found) == other:
            log.info(
                "reusing running engines, at about %.0f%% of the rate of new ones: they have %s",
                *(100 * found.rate / own.rate, other.differing_arguments(kind) or f"{shape}"),
            )
            return found, other
    return own, kind
