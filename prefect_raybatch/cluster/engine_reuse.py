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

# Share of the rate of a run's own engines, by the cost model, whose error is larger than the loss.
MIN_SPEED_SHARE = 0.98


@dataclass(frozen=True)
class EngineShape:
    """The engine arguments that follow from the length of rows."""

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
        """Return the shape of running engines of a `kind`; None if it is unknown."""
        gpus = kind.takes.get("GPU", 0.0)
        arguments = kind.arguments
        if not {"max_num_seqs", "max_num_batched_tokens"} <= arguments.keys():
            return None
        each = round(1 / gpus) if 0 < gpus < 1 else 1
        return cls(each, arguments["max_num_seqs"], arguments["max_num_batched_tokens"])

    def asked_in(self, spec: SizeSpec) -> SizeSpec:
        """Return the size spec with this shape in the fields that are None."""
        free = {name: to for name, to in asdict(self).items() if getattr(spec, name) is None}
        return replace(spec, **free)


def sizes_for_shape(
    spec: SizeSpec, ask: Callable[[SizeSpec], Sizing], own: Sizing, shape: EngineShape
) -> Sizing | None:
    """Return the sizes of a run with engines of a `shape`, if almost as fast as its `own` sizes.

    None if they do not reach 98 % of its rate by the cost model, or if the rows do not fit. `ask`
    returns the sizes of a spec.
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
    """Return the sizes of a run, and the kind of its engines (None for a run without engines).

    Prefers the sizes of running engines (`up`, their kinds) that are similar enough to the engines
    of `own`, the sizes that the run would choose itself (see `sizes_for_shape`). `ask` returns the
    sizes of a spec, `kind_of` the kind of engines with given sizes.
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
