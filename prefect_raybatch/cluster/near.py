"""Running engines that are similar enough to those that a run would start, and save it the
start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from prefect_raybatch.cluster.warm import WarmKind
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.sizing.sizes import Sizing
from prefect_raybatch.spec.sizes import SizeSpec

log = logging.getLogger(__name__)

# Of the rate that a run's own engines would have, by the model of costs: it is off by more.
LEAST_OF_OWN = 0.98


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
        """Return the shape of running engines; None if it is unknown."""
        gpus = kind.takes.get("GPU", 0.0)
        arguments = kind.arguments
        if not {"max_num_seqs", "max_num_batched_tokens"} <= arguments.keys():
            return None
        each = round(1 / gpus) if 0 < gpus < 1 else 1
        return cls(each, arguments["max_num_seqs"], arguments["max_num_batched_tokens"])

    def asked_in(self, spec: SizeSpec) -> SizeSpec:
        """Return the size spec with this shape for what it leaves open."""
        free = {name: to for name, to in asdict(self).items() if getattr(spec, name) is None}
        return replace(spec, **free)


def near_sizes(
    spec: SizeSpec, ask: Callable[[SizeSpec], Sizing], own: Sizing, shape: EngineShape
) -> Sizing | None:
    """Return the sizes of a run with engines of that shape if they reach 98 % of the rate of its
    `own` by the cost model and its rows fit; else None. `ask` gives the sizes of a spec."""
    try:
        found = ask(shape.asked_in(spec))
    except (ConfigError, InsufficientResources):  # so many do not fit
        return None
    same = EngineShape.of(found) == shape and found.pool.replicas == own.pool.replicas
    return found if same and own.rate and found.rate >= LEAST_OF_OWN * own.rate else None


def nearest_up(
    spec: SizeSpec,
    ask: Callable[[SizeSpec], Sizing],
    own: Sizing,
    kind_of: Callable[[Sizing], WarmKind | None],
    up: Iterable[WarmKind],
) -> tuple[Sizing, WarmKind | None]:
    """Return the sizes of a run and the kind of its engines: running (`up`) engines if they are its
    own or similar enough, else its own."""
    kind, waiting = kind_of(own), list(up)
    if kind is None or kind in waiting:
        return own, kind
    for other in waiting:
        shape = EngineShape.of_kind(other)
        found = near_sizes(spec, ask, own, shape) if shape else None
        if found is not None and kind_of(found) == other:
            log.info(
                "engines that are up are used, for about %.0f%% of the rate of the run's own: they "
                "have %s",
                *(100 * found.rate / own.rate, other.beside(kind) or f"{shape}"),
            )
            return found, other
    return own, kind
