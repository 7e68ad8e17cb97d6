"""The Ray cluster of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import Stage
from prefect_raybatch.job.cluster_access import ClusterAccess


@dataclass(frozen=True)
class Prices:
    """What a GPU-hour costs, in any currency: `by_card` by Ray's names of cards, `hour` for all
    others; None where that is not given."""

    hour: float | None
    by_card: Mapping[str, float]

    def __bool__(self) -> bool:
        """Whether any price is given."""
        return self.hour is not None or bool(self.by_card)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The cluster that a run joins or starts, and what its CPU stages take of it.

    `name` is the job's, under which others see the run in the cluster. `engine_cpus` are the
    logical CPUs of one engine, `accelerator` is Ray's name of the GPUs asked for.
    """

    name: str
    loaded: ClusterAccess | None
    block: str | None
    prepare: Stage
    finish: Stage
    engine_cpus: float
    accelerator: str | None
    prices: Prices

    @property
    def access(self) -> ClusterAccess:
        """Return how the cluster is reached.

        Raises `ConfigError` for a block that nobody has loaded.
        """
        if self.loaded is None:
            raise ConfigError(
                f"cluster.block: {self.block} is not loaded; give the job to `with_blocks` first"
            )
        return self.loaded
